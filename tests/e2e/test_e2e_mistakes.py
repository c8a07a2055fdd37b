"""Mistakes of somebody who is new: what is said, of which names, and when. Each row is a mistake that was made."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import ensemble  # noqa: E402
from ensemble import Ensemble, Recipe  # noqa: E402
from ensemble.controller.start_steps import check_fields  # noqa: E402
from ensemble.reporting import RunProjection  # noqa: E402
from ensemble.store import EventLog, RunDir, StoreError, read_events  # noqa: E402
from ensemble.train.forward_errors import describe_error, is_repeatable  # noqa: E402
from pipelines import Pipeline, sources, stages  # noqa: E402

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (96, 1, 8, 8), np.uint8)
LABELS = (IMAGES.mean(axis=(1, 2, 3)) > 127).astype(np.int64)
RECORDS = sources.arrays(image=IMAGES, label=LABELS)
SCALE = stages.scale("image", mean=0.5, std=0.3)


def build(params: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))


def run(folder: Path, declared: Ensemble) -> RunProjection:
    ensemble.submit(declared, folder, "inline").wait()
    return RunProjection.from_events(read_events(RunDir(folder).events))


def declare(recipe: Any = None, train: Any = None, valid: Any = None, **options: Any) -> Ensemble:
    scaled = Pipeline(RECORDS, seed=0).map(SCALE)
    options = {"members": [{"lr": 0.01}], "epochs": 1, "sharing": "independent", "retries": 1, **options}
    options |= {"train": train or scaled, "valid": valid or scaled, "batch_size": 32}
    recipe = recipe or Recipe(model=build, loss="cross_entropy", inputs=("image",))
    return Ensemble(name="mistakes", recipe=recipe, **options)


def prepare(member: Any) -> Any:
    net = build(member.params)
    return member.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))


def epoch(member: Any) -> None:
    net, _ = prepare(member)
    for _ in member.epochs():
        step_through(member, net)
        member.report(accuracy=0.5)


def step_through(member: Any, net: nn.Module) -> None:
    for batch in member.batches():
        member.backward(F.cross_entropy(net(batch["image"]), batch["label"], reduction="none"))
        member.step()


def count_epochs(member: Any) -> None:
    net, _ = prepare(member)
    for _ in range(3):
        step_through(member, net)


def step_alone(member: Any) -> None:
    net, optimizer = prepare(member)
    for _ in member.epochs():
        for batch in member.batches():
            F.cross_entropy(net(batch["image"]), batch["label"]).backward()
            optimizer.step()


def predict_a_part(member: Any) -> None:
    epoch(member)
    with member.evaluating() as net:
        batch = next(iter(member.batches("valid")))
        member.predictions("valid", net(batch["image"]).softmax(1), batch["index"].clone())


LOOPS: dict[str, tuple[Any, str]] = {
    "predictions of a part": (predict_a_part, "of 32 of its 96 samples"),
    "epochs are counted": (count_epochs, "member.epochs()"),
    "steps of its own": (step_alone, "member.dataloader()"),
    "another split": (lambda member: list(member.batches("validation")), "did you mean 'valid'"),
    "the program is ended": (lambda member: sys.exit(0), "ended the program"),
    "a batch as a pair": (lambda member: [x for x, _ in [{"a": 1, "b": 2, "index": 3}]], "fields=("),
    "a trial as parameters": (lambda member: member.params.suggest_int("width", 1, 2), "Search(space)"),
}


def train(member: Any) -> None:
    LOOPS[member.params["loop"]][0](member)


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> RunProjection:
    members = [{"loop": name} for name in LOOPS]
    return run(
        tmp_path_factory.mktemp("loops") / "run", declare(Recipe(model=build, train=train), members=members)
    )


@pytest.mark.parametrize("mistake", LOOPS)
def test_a_mistake_in_a_loop_is_told_and_not_tried_again(loops: RunProjection, mistake: str) -> None:
    member = next(one for one in loops.state.members.values() if one.identity["params"]["loop"] == mistake)
    assert LOOPS[mistake][1] in " ".join([*member.remarks, member.error or ""]) and member.attempts == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("TypeError: argument 'input' (position 1) must be Tensor, not Sequential", "loss(model, batch)"),
        ("TypeError: empty(): found element of type float at pos 0", "integer("),
        ("ValueError: The model did not return a loss from the inputs, only logits", "fields="),
        ("AssertionError: Torch not compiled with CUDA enabled", "devices="),
        ("AttributeError: 'Module' object has no attribute 'world'", "the member is the first argument"),
        ("TypeError: Module.parameters() missing 1 required positional argument: 'self'", "an instance"),
        ("EOFError: EOF when reading a line", "executor='inline'"),
        ("BdbQuit: ", "executor='inline'"),
    ],
)
def test_errors_that_say_little_have_an_advice(text: str, told: str) -> None:
    kind, _, message = text.partition(": ")
    error = type(kind, (Exception,), {})(message)
    assert told in describe_error(error) and is_repeatable(error)


def test_a_run_and_a_result_stand_for_their_directory(tmp_path: Path) -> None:
    handle = ensemble.submit(declare(), tmp_path / "run", "inline")
    result = handle.wait()
    assert ensemble.load(handle).fields == ensemble.load(result).fields


def test_a_log_that_was_removed_ends_the_run_at_its_next_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    path.unlink()
    with pytest.raises(StoreError, match="was removed while the run goes on"):
        log.append("warning", message="a test")
    log.close()


def test_a_field_that_the_shared_pipeline_lacks_is_named_before_a_member_starts(tmp_path: Path) -> None:
    """But not one that only a batch or a loop has."""
    usual: dict[str, Any] = {"model": build, "loss": "cross_entropy", "target": "label", "inputs": ("image",)}
    for option in ("inputs", "target"):
        recipe = Recipe(**{**usual, option: "digit"})
        with pytest.raises(ensemble.SpecError, match=f"no field 'digit' of Recipe.{option}; they have image"):
            ensemble.submit(declare(recipe, sharing="auto"), tmp_path / option, "local")
        assert not (tmp_path / option).exists()
    for changes in ({"train": len}, {"inputs": ("image", "index")}, {"collate": len}):
        declared = declare(Recipe(**{**usual, "inputs": ("digit",), **changes}), sharing="auto")
        check_fields(SimpleNamespace(ensemble=declared, stream=SimpleNamespace(sharing=True)))
