"""The sentence that says whether combining the members has helped."""

from __future__ import annotations

from typing import Any

import pytest

from ensemble.events import Combined
from ensemble.reporting.sections.quality import describe_benefit

MEMBERS = [f"member-{i}" for i in range(6)]


def combined(
    value: float, best: float, difference: tuple[float, float], used: int = 3, name: str = "nll", **more: Any
) -> Combined:
    noise = [name] if difference[0] <= 0 <= difference[1] else []
    return Combined(
        method="greedy",
        members=MEMBERS[:used],
        weights={member: float(i < used) for i, member in enumerate(MEMBERS)},
        metrics={"ensemble": {name: value}, "best": {name: best}},
        intervals={"difference": {name: list(difference)}},
        noise=noise,
        **{
            "task": {"kind": "classification"},
            "uncertainty": {"disagreement": 0.021},
            "split": "test",
            "candidates": MEMBERS,
            **more,
        },
    )


BETTER = "3 of 6 members were chosen: NLL 0.0410 better (95 %: 0.0200 … 0.0600) than the best member"
ALIKE = "two members name different classes for 2.1 % of the samples: vary architecture or data"


@pytest.mark.parametrize(
    ("found", "sentence", "tone"),
    [
        (combined(0.3, 0.341, (-0.06, -0.02)), f"{BETTER}; beyond noise", "good"),
        (
            combined(0.3, 0.341, (-0.06, -0.02), best_calibrated={"nll": 0.31}),
            f"{BETTER}, 0.0100 better than it calibrated alike; beyond noise",
            "good",
        ),
        (
            combined(0.3, 0.341, (-0.06, -0.02), best_calibrated={"nll": 0.29}),
            f"{BETTER}, 0.0100 worse than it calibrated alike: the gain is that of calibration; {ALIKE}",
            "",
        ),
        (
            combined(0.3, 0.341, (-0.06, -0.02), split="valid"),
            f"{BETTER}; these are the samples it was chosen by: a test= would tell",
            "",
        ),
        (combined(0.3, 0.341, (-0.06, -0.02), split="valid", out_of_fold=True), f"{BETTER}; beyond noise", "good"),
        (
            combined(0.35, 0.341, (0.004, 0.02)),
            "3 of 6 members were chosen: NLL 0.0090 worse (95 %: 0.0040 … 0.0200) than the best member; beyond "
            "noise",
            "bad",
        ),
        (
            combined(0.335, 0.341, (-0.02, 0.01)),
            "3 of 6 members were chosen: NLL 0.0060 better (95 %: −0.0100 … 0.0200) than the best member; within "
            f"noise: no gain is shown; {ALIKE}",
            "",
        ),
        (combined(0.341, 0.341, (0, 0), used=1), "1 of 6 members was chosen: no gain from combining", ""),
        (
            combined(2.0, 2.5, (-0.7, -0.2), 6, "rmse", task={"kind": "regression"}, uncertainty=None),
            "all 6 members were combined: RMSE 0.5000 better (95 %: 0.2000 … 0.7000) than the best member; beyond "
            "noise",
            "good",
        ),
        (
            combined(0.9, 0.8, (0.05, 0.15), name="mine", task={"kind": "free"}, uncertainty=None),
            "3 of 6 members were chosen: mine 0.1000 better (95 %: 0.0500 … 0.1500) than the best member; beyond "
            "noise",
            "good",
        ),
        (combined(0.3, 0.341, (-0.06, -0.02), used=1, candidates=["member-0"]), "", ""),
        (Combined(method=None, members=[], split=None, reason="there is no validation split"), "", ""),
        (None, "", ""),
    ],
)
def test_a_sentence_says_whether_combining_has_helped(found: Combined | None, sentence: str, tone: str) -> None:
    said, how = describe_benefit(found, ("mine", "max"))
    assert (said.replace("-", "−"), how) == (sentence.replace("-", "−"), tone)
