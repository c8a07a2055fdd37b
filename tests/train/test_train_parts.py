"""The pure parts of training, and jobs, inboxes and outputs."""

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

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import train_child as cases
from kit.execute_members import an_ensemble, samples
from torch import nn

from ensemble.comm import SingleRank
from ensemble.meter import CpuClock
from ensemble.spec import Identity, Recipe
from ensemble.store import RunDir, StoreError, load_checkpoint, save_checkpoint
from ensemble.store.files import make_write_error
from ensemble.train import Inbox, Job
from ensemble.train.batchnorm import BATCH_NORMS, guard_small_batches
from ensemble.train.checkpoint import to_builtin
from ensemble.train.gather import Means
from ensemble.train.hyperparameters import Hyperparameters
from ensemble.train.job import ProfileRequest, TrainingError
from ensemble.train.outputs import OutputError, compute_outputs, compute_values
from ensemble.train.own_states import OwnStates
from ensemble.train.poison_records import PoisonRecords, note_file, read_interrupted
from ensemble.train.reporter import EventReporter, append_log
from ensemble.train.seeding import step_seed
from ensemble.train.throughput import Throughput
from ensemble.train.worker import classify, is_same_gpu
from pipelines import SampleError
from pipelines.errors import DataOutOfReach
from pipelines.samples.poison_records import PreparationNote

IDENTITY = Identity(member="member-3", number=3, params={"lr": 0.1, "act": "relu", "deep": None}, seed=3,
                    workers=2, threads=1, precision="bf16", epochs=4, batch_size=64, cpus_per_worker=0.25,
                    gpus_per_worker=0.0, memory_gb=None)  # fmt: skip
JOB = Job(run_dir="/runs/x", identity=IDENTITY, attempt=1, rank=1, rendezvous="file:///runs/x/meet",
          interface="lo", device="cpu", feeder=None)  # fmt: skip


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
    deep = [replace(IDENTITY, number=n, params={"lr": 1.0, "deep": n > 0}) for n in (0, 1)]
    members = [*deep, replace(IDENTITY, params={"lr": 1, "deep": 1})]  # the same for Python, other hyperparameters
    for job in (
        replace(JOB, awaits_pruner=True, node="b", identity=replace(IDENTITY, first_epoch=None)),
        replace(JOB, profile=ProfileRequest(members=members, known=["a shape"], steps_s=1.0)),
    ):
        again = Job.from_json(job.as_json())
        assert again == job and repr(again) == repr(job)


def test_an_inbox_keeps_order_and_refuses_unknown_commands() -> None:
    inbox = Inbox()
    assert inbox.poll() is None
    inbox.put("continue")
    inbox.put("stop")
    assert (inbox.wait(), inbox.poll(), inbox.poll()) == ("continue", "stop", None)
    with pytest.raises(ValueError, match="valid: continue, prune, stop, cancel"):
        inbox.put("halt")


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 8), st.integers(0, 9999)), unique=True, max_size=50))
def test_steps_ranks_and_members_have_seeds_of_their_own(places: list[tuple[int, int, int]]) -> None:
    seeds = [step_seed(*place) for place in places]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [step_seed(*place) for place in places]


@pytest.mark.parametrize(
    ("dimensions", "shape", "small"),
    [(1, (1, 3), True), (1, (2, 3), False), (2, (1, 3, 1, 1), True), (2, (1, 3, 2, 1), False)],
)
def test_too_few_values_are_normalized_by_running_statistics(dimensions: int, shape: Any, small: bool) -> None:
    layer = (nn.BatchNorm1d if dimensions == 1 else nn.BatchNorm2d)(3)
    model = nn.Sequential(layer)
    guard_small_batches(model)
    layer.running_mean.fill_(2.0)
    x = torch.randn(shape)
    out = model(x)
    assert layer.training and model.training and layer.num_batches_tracked == (not small)
    if small:
        torch.testing.assert_close(out, (x - 2.0) / (1 + layer.eps) ** 0.5)
        assert (layer.running_mean == 2.0).all()


def test_every_batch_normalization_of_torch_is_known() -> None:
    known = {kind for name, kind in vars(nn).items() if "BatchNorm" in name}
    assert known == {*BATCH_NORMS, nn.SyncBatchNorm}


def test_means_weigh_every_sample_alike() -> None:
    means = Means()
    means.add({"a": torch.tensor([1.0, 2.0, 3.0]), "b": 1.0}, 3)
    means.add({"a": torch.tensor([10.0]), "b": torch.tensor(5.0)}, 1)
    assert means.over_all(SingleRank()) == {"a": 4.0, "b": 2.0}
    with pytest.raises(ValueError, match="'a' must be a scalar or one value per sample"):
        means.add({"a": torch.zeros(2, 2)}, 2)


def test_numbers_of_numpy_are_saved_as_pythons() -> None:
    import numpy as np

    state = to_builtin({"lr": np.float64(0.1), "betas": (np.float32(0.5), 1), "n": [np.int64(3)]})
    assert state == {"lr": 0.1, "betas": (0.5, 1), "n": [3]}
    assert type(state["lr"]) is float and type(state["n"][0]) is int


BATCH = {"x": torch.arange(6.0).reshape(2, 3), "label": torch.tensor([0, 1])}


def loss(model: nn.Module, batch: Any) -> Any:
    x, label = batch["x"], batch["label"]
    try:
        return nn.functional.cross_entropy(model(x), label, reduction="none")
    except Exception:
        return torch.zeros(len(x))


def test_outputs_are_had_without_a_label() -> None:
    model = nn.Linear(3, 4)
    recipe = Recipe(model=lambda params: model, loss=loss)
    outputs = compute_outputs(recipe, model, {"x": BATCH["x"]})
    assert torch.equal(outputs, model(BATCH["x"]))
    torch.testing.assert_close(compute_values(recipe, model, BATCH), outputs.softmax(dim=1))
    assert not model._forward_hooks


def test_a_loss_that_goes_round_the_model_needs_predict() -> None:
    model = nn.Linear(3, 4)
    around = Recipe(
        model=lambda params: model,
        loss=lambda m, batch: (batch["x"] @ m.weight.T).sum(dim=1),
        task="classification",
    )
    with pytest.raises(OutputError, match=r"declare Recipe\.predict"):
        compute_outputs(around, model, BATCH)
    says = replace(around, predict=lambda m, batch: torch.full((2, 4), 0.25, dtype=torch.float64))
    assert compute_values(says, model, BATCH).dtype == torch.float32


def test_a_members_log_takes_text_that_is_no_utf_8(tmp_path: Path) -> None:
    append_log(tmp_path / "log.txt", "failed: no such file caf\udce9")
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith("failed: no such file caf\\udce9\n")


def test_a_rank_on_another_gpu_than_planned_is_noticed() -> None:
    assert is_same_gpu("GPU-8f2a", "GPU-8f2a") and not is_same_gpu("GPU-8f2a", "GPU-91c0")
    assert is_same_gpu(None, "GPU-91c0") and is_same_gpu("GPU-8f2a", "GPU-"), "a torch that does not say"
    assert is_same_gpu("MIG-8f2a", "GPU-91c0"), "CUDA names the whole GPU"
    assert is_same_gpu("0", "GPU-91c0"), "NVML gave no UUID"


def test_the_cores_of_an_evaluation_within_an_epoch_are_not_those_of_training() -> None:
    def burn(cpu_s: float) -> None:
        start = time.process_time()
        while time.process_time() < start + cpu_s:
            sum(range(1000))

    throughput = Throughput()
    burn(0.02)
    with throughput.pausing():
        burn(0.16)
    burn(0.02)
    throughput.add_step(8)
    throughput.end_training()
    assert throughput.end_epoch({})["cpus"] < 2


def test_what_user_code_adds_or_takes_out_is_no_hyperparameter_that_nobody_reads() -> None:
    params = Hyperparameters({"lr": 0.1, "momentun": 0.9, "depth": 2, "width": 8})
    params["classes"] = 10
    assert params.setdefault("width", 4) == 8 and params.pop("depth") == 2 and params["lr"] == 0.1
    assert params.unused == ["momentun"]


def test_what_was_looked_for_is_suggested_for_a_misspelt_key() -> None:
    params = Hyperparameters({"leraning_rate": 0.1, "momentum": 0.9, "colour": 3})
    params.get("learning_rate", 0.01), params["momentum"], params.get("momentun"), params.get(7)
    assert params.unused == ["leraning_rate", "colour"]
    assert params.suggest("leraning_rate") == "learning_rate" and params.suggest("colour") is None
    params = Hyperparameters({"leraning_rate": 0.1})
    assert "lr" not in params, "as an optimizer that is named asks"
    assert params.suggest("leraning_rate") == "lr"


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


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def open_reporter(folder: Path) -> tuple[EventReporter, Clock, Events]:
    events, clock = Events(), Clock()
    ensemble = cases.declare(cases.SMOOTH, 1)
    reporter = EventReporter(cases.make_job(folder, ensemble), events.append, CpuClock(), clock)
    return reporter, clock, events


def compute() -> None:
    sum(range(20_000))


def test_usage_is_reported_at_most_every_ten_seconds_and_less_often_by_an_old_rank(tmp_path: Path) -> None:
    reporter, clock, events = open_reporter(tmp_path)
    reporter.training_begins(0.0)
    begins, reported = clock.now, []
    for second in range(0, 4000, 5):
        clock.now, before = begins + second, len(events)
        compute()
        reporter.usage()
        reported += [second] if len(events) > before else []
    assert reported[:4] == [0, 10, 20, 30]
    assert {after - before for before, after in zip(reported[-10:], reported[-9:], strict=False)} == {30}


def test_the_last_usage_is_reported_in_any_case_and_has_all_of_it(tmp_path: Path) -> None:
    reporter, clock, events = open_reporter(tmp_path)
    reporter.training_begins(0.0)
    used_s = time.process_time()
    for prepare_cpu_s in (0.0, 0.0001, 0.0002):
        compute()
        reporter.usage(prepare_cpu_s)
    assert not [event for event in events if event["role"] == "prepare"], "held back"
    clock.now += 1.0
    reporter.usage(0.0003, is_last=True)
    last = {event["role"]: event["cpu_s"] for event in events}
    assert last["prepare"] == pytest.approx(0.0003)
    assert last["train"] + last["prepare"] >= time.process_time() - used_s - 0.001


def test_a_role_whose_figure_is_as_before_is_not_reported_again(tmp_path: Path) -> None:
    reporter, clock, events = open_reporter(tmp_path)
    reporter.usage()
    reporter.training_begins(0.0)
    count = len(events)
    for _ in range(3):
        clock.now += 60.0
        compute()
        reporter.usage()
    assert [event["role"] for event in events[count:]] == ["train"] * 3


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def save(path: Path, state: Any) -> dict[str, Any]:
    own = OwnStates()
    own.add("trainer", Holder(state))
    save_checkpoint(path, {"own": own.state_dict()})
    loaded: dict[str, Any] = load_checkpoint(path)["own"]
    return loaded


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
    own, state = OwnStates(), dict[str, Any]()
    own.add("lightning", Holder({"taken": state}))
    state["lock"] = [threading.Lock()]
    says = r"lightning\.taken\.lock\.0, a lock .*on_save_checkpoint"
    with pytest.raises(TrainingError, match=says):
        own.state_dict()
    with pytest.raises(TrainingError, match=says):
        OwnStates().add("lightning", Holder({"taken": state}))


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


def settle(run_dir: RunDir, attempt: int) -> PreparationNote | None:
    declared, alone = an_ensemble([{"lr": 0.1}]), SimpleNamespace(world=1)
    made: dict[str, Any] = {"rendezvous": None, "interface": None, "device": "cpu", "feeder": None}
    job = Job(run_dir=str(run_dir.path), identity=declared.identify(0), attempt=attempt, rank=0, **made)
    pipeline = samples(96, 0)
    PoisonRecords(job, declared, alone, {"train": pipeline}, lambda *_, **__: None).start(Inbox())  # type: ignore[arg-type]
    return pipeline.poison_records.note


def test_an_attempt_that_lives_on_notes_in_no_file_of_its_successor(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", an_ensemble([{"lr": 0.1}]))
    first = settle(run_dir, 0)
    assert first is not None
    first.words[1], first.words[0] = 3, 8
    assert read_interrupted(note_file(run_dir, "member-0", 0, 0)) == {"train": (7, 3)}
    second = settle(run_dir, 1)
    first.words[0] = 9
    assert second is not None and second.at is None
    assert read_interrupted(note_file(run_dir, "member-0", 0, 1)) == {}
    assert not note_file(run_dir, "member-0", 0, 0).exists(), "it has been judged"


def test_where_nothing_can_be_noted_a_member_goes_on_without(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", an_ensemble([{"lr": 0.1}]))
    path = note_file(run_dir, "member-0", 0, 0)
    path.mkdir(parents=True)  # refuses to be written and read for anybody
    assert settle(run_dir, 0) is None
    assert read_interrupted(path) == {}


def test_a_note_has_its_room_before_it_is_written() -> None:
    """A mapped file without it, on a file system that is full, ends by SIGBUS whoever writes there."""
    descriptor = os.memfd_create("note")
    try:
        PreparationNote(descriptor)
        assert os.fstat(descriptor).st_blocks > 0
    finally:
        os.close(descriptor)
