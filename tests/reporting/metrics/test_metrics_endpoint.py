"""/metrics of the live page, over a real socket: who may read it, in which format, and how Prometheus does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "dashboard"))

from dashboard_process import Server, serve
from kit.event_dicts import ledger, lines
from kit.leftovers import wait_until
from kit.run_events import START, list_run, measured, write_run
from local_prometheus import CONFIG, promtool, started

from ensemble.reporting.metrics.families import FAMILIES

TOKEN = "5f1c0e9ab2d34c675f1c0e9ab2d34c67"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def make_token(folder: Path) -> Path:
    token = folder / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    return token


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("metrics")
    write_run(folder / "digits", list_run())
    write_run(folder / "more" / "digits", list_run(members=3))
    with serve(folder, "--metrics-token-file", str(make_token(folder))) as server:
        yield server


def test_the_token_opens_the_metrics_and_nothing_else(server: Server) -> None:
    wrong = (None, f"Bearer {TOKEN}0", f"Bearer {TOKEN[:-1]}", "Bearer ", f"Basic {TOKEN}")
    for token in (*wrong, f"Bearer {TOKEN}", f"bearer {TOKEN}"):
        status, _, body = server.ask("/metrics", cookie="", at_root=True, Authorization=token)
        assert status == (401 if token in wrong else 200), token
        assert (b"ensemble_run_members{" in body) is (status == 200)
    for target in ("/", "/api/runs", "/static/app.js", "/metrics"):  # which are served at the root
        assert server.ask(target, cookie="", Authorization="Bearer " + TOKEN * (target != "/metrics"))[0] == 401
    assert server.ask("/metrics", "POST", {}, "", at_root=True, Authorization=f"Bearer {TOKEN}")[0] == 401


def test_the_format_is_negotiated_and_runs_of_a_folder_are_told_apart_by_their_directories(server: Server) -> None:
    _, headers, body = server.ask("/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4") and not body.endswith(b"# EOF\n")
    assert b'ensemble_run_members{run="digits",state="finished"} 7' in body
    assert b'ensemble_run_members{run="more/digits",state="finished"} 3' in body
    write_run(Path(server.get("/api/runs")[0]["dir"]).parent / "new", list_run(members=2))
    _, headers, body = server.ask("/metrics", Accept=OPENMETRICS)
    assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n") and headers["cache-control"] == "no-store"
    assert b'run="new"' in body, "a run that came later"


def test_a_query_for_a_members_joules_is_answered_with_those_of_the_ledger(tmp_path: Path) -> None:
    run_dir, files, token = tmp_path / "digits", tmp_path / "prometheus", make_token(tmp_path)
    files.mkdir()
    events = measured(list_run(members=2, epochs=3))
    begun = [event for event in events if event["t"] < START + 5.0]
    write_run(run_dir, begun)
    with (
        serve(tmp_path, "--metrics-token-file", str(token), log_in=False) as server,
        started(files, server.host, TOKEN) as query,
    ):
        training = 'ensemble_run_members{run="digits", state="running"} == 2'
        wait_until(lambda: query(training), "it was not seen in progress")
        assert [value for _, value in query("up")] == [1.0], "the scrape was not refused"
        with (run_dir / "events.jsonl").open("a") as log:
            log.write(lines(events[len(begun) :]).decode())
        ended = 'ensemble_run_members{run="digits", state="finished"} == 2'
        wait_until(lambda: query(ended), "its end was not seen")
        book = ledger(events)
        assert list(book.by_member()) == ["member-0", "member-1"]
        for member, used in book.by_member().items():
            of = f'{{run="digits", member="{member}"}}'
            [(labels, energy_j)] = query(f"ensemble_member_energy_joules_total{of}")
            assert energy_j == used.energy_j and energy_j > 0 and labels["origin"] == used.origin
            figures = [query(f"ensemble_member_{name}{of}") for name in ("cpu_seconds_total", "progress_ratio")]
            assert [[value for _, value in series] for series in figures] == [[used.cpu_s], [1.0]]
        for role, used in book.by_role().items():
            of_role = query(f'ensemble_run_energy_joules_total{{role="{role}"}}')
            assert [value for _, value in of_role] == [used.energy_j]
        [(_, total)] = query("sum(ensemble_run_energy_joules_total)")
        assert total == pytest.approx(book.total.energy_j, rel=1e-12)
        counters = [family.name for family in FAMILIES if family.kind == "counter"]
        assert [name for name in counters if query(f"resets({name}[1h]) > 0")] == []


def test_the_configuration_has_no_fault() -> None:
    promtool("check", "config", "--syntax-only", str(CONFIG))
    text = CONFIG.read_text()
    assert "--web.listen-address=127.0.0.1:9090" in text and "credentials_file: token" in text
