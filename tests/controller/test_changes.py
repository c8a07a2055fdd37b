"""What changed since a run began: never used in silence, and what failed is tried again once it is mended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.edited_log import replace_in_log
from kit.event_dicts import fold, lines, read_events

import ensemble
from ensemble.cli import parser as cli
from ensemble.spec.spec_file import load_spec
from ensemble.store import RunDir, RunState, StoreError, load_checkpoint, save_checkpoint
from ensemble.user_code.fingerprint import PYTHON, Code
from pipelines.fingerprint import SCHEME
from tests.search.studies import read_study

torch = pytest.importorskip("torch")

SPEC = """
import numpy as np
import torch
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources
from beside import Net, scale

STOP = None

def model(params):
    return Net(params.get("by", 1.0))

def loss(model, batch):
    return scale * torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")

def metrics(outputs, batch):
    if STOP is not None and STOP.exists():
        from ensemble.store import write_request
        write_request(STOP.read_text(), "stop")
    return {}

def spec(members: int = 2, epochs: int = 2):
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    pipe = Pipeline(sources.arrays(x=x, label=np.arange(12) % 3))
    return Ensemble(
        name="tried", recipe=Recipe(model=model, loss=loss, metrics=metrics),
        members=[{"lr": 0.1 * (n + 1)} for n in range(members)], train=pipe, valid=pipe,
        epochs=epochs, batch_size=4, retries=2,
    )
"""
BESIDE = """
import torch

scale = 1.0

class Net(torch.nn.Linear):
    def __init__(self, by):
        super().__init__(4, 3)
        self.by = by

    def forward(self, x):
        return super().forward(x) * self.by
"""


class Project:
    """A spec file and a module beside it, as a user edits them, and the commands that they give."""

    def __init__(self, folder: Path, capture: Any, logged: pytest.LogCaptureFixture) -> None:
        self.folder, self.run_dir, self.stop = folder / "project", folder / "run", folder / "stop"
        self.folder.mkdir()
        self._capture, self._logged = capture, logged
        self.spec, self.beside = self.folder / "a_spec.py", self.folder / "beside.py"
        self.spec.write_text(SPEC.replace("None", f"__import__('pathlib').Path({str(self.stop)!r})", 1))
        self.beside.write_text(BESIDE)

    def edit(self, *changes: str, file: Path | None = None) -> None:
        """Replace in the spec file, or another: old, new, old, new ..."""
        text = (file or self.spec).read_text()
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            assert old in text
            text = text.replace(old, new)
        (file or self.spec).write_text(text)

    def forget(self) -> None:
        """As a new process would: nothing of the project is imported."""
        for name in ("a_spec", "beside"):
            sys.modules.pop(name, None)
        sys.path[:] = [each for each in sys.path if each != str(self.folder)]
        sys.path_importer_cache.clear()

    def command(self, *words: str) -> tuple[int, str]:
        """Exit status, and what was said on standard error and by loggers."""
        self.forget()
        self._capture.readouterr()
        self._logged.clear()
        status = cli.main(list(words))
        said = [record.getMessage() for record in self._logged.records if record.name.startswith("ensemble")]
        return status, "\n".join([*said, self._capture.readouterr().err])

    def run(self, *words: str) -> tuple[int, str]:
        return self.command("run", str(self.spec), "--run-dir", str(self.run_dir), "--executor", "inline", *words)

    def run_and_stop(self) -> None:
        """A run that was stopped after its first epoch."""
        self.stop.write_text(str(self.run_dir))
        self.run()
        self.stop.unlink()
        assert self.state().ended and self.state().ended.type == "run_stopped"  # type: ignore[index]
        assert self.state().members["member-0"].checkpoint

    def state(self, name: str = "run") -> RunState:
        return fold(read_events(RunDir(self.run_dir.with_name(name)).events))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(RunDir(self.run_dir).events) if event["type"] == kind]

    def states(self, name: str = "run") -> set[str]:
        return {member.state for member in self.state(name).members.values()}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any) -> Iterator[Project]:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)  # requests are seen at once
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # what is edited within a second is to be read anew
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    report = "ensemble.reporting.report.write_report"
    monkeypatch.setattr(report, lambda run, events: run.report.write_text("none"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = Project(tmp_path, capsys, caplog)
    yield made
    made.forget()


EDITED_LOSS = ('reduction="none")', 'reduction="none", label_smoothing=0.1)')


def test_a_run_is_not_gone_on_with_by_other_code_in_silence(project: Project) -> None:
    project.run_and_stop()
    log = RunDir(project.run_dir).events.read_bytes()
    project.edit(*EDITED_LOSS)
    status, said = project.run()
    assert status == 2 and "a_spec.loss" in said and "member-0" in said
    assert "--accept-code" in said and "--fresh" in said and RunDir(project.run_dir).events.read_bytes() == log
    status, said = project.run("--accept-code")
    assert status == 0 and "a_spec.loss" in said and project.states() == {"finished"}
    (change,) = project.events("code_changed")
    assert change["changed"] == ["a_spec.loss"] and "member-0" in change["trained"]
    more = ("--set", "members=3")
    assert project.run(*more)[0] == 0 and len(project.events("code_changed")) == 1, "it was accepted"
    project.edit("smoothing=0.1", "smoothing=0.2")
    assert project.run(*more)[0] == 2, "a further change was not"


def test_the_same_holds_for_a_module_beside_the_spec_and_in_python(project: Project) -> None:
    project.run_and_stop()
    project.edit("* self.by", "+ self.by", file=project.beside)
    project.forget()
    with pytest.raises(StoreError, match=r"beside\.Net\.forward.*accept_code=True"):
        ensemble.submit(load_spec(project.spec), project.run_dir, "inline", spec_file=project.spec)
    project.forget()
    again = ensemble.submit(load_spec(project.spec), project.run_dir, "inline", spec_file=project.spec, fresh=True)
    assert again.wait().run_dir == Path(f"{project.run_dir}-2") and project.states("run-2") == {"finished"}
    assert project.state().ended.type == "run_stopped"  # type: ignore[index]


def test_what_is_no_other_code_is_gone_on_with(project: Project) -> None:
    project.run_and_stop()
    project.edit("def loss(model, batch):", "# a comment\n\n\ndef loss(model, batch):\n    '''Says it.'''")
    moved = shutil.move(project.folder, project.folder.with_name("moved"))
    project.folder, project.spec = Path(moved), Path(moved) / "a_spec.py"
    status, said = project.run()
    assert status == 0 and "changed" not in said and project.events("code_changed") == []


def test_a_resume_goes_on_with_the_code_that_is_kept_and_says_what_was_edited(project: Project) -> None:
    project.run_and_stop()
    project.edit("scale = 1.0", "scale = 0.0", file=project.beside)
    status, said = project.command("resume", str(project.run_dir), "--accept-code")
    assert status == 2 and "`ensemble run SPEC.py --accept-code` goes on with the new code" in said
    status, said = project.command("resume", str(project.run_dir))
    assert status == 0 and "beside.py changed since" in said and "a_spec" not in said
    assert project.events("code_changed") == [] and project.states() == {"finished"}
    trained = [event["train_loss"] for event in project.events("epoch")]
    assert min(trained) > 0.0, "a scale of 0 is what the file says now"


def replace_prints(project: Project, field: str, *, recorded: Any, by: dict[str, Any], samples: int = 12) -> None:
    """Let what the run and its checkpoints say be of others, who say so in a field: nothing of it can be what is
    computed now.

    Args:
        recorded: what the field says. by: what the others say instead.
    """
    run = RunDir(project.run_dir)
    code = project.state().header.code
    kept = run.code(code) / "code.json"

    def change(said: dict[str, Any], was: Any = recorded) -> dict[str, Any]:
        assert said[field] == was
        return {**{name: value for name, value in said.items() if name != field}, **by}

    of_code = Code("", {}).scheme if field == "scheme" else recorded
    kept.write_text(json.dumps(change(json.loads(kept.read_text()), of_code)))
    if field == "python":
        for file in (run.ensemble_file, kept.with_name("ensemble.pkl")):
            with open(file, "rb") as declaration:
                _, settings = pickle.load(declaration)
                content = pickle.dumps((by[field], settings)) + declaration.read()
            file.unlink()  # both may be links to one
            file.write_bytes(content)
    run.code(code).rename(run.code("0" * 16))
    events = []
    for line in run.events.read_text().replace(code, "0" * 16).splitlines():
        event = {name: value for name, value in json.loads(line).items() if name != "crc"}
        for one in (event, event.get("checkpoint") or {}):  # their digests are of what was written
            for name in ("files", "digest", "predictions"):
                one.pop(name, None)
        if "data" in event:
            event["data"] = {**change(event["data"]), "fingerprint": "0" * 32, "samples": samples}
        events.append(event)
    run.events.write_bytes(lines(events))
    checkpoints = list(run.path.glob("members/*/checkpoint-*.safetensors"))
    assert checkpoints
    for path in checkpoints:
        state = load_checkpoint(path)
        state["data"] = {**change(state["data"]), "fingerprint": "0" * 32, "samples": samples}
        save_checkpoint(path, state)


def made_by_another_version(project: Project, samples: int = 12) -> None:
    replace_prints(project, "scheme", recorded=SCHEME, by={"scheme": SCHEME - 1}, samples=samples)


def test_a_run_of_another_python_goes_on_with_a_declaration_that_this_one_compiled(project: Project) -> None:
    project.run_and_stop()
    replace_prints(project, "python", recorded=PYTHON, by={"python": "3.0"})
    status, said = project.command("resume", str(project.run_dir))
    assert status == 2 and f"holds functions as Python 3.0 compiled them, which Python {PYTHON} cannot run" in said
    with pytest.raises(StoreError, match=r"use Python 3\.0, or submit"):
        ensemble.load(project.run_dir)
    status, said = project.run()
    assert status == 0 and project.states() == {"finished"}
    assert "whether the code changed is not known: another version of Python recorded it" in said
    assert f"Python 3.0 compiled the functions of its stages then, Python {PYTHON} does now" in said
    trained = [event["epoch"] for event in project.events("epoch") if event["member"] == "member-0"]
    assert trained == [0, 1], "it goes on from its checkpoint"


def test_a_run_of_another_version_goes_on_and_it_is_said_what_could_not_be_compared(project: Project) -> None:
    project.run_and_stop()
    made_by_another_version(project)
    status, said = project.run()
    assert status == 0 and project.states() == {"finished"}
    assert "only the number of the training samples is compared" in said
    assert "recorded by another version of ray-ensemble" in said and "whether the code changed" in said
    assert project.events("code_changed") == []
    assert project.state().header.data["scheme"] == SCHEME
    trained = [event["epoch"] for event in project.events("epoch") if event["member"] == "member-0"]
    assert trained == [0, 1], "it goes on from its checkpoint"
    status, said = project.run()  # what is recorded now can be compared
    assert status == 0 and "another version" not in said


def test_other_lengths_are_refused_even_of_another_version(project: Project) -> None:
    project.run_and_stop()
    made_by_another_version(project, samples=11)
    for status, said in (project.run(), project.command("resume", str(project.run_dir))):
        assert status == 2 and "samples of train was 11, is 12" in said


@pytest.mark.parametrize(
    ("split", "other", "message"),
    [
        ("valid=pipe", "x=x + 1, label=np.arange(12) % 3", "valid has changed"),
        ("test=unseen", "x=x[:6], label=np.arange(6) % 3", "test had 12 samples, has 6"),
    ],
)
def test_members_go_on_with_other_validation_or_test_data_and_those_that_have_finished_are_evaluated_again(
    project: Project, split: str, other: str, message: str
) -> None:
    unseen = "    unseen = Pipeline(sources.arrays(x=x, label=np.arange(12) % 3))\n    return Ensemble("
    project.edit("valid=pipe,", "valid=pipe, test=unseen, allow_overlap=True,", "    return Ensemble(", unseen)
    project.run_and_stop()
    finished = len(project.events("finished"))
    project.edit(split, f"{split.partition('=')[0]}=Pipeline(sources.arrays({other}))")
    status, said = project.run()
    assert status == 0 and project.states() == {"finished"} and message in said, said
    assert len(project.events("epoch")) == 4, "none is trained again"
    assert len(project.events("finished")) == 2 + finished


def test_who_cannot_be_evaluated_again_stays_finished_and_the_next_resume_tries(project: Project) -> None:
    broken = project.folder / "broken"
    search = "search=Search({'lr': 0.1, 'by': choice(1.0, 2.0)}, sampler='grid', trials=2),"
    search += "objective='loss', mode='min', keep_checkpoints='selected',"
    project.edit('members=[{"lr": 0.1 * (n + 1)} for n in range(members)],', search)
    project.edit("import Ensemble, Recipe", "import Ensemble, Recipe, Search, choice")
    project.edit("valid=pipe", "valid=Pipeline(sources.arrays(x=x, label=np.arange(12) % 3))")
    here = f"if self.by == 2.0 and __import__('os').path.exists({str(broken)!r}): raise ValueError('it is broken')"
    forward = "        return super().forward"
    project.edit(forward, f"        {here}\n{forward}", file=project.beside)
    assert project.run()[0] == 0
    before = project.state()
    (failing,) = (member.id for member in before.members.values() if member.params["by"] == 2.0)
    project.edit("valid=Pipeline(sources.arrays(x=x", "valid=Pipeline(sources.arrays(x=x + 1")
    broken.touch()
    status, said = project.run()
    for _ in range(2):
        state = project.state()
        member = state.members[failing]
        assert status == 3 and "it is broken" in said and project.states() == {"finished"}
        assert "it is broken" in str(member.outdated) and "could not be evaluated again" in member.remarks[-1]
        assert member.metrics == before.members[failing].metrics and len(member.remarks) == 1
        assert state.combined is not None and failing not in state.combined.members and state.combined.members
        status, said = project.command("resume", str(project.run_dir), "--executor", "inline")
        assert f"{failing} will predict again, without training" in said
    trials = read_study(RunDir(project.run_dir).journal, "tried").trials
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    broken.unlink()
    assert project.command("resume", str(project.run_dir), "--executor", "inline")[0] == 0
    member, state = project.state().members[failing], project.state()
    assert member.outdated is None and member.remarks == [] and len(project.events("epoch")) == 4
    assert member.metrics != before.members[failing].metrics
    assert state.combined is not None and failing in (state.combined.candidates or ())
    assert project.command("resume", str(project.run_dir), "--executor", "inline")[0] == 0
    assert len(project.events("run_started")) == 5, "nothing is left to be done"


def test_who_starts_with_weights_that_have_seen_its_validation_data_is_warned_of(project: Project) -> None:
    data = "    data = sources.arrays(x=x, label=np.arange(12) % 3)\n"
    data += "    train, valid = (Pipeline(part) for part in data.split(0.5, key=[*'abcdefghijkl']))\n"
    project.edit("    return E", f"{data}    return E", "train=pipe, valid=pipe", "train=train, valid=valid")
    assert project.run("--set", "members=1")[0] == 0
    first = project.run_dir.rename(project.run_dir.with_name("first"))
    started = f"members=[Member({{'lr': 0.1}}, start={str(first / 'member-0')!r})]"
    project.edit('members=[{"lr": 0.1 * (n + 1)} for n in range(members)]', started)
    project.edit("import Ensemble,", "import Ensemble, Member,")
    assert "trained on other data" not in project.run()[1], "the same parts"
    shutil.rmtree(project.run_dir)
    project.edit("split(0.5", "split(0.3")
    status, said = project.run()
    assert status == 0
    assert re.search(r"member-0 starts with the weights of .*trained on other data \(samples of train was", said)


def test_load_builds_members_with_the_code_they_were_trained_with(project: Project) -> None:
    assert project.run()[0] == 0
    batch = {"x": torch.ones(2, 4)}
    project.forget()
    before = ensemble.load(project.run_dir)(batch)
    project.edit("* self.by", "* 0.0", file=project.beside)
    project.forget()
    sys.path.insert(0, str(project.folder))
    import beside  # type: ignore[import-not-found] # as a notebook may have done

    assert beside.Net(1.0)(batch["x"]).abs().sum() == 0
    assert torch.equal(ensemble.load(project.run_dir)(batch), before)
    # A declaration that was accepted, but whose start failed.
    project.forget()
    RunDir.create(project.run_dir, load_spec(project.spec), project.spec)
    project.forget()
    assert torch.equal(ensemble.load(project.run_dir)(batch), before)
    # Members of both codes, each with its own.
    status, _ = project.run("--accept-code", "--set", "members=3")
    assert status == 0 and len(project.state().members) == 3
    assert len({member.code for member in project.state().members.values()}) == 2
    old, new = (ensemble.load(project.run_dir, members=[name])(batch) for name in ("member-0", "member-2"))
    assert not torch.allclose(old, torch.full((2, 3), 1 / 3)) and torch.allclose(new, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ('batch["label"], reduction', 'batch["lable"], reduction', "a_spec.loss"),
        ("pipe = Pipeline(sources.arrays(x=x,", "pipe = Pipeline(sources.arrays(x=x.astype(np.int32),", None),
    ],
    ids=["misspelt", "data"],
)
def test_what_failed_is_tried_again_by_the_same_command_once_it_is_mended(
    project: Project, right: str, wrong: str, named: str | None
) -> None:
    project.edit(right, wrong)
    status, _ = project.run()
    assert status == 1 and project.states() == {"failed"}
    project.edit(wrong, right)
    status, said = project.run()
    assert status == 0 and project.states() == {"finished"}
    assert [event["changed"][0] for event in project.events("code_changed")] == ([named] if named else [])
    assert named is None or named in said, "what is new is named"


def test_trials_that_begin_anew_are_declared_as_those_that_follow(project: Project) -> None:
    project.edit('members=[{"lr": 0.1 * (n + 1)} for n in range(members)]', "search=SEARCH")
    search = "ensemble.Search({'lr': ensemble.uniform(0.1, 0.2)}, trials=2, sampler='random', pruner='none')"
    project.edit("STOP =", f"import ensemble\nSEARCH = {search}\nSTOP =", "return Net", "return Not")
    assert project.run()[0] == 1 and project.states() == {"failed"}
    tried = [member.params for member in project.state().members.values()]
    project.edit("return Not", "return Net", "batch_size=4", "batch_size=6", "trials=2", "trials=3")
    assert project.run()[0] == 0 and project.states() == {"finished"}
    members = list(project.state().members.values())
    assert [member.identity["batch_size"] for member in members] == [6, 6, 6]
    assert [member.params for member in members[:2]] == tried


def test_what_failed_is_tried_again_though_nothing_was_mended_and_what_finished_is_not(project: Project) -> None:
    project.edit("return Net", "assert params['lr'] < 0.15\n    return Net")
    assert project.run()[0] == 3
    assert [m.state for m in project.state().members.values()] == ["finished", "failed"]
    attempts = project.state().members["member-1"].attempts
    assert attempts == 2, "the same exception at the same step: a third time would be no other, whatever `retries`"
    assert project.run()[0] == 3
    members = project.state().members
    assert members["member-0"].attempts == 1 and members["member-1"].attempts > attempts


def test_a_run_that_was_stopped_before_anything_finished_is_a_failure(project: Project) -> None:
    project.stop.write_text(str(project.run_dir))
    status, _ = project.run()
    assert status == 1 and "finished" not in project.states()


def test_an_attempt_that_was_given_up_changes_nothing_of_the_one_that_followed(project: Project) -> None:
    project.run_and_stop()
    run = RunDir(project.run_dir)
    first = run.valid_checkpoint(project.state().members["member-0"])
    behind = first.read_bytes()  # what a first attempt behind a broken network still holds
    assert project.run()[0] == 0
    second = run.valid_checkpoint(project.state().members["member-0"])
    assert second != first and second.exists() and not first.exists(), "only the valid one is kept"
    project.forget()
    batch = {"x": torch.ones(1, 4)}
    before = ensemble.load(run.path)(batch)
    first.write_bytes(behind)  # it comes back, and saves where it always did
    (run.member("member-0") / "predictions-0.safetensors").write_bytes(b"of the past")
    assert torch.equal(ensemble.load(run.path)(batch), before)
    assert torch.equal(ensemble.load(run.path, combine="greedy")(batch).sum(dim=1).round(), torch.ones(1))


def test_a_global_setting_of_a_library_is_code_and_a_default_device_is_refused(project: Project) -> None:
    project.run_and_stop()
    usual = torch.backends.cudnn.benchmark
    try:
        project.edit("STOP =", "torch.backends.cudnn.benchmark = True\nSTOP =")
        status, said = project.run()
        assert status == 2 and "(torch.backends.cudnn.benchmark: True)" in said and "--accept-code" in said
        assert project.run("--accept-code")[0] == 0
        assert project.state().header.settings == {"torch.backends.cudnn.benchmark": True}
        project.edit("torch.backends.cudnn.benchmark = True", 'torch.set_default_device("meta")')
        status, said = project.run("--fresh")
        assert status == 2 and "torch's default device is meta" in said
    finally:
        torch.backends.cudnn.benchmark = usual
        torch.set_default_device(None)


def test_other_versions_of_libraries_are_said_and_other_major_ones_are_to_be_accepted(project: Project) -> None:
    project.run_and_stop()
    log = RunDir(project.run_dir).events
    now = json.dumps(project.state().header.versions["torch"])
    before = {"minor": now[:-1] + '.1"', "major": '"1.13.1"'}
    replace_in_log(log, f'"torch":{now}', f'"torch":{before["major"]}')
    status, said = project.run()
    assert status == 2 and f"torch was 1.13.1, is {json.loads(now)}" in said and "--accept-code" in said
    status, said = project.command("resume", str(project.run_dir))
    assert status == 2 and "kernels, initial weights and random numbers may differ" in said
    replace_in_log(log, f'"torch":{before["major"]}', f'"torch":{before["minor"]}')
    status, said = project.run()
    assert status == 0 and f"torch was {json.loads(before['minor'])}, is {json.loads(now)}" in said
    assert project.states() == {"finished"}


def test_a_run_that_is_older_than_an_option_goes_on_with_its_default(tmp_path: Path) -> None:
    from test_controller import an_ensemble

    from ensemble.controller.changes import check_same
    from ensemble.controller.starts import find_redeclared
    from ensemble.store.member import MemberState

    older = {"name": "damped", "gamma": 0.97}
    # A hyperparameter of that name was the model's alone, and would now be the option's, too.
    cases = ({"lr": 0.1}, older, False), ({"lr": 0.1}, {**older, "gamma": 0.9}, True), ({"n0": 7}, older, True)
    for params, before, differs in cases:
        declared = an_ensemble(members=[params], batch_size=4, schedule=older)
        identity = {**dataclasses.asdict(declared.identify(0)), "schedule": before}
        member = MemberState(id="member-0", number=0, identity=identity, state="finished")
        state = RunState(members={"member-0": member})
        with pytest.raises(StoreError, match="schedule=") if differs else contextlib.nullcontext():
            check_same(state, declared, tmp_path)
        member.state = "waiting"  # it has not begun: a changed one is declared anew
        assert bool(find_redeclared(RunDir(tmp_path), state, declared.identify)[0]) == differs
