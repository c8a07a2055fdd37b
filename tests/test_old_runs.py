"""Runs of an earlier day (`fixtures/old_runs`) are shown, gone on with and loaded by the code of today.

Each is copied first, and used through what users have: the commands, `submit`, `resume`, `load`. So these tests
know no module of ours, and hold wherever modules are and whatever they are called. `fixtures/make_runs.py` says
how the runs were made; what is in them is not to be changed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ensemble
from ensemble.cli import parser as cli
from ensemble.user_code.fingerprint import SCHEME

torch = pytest.importorskip("torch")

FIXTURES = Path(__file__).parent / "fixtures"
OLD = FIXTURES / "old_runs"
NAMES = ("listed", "looped", "searched", "finished")
EXPECTED: dict[str, Any] = json.loads((OLD / "expected.json").read_text())
MADE_BY = {name: json.loads(next((OLD / name).glob("code/*/code.json")).read_text())["python"] for name in NAMES}
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"

#: What their members were when they were interrupted.
STATES = {
    "listed": {"finished": [0, 1, 3], "paused": [2], "running": [4], "waiting": [5, 6]},
    "looped": {"finished": [0], "stopped": [1], "waiting": [2]},
    "searched": {"finished": [0, 1, 4, 5, 6, 7, 8, 9], "pruned": [2, 3, 10], "running": [11]},
    "finished": {"finished": [0, 1, 2]},
}


def unpickles(name: str) -> None:
    """Skip where the code that is kept in a run is another Python's, which cannot unpickle it."""
    if MADE_BY[name] != HERE:
        pytest.skip(f"the declaration holds instructions of Python {MADE_BY[name]}, this is {HERE}")


Project = Callable[[str], Any]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Imports one of the user's modules, which lie elsewhere than where the runs were made; not found before."""
    folder = shutil.copytree(OLD / "project", tmp_path / "project", copy_function=shutil.copyfile)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr("sys.path", list(sys.path))

    def found(name: str) -> Any:
        sys.path[:0] = [str(folder), str(FIXTURES)]
        return importlib.import_module(name)

    yield found
    for path in (*folder.iterdir(), FIXTURES / "witness.py"):
        sys.modules.pop(path.stem, None)


def copied(name: str, folder: Path) -> Path:
    """A run in a directory of its own; with the modes and empty directories of a run, which git does not keep."""
    run = shutil.copytree(OLD / name, folder / name, copy_function=shutil.copyfile)
    (run / "requests").mkdir(exist_ok=True)
    for each in (run, *run.rglob("*")):
        each.chmod(0o700 if each.is_dir() else 0o600)
    return run


def events(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What its log says, by that file alone."""
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in found if kind in (None, event["type"])]


def last(run: Path, kind: str) -> dict[str, dict[str, Any]]:
    """The last event of a kind of each member."""
    return {event["member"]: event for event in events(run, kind)}


def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """What `ensemble status` says of each member."""
    capsys.readouterr()
    assert cli.main(["status", str(run), "--json", "-"]) == 0
    return {row["member"]: row for row in json.loads(capsys.readouterr().out)}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tensors(run: Path, member: str) -> dict[str, Any]:
    """The tensors of a member's checkpoint."""
    from safetensors.torch import load_file

    (path,) = (run / "members" / member).glob("checkpoint-*.safetensors")
    return dict(load_file(path))


@pytest.mark.parametrize("name", NAMES)
def test_its_status_and_report_say_what_is_in_the_log(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(name, tmp_path)
    rows = shown(run, capsys)
    found: dict[str, list[int]] = {}
    for number in range(len(rows)):
        found.setdefault(rows[f"member-{number}"]["state"], []).append(number)
    assert found == STATES[name]
    objective = events(run, "run_started")[-1]["objective"]
    for member, event in last(run, "epoch").items():
        metric, epoch = event["metrics"][objective], event["epoch"] + 1
        assert (rows[member]["metric"], rows[member]["epoch"]) == (metric, epoch)
    assert all(rows[member]["cpu_s"] > 0 for member in last(run, "finished"))
    (run / "snapshot.json").unlink()
    assert shown(run, capsys) == rows, "by the log alone"

    assert cli.main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert all(f"{row['metric']:.4f}" in text for row in rows.values() if row["metric"] is not None)
    assert all(member in text for member in rows)


def submitted(declared: Any, run: Path) -> Any:
    """What comes of a declaration as its module says it today."""
    return ensemble.submit(declared.spec(), run, "inline", spec_file=declared.__file__).wait()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("listed", "inline"),
        ("looped", "inline"),
        ("searched", "submit"),
        *(pytest.param(*pair, marks=pytest.mark.more) for pair in (("listed", "submit"), ("looped", "local"))),
    ],
)
def test_it_is_gone_on_with_and_ends_as_if_nobody_had_interrupted_it(
    name: str, how: str, project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unpickles(name)
    run = copied(name, tmp_path)
    log = (run / "events.jsonl").read_bytes()
    finished = {member: event["weights_sha256"] for member, event in last(run, "finished").items()}
    kept = {path: digest(path) for member in finished for path in (run / "members" / member).glob("*.safetensors")}
    proposed = [event["params"] for event in events(run, "member")]

    result = submitted(project(name), run) if how == "submit" else ensemble.resume(run, how).wait()

    assert (run / "events.jsonl").read_bytes().startswith(log)
    assert kept and {path: digest(path) for path in kept} == kept
    assert events(run, "code_changed") == []
    # Their fingerprints are of the first scheme: what is recorded from here on is of today's, and that is said.
    *before, now = events(run, "run_started")
    assert all("scheme" not in event["data"] and event["code"] != now["code"] for event in before)
    assert now["data"]["scheme"] == SCHEME
    assert "only the number of the training samples is compared" in caplog.text
    members = {row["member"]: row["state"] for row in result.members}
    assert members == {member: state for member, (_, state, _) in EXPECTED[name].items()}
    declared = [event["params"] for event in events(run, "member")]
    assert declared[: len(proposed)] == proposed and len(declared) == len(members)
    weights = {member: event["weights_sha256"] for member, event in last(run, "finished").items()}
    assert finished.items() <= weights.items()
    assert result.ledger is not None and (run / "report.html").stat().st_size > 0
    check_uninterrupted(name, declared, weights, run, project)


def check_uninterrupted(
    name: str, declared: list[dict[str, Any]], weights: dict[str, str], run: Path, project: Project
) -> None:
    """Weights and proposals are those of a run that nobody interrupted, bit for bit if this machine can tell."""
    expected = {member: sha256 for member, (_, state, sha256) in EXPECTED[name].items() if state == "finished"}
    if project("witness").witness(project("pictures")) == EXPECTED["witness"]:
        assert weights == expected
        assert declared == [params for params, _, _ in EXPECTED[name].values()]
        return
    for params, (wanted, _, _) in zip(declared, EXPECTED[name].values(), strict=True):
        assert params == pytest.approx(wanted, rel=1e-3) if name == "searched" else params == wanted
    other = run.with_name("uninterrupted")
    submitted(project(name), other)
    for member in weights.keys() & last(other, "finished").keys():
        for key, tensor in tensors(other, member).items():
            assert torch.allclose(tensors(run, member)[key], tensor, rtol=0, atol=2e-2), (member, key)


@pytest.mark.parametrize("name", ["listed", "searched"])
def test_a_checkpoint_that_was_written_and_not_logged_is_gone_on_from(
    name: str, project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not where it is damaged: at the position of the log it has the weights of the log."""
    unpickles(name)
    run = copied(name, tmp_path)
    (member,) = (f"member-{number}" for number in STATES[name]["running"])
    assert last(run, "checkpoint")[member]["epoch"] == 1
    assert cli.main(["verify", str(run)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "newer than the log" in line] == [
        f"members/{member}/checkpoint-0.safetensors"
    ]
    log = (run / "events.jsonl").read_text()
    again = shutil.copytree(run, tmp_path / "again")
    (path,) = (again / "members" / member).glob("checkpoint-*.safetensors")
    logged = last(run, "checkpoint")[member]
    (again / "events.jsonl").write_text(log + json.dumps({**logged, "epoch": 2}, separators=(",", ":")) + "\n")
    assert cli.main(["verify", str(again)]) == 1
    for each, epoch in ((run, 2), (again, 0)):
        project(name)
        ensemble.resume(each, "inline").wait()
        assert last(each, "started")[member]["epoch"] == epoch
        assert [event["file"] for event in events(each, "damaged")] == ([] if epoch else [path.name])


def test_what_was_asked_of_a_controller_that_was_killed_is_answered(tmp_path: Path) -> None:
    unpickles("looped")
    run = copied("looped", tmp_path)
    (request,) = (OLD / "listed" / "requests").iterdir()
    shutil.copyfile(request, run / "requests" / request.name)
    ensemble.resume(run, "inline").wait()
    answer = events(run, "request")[-1]
    assert answer["request"] == request.stem and not answer["done"] and not list((run / "requests").iterdir())


def test_a_finished_one_is_loaded_and_predicts_what_it_did(project: Project, tmp_path: Path) -> None:
    unpickles("finished")
    run = copied("finished", tmp_path)
    ways: dict[str, dict[str, Any]] = {
        "own": {},
        "greedy": {"combine": "greedy"},
        "one": {"members": ["member-2"]},
    }
    models = {way: ensemble.load(run, **asked) for way, asked in ways.items()}
    image, _ = project("pictures").drawn(6, first=100)
    batch = {"image": (torch.tensor(image)[:, None] / 255 - 0.4) / 0.3}
    for way, model in models.items():
        assert np.allclose(model(batch).numpy(), EXPECTED["finished"][way], atol=1e-4), way


def test_one_that_is_not_at_its_end_is_loaded_as_far_as_it_is(tmp_path: Path) -> None:
    unpickles("searched")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ensemble.load(copied("searched", tmp_path), combine="average")
    predicted = model({"image": torch.zeros(2, 1, 8, 8)})
    assert predicted.shape == (2, 3) and torch.allclose(predicted.sum(dim=1), torch.ones(2), atol=1e-5)
