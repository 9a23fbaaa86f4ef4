"""``/ui`` in a real browser and ``weir top`` in a pipe, before a running cluster."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.chromium import Page, find_chromium
from tests.e2e.conftest import MODEL_NAME
from tests.e2e.quiet import assert_quiet
from weir.cli.cluster import Cluster

browser = pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")
pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION = "What is a <b>weir</b>?"
WIDTH, HEIGHT = 1280, 800
MOST_BYTES = 300_000
STATUS = "document.getElementById('status').textContent"
IDLE = "document.getElementById('requests').textContent === 'no request is in flight'"
ASK = """
document.getElementById('question').value = {question!r};
document.getElementById('max_tokens').value = {tokens};
document.getElementById('ask').requestSubmit();
"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with Page(tmp_path / "profile", WIDTH, HEIGHT) as it:
        yield it


def ask_others(address: str) -> list[threading.Thread]:
    """Two more requests at the same time."""

    def ask(question: str) -> None:
        messages = [{"role": "user", "content": question}]
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 60}
        httpx.post(f"http://{address}/v1/chat/completions", json=body, timeout=120, trust_env=False).raise_for_status()

    threads = [
        threading.Thread(target=ask, args=(text,)) for text in ("Tell me about rivers. " * 30, "What is a lock?")
    ]
    for thread in threads:
        thread.start()
    return threads


def look_and_talk(page: Page, address: str, picture: Path) -> None:
    page.open(f"http://{address}/ui")
    page.wait(f"{STATUS} === 'serving'", "the state")
    rows = page.value("[...document.querySelectorAll('#workers tr')].map((row) => row.cells[1].textContent)")
    assert sorted(rows) == ["decode", "prefill"]
    others = ask_others(address)
    page.value(ASK.format(question=QUESTION, tokens=200))
    page.wait("document.querySelector('.said.assistant')?.textContent.length > 100", "the answer's text")
    page.wait("document.querySelectorAll('#requests .stage').length > 0", "a request in flight with its stage")
    page.screenshot(picture)
    assert page.value("document.querySelector('.said.user').textContent") == QUESTION
    assert page.value("document.querySelector('.said.user').children.length") == 0, "what is said is never markup"
    page.value("document.getElementById('ask').requestSubmit()")
    page.wait("document.querySelector('.note').textContent === 'stopped'", "the end of the stream")
    for other in others:
        other.join()
    page.wait(IDLE, "the end of all requests")
    ends = page.value("[...document.querySelectorAll('#traces tr')].map((row) => row.cells[1].textContent)")
    assert sorted(ends) == ["cancelled", "finished", "finished"]
    assert page.complaints == []
    assert {url for url in page.requests if not url.startswith(f"http://{address}/")} <= {"data:,"}


@browser
async def test_the_page_shows_a_chat_in_flight_and_stops_it(pair: Cluster, page: Page, tmp_path: Path) -> None:
    picture = tmp_path / "ui.png"
    await asyncio.to_thread(look_and_talk, page, pair.http_address, picture)
    seen = picture.read_bytes()
    assert seen.startswith(b"\x89PNG")
    assert (int.from_bytes(seen[16:20], "big"), int.from_bytes(seen[20:24], "big")) == (WIDTH, HEIGHT)
    assert len(seen) < MOST_BYTES
    await assert_quiet(pair)


def answer_whole(page: Page, address: str) -> str:
    page.open(f"http://{address}/ui")
    page.wait("document.getElementById('models').value", "the models")
    page.value(ASK.format(question="Name a planet.", tokens=4))
    note: str = page.wait("document.querySelector('.note')?.textContent.includes('tok/s')"
                          " && document.querySelector('.note').textContent", "the figures")  # fmt: skip
    assert page.value("document.getElementById('send').textContent") == "Send"
    return note


@browser
async def test_an_answer_ends_with_its_figures(pair: Cluster, page: Page) -> None:
    note = await asyncio.to_thread(answer_whole, page, pair.http_address)
    assert "→ 4 tokens" in note
    await assert_quiet(pair)


def lose_and_find(page: Page, address: str) -> tuple[str, str]:
    page.open(f"http://{address}/ui")
    page.wait(f"{STATUS} === 'serving'", "the state")
    conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **conditions)
    page.wait(f"{STATUS}.startsWith('the router does not answer')", "the loss")
    page.call("Network.emulateNetworkConditions", offline=False, **conditions)
    page.wait(f"{STATUS} === 'serving'", "the state again")
    colours = []
    for dark in (False, True):
        page.dark(dark)
        colours.append(page.value("getComputedStyle(document.body).backgroundColor"))
    assert page.value("document.documentElement.scrollWidth") == WIDTH, "nothing is cut off at this size"
    return colours[0], colours[1]


@browser
async def test_a_router_out_of_reach_is_said_and_looked_for_in_light_and_dark(pair: Cluster, page: Page) -> None:
    assert await asyncio.to_thread(lose_and_find, page, pair.http_address) == ("rgb(245, 246, 248)", "rgb(16, 20, 26)")


async def test_top_prints_a_frame(pair: Cluster) -> None:
    command = [sys.executable, "-m", "weir.cli.main", "top", "--once", "--interval-s", "0.2"]
    command += ["--router", pair.router_address, "--controller", pair.controller_address]
    environment = {**os.environ, "TERM": "dumb"}
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    for words in ("in flight", "stock", "headroom", "KV read/s", "requests  none in flight", "decisions, mode off"):
        assert words in done.stdout, done.stdout
    for worker_id in pair.worker_addresses:
        assert worker_id in done.stdout


async def test_top_without_a_router_says_so() -> None:
    command = [sys.executable, "-m", "weir.cli.main", "top", "--once", "--router", "127.0.0.1:1"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
