"""The pure parts of training, and jobs, inboxes and outputs."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ensemble.comm import SingleRank
from ensemble.spec import Identity, Recipe
from ensemble.spec.task import CLASSIFICATION
from ensemble.store import StoreError
from ensemble.store.files import make_write_error
from ensemble.train import Inbox, Job
from ensemble.train.batchnorm import BATCH_NORMS, guard_small_batches
from ensemble.train.checkpoint import to_builtin
from ensemble.train.gather import Means
from ensemble.train.job import ProfileRequest
from ensemble.train.outputs import OutputError, compute_outputs, compute_values, to_values
from ensemble.train.reporter import append_log
from ensemble.train.seeding import step_seed
from ensemble.train.throughput import Throughput
from ensemble.train.worker import classify, is_same_gpu
from pipelines import SampleError
from pipelines.errors import DataOutOfReach

IDENTITY = Identity(
    member="member-3",
    number=3,
    params={"lr": 0.1, "act": "relu", "deep": None},
    seed=3,
    workers=2,
    threads=1,
    precision="bf16",
    epochs=4,
    batch_size=64,
    cpus_per_worker=0.25,
    gpus_per_worker=0.0,
    memory_gb=None,
)
JOB = Job(
    run_dir="/runs/x",
    identity=IDENTITY,
    attempt=1,
    rank=1,
    rendezvous="file:///runs/x/meet",
    interface="lo",
    device="cpu",
    feeder=None,
)


def test_a_full_disk_is_no_fault_of_the_member() -> None:
    assert classify(OSError(errno.ENOSPC, "No space left on device")) == ("disk", False), (
        "of another file system, say"
    )
    assert classify(make_write_error(Path("/x"), OSError(errno.EDQUOT, "Quota exceeded"))) == ("disk", True)
    assert classify(make_write_error(Path("/x"), OSError(errno.EROFS, "Read-only"))) == ("disk", False)
    assert classify(StoreError("damaged")) == ("error", False)
    out_of_reach = SampleError(7, "/net/part-0", "cannot be read")
    assert classify(out_of_reach) == ("error", False)
    out_of_reach.__cause__ = OSError(errno.ESTALE, "Stale file handle")
    assert classify(out_of_reach) == ("error", True), "a file server comes back"
    assert classify(DataOutOfReach("sample 7")) == ("unreachable", True)
    assert classify(FileNotFoundError(errno.ENOENT, "no such file")) == ("error", True)


def test_a_job_survives_json() -> None:
    job = replace(JOB, awaits_pruner=True, node="b", identity=replace(IDENTITY, first_epoch=None))
    assert Job.from_json(job.as_json()) == job


def test_a_job_that_measures_is_sent_as_it_is() -> None:
    members = [
        replace(IDENTITY, number=n, member=f"member-{n}", params={"lr": 1.0, "deep": n > 0}) for n in (0, 1)
    ]
    members += [
        replace(IDENTITY, params={"lr": 1, "deep": 1})
    ]  # as Python compares them, but other hyperparameters
    job = replace(JOB, profile=ProfileRequest(members=members, known=[], steps_s=1.0))
    back = Job.from_json(job.as_json())
    assert back == job and back.profile is not None
    assert [repr(one.params) for one in back.profile.members] == [repr(one.params) for one in members]
    none = replace(JOB, profile=ProfileRequest(members=[], known=["a shape"], steps_s=1.0))
    assert Job.from_json(none.as_json()) == none


def test_an_inbox_keeps_order_and_refuses_unknown_commands() -> None:
    inbox = Inbox()
    assert inbox.poll() is None
    inbox.put("continue")
    inbox.put("stop")
    assert (inbox.wait(), inbox.poll(), inbox.poll()) == ("continue", "stop", None)
    with pytest.raises(ValueError, match="valid: continue, prune, stop, cancel"):
        inbox.put("halt")


def test_the_room_is_imported_without_torch() -> None:
    code = "import sys, ensemble.train, ensemble.train.job, ensemble.train.outputs; print('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 8), st.integers(0, 10_000)), unique=True, max_size=50)
)
def test_steps_ranks_and_members_have_seeds_of_their_own(places: list[tuple[int, int, int]]) -> None:
    seeds = [step_seed(*place) for place in places]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [step_seed(*place) for place in places]


@pytest.mark.parametrize(
    ("layer", "shape", "small"),
    [
        (nn.BatchNorm1d(3), (1, 3), True),
        (nn.BatchNorm1d(3), (2, 3), False),
        (nn.BatchNorm2d(3), (1, 3, 1, 1), True),
        (nn.BatchNorm2d(3), (1, 3, 2, 1), False),
    ],
)
def test_too_few_values_are_normalized_by_running_statistics(layer: Any, shape: Any, small: bool) -> None:
    model = nn.Sequential(layer)
    guard_small_batches(model)
    layer.running_mean.fill_(2.0)
    x = torch.randn(shape)
    out = model(x)
    assert layer.training and model.training
    if small:
        torch.testing.assert_close(out, (x - 2.0) / (1 + layer.eps) ** 0.5)
        assert (layer.running_mean == 2.0).all() and layer.num_batches_tracked == 0
    else:
        assert layer.num_batches_tracked == 1


def test_every_batch_normalization_of_torch_is_known() -> None:
    known = {kind for name, kind in vars(nn).items() if "BatchNorm" in name}
    assert known == {*BATCH_NORMS, nn.SyncBatchNorm}


def test_a_layer_trains_again_after_a_batch_that_it_refused() -> None:
    layer = nn.BatchNorm1d(3)
    guard_small_batches(layer)
    with pytest.raises(RuntimeError):
        layer(torch.randn(1, 4))
    assert layer.training


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


def test_outputs_that_are_no_scores_are_described() -> None:
    with pytest.raises(OutputError, match="a dict"):
        to_values(CLASSIFICATION, {})
    with pytest.raises(OutputError, match=r"shape \[2\] and dtype torch.int64"):
        to_values(CLASSIFICATION, torch.tensor([1, 2]))


def test_a_members_log_takes_text_that_is_no_utf_8(tmp_path: Path) -> None:
    append_log(tmp_path / "log.txt", "failed: no such file caf\udce9")
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith("failed: no such file caf\\udce9\n")


@pytest.mark.parametrize(
    ("planned", "found", "same"),
    [
        ("GPU-8f2a", "GPU-8f2a", True),
        ("GPU-8f2a", "GPU-91c0", False),
        (None, "GPU-91c0", True),
        ("GPU-8f2a", "GPU-", True),  # a torch that does not say
        ("MIG-8f2a", "GPU-91c0", True),  # CUDA names the whole GPU
        ("0", "GPU-91c0", True),  # NVML gave no UUID
    ],
)
def test_a_rank_on_another_gpu_than_planned_is_noticed(planned: str | None, found: str, same: bool) -> None:
    assert is_same_gpu(planned, found) == same


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
