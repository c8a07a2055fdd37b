"""Serves the live page with documents of `documents.make_documents`, by the contract of the server's routes.

with PageServer() as server:
    server.show(make_documents(100))
    page.goto(server.url)
    server.push(make_change(server.documents, 1))
    server.posted          # the bodies of the requests that the page sent
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import ensemble.reporting.dashboard as dashboard
from ensemble.reporting.dashboard.run_section import describe_head
from ensemble.reporting.dashboard.runs import describe_row
from ensemble.reporting.run_projection import RunProjection
from ensemble.store import RunState

STATIC = Path(dashboard.__file__).parent / "static"
KEY = "6b0f"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class PageServer:
    """A server of one or several runs that have the same documents; `show` says which, again for each test."""

    def __init__(self) -> None:
        self._streams: dict[str, list[queue.SimpleQueue[str | None]]] = {}
        self.show({})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def show(
        self, documents: dict[str, Any], *, logs: dict[str, str] | None = None, keys: tuple[str, ...] = (KEY,)
    ) -> None:
        """Serves these from now on, and forgets what was before.

        Args:
            documents: as of `documents.make_documents`.
            logs: what members wrote, by member.
            keys: of the runs that are listed.
        """
        self.documents = documents
        self.logs = logs or {}
        self.keys = keys
        self.posted: list[dict[str, Any]] = []
        self.asked: list[str] = []  # paths, in order
        self.refusal: tuple[int, str] | None = None  # what an action is answered with
        self.drop()
        self._streams = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
        self._server.shutdown()
        self._server.server_close()

    def push(self, documents: dict[str, Any]) -> None:
        self.documents = documents
        self.send("run", self.state_message())

    def state_message(self) -> str:
        """The state as a message of the run's stream."""
        return f"data: {json.dumps(self.documents['state'])}\n\n"

    def push_log(self, member: str, text: str, begin: int) -> None:
        piece = {"text": text, "from": begin, "to": begin + len(text)}
        self.send(f"log {member}", f"id: {piece['to']}\ndata: {json.dumps(piece)}\n\n")

    def send(self, stream: str, text: str) -> None:
        """Writes to all who follow a stream: `run`, `runs` or `log MEMBER`."""
        for each in self._streams.get(stream, []):
            each.put(text)

    def followers(self, stream: str) -> int:
        return len(self._streams.get(stream, []))

    def drop(self) -> None:
        """Ends all streams, as a lost connection does."""
        for each in [each for streams in self._streams.values() for each in streams]:
            each.put(None)

    def runs(self) -> list[dict[str, Any]]:
        run = self.documents["state"]["run"]
        names = describe_head("", RunProjection(RunState()), with_used=False)
        rows = ({**names, **{name: run.get(name) for name in names}, "key": key} for key in self.keys)
        return [describe_row(row, row["dir"]) for row in rows]

    def follow(self, stream: str, first: str | None) -> Iterator[str]:
        """The texts of a stream, the first at once, until it is dropped."""
        mine: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        followers = self._streams.setdefault(stream, [])
        followers.append(mine)
        try:
            yield first if first is not None else ": here\n\n"
            while (text := mine.get()) is not None:
                yield text
        finally:
            followers.remove(mine)


def _handler(server: PageServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            server.asked.append(self.path)
            if path == "/":
                self._file(STATIC / "index.html")
            elif path.startswith("/static/"):
                self._file(STATIC / path.removeprefix("/static/"))
            elif path == "/api/runs":
                self._json(server.runs())
            elif path == "/api/runs/events":
                self._stream("runs", None)
            elif path.endswith("/log"):
                self._log(unquote(path.split("/")[-2]))
            elif path.endswith("/events"):
                self._stream("run", server.state_message())
            elif (name := path.split("/")[-1]) in server.documents:
                self._json(server.documents[name])
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.posted.append(json.loads(body))
            if server.refusal is not None:
                self._json({"error": server.refusal[1]}, server.refusal[0])
            else:
                self._json({"request": f"request-{len(server.posted)}"}, 202)

        def _log(self, member: str) -> None:
            text = server.logs.get(member, "")
            near_end = text.rfind("\n", 0, max(0, len(text) - 2**16)) + 1
            begin = int(parse_qs(urlsplit(self.path).query).get("from", [near_end])[0])
            piece = {"text": text[begin:], "from": begin, "to": max(begin, len(text))}
            self._stream(f"log {member}", f"id: {piece['to']}\ndata: {json.dumps(piece)}\n\n")

        def _stream(self, name: str, first: str | None) -> None:
            self._head(200, "text/event-stream")
            try:
                for text in server.follow(name, first):
                    self.wfile.write(text.encode())
                    self.wfile.flush()
            except OSError:
                pass  # the page is gone

        def _json(self, value: Any, status: int = 200) -> None:
            body = json.dumps(value, allow_nan=False).encode()
            self._head(status, "application/json", len(body))
            self.wfile.write(body)

        def _file(self, path: Path) -> None:
            if not path.is_file():
                self.send_error(404)
                return
            body = path.read_bytes()
            self._head(200, f"{TYPES[path.suffix]}; charset=utf-8", len(body), "max-age=3600")
            self.wfile.write(body)

        def _head(self, status: int, kind: str, length: int | None = None, kept: str = "no-store") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("Cache-Control", kept)
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()

    return Handler
