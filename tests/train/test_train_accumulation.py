"""Gradients: accumulation, clipping, mixup, mixed precision; kernels. With several workers: test_train_workers."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import train_child as cases
from kit.loop_cases import checkpoint, failed, finished, of, train
from torch import nn

import ensemble
from ensemble.spec import Recipe
from ensemble.spec.task import IGNORED
from ensemble.train.accumulation import MicroBatches, split_batch
from ensemble.train.job import Diverged, TrainingError
from ensemble.train.mixup import mix, mixed_losses
from ensemble.train.precision import MAX_SKIPPED_IN_A_ROW, MixedPrecision
from ensemble.train.seeding import seed_everything
from pipelines import Batch


def batch(rows: int) -> Batch:
    fields = {"x": torch.arange(2.0 * rows).reshape(rows, 2), "index": torch.arange(rows)}
    return Batch(fields, epoch=1, step=2, global_size=99)


@given(rows=st.integers(0, 40), count=st.integers(1, 12))
def test_parts_are_the_rows_in_order_and_nearly_equal(rows: int, count: int) -> None:
    whole = batch(rows)
    parts = split_batch(whole, count)
    assert len(parts) == max(1, min(rows, count))
    for name in ("index", "x"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])
    sizes = [len(part["index"]) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all((p.global_size, p.epoch, p.step) == (99, 1, 2) for p in parts)
    assert len(parts) > 1 or parts[0] is whole, "which is as it was without accumulation"


def test_losses_are_given_once_for_each_part_that_is_asked_for() -> None:
    once, all_at_once = "once for each part", "called once for each batch"
    turn = MicroBatches(batch(5), 2)

    def refused(call: Any, says: str) -> None:
        with pytest.raises(TrainingError, match=says):
            call()

    refused(turn.pop, r"accumulate=2 .* once for each part of member.parts")
    parts = turn.parts()
    first = next(parts)
    assert turn.pop() == (first, False) and not turn.is_complete
    refused(turn.pop, once)
    refused(turn.parts().__next__, all_at_once)
    second = next(parts)
    refused(parts.__next__, once)
    turn = MicroBatches(batch(5), 2)
    (first, pops), (second, last) = ((part, turn.pop()) for part in turn.parts())
    assert (pops, last) == ((first, False), (second, True)) and turn.is_complete
    whole = batch(3)  # without accumulation, or of nothing, parts need not be asked for
    for turn, says in ((MicroBatches(whole, 1), "add up losses"), (MicroBatches(batch(0), 4), "accumulate=4")):
        assert turn.pop() == (turn.batch, True) and turn.is_complete
        refused(turn.pop, says)
        refused(turn.parts().__next__, all_at_once)
    turn = MicroBatches(whole, 1)
    assert [part is whole and turn.pop() == (whole, True) for part in turn.parts()] == [True]


def test_a_train_function_accumulates_as_the_built_in_loop_does(tmp_path: Path) -> None:
    def loop(member: Any) -> None:
        model = cases.plain(member.params)
        model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=member.params["lr"]))
        for _ in member.epochs():
            for batch in member.batches():
                for part in member.parts(batch):
                    with member.autocast():
                        losses = cases.loss(model, part)
                    member.backward(losses)
                member.step()

    ends = [finished(tmp_path / n, trained, accumulate=3) for n, trained in (("a", loop), ("b", cases.SMOOTH))]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]


def test_memory_is_needed_for_one_part_only(tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Any:
        seen.extend([len(batch["index"])] * model.training)
        return cases.loss(model, batch)

    finished(tmp_path, recipe(loss=loss), accumulate=2, epochs=1)
    assert seen == [2, 3] * 4 + [1, 2]


def test_a_loss_that_is_not_a_number_in_the_first_part_ends_the_member(tmp_path: Path) -> None:
    factors = itertools.chain([torch.nan], itertools.repeat(1.0))
    loss = lambda model, batch: cases.loss(model, batch) * next(factors)  # noqa: E731
    end = failed(*train(tmp_path, recipe(loss=loss), accumulate=3))
    assert end["reason"] == "nan" and "epoch 1, step 0" in end["error"]


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"accumulate": 3}),
        # float64 is not narrowed by autocast: the scale alone is what differs
        *({"precision": "fp16"}, {"precision": "fp16", "loss_scale": 3.0e4, "accumulate": 2}),
        {"precision": "bf16", "loss_scale": 1.0e3},
    ],
    ids=str,
)
@pytest.mark.parametrize("clip_norm", [0.2, 1e3])
def test_the_true_gradient_of_the_global_batch_is_clipped(tmp_path: Path, options: Any, clip_norm: float) -> None:
    data = cases.data(dtype="float64")
    clipping, params = replace(cases.SMOOTH, clip_norm=clip_norm), {"dtype": "float64"}
    outcome, events = train(tmp_path, clipping, params=params, train=data, valid=None, epochs=2, **options)
    assert outcome == "finished"
    seed_everything(0, torch.device("cpu"))
    model = cases.plain(params)
    clipped = 0
    for rows in data.loader(batch_size=5, epochs=range(2)):
        grads = torch.autograd.grad(cases.loss(model, rows).mean(), list(model.parameters()))
        norm = torch.sqrt(sum((g * g).sum() for g in grads))
        clipped += bool(norm > clip_norm)
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter -= 0.05 * grad * min(1.0, clip_norm / float(norm))
    assert clipped == (10 if clip_norm < 1 else 0)
    norm_of_last = of(events, "epoch")[-1]["grad_norm"]  # unscaled, before it was clipped
    assert norm_of_last == pytest.approx(float(norm), rel=1e-4)
    for name, value in checkpoint(tmp_path)["model"].items():
        # torch adds 1e-6 to the norm before it divides by it
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5 if clipped else 1e-12, atol=1e-7)


def batch_mixup(n: int = 16, **fields: Any) -> Batch:
    own = {"x": torch.arange(float(n))[:, None], "label": torch.arange(n) % 3, "index": torch.arange(n), **fields}
    return Batch(own, epoch=0, step=4, global_size=2 * n)


def mixed_by(alpha: float = 1.0, target: str = "label", **fields: Any) -> Any:
    about = {name: fields.pop(name) for name in ("weighted", "inputs") if name in fields}
    drawn = {name: fields.pop(name, 0) for name in ("seed", "rank", "step")}
    return mix(batch_mixup(**fields), target, alpha, **drawn, **about)


def partners(mixed: Any) -> torch.Tensor:
    """The row with which each was mixed: x is the number of the row."""
    return (mixed["x"][:, 0] - mixed.share * batch_mixup()["x"][:, 0]) / (1 - mixed.share)


def test_samples_are_mixed_in_pairs_by_one_share() -> None:
    plain, mixed = batch_mixup(), mixed_by(0.4, seed=3, step=7)
    assert 0 < mixed.share < 1 and mixed.partner_target is not None
    rows = partners(mixed).round().long()
    torch.testing.assert_close(partners(mixed), rows.float(), rtol=1e-4, atol=1e-4)
    assert sorted(rows.tolist()) == list(range(16)) and rows.tolist() != list(range(16))
    assert torch.equal(mixed.partner_target, plain["label"][rows])
    assert torch.equal(mixed["label"], plain["label"]) and torch.equal(mixed["index"], plain["index"])
    assert (mixed.epoch, mixed.step, mixed.global_size) == (0, 4, 32)


def test_the_share_is_that_of_the_step_and_partners_those_of_the_rank() -> None:
    def drawn(**changes: int) -> tuple[float, list[float]]:
        mixed = mixed_by(**{"seed": 1, **changes})
        return mixed.share, mixed["x"][:, 0].tolist()

    assert drawn() == drawn()
    assert drawn(rank=1)[0] == drawn()[0] and drawn(rank=1)[1] != drawn()[1]
    assert drawn(step=1)[0] != drawn()[0] and drawn(seed=2)[0] != drawn()[0]
    shares = [mixed_by(0.2, n=2, step=step).share for step in range(2000)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * 0.2 + 1)), abs=0.01), "of Beta(0.2, 0.2)"


def test_a_sample_without_a_target_is_nobodys_partner() -> None:
    label = torch.where(torch.arange(16) % 2 == 0, torch.arange(16) % 3, IGNORED)
    known = label != IGNORED
    mixed = mixed_by(label=label)
    again = mixed_by(label=label, x=torch.where(known[:, None], batch_mixup()["x"], 1e6))
    assert torch.equal(mixed["x"][known], again["x"][known])
    assert (mixed.partner_target[known] != IGNORED).all()
    numbers = torch.where(known, label.double(), torch.nan)
    assert not mixed_by(label=numbers).partner_target[known].isnan().any()


def test_each_of_the_two_losses_has_the_weight_of_its_sample() -> None:
    """As a bootstrap wants it: a sample that was drawn three times counts three times, wherever it is."""
    weight = torch.tensor([1.0, 0.0, 3.0, 2.0] * 4)
    nonzero = weight + 0.5
    mixed = mixed_by(weight=nonzero, weighted=True)
    rows = partners(mixed).round().long()
    own, others = torch.rand(16), torch.rand(16)
    losses = mixed.losses(lambda target: others if target is mixed.partner_target else own) * nonzero
    expected = mixed.share * nonzero * own + (1 - mixed.share) * nonzero[rows] * others
    torch.testing.assert_close(losses, expected)
    assert torch.equal(mixed["weight"], nonzero)
    # Where no weights are declared, a field of that name is one as any other, or the target.
    mixed = mixed_by(weight=weight)
    assert mixed.partner_weight is None and torch.equal(mixed["x"], mixed_by()["x"])
    rows = partners(mixed).round().long()
    torch.testing.assert_close(mixed["weight"], mixed.share * weight + (1 - mixed.share) * weight[rows])
    target = mixed_by(weight=weight, target="weight")
    assert target.partner_weight is None and torch.equal(target["weight"], weight)


def test_what_cannot_be_mixed_is_refused() -> None:
    image, integers = torch.zeros(16, 3, 4, 4, dtype=torch.uint8), torch.ones(16, dtype=torch.int64)
    called_with = r"called with 'image', which is uint8 \[16, 3, 4, 4\].*stages\.scale"
    for says, options in (
        (called_with, {"image": image, "inputs": ("x", "image")}),
        ("no target 'y'", {"target": "y"}),
        ("needs a field of floats", {"x": integers}),
    ):
        with pytest.raises(TrainingError, match=says):
            mixed_by(**options)
    mixed_by(image=image, inputs=("x",))
    of_the_sample = {"lengths": torch.arange(16), "mask": torch.ones(16, 5, dtype=torch.bool)}
    mixed_by(**of_the_sample, inputs=("x", "lengths", "mask"))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(1, 3), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return nn.functional.dropout(self.layer(x), 0.5)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_both_losses_are_of_one_forward_pass(is_replaced: bool) -> None:
    model = Twice()
    if is_replaced:  # as a compiler does it
        model.forward = compiled = lambda x: Twice.forward(model, x)  # type: ignore[method-assign]

    def loss(net: nn.Module, batch: Any) -> Any:
        assert batch.global_size == 32
        outputs = net(batch["x"]) - net(-batch["x"])  # a model may be called several times
        return nn.functional.cross_entropy(outputs, batch["label"], reduction="none")

    mixed = mixed_by()
    torch.manual_seed(0)
    losses = mixed_losses(loss, model, mixed)
    assert model.calls == 2 and vars(model).get("forward") is (compiled if is_replaced else None)
    torch.manual_seed(0)
    outputs = model(mixed["x"]) - model(-mixed["x"])
    soft = nn.functional.one_hot(mixed["label"], 3) * mixed.share
    soft = soft + nn.functional.one_hot(mixed.partner_target, 3) * (1 - mixed.share)
    torch.testing.assert_close(losses, nn.functional.cross_entropy(outputs, soft, reduction="none"))
    losses.sum().backward()
    assert model.layer.weight.grad is not None


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
    finished(tmp_path / "plain", counted, **options)
    assert calls == 10
    finished(tmp_path / "made", counted, compile=EAGER, **options)
    assert calls == 10, "no more"
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
