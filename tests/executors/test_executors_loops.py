"""Members that stop early, keep their best epoch and average weights, on a shared stream; killed, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kit.execute_members import an_ensemble, loss, model, samples  # noqa: E402
from kit.finished_runs import read_state  # noqa: E402

import ensemble  # noqa: E402
from ensemble import EMA, EarlyStopping, Recipe, Resources  # noqa: E402
from ensemble.store import RunDir, load_checkpoint, load_predictions, weights_sha256  # noqa: E402

NARROW = Resources(cpus_per_worker=0.1, gpus_per_worker=0.0, memory_gb=1.0)
LOOP: dict[str, Any] = {"epochs": 30, "objective": "loss", "early_stopping": EarlyStopping(2), "keep": "best"}
LOOP |= {"averaging": EMA(0.7), "resources": NARROW, "calibrate": False}


def own_loop(member: Any) -> None:
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


def predict(net: Any, batch: Any) -> Any:
    return net(batch["x"]).softmax(dim=1)


@pytest.mark.parametrize("lrs", [(1.5, 0.5), (0.5, 0.2)], ids=["loss", "train function"])
def test_what_is_loaded_and_combined_is_what_is_kept(lrs: tuple[float, float], tmp_path: Path) -> None:
    """A train function is loaded by `predict`. Each predicts what it has saved."""
    members, is_own = [{"lr": lr, "width": 8} for lr in lrs], lrs[1] == 0.2
    recipe = (
        Recipe(model=model, train=own_loop, predict=predict)
        if is_own
        else Recipe(model=model, loss=loss, task="classification")
    )
    declared = an_ensemble(members, recipe=recipe, test=samples(32, 2), mixup=0.2 * is_own, **LOOP)
    result = ensemble.submit(declared, tmp_path, "inline").wait()
    assert [row["state"] for row in result.members] == ["finished"] * 2
    assert result.combined is not None and result.combined["metrics"]
    (batch,) = samples(32, 2).loader(32, 1)
    rows = batch["index"].argsort()
    for member in read_state(tmp_path).members.values():
        saved = load_checkpoint(RunDir(tmp_path).valid_checkpoint(member))
        assert weights_sha256(saved["model"]) == member.weights_sha256
        assert member.metrics["loss"] == member.kept["value"] == min(e.metrics["loss"] for e in member.history)
        alone = ensemble.load(tmp_path, "average", [member.id])
        predicted = load_predictions(RunDir(tmp_path).predictions(member.id), "test").values
        with torch.no_grad():
            found = alone({"x": batch["x"][rows]}).numpy()
        np.testing.assert_allclose(found, predicted, rtol=1e-4, atol=1e-5)
