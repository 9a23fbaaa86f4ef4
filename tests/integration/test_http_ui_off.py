"""The page can be turned off; the rest of the door stays."""

from __future__ import annotations

import httpx

from tests.integration.scripted_router import ScriptedRouter, piece
from weir.services.router.http_door import HttpDoor


async def statuses(*paths: str, ui: bool) -> list[int]:
    """Of one GET each."""
    door = HttpDoor(
        ScriptedRouter(), piece=piece, healthy=lambda: None, metrics=lambda: (b"x 1\n", "text/plain"), ui=ui
    )
    address = await door.start("127.0.0.1:0")
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20, trust_env=False) as http:
            return [(await http.get(path)).status_code for path in paths]
    finally:
        await door.stop(0.0)


async def test_without_ui_there_is_no_page_and_no_state() -> None:
    assert await statuses("/ui", "/ui/page.js", "/ui/state", "/metrics", ui=False) == [404, 404, 404, 200]
    assert await statuses("/ui", "/ui/page.js", "/metrics", ui=True) == [200, 200, 200]
