"""SC18's mean power: one shared pipeline beside a pipeline each, on nodes whose power is modelled.

Pittman et al. metered cabinets of Titan, whose nodes have a processor and an accelerator each, with a member on
every node. Here both sides run for real, at equal work (`ensemble.bench.energy.sharing`); members' accelerators
are waits. What a node would draw is not measured but modelled, of published watts: it goes by the share of
the cores that were busy, by the kernel's clocks of all processes, and by the share of the time for which members
waited for their accelerators. Each member's node has as large a share of its cores busy as this machine had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.energy.synthetic import PowerModel
from ensemble.bench.charts import PREDICTED, Panel
from ensemble.bench.energy import sharing
from ensemble.bench.pipelines import expected
from ensemble.bench.pipelines.config import EMULATED
from ensemble.bench.pipelines.figures import load_warnings
from ensemble.bench.pipelines.study import PipelineRow, format_count
from ensemble.bench.results import Claim, Outcome, Report, group_by, outcome_of, series_of, show_claims

SHARED, OWN = "one shared pipeline", "a pipeline each"
_COLOURS = {SHARED: "#2f7bc4", OWN: "#d97a2b"}


@dataclass(frozen=True, kw_only=True)
class ModelledNode:
    """Watts of a node with a processor and an accelerator.

    Attributes:
        cores: of the processor.  processor: its power above idle, by busy cores.
        accelerator_w: of an accelerator that computes all the time.
        processor_idle_w, accelerator_idle_w: without load.  rest_w: of all else, in any case.
    """

    name: str
    cores: int
    processor: PowerModel
    accelerator_w: float
    processor_idle_w: float
    accelerator_idle_w: float
    rest_w: float

    def watts(self, processor: float, accelerator: float) -> float:
        """Mean power where these shares of the cores, and of the accelerator's time, were busy."""
        dynamic_w = self.processor.dynamic_w(self.cores * processor)["cpu"]
        dynamic_w += (self.accelerator_w - self.accelerator_idle_w) * accelerator
        return self.rest_w + self.processor_idle_w + self.accelerator_idle_w + dynamic_w


# Opteron 6274: 115 W (AMD); without load 6.4 W, as AMD says of the 6276. Tesla K20X: 235 W (NVIDIA's board
# specification BD-06397), without load 25 W, as that of the K20 says (BD-06455). The rest: Titan's 8,209 kW under
# Linpack (TOP500, November 2012) are 439 W for each of 18,688 nodes, less processor and accelerator.
_OPTERON_W, _OPTERON_IDLE_W, _K20X_W, _K20X_IDLE_W, _CORES = 115.0, 6.4, 235.0, 25.0, 16
TITAN = ModelledNode(
    name="Cray XK7",
    cores=_CORES,
    processor=PowerModel(core_w=(_OPTERON_W - _OPTERON_IDLE_W) / _CORES, dram_w=0.0),
    accelerator_w=_K20X_W,
    processor_idle_w=_OPTERON_IDLE_W,
    accelerator_idle_w=_K20X_IDLE_W,
    rest_w=8_209_000 / 18_688 - _OPTERON_W - _K20X_W,
)


@dataclass(frozen=True, kw_only=True)
class PowerRow:
    """One side with one step: what was measured, and what a member's node would draw.

    Attributes:
        side: `SHARED` or `OWN`.
        node: whose power is modelled.
        step_ms: of the emulated accelerator, a batch.
        samples, wall_s, cpu_s: of all members, measured.
        processor_busy: share of the cores' time that all processes used, and for as busy a node's is taken.
        accelerator_busy: share of the time for which a member's accelerator computed.
        modelled_w: mean power of a node.  modelled_j: its energy for the same samples.
        own_w: mean power of a node whose processor does only a member's part of `cpu_s`.
    """

    side: str
    node: str
    members: int
    cores: int
    step_ms: float
    samples: int
    wall_s: float
    cpu_s: float
    processor_busy: float
    accelerator_busy: float
    modelled_w: float
    modelled_j: float
    own_w: float
    runs: int

    @property
    def s_per_sample(self) -> float:
        """Seconds in which all members took one."""
        return self.wall_s / self.samples


def model_power(row: PipelineRow, node: ModelledNode) -> PowerRow:
    """What a node of each member would draw in a run with emulated steps."""
    steps = row.samples / row.members / row.batch_size
    processor = min(1.0, row.cpu_s / (row.wall_s * row.cores))
    accelerator = min(1.0, steps * row.step_ms / 1000 / row.wall_s)
    modelled_w = node.watts(processor, accelerator)
    same = {name: getattr(row, name) for name in ("members", "cores", "step_ms", "samples", "wall_s", "cpu_s")}
    return PowerRow(
        side=SHARED if row.design == sharing.SHARED else OWN,
        node=node.name,
        processor_busy=processor,
        accelerator_busy=accelerator,
        modelled_w=modelled_w,
        modelled_j=modelled_w * row.wall_s,
        own_w=node.watts(min(1.0, row.cpu_s / row.members / (row.wall_s * _CORES)), accelerator),
        runs=row.runs,
        **same,
    )


def study(
    data: str,
    *,
    members: int,
    cores: int | None,
    steps_ms: Sequence[float],
    samples: int,
    repeats: int,
    node: ModelledNode,
    report: Report,
) -> Outcome:
    """Run both sides with each emulated step.

    Args:
        data: an archive of photographs.
        members, cores, samples, repeats: see `sharing.study`.
        node: whose power is modelled.
    """
    runs: list[PipelineRow] = []
    for step_ms in steps_ms:
        (found,) = sharing.study(
            data,
            members=members,
            cores=cores,
            step_ms=step_ms,
            steps=(EMULATED,),
            samples=samples,
            repeats=repeats,
            report=report,
        )
        runs += [found.shared, found.own]
    rows = [model_power(row, node) for row in runs]
    title = f"Mean power, modelled of a {node.name} for each member"
    columns = "side step_ms wall_s cpu_s processor_busy accelerator_busy modelled_w modelled_j"
    said = [*findings(rows), *load_warnings(runs)]
    modelled = outcome_of(rows, title, columns, part="power", findings=said, panels=panels(rows))
    shown = show_claims([*expected.claims(runs), *claims(rows)])
    notes = ["watts are modelled, not measured"]
    return Outcome(tables=[], rows=[], title="Mean power of a shared pipeline", notes=notes) + shown + modelled


def _pairs(rows: Sequence[PowerRow], watts: str = "modelled_w") -> Iterator[expected.PowerPair]:
    """Shared beside own, of each step; `watts`: which field of a row."""
    for step_ms, found in group_by(rows, lambda row: row.step_ms).items():
        at = {row.side: row for row in found}
        drawn = {"shared_w": getattr(at[SHARED], watts), "own_w": getattr(at[OWN], watts)}
        fast = at[OWN].s_per_sample / at[SHARED].s_per_sample
        yield expected.PowerPair(**drawn, faster=fast, case=f"step {step_ms:g} ms")


def claims(rows: Sequence[PowerRow]) -> Iterator[Claim]:
    """The paper's claim about mean power, modelled in two ways: what a node's processor does is not known."""
    for watts, does in (
        ("modelled_w", f"is as busy as this machine's {format_count(rows[0].cores, 'core')} with all members"),
        ("own_w", "does what one member costs here, and nothing else"),
    ):
        claim = f"less mean power; here modelled, of a {rows[0].node} whose processor {does}"
        found = expected.claim_power(claim, list(_pairs(rows, watts)), "modelled, not measured")
        yield dataclasses.replace(found, ratio=None)


def findings(rows: Sequence[PowerRow]) -> Iterator[str]:
    """Mean power and energy of each step, and what decides."""
    for pair in _pairs(rows):
        yield (
            f"{pair.case}: sharing is {pair.faster:.3g} times as fast, at {pair.shared_w / pair.own_w:.3g} times "
            f"the mean power and {pair.energy:.3g} times the energy (modelled: {pair.shared_w:.0f} and "
            f"{pair.own_w:.0f} W)"
        )
    yield (
        "mean power falls where both sides are equally fast: accelerators then do the same, and processors less; "
        "a side that ends earlier keeps its accelerators busier, and draws more meanwhile"
    )


def panels(rows: Sequence[PowerRow]) -> Iterator[Panel]:
    """Mean power and energy by the step."""
    at = f"modelled of a {rows[0].node} for each of {rows[0].members} members"
    for title, name in (("Mean power, W", "modelled_w"), ("Energy for equal work, J", "modelled_j")):
        drawn = series_of(rows, "step_ms", name, "side", _COLOURS, dash=PREDICTED)
        yield Panel(title=title, at=at, x="emulated step, ms", series=drawn)
