"""/metrics of the live page, over a real socket: who may read it, and in which format."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "dashboard"))

from dashboard_process import Server, serve
from run_events import list_run, write_run

TOKEN = "5f1c0e9ab2d34c67"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves a folder with two runs."""
    folder = tmp_path_factory.mktemp("metrics")
    write_run(folder / "digits", list_run())
    write_run(folder / "more" / "digits", list_run(members=3))
    token = folder / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    with serve(folder, "--metrics-token-file", str(token)) as server:
        yield server


@pytest.mark.parametrize(
    ("token", "status"),
    [
        (None, 401),
        (f"Bearer {TOKEN}0", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        ("Bearer ", 401),
        (f"Basic {TOKEN}", 401),
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 200),
    ],
)
def test_the_token_opens_the_metrics(server: Server, token: str | None, status: int) -> None:
    found, _, body = server.ask("/metrics", cookie="", at_root=True, Authorization=token)
    assert found == status
    assert (b"ensemble_run_members{" in body) is (status == 200)


def test_the_cookie_opens_them_and_another_does_not(server: Server) -> None:
    assert server.ask("/metrics")[0] == 200
    assert server.ask("/metrics", cookie=server.cookie[:-1] + "~")[0] == 401


def test_the_token_opens_nothing_else(server: Server) -> None:
    for target in ("/", "/api/runs", "/static/app.js"):
        assert server.ask(target, cookie="", Authorization=f"Bearer {TOKEN}")[0] == 401


def test_runs_of_a_folder_are_told_apart_by_their_directories(server: Server) -> None:
    body = server.ask("/metrics")[2].decode()
    assert 'ensemble_run_members{run="digits",state="finished"} 7' in body
    assert 'ensemble_run_members{run="more/digits",state="finished"} 3' in body
    write_run(Path(server.get("/api/runs")[0]["dir"]).parent / "new", list_run(members=2))
    assert 'run="new"' in server.ask("/metrics")[2].decode(), "a run that came later"


def test_the_format_is_negotiated(server: Server) -> None:
    _, headers, body = server.ask("/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4") and not body.endswith(b"# EOF\n")
    _, headers, body = server.ask("/metrics", Accept=OPENMETRICS)
    assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n") and headers["cache-control"] == "no-store"
