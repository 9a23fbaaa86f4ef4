"""What ``/ui/state`` says, value for value; and the files of the page: what they may load and how they show data."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from weir.clock import ManualClock
from weir.errors import ResourceExhausted
from weir.ids import WorkerKey
from weir.lifecycle import FinishReason, RequestState, Role
from weir.rpc.v1 import common_pb2
from weir.services.router.answer import Accepted, ActiveRequest, ModelInfo, RouterState, Usage
from weir.services.router.commands import End
from weir.services.router.fleet import Fleet, WorkerInfo
from weir.services.router.http_exchange import Exchange, Head
from weir.services.router.http_ui import FOLDER, REQUESTS_SHOWN, TRACES_SHOWN, ui_routes, ui_state
from weir.services.router.intake import Ask, TextPrompt
from weir.services.router.router import Router
from weir.services.router.timings import Served, Stamps, measure
from weir.services.router.traces import RequestTraces, TraceRecord
from weir.services.router.view import load_of
from weir.telemetry.spans import Tracer

RECEIVED_S = 10.0
ONE = ActiveRequest("r-7", "decoding", 2, "p1", "d1", 5, 812.5)
KV: Any = SimpleNamespace(bytes=1_474_560, busy_ms=2.5, exposed_ms=0.5)


class PaperRouter(Router):
    """Only what the page asks a router for."""

    def __init__(self, *requests: ActiveRequest) -> None:
        self._fleet = Fleet()
        self.requests = requests
        clock = ManualClock(RECEIVED_S)
        self._traces = RequestTraces(Tracer("router", clock, random.Random(1).getrandbits), clock, 64)

    def state(self) -> RouterState:
        return RouterState(len(self.requests), 1, 4, 9, {"finished": 3}, self.requests)

    def models(self) -> list[ModelInfo]:
        return [ModelInfo("toy", 128, "llama", 7)]

    def unready_reason(self) -> str | None:
        return None

    def remember(self, request_id: str, error: ResourceExhausted | None = None) -> None:
        stamps = Stamps(RECEIVED_S, 10.1, dispatched_s=10.2, first_s=11.0, second_s=11.5)
        stamps.worker_queue_ms, stamps.worker_prefill_ms = 50.0, 600.0
        timings = measure(stamps, end_s=13.5, tokens=5, served=Served(KV, "p1", "d1", 1))
        usage = Usage(100, 5, 0, 60, 0, 40)
        state = RequestState.FINISHED if error is None else RequestState.REJECTED
        reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
        end = End(request_id, state, reason, error, "", usage, timings)
        trace = self._traces.open(Ask(TextPrompt("a secret")), 5, RECEIVED_S)
        self._traces._keep(TraceRecord(trace, Accepted(request_id, 100, "toy", 1.7e9), end, reason, usage))


def info(name: str, role: Role) -> WorkerInfo:
    return WorkerInfo(
        key=WorkerKey(name, (1 << 63) + 1), role=role, role_epoch=4, address="h:1", draining=False, model="toy",
        fingerprint=b"f", block_size=16, num_blocks=40, context_tokens=128, kv_bytes_per_token=46_080.0,
    )  # fmt: skip


def report() -> common_pb2.WorkerLoad:
    blocks = common_pb2.BlockCounts(free=20, used=9, cached=6, leased=4, quarantined=1, total=40)
    return common_pb2.WorkerLoad(
        sequence=3, running=2, waiting=1, pending_prefill_tokens=70, blocks=blocks, open_leases=2, outstanding_reads=1,
        decode_step_ms=12.5, prefill_tokens_per_s=640.0, generated_tokens=55, prefilled_tokens=900,
    )  # fmt: skip


def test_a_worker_is_shown_as_it_last_reported() -> None:
    router = PaperRouter()
    view = router.fleet.put(info("d1", Role.DECODE))
    view.connected = True
    view.take_report(load_of(report()), 21.25)
    (worker,) = ui_state(router)["workers"]
    assert worker == {
        "worker_id": "d1",
        "incarnation": "9223372036854775809",
        "role": "decode",
        "role_epoch": 4,
        "model": "toy",
        "state": "ready",
        "reported_s": 21.25,
        "running": 2,
        "waiting": 1,
        "pending_prefill_tokens": 70,
        "blocks": {"free": 20, "used": 9, "cached": 6, "leased": 4, "quarantined": 1, "total": 40},
        "block_bytes": 737_280.0,
        "open_leases": 2,
        "outstanding_reads": 1,
        "decode_step_ms": 12.5,
        "prefill_tokens_per_s": 640.0,
        "prefilled_tokens": 900,
        "generated_tokens": 55,
    }


def test_workers_come_by_id_each_with_its_state() -> None:
    router = PaperRouter()
    for name in ("w3", "w1", "w2"):
        router.fleet.put(info(name, Role.MIXED)).connected = name != "w3"
    router.fleet.put(replace(info("w2", Role.MIXED), draining=True))
    shown = ui_state(router)["workers"]
    assert [(worker["worker_id"], worker["state"]) for worker in shown] == [
        ("w1", "ready"), ("w2", "draining"), ("w3", "connecting"),
    ]  # fmt: skip
    assert {worker["reported_s"] for worker in shown} == {None}, "before the first report there is no time of it"


def test_the_router_its_models_and_requests() -> None:
    state = ui_state(PaperRouter(ONE))
    assert {name: state[name] for name in ("unready", "stale", "models", "router", "requests")} == {
        "unready": None,
        "stale": False,
        "models": [{"name": "toy", "context_tokens": 128}],
        "router": {"active_requests": 1, "queued_requests": 1, "open_sessions": 4, "ended": {"finished": 3}},
        "requests": [
            {
                "request_id": "r-7",
                "state": "decoding",
                "attempt": 2,
                "prefill_worker": "p1",
                "decode_worker": "d1",
                "tokens_sent": 5,
                "age_ms": 812.5,
            }
        ],
    }


def test_only_the_oldest_requests_are_listed_and_all_are_counted() -> None:
    many = [replace(ONE, request_id=f"r-{age}", age_ms=float(age)) for age in range(REQUESTS_SHOWN + 50)]
    random.Random(3).shuffle(many)
    state = ui_state(PaperRouter(*many))
    assert [request["age_ms"] for request in state["requests"]] == [float(age) for age in range(149, 49, -1)]
    assert state["router"]["active_requests"] == 150


def test_traces_come_newest_first_with_stages_that_add_up() -> None:
    router = PaperRouter()
    for number in range(TRACES_SHOWN + 3):
        router.remember(f"r-{number}")
    traces = ui_state(router)["traces"]
    assert [trace["request_id"] for trace in traces] == [f"r-{number}" for number in range(14, 2, -1)]
    trace = traces[0]
    assert sum(trace["stages_ms"].values()) == pytest.approx(trace["e2e_ms"]) == pytest.approx(3500.0)
    assert {name: round(length, 6) for name, length in trace.pop("stages_ms").items()} == {
        "admit": 100.0, "queue": 150.0, "prefill": 600.0, "first_token": 150.0, "second_token": 500.0, "decode": 2000.0,
    }  # fmt: skip
    assert trace == {
        "request_id": "r-14",
        "state": "finished",
        "error": "",
        "received_unix_s": 1.7e9,
        "attempts": 1,
        "prefill_worker": "p1",
        "decode_worker": "d1",
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "ttft_ms": 1000.0,
        "tpot_ms": 625.0,
        "e2e_ms": 3500.0,
        "kv_read": {"bytes": 1_474_560, "busy_ms": 2.5, "exposed_ms": 0.5},
    }


def test_a_refused_request_says_why_and_no_prompt_is_shown() -> None:
    router = PaperRouter()
    router.remember("r-1", ResourceExhausted("9 requests wait: at most 8"))
    state = ui_state(router)
    assert (state["traces"][0]["state"], state["traces"][0]["error"]) == ("rejected", "9 requests wait: at most 8")
    assert "a secret" not in json.dumps(state)


async def test_state_and_page_are_answered_with_guarding_headers() -> None:
    router = PaperRouter(ONE)
    for path, handler in ui_routes(router).items():
        wire = PaperWire()
        await handler(Exchange(Head("GET", path), wire, 0))
        head, _, body = wire.sent.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        assert (status, headers["x-content-type-options"]) == ("HTTP/1.1 200 OK", "nosniff")
        if path == "/ui/state":
            assert headers["content-type"] == "application/json"
            assert headers["cache-control"] == "no-store"
            assert orjson.loads(body) == ui_state(router)
        else:
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert "unsafe" not in policy


class PaperWire:
    """Keeps what is sent."""

    paused = False
    date = b""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def ended(self, exchange: Exchange, *, keep_alive: bool) -> None:
        pass

    def cut(self) -> None:
        raise AssertionError("the answer is complete")


def test_the_page_loads_only_its_own_files_and_never_makes_markup_of_data() -> None:
    html = (FOLDER / "index.html").read_text()
    loaded = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert sorted(loaded) == ["/ui/chat.js", "/ui/page.css", "/ui/page.js", "data:,"]
    assert set(loaded) - {"data:,"} <= set(ui_routes(PaperRouter()))
    assert set(ui_routes(PaperRouter())) - {"/ui", "/ui/state"} == {f"/ui/{path.name}" for path in FOLDER.iterdir()} - {
        "/ui/index.html"
    }
    assert " style=" not in html
    assert "onclick" not in html
    for path in FOLDER.iterdir():
        text = path.read_text()
        found = re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?://|//cdn|@import", text)
        assert found == [], path.name
