"""Learning-rate schedules: the published laws, warm-ups and decays, resumes."""

from __future__ import annotations

import copy
import itertools
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ensemble.spec.options import SCHEDULES
from ensemble.spec.validation import SpecError
from ensemble.train.checkpoint import to_builtin
from ensemble.train.lr_schedulers import cosine, make_schedule, polynomial, step_decay


class Frnn:
    """FRNN's learning rate as its `MPIModel` keeps it; `damping` is what the paper divides by."""

    max_lr = 0.1

    def __init__(self, lr: float, num_replicas: int, damping: bool) -> None:
        self.lr = min(lr, self.max_lr) / (1.0 + num_replicas / 100.0 if damping else 1)
        self.num_replicas = num_replicas

    def get_effective_lr(self) -> float:
        return min(self.lr * self.num_replicas, self.max_lr)


def rates(schedule: Any, lr: float = 0.1, *, epochs: int = 3, steps_per_epoch: int = 4, **options: Any) -> Any:
    """The learning rate of each step."""
    steps = epochs * steps_per_epoch
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    params = options.pop("params", {})
    about = {"steps": steps, "steps_per_epoch": steps_per_epoch, "workers": 1, "batch_size": 32, **options}
    return walk(optimizer, make_schedule(schedule, optimizer, params, **about), steps)


def walk(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    passed = []
    for _ in range(steps):
        passed.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return passed


@pytest.mark.parametrize("damping", [True, False], ids=["the damped law", "linear scaling up to a cap"])
@pytest.mark.parametrize("lr0", [2e-5, 0.0025, 0.04, 0.1, 0.7])
def test_the_rates_of_1_to_256_workers_are_those_of_frnn(lr0: float, damping: bool) -> None:
    """The rate decays from the damped one, or from the configured one, as FRNN's training loop does it."""
    for n in (1, 2, 3, 7, 10, 39, 40, 41, 99, 100, 101, 256):
        model = Frnn(lr0, n, damping=damping)
        start, expected = model.lr if damping else lr0, []
        for epoch in range(3):
            model.lr = start * 0.97**epoch
            expected += [model.get_effective_lr()] * 2
        schedule = {"name": "damped" if damping else "capped_linear", "gamma": 0.97}
        assert rates(schedule, lr0, workers=n, steps_per_epoch=2) == pytest.approx(expected, rel=1e-12), n


def test_the_damped_law_in_figures() -> None:
    def first(n: int) -> float:
        return rates("damped", 0.001, workers=n)[0]

    assert first(1) == pytest.approx(0.001 / 1.01)
    assert first(100) == pytest.approx(0.05)
    assert first(256) == pytest.approx(0.256 / 3.56)
    assert first(10**6) == pytest.approx(0.1, rel=1e-3), "the limit of n λ / (1 + n/100) is 100 λ"


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
    found = rates({"name": "polynomial", "warmup_epochs": 1, "power": 2}, 8.0)
    assert found[:4] == pytest.approx([2.0, 4.0, 6.0, 8.0])
    assert found[4:] == pytest.approx([8.0 * (1 - t / 8) ** 2 for t in range(8)])
    assert polynomial(12, 12, power=2.0, end=0.1) == pytest.approx(0.1)


def test_cosine_is_torchs() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    expected = walk(optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12, eta_min=0.05), 12)
    assert rates({"name": "cosine", "end": 0.1}, 0.5) == pytest.approx(expected)


def test_cycles_are_torchs_after_a_warm_up_in_the_first() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=6, eta_min=0.05)
    expected = walk(optimizer, theirs, 12)
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


def test_a_rate_meant_for_a_batch_is_scaled_to_the_members() -> None:
    assert rates({"name": "constant", "base_batch_size": 256}, 0.1, batch_size=8192) == pytest.approx([3.2] * 12)
    assert rates("constant", 0.1, batch_size=8192) == [0.1] * 12


def test_hyperparameters_take_an_options_place() -> None:
    assert rates("step", 1.0, params={"gamma": 0.5, "every_epochs": 1})[4] == 0.5
    with pytest.raises(SpecError, match=r"schedule\['warmup_epochs'\] must be a number"):
        rates("cosine", params={"warmup_epochs": "long"})


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_resume_has_the_same_rates(name: str) -> None:
    options = {"name": name, "warmup_epochs": 1}

    def begin() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.03)
        about = {"steps": 12, "steps_per_epoch": 3, "workers": 3, "batch_size": 8}
        return optimizer, make_schedule(options, optimizer, {}, **about)

    optimizer, scheduler = begin()
    whole = walk(optimizer, scheduler, 5)
    resumed, schedule = begin()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedule.load_state_dict(json.loads(json.dumps(to_builtin(scheduler.state_dict()))))
    whole += walk(resumed, schedule, 7)
    assert whole == rates(options, 0.03, epochs=4, steps_per_epoch=3, workers=3, batch_size=8)
