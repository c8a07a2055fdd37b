"""Training on CUDA: autocast, loss scaling, NCCL. Skipped where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.checkpoints import newest_checkpoint

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from kit import train_child as cases  # noqa: E402

from ensemble.spec import Recipe  # noqa: E402
from ensemble.store import RunDir, load_checkpoint  # noqa: E402
from ensemble.train import Inbox, work  # noqa: E402
from ensemble.train.lars import LARS  # noqa: E402


def last(said: dict[str, Any], type: str) -> dict[str, Any]:
    return [event for event in said["events"] if event["type"] == type][-1]


def weights(folder: Path) -> dict[str, Any]:
    state = load_checkpoint(str(newest_checkpoint(RunDir(folder), "member-0", 0)))
    return {name: tensor.double().numpy() for name, tensor in state["model"].items()}


def assert_close(folder: Path, other: Path, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    found, expected = weights(folder), weights(other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=atol, err_msg=name)


def test_a_gpu_trains_to_the_weights_of_the_cpu(tmp_path: Path) -> None:
    for device in ("cpu", "cuda:0"):
        cases.train_case("float64", tmp_path / device, device=device)
    assert_close(tmp_path / "cuda:0" / "float64", tmp_path / "cpu" / "float64")


@pytest.mark.more
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resume_on_a_gpu_gives_the_same_bits(tmp_path: Path, precision: str) -> None:
    whole, stopped = (
        cases.train_case(f"{how}-{precision}", tmp_path, device="cuda:0") for how in ("whole", "mid")
    )
    assert last(whole, "finished")["weights_sha256"] == last(stopped, "finished")["weights_sha256"]


@pytest.mark.more
@pytest.mark.parametrize("case", ["clipped in 2", "scaled in 2", "folds in 2"])
def test_accumulated_gradients_on_a_gpu_are_those_of_the_whole_batch(tmp_path: Path, case: str) -> None:
    reference = cases.ACCUMULATED[case]
    cases.train_case(reference, tmp_path / "cpu")
    cases.train_case(case, tmp_path / "cuda", device="cuda:0")
    assert_close(tmp_path / "cuda" / case, tmp_path / "cpu" / reference)


class Recurrent(torch.nn.Module):
    """A recurrent layer over six steps of one value, and scores from its last state."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(1, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.out = torch.nn.Linear(32, cases.CLASSES)

    def forward(self, x: Any) -> Any:
        return self.out(self.layer(x[:, :, None])[0][:, -1])


@pytest.mark.more
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_nets_train_in_each_precision(tmp_path: Path, kind: Any) -> None:
    recipe = Recipe(model=lambda params: Recurrent(kind), loss=cases.loss, task="classification")
    last = {}
    for name, options in {
        "fp32": {},
        "bf16": {"precision": "bf16"},
        "fp16": {"precision": "fp16"},
        "fp16 static, accumulated": {"precision": "fp16", "loss_scale": 1024.0, "accumulate": 2},
    }.items():
        ensemble = cases.declare(recipe, 1, epochs=2, **options)
        events: list[dict[str, Any]] = []
        job = cases.make_job(tmp_path / name, ensemble, device="cuda:0")
        assert work(job, ensemble, events.append, Inbox()) == "finished", events
        last[name] = [e for e in events if e["type"] == "epoch"][-1]["train_loss"]
    for name, found in last.items():
        assert found == pytest.approx(last["fp32"], rel=2e-2), name


@pytest.mark.more
def test_lars_for_all_tensors_at_once_is_lars_one_by_one_on_the_cpu() -> None:
    torch.manual_seed(0)
    given = [(torch.randn(s), [torch.randn(s) for _ in range(3)]) for s in ((30, 20), (20,), (4, 3, 3, 3))]
    found = {}
    for device in ("cpu", "cuda:0"):
        parameters = [torch.nn.Parameter(weight.to(device, copy=True)) for weight, _ in given]
        optimizer = LARS(parameters, lr=2.0, weight_decay=1e-3, nesterov=True)
        for step in range(3):
            for parameter, (_, grads) in zip(parameters, given, strict=True):
                parameter.grad = grads[step].to(device)
            optimizer.step()
        found[device] = [p.detach().cpu() for p in parameters]
    for ours, expected in zip(found["cuda:0"], found["cpu"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.more
def test_a_member_keeps_to_its_share_of_the_memory(tmp_path: Path) -> None:
    def greedy(params: dict[str, Any]) -> Any:
        model = cases.plain(params)
        total = torch.cuda.get_device_properties(0).total_memory
        model.register_buffer("ballast", torch.empty(total // 50, dtype=torch.uint8, device="cuda:0"))
        return model

    ensemble = cases.declare(replace(cases.SMOOTH, model=greedy), 1)
    identity = replace(ensemble.identify(0), gpus_per_worker=0.01)
    events: list[dict[str, Any]] = []
    try:
        job = cases.make_job(tmp_path, ensemble, device="cuda:0", identity=identity)
        outcome = work(job, ensemble, events.append, Inbox())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert outcome == "failed"
    assert [e["reason"] for e in events if e["type"] == "failed"] == ["oom"]


@pytest.mark.more
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one")
def test_two_gpus_are_one_over_nccl(tmp_path: Path) -> None:
    root = os.pathsep.join([str(TESTS.parent), str(TESTS / "support")])
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "support" / "kit" / "train_child.py"), str(rank), str(tmp_path), "cuda"],
            env={**os.environ, "PYTHONPATH": root},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert [p.returncode for p in processes] == [0, 0], "\n".join(errors)
    said = json.loads((tmp_path / "2" / "0.json").read_text())
    digests = [last(said[case], "finished")["weights_sha256"] for case in ("whole-bf16", "mid-bf16")]
    assert digests[0] == digests[1]
    for case in ("float64", "ragged", "clipped in 2"):
        alone = cases.ACCUMULATED.get(case, case)
        cases.train_case(alone, tmp_path / "1", device="cuda:0")
        assert_close(tmp_path / "2" / case, tmp_path / "1" / alone, rtol=1e-12, atol=1e-13)


@pytest.mark.more
@pytest.mark.parametrize("own_loop", [False, True])
def test_a_rank_says_how_long_it_kept_the_gpu_busy_and_trains_to_the_same_bits(
    tmp_path: Path, own_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ensemble.train.gpu_busy import describe_gpu_busy

    def loop(member: Any) -> None:
        model = cases.SMOOTH.model(member.params).to(member.device)
        model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for _ in member.epochs():
            for batch in member.batches():
                member.backward(cases.SMOOTH.loss(model, batch))
                member.step()

    declared = cases.declare(loop if own_loop else cases.SMOOTH, 1, epochs=3)
    digests = []
    for measured in (True, False):
        if not measured:
            monkeypatch.setattr("ensemble.train.state.open_gpu_busy", lambda device: None)
        before = describe_gpu_busy().get("gpu_busy_s", 0.0)
        events: list[dict[str, Any]] = []
        began = time.perf_counter()
        job = cases.make_job(tmp_path / str(measured), declared, device="cuda:0")
        assert work(job, declared, events.append, Inbox()) == "finished", events
        took_s = time.perf_counter() - began
        digests.append(next(e for e in events if e["type"] == "finished")["weights_sha256"])
        said = [e["gpu_busy_s"] for e in events if e["type"] == "usage" and e["role"] == "train"]
        if measured:
            assert said == sorted(said) and 0 < said[-1] - before < took_s
    assert digests[0] == digests[1]


@pytest.mark.more
def test_measuring_a_gpus_work_does_not_wait_for_it() -> None:
    from ensemble.train.gpu_busy import open_gpu_busy

    busy = open_gpu_busy(torch.device("cuda:0"))
    assert busy is not None
    large = torch.randn(8192, 8192, device="cuda:0")
    large @ large  # loads the kernel
    torch.cuda.synchronize()
    before = busy.read()
    busy.begin()
    for _ in range(50):
        large @ large
    busy.end()
    assert busy.read() == before, "the GPU is still at it"
    torch.cuda.synchronize()
    assert busy.read() > before
