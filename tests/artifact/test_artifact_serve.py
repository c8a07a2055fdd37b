"""examples/serve.py, really started: it answers over HTTP, in batches, and leaves no process behind."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from artifact_runs import NAMES, make_images
from kit.free_ports import find_free_ports

from ensemble.artifact.program import load_program

pytest.importorskip("httptools", reason="the extra serve is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.more]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The example in a process of its own; at the end it and all that it started must be gone."""
    (port,) = find_free_ports(1)
    command = [sys.executable, str(ROOT / "examples" / "serve.py"), str(artifact), "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Serve gives its proxy 5 s to start, which a machine that does much else exceeds.
    environment |= {f"RAY_SERVE_PROXY_{kind}_CHECK_TIMEOUT_S": "120" for kind in ("READY", "HEALTH")}
    log = tmp_path_factory.mktemp("log") / "stderr"
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=log.parent, env=environment
        )
    assert process.stdout is not None
    line = next((line for line in process.stdout if line.startswith("http://")), None)
    assert line is not None, log.read_text()
    address, _, token = line.split()
    family = psutil.Process(process.pid).children(recursive=True)
    yield {"address": address, "token": token, "family": family}
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    assert process.wait(timeout=300) == 0, log.read_text()
    assert [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    assert os.listdir(log.parent) == ["stderr"]


def ask(served: dict[str, Any], body: Any, token: str | None = None) -> tuple[int, dict[str, Any], int]:
    """Status, answer, and size of the batch that it was computed in."""
    request = urllib.request.Request(
        served["address"],
        data=body if isinstance(body, bytes) else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {served['token'] if token is None else token}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer), int(answer.headers["x-batch-size"])
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), 0


def test_answers_are_the_programs_and_come_in_batches(served: dict[str, Any], artifact: Path) -> None:
    images = make_images(5, 64)["image"]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda image: ask(served, {"image": image.tolist()}), images))
    assert {status for status, _, _ in answers} == {200}
    values = load_program(artifact / "model.pt2")({"image": torch.from_numpy(images)}).numpy()
    assert np.allclose([answer["values"] for _, answer, _ in answers], values, rtol=1e-5, atol=1e-6)
    assert [answer["class"] for _, answer, _ in answers] == [NAMES[best] for best in values.argmax(axis=1)]
    assert max(size for _, _, size in answers) > 1


def test_it_answers_nobody_without_the_token(served: dict[str, Any]) -> None:
    image = make_images(5, 1)["image"][0].tolist()
    assert ask(served, {"image": image}, token="guess")[:2] == (401, {"error": "no token, or a wrong one"})
    assert ask(served, {"image": image}, token="")[0] == 401


OBJECT = "the body must be a JSON object with image"
BODIES = [(b"{", "Expecting property name"), ({"picture": 1}, OBJECT), ([1], OBJECT), (b"\xff", "'utf-8' codec")]
BODIES += [({"image": [[[300] * 12] * 10] * 3}, "image: there is a number that torch.uint8 cannot hold")]
BODIES += [({"image": [[[True] * 12] * 10] * 3}, "image: expected torch.uint8, got torch.bool")]
BODIES += [({"image": [1, 2]}, "image "), ({"image": [[1, 2], [3]]}, "image: "), ({"image": 10**400}, "image: ")]
BODIES += [(b'{"image": NaN}', "NaN is no"), (b'{"image": ' + b"[" * 50_000, "the body is nested too deeply")]


def test_what_the_program_does_not_take_is_refused(served: dict[str, Any]) -> None:
    for body, message in BODIES:
        status, answer, _ = ask(served, body)
        assert status == 400 and answer["error"].startswith(message), answer
    request = urllib.request.Request(served["address"], headers={"Authorization": f"Bearer {served['token']}"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=300)
    assert error.value.code == 405 and error.value.headers["allow"] == "POST"


def test_a_body_without_a_length_is_read_only_so_far(served: dict[str, Any]) -> None:
    def chunks() -> Iterator[bytes]:
        while True:
            yield b" " * (1 << 20)

    connection = http.client.HTTPConnection(served["address"].removeprefix("http://"), timeout=300)
    headers = {"Authorization": f"Bearer {served['token']}", "Transfer-Encoding": "chunked"}
    with contextlib.suppress(ConnectionError):  # it does not wait for the end
        connection.request("POST", "/", itertools.islice(chunks(), 80), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_everything_listens_on_loopback_only(served: dict[str, Any]) -> None:
    connections = [connection for process in served["family"] for connection in process.net_connections("inet")]
    listening = {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
    assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
