"""Errors inside this project are told as its own; members that fail alike, one after the other, stop the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.execute_members import an_ensemble, loss, model
from kit.finished_runs import of_kind, read_state

import ensemble
from ensemble import Recipe
from ensemble.cli.parser import main
from ensemble.spec import SpecError
from ensemble.train.forward_errors import describe_error
from ensemble.train.job import TrainingError
from ensemble.train.worker import classify
from pipelines.errors import PipelineError

OURS, USERS = "ensemble.train.invented", "my_program"


def catch(source: str, module: str = OURS, **names: Any) -> Exception:
    """The error that a line of a module raises."""
    with pytest.raises(Exception) as caught:
        exec(source, {"__name__": module, "torch": torch, **names})
    return caught.value


@pytest.mark.parametrize(
    "source", ["None.x", "{}['x']", "1 + 'x'", "raise NotImplementedError", "unknown", "1 / 0", "assert not 1"]
)
def test_an_operation_that_fails_in_our_own_line_is_told_as_ours_and_not_tried_again(source: str) -> None:
    error = catch("\n\n" + source)
    said = describe_error(error)
    assert said.startswith(
        f"an error inside ray-ensemble (ensemble/train/invented.py, line 3): {type(error).__name__}"
    )
    assert said.endswith("; please report it") and classify(error) == ("error", False)
    theirs = catch(source, USERS)
    assert "ray-ensemble" not in describe_error(theirs) and classify(theirs) == ("error", True)


def two(first: Any, second: Any) -> Any:
    return first.x + second.x


@pytest.mark.parametrize(
    ("source", "retry"),
    [
        ("raise TypeError('a checkpoint cannot hold your thing')", True),
        ("raise error('as declared')", False),
        ("two(1)", True),
        ("two(1, 2)", True),
        ("open('/no/such/file')", True),
        ("torch.ones(2) @ torch.ones(3)", True),
        ("torch.ones(2).sum()()", True),
    ],
)
def test_what_is_the_users_or_the_machines_stays_theirs(source: str, retry: bool) -> None:
    for kind in (TrainingError, SpecError, PipelineError):
        error = catch(source, two=two, error=kind)
        assert "ray-ensemble" not in describe_error(error) and classify(error) == ("error", retry)


class Irreps(tuple):  # type: ignore[type-arg]
    """A tuple of e3nn's kind, which has no length."""

    def __len__(self) -> int:
        raise NotImplementedError


def equivariant(params: dict[str, Any]) -> Any:
    made = model(params)
    made.irreps, made.nested = Irreps((1, 2)), {"out": [Irreps(()), torch.ones(2)]}
    return made


def test_a_model_with_a_container_that_has_no_length_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    declared = an_ensemble([{"lr": 0.1}], recipe=Recipe(model=equivariant, loss=loss))
    result = ensemble.submit(declared, tmp_path / "run", "inline").wait()
    assert [(row["state"], row["attempts"]) for row in result.members] == [("finished", 1)]
    assert len(of_kind(tmp_path / "run", "checkpoint")) == 2
    ensemble.load(tmp_path / "run")


class Unmended(torch.nn.Module):
    """A model that raises, as long as a file is not there."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.inner, self.path = torch.nn.Linear(4, 3), path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not Path(self.path).exists():
            raise ValueError(f"no file for {object()}")
        return self.inner(x)  # type: ignore[no-any-return]


def unmended(params: dict[str, Any]) -> Any:
    return Unmended(params["path"])


def test_two_members_that_fail_alike_stop_the_run_which_a_resume_finishes_once_it_is_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "run", tmp_path / "file"
    members = [{"lr": 0.1, "seed_of": n, "path": str(file)} for n in range(6)]
    declared = an_ensemble(members, recipe=Recipe(model=unmended, loss=loss), retries=1)
    result = ensemble.submit(declared, path, "inline").wait()
    why = "member-0 and member-1 failed alike in epoch 1, step 0, and the others would, too"
    assert (
        result.stopped is not None and result.stopped.startswith(why) and "ValueError: no file" in result.stopped
    )
    states = [member.state for member in read_state(path).members.values()]
    assert states == ["failed"] * 2 + ["waiting"] * 4
    assert main(["resume", str(path)]) == 1, "not mended: the others are tried all the same"
    assert "failed" in capsys.readouterr().out
    assert [member.state for member in read_state(path).members.values()] == ["failed"] * 6
    file.touch()
    assert main(["resume", str(path)]) == 0
    assert [member.state for member in read_state(path).members.values()] == ["finished"] * 6


def test_the_command_says_in_a_line_why_it_stopped_and_ends_as_one_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "alike.py"
    spec.write_text(
        "import numpy as np, torch\n"
        "from ensemble import Ensemble, Recipe\n"
        "from pipelines import Pipeline, sources\n"
        "data = Pipeline(sources.arrays(x=np.ones((40, 4), np.float32), label=np.arange(40) % 3))\n"
        "def loss(model, batch):\n"
        "    return batch['lable']\n"
        "def spec():\n"
        "    recipe = Recipe(model=lambda params: torch.nn.Linear(4, 3), loss=loss, task='free')\n"
        "    return Ensemble(name='alike', members=[{'lr': n + 1} for n in range(6)], recipe=recipe, train=data)\n"
    )
    assert main(["run", str(spec), "--run-dir", str(tmp_path / "run"), "--executor", "inline"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "member-0 and member-1 failed alike" in said and "`ensemble resume` goes on" in said
