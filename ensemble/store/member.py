"""What is known of one member and of one node: the parts of a run's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["waiting", "placed", "running", "paused", "stopped", "finished", "pruned", "failed", "cancelled"]
Event = dict[str, Any]

#: States in which nothing more will come of a member; a resume takes up only what failed again.
ENDED: frozenset[str] = frozenset(("finished", "pruned", "failed", "cancelled"))

#: Why a member failed for good: the same batches give the same loss, and what a search proposed in vain (an
#: "impossible" member was never trained) stays what it is. What else was wrong (a mistake in the recipe,
#: no memory, no room on the disk) may have been mended before a resume.
HOPELESS: frozenset[str] = frozenset(("nan", "impossible"))


@dataclass(slots=True)
class Span:
    """One attempt of a member on a node, or its part in one cohort; for the timeline.

    Unix seconds, None while it has not come to that. Where it moved on to another cohort its outcome is "moved".
    """

    attempt: int
    node: str
    devices: list[Any]
    cohort: int | None
    placed: float
    started: float | None = None
    ended: float | None = None
    outcome: str | None = None


@dataclass(slots=True)
class NodeState:
    """A node, as it declared itself, and the power it was last seen to draw."""

    name: str
    info: Event
    watts: float | None = None


@dataclass(slots=True)
class MemberState:
    """One member.

    Attributes:
        attempts: how often it was placed.  failures: how often an attempt of it failed since the run's last
            start.
        epoch: own epochs finished in its present lineage.  step: steps into the next one, of `steps`.
        metrics: of the last epoch.  history: the `epoch` event of each finished epoch, in order, each once.
        plan: what was measured for its exchange (`ensemble.comm.planning.Plan`); None where nothing was.
        checkpoint: the last `checkpoint` event.
        cpu_s: CPU-seconds by role; joules are the ledger's (`ensemble.meter.ledger`).
    """

    id: str
    number: int
    identity: dict[str, Any] = field(default_factory=dict)
    state: State = "waiting"
    attempt: int = 0
    attempts: int = 0
    failures: int = 0
    node: str | None = None
    devices: list[Any] = field(default_factory=list)
    cohort: int | None = None
    feeder: str | None = None
    first_epoch: int | None = None
    epoch: int = 0
    step: int = 0
    steps: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[Event] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    samples_per_s: float | None = None
    checkpoint: Event | None = None
    weights_sha256: str | None = None
    error: str | None = None
    reason: str | None = None
    cpu_s: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @property
    def params(self) -> dict[str, Any]:
        """Its hyperparameters."""
        return dict(self.identity.get("params", {}))

    @property
    def training_rate(self) -> float | None:
        """Samples a second of training over all its epochs, evaluation not counted: samples over the sum of each
        epoch's samples / samples_per_s. The rate that was last told before the first epoch has ended.
        """
        known = [(e["samples"], e.get("samples_per_s")) for e in self.history if e.get("samples")]
        known = [(samples, rate) for samples, rate in known if rate]
        if not known:
            return self.samples_per_s
        return float(sum(samples for samples, _ in known) / sum(samples / rate for samples, rate in known))

    def end(self, state: State, t: float) -> None:
        """The present attempt is over at time `t`, and this is what the member is now."""
        self.state = state
        self.samples_per_s = None if state == "waiting" else self.samples_per_s
        self.close_span(t, state)

    def close_span(self, t: float, outcome: str) -> None:
        """Note in the timeline that the present attempt is over."""
        if self.spans and self.spans[-1].ended is None:
            self.spans[-1].ended, self.spans[-1].outcome = t, outcome
