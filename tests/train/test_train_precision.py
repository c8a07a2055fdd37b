"""Mixed precision: loss scales, clipping, recurrent nets in each precision, kernels that are missing."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import train_child as cases
from kit.loop_cases import checkpoint, finished, of, train
from torch import nn

import ensemble
from ensemble.spec import Recipe
from ensemble.train.job import Diverged, TrainingError
from ensemble.train.precision import MAX_SKIPPED_IN_A_ROW, MixedPrecision

CPU, FP16 = torch.device("cpu"), "fp16"
EAGER = {"name": "default", "backend": "eager"}


def recipe(model: Any = cases.plain, loss: Any = cases.loss) -> Recipe:
    return Recipe(model=model, loss=loss, task="classification")


def one_weight(value: float = 0.0, **options: Any) -> tuple[nn.Parameter, MixedPrecision, Any]:
    """A weight, its precision, and what steps it by a gradient."""
    weight, precision = (
        nn.Parameter(torch.full((1,), value)),
        MixedPrecision(**{"precision": FP16, **options}, device=CPU),
    )
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step(grad: float | None = None) -> bool:
        if grad is not None:
            weight.grad = torch.tensor([grad])
        return precision.step(optimizer, [weight], None)

    return weight, precision, step


def test_loss_scaling_keeps_gradients_that_fp16_would_lose() -> None:
    weight, precision, step = one_weight(1.0)
    # 1e-8 is 0 in fp16; times 65536 it is not
    loss = (weight.half() * 1e-4).float().sum() * 1e-4
    loss.backward(torch.tensor(precision.loss_scale))
    assert step()
    assert weight.grad is not None and weight.grad.item() == pytest.approx(1e-8, rel=1e-3)


def test_a_rank_without_a_sample_steps_in_fp16_with_the_gradients_of_the_others() -> None:
    for scale in (2.0**16, 4.0):
        weight, precision, step = one_weight()
        if scale == 4.0:  # resumed
            saved = MixedPrecision(FP16, CPU).state_dict()
            saved["scaler"]["scale"] = scale
            precision.load_state_dict(saved)
        assert step(8.0)  # as it comes from the exchange: this rank has scaled no loss
        assert weight.item() == -8.0 / scale


@pytest.mark.parametrize(
    ("scale", "says"),
    [("dynamic", "40 times in a row"), (2.0**16, "at the static loss scale 65536: take a smaller one")],
)
def test_endless_overflow_is_divergence(scale: Any, says: str) -> None:
    weight, _, step = one_weight(loss_scale=scale)
    assert not any(step(torch.inf) for _ in range(MAX_SKIPPED_IN_A_ROW - 1))
    with pytest.raises(Diverged, match=says):
        step(torch.inf)
    assert weight.item() == 0.0


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_static_scale_skips_an_overflow_and_stays(precision: Any) -> None:
    factor = 1000.1  # which is not a number of fp32
    weight, mixed, step = one_weight(precision=precision, loss_scale=factor)
    for grad, stepped in ((0.5 * factor, True), (torch.inf, False), (torch.nan, False), (0.5 * factor, True)):
        assert mixed.loss_scale == pytest.approx(factor, rel=1e-6) and mixed.may_skip
        assert step(grad) is stepped
    assert weight.item() == pytest.approx(-1.0) and mixed.loss_scale == pytest.approx(factor, rel=1e-6)
    resumed = MixedPrecision(precision, CPU, loss_scale=factor)
    resumed.load_state_dict(mixed.state_dict())
    assert resumed.state_dict() == mixed.state_dict() and resumed.loss_scale == mixed.loss_scale


def test_what_has_no_scale_has_the_scale_one() -> None:
    for mixed in (MixedPrecision("fp32", CPU), MixedPrecision("fp32", CPU, 8.0), MixedPrecision("bf16", CPU)):
        assert (mixed.loss_scale, mixed.may_skip, mixed.state_dict()) == (1.0, False, {})
    assert MixedPrecision("fp16", CPU).loss_scale == 2.0**16


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(1, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(32, cases.CLASSES)

    def forward(self, x: Any) -> Any:
        return self.out(self.layer(x[:, :, None])[0][:, -1])


@pytest.mark.parametrize(
    "kind", [nn.LSTM, *(pytest.param(kind, marks=pytest.mark.more) for kind in (nn.GRU, nn.RNN))]
)
def test_recurrent_nets_train_in_each_precision_on_the_cpu(tmp_path: Path, kind: Any) -> None:
    last, recurrent = {}, recipe(lambda params: Recurrent(kind))
    for precision in ("fp32", "bf16", "fp16"):
        outcome, events = train(tmp_path / precision, recurrent, precision=precision, epochs=2)
        assert outcome == "finished", events
        last[precision] = of(events, "epoch")[-1]
        assert last[precision]["skipped_steps"] == 0
    assert torch.backends.mkldnn.enabled
    for precision, rel in (("bf16", 2e-2), ("fp16", 2e-3)):
        assert last[precision]["train_loss"] == pytest.approx(last["fp32"]["train_loss"], rel=rel)
        assert last[precision]["metrics"]["loss"] == pytest.approx(last["fp32"]["metrics"]["loss"], rel=rel)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_lstm_trains_where_onednn_has_no_kernel_for_it(monkeypatch: Any, precision: Any) -> None:
    """As on a processor without AVX-512, for bf16; other processors take that way here."""
    monkeypatch.setattr("ensemble.train.precision.has_onednn_lstm", lambda dtype: False)
    mixed, layer = MixedPrecision(precision, CPU), nn.LSTM(4, 4)
    mixed.prepare(layer)
    seen = []
    layer.register_forward_pre_hook(lambda *_: seen.append(torch.backends.mkldnn.enabled))
    with mixed.autocast():
        layer(torch.ones(2, 3, 4))[0].float().sum().backward()
    assert seen == [False] and torch.backends.mkldnn.enabled
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in layer.parameters())
    with mixed.autocast(), pytest.raises(RuntimeError, match="input"):
        layer(torch.zeros(2, 3, 5))
    assert torch.backends.mkldnn.enabled, "also after an LSTM that fails"


def test_weights_in_fp16_are_refused() -> None:
    for mixed in (MixedPrecision("fp16", CPU, "dynamic"), MixedPrecision("bf16", CPU, 8.0)):
        with pytest.raises(TrainingError, match=r"keeps the weights in fp32: leave out model.half\(\)"):
            mixed.prepare(nn.Linear(2, 2).half())


def test_what_the_optimizer_does_not_hold_does_not_count_for_clipping(tmp_path: Path) -> None:
    """Its gradients are never unscaled: their norm would be tens of thousands of times too large."""
    steps = {}
    for precision in ("fp32", "fp16"):
        torch.manual_seed(cases.declare(cases.HEAD, 1).identify(0).seed)
        before = cases.plain({}).layers[-1].weight.detach().clone()
        finished(tmp_path / precision, cases.HEAD, precision=precision, epochs=1)
        steps[precision] = float((checkpoint(tmp_path / precision)["model"]["layers.4.weight"] - before).norm())
    assert steps["fp16"] == pytest.approx(steps["fp32"], rel=0.05)


@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("aot_eager", marks=pytest.mark.more), pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_a_compiled_model_has_the_checkpoint_of_any_other(tmp_path: Path, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler, and there is no g++")
    plain = finished(tmp_path / "plain", recipe(cases.normed), epochs=2)
    made = finished(tmp_path / "made", recipe(cases.normed), epochs=2, compile={**EAGER, "backend": backend})
    ours, theirs = checkpoint(tmp_path / "made")["model"], checkpoint(tmp_path / "plain")["model"]
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
    assert made["metrics"]["loss"] == pytest.approx(plain["metrics"]["loss"], rel=1e-3)


def test_a_model_is_compiled(tmp_path: Path) -> None:
    """Its forward pass in Python runs while it is traced, and not at each of 10 steps and 4 evaluations."""
    calls = 0

    class Counted(cases.Net):
        def forward(self, x: Any) -> Any:
            if not torch.compiler.is_compiling():
                nonlocal calls
                calls += 1
            return super().forward(x)

    options: dict[str, Any] = {"epochs": 2, "valid": None, "train": cases.data(25)}
    counted = recipe(lambda params: Counted())
    looks = 2  # at the first batch once more: the whole, and its first half
    finished(tmp_path / "plain", counted, **options)
    assert calls == 10 + looks
    finished(tmp_path / "made", counted, compile=EAGER, **options)
    assert calls <= 10 + 2 * looks
    assert not list(tmp_path.rglob("compiled/*/inductor/*")), "nothing was compiled to files"


def test_kernels_are_kept_with_the_run_and_the_process_is_left_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def find_folders(run: str) -> set[str | None]:
        seen: set[str | None] = set()

        def loss(model: Any, batch: Any) -> Any:
            seen.add(os.environ.get(names[0]))
            return cases.loss(model, batch)

        finished(tmp_path / run, recipe(loss=loss), epochs=1, compile=EAGER)
        return seen

    for run in ("one", "two"):
        (folder,) = find_folders(run)
        assert folder is not None and Path(folder).parents[1] == tmp_path / run / "compiled"
        assert stat.S_IMODE(Path(folder).parents[1].stat().st_mode) == 0o700
        assert not [name for name in names if name in os.environ]
    elsewhere = str(tmp_path / "elsewhere")
    monkeypatch.setenv(names[0], elsewhere)
    assert find_folders("three") == {elsewhere} == {os.environ[names[0]]}


@pytest.mark.more
def test_the_next_start_of_a_run_compiles_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler, and there is no g++")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    options = {"epochs": 1, "train": cases.data(20), "valid": None, "compile": True, "devices": "cpu"}
    ensemble.submit(cases.declare(recipe(), 1, **options), tmp_path / "run", "local").wait()

    def list_kernels() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "compiled").rglob("*.so")}

    kernels = list_kernels()
    result = ensemble.resume(tmp_path / "run", epochs=2).wait()
    assert {row["state"] for row in result.members} == {"finished"}
    assert kernels and kernels == list_kernels()
