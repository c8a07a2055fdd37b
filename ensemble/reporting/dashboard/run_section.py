"""What the page says of a run as a whole: how it stands, how far it is, what limits it, what one can ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED
from ensemble.meter.origin import weakest
from ensemble.reporting import text
from ensemble.reporting.dashboard.rows import ADVICE
from ensemble.reporting.dashboard.tables import list_versions
from ensemble.reporting.dashboard.tiles import describe_tiles
from ensemble.reporting.model_figures import list_figures, read_task
from ensemble.reporting.ranking import cost_origin, differ_by_seed, front_members, other_metrics, varied_parameters
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections import packing
from ensemble.reporting.sections.feeders import bottleneck_lines, pipeline_lines
from ensemble.reporting.sections.notices import MOST_NAMED
from ensemble.reporting.sections.quality import describe_benefit
from ensemble.reporting.sections.time_to_solution import summarize
from ensemble.reporting.sections.training import group_causes, summarize_budget
from ensemble.reporting.status import status_gpus

if TYPE_CHECKING:
    from ensemble.reporting.time_left import TimeLeft
    from ensemble.store.state import RunState

MOST_CAUSES = 20  # of failures
#: Of the `combined` event.
COMBINED = (
    "method", "members", "weights", "split", "metrics", "best_member", "note", "temperature", "reason", "task",
    "calibration", "intervals", "noise", "uncertainty", "conformal", "selective",
    "shifted", "shifted_metrics",
)  # fmt: skip


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
    is_measured = bool(((state.combined or NOT_COMBINED).metrics or {}).get("ensemble"))
    total = run.used if with_used else None
    used = total and {"cpu_s": total.cpu_s, "energy_j": total.energy_j, "energy_origin": total.origin}
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
        "combined_split": (state.combined or NOT_COMBINED).split if is_measured else None,
        "wall_s": state.wall_s,
        "used": used,
    }


def describe_run(directory: str, run: RunProjection, left: TimeLeft | None) -> dict[str, Any]:
    """Returns the `run` section of the document.

    Args:
        directory: see `describe_head`.
        left: time left, where it can be estimated.
    """
    state, members = run.state, run.state.members.values()
    ranking = (state.objective, state.direction)
    head = describe_head(directory, run)
    is_driven = state.ended is None and run.driver is None and state.started is not None
    by_seed = ["seed"] if differ_by_seed(members) else []
    found = {
        **head,
        "run_id": state.run_id,
        "executor": state.executor,
        "mode": state.mode,
        "direction": state.direction,
        "further": [{"name": each.name, "mode": each.mode} for each in state.further_objectives],
        "further_origin": cost_origin(state),
        "front": [member.id for member in front_members(state)],
        "epochs": state.epochs,
        "declared": state.declared,
        "samples": (state.header.data or {}).get("samples"),  # of the training data, in an epoch
        "ended": None if state.ended is None else state.ended.t,
        "left": str(left) if left is not None and is_driven else None,
        "combined": None if state.combined is None else {name: getattr(state.combined, name) for name in COMBINED},
        "benefit": dict(zip(("text", "tone"), describe_benefit(state.combined, ranking), strict=True)),
        "metrics": [state.objective, *other_metrics(state)],
        "figures": _name_figures(state),
        "params": [*dict.fromkeys(name for m in members for name in m.identity.get("params", {})), *by_seed],
        "varied": [*varied_parameters(members), *by_seed],
        "facts": [dict(zip(("label", "text", "tone"), fact, strict=True)) for fact in _facts(run)],
        "totals": _totals(run, is_driven=is_driven),
        "failures": _group_failures(state),
        "made_with": list_versions(state),
        "driver": run.driver,
        "actions": _actions(head["counts"]) if is_driven else [],
    }
    return found | {"tiles": describe_tiles(found)}


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
    names = dict.fromkeys([*other_metrics(state), *(combined.get("ensemble") or {})])
    ranking = (state.objective, state.direction)
    found = list_figures([state.objective, *names], read_task(state.combined), ranking)
    return {each.name: each.as_document() for each in found}


def _facts(run: RunProjection) -> Iterator[tuple[str, str, str]]:
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
    for line in bottleneck_lines(state):
        yield "limited by", line, ""
    for line in packing.describe_plan(state):
        yield "plan", line, ""
    for line in pipeline_lines(state):
        yield "pipeline", line, "warn"
    for line in status_gpus(state):
        yield "GPUs", line, "warn"
    for label, line in summarize_budget(state, run.ledger):
        yield label, line, ""


def _totals(run: RunProjection, *, is_driven: bool) -> dict[str, Any]:
    state, ledger, used, reuse = run.state, run.ledger, run.used, run.ledger.reuse
    now = [node for node in state.nodes.values() if node.watts is not None] if is_driven else []
    origins = {node.node: node.origin for node in ledger.nodes}
    return {
        "models": next((line for _, line in summarize(state)), None),
        "cpu_s": used.cpu_s,
        "energy_j": used.energy_j,
        "energy_origin": used.origin,
        "node_energy_j": ledger.total.energy_j,
        "mean_w": used.mean_w,
        "watts": sum(node.watts or 0.0 for node in now) if now else None,
        "watts_origin": weakest(origins.get(node.name, "unavailable") for node in now) if now else None,
        "prepared": reuse.prepared,
        "consumed": reuse.consumed,
        "reuse": reuse.factor,
        "samples_per_s": run.samples_per_s if is_driven else None,
        "models_per_minute": run.pace and run.pace.per_minute,
        "ttta_s": run.pace and run.pace.ttta_s,
    }


def _actions(counts: Mapping[str, int]) -> list[str]:
    """Returns the requests that a run in progress can fulfil."""
    found = ["stop", "add"]
    if any(counts.get(state) for state in ("waiting", "measuring", "placed", "running")):
        found += ["pause", "cancel"]
    if counts.get("paused"):
        found += ["resume"] if "cancel" in found else ["resume", "cancel"]
    return found
