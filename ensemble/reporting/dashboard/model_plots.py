"""Figures of the document `quality` that every task has: calibration, and what each added member gains.

They have the form of `task_plots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ensemble.reporting import text
from ensemble.reporting.ranking import finite_or_none

Document = dict[str, Any]

COMPARED = 2  # figures of which gains are shown
BINS = 15  # of the calibration
#: Of each task with probabilities: what is predicted, what is true, how to read it, what its samples are.
_RELIABILITY = {
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
_NO_CURVES = "There are no probabilities to compare with the true classes."
_NO_GAIN = "It needs saved validation predictions of finished members, and a figure to choose them by."


def plot_models(quality: Mapping[str, Any]) -> list[Document]:
    """Returns the figures; one that cannot be had says why in `missing`.

    Args:
        quality: the document.
    """
    if quality["missing"] is not None:
        return []
    return [*_plot_calibration(quality), *_plot_gains(quality)]


def _name_models(quality: Mapping[str, Any]) -> dict[str, str]:
    so_far = (quality["combination"] or {}).get("so_far")
    return {
        "best": f"best member ({text.visible(str(quality['best']))})",
        "combined": "combined so far" if so_far else "combined",
    }


def _plot_calibration(quality: Mapping[str, Any]) -> Iterator[Document]:
    if quality["task"] not in _RELIABILITY:
        return
    confidence, accuracy, reading = _RELIABILITY[quality["task"]]
    curves = {of: curve for of, curve in quality["curves"].items() if curve}
    names = _name_models(quality)
    figures = {"best": quality["members"].get(quality["best"]) or {}, "combined": quality["combined"] or {}}
    points = [point for curve in curves.values() for point in curve]
    low = max(0.0, min([0.5, *(min(x, y) - 0.05 for x, y, _ in points)]))
    most = max([sum(many for *_, many in curve) for curve in curves.values()], default=1) or 1
    dots, bars = list[Document](), list[Document]()
    for of, curve in sorted(curves.items()):
        error = finite_or_none(figures[of].get("ece"))
        label = names[of] + ("" if error is None else f", ECE {text.score(error)}")
        marks = [
            [
                x,
                y,
                {
                    "size": 2.5 + 8 * (many / most) ** 0.5,
                    "text": f"{names[of]}\n{confidence} {x:.3f}\n{accuracy} {y:.3f}\n{text.count(many, 'sample')}",
                },
            ]
            for x, y, many in curve
        ]
        dots.append({"of": of, "name": None, "label": label, "shape": "dot", "line": True, "points": marks})
        found = [
            [_bin(x), many, {"text": f"{confidence} from {_bin(x)}\n{text.count(many, 'sample')}"}]
            for x, _, many in curve
        ]
        bars.append({"of": of, "name": None, "label": names[of], "shape": "bar", "line": False, "points": found})
    right = {
        "of": "reference",
        "name": None,
        "label": "calibrated",
        "shape": None,
        "line": True,
        "points": [[low, low], [1.0, 1.0]],
    }
    missing = None if curves else _NO_CURVES
    yield {
        "id": "calibration",
        "title": "Calibration",
        "reading": reading,
        "missing": missing,
        "table": {
            "head": ["model", confidence, accuracy, "samples"],
            "rows": [[names[of], *point] for of, curve in sorted(curves.items()) for point in curve],
        },
        "x": {"title": confidence, "range": [low, 1.0], "kind": "linear"},
        "y": {"title": accuracy, "range": [low, 1.0], "kind": "linear"},
        "series": [right, *dots],
    }
    yield {
        "id": "bins",
        "title": f"Samples by {confidence}",
        "reading": "How many samples each bin of the calibration holds: where there are few, its dots say little.",
        "missing": missing,
        "x": {"title": f"{confidence}, from … (bins of 1/{BINS})", "range": None, "kind": "category"},
        "y": {"title": "samples", "range": None, "kind": "linear"},
        "series": bars,
    }


def _bin(confidence: float) -> str:
    """Where a bin begins."""
    return f"{max(0, -(-round(confidence * BINS, 9) // 1) - 1) / BINS:.2f}"


def _plot_gains(quality: Mapping[str, Any]) -> Iterator[Document]:
    if quality["task"] == "free":
        return
    figures: Sequence[Mapping[str, Any]] = quality["figures"]
    chosen = next((each for each in figures if each["name"] == quality["criterion"]), None)
    for figure in figures[:COMPARED]:
        name, label = figure["name"], text.visible(str(figure["label"]))
        points = [each for each in quality["gain"] or () if finite_or_none(each.get(name)) is not None]
        verb = "raises" if chosen and chosen["better"] == "higher" else "lowers"
        plot = {
            "id": f"gain {name}",
            "title": f"Gain of each added member, {text.visible(str(figure['title']))}",
            "reading": f"The plain average of the best members for 1 member to {len(points)}, each added where it "
            f"{verb} the {text.visible(str(chosen['label'] if chosen else quality['criterion']))} on the "
            f"validation split most; measured on the {quality['split']} split.",
            "missing": None if points else _NO_GAIN,
            "x": {"title": "members", "range": None, "kind": "linear", "whole": True},
            "y": {"title": label, "range": None, "kind": "linear"},
        }
        marks = [[each["members"], each[name], _describe_added(each, label, each[name])] for each in points]
        series: list[Document] = [
            {
                "of": "best",
                "name": None,
                "label": "average of the members so far",
                "shape": "dot",
                "line": True,
                "points": marks,
            }
        ]
        level = finite_or_none((quality["combined"] or {}).get(name))
        if level is not None and points:
            method = (quality["combination"] or {}).get("method") or "weighted"
            ends = [[1, level], [points[-1]["members"], level]]
            series.append(
                {
                    "of": "combined",
                    "name": None,
                    "label": f"combined ({method})",
                    "shape": None,
                    "line": True,
                    "dash": [6, 4],
                    "still": True,
                    "points": ends,
                }
            )
        yield plot | {"series": series}


def _describe_added(each: Mapping[str, Any], label: str, value: float) -> Document:
    words = [text.count(each["members"], "member"), f"added {text.visible(each['added'])}"]
    words.append(f"{label} {text.score(value)}")
    return {"id": each["added"], "text": "\n".join(words)}
