"""The shared pipeline: samples prepared and consumed, what limited each cohort's stream, designs, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble.reporting import figures, text
from ensemble.reporting.figures.sharing import feeder_totals
from ensemble.reporting.page import Panel
from ensemble.reporting.sections import Content, Line, ReportData, draw
from ensemble.reporting.sections.notices import describe_bad_record, describe_end_of_sharing, describe_lost_feeder

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import RunState
    from ensemble.store.member import Event

BATCHES = (
    "Batches by member",
    "Taken from the shared stream, or prepared by the member for itself; and how long it waited for data.",
)
IDLE = 0.5  # workers busy for less than this share of the time do not limit the stream


def compose(data: ReportData) -> Content:
    """Returns samples prepared and consumed, batches by member, and what held the streams up."""
    reuse = _describe_sharing(data.events, data.state, data.ledger)
    held_up = "".join(f"{line[:1].upper()}{line[1:]}. " for line in bottleneck_lines(data.state))
    levels = f"{held_up}Mean levels from the first sample to the last."
    return [
        Panel("reuse", "Samples prepared and consumed", reuse, draw(figures.pipeline_reuse, data.events), "half"),
        Panel("batches", *BATCHES, draw(figures.batches_by_member, data.state), "half"),
        Panel("levels", "Bottleneck", levels, draw(figures.queue_levels, data.state)),
    ]


def summarize(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns samples prepared against consumed, and what held the streams up."""
    lines = [("samples", _describe_reuse(ledger))]
    return lines + [("" if number else "bottleneck", line) for number, line in enumerate(bottleneck_lines(state))]


def _describe_sharing(events: Sequence[Event], state: RunState, ledger: Ledger) -> str:
    sent = sum(total["sent_bytes"] for total in feeder_totals(events).values())
    lines = (_describe_reuse(ledger), nodes_line(state, sent), ring_line(state))
    return "; ".join(line for line in lines if line)


def _describe_reuse(ledger: Ledger) -> str:
    """Returns the samples prepared and consumed as a sentence."""
    reuse = ledger.reuse
    if not reuse.prepared:
        return "none prepared yet"
    line = f"{text.number(reuse.prepared)} prepared, {text.number(reuse.consumed)} consumed"
    line += f": each was used {reuse.factor:.2f} times" if reuse.factor is not None else ""
    if reuse.private:
        line += f" ({text.number(reuse.private)} were prepared by a member for itself)"
    return line + (f"; {text.number(reuse.skipped)} could not be prepared" if reuse.skipped else "")


@dataclass(frozen=True)
class Bottleneck:
    """What limited the stream of one cohort.

    Attributes:
        cohort: its number.
        what: "members", "preparation" or "links".
        levels: means between 0 and 1 over its feeders, of what `pipelines.feeder.queue_levels.bottleneck` takes.
        workers: preparation processes of a node's feeder.
        cpus: cores of its smallest node, None where not known.
        bad_records: records that ended or hung a preparation process of its feeders. The time that this took is
            part of `levels`.
    """

    cohort: int
    what: str
    levels: dict[str, float]
    workers: int
    cpus: float | None
    bad_records: int = 0

    def describe(self, *, alone: bool) -> str:
        """Returns what limited the stream, the evidence, and what would help; names the cohort unless it is
        `alone`.
        """
        where = "" if alone else f" in cohort {self.cohort}"
        waited = f"a member waited {self.levels.get('waiting', 0.0):.0%} of the time"
        if self.what == "members":
            return f"the members{where} ({waited})"
        if self.what == "links":
            used = f"links were used {self.levels.get('link', 0.0):.0%}"
            return f"the links between nodes{where} ({waited}, {used}): try sharing='node'"
        return f"preparation{where} ({waited}): {self._advice()}"

    def _advice(self) -> str:
        if self.bad_records:
            return (
                f"this includes the time lost on {text.count(self.bad_records, 'bad record')}, "
                "mend or remove these before anything else"
            )
        busy = self.levels.get("workers", 0.0)
        if busy < IDLE:
            return f"its workers had work only {busy:.0%}, try a larger capacity"
        if self.cpus is None or self.workers + 1 <= self.cpus:
            more = 2 * self.workers if self.cpus is None else min(2 * self.workers, int(self.cpus))
            return f"try prep_workers={more}"
        return (
            f"{text.count(self.workers, 'worker')} on {self.cpus:g} cores, lighter stages or more cores would help"
        )


def find_bottlenecks(state: RunState) -> list[Bottleneck]:
    """Returns one for each cohort whose feeders have reported levels, in the cohorts' order."""
    from pipelines.feeder.queue_levels import bottleneck

    found = []
    for cohort in sorted({cohort for _, cohort in state.feeders}):
        reported = {
            node: event for (node, c), event in state.feeders.items() if c == cohort and event.get("fullness")
        }
        levels = _mean([event["fullness"] for event in reported.values()])
        what = bottleneck(levels)
        if what is not None:
            cpus = [state.nodes[node].info.get("cpus") for node in reported if node in state.nodes]
            known = [float(each) for each in cpus if each is not None]
            workers = max(int(event.get("workers") or 1) for event in reported.values())
            bad = sum(event.get("cohort") == cohort for event in state.bad_records.values())
            found.append(Bottleneck(cohort, what, levels, workers, min(known, default=None), bad))
    return found


def _mean(levels: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in levels for name in each)
    return {name: sum(each.get(name, 0.0) for each in levels) / len(levels) for name in names}


def bottleneck_lines(state: RunState, most: int = 3) -> list[str]:
    """A line for each of the newest cohorts."""
    found = find_bottlenecks(state)
    lines = [each.describe(alone=len(found) == 1) for each in found[-most:]]
    return lines + ([f"and of {text.count(len(found) - most, 'earlier cohort')}"] if len(found) > most else [])


def ring_line(state: RunState) -> str | None:
    """Returns the memory of the feeders' rings as a sentence; None where no feeder has reported it."""
    rings = sorted({(e["capacity"], e["ring_bytes"]) for e in state.feeders.values() if e.get("ring_bytes")})
    if not rings:
        return None
    each = [f"{text.number(capacity)} samples in {text.memory(nbytes)}" for capacity, nbytes in rings]
    return f"a node's ring holds {' or '.join(each)} of shared memory, however many members read it"


def nodes_line(state: RunState, sent_bytes: int) -> str | None:
    """Returns which cohorts several nodes fed together, and in which design, as a sentence; None where there is
    none.
    """
    designs: dict[int, str] = {}
    for (_, cohort), event in sorted(state.feeders.items()):
        group = event.get("group") or {}
        if len(group.get("nodes") or ()) > 1:
            design = f"{group['design']} design"
            if group["design"] in ("single", "multi"):
                design += f", {text.count(group['preparers'], 'preparer')}"
            designs[cohort] = f"{len(group['nodes'])} nodes shared one stream in cohort {cohort} ({design})"
    if not designs:
        return None
    return f"{', '.join(designs.values())}; {text.memory(sent_bytes)} were sent between nodes"


def bad_record_lines(state: RunState, most: int = 3) -> list[str]:
    """Returns a line for each record that ended or hung the process that prepared it."""
    found = [describe_bad_record(event) for event in state.bad_records.values()]
    return found[:most] + (
        [f"and {text.count(len(found) - most, 'more such record')}"] if len(found) > most else []
    )


def unshared_lines(state: RunState, most: int = 3) -> list[str]:
    """Returns a line for each feeder that ended and was not replaced."""
    gone = [
        describe_end_of_sharing(e) if e["type"] == "sharing_ended" else describe_lost_feeder(e)
        for e in state.unshared.values()
    ]
    return gone[:most] + ([f"and {text.count(len(gone) - most, 'more feeder')} lost"] if len(gone) > most else [])
