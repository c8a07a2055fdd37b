"""`combine` and `load` on run directories made through the store: real predictions, real checkpoints."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from class_figures import accuracy, nll
from kit.event_dicts import fold, read_events
from kit.kept_predictions import save_predictions
from kit.saved_splits import drop_split
from torch import nn

from ensemble.combine import CombineError, combine, load
from ensemble.spec import Ensemble, Recipe, SpecError
from ensemble.store import EventLog, RunDir, StoreError, load_checkpoint, save_checkpoint
from ensemble.store.digests import digest_file
from ensemble.train.outputs import compute_values
from pipelines import Pipeline, sources

CLASSES, FEATURES = 3, 5


def build(params: dict[str, Any]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, params["width"]), nn.BatchNorm1d(params["width"]), nn.Linear(params["width"], CLASSES)
    )


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def split(seed: int, n: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=rng)
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(9))
    noise = 0.5 * torch.randn(n, CLASSES, generator=rng)
    return {"x": x, "label": (x @ teacher + noise).argmax(dim=1), "index": torch.arange(n)}


VALID, TEST = split(1, 200), split(2, 300)
RECIPE = Recipe(model=build, loss=loss)
PIPE = Pipeline(sources.arrays(x=np.zeros((300, FEATURES), np.float32)))


def declare(**options: Any) -> Ensemble:
    members = [{"width": width} for width in (1, 2, 4, 8, 8)]
    usual = {"name": "e", "recipe": RECIPE, "train": PIPE, "valid": PIPE, "members": members}
    return Ensemble(**usual | {"allow_overlap": True} | options)  # nothing is trained on it


SPLITS = {"valid": VALID, "test": TEST}


def rows(data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return data["index"], data["label"]


@functools.cache
def trained(number: int, width: int) -> nn.Module:
    torch.manual_seed(number)
    model = build({"width": width})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    batch = split(100 + number, 150)
    for _ in range(30):
        optimizer.zero_grad()
        loss(model, batch).mean().backward()
        optimizer.step()
    return model.eval()


def finish(path: Path, declared: Ensemble, *, splits: tuple[str, ...] = ("valid", "test")) -> RunDir:
    """A run directory whose members are trained, with their events, checkpoints and predictions."""
    run = RunDir.create(path, declared)
    log = EventLog(run.events)
    log.append("run_started", name="e", run_id="r", executor="inline", mode="list", objective="accuracy",
               direction="max", epochs=1, members=len(declared.members or ()))  # fmt: skip
    for number in range(len(declared.members or ())):
        identity = declared.identify(number)
        model, own = trained(number, identity.params["width"]), {"member": identity.member, "attempt": 0}
        saved = run.checkpoint(identity.member, 0, 1, 0)
        save_checkpoint(saved, {"model": model.state_dict(), "epoch": 1})
        values = {name: compute_values(RECIPE, model, data).detach() for name, data in SPLITS.items()}
        for name in splits:
            save_predictions(run.predictions(identity.member), name, values[name], *rows(SPLITS[name]))
        log.append("member", **identity.as_dict())
        log.append("placed", node="local", devices=[None], cohort=0, feeder=None, **own)
        log.append("started", pid=1, epoch=0, step=0, startup_cpu_s=0.0, **own)
        at = {"member": identity.member, "path": str(saved), "epoch": 1, "step": 0}
        metrics = {"accuracy": accuracy(values["valid"], VALID["label"])}
        log.append("finished", epoch=1, metrics=metrics, weights_sha256="", checkpoint=at, **own)
    log.close()
    return run


@pytest.fixture(scope="module")
def declared() -> Ensemble:
    return declare(test=PIPE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, declared: Ensemble) -> RunDir:
    return finish(tmp_path_factory.mktemp("run") / "e", declared)


def state_of(run: RunDir) -> Any:
    return fold(read_events(run.events))


def record(run: RunDir, combined: dict[str, Any]) -> None:
    log = EventLog(run.events)
    log.append("combined", **{"method": None, "members": list(combined["weights"]), "split": "test", **combined})
    log.close()


def test_best_is_the_member_best_on_validation_reported_on_test(run: RunDir, declared: Ensemble) -> None:
    combined = combine(run, state_of(run), declared)
    models = [trained(number, member.params["width"]) for number, member in enumerate(declared.members)]
    on_valid, on_test = (
        [accuracy(compute_values(RECIPE, model, data).detach(), data["label"]) for model in models]
        for data in SPLITS.values()
    )
    best = int(np.argmax(on_valid))
    assert combined["best_member"] == f"member-{best}"
    assert combined["metrics"]["best"]["accuracy"] == pytest.approx(on_test[best])
    assert combined["metrics"]["mean"]["accuracy"] == pytest.approx(sum(on_test) / 5)


def test_without_a_test_pipeline_the_figures_are_of_validation_and_said_to_be_optimistic(run: RunDir) -> None:
    combined = combine(run, state_of(run), declare())
    assert combined["split"] == "valid"
    assert "optimistic" in combined["note"]
    assert combined["metrics"]["ensemble"]["accuracy"] >= combined["metrics"]["best"]["accuracy"]


METHODS = [("weighted", False), ("greedy", True), ("stack", True)]
METHODS += [pytest.param(*case, marks=pytest.mark.more) for case in (("average", True), ("stack", False))]  # type: ignore[misc]


@pytest.mark.parametrize(("method", "recorded"), METHODS)
def test_a_loaded_ensemble_is_what_was_measured(tmp_path: Path, run: RunDir, method: str, recorded: bool) -> None:
    shutil.copytree(run.path, tmp_path / "e")
    own = declare(test=PIPE, combine=method)
    copy = RunDir.create(tmp_path / "e", own)
    combined = combine(copy, state_of(copy), own)
    if recorded:
        record(copy, combined)
    model = load(copy.path)
    before = torch.random.get_rng_state()
    p = model({"x": TEST["x"]})  # no label, no index
    assert torch.equal(before, torch.random.get_rng_state())
    assert (p.dtype, tuple(p.shape), p.requires_grad) == (torch.float32, (300, CLASSES), False)
    assert torch.allclose(p.sum(dim=1), torch.ones(300), atol=1e-5) and model.member_ids == combined["members"]
    assert nll(p, TEST["label"]) == pytest.approx(combined["metrics"]["ensemble"]["nll"], rel=1e-4)
    assert accuracy(p, TEST["label"]) == pytest.approx(combined["metrics"]["ensemble"]["accuracy"])
    assert not any(module.training for module in model.modules())


def test_loading_takes_the_recorded_weights_and_not_new_ones(tmp_path: Path, declared: Ensemble) -> None:
    run = finish(tmp_path / "e", declared)
    weights, calibration = {"member-1": 0.25, "member-3": 0.75}, {"method": "temperature", "value": 2.0}
    about = {"method": "greedy", "declared": "greedy", "reason": None, "weights": weights}
    record(run, {**about, "calibration": calibration})
    model = load(run.path)
    assert dict(zip(model.member_ids, model.weights.tolist(), strict=True)) == weights and model.temperature == 2.0
    parts = [w * compute_values(RECIPE, trained(i, width), TEST) for w, i, width in ((0.25, 1, 2), (0.75, 3, 8))]
    assert torch.allclose(model(TEST), torch.softmax(sum(parts).log() / 2, dim=1), atol=1e-6)


@pytest.mark.filterwarnings("error")  # loading is silent when all is well
def test_chosen_members_are_fitted_again_and_the_parameters_move_together(run: RunDir) -> None:
    model = load(run.path, combine="weighted", members=["member-4", "member-2"])
    assert set(model.member_ids) <= {"member-4", "member-2"}
    assert load(run.path, combine="average", members=["member-0"]).member_ids == ["member-0"]
    model = load(run.path, combine="stack").to("meta")
    assert {p.device.type for p in [*model.parameters(), *model.buffers()]} == {"meta"}
    assert model({"x": TEST["x"]}).device.type == "meta"


def test_a_gradient_reaches_the_batch_and_no_weight(run: RunDir) -> None:
    x = TEST["x"].clone().requires_grad_()
    model = load(run.path)
    model({"x": x})[:, 0].sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert all(p.grad is None for p in model.parameters())


def test_members_that_failed_or_were_pruned_take_no_part(tmp_path: Path, declared: Ensemble) -> None:
    run = finish(tmp_path / "e", declared)
    state = state_of(run)
    state.members["member-2"].state, state.members["member-3"].state = "failed", "pruned"
    drop_split(run.predictions("member-4"), "test")
    combined = combine(run, state, declared)
    left_out = {"member-2": "failed", "member-3": "pruned", "member-4": "saved no test predictions"}
    assert combined["left_out"] == left_out and set(combined["members"]) <= {"member-0", "member-1"}
    for member in state.members.values():
        member.state = "failed"
    combined = combine(run, state, declared)
    assert (combined["metrics"], combined["members"], combined["reason"]) == (None, [], "no member finished")


def overwrite(run: RunDir, member: str, p: Any, index: Any, target: Any) -> None:
    save_predictions(run.predictions(member), "valid", p, index, target)


def finish_with(path: Path, declared: Ensemble, values: Any) -> RunDir:
    run = finish(path, declared, splits=())
    for number in range(5):
        overwrite(run, f"member-{number}", values, np.arange(4), None)
    return run


def test_outputs_that_are_no_probabilities_are_refused_in_a_line_and_the_run_ends_well(tmp_path: Path) -> None:
    declared = declare()
    run = finish_with(tmp_path / "e", declared, np.ones((4, 1)))
    combined = combine(run, state_of(run), declared)
    assert combined["metrics"] is None and "Recipe.predict" in combined["reason"]
    assert "member-0 (and 4 more members): valid outputs of shape [4, 1]" in combined["reason"]
    of_sigmoids = Recipe(model=build, loss=loss, predict=lambda model, batch: model(batch["x"]).sigmoid())
    run = finish_with(tmp_path / "f", declare(recipe=of_sigmoids, combine="average"), np.full((4, 3), 0.7))
    with pytest.raises(CombineError, match=r"member-0 cannot be combined: valid outputs .* not probabilities"):
        load(run.path)


def test_one_member_with_nan_is_left_out_and_the_others_combined(tmp_path: Path) -> None:
    declared = declare()
    run = finish(tmp_path / "e", declared)
    overwrite(run, "member-0", np.full((200, 3), np.nan), VALID["index"], VALID["label"])
    combined = combine(run, state_of(run), declared)
    assert "NaN" in combined["left_out"]["member-0"]
    assert combined["metrics"] is not None
    assert load(run.path).member_ids == combined["members"]
    with pytest.raises(CombineError, match=r"member-0 cannot be combined: valid outputs .* NaN"):
        load(run.path, members=["member-0"])


def predict(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).softmax(dim=1)


def test_probabilities_without_targets_are_averaged_and_not_measured(tmp_path: Path) -> None:
    declared = declare(recipe=Recipe(model=build, loss=loss, predict=predict))
    run = finish_with(tmp_path / "e", declared, np.full((4, 3), 1 / 3))
    combined = combine(run, state_of(run), declared)
    assert (combined["method"], combined["metrics"]) == ("average", None)
    assert "no target" in combined["reason"]
    with pytest.warns(UserWarning, match="no target"):
        assert len(load(run.path).member_ids) == 5


def test_members_of_a_declared_task_that_saved_nothing_are_not_said_to_be_no_classifiers(tmp_path: Path) -> None:
    data = Pipeline(sources.arrays(x=np.zeros((300, FEATURES), np.float32), label=np.zeros((300, 3), np.int64)))
    declared = declare(train=data, valid=data, recipe=Recipe(model=build, loss=loss, task="multilabel"))
    run = finish(tmp_path / "e", declared, splits=())
    assert combine(run, state_of(run), declared)["reason"].endswith(
        "saved no valid predictions; a train function saves them by member.predict_all()"
    )


def test_one_sample_is_not_taken_for_a_batch(run: RunDir, tmp_path: Path) -> None:
    model = load(run.path)
    says = r"'x' has shape \[5\], not 2 axes; .* one sample x is the batch x\[None\]"
    with pytest.raises(CombineError, match=says):
        model({"x": TEST["x"][0]})
    assert model({"x": TEST["x"][:1]}).shape == (1, CLASSES)
    model.shapes = {}  # as where the data are elsewhere
    for name in model.member_ids:
        model.members[name] = nn.Linear(FEATURES, CLASSES)
    with pytest.raises(CombineError, match=r"member-\d gives 3 rows for a batch of another size"):
        model({"x": TEST["x"][0]})


DIFFERENT: list[Any] = [(torch.arange(200) + 1, VALID["label"], "member-0 has index 0, member-2 does not")]
DIFFERENT += [(VALID["index"], (VALID["label"] + 1) % 3, "different targets for valid sample 0")]
DIFFERENT += [(VALID["index"], None, "member-0 saved targets with its valid predictions, member-2 did not")]


def test_members_that_read_different_data_are_an_error(tmp_path: Path) -> None:
    declared = declare()
    run = finish(tmp_path / "e", declared)
    for index, target, says in DIFFERENT:
        overwrite(run, "member-2", np.full((200, 3), 1 / 3), index, target)
        with pytest.raises(CombineError, match=says):
            combine(run, state_of(run), declared)


def test_an_average_loads_without_any_predictions(tmp_path: Path) -> None:
    classes = Pipeline(sources.arrays(x=np.zeros((3, FEATURES), np.float32), label=np.arange(3)))
    run = finish(tmp_path / "e", declare(combine="average", valid=classes), splits=())
    assert len(load(run.path).member_ids) == 5
    with pytest.raises(CombineError, match="saved no valid predictions"):
        load(run.path, combine="greedy")


def train(member: Any) -> None:
    """A train function: it has no model= to build members by."""


def test_loading_says_what_is_wrong(tmp_path: Path, run: RunDir) -> None:
    with pytest.raises(CombineError, match="did you mean 'stack'"):
        load(run.path, combine="stak")
    with pytest.raises(SpecError, match=r"Ensemble\.combine cannot be 'medain'"):
        declare(combine="medain")
    with pytest.raises(CombineError, match="did you mean 'member-4'"):
        load(run.path, members=["membr-4"])
    of_a_function = RunDir.create(tmp_path / "f", declare(recipe=train))
    with pytest.raises(CombineError, match=r"needs a Recipe with model=.* train function 'train'"):
        load(of_a_function.path)
    other = finish(tmp_path / "e", declare())
    file = other.checkpoint("member-1", 0, 1, 0)
    file.unlink()
    with pytest.raises(StoreError, match=f"there is no checkpoint {file}; `ensemble resume .*` makes"):
        load(other.path, combine="average")
    save_checkpoint(file, {"model": build({"width": 7}).state_dict()})
    with pytest.raises(CombineError, match=r"do not fit what Recipe.model builds for \{'width': 2\}"):
        load(other.path, combine="average")


def test_a_file_with_other_weights_than_the_log_says_is_named(tmp_path: Path) -> None:
    run = finish(tmp_path / "e", declare())
    log = EventLog(run.events)
    for member in ("member-0", "member-1"):
        file = run.checkpoint(member, 0, 1, 0)
        digest = {"digest": digest_file(file)} if member == "member-1" else {}
        log.append("checkpoint", member=member, attempt=0, path=str(file), epoch=1, step=0, **digest)
    log.close()
    load(run.path, combine="average")
    state = load_checkpoint(file)
    state["model"] = {name: tensor + 1 for name, tensor in state["model"].items()}
    save_checkpoint(file, state)
    with pytest.raises(StoreError, match=f"^{file} is damaged: its digest is .*, and was .* when it was written"):
        load(run.path, combine="average")
