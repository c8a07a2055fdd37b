"""What the page says of a run as a whole: how it stands, how far it is, what limits it, what one can ask of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED
from ensemble.reporting import text
from ensemble.reporting.columns import declare_columns
from ensemble.reporting.dashboard.plots import draw_axis, draw_curve, draw_plot
from ensemble.reporting.dashboard.rows import ADVICE
from ensemble.reporting.dashboard.tiles import list_tiles
from ensemble.reporting.model_figures import list_figures, read_task
from ensemble.reporting.ranking import differ_by_seed, other_metrics, rank_members, varied_parameters
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections import Table, cost, feeders, nodes
from ensemble.reporting.sections.feeders import bottleneck_lines, pipeline_lines
from ensemble.reporting.sections.member_details import list_details
from ensemble.reporting.sections.notices import MOST_NAMED
from ensemble.reporting.sections.quality import describe_benefit
from ensemble.reporting.sections.training import describe_plan, group_causes, summarize_base, summarize_budget
from ensemble.reporting.status import status_gpus
from ensemble.reporting.time_left import describe_time_left

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store.state import RunState

log = logging.getLogger(__name__)

#: What makes the tables of the views "Cost" and "Placement", in their order on the page.
TABLES: Mapping[str, Sequence[Callable[[RunState, Ledger], list[Table]]]] = {
    "tables": (cost.tabulate, cost.tabulate_impact),
    "places": (nodes.tabulate, feeders.tabulate),
}

TITLES = {"tables": "costs", "places": "nodes and feeders"}


def describe_tables(run: RunProjection) -> dict[str, Any]:
    """Returns the document; a table that cannot be made takes no other with it.

    Returns:
        - `columns` of members: each with `id`, `title`, `about`, `kind` ("text" or ""); `members`: the cells of
          each. A cell is a number, a text, null, or [text, what it is sorted by].
        - `tables` of what was used, and `places`: those of nodes and feeders: each with `id`, `title`, `text`,
          `head` ([name, class] of each column), `rows`; `tiles` and `lines` of what was used.
        - `missing`: a sentence for each that could not be made.
    """
    columns, members, missing = list[dict[str, str]](), dict[str, list[Any]](), list[str]()
    try:
        columns, members = list_details(run)
    except Exception as error:
        missing.append(explain_failure("columns of members", error))
    tables: dict[str, list[dict[str, Any]]] = {view: [] for view in TABLES}
    for view, makers in TABLES.items():
        for tabulate in makers:
            try:
                tables[view] += map(Table.as_dict, tabulate(run.state, run.ledger))
            except Exception as error:
                missing.append(explain_failure(f"a table of {TITLES[view]}", error))
    tiles = list(map(vars, list_tiles(run)))
    lines = cost.summarize(run.state, run.ledger)
    return {"columns": columns, "members": members, **tables, "tiles": tiles, "lines": lines, "missing": missing}


def explain_failure(part: str, error: Exception) -> str:
    """Logs that a part of the page failed, and returns the sentence that stands in its place."""
    detail = error if log.isEnabledFor(logging.DEBUG) else None
    log.warning("the page's %s failed: %s: %s", part, type(error).__name__, error, exc_info=detail)
    return f"{part.capitalize()} cannot be shown: {type(error).__name__}: {error}."


def _list_configuration(state: RunState, info: Mapping[str, Any]) -> list[list[str]]:
    """Returns what a run is and was made with as [label, text]."""
    combined, values = state.combined or NOT_COMBINED, {"batch size": "", "seed": ""}
    for label in values:
        known = set[Any]()
        for member in state.members.values():
            known.add(member.identity.get(label.replace(" ", "_")))
        ordered = sorted(known - {None})
        values[label] = " to ".join(map(str, ordered[:1] + ordered[1:][-1:]))
    pairs = {
        "spec": info.get("spec"),
        "command": info.get("command"),
        "git commit": state.header.revision,
        "epochs": state.epochs,
        **values,
        **(state.header.versions or {}),
        "run": state.run_id,
        "combined model": " ".join(filter(None, (combined.note, combined.reason))),
    }
    return [[name.replace("_", "-"), str(value)] for name, value in pairs.items() if value not in (None, "")]


def _plot_best(state: RunState) -> dict[str, Any]:
    series, is_few = list[dict[str, Any]](), len(state.members) <= MOST_NAMED  # they have colours of their own
    for place, member in enumerate(rank_members(state)[:MOST_CURVES]):
        if member.history:
            colour = member.number if is_few else place
            series.append(draw_curve(colour, member.history, state.objective, member.id))
    axes = draw_axis("epoch") | {"whole": True}, draw_axis(text.visible(state.objective))
    plot = draw_plot("best", "Best members", "The objective on validation after each epoch.", *axes, series)
    return plot | {"absent": None if series else "No epoch has ended yet."}


MOST_CAUSES = 20  # of failures
MOST_CURVES = 5  # on the overview
#: The tone of how a run stands; others have none.
TONES = {
    "not started": "soft",
    "paused": "warn",
    "interrupted": "warn",
    "stopped": "warn",
    "finished": "good",
    "finished, with failures": "warn",
    "failed": "bad",
}


def describe_head(directory: str, run: RunProjection, *, with_used: bool = True) -> dict[str, Any]:
    """Returns how a run stands, for a list of runs (`ensemble list` and the page): the first fields of the `run`
    section.

    Args:
        directory: the name of the run's directory.
        with_used: whether what the run has used is in it.
    """
    state, best = run.state, run.best
    total = run.used if with_used else None
    return {
        "name": state.name or directory,
        "dir": directory,
        "state": {"word": run.word, "tone": TONES.get(run.word, "")},
        "started": state.started,
        "updated": state.updated,
        "counts": dict(run.counts),
        "done": round(run.done, 4),
        "best": None if best is None else {"member": best.id, "value": run.best_value},
        "objective": state.objective,
        "combined_value": run.combined_value,
        "combined_split": run.combined_split,
        "wall_s": state.wall_s,
        "used": total and {"cpu_s": total.cpu_s, "energy_j": total.energy_j, "energy_origin": total.origin},
    }


def describe_run(
    directory: str, run: RunProjection, left_s: float | None, info: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the `run` section of the document; `info`: of the run's `code_saved` events."""
    state, members = run.state, run.state.members.values()
    head = describe_head(directory, run)
    by_seed = ["seed"] if differ_by_seed(members) else []
    benefit, tone = describe_benefit(state.combined, (state.objective, state.direction))
    return {
        **head,
        "run_id": state.run_id,
        "executor": state.executor,
        "mode": state.mode,
        "direction": state.direction,
        "epochs": state.epochs,
        "declared": state.declared,
        "samples": (state.header.data or {}).get("samples"),  # of the training data, in an epoch
        "ended": None if state.ended is None else state.ended.t,
        "left": describe_time_left(left_s) if left_s is not None and run.is_driven else None,
        "benefit": {"text": benefit, "tone": tone},
        "metrics": [state.objective, *other_metrics(state)],
        "columns": declare_columns(),
        "figures": _name_figures(state),
        "params": [*dict.fromkeys(name for m in members for name in m.identity.get("params", {})), *by_seed],
        "varied": [*varied_parameters(members), *by_seed],
        "facts": [dict(zip(("label", "text", "tone"), fact, strict=True)) for fact in _list_facts(run)],
        "failures": _group_failures(state),
        "configuration": _list_configuration(state, info),
        "curves": _plot_best(state),
        "driver": run.driver,
        "actions": _list_actions(head["counts"]) if run.is_driven else [],
        "tiles": list(map(vars, list_tiles(run))),
    }


def _group_failures(state: RunState) -> list[dict[str, Any]]:
    """Why members failed: each cause once, with those that have it, and the attempt of the first of them."""
    failed = {
        member.id: (member.reason, member.error) for member in state.members.values() if member.state == "failed"
    }
    return [
        {
            "text": f"{f'{len(members)} × ' if len(members) > 1 else ''}{error}",
            "reason": reason,
            "members": members[:MOST_NAMED],
            "more": max(0, len(members) - MOST_NAMED),
            "attempt": state.members[members[0]].attempts,
            "advice": ADVICE.get(reason or ""),
        }
        for (reason, error), members in group_causes(failed)[:MOST_CAUSES]
    ]


def _name_figures(state: RunState) -> dict[str, Any]:
    """What each metric is called, and in which direction it is better, by its name; the objective as declared."""
    combined = (state.combined or NOT_COMBINED).metrics or {}
    names = dict.fromkeys([state.objective, *other_metrics(state), *(combined.get("ensemble") or {})])
    figures = list_figures(names, read_task(state.combined), (state.objective, state.direction))
    return {figure.name: figure.as_document() for figure in figures}


def _list_facts(run: RunProjection) -> Iterator[tuple[str, str, str]]:
    """Yields (label, sentence, tone): what limits the run, what it waits for, what is lost."""
    state = run.state
    if run.driver is not None:
        yield "driver", run.driver, "bad"
    if run.reason is not None:
        yield "stopped", f"{run.reason}; `ensemble resume` goes on", "warn"
    if state.waits_for:
        yield "waits for", state.waits_for, "warn"
    if state.measuring:
        yield "measuring", f"a few steps of {text.count(len(state.measuring), 'member')}, to pack them", ""
    for line in bottleneck_lines(state) if state.feeders else ():
        yield "limited by", line, ""
    for line in describe_plan(state) if state.planned is not None else ():
        yield "plan", line, ""
    for line in pipeline_lines(state) if state.unshared or state.bad_records or state.differences else ():
        yield "pipeline", line, "warn"
    for line in status_gpus(state):
        yield "GPUs", line, "warn"
    for label, line in summarize_base(state, run.ledger):
        yield label, line, ""
    for label, line in summarize_budget(state, run.ledger) if state.header.budget else ():
        yield label, line, ""


def _list_actions(counts: Mapping[str, int]) -> list[str]:
    actions = ["stop", "add"]
    if any(counts.get(state) for state in ("waiting", "measuring", "placed", "running")):
        actions += ["pause", "cancel"]
    if counts.get("paused"):
        actions += ["resume"] if "cancel" in actions else ["resume", "cancel"]
    return actions
