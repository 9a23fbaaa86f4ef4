"""The page at ``/ui``: its files, and the state that it asks for each second.

Everything comes from this router, nothing from elsewhere: the policy in ``_PAGE`` forbids the browser the rest.
The state holds no prompt and no answer.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from weir.rpc.v1 import common_pb2
from weir.services.router.fleet import WorkerView
from weir.services.router.http_exchange import Exchange
from weir.services.router.router import Router
from weir.services.router.traces import STAGES, TraceRecord

REQUESTS_SHOWN = 100
TRACES_SHOWN = 12
FOLDER = Path(__file__).with_name("ui")
BLOCK_STATES = ("free", "used", "cached", "leased", "quarantined", "total")

_GUARDED = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
_PAGE = {
    **_GUARDED,
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
_STATE = {**_GUARDED, "cache-control": "no-store", "content-type": "application/json"}
_FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
    "/ui/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/ui/token.js": ("token.js", "text/javascript; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
}

Handler = Callable[[Exchange], Awaitable[None]]


def ui_routes(router: Router) -> dict[str, Handler]:
    """Paths and what answers them, all by GET. Reads the files of the page, which the package must hold."""
    routes: dict[str, Handler] = {"/ui/state": lambda exchange: _show_state(router, exchange)}
    for path, (name, content_type) in _FILES.items():
        headers = {**_PAGE, "content-type": content_type}
        routes[path] = partial(_show_file, headers, (FOLDER / name).read_bytes())
    return routes


async def _show_file(headers: dict[str, str], body: bytes, exchange: Exchange) -> None:
    await exchange.respond(200, headers, body)


async def _show_state(router: Router, exchange: Exchange) -> None:
    await exchange.respond(200, _STATE, orjson.dumps(ui_state(router)))


def ui_state(router: Router) -> dict[str, Any]:
    """What the page draws, as values that JSON has: workers by id, requests oldest first, traces newest first.

    ``requests`` holds at most ``REQUESTS_SHOWN``; ``router.active_requests`` counts all of them.
    """
    state = router.state()
    oldest = sorted(state.requests, key=lambda request: -request.age_ms)[:REQUESTS_SHOWN]
    views = sorted(router.fleet, key=lambda view: (view.key.worker_id, view.key.incarnation))
    return {
        "unready": router.unready_reason(),
        "stale": router.fleet.stale,
        "models": [{"name": model.name, "context_tokens": model.context_tokens} for model in router.models()],
        "router": {
            "active_requests": state.active_requests,
            "queued_requests": state.queued_requests,
            "open_sessions": state.open_sessions,
            "ended": state.ended,
        },
        "workers": [_worker(view) for view in views],
        "requests": [asdict(request) for request in oldest],
        "traces": [_trace(record) for record in router.recent_traces(TRACES_SHOWN)],
    }


def _worker(view: WorkerView) -> dict[str, Any]:
    """``reported_s``, on the router's monotonic clock, dates the counters; None before the first report."""
    info = view.info
    report = view.load.report if view.load.report is not None else common_pb2.WorkerLoad()
    leaving = info.draining or not view.listed
    return {
        "worker_id": info.key.worker_id,
        "incarnation": str(info.key.incarnation),  # 64 bits: more than a number holds in JavaScript
        "role": info.role.value,
        "role_epoch": info.role_epoch,
        "model": info.model,
        "state": "draining" if leaving else "ready" if view.connected else "connecting",
        "reported_s": view.load_s if math.isfinite(view.load_s) else None,
        "running": report.running,
        "waiting": report.waiting,
        "pending_prefill_tokens": report.pending_prefill_tokens,
        "blocks": {name: getattr(report.blocks, name) for name in BLOCK_STATES},
        "block_bytes": info.block_size * info.kv_bytes_per_token,
        "open_leases": report.open_leases,
        "outstanding_reads": report.outstanding_reads,
        "decode_step_ms": report.decode_step_ms,
        "prefill_tokens_per_s": report.prefill_tokens_per_s,
        "prefilled_tokens": report.prefilled_tokens,
        "generated_tokens": report.generated_tokens,
    }


def _trace(record: TraceRecord) -> dict[str, Any]:
    end, times, usage = record.end, record.end.timings, record.usage
    kv: Any = times.kv_read
    return {
        "request_id": end.request_id,
        "state": end.state.value,
        "error": "" if end.error is None else str(end.error),
        "received_unix_s": record.accepted.created_unix_s,
        "attempts": times.attempts,
        "prefill_worker": times.prefill_worker,
        "decode_worker": times.decode_worker,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "ttft_ms": times.ttft_ms,
        "tpot_ms": times.tpot_ms,
        "e2e_ms": times.e2e_ms,
        "stages_ms": {name: getattr(times, f"{name}_ms") for name in STAGES},
        "kv_read": None if kv is None else {"bytes": kv.bytes, "busy_ms": kv.busy_ms, "exposed_ms": kv.exposed_ms},
    }
