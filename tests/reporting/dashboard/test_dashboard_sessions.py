"""Sessions of the live page: where the browser sends their cookie, and when they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
import run_events
from dashboard_process import HANG_S, serve
from page_steps import DRAWN

from ensemble.reporting.dashboard import server as page_server
from ensemble.reporting.dashboard.connections import listen
from ensemble.reporting.dashboard.hub import Runs
from ensemble.reporting.dashboard.security import SESSION_S, Guard


class Neighbour(BaseHTTPRequestHandler):
    """A server of another user on the same host, which keeps the cookies that it gets."""

    cookies: ClassVar[list[str | None]] = []

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.cookies.append(self.headers["Cookie"])
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def neighbour() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Neighbour) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.browser
@pytest.mark.more
def test_the_cookie_goes_to_no_other_port_of_the_host(tab: Any, neighbour: str, tmp_path: Path) -> None:
    run = run_events.write_run(tmp_path / "run", run_events.list_run())
    with serve(run, log_in=False) as server:
        tab.goto(server.url)
        tab.wait_for_selector(DRAWN)
        page = tab.url
        for path in ("", "api/runs", "p/", "metrics"):
            tab.goto(neighbour + path)
        assert len(Neighbour.cookies) >= 4 and not any(Neighbour.cookies)
        tab.goto(page)
        tab.wait_for_selector(DRAWN)
        tab.goto("about:blank")


def test_a_session_and_its_streams_end_after_a_week(tmp_path: Path) -> None:
    run_events.write_run(tmp_path / "first", run_events.list_run())
    with ThreadPoolExecutor(1) as thread:  # in this one the browser of other tests may have its loop
        thread.submit(asyncio.run, live_through_a_week(tmp_path)).result()


async def live_through_a_week(folder: Path) -> None:
    now, addresses = [0.0], list[str]()
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    guard = Guard({f"127.0.0.1:{port}"}, port, url, addresses.append, clock=lambda: now[0])
    jar = aiohttp.CookieJar(unsafe=True)  # of an IP address, too
    async with (
        page_server.serve(Runs(folder), guard, listening),
        aiohttp.ClientSession(url, cookie_jar=jar) as client,
    ):
        assert (await client.get(addresses[0])).status == 200
        runs = guard.root + "api/runs"
        now[0] = SESSION_S - 1
        assert (await client.get(runs)).status == 200
        async with client.get(runs + "/events") as stream:
            assert b"retry" in await stream.content.readuntil(b"\n\n")
            assert b"first" in await stream.content.readuntil(b"\n\n")
            now[0] = SESSION_S
            run_events.write_run(folder / "second", run_events.list_run())
            assert await asyncio.wait_for(stream.content.read(), HANG_S) == b""
        assert (await client.get(runs)).status == 401
