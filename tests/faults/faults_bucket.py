"""An S3 server on the loopback interface that is slow, fails, refuses, or is not there."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "told-by-the-environment"}


class FaultyS3:
    """A server with an empty bucket.

    Attributes:
        delay_s: before each request is answered.
        fails_every: each so-many-th request is answered with status 503; 0: none.
        refuses: status that all requests are answered with, such as 403; 0: none.
        port, sound_port: where it listens; where nothing is slow or refused.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        self.delay_s, self.fails_every, self.refuses, self.port, self._is_away = 0.0, 0, 0, 0, False
        self._numbers, self._app = itertools.count(1), DomainDispatcherApplication(create_backend_app)
        self._sound = self._serve(self._app, 0)
        self.sound_port = self._sound.port
        self.come_back()

    def __call__(self, environment: dict[str, Any], start: Any) -> Any:
        time.sleep(self.delay_s)
        if self._is_away:
            environment["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        fails = self.fails_every and next(self._numbers) % self.fails_every == 0
        if status := self.refuses or (503 if fails else 0):
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            start(f"{status} no", [("Content-Length", "0")])
            return [b""]
        return self._app(environment, start)

    def _serve(self, app: Any, port: int) -> Any:
        from werkzeug.serving import make_server

        server = make_server("127.0.0.1", port, app, threaded=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    def come_back(self) -> None:
        self._is_away = False
        self._server = self._serve(self, self.port)
        self.port = self._server.port

    def go_away(self) -> None:
        """Refuse connections from now on, and break those that there are."""
        self._is_away = True
        self._server.shutdown()
        self._server.server_close()

    def close(self) -> None:
        self.go_away()
        self._sound.shutdown()
        self._sound.server_close()


@contextlib.contextmanager
def serve_bucket(name: str) -> Iterator[tuple[FaultyS3, dict[str, str]]]:
    """Yields a server with an empty bucket, and the environment in which it is found."""
    import boto3

    server = FaultyS3()
    environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}", "AWS_DEFAULT_REGION": "us-east-1"}
    environment |= {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", **KEYS}
    try:
        where = {"endpoint_url": environment["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
        client = boto3.client("s3", aws_access_key_id="x", aws_secret_access_key="x", **where)
        client.create_bucket(Bucket=name)
        yield server, environment
    finally:
        server.close()
