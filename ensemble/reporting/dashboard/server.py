"""Serves the live page of a run, or of a folder of runs: its files, its documents, its changes, its actions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from ensemble.reporting.dashboard.actions import ActionError, perform
from ensemble.reporting.dashboard.feed import MOST_RUNS, Feed, LogReader, Runs, encode, encode_message
from ensemble.reporting.dashboard.member_log import read_chunk, tidy
from ensemble.reporting.dashboard.security import Guard, Refused
from ensemble.store import StoreError
from ensemble.store.requests import find_user
from pipelines.providers import import_object

STATIC = Path(__file__).parent / "static"
MOST_BODY = 2**16
#: What makes the documents of a run that are made from its log alone.
DOCUMENTS: Mapping[str, Callable[[LogReader], Any]] = {
    "state": LogReader.describe,
    "curves": lambda reader: reader.view.curves_document(),
    "tables": lambda reader: reader.view.tables_document(),
}
LIST_S, LOG_S, WRITE_S, GRACE_S = 1.0, 0.5, 30.0, 10.0


class Page:
    """The routes of the page, and who is looking at it."""

    def __init__(self, runs: Runs, guard: Guard) -> None:
        self._runs, self._guard = runs, guard
        self._streams, self._looked_at = 0, 0.0

    def add_to(self, app: web.Application) -> None:
        """Adds the routes to an application."""
        root = self._guard.root
        runs, run = root + "api/runs", root + "api/runs/{key:[0-9a-f]{1,64}}"
        app.router.add_get("/", self._log_in, allow_head=False)
        app.router.add_get(root, self._index)
        app.router.add_get(root + "static/{path:.+}", self._static)
        app.router.add_get(runs, self._list)
        app.router.add_get(runs + "/events", self._list_events, allow_head=False)
        app.router.add_get(run + "/{name:state|curves|tables}", self._document)
        app.router.add_get(run + "/{name:quality|importances}", self._analysis)
        app.router.add_get(run + "/events", self._events, allow_head=False)
        app.router.add_get(run + "/members/{member}/log", self._member_log, allow_head=False)
        app.router.add_post(run + "/actions", self._act)
        app.router.add_get(root + "api/compare", self._compare)

    def is_looked_at(self) -> bool:
        """Whether a page is connected, or was a moment ago: one that is loaded again comes back."""
        return self._streams > 0 or asyncio.get_running_loop().time() < self._looked_at + GRACE_S

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        session = self._guard.redeem(request.query.get("token", ""))
        if session is None:
            raise Refused(401, "this address is of another server")
        root = self._guard.shown_root
        answer = web.Response(status=303, headers={"Location": root})
        answer.set_cookie(self._guard.cookie, session, httponly=True, samesite="Strict", path=root)
        return answer

    async def _index(self, _: web.Request) -> web.StreamResponse:
        return _send_file(STATIC / "index.html")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        parts = path.split("/")
        if "\0" in path or "\\" in path or any(part.startswith(".") or not part for part in parts):
            raise Refused(404, "there is no such file")
        return _send_file(STATIC.joinpath(*parts))

    def _feed(self, request: web.Request) -> Feed:
        try:
            return self._runs.feed(request.match_info["key"])
        except KeyError:
            raise Refused(404, "there is no such run") from None

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return _send_json(await self._runs.read_list())

    async def _document(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        return _send_json(await self._feed(request).make_document(name, DOCUMENTS[name]))

    async def _analysis(self, request: web.Request) -> web.StreamResponse:
        self._feed(request)
        try:
            content = await self._runs.read_analysis(request.match_info["key"], request.match_info["name"])
        except StoreError as error:
            raise Refused(409, str(error)) from None
        return _send_json(content)

    async def _compare(self, request: web.Request) -> web.StreamResponse:
        keys = list(dict.fromkeys(filter(None, request.query.get("runs", "").split(","))))
        if not 0 < len(keys) <= MOST_RUNS:
            raise Refused(400, f"one to {MOST_RUNS} runs can be compared, not {len(keys)}")
        try:
            return _send_json(await self._runs.read_comparison(keys))
        except KeyError:
            raise Refused(404, "there is no such run") from None

    async def _act(self, request: web.Request) -> web.StreamResponse:
        feed, body = self._feed(request), await request.read()
        by = f"{find_user()}'s page, from {request.remote}"
        try:
            id = await feed.call(lambda reader: perform(reader, body, by))
        except ActionError as error:
            raise Refused(error.status, error.why) from None
        except StoreError as error:
            raise Refused(409, str(error)) from None
        return _send_json(encode({"request": id}), status=202)

    # -- streams --------------------------------------------------------------------------------------------------

    async def _list_events(self, request: web.Request) -> web.StreamResponse:
        async def follow() -> AsyncGenerator[bytes, None]:
            last = b""
            while True:
                if (rows := await self._runs.read_list()) != last:
                    last = rows
                    yield encode_message(rows)
                await asyncio.sleep(LIST_S)

        return await self._stream(request, follow())

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, self._feed(request).follow())

    async def _member_log(self, request: web.Request) -> web.StreamResponse:
        feed, member = self._feed(request), request.match_info["member"]
        if not await feed.call(lambda reader: member in reader.read().view.state.members):
            raise Refused(404, "there is no such member")
        begin = _read_offset(request)

        def read(at: int | None) -> dict[str, Any] | None:
            chunk = read_chunk(feed.run_dir, member, at, whole_lines=True)
            return None if chunk is None else {"text": tidy(chunk.text), "from": chunk.begin, "to": chunk.end}

        async def follow() -> AsyncGenerator[bytes, None]:
            at = begin
            while True:
                piece = await asyncio.to_thread(read, at)
                if piece is None:
                    await asyncio.sleep(LOG_S)
                    continue
                at = piece["to"]
                yield encode_message(encode(piece), id=at)

        return await self._stream(request, follow())

    async def _stream(self, request: web.Request, messages: AsyncGenerator[bytes, None]) -> web.StreamResponse:
        """Sends server-sent events until they or the server end, or the page reads nothing."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        response.force_close()
        closing = asyncio.create_task(self._runs.closing.wait())
        self._streams += 1
        try:
            async with contextlib.aclosing(messages):
                await response.prepare(request)
                await response.write(b"retry: 1000\n\n")
                while (message := await _next_unless(messages, closing)) is not None:
                    async with asyncio.timeout(WRITE_S):
                        await response.write(message)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            closing.cancel()
            self._streams -= 1
            self._looked_at = asyncio.get_running_loop().time()
        return response


async def _next_unless(messages: AsyncGenerator[bytes, None], closing: asyncio.Task[Any]) -> bytes | None:
    """The next message; None when there are no more, or when the server closes."""

    async def read() -> bytes | None:
        return await anext(messages, None)

    reading = asyncio.create_task(read())
    try:
        await asyncio.wait((reading, closing), return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        reading.cancel()
        await asyncio.wait((reading,))


def _read_offset(request: web.Request) -> int | None:
    """The byte from which on a page wants to be told; what it has seen last counts most."""
    offset = request.headers.get("Last-Event-ID") or request.query.get("from")
    if offset is None:
        return None
    if not (offset.isascii() and offset.isdigit() and len(offset) < 16):
        raise Refused(400, "an offset is a number of bytes")
    return int(offset)


def _send_json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def _send_file(path: Path) -> web.StreamResponse:
    try:
        is_served = path.is_file() and not path.is_symlink()
    except OSError:  # such as a name that is too long
        is_served = False
    if not is_served:
        raise Refused(404, "there is no such file")
    return web.FileResponse(path, headers={"Cache-Control": "no-cache"})


def listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens on an IP address.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


@contextlib.asynccontextmanager
async def serve(runs: Runs, guard: Guard, listening: socket.socket) -> AsyncIterator[Page]:
    """Serves runs on a listening socket within the context; it is closed in the end."""
    app, page = web.Application(client_max_size=MOST_BODY), Page(runs, guard)
    guard.add_to(app)
    page.add_to(app)
    import_object("ensemble.reporting.metrics.collector:add_metrics")(app, runs.list_paths, ("/", guard.root))
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=logging.Logger("dashboard", logging.CRITICAL + 1),  # it would repeat whatever anybody sends
        handler_cancellation=True,
        auto_decompress=False,
        shutdown_timeout=2.0,
    )
    await runner.setup()
    site = web.SockSite(runner, listening)
    await site.start()
    first = asyncio.create_task(runs.read_list())  # a long log is read before somebody asks for it
    try:
        yield page
    finally:
        first.cancel()
        runs.end_streams()
        await runner.cleanup()
        runs.close()
