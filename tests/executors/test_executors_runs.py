"""Whole runs, the same on every executor; processes are real, and so is what kills them. Limits of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import read_events
from kit.execute_members import an_ensemble, loss, model, samples
from kit.finished_runs import finished_hashes, hashes, of_kind
from kit.leftovers import find_processes_below, wait_until

import ensemble
from ensemble import Member, Recipe, Resources, SpecError
from ensemble.controller.controller import Controller
from ensemble.schedule.needs import Node
from ensemble.store import StoreError

HERE = Path(__file__).parent


def by_state(result: ensemble.Result) -> dict[str, str]:
    return {row["member"]: row["state"] for row in result.members}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUN_UNDER_TEST", str(tmp_path / "run"))
    return tmp_path / "run"


def test_a_run_trains_combines_and_reports_and_a_member_that_diverges_is_the_only_one_that_fails(
    run_dir: Path, reference: dict[str, str | None]
) -> None:
    seen: list[str] = []
    declared = an_ensemble([{"lr": 0.1}, {"lr": 0.3, "fault": "nan"}, {"lr": 0.3}], epochs=4, retries=1)
    run = ensemble.submit(declared, run_dir, "inline", on_event=lambda event: seen.append(event["type"]))
    result = run.wait()
    assert by_state(result) == {"member-0": "finished", "member-1": "failed", "member-2": "finished"}
    assert [row["attempts"] for row in result.members] == [1, 1, 1], "the same batches give the same loss"
    metrics = [row["metric"] for row in result.members if row["state"] == "finished"]
    assert result.best is not None and result.best["metric"] == max(metrics)
    assert result.combined is not None and result.combined["metrics"]["ensemble"]["accuracy"] > 0.6
    assert result.ledger is not None and result.stopped is None
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert "finished" in run.logs("member-0")
    assert seen[0] == "run_started" and seen[-1] == "run_finished"
    assert run.status() == result.members
    assert all(hashes(run_dir)[member] == reference[member] for member in ("member-0", "member-2"))
    with pytest.raises(SpecError, match="member-1"):
        run.logs("member-7")


def test_a_stopped_run_goes_on_where_it_was(
    run_dir: Path, reference: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)  # requests are seen at once
    declared = an_ensemble([{"lr": lr} for lr in (0.1, 0.2, 0.3, 0.4)], epochs=4)

    def stop_early(event: dict[str, Any]) -> None:
        if event["type"] == "epoch":
            run.stop()

    run = ensemble.submit(declared, run_dir, "inline", on_event=stop_early)
    with pytest.raises(StoreError, match="is in progress"):
        ensemble.resume(run_dir)
    result = run.wait()
    assert result.stopped and list(by_state(result).values()) == ["stopped", "waiting", "waiting", "waiting"]
    with pytest.raises(StoreError, match="member-0 has params"):
        ensemble.submit(an_ensemble([{"lr": 0.7}], epochs=4), run_dir, "inline")
    result = ensemble.resume(run_dir).wait()
    assert set(by_state(result).values()) == {"finished"}
    assert hashes(run_dir) == reference


@pytest.mark.more
@pytest.mark.parametrize(("workers", "at"), [(1, (0, 2)), (2, (1, 0))])
def test_a_member_that_is_evaluated_for_longer_than_a_stop_may_take_is_not_killed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, workers: int, at: tuple[int, int]
) -> None:
    """One of one worker leaves its evaluation; ranks of another end theirs, and show meanwhile that they live."""
    monkeypatch.setitem(Controller.__init__.__kwdefaults__, "stop_timeout_s", 3.0)
    members = [Member({"lr": 0.1, "step_s": 0.7}, workers=workers)]
    declared = an_ensemble(members, train=samples(8, 0), batch_size=4, epochs=1)

    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["step"] == 2 and not stopped:
            stopped.append(event)
            run.stop()

    stopped: list[dict[str, Any]] = []
    run = ensemble.submit(declared, run_dir, "local", on_event=stop)
    assert by_state(run.wait()) == {"member-0": "stopped"}
    events = read_events(run_dir / "events.jsonl")
    assert [(e["epoch"], e["step"]) for e in events if e["type"] == "checkpoint"] == [at]


@pytest.mark.more  # of the feeder alone: test_executors_moves.py
def test_losing_the_feeder_and_the_fork_server_changes_nothing(
    run_dir: Path, reference: dict[str, str | None]
) -> None:
    killed: list[str] = []

    def kill_both(event: dict[str, Any]) -> None:
        if event["type"] == "epoch" and not killed:
            running = [(p, p.cmdline()) for p in find_processes_below(run_dir)]
            for module in ("pipelines.feeder.process", "ensemble.executors.forkserver"):
                of_module = [p for p, command in running if module in command]
                min(of_module, key=lambda p: p.create_time()).kill()  # the server is older than what it forked
                killed.append(module)

    narrow = [{"lr": lr, "step_s": 0.2, "spawn": lr == 0.1} for lr in (0.1, 0.2, 0.3)]
    wide = [Member({"lr": 0.1, "step_s": 0.2}, workers=2) for _ in range(2)]  # ranks get over it together
    members: list[Any] = [*narrow, *wide]
    declared = an_ensemble(members, epochs=4, capacity=64, resources=Resources(cpus_per_worker=0.1))
    run = ensemble.submit(declared, run_dir, "local", on_event=kill_both)
    result = run.wait()
    assert {(row["state"], row["attempts"]) for row in result.members} == {("finished", 1)} and len(killed) == 2
    assert all(hashes(run_dir)[f"member-{n}"] == reference[f"member-{n}"] for n in range(3))
    waited_s, private = Counter[str](), Counter[str]()
    for event in of_kind(run_dir, "epoch"):
        waited_s[event["member"]] += event["waited_s"]
        private[event["member"]] += event["private_batches"]
    assert private["member-3"] and private["member-4"], "in between each wide member reads by itself"
    assert max(waited_s.values()) < 150, "nobody waits for the gate's whole time"
    wait_until(lambda: not find_processes_below(run_dir), "what members start ends with them")


#: What launchers of jobs set, which a member is not part of.
LAUNCHED = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
LAUNCHED |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3"}


def model_that_notes_its_environment(params: dict[str, Any]) -> Any:
    names = (*LAUNCHED, "SLURM_JOB_ID")
    Path(params["note"]).write_text(json.dumps({name: os.environ.get(name) for name in names}))
    return model(params)


def as_default_dtype(values: Any) -> Any:
    import torch

    return torch.tensor(values.tolist()).numpy()


@pytest.mark.parametrize("executors", [("inline",), pytest.param(("inline", "local"), marks=pytest.mark.more)])
def test_a_member_is_no_rank_of_the_job_in_which_the_run_was_started_and_has_its_global_settings(
    executors: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    for name, value in {**LAUNCHED, "SLURM_JOB_ID": "77"}.items():
        monkeypatch.setenv(name, value)
    note, weights = tmp_path / "note", []
    recipe = Recipe(model=model_that_notes_its_environment, loss=loss, task="classification")
    torch.set_default_dtype(torch.float64)  # as a spec does when it is imported, which no member does
    try:
        train, valid = (samples(*of).map(as_default_dtype, field="x", version=1) for of in ((96, 0), (48, 1)))
        members = [{"lr": 0.1, "note": str(note)}]
        declared = an_ensemble(members, epochs=1, recipe=recipe, train=train, valid=valid)
        for executor in executors:
            ensemble.submit(declared, tmp_path / executor, executor).wait()
            weights.append(finished_hashes(tmp_path / executor))
            own = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_JOB_ID": "77"}
            assert json.loads(note.read_text()) == {**dict.fromkeys(LAUNCHED), **own}
            note.unlink()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(sha256 == weights[0] for sha256 in weights)
    assert {name: os.environ.get(name) for name in LAUNCHED} == LAUNCHED


def test_a_node_is_offered_within_the_limits_a_gpu_in_parts_as_one() -> None:
    parents = ("GPU-0", "GPU-0", "GPU-1", "GPU-2")
    node = Node("n", 8.0, ("A",) * 4, 64.0, "n", gpu_ids=("a", "b", "c", "d"), gpu_parents=parents)
    limited = node.limit({"gpus": 2, "cpus": 3.0})
    assert (limited.gpu_ids, limited.cpus) == (("a", "b", "c"), 3.0)
    assert node.limit({}) == node and node.limit({"gpus": 0}).gpus == ()


def test_a_run_goes_on_under_other_limits_to_the_same_weights(tmp_path: Path) -> None:
    declared = an_ensemble(limits={"cpus": 1.0})
    ensemble.submit(declared, tmp_path / "run", executor="inline").wait()
    again = ensemble.resume(tmp_path / "run", epochs=3, limits={"cpus": 1.5})
    again.wait()
    ensemble.submit(an_ensemble(epochs=3), tmp_path / "free", executor="inline").wait()
    assert finished_hashes(tmp_path / "run") == finished_hashes(tmp_path / "free")
    started = of_kind(tmp_path / "run", "run_started")
    assert [event.get("limits") for event in started] == [{"cpus": 1.0}, {"cpus": 1.5}]
    assert of_kind(tmp_path / "run", "node")[0]["cpus"] == 1.0


@pytest.mark.more
def test_options_limit_what_runs_at_once(tmp_path: Path) -> None:
    spec = tmp_path / "limited_spec.py"
    spec.write_text("from kit.execute_members import an_ensemble\n\ndef spec():\n    return an_ensemble()\n")
    command = [sys.executable, "-m", "ensemble.cli", "run", str(spec), "--run-dir", str(tmp_path / "run")]
    limited = [*command, "--executor", "local", "--max-cpus", "1", "--max-gpus=0"]
    here = os.pathsep.join(filter(None, sys.path))  # of what the spec imports
    done = subprocess.run(limited, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": here})
    assert done.returncode == 0, done.stderr
    placed, finished = (of_kind(tmp_path / "run", kind) for kind in ("placed", "finished"))
    assert placed[1]["t"] >= finished[0]["t"], "one member at a time"
    (started,) = of_kind(tmp_path / "run", "run_started")
    assert started["limits"] == {"gpus": 0, "cpus": 1.0}
