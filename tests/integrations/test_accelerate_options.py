"""Each option of an Accelerator has its effect in a plain loop to the bit, or is refused, or has no meaning."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import ports
import pytest
import torch
from kit.tv import import_torchvision
from torch import nn
from torch.nn import functional as F

import ensemble
from ensemble import Member, Recipe
from ensemble.train.job import TrainingError

pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore")]

EPOCHS, BATCH = 2, 16
#: Values by accelerate's own classes, and the folder of a run.
SAME: dict[str, Any] = {
    "gradient_accumulation_plugin": lambda kinds, _: kinds.GradientAccumulationPlugin(2, adjust_scheduler=False),
    "kwargs_handlers": lambda kinds, _: [kinds.AutocastKwargs(enabled=False)],
    "project_config": lambda kinds, folder: kinds.ProjectConfiguration(folder),
    "project_dir": lambda _, folder: folder,
}
VALUES = {"gradient_accumulation_steps": 3, "step_scheduler_with_optimizer": False, "log_with": "tensorboard"}
SAME |= {name: lambda *_, value=value: value for name, value in VALUES.items()}
REFUSED = {"mixed_precision", "cpu", "device_placement", "split_batches", "dataloader_config", "dynamo_backend"}
REFUSED |= {"dynamo_plugin", "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "torch_tp_plugin"}
REFUSED |= {"megatron_lm_plugin", "parallelism_config"}
VOID = {"rng_types": ["torch"]}


@pytest.fixture(autouse=True)
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Any:
    import_torchvision(monkeypatch)
    return pytest.importorskip("accelerate")


def build(params: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def test_every_option_of_an_accelerator_is_placed_once(accelerate: Any) -> None:
    from ensemble.integrations.accelerate import OPTIONS

    parts = ports.list_names(OPTIONS)
    parameters = inspect.signature(accelerate.Accelerator.__init__).parameters
    assert set().union(*parts.values()) == set(parameters) - {"self"}
    assert parts == {"same effect": set(SAME), "refused": REFUSED, "no meaning here": set(VOID)}


def train_epochs(
    report: Any, accelerator: Any, model: Any, optimizer: Any, schedule: Any, batches: Any, validation: Any
) -> list[Any]:
    found = []
    for _ in range(EPOCHS):
        stepped = []
        for x, label in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), label))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            stepped.append(accelerator.sync_gradients)
        with torch.no_grad():
            losses = [F.cross_entropy(model(x), label).repeat(BATCH) for x, label in validation]
            losses = [accelerator.gather_for_metrics(loss) for loss in losses]
        report(accuracy=1.0)
        found.append((stepped, float(torch.cat(losses).mean()), schedule.get_last_lr()))
    return found


def test_options_have_the_effect_that_they_have_in_a_plain_loop(accelerate: Any, tmp_path: Path) -> None:
    from ensemble.integrations.accelerate import prepare

    makers: dict[str, Any] = {name: {name: make} for name, make in SAME.items()}
    makers["none"] = {name: lambda *_, value=value: value for name, value in VOID.items()}
    makers["log_with"]["project_dir"] = SAME["project_dir"]
    trained: dict[str, Any] = {}

    def make(name: str, side: str) -> dict[str, Any]:
        return {key: value(accelerate.utils, str(tmp_path / side)) for key, value in makers[name].items()}

    def parts(model: Any) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    def train(member: Any) -> None:
        name = member.params["option"]
        model = build({})
        optimizer, schedule = parts(model)
        accelerator, model, optimizer, batches, validation, schedule = prepare(
            member, model, optimizer, schedule, fields=("x", "label"), **make(name, "ours")
        )
        found = train_epochs(member.report, accelerator, model, optimizer, schedule, batches, validation)
        trained[name] = found, ports.copy_weights(model)
        member.predict_all(lambda model, batch: model(batch["x"]).softmax(1))

    parts_of_data, datasets = ports.few_points()
    recipe = Recipe(model=build, train=train, objective="accuracy")
    members = [Member({"option": name}) for name in makers]
    declared = ports.declare(recipe, parts_of_data, members=members, epochs=EPOCHS, batch_size=BATCH)
    ensemble.submit(declared, tmp_path / "run", "inline").wait()
    assert ports.list_errors(tmp_path / "run") == [] and len(trained) == len(makers)
    differences = []
    for name in makers:
        model = build({})
        optimizer, schedule = parts(model)
        accelerator = accelerate.Accelerator(cpu=True, **make(name, "plain"))
        loaders = ports.load_plainly(datasets, declared)
        model, optimizer, schedule, *loaders = accelerator.prepare(model, optimizer, schedule, *loaders)
        found, weights = trained[name]
        if train_epochs(lambda **_: None, accelerator, model, optimizer, schedule, *loaders) != found:
            differences.append(f"{name}: figures")
        if ports.differs(model, weights):
            differences.append(f"{name}: weights")
    assert differences == []


def test_options_without_their_effect_are_refused_by_name_before_training(accelerate: Any, tmp_path: Path) -> None:
    from ensemble.integrations.accelerate import prepare

    taken: list[str] = []

    def train(member: Any) -> None:
        model = build({})
        for name in sorted(REFUSED):
            try:
                prepare(member, model, torch.optim.SGD(model.parameters(), 0.1), **{name: "set"})
            except TrainingError as error:
                if f"the Accelerator has {name}='set': " in str(error):
                    continue
            taken.append(name)
        raise TrainingError("all are tried")

    recipe = Recipe(model=build, train=train, objective="accuracy")
    declared = ports.declare(recipe, ports.points(), members=[Member({})], epochs=1)
    ensemble.submit(declared, tmp_path / "run", "inline").wait()
    (error,) = ports.list_errors(tmp_path / "run")
    assert "all are tried" in error and taken == []
