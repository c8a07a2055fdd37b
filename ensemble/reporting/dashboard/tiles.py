"""The main figures of a run and of its combined model, in words: tiles with a label, a figure and a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ensemble.events import Combined
from ensemble.meter.origin import weakest
from ensemble.reporting import text
from ensemble.reporting.model_figures import JUDGED_BY, Ranking, compare, read_task
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections.feeders import count_hits

NO_COMBINATION = "the run combines its members at its end"
NO_POWER = "no node has a power source that could be read"


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


def list_tiles(run: RunProjection) -> Iterator[Tile]:
    """Yields the tiles of a run: its results, then what it has used."""
    state, best, so_far = run.state, run.best, "" if run.state.ended is not None else " so far"
    failed = run.counts["failed"]
    finished = f"{text.number(run.counts['finished'])} of {text.number(run.counts.total())}"
    if failed:
        link = ("members", {"filter": "state:failed"})
        yield Tile("members", "Members finished", finished, f"{failed} failed", "bad", link)
    else:
        yield Tile("members", "Members finished", finished, "none failed")
    label = f"Best member{so_far}, by {state.objective} on validation"
    if state.is_cross_validated:
        pass  # members are measured on different folds
    elif best is None:
        yield Tile("best", label, text.ABSENT, "no epoch has ended yet")
    else:
        yield Tile("best", label, text.score(run.best_value), best.id, link=("member", {"member": best.id}))
    yield _describe_combined(state.combined, (state.objective, state.direction))
    yield from _list_use(run)


def _describe_combined(combined: Combined | None, ranking: Ranking) -> Tile:
    """The tile of the combined model: its objective, else the figure that says most."""
    shown = compare(combined, ranking)
    if combined is None or not shown:
        why = NO_COMBINATION if combined is None else "it has no figures"
        reason = combined.reason if combined is not None and not combined.metrics else None
        return Tile("combined", "Combined", text.ABSENT, reason or why)
    by_name = {comparison.figure.name: comparison for comparison in shown}
    chosen = by_name.get(ranking[0], shown[0])
    validation = "held-out folds" if combined.out_of_fold else "validation"
    split = validation if combined.split == "valid" else combined.split
    label = f"Combined {chosen.figure.label}{f', on {split}' if split else ''}"
    used = [member for member, weight in combined.weights.items() if weight > 0]
    if len(used) == 1:
        note = f"it is {used[0]} alone"
        return Tile("combined", label, text.score(chosen.value), note)
    judged = by_name.get(JUDGED_BY.get(read_task(combined).kind, ""), chosen)
    about = f"{judged.figure.label} {text.score(judged.value)}, {judged.describe_difference()}"
    about, note = "" if judged is chosen or judged.best is None else about, chosen.describe_difference()
    return Tile("combined", label, text.score(chosen.value), note, chosen.tone, about=about)


def _list_use(run: RunProjection) -> Iterator[Tile]:
    state, used, reuse = run.state, run.used, run.ledger.reuse
    factor = text.ABSENT if reuse.factor is None else f"{reuse.factor:.2f}×"
    hits = count_hits(state.feeders.values())
    note = f"{text.number(reuse.consumed)} used of {text.number(reuse.prepared - hits)} prepared"
    note += f" and {text.number(hits)} read from the cache" if hits else ""
    if state.has_data:
        yield Tile("reuse", "Reuse of prepared samples", factor, note)
    is_open, wall_s = state.ended is None, state.wall_s
    cores = f"{text.number(used.cpu_s / wall_s)} cores on average" if is_open and wall_s else "all processes"
    yield Tile("cpu", "CPU time (measured)", text.cpu(used.cpu_s), cores)
    yield Tile("energy", f"Energy ({used.origin})", text.joules(used.energy_j), _describe_energy(run))
    if is_open:
        yield _describe_power(run)
    if is_open and state.has_data:
        note = "all running members, without validation"
        yield Tile("rate", "Samples a second", text.number(run.samples_per_s if run.is_driven else None), note)
    else:
        yield Tile("wall", "Wall time", text.duration(wall_s), "from start to end")


def _describe_power(run: RunProjection) -> Tile:
    nodes = [node for node in run.state.nodes.values() if node.watts is not None and run.is_driven]
    origins = {node.node: node.origin for node in run.ledger.nodes}
    origin = weakest(origins.get(node.name, "unavailable") for node in nodes) if nodes else "unavailable"
    watts = text.watts(sum(node.watts or 0.0 for node in nodes) if nodes else None)
    return Tile("power", f"Power now ({origin})", watts, "all nodes")


def _describe_energy(run: RunProjection) -> str:
    if run.used.energy_j is None:
        return NO_POWER
    whole_j, mean_w = run.ledger.total.energy_j, run.used.mean_w
    parts = [] if whole_j is None else [f"of {text.joules(whole_j)} for all nodes, other programs included"]
    return ", ".join(parts + ([f"{text.watts(mean_w)} on average"] if mean_w else []))


# -- the combined model -------------------------------------------------------------------------------------------


def describe_model(combined: Combined, ranking: Ranking) -> Iterator[Tile]:
    """Yields a tile for each figure of the combined model, and one for how it was made."""
    for comparison in compare(combined, ranking):
        interval = comparison.interval and f"95 % interval {text.interval(comparison.interval)}"
        about = "; ".join(filter(None, (comparison.figure.direction, interval)))
        label, note = comparison.figure.label, comparison.describe_difference()
        label = label[:1].upper() + label[1:]
        yield Tile(comparison.figure.name, label, text.score(comparison.value), note, comparison.tone, about=about)
    if combined.members:
        note = f"{text.count(len(combined.members), 'member')} with a weight; {_describe_calibration(combined)}"
        yield Tile("method", "Method", combined.method or "", note)


def _describe_calibration(combined: Combined) -> str:
    calibration = combined.calibration or {"method": "temperature", "value": combined.temperature, "reason": None}
    method, factor = calibration.get("method"), calibration.get("value")
    if method is None or factor is None or factor == 1:
        return f"not calibrated: {calibration['reason']}" if calibration.get("reason") else "not calibrated"
    if method not in ("temperature", "variance_scale"):
        return f"calibrated by {method}"
    if method == "variance_scale":
        return f"variances times {factor:.3g}: it was {'too sure' if factor > 1 else 'not sure enough'}"
    how = "softened, it was too sure" if factor > 1 else "sharpened, it was not sure enough"
    return f"temperature {factor:.3g}: {how}"


def describe_origin(combined: Combined, samples: int = 0, split: str = "", left_out: int = 0) -> str:
    """Returns what the combined model is and what its figures are of, in sentences.

    Args:
        samples, split: of which the figures are, where they are known.
        left_out: finished members that were not compared.
    """
    sentences = [_sentence(combined.note)] if combined.note else []
    if combined.reason:
        sentences.append(f"{'Note' if combined.members else 'None'}: {_sentence(combined.reason)}")
    if samples:
        sentences.append(f"All figures are of the same {text.number(samples)} samples of the {split} split.")
        if split == "valid":
            sentences.append("Members were selected on these samples, so the combined figures are optimistic.")
    if left_out > 0:
        many = text.count(left_out, "finished member")
        sentences.append(f"{many} not compared: without usable predictions, or too many to hold at once.")
    return " ".join(sentences)


def _sentence(words: str) -> str:
    return words if words.rstrip().endswith((".", "!", "?")) else f"{words.rstrip()}."
