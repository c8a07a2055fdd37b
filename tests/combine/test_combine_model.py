"""A loaded ensemble is a module as any other: copied, saved, compiled and exported."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.kept_predictions import save_predictions
from small_nets import COMPUTED, KNOWN, NETS, batch_of, build, ensemble_of, loss
from torch import Tensor, nn
from torch.export import Dim

from ensemble.combine import Combination, CombineError, load
from ensemble.combine.stacks import ClassStack
from ensemble.spec import Ensemble, Recipe
from ensemble.spec.task import Task
from ensemble.store import EventLog, RunDir, save_checkpoint
from ensemble.train.call import Call, Observation
from pipelines import Pipeline, sources


def outputs_of(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    found = model(batch)
    return {"values": found} if isinstance(found, Tensor) else dict(found)


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert one.isfinite().all() and torch.equal(found[name], one), (name, (found[name] - one).abs().max())


def export(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    dims = ({name: {0: Dim("batch")} for name in batch},)
    program = torch.export.export(model, (batch,), dynamic_shapes=dims, strict=False)
    with io.BytesIO() as file:
        torch.export.save(program, file)
        file.seek(0)
        return torch.export.load(file).module()


MORE = [pytest.param("mlp", COMPUTED, id="mlp-loss", marks=pytest.mark.more)]
MORE += [pytest.param(net, KNOWN, id=f"{net}-call", marks=pytest.mark.more) for net in NETS if net != "mlp"]
BY_CALL_OR_LOSS = pytest.mark.parametrize(("net", "seen"), [pytest.param("mlp", KNOWN, id="mlp-call"), *MORE])

COEFFICIENTS = np.random.default_rng(0).normal(size=(2, 3, 3))
OF_CLASSES = ClassStack(COEFFICIENTS, np.array([0.1, -0.2]), np.eye(3)[[0, 2]])
STACK = Combination("stack", np.full(3, 1 / 3), 0.6, stack=OF_CLASSES)


@BY_CALL_OR_LOSS
@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch says so of an LSTM's list of its weights
def test_an_exported_ensemble_is_bitwise_equal_for_any_batch(net: str, seen: Observation) -> None:
    model = ensemble_of(net, seen=seen, uncertainty=True)
    program = export(model, batch_of(5))
    for samples in (1, 2, 17, 64):
        batch = batch_of(samples, seed=samples)
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                assert_same_bits(outputs_of(program, batch), outputs_of(model, batch))


def test_widths_a_stack_and_uncertainties_are_exported() -> None:
    model = ensemble_of("mlp", (2, 8, 16), STACK, uncertainty=True)
    program = export(model, batch_of(5))
    assert_same_bits(outputs_of(program, batch_of(9, seed=1)), outputs_of(model, batch_of(9, seed=1)))


def test_attention_takes_no_fast_path_and_the_switch_of_the_process_stays_as_it_is() -> None:
    batch = batch_of(5) | {"length": torch.tensor([7, 3, 5, 1, 6])}
    seen = Observation(Call(("x",), {"length": "length"}), KNOWN.task, ("int64", ()), -1)
    model = ensemble_of("transformer", seen=seen)
    member = model.members["member-0"]
    slow, fast = torch.backends.mha, member(batch["x"], batch["length"])
    found = []
    hook = member.register_forward_hook(lambda *_: found.append(slow.get_fastpath_enabled()))
    values = model(batch)
    hook.remove()
    assert found == [True] and slow.get_fastpath_enabled()
    slow.set_fastpath_enabled(False)
    try:
        assert not torch.equal(member(batch["x"], batch["length"]), fast)  # else there is nothing to see here
        assert torch.equal(model(batch), values)
    finally:
        slow.set_fastpath_enabled(True)


@pytest.mark.parametrize("net", NETS)
def test_a_copy_gives_the_same_and_has_weights_of_its_own(net: str) -> None:
    model, batch = ensemble_of(net, combination=STACK, uncertainty=True), batch_of(5)
    wanted = outputs_of(model, batch)
    copied = copy.deepcopy(model)
    assert_same_bits(outputs_of(copied, batch), wanted)
    assert copied.calls["member-0"].recipe.loss is loss
    for weight in copied.parameters():
        weight += 1
    assert not torch.equal(copied(batch)["values"], wanted["values"])
    assert_same_bits(outputs_of(model, batch), wanted)


@pytest.mark.more
@BY_CALL_OR_LOSS
def test_a_compiled_ensemble_gives_the_same(net: str, seen: Observation) -> None:
    torch._dynamo.reset()
    model = ensemble_of(net, seen=seen, uncertainty=True)
    whole = net != "lstm" and seen.call is not None  # torch compiles no LSTM; a loss is watched by a hook
    compiled = torch.compile(model, backend="eager", fullgraph=whole, dynamic=True)
    for samples in (5, 9):
        found, wanted = compiled(batch_of(samples)), model(batch_of(samples))
        assert found.keys() == wanted.keys()
        for name, one in wanted.items():
            torch.testing.assert_close(found[name], one, rtol=0, atol=1e-6)


SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Linear(5, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.body(x).relu())

def build(params):
    return Net(params["width"])

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"] * 2), batch["label"], reduction="none")
"""

LOADS = """
import sys, torch
model = torch.load("model.pt", weights_only=False)
assert torch.equal(model({"x": torch.load("x.pt")}), torch.load("values.pt"))
assert "nets_of_the_user" not in sys.modules
print(type(model).__name__)
"""


def run_of(path: Path, project: Any, **options: Any) -> RunDir:
    """A run directory of members that were not trained."""
    data = Pipeline(sources.arrays(x=np.zeros((8, 5), np.float32), label=np.arange(8) % 3))
    recipe = Recipe(model=project.build, loss=project.loss, task="classification")
    about = {"combine": options.get("combine", "average"), "members": [{"width": width} for width in (2, 4)]}
    declared = Ensemble(name="e", recipe=recipe, train=data, **about)
    run = RunDir.create(path, declared)
    log = EventLog(run.events)
    log.append("run_started", name="e", run_id="r", executor="inline", mode="list", objective="accuracy",
               direction="max", epochs=1, members=2)  # fmt: skip
    for number in range(2):
        identity = declared.identify(number)
        torch.manual_seed(number)
        state = {"model": project.build(identity.params).state_dict(), "epoch": 1}
        saved = run.checkpoint(identity.member, 0, 1, 0)
        save_checkpoint(saved, {**state, **options.get(identity.member, {})})
        at = {"member": identity.member, "path": str(saved), "epoch": 1, "step": 0}
        log.append("member", **identity.as_dict())
        log.append(
            "finished", member=identity.member, attempt=0, epoch=1, metrics={}, weights_sha256="", checkpoint=at
        )
    log.close()
    return run


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "nets_of_the_user.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path / "code")
    monkeypatch.syspath_prepend(tmp_path / "code")
    yield importlib.import_module("nets_of_the_user")
    sys.modules.pop("nets_of_the_user", None)


def test_a_saved_ensemble_is_loaded_by_a_process_without_the_users_module(tmp_path: Path, project: Any) -> None:
    run = run_of(tmp_path / "run", project)
    del sys.modules["nets_of_the_user"]  # as in a process that has nothing but the run
    model = load(run.path)
    x = torch.randn(4, 5)
    torch.save(model, tmp_path / "model.pt")
    torch.save(x, tmp_path / "x.pt")
    torch.save(model({"x": x}), tmp_path / "values.pt")
    done = subprocess.run([sys.executable, "-c", LOADS], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("EnsembleModel\n", "")
    with pytest.raises(pickle.UnpicklingError, match="restore_model"):
        torch.load(tmp_path / "model.pt", weights_only=True)  # it is code, and torch does not load that unasked


def test_tied_weights_stay_tied_in_a_file(tmp_path: Path) -> None:
    def tied(width: int) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(42, 42), nn.Linear(42, 42), nn.Linear(42, 3))
        model[2].weight = model[1].weight
        return model

    model = ensemble_of(tied, (1,), Combination("average", np.ones(1)))
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    member = again.members["member-0"]
    assert member[2].weight is member[1].weight and torch.equal(again(batch_of(3)), model(batch_of(3)))


def test_a_call_in_the_checkpoint_is_how_a_member_is_called(tmp_path: Path, project: Any) -> None:
    record = Observation(Call(("x",)), Task("regression"), ("float32", (3,)), None).as_record()
    of = {"member-0": record, "member-1": record}
    model = load(run_of(tmp_path / "run", project, **of).path, uncertainty=True)
    x = torch.randn(4, 5)
    outputs = torch.stack([model.members[name](x) for name in model.member_ids])
    found = model({"x": x})
    assert (model.task, set(found)) == (Task("regression"), {"values", "epistemic"})
    torch.testing.assert_close(found["values"], outputs.mean(dim=0))
    torch.testing.assert_close(found["epistemic"], outputs.var(dim=0, correction=0).mean(dim=1))


def test_a_stack_of_points_is_loaded_without_members_that_have_no_part(tmp_path: Path, project: Any) -> None:
    seen = Observation(None, Task("regression"), ("float32", (3,))).as_record()
    run = run_of(tmp_path / "run", project, **{"member-0": seen, "member-1": seen})
    target = np.random.default_rng(0).normal(size=(40, 3))
    for member, sign in (("member-0", -1), ("member-1", 1)):
        save_predictions(
            run.predictions(member), "valid", sign * target, np.arange(40), target, Task("regression")
        )
    model, x = load(run.path, combine="stack"), torch.randn(4, 5)
    assert model.member_ids == ["member-1"] and model.weights.tolist() == [1.0]
    torch.testing.assert_close(model({"x": x}), model.members["member-1"](2 * x), rtol=0.02, atol=0.02)


def test_members_of_different_tasks_are_refused(tmp_path: Path, project: Any) -> None:
    one = Observation(Call(("x",)), Task("regression"), ("float32", (3,))).as_record()
    two = Observation(Call(("x",)), Task("multilabel"), ("int64", (3,))).as_record()
    run = run_of(tmp_path / "a", project, **{"member-0": one, "member-1": two})
    with pytest.raises(CombineError, match="member-0 predicts regression, member-1 multilabel: leave one out"):
        load(run.path)
    assert load(run.path, members=["member-1"]).task == Task("multilabel")


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        *(("classification", [0.5, 0.2], "rows sum to 0.7"), ("classification", [1.0], r"shape \[5, 1\]")),
        *(("multilabel", [0.5, 1.5], "they are 0.5 ... 1.5"), ("gaussian", [0.5, 0.0], "a variance is 0")),
        *(("gaussian", [0.5, 1.0, 2.0], r"not means and variances"), ("quantiles", [0.5], r"not 2 quantiles")),
    ],
)
def test_values_that_are_not_of_the_task_are_refused(kind: Any, values: list[float], says: str) -> None:
    def predict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.as_tensor(values).expand(len(batch["x"]), len(values))

    recipe = Recipe(model=build, loss=loss, task="classification", predict=predict)
    task = Task(kind, (0.1, 0.9)) if kind == "quantiles" else Task(kind)
    with pytest.raises(CombineError, match=f"Recipe.predict gives member-0 .*{says}"):
        ensemble_of("mlp", task=task, recipe=recipe)(batch_of(5))


def largest(values: Tensor) -> Tensor:
    return values.amax(dim=0)


def test_a_function_combines_what_nothing_is_known_of_and_it_has_no_uncertainty(
    tmp_path: Path, project: Any
) -> None:
    of = dict.fromkeys(("member-0", "member-1"), Observation(Call(("x",)), Task("free")).as_record())
    run = run_of(tmp_path / "a", project, **of)
    with pytest.raises(CombineError, match=r"declare Ensemble\.combine as a function"):
        load(run.path)
    with pytest.raises(CombineError, match="outputs of the task free have no declared"):
        load(run.path, uncertainty=True)
    x = torch.randn(4, 5)
    for path, given in ((run.path, largest), (run_of(tmp_path / "b", project, combine=largest, **of).path, None)):
        model = load(path, combine=given)
        outputs = torch.stack([model.members[name](x) for name in model.member_ids])
        assert model.method == "function" and torch.equal(model({"x": x}), outputs.amax(dim=0))
        program = export(model, {"x": x})
        assert torch.equal(program({"x": x[:1]}), model({"x": x[:1]}))


def test_what_is_no_batch_of_tensors_is_refused_with_the_form_of_one() -> None:
    model, batch = ensemble_of("mlp"), batch_of(2)
    with pytest.raises(CombineError, match=r"such as \{'x': \.\.\.\}, not with a Tensor"):
        model(batch["x"])
    with pytest.raises(CombineError, match=r"torch\.from_numpy"):
        model({name: value.numpy() for name, value in batch.items()})
