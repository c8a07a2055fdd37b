"""The live page behind a proxy that serves it below a path."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import psutil
import pytest
from aiohttp import ClientSession, web
from dashboard_process import serve
from kit import run_events

PREFIX = "/team/run"


class Proxy:
    """Takes the prefix away: `location /team/run/ { proxy_pass http://127.0.0.1:PORT/; }` of nginx."""

    def __init__(self) -> None:
        self.loop, self.target = asyncio.new_event_loop(), ""
        self.port = self.loop.run_until_complete(self._open())
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    async def _open(self) -> int:
        app = web.Application()
        app.router.add_route("*", PREFIX + "/{path:.*}", self._pass)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return int(self.runner.addresses[0][1])

    async def _pass(self, request: web.Request) -> web.Response:
        url = self.target + request.raw_path.removeprefix(PREFIX)
        async with (
            ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, url, headers=request.headers, data=await request.read(), allow_redirects=False
            ) as answer,
        ):
            headers = {name: text for name, text in answer.headers.items() if name.lower() != "transfer-encoding"}
            return web.Response(status=answer.status, headers=headers, body=await answer.read())


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()
    yield made
    asyncio.run_coroutine_threadsafe(made.runner.cleanup(), made.loop).result()
    made.loop.call_soon_threadsafe(made.loop.stop)


def test_the_page_works_behind_a_proxy_that_serves_it_below_a_path(proxy: Proxy, tmp_path: Path) -> None:
    run = run_events.write_run(tmp_path / "run", run_events.list_run(until=20.0))
    name = f"127.0.0.1:{proxy.port}"
    with serve(run, "--prefix", PREFIX + "/", "--allow-host", name, log_in=False) as server:
        [listening] = [c for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"]
        proxy.target = f"http://127.0.0.1:{listening.laddr.port}"
        cookies = CookieJar()  # which knows of paths
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))
        assert server.url.startswith(f"http://{name}{PREFIX}/?token=")
        with browser.open(server.url) as page:
            root, text = page.url, page.read().decode()
        [cookie] = cookies
        assert cookie.path == urlsplit(root).path and cookie.path.startswith(f"{PREFIX}/p/")
        links = re.findall(r'(?:src|href)="([^"#:]+)"', text)
        assert "static/app.js" in links and "<title>" in text
        for link in (*links, "api/runs", "metrics"):
            with browser.open(urljoin(root, link)) as answer:
                assert answer.status == 200, link
