"""LARS against the formula in float64, declared optimizers, and the published laws of learning rates."""

from __future__ import annotations

import copy
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import train_child as cases
from kit.loop_cases import checkpoint, finished, of, train
from kit.property_examples import examples
from torch import nn

from ensemble.spec import Recipe
from ensemble.spec.options import SCHEDULES
from ensemble.spec.validation import SpecError
from ensemble.train.batchnorm import bias_and_norm
from ensemble.train.checkpoint import to_builtin
from ensemble.train.lars import LARS
from ensemble.train.lr_schedulers import cosine, make_schedule, polynomial, step_decay
from ensemble.train.optimizers import make_optimizer

SHAPES = [(4, 3), (5,), (2, 3, 2, 2), (3, 1)]


def formula(weights: list[Any], grads: Any, rates: list[float], adapt: list[bool], **options: Any) -> list[Any]:
    """LARS as You et al. write it, in float64: the weights after a step with each of the gradients."""
    eta, beta, m = options["trust"], options["weight_decay"], options["momentum"]
    weights = [w.double().numpy() for w in weights]
    velocity = [np.zeros_like(w) for w in weights]
    for gamma, step in zip(rates, grads, strict=True):
        for i, grad in enumerate(step):
            w, g = weights[i], grad.double().numpy()
            update = gamma * g
            if adapt[i]:
                w_norm, norms = np.linalg.norm(w), np.linalg.norm(g) + beta * np.linalg.norm(w)
                update = gamma * (eta * w_norm / norms if w_norm > 0 and norms > 0 else 1.0) * (g + beta * w)
            velocity[i] = m * velocity[i] + update
            weights[i] = w - (m * velocity[i] + update if options["nesterov"] else velocity[i])
    return weights


def draw(seed: int, steps: int, dtype: Any, zero: int | None = None) -> tuple[list[Any], list[list[Any]]]:
    torch.manual_seed(seed)
    weights = [(torch.randn(shape) * 10 ** (i - 2)).to(dtype) for i, shape in enumerate(SHAPES)]
    grads = [[(torch.randn(s) * 10 ** (2 - i)).to(dtype) for i, s in enumerate(SHAPES)] for _ in range(steps)]
    if zero is not None:
        (weights if zero % 2 else grads[0])[zero // 2].zero_()
    return weights, grads


def lars_steps(weights: list[Any], grads: list[list[Any]], rates: list[float], **options: Any) -> list[Any]:
    parameters = [nn.Parameter(w.clone()) for w in weights]
    optimizer = LARS(parameters, lr=1.0, **options)
    for rate, step in zip(rates, grads, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    return [p.detach() for p in parameters]


OPTIONS = {"momentum": st.sampled_from([0.0, 0.9]), "weight_decay": st.sampled_from([0.0, 1e-4, 0.3])}


@examples(20)
@given(
    seed=st.integers(0, 10**6),
    rates=st.lists(st.just(0.0) | st.floats(1e-6, 30.0), min_size=1, max_size=4),
    options=st.fixed_dictionaries({**OPTIONS, "nesterov": st.booleans()}),
    adapt=st.sampled_from([None, True, False]),
    foreach=st.booleans(),
    zero=st.none() | st.integers(0, 7),
    double=st.booleans(),
)
def test_lars_is_its_formula(
    seed: int, rates: Any, options: Any, adapt: Any, foreach: Any, zero: Any, double: bool
) -> None:
    options |= {"trust": 0.001, "nesterov": options["nesterov"] and options["momentum"] > 0}
    weights, grads = draw(seed, len(rates), torch.float64 if double else torch.float32, zero)
    stepped = lars_steps(weights, grads, rates, adapt=adapt, foreach=foreach, **options)
    adapted = [w.dim() > 1 if adapt is None else adapt for w in weights]
    for ours, exact in zip(stepped, formula(weights, grads, rates, adapted, **options), strict=True):
        rtol = 1e-12 if double else 2e-5
        np.testing.assert_allclose(ours.numpy(), exact, rtol=rtol, atol=rtol * max(1e-30, np.abs(exact).max()))


def test_the_rate_of_a_large_layer_is_exact() -> None:
    torch.manual_seed(0)
    weights, grads = [torch.randn(2000, 1001)], [[torch.randn(2000, 1001)]]
    options: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "trust": 1.0}
    (found,) = lars_steps(weights, grads, [1.0], **options)
    (exact,) = formula(weights, grads, [1.0], [True], nesterov=False, **options)
    assert np.abs(found.numpy() - exact).max() < 1e-6, "torch's own fp32 norm is wrong by 2e-5 here"


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_are_stepped_in_fp32(foreach: bool, dtype: Any) -> None:
    torch.manual_seed(0)
    weight, grad = (torch.randn(400, 300) * 300).to(dtype), (torch.randn(400, 300) * 200).to(dtype)
    assert weight.double().norm() > 65504, "which fp16 cannot hold"
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4, "trust": 0.5, "nesterov": False}

    def begin(values: torch.Tensor) -> tuple[nn.Parameter, LARS]:
        parameter = nn.Parameter(values.detach().clone())
        return parameter, LARS([parameter], lr=1.0, foreach=foreach, **options)

    def step(parameter: nn.Parameter, optimizer: LARS) -> torch.Tensor:
        parameter.grad = grad.clone()
        optimizer.step()
        return optimizer.state[parameter]["momentum_buffer"]

    parameter, optimizer = begin(weight)
    assert step(parameter, optimizer).dtype == torch.float32
    (exact,) = formula([weight], [[grad]], [1.0], [True], **options)
    same = parameter.detach() == torch.from_numpy(exact).to(dtype)
    assert same.double().mean() > 0.998, "but where fp32's last bit decides how it is rounded"
    resumed_parameter, resumed = begin(parameter)
    resumed.load_state_dict(optimizer.state_dict())
    kept = step(parameter, optimizer), step(resumed_parameter, resumed)
    assert torch.equal(parameter.detach(), resumed_parameter.detach()), "the bits of its fp32 momentum are kept"
    assert torch.equal(*kept) and kept[0] is not kept[1]


def test_what_lars_does_not_take_is_refused() -> None:
    one, wrong = [nn.Parameter(torch.ones(1))], "must be a number of at least 0"
    for says, parameters, options in (
        ("complex", [nn.Parameter(torch.ones(2, dtype=torch.complex64))], {}),
        *((wrong, one, {name: value}) for name, value in (("lr", -1.0), ("lr", math.nan), ("momentum", -0.1))),
        (wrong, one, {"trust": True}),
        ("nesterov needs", one, {"momentum": 0.0, "nesterov": True}),
    ):
        with pytest.raises(ValueError, match=says):
            LARS(parameters, **{"lr": 1.0, **options})
    embedding, idle = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([*embedding.parameters(), idle], lr=1.0)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="dense gradients"):
        optimizer.step()
    embedding.weight.grad = torch.ones(4, 2)
    before = embedding.weight.detach().clone()
    optimizer.step()
    assert not (embedding.weight == before).any()
    assert (idle == 1).all() and idle not in optimizer.state, "one without a gradient is left alone"


@pytest.mark.more
def test_after_the_first_no_optimizer_imports_a_module_and_no_thread_has_begun() -> None:
    code = (
        "import sys, os, torch; from ensemble.train.optimizers import warm_up; before = len(sys.modules); "
        "threads = os.listdir('/proc/self/task'); warm_up(); after = set(sys.modules); "
        "assert os.listdir('/proc/self/task') == threads; "
        "torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]); "
        "print(len(after) - before, sorted(set(sys.modules) - after))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, _, others = done.stdout.partition(" ")
    assert int(count) > 100, "else there is nothing to import before"
    assert others.strip() == "[]"


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch = nn.BatchNorm2d(4)
        self.layer = nn.LayerNorm([4, 6, 6])
        self.recurrent = nn.LSTM(6, 5)
        self.temperature = nn.Parameter(torch.tensor(1.0))


def test_biases_and_normalizations_are_kept_from_decay() -> None:
    model = Normed()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    free = {names[id(parameter)] for parameter in bias_and_norm(model)}
    assert free == {
        *("conv.bias", "batch.weight", "batch.bias", "layer.weight", "layer.bias", "temperature"),
        *("recurrent.bias_ih_l0", "recurrent.bias_hh_l0"),
    }
    for name in ("lars", "adamw"):
        options = {"name": name, "lr": 0.1, "weight_decay": 0.01, "decay_norm": False}
        decayed, plain = make_optimizer(options, model, {}).param_groups
        assert {names[id(parameter)] for parameter in plain["params"]} == free and plain["weight_decay"] == 0.0
        assert decayed["weight_decay"] == 0.01 and len(decayed["params"]) == 3
        assert (decayed.get("adapt"), plain.get("adapt")) == ((True, False) if name == "lars" else (None, None))
    for options, key, value in (
        ({"name": "lars", "decay_norm": True}, "adapt", True),
        ("adamw", "weight_decay", 0.01),
    ):
        (everything,) = make_optimizer(options, model, {"lr": 1}).param_groups
        assert everything[key] == value and len(everything["params"]) == 11


def test_a_hyperparameter_takes_an_options_place() -> None:
    net = nn.Linear(2, 2)
    sgd = make_optimizer({"name": "sgd", "lr": 0.1, "momentum": 0.5}, net, {"lr": 0.3, "weight_decay": 0.02})
    group = sgd.param_groups[0]
    assert isinstance(sgd, torch.optim.SGD)
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.5, 0.02)
    adam = make_optimizer("adam", net, {"lr": 0.001, "betas": [0.8, 0.9], "width": 3})
    assert adam.param_groups[0]["betas"] in ((0.8, 0.9), [0.8, 0.9])
    (group,) = make_optimizer("lars", nn.BatchNorm1d(3), {"lr": 1.0}).param_groups
    assert group["adapt"] is False
    for options, params in (("sgd", {"lr": "fast"}), ({"name": "sgd", "nesterov": True}, {"lr": 0.1})):
        with pytest.raises(SpecError, match=r"^optimizer"):
            make_optimizer(options, net, params)


PLAIN = Recipe(model=cases.noisy, loss=cases.loss, task="classification")
WORDS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "schedule": "constant"},
    {"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}, "schedule": "damped"},
    {"optimizer": "adam", "schedule": {"name": "capped_linear", "gamma": 0.9}},
    {"optimizer": {"name": "adamw", "decay_norm": False}, "schedule": {"name": "cosine", "warmup_epochs": 0.6}},
    {"optimizer": "lars", "schedule": {"name": "polynomial", "warmup_epochs": 1}, "params": {"lr": 5.0}},
    {"optimizer": {"name": "lars", "decay_norm": True}, "schedule": {"name": "step", "milestones": [0.4, 2]}},
]


@pytest.mark.parametrize("words", WORDS, ids=lambda w: f"{w['optimizer']}"[:20])
def test_a_declared_optimizer_and_schedule_resume_to_the_same_bits(tmp_path: Path, words: dict[str, Any]) -> None:
    whole = train(tmp_path / "whole", PLAIN, **words)[1]
    assert train(tmp_path / "cut", PLAIN, cases.Script(7, "stop"), **words)[0] == "stopped"
    outcome, events = train(tmp_path / "cut", PLAIN, **words)
    assert outcome == "finished" and of(events, "finished") == of(whole, "finished")
    assert [e["lr"] for e in of(whole, "epoch")][1:] == [e["lr"] for e in of(events, "epoch")]
    if words is WORDS[0]:  # which is what a member without words has
        assert finished(tmp_path / "plain", PLAIN)["weights_sha256"] == of(whole, "finished")[0]["weights_sha256"]


def test_the_declared_rate_is_the_one_that_is_used(tmp_path: Path) -> None:
    schedule = {"name": "step", "every_epochs": 1, "gamma": 0.5}
    events = train(tmp_path, PLAIN, optimizer="sgd", schedule=schedule)[1]
    # told after the last step of an epoch, whose schedule is at the next epoch by then
    assert [e["lr"] for e in of(events, "epoch")] == pytest.approx([0.025, 0.0125, 0.00625])
    state = checkpoint(tmp_path)
    assert state["schedule"]["last_epoch"] == 15 and state["identity"]["schedule"]["gamma"] == 0.5


def begin(
    schedule: Any, lr: float = 0.1, *, epochs: int = 3, steps_per_epoch: int = 4, **options: Any
) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    about = {"steps": epochs * steps_per_epoch, "steps_per_epoch": steps_per_epoch, "workers": 1, "batch_size": 32}
    params = options.pop("params", {})
    return optimizer, make_schedule(schedule, optimizer, params, **{**about, **options})


def walk(optimizer: Any, scheduler: Any, steps: int = 12) -> list[float]:
    passed = []
    for _ in range(steps):
        passed.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return passed


def rates(schedule: Any, lr: float = 0.1, *, epochs: int = 3, steps_per_epoch: int = 4, **options: Any) -> Any:
    """The learning rate of each step."""
    about = {"epochs": epochs, "steps_per_epoch": steps_per_epoch, **options}
    return walk(*begin(schedule, lr, **about), epochs * steps_per_epoch)


def torchs(schedule: Any, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    return walk(optimizer, schedule(optimizer, eta_min=0.05, **options))


@pytest.mark.parametrize("damping", [True, False], ids=["the damped law", "linear scaling up to a cap"])
@pytest.mark.parametrize("lr0", [2e-5, 0.0025, 0.04, 0.1, 0.7])
def test_the_rates_of_1_to_256_workers_are_those_of_frnn(lr0: float, damping: bool) -> None:
    """FRNN's `MPIModel` caps the rate, damps it as the paper does, decays it after each epoch, and scales it.

    The rate decays from the damped one, or from the configured one, as FRNN's training loop does it.
    """
    for n in (1, 2, 3, 7, 10, 39, 40, 41, 99, 100, 101, 256):
        start = min(lr0, 0.1) / (1.0 + n / 100.0) if damping else lr0
        expected = [min(start * 0.97**epoch * n, 0.1) for epoch in (0, 0, 1, 1, 2, 2)]
        schedule = {"name": "damped" if damping else "capped_linear", "gamma": 0.97}
        assert rates(schedule, lr0, workers=n, steps_per_epoch=2) == pytest.approx(expected, rel=1e-12), n


def test_the_laws_have_a_cap_a_scale_of_their_own_and_workers_by_the_batch() -> None:
    for n in (1, 4, 64):
        law: dict[str, Any] = {"base_batch_size": 8, "max_lr": 0.4}
        expected = {"damped": min(n * 0.02 / (1 + n / 10), 0.4), "capped_linear": min(n * 0.02, 0.4)}
        for name, rate in expected.items():
            more = {"n0": 10.0} if name == "damped" else {}
            found = rates({"name": name, **law, **more}, 0.02, workers=3, batch_size=8 * n)
            assert found == pytest.approx([rate] * 12), (name, n)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_warm_up_precedes_every_schedule(name: str) -> None:
    """Its rates are those of the schedule without it, times the rising factor, where that does not decay."""
    options: dict[str, Any] = {"name": name}
    if "end" in SCHEDULES[name]:
        options["end"] = 1 - 1e-12
    plain = rates(options, 0.01, workers=20)
    warm = rates({**options, "warmup_epochs": 1.5}, 0.01, workers=20)
    assert warm == pytest.approx([rate * min(1, (t + 1) / 6) for t, rate in enumerate(plain)])


def test_polynomial_decay_after_a_warm_up() -> None:
    passed = rates({"name": "polynomial", "warmup_epochs": 1, "power": 2}, 8.0)
    assert passed[:4] == pytest.approx([2.0, 4.0, 6.0, 8.0])
    assert passed[4:] == pytest.approx([8.0 * (1 - t / 8) ** 2 for t in range(8)])
    assert polynomial(12, 12, power=2.0, end=0.1) == pytest.approx(0.1)
    for name in ("polynomial", "cosine", "step"):  # where the warm-up takes all of it, or more
        more = {"every_epochs": 9, "gamma": 0.5} if name == "step" else {}
        for epochs in (3, 4.5):
            warm = rates({"name": name, "warmup_epochs": epochs, **more}, 1.0)
            assert warm == pytest.approx([(t + 1) / (4 * epochs) for t in range(12)]), (name, epochs)


def test_cosine_is_torchs() -> None:
    expected = torchs(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=12)
    assert rates({"name": "cosine", "end": 0.1}, 0.5) == pytest.approx(expected)


def test_cycles_are_torchs_after_a_warm_up_in_the_first() -> None:
    expected = torchs(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=6)
    cycles = {"name": "cyclic", "cycle_epochs": 1.5, "end": 0.1}  # of 4 steps
    assert rates(cycles, 0.5) == pytest.approx(expected)
    warm = rates({**cycles, "warmup_epochs": 0.5}, 0.5)
    assert warm[:2] == [0.25, 0.5] and warm[6:] == pytest.approx(expected[6:])
    assert warm[2:6] == pytest.approx([0.5 * cosine(t, 4, end=0.1) for t in range(4)])


def test_steps_by_epochs_and_by_milestones() -> None:
    assert rates({"name": "step", "every_epochs": 1, "gamma": 0.5}, 1.0) == [1.0] * 4 + [0.5] * 4 + [0.25] * 4
    found = rates({"name": "step", "milestones": [0.5, 2], "gamma": 0.1}, 1.0)
    assert found == pytest.approx([1.0] * 2 + [0.1] * 6 + [0.01] * 4)


@given(st.integers(1, 200), st.floats(0, 1.2), st.floats(0, 0.99), st.floats(0.5, 4), st.integers(1, 30))
def test_factors_rise_to_one_and_then_never_rise(
    steps: int, share: float, end: float, power: float, per: int
) -> None:
    warm = round(share * steps)
    for factor in (
        [polynomial(t, steps, power=power, end=end, warmup_steps=warm) for t in range(steps)],
        [cosine(t, steps, end=end, warmup_steps=warm) for t in range(steps)],
        [step_decay(t, per, gamma=0.5, every_epochs=1e9, warmup_steps=warm) for t in range(steps)],
    ):
        up, down = factor[:warm], factor[max(0, warm - 1) :]
        assert up == sorted(up) and all(0 < f <= 1 for f in up)
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(down))
        assert all(end * min(1, 1 / max(1, warm)) - 1e-12 <= f <= 1 and math.isfinite(f) for f in factor)
    if warm < steps:  # the cosine after a warm-up is that of the steps that are left
        after = [cosine(t, steps, end=end, warmup_steps=warm) for t in range(warm, steps)]
        assert after == pytest.approx([cosine(t, steps - warm, end=end) for t in range(steps - warm)])


def test_a_rate_meant_for_a_batch_is_scaled_to_the_members() -> None:
    assert rates({"name": "constant", "base_batch_size": 256}, 0.1, batch_size=8192) == pytest.approx([3.2] * 12)
    assert rates("constant", 0.1, batch_size=8192) == [0.1] * 12
    # a hyperparameter takes an option's place
    assert rates("step", 1.0, params={"gamma": 0.5, "every_epochs": 1})[4] == 0.5
    with pytest.raises(SpecError, match=r"schedule\['warmup_epochs'\] must be a number"):
        rates("cosine", params={"warmup_epochs": "long"})


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_resume_has_the_same_rates(name: str) -> None:
    options = {"name": name, "warmup_epochs": 1}
    about = {"epochs": 4, "steps_per_epoch": 3, "workers": 3, "batch_size": 8}
    optimizer, scheduler = begin(options, 0.03, **about)
    whole = walk(optimizer, scheduler, 5)
    resumed, schedule = begin(options, 0.03, **about)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedule.load_state_dict(json.loads(json.dumps(to_builtin(scheduler.state_dict()))))
    assert whole + walk(resumed, schedule, 7) == rates(options, 0.03, **about)
