"""What the page says of a run as a whole: how it stands, how far it is, what limits it, what one can ask of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED, RunStopped
from ensemble.meter.origin import weakest
from ensemble.reporting import text
from ensemble.reporting.model_figures import list_figures, read_task
from ensemble.reporting.ranking import best_member, finite_or_none, metric, other_metrics, varied_parameters
from ensemble.reporting.sections.feeders import (
    bad_record_lines,
    bottleneck_lines,
    difference_lines,
    unshared_lines,
)
from ensemble.reporting.sections.time_to_solution import measure_time_to_solution, summarize
from ensemble.reporting.status import describe_state, status_gpus
from ensemble.reporting.time_left import epochs_done_and_left

if TYPE_CHECKING:
    from ensemble.meter.ledger import Ledger
    from ensemble.store.member import MemberState
    from ensemble.store.state import RunState

#: Of the `combined` event.
COMBINED = (
    "method", "members", "weights", "split", "metrics", "best_member", "note", "temperature", "reason", "task",
    "calibration", "intervals", "noise", "uncertainty", "conformal", "shifted",
)  # fmt: skip


def describe_head(
    directory: str, state: RunState, driver: str | None, ledger: Ledger | None = None
) -> dict[str, Any]:
    """Returns how a run stands, for a list of runs (`ensemble list` and the page): the first fields of the `run`
    section.

    Args:
        directory: the name of the run's directory.
        driver: what is wrong with the process that drives the run.
        ledger: what the run has used; None: not asked for.
    """
    lost = is_lost(state, driver)
    counts = Counter(member_state(state, member, is_lost=lost) for member in state.members.values())
    unborn = max(0, (state.declared or 0) - len(state.members))
    if unborn:
        counts["waiting"] += unborn
    done, left = epochs_done_and_left(state)
    best = best_member(state)
    measured = ((state.combined or NOT_COMBINED).metrics or {}).get("ensemble") or {}
    return {
        "name": state.name or directory,
        "dir": directory,
        "state": dict(zip(("word", "tone"), run_state(state, driver), strict=True)),
        "started": state.started,
        "updated": state.updated,
        "counts": dict(counts),
        "done": round(done / (done + left), 4) if done + left else 0.0,
        "best": None if best is None else {"member": best.id, "value": metric(best, state.objective)},
        "objective": state.objective,
        "combined_value": finite_or_none(measured.get(state.objective)),
        "combined_split": (state.combined or NOT_COMBINED).split if measured else None,
        "wall_s": state.wall_s,
        "used": None if ledger is None else _describe_used(ledger),
    }


def _describe_used(ledger: Ledger) -> dict[str, Any]:
    used = ledger.run
    return {"cpu_s": used.cpu_s, "energy_j": used.energy_j, "energy_origin": used.origin}


def describe_run(
    directory: str, state: RunState, ledger: Ledger, left_s: float | None, driver: str | None
) -> dict[str, Any]:
    """Returns the `run` section of the document.

    Args:
        directory, driver: see `describe_head`.
        left_s: seconds left, where they can be told.
    """
    members = state.members.values()
    head = describe_head(directory, state, driver, ledger)
    is_open = state.ended is None
    is_driven = is_open and driver is None and state.started is not None
    return {
        **head,
        "run_id": state.run_id,
        "executor": state.executor,
        "mode": state.mode,
        "direction": state.direction,
        "second_objective": state.second_objective,
        "epochs": state.epochs,
        "declared": state.declared,
        "samples": (state.header.data or {}).get("samples"),  # of the training data, in an epoch
        "ended": None if state.ended is None else state.ended.t,
        "wall_s": state.wall_s,
        "left_s": left_s if is_driven else None,
        "combined": None if state.combined is None else {name: getattr(state.combined, name) for name in COMBINED},
        "metrics": [state.objective, *other_metrics(state)],
        "figures": _name_figures(state),
        "params": list(dict.fromkeys(name for member in members for name in member.identity.get("params", {}))),
        "varied": varied_parameters(members),
        "facts": [dict(zip(("label", "text", "tone"), fact, strict=True)) for fact in _facts(state, driver)],
        "totals": _totals(state, ledger, is_driven=is_driven),
        "driver": driver,
        "actions": _actions(head["counts"]) if is_driven else [],
    }


def _name_figures(state: RunState) -> dict[str, Any]:
    """What each metric is called, and in which direction it is better, by its name; the objective as declared."""
    combined = (state.combined or NOT_COMBINED).metrics or {}
    names = dict.fromkeys([*other_metrics(state), *(combined.get("ensemble") or {})])
    ranking = (state.objective, state.direction)
    found = list_figures([state.objective, *names], read_task(state.combined), ranking)
    return {each.name: each.as_record() for each in found}


def is_lost(state: RunState, driver: str | None) -> bool:
    """Whether the process that drives a run that has begun, and not ended, is gone."""
    return driver is not None and state.started is not None and state.ended is None


def member_state(state: RunState, member: MemberState, *, is_lost: bool) -> str:
    """Returns how a member stands; one that trained when the run's driver was lost does so no more."""
    is_measured = member.id in state.measuring and member.state == "waiting"
    return "measuring" if is_measured else describe_state(member, is_lost=is_lost)


def run_state(state: RunState, driver: str | None = None) -> tuple[str, str]:
    """Returns how a run stands in a word, and the tone of it: "", "soft", "good", "warn" or "bad"."""
    states = {member.state for member in state.members.values()}
    if state.ended is None:
        if is_lost(state, driver):
            return "interrupted", "warn"
        if "paused" in states and states.isdisjoint(("waiting", "placed", "running")):
            return "paused", "warn"
        return ("running", "") if state.started is not None else ("not started", "soft")
    if isinstance(state.ended, RunStopped):
        return "stopped", "warn"
    if "finished" not in states:
        return "failed", "bad"
    return ("finished, with failures", "warn") if "failed" in states else ("finished", "good")


def _facts(state: RunState, driver: str | None) -> Iterator[tuple[str, str, str]]:
    """Yields (label, sentence, tone): what limits the run, what it waits for, what is lost."""
    if driver is not None:
        yield "driver", driver, "bad"
    if state.ended is not None and isinstance(state.ended, RunStopped):
        yield "stopped", f"{state.ended.reason or 'no reason given'}; `ensemble resume` goes on", "warn"
    if state.waits_for:
        yield "waits for", state.waits_for, "warn"
    if state.measuring:
        yield "measuring", f"a few steps of {text.count(len(state.measuring), 'member')}, to pack them", ""
    for line in bottleneck_lines(state):
        yield "limited by", line, ""
    for line in (*unshared_lines(state), *bad_record_lines(state), *difference_lines(state)):
        yield "pipeline", line, "warn"
    if (gpus := status_gpus(state)) is not None:
        for line in gpus.splitlines():
            yield "GPUs", line, "warn"
    for label, line in summarize(state):
        yield label, line, ""


def _totals(state: RunState, ledger: Ledger, *, is_driven: bool) -> dict[str, Any]:
    used, reuse = ledger.run, ledger.reuse
    now = [node for node in state.nodes.values() if node.watts is not None] if is_driven else []
    origins = {node.node: node.origin for node in ledger.nodes}
    rate = sum(m.samples_per_s or 0.0 for m in state.members.values() if m.state == "running")
    pace = measure_time_to_solution(state)
    return {
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
        "samples_per_s": rate if is_driven else None,
        "models_per_minute": pace and pace.per_minute,
        "ttta_s": pace and pace.ttta_s,
    }


def _actions(counts: Mapping[str, int]) -> list[str]:
    """Returns the requests that a run in progress can fulfil."""
    found = ["stop", "add"]
    if any(counts.get(state) for state in ("waiting", "measuring", "placed", "running")):
        found += ["pause", "cancel"]
    if counts.get("paused"):
        found += ["resume"] if "cancel" in found else ["resume", "cancel"]
    return found
