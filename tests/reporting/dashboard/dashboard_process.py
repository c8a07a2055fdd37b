"""The command `ensemble dashboard` as a process, and sockets that send it what no browser would."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
HANG_S = 300.0  # it only ends a test that hangs


class Server:
    """A running server, and a session with it. `under` is a command that starts it."""

    def __init__(self, path: Path, *options: str, under: Sequence[str] = ()) -> None:
        command = [*under, sys.executable, "-m", "ensemble.cli", "dashboard", str(path), "--port", "0", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.said: list[str] = []
        self.cookie, self.root = "", ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            if found := re.search(r"the address with its token: (\S+)\)", line):
                self._address = Path(found[1])
                break
        self.port = int(re.findall(r":(\d+)/", self.url)[0])
        self.host = f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return self._address.read_text().strip()

    def log_in(self) -> None:
        """Uses the server's token: `ask` asks with its cookie from now on."""
        status, headers, _ = self.ask(self.url[self.url.index("/?") :], cookie="", at_root=True)
        assert status == 303
        self.root, self.cookie = headers["location"].rstrip("/"), headers["set-cookie"].partition(";")[0]

    def ask(
        self, target: str, method: str = "GET", body: Any = None, cookie: str | None = None, *,
        at_root: bool = False, **headers: str | None,
    ) -> tuple[int, dict[str, str], bytes]:  # fmt: skip
        """One request in the page's folder: status, headers, body. Of headers, `_` is `-`; None leaves one out."""
        sent: dict[str, str | None] = {"Host": self.host, "Cookie": self.cookie if cookie is None else cookie}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            sent |= {"Content-Type": "application/json", "Origin": f"http://{self.host}"}
            sent["Content-Length"] = str(len(data))
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)) as connection:
            target = target if at_root else self.root + target
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                if value:
                    connection.putheader(name, value)
            connection.endheaders(data)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def get(self, target: str) -> Any:
        status, _, body = self.ask(target)
        assert status == 200, (status, body)
        return json.loads(body)

    def send(self, data: bytes, *, end: bool = False) -> bytes:
        """What it answers to these bytes, up to the end of the connection."""
        with socket.create_connection(("127.0.0.1", self.port), HANG_S) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
                if end:
                    connection.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(2**16):
                    answer += piece
            return answer

    @contextlib.contextmanager
    def stream(self, target: str, **headers: str) -> Iterator[Messages]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)) as connection:
            connection.request("GET", self.root + target, headers={"Cookie": self.cookie, **named})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            assert answer.getheader("content-type") == "text/event-stream"
            yield Messages(answer)

    @property
    def page(self) -> str:
        return f"http://{self.host}{self.root}/"

    @property
    def key(self) -> str:
        return str(self.get("/api/runs")[0]["key"])

    def close(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        out, _ = self.process.communicate(timeout=HANG_S)
        self.said += (out or "").splitlines()
        return self.process.returncode


class Messages:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def next(self) -> tuple[str | None, int | None, Any]:
        """Event, id and data of the next one; ("end", None, None) at the end of the stream."""
        fields: dict[str, str] = {}
        while line := self._answer.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "data" in fields:
                id = fields.get("id")
                return fields.get("event"), None if id is None else int(id), json.loads(fields["data"])
        return "end", None, None


@contextlib.contextmanager
def serve(path: Path, *options: str, log_in: bool = True, under: Sequence[str] = ()) -> Iterator[Server]:
    server = Server(path, *options, under=under)
    try:
        if log_in:
            server.log_in()
        yield server
    finally:
        server.close()
