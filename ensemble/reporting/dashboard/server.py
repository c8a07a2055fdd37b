"""Serves the live page of a run, or of a folder of runs: its files, its documents, its changes, its actions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from ensemble.reporting.dashboard.actions import ActionError, perform
from ensemble.reporting.dashboard.comparing import MOST_RUNS
from ensemble.reporting.dashboard.connections import BODY_S, MOST_HEADERS, MOST_LINE, Connections
from ensemble.reporting.dashboard.feed import Feed, LogReader, encode, encode_message
from ensemble.reporting.dashboard.hub import Runs
from ensemble.reporting.dashboard.member_log import read_chunk, tidy, untouched
from ensemble.reporting.dashboard.samples import Access, check_access, parse_indices
from ensemble.reporting.dashboard.security import MOST_STREAMS, VIEWER, BrowserSession, Guard, Refused
from ensemble.reporting.metrics.collector import add_metrics
from ensemble.reporting.samples.document import Query
from ensemble.store import StoreError
from ensemble.store.requests import find_user

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
    """The routes of the page, and who is looking at it.

    Args:
        samples: who sees samples.
    """

    def __init__(self, runs: Runs, guard: Guard, samples: Access = "owner") -> None:
        self._runs, self._guard, self._access = runs, guard, samples
        self._streams: set[object] = set()
        self._looked_at = 0.0

    def add_to(self, app: web.Application) -> None:
        """Adds the routes to an application."""
        root = self._guard.root
        runs, run = root + "api/runs", root + "api/runs/{key:[0-9a-f]{1,64}}"
        app.router.add_get("/", self._log_in, allow_head=False)
        app.router.add_get(root, self._index)
        app.router.add_get(root + "static/{path:.+}", self._static)
        app.router.add_get(root + "api/session", self._session)
        app.router.add_get(runs, self._list)
        app.router.add_get(runs + "/events", self._list_events, allow_head=False)
        app.router.add_get(run + "/{name:state|curves|tables}", self._document)
        app.router.add_get(run + "/{name:quality|importances}", self._analysis)
        app.router.add_get(run + "/samples", self._samples, allow_head=False)
        app.router.add_get(run + "/records", self._records, allow_head=False)
        app.router.add_get(run + "/events", self._events, allow_head=False)
        app.router.add_get(run + "/members/{member}/log", self._member_log, allow_head=False)
        app.router.add_post(run + "/actions", self._act)
        app.router.add_get(root + "api/compare", self._compare)

    def is_looked_at(self) -> bool:
        """Whether a page is connected, or was a moment ago: one that is loaded again comes back."""
        now = asyncio.get_running_loop().time()
        return bool(self._streams) or now < self._looked_at + GRACE_S

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        id = self._guard.redeem(request.query.get("token", ""))
        if id is None:
            raise Refused(401, "this address has been used, or is of another server")
        root = self._guard.shown_root
        answer = web.Response(status=303, headers={"Location": root})
        answer.set_cookie(self._guard.cookie, id, httponly=True, samesite="Strict", path=root)
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

    async def _session(self, request: web.Request) -> web.StreamResponse:
        may_act = request["session"].may_act
        return _send_json(encode({"may_act": may_act, "why": None if may_act else VIEWER}))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return _send_json(await self._runs.read_list())

    async def _document(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        return _send_json(await self._feed(request).make_document(name, DOCUMENTS[name]))

    async def _analysis(self, request: web.Request) -> web.StreamResponse:
        self._feed(request)
        try:
            found = await self._runs.read_analysis(request.match_info["key"], request.match_info["name"])
        except StoreError as error:
            raise Refused(409, str(error)) from None
        return _send_json(found)

    async def _samples(self, request: web.Request) -> web.StreamResponse:
        check_access(self._access, request["session"])
        try:
            query = Query.parse(request.query)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        return _send_json(await self._runs.samples.read_list(self._feed(request), query))

    async def _records(self, request: web.Request) -> web.StreamResponse:
        check_access(self._access, request["session"])
        try:
            indices = parse_indices(request.query.get("index", ""))
        except ValueError as error:
            raise Refused(400, str(error)) from None
        id = request.query.get("id", "")
        return _send_json(await self._runs.samples.read_records(self._feed(request), id, indices))

    async def _compare(self, request: web.Request) -> web.StreamResponse:
        keys = list(dict.fromkeys(filter(None, request.query.get("runs", "").split(","))))
        if not 0 < len(keys) <= MOST_RUNS:
            raise Refused(400, f"one to {MOST_RUNS} runs can be compared, not {len(keys)}")
        try:
            return _send_json(await self._runs.read_comparison(keys))
        except KeyError:
            raise Refused(404, "there is no such run") from None

    async def _act(self, request: web.Request) -> web.StreamResponse:
        feed = self._feed(request)
        body = await _read_body(request)
        try:
            by = f"{find_user()}'s page, browser {request['session'].name} from {request.remote}"
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
        feed = self._feed(request)
        begin = _read_offset(request)
        return await self._stream(
            request, feed.follow(-1 if begin is None else begin, request.query.get("log", ""))
        )

    async def _member_log(self, request: web.Request) -> web.StreamResponse:
        feed, member = self._feed(request), request.match_info["member"]
        if not await feed.call(lambda reader: reader.read() and member in reader.members):
            raise Refused(404, "there is no such member")
        begin, raw = _read_offset(request), "raw" in request.query

        def read(at: int | None) -> dict[str, Any] | None:
            chunk = read_chunk(feed.run_dir, member, at, whole_lines=not raw)
            if chunk is None:
                return None
            text = untouched(chunk.text) if raw else tidy(chunk.text)
            return {"text": text, "from": chunk.begin, "to": chunk.end}

        async def follow() -> AsyncGenerator[bytes, None]:
            at = begin
            while True:
                found = await asyncio.to_thread(read, at)
                if found is None:
                    await asyncio.sleep(LOG_S)
                    continue
                at = found["to"]
                yield encode_message(encode(found), id=at)

        return await self._stream(request, follow())

    async def _stream(self, request: web.Request, messages: AsyncGenerator[bytes, None]) -> web.StreamResponse:
        """Sends server-sent events until they, the session or the server end, or the page reads nothing."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        response.force_close()
        closing = asyncio.create_task(self._runs.closing.wait())
        try:
            with self._count(request["session"]):
                async with contextlib.aclosing(messages):
                    await response.prepare(request)
                    await response.write(b"retry: 1000\n\n")
                    while (message := await _next_unless(messages, closing)) is not None:
                        if not self._guard.is_valid(request["session"]):
                            break
                        async with asyncio.timeout(WRITE_S):
                            await response.write(message)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            closing.cancel()
        return response

    @contextlib.contextmanager
    def _count(self, session: BrowserSession) -> Iterator[None]:
        if session.streams >= MOST_STREAMS:
            raise Refused(429, f"this browser has {MOST_STREAMS} streams open; close some of its pages")
        mark = object()
        session.streams += 1
        self._streams.add(mark)
        try:
            yield
        finally:
            session.streams -= 1
            self._streams.discard(mark)
            self._looked_at = asyncio.get_running_loop().time()


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


async def _read_body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise Refused(408, "the body did not come in time") from None


def _read_offset(request: web.Request) -> int | None:
    """The byte from which on a page wants to be told; what it has seen last counts most."""
    given = request.headers.get("Last-Event-ID") or request.query.get("from")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise Refused(400, "an offset is a number of bytes")
    return int(given)


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


@contextlib.asynccontextmanager
async def serve(runs: Runs, guard: Guard, listening: Any, samples: Access = "owner") -> AsyncIterator[Page]:
    """Serves runs on a listening socket within the context.

    Args:
        listening: the socket; it is closed in the end.
        samples: who sees samples.
    """
    app, page = web.Application(client_max_size=MOST_BODY), Page(runs, guard, samples)
    guard.add_to(app)
    page.add_to(app)
    add_metrics(app, runs.list_paths, ("/", guard.root))
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=logging.Logger("dashboard", logging.CRITICAL + 1),  # it would repeat whatever anybody sends
        handler_cancellation=True,
        auto_decompress=False,
        lingering_time=1.0,
        shutdown_timeout=2.0,
        max_line_size=MOST_LINE,
        max_field_size=MOST_LINE,
        max_headers=MOST_HEADERS,
    )
    connections = Connections(lambda: _get_server(runner)())
    connections.add_to(app)
    await runner.setup()
    server = await asyncio.get_running_loop().create_server(connections, sock=listening, backlog=1024)
    first = asyncio.create_task(runs.read_list())  # a long log is read before somebody asks for it
    try:
        yield page
    finally:
        first.cancel()
        server.close()
        runs.end_streams()
        await runner.cleanup()
        runs.close()


def _get_server(runner: web.AppRunner) -> web.Server:
    assert runner.server is not None
    return runner.server
