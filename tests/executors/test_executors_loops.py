"""Members that stop early, keep their best epoch and average weights, on a shared stream; killed, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kit.event_dicts import fold, read_events  # noqa: E402
from kit.execute_members import an_ensemble, loss, model, samples  # noqa: E402

import ensemble  # noqa: E402
from ensemble import EMA, EarlyStopping, Recipe, Resources  # noqa: E402
from ensemble.store import RunDir, load_checkpoint, weights_sha256  # noqa: E402

NARROW = Resources(cpus_per_worker=0.1, gpus_per_worker=0.0, memory_gb=1.0)
LOOP: dict[str, Any] = {
    "epochs": 30,
    "objective": "loss",
    "early_stopping": EarlyStopping(2),
    "keep": "best",
    "averaging": EMA(0.7),
    "resources": NARROW,
    "calibrate": False,
}


def own_loop(member: Any) -> None:
    """A train function; the model is the Recipe's."""
    net = model(member.params)
    optimizer = torch.optim.SGD(net.parameters(), lr=member.params["lr"])
    net, optimizer = member.prepare(net, optimizer)

    def measure(net: Any, batch: Any) -> dict[str, Any]:
        return {"loss": loss(net, batch)}

    for _ in member.epochs():
        net.train()
        for batch in member.batches():
            mixed = member.mixup(batch)
            outputs = net(mixed["x"])
            member.backward(
                mixed.losses(lambda y: torch.nn.functional.cross_entropy(outputs, y, reduction="none"))  # noqa: B023
            )
            member.step()
        member.report(**member.evaluate(measure))
    for split in member.splits:
        values, index = [], []
        with member.evaluating():
            for batch in member.batches(split):
                values.append(net(batch["x"]).softmax(dim=1))
                index.append(batch["index"].clone())
        member.predictions(split, torch.cat(values), torch.cat(index))


def test_what_is_loaded_and_combined_is_what_is_kept(tmp_path: Path) -> None:
    members = [{"lr": 1.5, "width": 8}, {"lr": 0.5, "width": 8}]
    recipe = Recipe(model=model, loss=loss, task="classification")
    declared = an_ensemble(members, recipe=recipe, test=samples(32, 2), **LOOP)
    result = ensemble.submit(declared, tmp_path, "inline").wait()
    state = fold(read_events(tmp_path / "events.jsonl"))
    for member in state.members.values():
        saved = load_checkpoint(RunDir(tmp_path).valid_checkpoint(member))
        assert weights_sha256(saved["model"]) == member.weights_sha256
        assert member.metrics["loss"] == member.kept["value"] == min(e.metrics["loss"] for e in member.history)
    assert result.combined is not None and result.combined["metrics"]
    check_loaded(tmp_path, members)


def test_a_train_function_is_combined_and_loaded_by_the_model_of_its_recipe(tmp_path: Path) -> None:
    members = [{"lr": 0.5, "width": 8}, {"lr": 0.2, "width": 8}]
    recipe = Recipe(model=model, train=own_loop)
    declared = an_ensemble(members, recipe=recipe, test=samples(32, 2), mixup=0.2, **LOOP)
    result = ensemble.submit(declared, tmp_path, "inline").wait()
    assert [row["state"] for row in result.members] == ["finished"] * 2
    assert result.combined is not None and result.combined["metrics"]
    check_loaded(tmp_path, members)


def check_loaded(run_dir: Path, members: list[Any]) -> None:
    """Each member that is loaded predicts what it has saved."""
    from ensemble.store import load_predictions

    (batch,) = samples(32, 2).loader(32, 1)
    rows = batch["index"].argsort()
    for number in range(len(members)):
        alone = ensemble.load(run_dir, "average", [f"member-{number}"])
        saved = load_predictions(RunDir(run_dir).predictions(f"member-{number}"), "test")
        with torch.no_grad():
            found = alone({"x": batch["x"][rows]}).numpy()
        np.testing.assert_allclose(found, saved.values, rtol=1e-4, atol=1e-5)
