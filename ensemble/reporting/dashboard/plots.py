"""Figures that the page draws as they stand, and those of the combined model: calibration, gain of each member.

A figure is a JSON document:

- `id`, `title`, `reading`: one line on how to read it. `absent`: why there is none, else None.
- `x`, `y`: `title`, and `range` [low, high] where it is given, `kind`: "linear" or "category".
- `series`: `of` ("best", "combined", "reference", or the place of a run), `name` of a line among several of one
  model, else None, `label` in the legend (None: the model's name), `shape` ("dot", "bar" or None), `line` (whether
  the points are joined), `dashed`, `points` [[x, y], ...]; a third element of a point may have `text` (of its
  tip), `size` (px) and `member`, which it selects.
- `said`: the figure in words; None: the names of its models. `table`: `head` and `rows`; None: its points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ensemble.reporting import text
from ensemble.reporting.ranking import finite_or_none

Document = dict[str, Any]

BINS = 15  # of `ensemble.combine.metrics`
#: Figures of which the gain is shown.
MOST_GAINS = 2
NO_PROBABILITIES = "There are no probabilities to compare with the true classes."
NO_GAIN = "It needs saved validation predictions of finished members, and a figure to choose them by."
#: Of the tasks that have a reliability curve: its axes, and how to read it.
RELIABILITY = {
    "classification": (
        "confidence",
        "accuracy",
        "How often a model is right when it is so sure. On the diagonal it is calibrated, below it too sure; "
        "larger dots hold more samples.",
    ),
    "multilabel": (
        "predicted probability",
        "share of labels that are there",
        "How often a label is there when a model gives it such a probability. On the diagonal it is calibrated; "
        "larger dots hold more labels.",
    ),
}


def draw_series(
    of: str | int,
    points: Iterable[Sequence[Any]],
    *,
    shape: str | None = "dot",
    line: bool = False,
    name: str | None = None,
    label: str | None = None,
    dashed: bool = False,
) -> Document:
    """Returns a series; numbers of its points have six digits."""
    rounded = [[*(shorten(value) for value in point[:2]), *point[2:]] for point in points]
    look = {"shape": shape, "line": line, "dashed": dashed}
    return {"of": of, "name": name, "label": label, **look, "points": rounded}


def draw_reference(points: Iterable[Sequence[float]]) -> Document:
    """Returns the line on which a right model would lie."""
    return draw_series("reference", points, shape=None, line=True)


def draw_axis(title: str, limits: Sequence[float] | None = None, kind: str = "linear") -> Document:
    """Returns an axis."""
    return {"title": title, "range": limits, "kind": kind}


def draw_plot(id: str, title: str, reading: str, x: Document, y: Document, series: list[Document]) -> Document:
    """Returns a figure."""
    words = {"id": id, "title": title, "reading": reading, "absent": None, "said": None, "table": None}
    return {**words, "x": x, "y": y, "series": series}


def shorten(value: Any) -> float | int | str:
    """Returns a value as it stands in a figure: numbers have six digits."""
    return value if isinstance(value, (str, int)) else float(f"{float(value):.6g}")


def name_models(quality: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the models of the document `quality` are called, by "best" and "combined"."""
    so_far = (quality["combination"] or {}).get("so_far")
    return {"best": f"best member ({quality['best']})", "combined": "combined so far" if so_far else "combined"}


def plot_quality(quality: Mapping[str, Any]) -> list[Document]:
    """Returns the figures that follow from the other fields of a document `quality`; none without models."""
    if quality["missing"] is not None:
        return []
    return [*_plot_reliability(quality), *_plot_gains(quality)]


def _plot_reliability(quality: Mapping[str, Any]) -> list[Document]:
    """The reliability curves of the models, and how many samples each of their bins holds."""
    if quality["task"] not in RELIABILITY:
        return []
    x, y, reading = RELIABILITY[quality["task"]]
    names = name_models(quality)
    curves = {of: quality["curves"][of] for of in names if quality["curves"].get(of)}
    rows = max((sum(many for _, _, many in curve) for curve in curves.values()), default=1)
    low = min((min(0.5, *point[:2]) - 0.05 for curve in curves.values() for point in curve), default=0.0)
    low = max(0.0, min(0.5, low))
    measured = {"best": quality["members"].get(quality["best"]), "combined": quality["combined"]}
    dots, bars, table = [], [], []
    for of, curve in curves.items():
        ece = (measured[of] or {}).get("ece")
        points = []
        for confidence, right, many in curve:
            figures = f"{x} {confidence:.3f}\n{y} {right:.3f}\n{text.count(many, 'sample')}"
            size = round(2.5 + 8 * math.sqrt(many / (rows or 1)), 2)
            points.append((confidence, right, {"text": f"{names[of]}\n{figures}", "size": size}))
        label = names[of] if ece is None else f"{names[of]}, ECE {text.score(ece)}"
        dots.append(draw_series(of, points, line=True, label=label))
        bins = ((f"{max(0, math.ceil(confidence * BINS) - 1) / BINS:.2f}", many) for confidence, _, many in curve)
        bars.append(draw_series(of, bins, shape="bar"))
        table += [[names[of], f"{at:.3f}", f"{right:.3f}", text.number(many)] for at, right, many in curve]
    diagonal = draw_reference([(low, low), (1.0, 1.0)])
    across, up = draw_axis(x, [low, 1.0]), draw_axis(y, [low, 1.0])
    calibration = draw_plot("calibration", "Calibration", reading, across, up, [diagonal, *dots])
    counts = draw_plot(
        "bins",
        f"Samples by {x}",
        "How many samples each bin of the calibration holds: where there are few, its dots say little.",
        draw_axis(f"{x}, from … (bins of 1/{BINS})", kind="category"),
        draw_axis("samples"),
        bars,
    )
    absent = None if curves else NO_PROBABILITIES
    said = "; ".join(each["label"] for each in dots)
    return [
        {
            **calibration,
            "said": said,
            "table": {"head": ["model", x, y, "samples"], "rows": table},
            "absent": absent,
        },
        {**counts, "absent": absent},
    ]


def _plot_gains(quality: Mapping[str, Any]) -> list[Document]:
    """What each added member gains, by the first figures of the task."""
    figures = [] if quality["task"] == "free" else quality["figures"]
    chosen: Document = next((each for each in figures if each["name"] == quality["criterion"]), {})
    plots = []
    for figure in figures[:MOST_GAINS]:
        name, label = figure["name"], figure["label"]
        curve = [each for each in quality["gain"] or [] if finite_or_none(each.get(name)) is not None]
        points = []
        for each in curve:
            what = (
                f"{text.count(each['members'], 'member')}\nadded {each['added']}\n{label} {text.score(each[name])}"
            )
            points.append((each["members"], each[name], {"text": what, "member": each["added"]}))
        series = [draw_series("best", points, line=True, label="average of the members so far")]
        if curve and (combined := finite_or_none((quality["combined"] or {}).get(name))) is not None:
            method = (quality["combination"] or {}).get("method") or "weighted"
            ends = [(1, combined), (curve[-1]["members"], combined)]
            series.append(
                draw_series("combined", ends, shape=None, line=True, dashed=True, label=f"combined ({method})")
            )
        verb = "raises" if chosen.get("better") == "higher" else "lowers"
        reading = (
            f"The plain average of the best members for 1 member to {len(curve)}, each added where it {verb} the "
            f"{chosen.get('label')} on the validation split most; measured on the {quality['split']} split."
        )
        axes = draw_axis("members"), draw_axis(label)
        plot = draw_plot(f"gain_{name}", f"Gain of each added member, {figure['title']}", reading, *axes, series)
        ends_said = [f"{text.score(each[name])} with {text.count(each['members'], 'member')}" for each in curve]
        plots.append(
            {**plot, "said": ", ".join(ends_said[:1] + ends_said[-1:]), "absent": None if curve else NO_GAIN}
        )
    return plots
