"""Runs that are gone on with: what a resume takes up again, and what it refuses."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import execute_members
from kit.finished_runs import of_kind, once, read_state

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.cli.parser import main
from ensemble.store import RunDir, StoreError
from pipelines import Pipeline, sources
from pipelines.errors import PipelineError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("requests_are_seen_at_once")


def model(params: dict[str, Any]) -> Any:
    made = torch.nn.Linear(4, 3)
    made.broken = Path(params["broken"]) if "broken" in params else None
    return made


def loss(model: Any, batch: Any) -> Any:
    """With the marker `broken` the member's checkpoint cannot be written."""
    if model.broken is not None and model.broken.exists():
        for attempt in range(3):
            in_the_way = RunDir(model.broken.read_text()).checkpoint("member-1", attempt, 1, 0)
            in_the_way.mkdir(parents=True, exist_ok=True)
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def samples(n: int = 24, seed: int = 0) -> Pipeline:
    x = np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32)
    return Pipeline(sources.arrays(x=x, label=np.arange(n) % 3), seed=seed)


def an_ensemble(members: list[Any] | None = None, **options: Any) -> Ensemble:
    given = {"train": samples(), "sharing": "independent", "epochs": 2, "batch_size": 8, "retries": 0, **options}
    recipe = Recipe(model=model, loss=loss)
    given.setdefault("checkpoint_every", 1)
    return Ensemble(name="again", recipe=recipe, members=members or [{"lr": 0.1}, {"lr": 0.2}], **given)


def members(path: Path) -> dict[str, tuple[str, int]]:
    state = read_state(path)
    return {member.id: (member.state, member.attempts) for member in state.members.values()}


def test_a_run_of_which_no_member_finished_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    declared = execute_members.an_ensemble([{"lr": 0.1, "fault": "build"}], retries=0)
    ensemble.submit(declared, tmp_path / "run", "inline").wait()
    assert "no member finished: " in caplog.text and "this model cannot be built" in caplog.text


def test_what_failed_is_taken_up_by_a_resume_once_it_is_mended(tmp_path: Path) -> None:
    path, marker = tmp_path / "run", tmp_path / "marker"
    marker.write_text(str(path))
    ensemble.submit(an_ensemble([{"lr": 0.1}, {"lr": 0.2, "broken": str(marker)}]), path, "inline").wait()
    assert members(path) == {"member-0": ("finished", 1), "member-1": ("failed", 1)}
    assert read_state(path).members["member-1"].reason == "disk"

    ensemble.resume(path).wait()
    assert members(path)["member-1"] == ("failed", 2), "nothing was mended"

    marker.unlink()
    for in_the_way in RunDir(path).member("member-1").glob("checkpoint-*"):
        in_the_way.rmdir()
    ensemble.resume(path).wait()
    assert members(path) == {"member-0": ("finished", 1), "member-1": ("finished", 3)}


@pytest.mark.parametrize("left", ["directory", "empty log"])
def test_a_run_that_was_killed_before_it_began_is_begun_by_its_spec(
    tmp_path: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir.create(tmp_path / "a run", an_ensemble())
    if left == "empty log":
        run_dir.events.touch()
    remedy = f"`ensemble run SPEC.py --run-dir '{run_dir.path}'`"
    with pytest.raises(StoreError, match=re.escape(remedy)):
        ensemble.resume(run_dir.path, "inline")
    assert main(["resume", str(run_dir.path)]) == 2 and remedy in capsys.readouterr().err


def stopped(path: Path, **options: Any) -> None:
    stop = once("epoch", lambda: run.stop())
    run = ensemble.submit(an_ensemble(epochs=6, **options), path, "inline", on_event=stop)
    assert run.wait().stopped


def twice(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"x": sample["x"] * 2}


def test_a_run_is_not_gone_on_with_on_other_data(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    before = RunDir(tmp_path / "run").events.read_bytes()
    changed = "the training pipeline has changed"
    for options, said in (
        ({"train": samples(25)}, "samples of train was 24, is 25"),
        ({"drop_last": True}, "drop_last was False, is True"),
        *(({"train": samples(seed=9)}, changed), ({"train": samples().map(twice)}, changed)),
    ):
        with pytest.raises(StoreError, match=said) as caught:
            ensemble.submit(an_ensemble(epochs=6, **options), tmp_path / "run", "inline")  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert RunDir(tmp_path / "run").events.read_bytes() == before
    ensemble.submit(an_ensemble(epochs=6), tmp_path / "run", "inline").wait()
    assert {state for state, _ in members(tmp_path / "run").values()} == {"finished"}
    stopped(tmp_path / "own", train=lambda params: samples())
    other = an_ensemble(epochs=6, train=lambda params: samples().map(twice))
    with pytest.raises(StoreError, match="the training pipeline of member-0 has changed"):
        ensemble.submit(other, tmp_path / "own", "inline")


def test_a_run_goes_on_with_its_data_from_where_they_were_copied_to(tmp_path: Path) -> None:
    there, here, run = tmp_path / "server", tmp_path / "local disk", tmp_path / "run"
    there.mkdir()
    for name, values in {"x": np.ones((24, 4), np.float32), "label": np.arange(24) % 3}.items():
        np.save(there / f"{name}.npy", values)

    def read(folder: Path) -> Pipeline:
        return Pipeline(sources.memmap(x=folder / "x.npy", label=folder / "label.npy"))

    stopped(run, train=read(there))
    shutil.copytree(there, here, copy_function=shutil.copyfile)  # with other times
    shutil.rmtree(there)
    values = np.load(here / "label.npy")
    np.save(here / "label.npy", values[::-1])
    with pytest.raises(StoreError, match="the training pipeline has changed"):
        ensemble.submit(an_ensemble(epochs=6, train=read(here)), run, "inline")
    np.save(here / "label.npy", values)
    ensemble.submit(an_ensemble(epochs=6, train=read(here)), run, "inline").wait()
    assert {state for state, _ in members(run).values()} == {"finished"}


def test_hyperparameters_that_nothing_reads_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = ensemble.submit(an_ensemble([{"lr": 0.1, "momentun": 0.9}] * 3), tmp_path / "run", "inline")
    assert {row["state"] for row in run.wait().members} == {"finished"}
    told = of_kind(tmp_path / "run", "unused_hyperparameters")
    assert [(event["member"], event["params"]) for event in told] == [("member-0", ["momentun"])]
    assert told[0]["meant"] == {"momentun": "momentum"}
    said = "nothing reads the hyperparameter 'momentun'; did you mean 'momentum'? (member-0)"
    assert caplog.text.count(said) == 1 and said in (tmp_path / "run" / "report.html").read_text()


def test_a_run_is_private_until_its_owner_opens_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"
    umask = os.umask(0o007)
    try:
        ensemble.submit(an_ensemble([{"lr": 0.1}], epochs=1), path, "inline").wait()
    finally:
        os.umask(umask)
    modes = {str(each.relative_to(tmp_path)): each.stat().st_mode for each in (path, *path.rglob("*"))}
    group = {name for name, mode in modes.items() if mode & 0o040}
    assert stat.S_IMODE(modes["run"]) == 0o700, "others get in only when the owner lets them"
    looked_at = {"events.jsonl", "run.json", "report.html", "ledger.json", "ledger.csv", "members"}
    looked_at |= {f"members/member-0{name}" for name in ("", "/log.txt")}
    assert {f"run/{name}" for name in looked_at} <= group
    assert not modes["run/ensemble.pkl"] & 0o077 and not modes["run/requests"] & 0o077
    assert not any(mode & 0o022 for mode in modes.values()), "and nobody else writes"


def test_a_run_that_has_finished_is_resumed_without_its_data(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("a,label\n" + "".join(f"{n}.5,{n % 2}\n" for n in range(8)))
    pipe = Pipeline(sources.csv(str(data))).map(lambda s: {"x": np.float32([s["a"]]), "label": int(s["label"])})
    recipe = Recipe(model=lambda params: torch.nn.Linear(1, 2), loss="cross_entropy", inputs=("x",))
    usual: dict[str, Any] = {"members": [{"lr": 0.1}], "epochs": 1, "batch_size": 4, "train": pipe, "valid": pipe}
    ensemble.submit(Ensemble(name="gone", recipe=recipe, **usual), tmp_path / "run", "inline").wait()
    data.unlink()
    ensemble.resume(tmp_path / "run").wait()
    with pytest.raises(PipelineError, match="no such file"):
        ensemble.resume(tmp_path / "run", epochs=2)
