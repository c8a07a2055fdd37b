"""The figures of every epoch of every member, as columns, and what was added to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ensemble.events import Epoch, Started, to_dict
from ensemble.reporting.ranking import finite_or_none

if TYPE_CHECKING:
    from ensemble.events import Event
    from ensemble.store.state import RunState

#: Of an `epoch` event, beside its metrics on the validation split.
OTHERS = ("train_loss", "lr", "samples_per_s", "memory_gb", "cpus", "grad_norm", "loss_scale")
#: Numbers in a document, at most: about 8 MB of JSON.
MOST = 10**6
DIGITS = 6

#: Member, epoch, time, figures by name; None: the member went back to that epoch.
Step = tuple[str, int, float, dict[str, float] | None]


@dataclass
class Curve:
    """The finished epochs of one member."""

    epochs: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[dict[str, float]] = field(default_factory=list)

    def cut(self, epoch: int) -> None:
        """Removes this epoch and all after it."""
        while self.epochs and self.epochs[-1] >= epoch:
            self.epochs.pop()
            self.times.pop()
            self.values.pop()

    def add(self, epoch: int, t: float, values: dict[str, float]) -> None:
        """Adds an epoch, in the place of what there was from it on."""
        self.cut(epoch)
        self.epochs.append(epoch)
        self.times.append(t)
        self.values.append(values)


class Curves:
    """The curves of all members of a run."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._new: list[Step] = []

    def apply(self, state: RunState, event: Event) -> None:
        """Adds what an event tells.

        Args:
            state: of the run before the event.
        """
        if not isinstance(event, Epoch | Started):
            return
        member = state.members.get(event.member)
        if member is not None and event.attempt is not None and event.attempt < member.attempt:
            return  # it comes late, from an attempt that has been given up
        name, epoch, t = event.member, event.epoch or 0, event.t
        if isinstance(event, Epoch):
            self._add((name, epoch, t, _read(to_dict(event))))
            return
        known = self._curves.get(name)
        if known is not None and known.epochs and known.epochs[-1] >= epoch:
            self._add((name, epoch, t, None))
        last = event.last_epoch  # of a checkpoint whose own event got lost with its controller
        if last and (known is None or not known.epochs or known.epochs[-1] != last["epoch"]):
            self._add((name, last["epoch"], t, _read(last)))

    def _add(self, step: Step) -> None:
        name, epoch, t, values = step
        curve = self._curves.setdefault(name, Curve())
        if values is None:
            curve.cut(epoch)
        else:
            curve.add(epoch, t, values)
        self._new.append(step)

    def series(self, figure: str) -> Iterator[tuple[str, list[float], list[float | None]]]:
        """Yields each member with the times of its epochs and a figure of them."""
        for name, curve in self._curves.items():
            yield name, curve.times, [values.get(figure) for values in curve.values]

    def take(self) -> list[Step]:
        """Returns the steps since the last call."""
        new, self._new = self._new, []
        return new

    def replay(self, members: Iterable[str]) -> list[Step]:
        """Returns steps that make the present curves of these members, whatever a page has of them."""
        steps: list[Step] = []
        for name in members:
            if (curve := self._curves.get(name)) is not None:
                steps.append((name, 0, 0.0, None))
                columns = zip(curve.epochs, curve.times, curve.values, strict=True)
                steps += [(name, epoch, t, values) for epoch, t, values in columns]
        return steps

    def describe(self) -> dict[str, Any]:
        """Returns the fields of the document; of long runs every k-th epoch and the last of each member."""
        many = sum(
            len(curve.epochs) * (2 + len(curve.values[-1])) for curve in self._curves.values() if curve.values
        )
        every = -(-many // MOST) or 1
        return {
            "thinned": every > 1,
            "members": {name: _columns(curve, every) for name, curve in self._curves.items() if curve.epochs},
        }


def _columns(curve: Curve, every: int) -> dict[str, Any]:
    last = len(curve.epochs) - 1
    chosen = [i for i in range(last + 1) if i % every == 0 or i == last]
    names = dict.fromkeys(name for i in chosen for name in curve.values[i])
    return {
        "epoch": [curve.epochs[i] for i in chosen],
        "t": [round(curve.times[i], 3) for i in chosen],
        "values": {name: [curve.values[i].get(name) for i in chosen] for name in names},
    }


def _read(fields: Mapping[str, Any]) -> dict[str, float]:
    """Returns those of the fields of an `epoch` event that are numbers."""
    found = {name: fields.get(name) for name in OTHERS}
    seconds = fields.get("train_s") or fields.get("wall_s")
    for name, part in (("waited", fields.get("waited_s")), ("synced", fields.get("sync_s"))):
        found |= {name: part / seconds} if part and seconds else {}
    found |= fields.get("metrics") or {}  # what the user's code calls by one of these names is shown as theirs
    known = {name: finite_or_none(value) for name, value in found.items()}
    return {name: float(f"{value:.{DIGITS}g}") for name, value in known.items() if value is not None}
