"""The main figures of a run and of its combined model, in words: tiles with a label, a figure and a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.events import Combined
from ensemble.reporting import text
from ensemble.reporting.dashboard.plots import name_models, plot_quality
from ensemble.reporting.model_figures import Ranking, compare
from ensemble.spec.task import CLASSIFICATION, Task

NO_COMBINATION = "not before members have finished"
NO_POWER = "no node has a power source that could be read"
MOST_FIGURES = 5
MODELS = "finished and pruned, from the first start to the last end"


@dataclass(frozen=True)
class Tile:
    """A figure of a run.

    Attributes:
        key: names it where a view shows some of the tiles only.
        tone: of the note: "good", "bad" or "".
        link: the view, and its options, to which the note leads.
        about: a second note.
    """

    key: str
    label: str
    figure: str
    note: str = ""
    tone: str = ""
    link: tuple[str, Mapping[str, str]] | None = None
    about: str = ""


def describe_tiles(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tiles of a run as JSON.

    Args:
        run: the section `run` of the document `state`.
    """
    return [vars(tile) for tile in (*_list_results(run), *_list_use(run))]


def _list_results(run: Mapping[str, Any]) -> Iterator[Tile]:
    counts, best, so_far = run["counts"], run["best"], "" if run["ended"] is not None else " so far"
    failed, of = counts.get("failed", 0), max(sum(counts.values()), run["declared"] or 0)
    members = f"{text.number(counts.get('finished', 0))} of {text.number(of)}"
    to_failed = ("members", {"filter": "state:failed"})
    if failed:
        yield Tile("members", "Members finished", members, f"{failed} failed", "bad", to_failed)
    else:
        yield Tile("members", "Members finished", members, "none failed")
    label = f"Best {run['objective']}{so_far}, on validation"
    if best is None:
        yield Tile("best", label, text.ABSENT, "no epoch has ended yet")
    else:
        link = ("member", {"member": best["member"]})
        yield Tile("best", label, text.score(best["value"]), best["member"], link=link)
    if run["combined"] is None:
        yield explain_no_combination(NO_COMBINATION)
    else:
        yield describe_combined(Combined(**run["combined"]), (run["objective"], run["direction"]))


def explain_no_combination(why: str) -> Tile:
    """Returns the tile of a run without a combined model."""
    return Tile("combined", "Combined", text.ABSENT, why)


def describe_combined(combined: Combined, ranking: Ranking, *, so_far: bool = False) -> Tile:
    """Returns the tile of the combined model: its objective, else the figure that says most.

    Args:
        so_far: whether it is of the members that have finished so far.
    """
    shown = compare(combined, ranking)
    if not shown:
        why = "no figure of it is known" if combined.metrics else combined.reason or NO_COMBINATION
        return explain_no_combination(why)
    each = next((each for each in shown if each.figure.name == ranking[0]), shown[0])
    validation = "held-out folds" if combined.out_of_fold else "validation"
    split = validation if combined.split == "valid" else combined.split
    label = f"Combined {each.figure.label}{' so far' if so_far else ''}{f', on {split}' if split else ''}"
    used = [member for member, weight in combined.weights.items() if weight > 0]
    if len(used) == 1:
        note = f"{used[0]} alone: no other member is part of it"
        return Tile("combined", label, text.score(each.value), note)
    there = "" if each.best is None else f", which has {text.score(each.best)} there"
    return Tile("combined", label, text.score(each.value), each.describe_difference() + there, each.tone)


def _list_use(run: Mapping[str, Any]) -> Iterator[Tile]:
    totals, is_open, wall_s = run["totals"], run["ended"] is None, run["wall_s"]
    reuse, models = totals["reuse"], totals.get("models")
    note = f"{text.number(totals['consumed'])} consumed of {text.number(totals['prepared'])} prepared"
    factor = text.ABSENT if reuse is None else f"{reuse:.2f}×"
    yield Tile("reuse", "Reuse of prepared samples", factor, note)
    cores = f"{text.number(totals['cpu_s'] / wall_s)} cores on average" if is_open and wall_s else "in all"
    yield Tile("cpu", "CPU time (measured)", text.cpu(totals["cpu_s"]), cores)
    yield Tile("energy", f"Energy ({totals['energy_origin']})", text.joules(totals["energy_j"]), _spent(totals))
    if is_open:
        watts = text.watts(totals["watts"])
        yield Tile("power", f"Power now ({totals['watts_origin'] or 'unavailable'})", watts, "all nodes")
        note = "all running members, while training: without validation"
        yield Tile("rate", "Samples a second", text.number(totals["samples_per_s"]), note)
    else:
        yield Tile("wall", "Wall time", text.duration(wall_s), "in all")
    yield Tile("models", "Models a minute", text.number(totals["models_per_minute"]), models or MODELS)


def _spent(totals: Mapping[str, Any]) -> str:
    if totals["energy_j"] is None:
        return NO_POWER
    whole, mean_w = totals.get("node_energy_j"), totals.get("mean_w")
    parts = [] if whole is None else [f"of {text.joules(whole)} for the whole of the nodes"]
    return ", ".join(parts + ([f"{text.watts(mean_w)} on average"] if mean_w else []))


# -- the combined model -------------------------------------------------------------------------------------------


def describe_quality(
    quality: Mapping[str, Any], ranking: Ranking, task: Task = CLASSIFICATION, *, has_ended: bool
) -> dict[str, Any]:
    """Returns the fields of the document `quality` that are in words.

    Args:
        quality: its other fields; `combination` also where nothing could be compared.

    Returns:
        - `title`, `origin`: what the combined model is, and what the figures are of, in sentences.
        - `tiles`: one for each figure of the combined model, and one for how it was made.
        - `tile`: of what the members that have finished so far would be, for the tiles of the run.
        - `names`: what the models are called; `plots`: those of the combined model, before those of its task.
    """
    combination = quality["combination"] or {}
    so_far, known = bool(combination.get("so_far")), quality["combined"] is not None
    names = ("members", "weights", "calibration", "temperature")
    model = Combined(
        method=combination.get("method"),
        split=quality["split"],
        task=task.as_record(),
        metrics={"ensemble": quality["combined"] or {}, "best": quality["members"].get(quality["best"])},
        intervals=quality["intervals"],
        noise=quality["noise"],
        **{"members": []} | {name: combination[name] for name in names if combination.get(name)},
    )
    why = quality["missing"] or NO_COMBINATION
    return {
        "title": "What the combined model would be so far" if so_far else "The combined model",
        "origin": _describe_origin(quality, has_ended=has_ended),
        "tiles": [vars(tile) for tile in _list_model_tiles(model, ranking)] if quality["missing"] is None else [],
        "tile": vars(describe_combined(model, ranking, so_far=True) if known else explain_no_combination(why)),
        "names": name_models(quality),
        "plots": [*plot_quality(quality), *quality["plots"]],
    }


def list_combined_figures(run: Mapping[str, Any]) -> list[Tile]:
    """Returns tiles of up to `MOST_FIGURES` figures of the combined model of a run, for a view that has no other.

    Args:
        run: the section `run` of the document `state`.
    """
    combined = None if run["combined"] is None else Combined(**run["combined"])
    return [
        Tile("combined", f"Combined {each.figure.heading}", text.score(each.value), each.describe_difference())
        for each in compare(combined, (run["objective"], run["direction"]))[:MOST_FIGURES]
    ]


def _list_model_tiles(combined: Combined, ranking: Ranking) -> Iterator[Tile]:
    for each in compare(combined, ranking):
        interval = each.interval and f"95 % interval {text.interval(each.interval)}"
        about = "; ".join(filter(None, (each.figure.direction, interval)))
        label, note = each.figure.label, each.describe_difference()
        label = label[:1].upper() + label[1:]
        yield Tile(each.figure.name, label, text.score(each.value), note, each.tone, about=about)
    if combined.members:
        note = f"{text.count(len(combined.members), 'member')} with a weight; {_describe_calibration(combined)}"
        yield Tile("method", "Method", combined.method or "", note)


def _describe_calibration(combined: Combined) -> str:
    given = combined.calibration or {"method": "temperature", "value": combined.temperature, "reason": None}
    method, factor = given.get("method"), given.get("value")
    if method is None or factor is None or factor == 1:
        return f"not calibrated: {given['reason']}" if given.get("reason") else "not calibrated"
    if method == "variance_scale":
        return f"variances times {factor:.3g}: it was {'too sure' if factor > 1 else 'not sure enough'}"
    how = "softened, it was too sure" if factor > 1 else "sharpened, it was not sure enough"
    return f"temperature {factor:.3g}: {how}"


def _describe_origin(quality: Mapping[str, Any], *, has_ended: bool) -> str:
    """Returns what the figures of the document `quality` are of, in sentences."""
    combination, words = quality["combination"] or {}, []
    if combination.get("so_far"):
        words.append(
            f"Not the run's result: {text.count(len(quality['members']), 'finished member')} combined by greedy "
            "selection."
        )
        words.append(
            "The run ended without combining its members."
            if has_ended
            else "The run combines its members at its end, as it was declared."
        )
    elif combination.get("note"):
        words.append(_sentence(combination["note"]))
    if combination.get("reason"):
        words.append(f"{'Note' if combination.get('members') else 'None'}: {_sentence(combination['reason'])}")
    if quality["rows"]:
        rows = text.number(quality["rows"])
        words.append(f"All figures are of the same {rows} samples of the {quality['split']} split.")
        if quality["split"] == "valid":
            words.append("Members were selected on these samples, so the combined figures are optimistic.")
    if left := quality["left_out"]:
        many = text.count(left, "finished member")
        words.append(f"{many} not compared: without usable predictions, or too many to hold at once.")
    return " ".join(words)


def _sentence(given: str) -> str:
    """A text with an end."""
    return given if given.rstrip().endswith((".", "!", "?")) else f"{given.rstrip()}."
