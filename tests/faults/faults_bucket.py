"""An S3 server on the loopback interface behind a proxy that is slow, fails, refuses, or is not there."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "told-by-the-environment"}


class S3Proxy:
    """Passes requests on to a server.

    Attributes:
        delay_s: before each request is passed on.
        fails_every: each so-many-th request is answered with status 503; 0: none.
        refuses: status that all requests are answered with, such as 403; 0: none.
        upstream: host and port of the server, where nothing is slow or refused.
    """

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.delay_s, self.fails_every, self.refuses, self._is_away = 0.0, 0, 0, False
        numbers, proxy = itertools.count(1), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def do_any(self) -> None:
                number = next(numbers)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                time.sleep(proxy.delay_s)
                if proxy._is_away:
                    self.close_connection = True
                    return
                status = proxy.refuses or (503 if proxy.fails_every and number % proxy.fails_every == 0 else 0)
                if status:
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                connection = http.client.HTTPConnection(*upstream)
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                content = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else len(content)
                self.send_header("Content-Length", str(length or 0))
                self.end_headers()
                self.wfile.write(content)
                connection.close()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

        self._handler = Handler
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._serve()

    def _serve(self) -> None:
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def go_away(self) -> None:
        """Refuse connections from now on, and break those that there are."""
        self._is_away = True
        self._server.shutdown()
        self._server.server_close()

    def come_back(self) -> None:
        self._is_away = False
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler)
        self._serve()


@contextlib.contextmanager
def serve_bucket(name: str) -> Iterator[tuple[S3Proxy, dict[str, str]]]:
    """Yields the proxy of a server with an empty bucket, and the environment in which it is found."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = S3Proxy(server.get_host_and_port())
    environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "AWS_DEFAULT_REGION": "us-east-1"}
    environment |= {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", **KEYS}
    try:
        where = {"endpoint_url": environment["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
        client = boto3.client("s3", aws_access_key_id="x", aws_secret_access_key="x", **where)
        client.create_bucket(Bucket=name)
        yield proxy, environment
    finally:
        proxy.go_away()
        server.stop()
