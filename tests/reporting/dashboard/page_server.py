"""Serves the live page with documents of `documents.make_documents`, by the contract of the server's routes."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
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


class PageServer(ThreadingHTTPServer):
    """A server of one or several runs that have the same documents; `show` says which, again for each test."""

    daemon_threads = True

    def __init__(self) -> None:
        self._streams: dict[str, list[queue.SimpleQueue[str | None]]] = {}
        self.show({})
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def show(self, documents: dict[str, Any], *, logs: Any = None, keys: tuple[str, ...] = (KEY,)) -> None:
        """Serves these and what members wrote from now on, for runs of these keys, and forgets what was before."""
        self.documents, self.logs, self.keys = documents, logs or {}, keys
        self.posted, self.asked = list[dict[str, Any]](), list[str]()  # paths, in order
        self.refusal: tuple[int, str] | None = None  # what an action is answered with
        self.drop()
        self._streams = {}

    def __exit__(self, *_: object) -> None:
        self.drop()
        self.shutdown()
        self.server_close()

    def push(self, documents: dict[str, Any]) -> None:
        self.documents = documents
        self.send("run", f"data: {json.dumps(documents['state'])}\n\n")

    def push_log(self, member: str, text: str, begin: int) -> None:
        self.send(f"log {member}", piece_message(text, begin))

    def send(self, stream: str, text: str) -> None:
        for follower in self._streams.get(stream, []):
            follower.put(text)

    def followers(self, stream: str) -> int:
        return len(self._streams.get(stream, []))

    def drop(self) -> None:
        for follower in chain(*self._streams.values()):
            follower.put(None)

    def runs(self) -> list[dict[str, Any]]:
        run = self.documents["state"]["run"]
        head = {name: run.get(name) for name in describe_head("", RunProjection(RunState()), with_used=False)}
        return [describe_row(head | {"key": key}, head["dir"]) for key in self.keys]

    def follow(self, stream: str, first: str) -> Iterator[str]:
        mine: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        followers = self._streams.setdefault(stream, [])
        followers.append(mine)
        try:
            yield first
            while (text := mine.get()) is not None:
                yield text
        finally:
            followers.remove(mine)


def piece_message(text: str, begin: int) -> str:
    piece = {"text": text, "from": begin, "to": begin + len(text)}
    return f"id: {piece['to']}\ndata: {json.dumps(piece)}\n\n"


class Handler(BaseHTTPRequestHandler):
    server: PageServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path, server = urlsplit(self.path).path, self.server
        server.asked.append(self.path)
        file = STATIC / (path.removeprefix("/static/") if path != "/" else "index.html")
        if path == "/" or (path.startswith("/static/") and file.is_file()):
            self._answer(200, f"{TYPES[file.suffix]}; charset=utf-8", file.read_bytes(), "max-age=3600")
        elif path == "/api/runs":
            self._json(server.runs())
        elif path == "/api/runs/events":
            self._stream("runs", ": here\n\n")
        elif path.endswith("/log"):
            member = unquote(path.split("/")[-2])
            text = server.logs.get(member, "")
            near_end = text.rfind("\n", 0, max(0, len(text) - 2**16)) + 1
            begin = int(parse_qs(urlsplit(self.path).query).get("from", [near_end])[0])
            self._stream(f"log {member}", piece_message(text[begin:], begin))
        elif path.endswith("/events"):
            self._stream("run", f"data: {json.dumps(server.documents['state'])}\n\n")
        elif (name := path.split("/")[-1]) in server.documents:
            self._json(server.documents[name])
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        posted = self.server.posted
        posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, why = self.server.refusal or (202, None)
        self._json({"error": why} if why else {"request": f"request-{len(posted)}"}, status)

    def _stream(self, name: str, first: str) -> None:
        self._answer(200, "text/event-stream")
        with contextlib.suppress(OSError):  # the page is gone
            for text in self.server.follow(name, first):
                self.wfile.write(text.encode())
                self.wfile.flush()

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, "application/json", json.dumps(value, allow_nan=False).encode())

    def _answer(self, status: int, kind: str, body: bytes | None = None, kept: str = "no-store") -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Security-Policy": POLICY, "Cache-Control": kept}
        headers |= {} if body is None else {"Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body or b"")
