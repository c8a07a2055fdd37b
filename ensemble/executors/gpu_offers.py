"""What a node offers of its GPUs: less where others hold their memory, none of those that are broken."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.events import Report
from ensemble.executors.spawn import is_of_node
from ensemble.meter.devices import Gpu, GpuState, watch_gpus
from ensemble.schedule.needs import Node

if TYPE_CHECKING:
    from ensemble.executors.process_pool import ProcessPool

_LEAST = 0.05  # of a GPU's memory: what displays and monitors hold, and too little for a member
_CHANGE = 0.06  # of a GPU's memory; it is more than `_LEAST`, around which what is offered jumps
_LOOK_S = 2.0
_REPORTED_S = 10.0  # after a change of what others hold was reported, until the next one is looked for


def offer_gpus(
    node: Node, states: Mapping[str, GpuState], faults: Mapping[str, str], *, with_mps: bool
) -> tuple[Node, list[tuple[str, str]]]:
    """The node with what it offers of its GPUs, and why it offers less than all.

    Args:
        node: with all of its GPUs.
        states: what others make of them, by id; a GPU that is missing is free.
        faults: why physical GPUs are broken, by id.
        with_mps: whether the run's processes use GPUs through its Multi-Process Service, which is one process.

    Returns:
        The node without GPUs that are broken or in compute mode PROHIBITED, and the reasons to offer less: of each
        the id of the GPU, and the text. `no_gpus` joins the texts.
    """
    reasons = [(parent, f"GPU {parent} is broken ({faults[parent]})") for parent in faults]
    kept, free, exclusive = [], [], []
    for i, gpu in enumerate(node.gpu_ids):
        state = states.get(gpu, GpuState())
        if node.gpu_parents[i] in faults:
            continue
        if state.mode == "prohibited":
            reasons.append((gpu, f"GPU {gpu} is in compute mode PROHIBITED"))
            continue
        is_exclusive = state.mode == "exclusive" and not with_mps
        total_gb = node.gpu_memory_gb[i] if node.gpu_memory_gb else 0.0
        held = state.held_gb / total_gb if total_gb else 0.0
        if is_exclusive:
            reasons.append((gpu, f"GPU {gpu} is in compute mode EXCLUSIVE_PROCESS: one rank at a time"))
        if is_exclusive and state.is_shared:
            reasons.append((gpu, f"another program is using GPU {gpu}"))
            held = 1.0
        elif held >= _LEAST:
            reasons.append((gpu, f"other programs hold {state.held_gb:.1f} of {total_gb:.1f} GiB of GPU {gpu}"))
        kept.append(i)
        free.append(1.0 if held < _LEAST else 0.0 if 1.0 - held < _LEAST else round(1.0 - held, 3))
        exclusive.append(is_exclusive)
    offered = node.select_gpus(kept.__contains__)
    no_gpus = "; ".join(text for _, text in reasons)
    offered = dataclasses.replace(offered, gpu_free=tuple(free), gpu_exclusive=tuple(exclusive), no_gpus=no_gpus)
    return offered, reasons


class GpuOffers:
    """The GPUs of a node during a run.

    Args:
        node: its name.
        directory: of the node, by which processes of this run are told from others'.
        emit: called with each event.
        ranks: of the node; members on GPUs that break are ended.

    Attributes:
        with_mps: see `offer_gpus`.
    """

    def __init__(self, node: str, directory: Path, emit: Callable[[Report], None], ranks: ProcessPool) -> None:
        self.with_mps = False
        self._node, self._emit, self._ranks = node, emit, ranks
        self._watch = watch_gpus(lambda pid: is_of_node(pid, directory, self._pids))
        self._reported: Node | None = None
        self._reasons: list[tuple[str, str]] = []
        self._host: Node | None = None
        self._is_changing = False
        self._next_look = 0.0
        self._pids: Collection[int] = ()  # as they were when others were last looked for

    @property
    def known(self) -> Sequence[Gpu]:
        """The GPUs that worked at the start, with those that are not offered."""
        gpus: Sequence[Gpu] = self._watch.gpus
        return gpus

    def offer(self, host: Node) -> Node:
        self.check()
        self._host = host
        self._reported, self._reasons = self._describe(host)
        return self._reported

    def _describe(self, host: Node) -> tuple[Node, list[tuple[str, str]]]:
        self._pids = self._ranks.list_pids()
        states = self._watch.read_states(self._ranks.list_gpus())
        lost = dict.fromkeys(self._watch.lost, "the driver has lost it")
        return offer_gpus(host, states, lost | self._watch.faults, with_mps=self.with_mps)

    def list_names(self) -> list[tuple[str, ...]]:
        """By what CUDA and Ray may call each GPU that was offered last (`Gpu.names`)."""
        names = {gpu.id: gpu.names for gpu in self._watch.gpus}
        return [names.get(gpu, (gpu,)) for gpu in (self._reported.gpu_ids if self._reported is not None else ())]

    def list_reasons(self) -> list[tuple[tuple[str, ...], str]]:
        """Why the last offer was less than all GPUs: by what CUDA and Ray may call the GPU, and the reason."""
        return [(self._list_names_of(gpu), text) for gpu, text in self._reasons]

    def _list_names_of(self, gpu: str) -> tuple[str, ...]:
        """What a GPU may be called; one in MIG mode, also what its instances may be."""
        called = [one.names for one in self._watch.gpus if gpu in (one.id, one.parent)]
        return tuple(dict.fromkeys([gpu, *(name for names in called for name in names)]))

    def find_fault(self, gpu: str) -> str | None:
        """Why a GPU, or the one of an instance, is broken; None where it works."""
        self.check()
        parent = next((one.parent for one in self._watch.gpus if one.id == gpu), gpu)
        why = self._watch.faults.get(parent)
        return None if why is None else _describe_fault(parent, why)

    def check(self) -> None:
        """Find GPUs that have broken, report them, and end the members on them."""
        for parent, why in self._watch.find_faults().items():
            devices = [gpu.id for gpu in self._watch.gpus if gpu.parent == parent]
            quarantined = {"type": "gpu_quarantined", "node": self._node, "gpu": parent}
            self._emit({**quarantined, "devices": devices, "detail": why})
            self.report()
            self._ranks.end_on_gpus(devices, _describe_fault(parent, why))

    def sample(self) -> None:
        """Look after the GPUs, and report a change of what the node offers."""
        self.check()
        now_s = time.monotonic()
        if now_s < self._next_look or self._host is None or self._reported is None:
            return
        self._next_look = now_s + _LOOK_S
        # What a rank holds is there for a moment before the driver lists it, and after it has ended.
        before, self._is_changing = self._is_changing, has_changed(self._reported, self._describe(self._host)[0])
        if before and self._is_changing:
            self.report()
            self._next_look = now_s + _REPORTED_S

    def report(self) -> None:
        """Report what the node offers now, after the first `offer`."""
        if self._host is not None:
            (self._reported, self._reasons), self._is_changing = self._describe(self._host), False
            named = {"gpu_names": self.list_names(), "gpu_reasons": self.list_reasons()}
            self._emit({"type": "node", **self._reported.as_event(), **named})

    def update_host(self, host: Node) -> None:
        """Report a node of which something else has changed, after the first `offer`."""
        if self._host is not None:
            self._host = host
            self.report()

    def close(self) -> None:
        """Release what it holds of the driver."""
        self._watch.close()


def _describe_fault(gpu: str, why: str) -> str:
    return f"GPU {gpu} is quarantined ({why})"


def has_changed(before: Node, after: Node) -> bool:
    """Whether what a node offers of its GPUs and memory, or how its energy is known, is to be reported again."""
    fixed = [(node.gpu_ids, node.gpu_exclusive, node.memory_left_gb, node.power) for node in (before, after)]
    if fixed[0] != fixed[1]:
        return True
    pairs = zip(before.gpu_free, after.gpu_free, strict=True)
    return any(abs(one - other) > _CHANGE for one, other in pairs)
