"""Formats what `ensemble status` shows: a line on the run, a row for each member, notes below them."""

from __future__ import annotations

import socket
import textwrap
import time
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.columns import list_columns
from ensemble.reporting.ranking import other_metrics
from ensemble.reporting.run_projection import NOTHING, RunProjection
from ensemble.reporting.sections.cost import FULL, describe_energy, knows_full_joules
from ensemble.reporting.sections.feeders import bottleneck_lines, pipeline_lines
from ensemble.reporting.sections.notices import describe, describe_early_stop, describe_remarks
from ensemble.reporting.sections.quality import describe_figures, describe_quality
from ensemble.reporting.sections.training import list_failures, summarize_budget
from ensemble.reporting.tables import lay_out
from ensemble.store.event_log import is_locked
from ensemble.store.files import format_command

if TYPE_CHECKING:
    from ensemble.store import RunDir, RunState

#: Explains the number behind a state in the tables.
ATTEMPTS = "(2) beside a state: started twice, as after a failure, a stop or a pause"

#: Of the table, and which are left out first where there is no room.
COLUMNS = {
    **dict.fromkeys(("member", "seed", "state", "epoch", "metric", "samples_per_s", "cpu_s", "energy_j"), 0),
    "full_energy_j": 3,
    "mean_w": 4,
    "gpu_s": 5,
    "full_cpu_s": 7,
}

#: Without an event: a controller on another host is then shown as lost.
SILENT_S = 300.0


def describe_lost_controller(run_dir: RunDir, state: RunState, *, silent_s: float = SILENT_S) -> str | None:
    """A line about the controller of a run that has not ended, if the controller has; None otherwise.

    A living controller holds a lock on the log. Where the file system has no locks, its process is looked for, and
    on another host, where a lock may not be seen, the age of the last event counts: a controller logs its CPU time
    every half minute.

    Args:
        silent_s: seconds without an event from which on a controller on another host is reported as lost.
    """
    pid, host = state.header.pid, state.header.host
    if state.ended is not None or (locked := is_locked(run_dir.events)):
        return None
    resume = f"{format_command('resume', run_dir.path)} goes on"
    if host != socket.gethostname():
        age_s = time.time() - max(state.updated or 0.0, run_dir.events.stat().st_mtime)
        if host is None or age_s < silent_s:
            return None
        return f"the controller (process {pid} on {host}) has logged nothing for {text.clock(age_s)}; {resume}"
    import psutil

    if locked is None and (pid is None or psutil.pid_exists(pid)):
        return None
    return f"the controller (process {pid}) is gone; {resume}"


def status_head(run: RunProjection) -> str:
    """Name, how it stands, executor, seconds at work, objective: one line."""
    state, word = run.state, run.word
    word += f" ({run.reason})" if run.reason else ""
    word += "; `ensemble resume` lets it go on" if word == "paused" else ""
    objective = f"objective {state.objective}, {state.direction}"
    where = f"executor {state.executor}"
    return " · ".join([state.name or "run", word, where, text.clock(state.wall_s), objective])


def _list_early_stops(state: RunState, most: int = 10) -> list[str]:
    """Which members stopped early, and why, a line for each."""
    lines = [
        describe_early_stop(member.id, member.epoch, member.early_stopping)
        for member in state.members.values()
        if member.early_stopping
    ]
    return lines[:most] + ([f"and {len(lines) - most} more stopped early"] if len(lines) > most else [])


def status_gpus(state: RunState) -> list[str]:
    """GPUs and nodes that are not used, and why nodes offer less than their GPUs, a line each."""
    lines = [describe(event) for event in state.quarantined.values()]
    if state.ended is None:
        lines += [describe(event) for event in state.unusable.values()]
        infos = {name: node.info for name, node in state.nodes.items()}
        lines += [f"{name}: {info.no_gpus}" for name, info in infos.items() if info is not None and info.no_gpus]
    return lines


def status_notes(run: RunProjection, width: int | None = None) -> list[str]:
    """Returns the lines below the table of members: failures, what members wait for, bottlenecks, the
    figures of the combined model, energy.

    Args:
        width: columns of the terminal, at which they are wrapped; None: a line each.
    """
    state, ledger = run.state, run.ledger
    quality = [*describe_figures(state), *describe_quality(state)]
    has_energy = ledger.run.energy_j is not None or state.ended is not None
    notes = [
        *([ATTEMPTS] if any(member.attempts > 1 for member in state.members.values()) else []),
        *list_failures(state.members.values(), most=10),
        *_list_early_stops(state),
        *describe_remarks(state),
        *status_gpus(state),
        *([f"waits for {state.waits_for}"] if state.waits_for else []),
        *(f"bottleneck: {line}" for line in bottleneck_lines(state)),
        *pipeline_lines(state),
        *(f"{label}: {line}" for label, line in summarize_budget(state, ledger)),
        *(line if at else f"{label}: {line}" for at, (label, line) in enumerate(quality)),
        *([f"energy: {describe_energy(ledger)}"] if has_energy else []),
        *([FULL] if knows_full_joules(ledger) else []),
    ]
    if width is None:
        return notes
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [part for note in notes for line in note.splitlines() for part in wrapper.wrap(line)]


def status_rows(run: RunProjection) -> list[dict[str, Any]]:
    """Returns one row for each member: what `ensemble status` prints and writes, and what a `Result` holds.

    Returns:
        `epoch` counts finished epochs, `metric` is the objective at the last evaluation, `metrics` all that was
        reported then; with `validate_every` this may be within an epoch. `samples_per_s` is the rate of training
        over all epochs (`MemberState.training_rate`). `cpu_s` (all roles of the member), `energy_j` and its
        origin, the mean and the highest power and the busy GPU-seconds are the ledger's; `full_cpu_s`,
        `full_energy_j` and its origin include the member's part of the work that serves several members. None
        where not known. `params` and `seed` are as it was declared. A member that failed has its `error` as well,
        a clone its `lineage` (`ensemble.spec.Identity`). One that keeps its best weights has `kept`, the
        evaluation that they are of, and `metric` and `metrics` are of that; one that stopped early has
        `early_stopping`.
    """
    state, own, full = run.state, run.own, run.full
    return [
        {
            "member": member.id,
            "state": run.member_word(member),
            "epoch": member.epoch,
            "metric": member.latest_metrics.get(state.objective),
            "node": member.node,
            **({"nodes": member.nodes} if member.nodes else {}),
            **({"lineage": lineage} if (lineage := member.identity.get("lineage")) else {}),
            "attempts": member.attempts,
            "samples_per_s": member.training_rate,
            "cpu_s": own[member.id].cpu_s if member.id in own else None,
            "energy_j": own.get(member.id, NOTHING).energy_j,
            "energy_origin": own.get(member.id, NOTHING).origin,
            "full_cpu_s": full[member.id].cpu_s if member.id in full else None,
            "full_energy_j": full.get(member.id, NOTHING).energy_j,
            "full_energy_origin": full.get(member.id, NOTHING).origin,
            "mean_w": own.get(member.id, NOTHING).mean_w,
            "gpu_s": own.get(member.id, NOTHING).gpu_s,
            "metrics": member.latest_metrics,
            "params": member.params,
            "seed": member.identity.get("seed"),
            **({"kept": member.kept} if member.kept else {}),
            **({"early_stopping": member.early_stopping} if member.early_stopping else {}),
            **({"error": f"{member.reason}: {member.error}"} if member.state == "failed" else {}),
        }
        for member in state.members.values()
    ]


def status_lines(run: RunProjection, width: int | None) -> list[str]:
    """A head and a row for each member for a terminal of `width` columns, or as wide as they need.

    Where it is narrow, metrics other than the objective are left out, then figures of what was used, then nodes.
    """
    others = {f"metric {name}": at for at, name in enumerate(other_metrics(run.state), start=len(COLUMNS))}
    chosen = {**COLUMNS, **others, "lineage": 1, "node": 2}
    return lay_out(list(list_columns(run, list(run.state.members.values()), chosen)), width)
