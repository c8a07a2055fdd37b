"""The pure parts of training: jobs, notes, states; what follows from a model's outputs."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import train_child as cases
from torch import nn

from ensemble.comm import SingleRank
from ensemble.meter import CpuClock
from ensemble.spec import Recipe
from ensemble.spec.task import CLASSIFICATION, Task, quantiles
from ensemble.store import RunDir, StoreError, load_checkpoint, save_checkpoint
from ensemble.store.files import make_write_error
from ensemble.train import Inbox, Job
from ensemble.train.batchnorm import BATCH_NORMS, guard_small_batches
from ensemble.train.call import Call, Observation
from ensemble.train.checkpoint import to_builtin
from ensemble.train.forward_errors import explain_forward_error, is_repeatable
from ensemble.train.gather import Means
from ensemble.train.hyperparameters import Hyperparameters
from ensemble.train.job import ProfileRequest, TrainingError
from ensemble.train.outputs import OutputError, compute_outputs, compute_values, find_class_axis, to_values
from ensemble.train.own_states import OwnStates
from ensemble.train.poison_records import PoisonRecords, note_file, read_interrupted
from ensemble.train.reporter import EventReporter, append_log
from ensemble.train.seeding import step_seed
from ensemble.train.throughput import Throughput
from ensemble.train.worker import classify, is_same_gpu
from pipelines import SampleError
from pipelines.errors import DataOutOfReach
from pipelines.loader.batch import Batch
from pipelines.samples.poison_records import PreparationNote


def test_a_full_disk_is_no_fault_of_the_member() -> None:
    out_of_reach, lost = (SampleError(7, "/net/part-0", "cannot be read") for _ in range(2))
    out_of_reach.__cause__ = OSError(errno.ESTALE, "Stale file handle")
    for error, expected in (
        (OSError(errno.ENOSPC, "No space left on device"), ("disk", False)),  # of another file system, say
        (make_write_error(Path("/x"), OSError(errno.EDQUOT, "Quota exceeded")), ("disk", True)),
        (make_write_error(Path("/x"), OSError(errno.EROFS, "Read-only")), ("disk", False)),
        (StoreError("damaged"), ("error", False)),
        (lost, ("error", False)),
        (out_of_reach, ("error", True)),  # a file server comes back
        (DataOutOfReach("sample 7"), ("unreachable", True)),
        (FileNotFoundError(errno.ENOENT, "no such file"), ("error", True)),
    ):
        assert classify(error) == expected, error


def test_a_job_survives_json_as_it_is() -> None:
    job = cases.make_job(Path("/runs/x"), cases.declare(cases.SMOOTH, 2), awaits_pruner=True, node="b")
    # 1, 1.0 and True are the same for Python, and other hyperparameters
    members = [replace(job.identity, params={"lr": lr, "deep": deep}) for lr, deep in ((1.0, False), (1, 1))]
    for made in (
        replace(job, identity=replace(job.identity, first_epoch=None)),
        replace(job, profile=ProfileRequest(members=members, known=["a shape"], steps_s=1.0)),
    ):
        again = Job.from_json(made.as_json())
        assert again == made and repr(again) == repr(made)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 8), st.integers(0, 9999)), unique=True, max_size=50))
def test_steps_ranks_and_members_have_seeds_of_their_own(places: list[tuple[int, int, int]]) -> None:
    seeds = [step_seed(*place) for place in places]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [step_seed(*place) for place in places]


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (1, 3, 1, 1), (1, 3, 2, 1)])
def test_too_few_values_are_normalized_by_running_statistics(shape: Any) -> None:
    assert {*BATCH_NORMS, nn.SyncBatchNorm} == {kind for name, kind in vars(nn).items() if "BatchNorm" in name}
    layer = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(3)
    model = nn.Sequential(layer)
    guard_small_batches(model)
    layer.running_mean.fill_(2.0)
    x = torch.randn(shape)
    out, is_small = model(x), x.numel() == 3
    assert layer.training and model.training and layer.num_batches_tracked == (not is_small)
    if is_small:
        torch.testing.assert_close(out, (x - 2.0) / (1 + layer.eps) ** 0.5)
        assert (layer.running_mean == 2.0).all()


def test_means_weigh_every_sample_alike() -> None:
    means = Means()
    means.add({"a": torch.tensor([1.0, 2.0, 3.0]), "b": 1.0}, 3)
    means.add({"a": torch.tensor([10.0]), "b": torch.tensor(5.0)}, 1)
    assert means.over_all(SingleRank()) == {"a": 4.0, "b": 2.0}
    with pytest.raises(ValueError, match="'a' must be a scalar or one value per sample"):
        means.add({"a": torch.zeros(2, 2)}, 2)


def test_numbers_of_numpy_are_saved_as_pythons() -> None:
    state = to_builtin({"lr": np.float64(0.1), "betas": (np.float32(0.5), 1), "n": [np.int64(3)]})
    assert state == {"lr": 0.1, "betas": (0.5, 1), "n": [3]}
    assert type(state["lr"]) is float and type(state["n"][0]) is int


def test_a_members_log_takes_text_that_is_no_utf_8(tmp_path: Path) -> None:
    append_log(tmp_path / "log.txt", "failed: no such file caf\udce9")
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith("failed: no such file caf\\udce9\n")


def test_a_rank_on_another_gpu_than_planned_is_noticed() -> None:
    assert is_same_gpu("GPU-8f2a", "GPU-8f2a") and not is_same_gpu("GPU-8f2a", "GPU-91c0")
    assert is_same_gpu(None, "GPU-91c0") and is_same_gpu("GPU-8f2a", "GPU-"), "a torch that does not say"
    assert is_same_gpu("MIG-8f2a", "GPU-91c0"), "CUDA names the whole GPU"
    assert is_same_gpu("0", "GPU-91c0"), "NVML gave no UUID"


def burn(cpu_s: float) -> None:
    start = time.process_time()
    while time.process_time() < start + cpu_s:
        sum(range(1000))


def test_the_cores_of_an_evaluation_within_an_epoch_are_not_those_of_training() -> None:
    throughput = Throughput()
    burn(0.02)
    with throughput.pausing():
        burn(0.16)
    burn(0.02)
    throughput.add_step(8)
    throughput.end_training()
    assert throughput.end_epoch({})["cpus"] < 2


def test_hyperparameters_that_nobody_reads_are_those_that_were_given_and_not_looked_for() -> None:
    params = Hyperparameters({"lr": 0.1, "momentun": 0.9, "depth": 2, "width": 8})
    params["classes"] = 10
    assert params.setdefault("width", 4) == 8 and params.pop("depth") == 2 and params["lr"] == 0.1
    assert params.unused == ["momentun"]
    params = Hyperparameters({"leraning_rate": 0.1, "momentum": 0.9, "colour": 3})
    params.get("learning_rate", 0.01), params["momentum"], params.get("momentun"), params.get(7)
    assert params.unused == ["leraning_rate", "colour"]


def test_a_key_counts_as_read_however_it_is_read() -> None:
    for read in ("get", "pop", "setdefault", "__getitem__", "__contains__"):
        params = Hyperparameters({"lr": 0.1, "depth": 2})
        getattr(params, read)("lr")
        assert params.unused == ["depth"], read
    for read in ("keys", "values", "items", "copy", "__iter__"):
        params = Hyperparameters({"lr": 0.1, "depth": 2})
        assert list(getattr(params, read)()) and params.unused == [], read
    params = Hyperparameters({"lr": 0.1})
    assert dict(**params) == {"lr": 0.1} and params.unused == []


Events = list[dict[str, Any]]


def open_reporter(folder: Path) -> tuple[EventReporter, SimpleNamespace, Events]:
    events, clock = Events(), SimpleNamespace(now=100.0)
    job = cases.make_job(folder, cases.declare(cases.SMOOTH, 1))
    return EventReporter(job, events.append, CpuClock(), lambda: clock.now), clock, events


def test_usage_is_reported_at_most_every_ten_seconds_and_less_often_by_an_old_rank(tmp_path: Path) -> None:
    reporter, clock, events = open_reporter(tmp_path)
    reporter.usage()  # of the start, which does not change any more
    reporter.training_begins(0.0)
    begins, count, reported = clock.now + 60.0, len(events), []
    for second in range(0, 4000, 5):
        clock.now, before = begins + second, len(events)
        sum(range(20_000))
        reporter.usage()
        reported += [second] if len(events) > before else []
    assert reported[:4] == [0, 10, 20, 30]
    assert {after - before for before, after in zip(reported[-10:], reported[-9:], strict=False)} == {30}
    assert [event["role"] for event in events[count:]] == ["train"] * len(reported)


def test_the_last_usage_is_reported_in_any_case_and_has_all_of_it(tmp_path: Path) -> None:
    reporter, clock, events = open_reporter(tmp_path)
    reporter.training_begins(0.0)
    used_s = time.process_time()
    for prepare_cpu_s in (0.0, 0.0001, 0.0002):
        burn(1e-3)
        reporter.usage(prepare_cpu_s)
    assert not [event for event in events if event["role"] == "prepare"], "held back"
    clock.now += 1.0
    reporter.usage(0.0003, is_last=True)
    last = {event["role"]: event["cpu_s"] for event in events}
    assert last["prepare"] == pytest.approx(0.0003)
    assert last["train"] + last["prepare"] >= time.process_time() - used_s - 0.001


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def hold(state: Any, name: str = "trainer") -> OwnStates:
    own = OwnStates()
    own.add(name, Holder(state))
    return own


def save(path: Path, state: Any) -> dict[str, Any]:
    save_checkpoint(path, {"own": hold(state).state_dict()})
    return dict(load_checkpoint(path)["own"])


def test_an_object_comes_back_with_its_tensors(tmp_path: Path) -> None:
    scale = torch.nn.Linear(2, 2)
    state = {"by": (Fraction(1, 3), [timedelta(3)]), "scale": partial(torch.add, torch.ones(3)), "layer": scale}
    saved, held = save(tmp_path / "c", state), Holder(None)
    own = OwnStates()
    own.load(saved, lambda: None)
    own.add("trainer", held)
    assert held.state["by"] == state["by"]
    assert torch.equal(held.state["scale"](torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(held.state["layer"].weight, scale.weight)


def test_what_cannot_be_pickled_is_named_by_its_place_and_by_the_hook_that_may_have_added_it() -> None:
    state = dict[str, Any]()
    own = hold({"taken": state}, "lightning")
    state["lock"] = [threading.Lock()]
    for pickle in (own.state_dict, lambda: hold({"taken": state}, "lightning")):
        with pytest.raises(TrainingError, match=r"lightning\.taken\.lock\.0, a lock .*on_save_checkpoint"):
            pickle()


def test_a_checkpoint_that_others_could_have_written_is_not_unpickled(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    file = run.member("member-0") / "c"
    saved, held = save(file, {"by": Fraction(1, 3)}), Holder(None)
    own = OwnStates()
    own.add("trainer", held)
    file.chmod(0o666)
    with pytest.raises(TrainingError, match=r"can be written by everyone.*resume the run where it was trained"):
        own.load(saved, partial(run.check_owners, file))
    assert held.state is None
    file.chmod(0o600)
    own.load(saved, partial(run.check_owners, file))
    assert held.state == {"by": Fraction(1, 3)}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", cases.declare(cases.SMOOTH, 1))


def settle(run_dir: RunDir, attempt: int) -> PreparationNote | None:
    pipeline, alone = cases.data(), SimpleNamespace(world=1)
    declared = cases.declare(cases.SMOOTH, 1, train=pipeline)
    job = cases.make_job(run_dir.path, declared, attempt=attempt)
    PoisonRecords(job, declared, alone, {"train": pipeline}, lambda *_, **__: None).start(Inbox())  # type: ignore[arg-type]
    return pipeline.poison_records.note


def test_an_attempt_that_lives_on_notes_in_no_file_of_its_successor(run_dir: RunDir) -> None:
    first = settle(run_dir, 0)
    assert first is not None
    first.words[1], first.words[0] = 3, 8
    assert read_interrupted(note_file(run_dir, "member-0", 0, 0)) == {"train": (7, 3)}
    second = settle(run_dir, 1)
    first.words[0] = 9
    assert second is not None and second.at is None
    assert read_interrupted(note_file(run_dir, "member-0", 0, 1)) == {}
    assert not note_file(run_dir, "member-0", 0, 0).exists(), "it has been judged"


def test_where_nothing_can_be_noted_a_member_goes_on_without(run_dir: RunDir) -> None:
    path = note_file(run_dir, "member-0", 0, 0)
    path.mkdir(parents=True)  # refuses to be written and read for anybody
    assert settle(run_dir, 0) is None
    assert read_interrupted(path) == {}


def test_a_note_has_its_room_before_it_is_written() -> None:
    """A mapped file without it, on a file system that is full, ends by SIGBUS whoever writes there."""
    with os.fdopen(os.memfd_create("note"), "r+b") as file:
        PreparationNote(file.fileno())
        assert os.fstat(file.fileno()).st_blocks > 0


def test_a_call_is_made_of_fields() -> None:
    batch = {"x": torch.zeros(2, 3), "mask": torch.zeros(2, 3), "label": torch.zeros(2)}
    call = Call(("x", None, ("x", "mask"), 0), {"attention": "mask"})
    assert call.fields == ["x", "mask"] and Call.from_record(call.as_record()) == call
    args, attention = call.call(lambda *args, attention: (args, attention), batch)
    assert args == (batch["x"], batch, (batch["x"], batch["mask"]), 0) and attention is batch["mask"]


def test_an_observation_survives_a_checkpoint() -> None:
    seen = Observation(Call((None,), {"lengths": "n"}), quantiles(0.1, 0.9), ("float32", (3,)), None)
    assert Observation.from_checkpoint(seen.as_record()) == seen
    assert Observation.from_checkpoint({"model": {}}) is None
    earlier = {"call": {"args": ["x"], "kwargs": {}, "unused": "label"}, "outputs": seen.as_record()["outputs"]}
    earlier["outputs"]["reason"] = None
    assert Observation.from_checkpoint(earlier) == replace(seen, call=Call(("x",)))


AXES: dict[int, list[tuple[Any, Any]]] = {
    -1: [((8, 3), (8,)), ((8, 1), (8,)), ((8, 5, 3), (8, 5)), ((8, 5, 1), (8, 5)), ((8, 3), None)],
    0: [((8,), (8,)), ((8, 5), (8, 5)), ((8,), (8, 1))],
    1: [((8, 3, 5), (8, 5)), ((8, 1, 5), (8, 5)), ((8, 3, 4, 6), (8, 4, 6))],
}


def test_the_axis_of_the_classes_follows_from_the_targets_shape() -> None:
    for axis, shapes in AXES.items():
        for outputs, target in shapes:
            assert find_class_axis(outputs, target) == axis, (outputs, target)
    no_scores = "not scores of classes for the target"
    for outputs, target, message in (
        ((8, 5, 5), (8, 5), "along axis 1 or along the last one"),
        *(((8, 3), (8, 5), no_scores), ((8, 3, 3), (8,), no_scores)),
    ):
        with pytest.raises(OutputError, match=message):
            find_class_axis(outputs, target)


def seen(*shape: int, axis: int | None = None) -> Observation:
    return Observation(target=("int64", shape), class_axis=axis)


def test_classes_are_last_in_predictions() -> None:
    scores = torch.randn(4, 3, 5, dtype=torch.bfloat16)
    first = to_values(CLASSIFICATION, scores, seen(5, axis=1))
    assert first.dtype == torch.float32
    torch.testing.assert_close(first, scores.float().softmax(dim=1).movedim(1, -1))
    torch.testing.assert_close(first, to_values(CLASSIFICATION, scores.movedim(1, -1), seen(5, axis=-1)))
    assert to_values(CLASSIFICATION, torch.zeros(4, 3, 9), seen(5, axis=1)).shape == (4, 9, 3), "of more steps"


def test_numbers_have_the_targets_shape() -> None:
    points, number = torch.arange(4.0), Task("regression")
    assert torch.equal(to_values(number, points[:, None], seen()), points)
    assert torch.equal(to_values(number, points, seen(1)), points[:, None])
    assert to_values(number, torch.zeros(4, 9, 1), seen(5)).shape == (4, 9), "more steps than in training"
    for outputs in ((points[:, None], points[:, None] + 1), {"variance": points + 1, "mean": points}):
        found = to_values(Task("gaussian"), outputs, seen())
        assert torch.equal(found, torch.stack([points, points + 1], dim=-1))
    assert to_values(quantiles(0.1, 0.9), torch.zeros(4, 5, 2), seen(5)).shape == (4, 5, 2)


def test_one_logit_at_each_position_is_two_classes() -> None:
    logits = torch.randn(4, 5)
    expected = torch.stack([1 - logits.sigmoid(), logits.sigmoid()], dim=-1)
    assert torch.equal(to_values(CLASSIFICATION, logits, seen(5, axis=0)), expected)
    assert torch.equal(to_values(CLASSIFICATION, logits[:, None], seen(5, axis=1)), expected)
    assert torch.equal(to_values(CLASSIFICATION, logits[..., None], seen(5, axis=-1)), expected)
    assert to_values(CLASSIFICATION, logits[:, 0], seen(1, axis=0)).shape == (4, 1, 2)


NUMBERS = torch.arange(4.0)
NO_TASK: list[tuple[Task, Any, str]] = [
    (Task("gaussian"), torch.zeros(4, 2), r"not \(mean, variance\)"),
    (Task("gaussian"), (NUMBERS, NUMBERS), "variance of a Gaussian is above 0"),
    (Task("gaussian"), (NUMBERS, NUMBERS + torch.nan), "variance of a Gaussian is above 0"),
    (quantiles(0.1, 0.9), torch.zeros(4, 3), "not 2 quantiles along the last axis"),
    (Task("free"), (NUMBERS,), "a tuple, not numbers"),
    (Task("multilabel"), torch.zeros(4, 2, dtype=torch.int64), "not numbers"),
    (CLASSIFICATION, {}, "a dict"),
    (CLASSIFICATION, torch.tensor([1, 2]), r"shape \[2\] and dtype torch.int64"),
]


@pytest.mark.parametrize(("task", "outputs", "message"), NO_TASK)
def test_outputs_that_the_task_does_not_know_are_refused(task: Task, outputs: Any, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        to_values(task, outputs)


def doubled(x: Any) -> Any:
    return x * 2.0


ONES = {"x": torch.ones(2, 3)}


def compute(loss: Any, by: Any = compute_outputs, batch: Any = ONES, of: Any = None, **recipe: Any) -> Any:
    model = nn.Module()
    model.forward = doubled  # type: ignore[method-assign]
    made = Recipe(model=lambda params: None, loss=loss, **{"task": "classification", **recipe})
    outputs = by(made, model, batch, of)
    assert not model._forward_hooks
    return outputs


def test_a_known_call_computes_no_loss() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        raise AssertionError("there is no need for it")

    known = Observation(Call(("x",)), Task("free"))
    assert torch.equal(compute(loss, compute_values, ONES, known, task="free"), ONES["x"] * 2)
    with pytest.raises(OutputError, match="called with the field 'x', and the batch has y"):
        compute(loss, compute_values, {"y": ONES["x"]}, known, task="free")


def test_without_a_call_the_loss_runs_to_its_end_on_zeros_of_the_targets_kind() -> None:
    ended: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> Any:
        found = model(batch["x"] + 1)
        ended.append(batch["label"])
        return (found - batch["label"]).square().sum(dim=1)

    known = Observation(None, Task("regression"), ("float32", (3,)))
    assert torch.equal(compute(loss, of=known, task="regression"), torch.full((2, 3), 4.0))
    assert len(ended) == 1 and ended[0].shape == (2, 3) and ended[0].dtype == torch.float32


def test_what_a_loss_raises_after_the_call_does_not_matter_and_before_it_does() -> None:
    def after(model: nn.Module, batch: Any) -> Any:
        model(batch["x"])
        raise ValueError("no labels like these")

    def caught(model: nn.Module, batch: Any) -> Any:
        try:
            return after(model, batch)
        except Exception:
            return torch.zeros(2)

    def before(model: nn.Module, batch: Any) -> Any:
        raise KeyError("y")

    def around(model: nn.Module, batch: Any) -> Any:
        return batch["x"].sum(dim=1)

    for loss in (after, caught):
        assert torch.equal(compute(loss), ONES["x"] * 2)
    with pytest.raises(KeyError, match="y"):
        compute(before)
    with pytest.raises(OutputError, match=r"declare Recipe\.predict"):
        compute(around)
    probabilities = compute(after, compute_values, of=seen(axis=-1))
    torch.testing.assert_close(probabilities, (ONES["x"] * 2).softmax(dim=1))
    double = torch.full((2, 4), 0.25, dtype=torch.float64)
    assert compute(after, compute_values, predict=lambda model, batch: double).dtype == torch.float32


class Net(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(3, 4)


def fail(model: nn.Module, loss: Any = cases.loss) -> Exception:
    fields = {"x": torch.rand(16, 8), "label": torch.arange(16) % 4, "index": torch.arange(16)}
    with pytest.raises(Exception) as caught:
        loss(model, Batch(fields, epoch=0, step=0, global_size=16))
    return caught.value


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            nn.Sequential(nn.Linear(8, 16), nn.Linear(17, 4)),
            "in Linear(in_features=17, out_features=4, bias=True), where the batch has 'x' [16, 8] float32, "
            "'label' [16] int64, 'index' [16] int64",
        ),
        (nn.LSTM(9, 2), "in LSTM(9, 2), where the batch has"),
        (Net(8, 4), "in Net("),
        (nn.Linear(8, 4, dtype=torch.float64), "in Linear("),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_layer_and_the_fields_are_named(model: nn.Module, says: str) -> None:
    error = fail(model)
    assert says in str(explain_forward_error(error)) and is_repeatable(error)


def test_of_what_was_raised_elsewhere_nothing_is_said() -> None:
    error = fail(nn.Linear(8, 4), lambda model, batch: (Path(__file__).parent / "no such file").read_bytes())
    assert explain_forward_error(error) is None and not is_repeatable(error)
    assert not is_repeatable(RuntimeError("CUDA error: an illegal memory access of size 4"))
