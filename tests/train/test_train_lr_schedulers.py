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
    found = rates({"name": "polynomial", "warmup_epochs": 1, "power": 2}, 8.0)
    assert found[:4] == pytest.approx([2.0, 4.0, 6.0, 8.0])
    assert found[4:] == pytest.approx([8.0 * (1 - t / 8) ** 2 for t in range(8)])
    assert polynomial(12, 12, power=2.0, end=0.1) == pytest.approx(0.1)


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
