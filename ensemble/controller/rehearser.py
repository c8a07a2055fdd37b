"""Has a member rehearsed before any trains: in two processes, one after the other, where it would be placed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ensemble.controller.actions import Kill, Launch, RemoveFolder
from ensemble.controller.attempt import rendezvous_file
from ensemble.controller.session_state import SessionState
from ensemble.controller.uncombinable import explain_uncombinable
from ensemble.events import Rehearsed
from ensemble.schedule.needs import Node
from ensemble.schedule.packing import pack
from ensemble.schedule.placement import ClusterSnapshot
from ensemble.spec import Ensemble, Identity
from ensemble.spec.task import Task
from ensemble.store import RunDir
from ensemble.store.member import UNCOMBINED
from ensemble.train.job import REHEARSAL, Job, RehearsalRequest

#: Members with different numbers of workers of which one is rehearsed each, at most.
MOST_WIDTHS = 2
_NUMBER = re.compile(r"\d+")
#: Checkpoints of members in training that are tried again, at most, as they were gone.
MOST_TRIES = 8


def describe_refusal(member: str, refused: Sequence[str]) -> str:
    """Return why a run does not start, in one line."""
    return (
        f"{member} was rehearsed, and nothing is trained: {'; '.join(refused)}. Mend it; where it is meant so: "
        "Ensemble(rehearsal='say'), or --no-rehearsal"
    )


@dataclass
class _Part:
    """A part of a rehearsal whose processes run.

    Attributes:
        trained: the attempt that has trained; None: this one does.
        proves: whether a checkpoint of a member in training is tried.
        ranks: that have not exited.
        report: what it has found; None: it has not said it.
    """

    identity: Identity
    number: int
    trained: int | None
    ranks: set[int]
    last_event_at: float
    proves: bool = False
    report: Mapping[str, Any] | None = None
    detail: str = "its processes exited without a report"


@dataclass
class _Sum:
    """What the parts of the rehearsal of a member have found so far."""

    refused: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class Rehearser:
    """Decides which members are rehearsed, and what follows from what was found.

    Attributes:
        refusal: why the run does not start; None: it does.
    """

    def __init__(self, session: SessionState, ensemble: Ensemble, run_dir: RunDir) -> None:
        self._session, self._ensemble, self._run_dir = session, ensemble, run_dir
        self.refusal: str | None = None
        self._is_due = ensemble.rehearsal is not None and ensemble.train is not None
        self._candidates: list[Identity] = []
        self._queue: list[Identity] = []
        self._running: _Part | None = None
        self._sum = _Sum()
        self._number = self._epochs = self._tries = 0
        self._errors: dict[str, str] = {}  # of members that failed in their rehearsal
        self._unproven: list[Identity] = []  # members in training whose checkpoints are to be tried
        self._changed: set[int] = set()  # epochs in which members changed
        self._began = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether members wait while some are or will be rehearsed."""
        return bool(self._queue) or (self._running is not None and not self._running.proves)

    def begin(self, members: Sequence[Identity], cluster: ClusterSnapshot) -> bool:
        """Begin where it is due, and there is a node; returns whether members have to wait."""
        if self._is_due and members and cluster.nodes:
            self._is_due, code = False, self._session.run.header.code
            known = self._session.run.rehearsed
            if not any(one.code == code and not (one.refused and self._refuses) for one in known):
                self._candidates = list(members)
                widths = {identity.workers: identity for identity in reversed(members)}
                self._queue = [widths[width] for width in sorted(widths)][:MOST_WIDTHS]
                self._narrowest = min(widths)
                self._nodes, self._devices = list(cluster.nodes), cluster.devices
                self._launch_next()
        return self.is_busy

    @property
    def is_proving(self) -> bool:
        """Whether a checkpoint of a member in training is or will be tried."""
        return bool(self._unproven) or (self._running is not None and self._running.proves)

    @property
    def _refuses(self) -> bool:
        return self._ensemble.rehearsal == "refuse"

    def prove(self, identity: Identity, saved: Mapping[str, Any]) -> None:
        """Have a checkpoint tried of a member that is another model than it was, behind the rehearsed epochs.

        The first member of those that change in one epoch stands for all.
        """
        epoch, known = saved["epoch"], self._session.run.rehearsed
        is_open = self._ensemble.rehearsal is not None and self._ensemble.train is not None and known
        if is_open and saved["step"] == 0 and epoch > known[0].epochs and epoch not in self._changed:
            self._changed.add(epoch)
            self._unproven.append(identity)
            self._launch_next()

    def _launch_next(self) -> None:
        if self._running is not None:
            return
        self._sum, self._began, self._errors = _Sum(), self._session.now, {}
        if not self._queue and self._unproven:
            identity = self._unproven.pop(0)
            self._nodes, self._devices = self._session.nodes.packed, self._session.nodes.devices
            saved = self._session.run.members[identity.member].checkpoint  # the last: earlier ones may be gone
            if saved is not None:
                self._launch(identity, None, proves=(Path(saved.path).name, saved.digest))
        while self._queue and self._running is None:
            identity = self._queue.pop(0)
            if not self._launch(identity, None):
                self._log(identity, failed="no node has room for it")

    def _launch(
        self, identity: Identity, trained: int | None, again: int | None = None, proves: Any = None
    ) -> bool:
        """Launch the processes of a part; returns whether there is room for them."""
        asking = dataclasses.replace(identity, member=REHEARSAL)
        placed = pack([asking], [], self._nodes, self._devices)
        if not placed:
            return False
        placement, self._number = placed[0], self._number + 1
        own = dataclasses.replace(asking, cpus_per_worker=0.0, gpus_per_worker=0.0, memory_gb=None)
        alike = [one for one in self._candidates if one.workers == identity.workers and one != identity]
        request = RehearsalRequest(members=[identity, *alike], trained=trained, again=again, proves=proves)
        meeting = rendezvous_file(self._run_dir, REHEARSAL, self._number)
        nodes: dict[str, Node] = {node.name: node for node in self._nodes}
        jobs = [
            Job(
                run_dir=str(self._run_dir.path),
                identity=own,
                attempt=self._number,
                rank=rank,
                rendezvous=meeting.as_uri() if identity.workers > 1 else None,
                interface=nodes[placement.find_node(rank)].interface if placement.nodes else "lo",
                local_world=placement.count_ranks(placement.find_node(rank)),
                device="cpu" if device is None else "cuda:0",
                gpu=device,
                feeder=None,
                node=placement.find_node(rank),
                timeout_s=self._ensemble.hang_timeout_s,
                rehearsal=request,
            )
            for rank, device in enumerate(placement.devices)
        ]
        ranks = set(range(len(jobs)))
        self._running = _Part(identity, self._number, trained, ranks, self._session.now, proves is not None)
        if trained is None and proves is None:
            self._session.actions.append(RemoveFolder(REHEARSAL))
            self._session.log("rehearsing", of=identity.member, node=placement.node)
        self._session.actions.append(Launch(jobs, placement.devices))
        return True

    def handle(self, event: Mapping[str, Any]) -> bool:
        """Handle an event; returns whether it came from processes that rehearse."""
        if event.get("member") != REHEARSAL:
            return False
        part = self._running
        if part is None or event["attempt"] != part.number:
            return True
        part.last_event_at = self._session.now
        kind = event["type"]
        if kind == "rehearsed" and (part.report is None or event["is_late"] or event["refused"]):
            part.report = event
        elif kind in ("launch_failed", "failed"):
            part.detail = event.get("detail") or event.get("error") or part.detail
            part.ranks = set() if kind == "launch_failed" else part.ranks
        elif kind == "exited":
            part.ranks.discard(event["rank"])
            if event["outcome"] not in ("finished", "failed"):
                detail = str(event.get("detail") or "ended").partition("; see ")[0]  # its log goes with the folder
                part.detail = f"rank {event['rank']} {detail}"
                self._session.actions += [Kill(REHEARSAL)] if part.ranks else []
        if not part.ranks:
            self._running = None
            self._end(part)
        return True

    def watch(self) -> None:
        """Kill processes that hang."""
        part, limit_s = self._running, self._ensemble.hang_timeout_s
        if part is not None and self._session.now - part.last_event_at > limit_s:
            part.detail, part.last_event_at = f"it gave no sign of life for {limit_s:g} s", self._session.now
            self._session.actions.append(Kill(REHEARSAL))

    def stop(self) -> None:
        """Rehearse nothing more, and kill the processes that do."""
        self._queue.clear()
        self._unproven.clear()
        if self._running is not None:
            self._session.actions.append(Kill(REHEARSAL))

    def _end(self, part: _Part) -> None:
        """The last process of a part has exited."""
        if self._session.stop_reason is not None:
            self._queue.clear()
            self._session.actions.append(RemoveFolder(REHEARSAL))
            return
        report: Mapping[str, Any] = part.report or {"failed": part.detail, "is_late": False}
        if part.proves:
            self._sum.refused += report.get("refused", [])
            if report["failed"] is not None and self._tries < MOST_TRIES:  # a later checkpoint has taken its place
                self._tries += 1
                self._unproven.append(part.identity)
            if self._sum.refused:
                self._log(part.identity, failed=None, is_proof=True)
            else:
                self._launch_next()
            return
        self._epochs = max(self._epochs, report.get("epochs", 0))
        self._sum.refused += report.get("refused", [])
        self._sum.remarks += report.get("remarks", [])
        if (predicted := report.get("predicted")) is not None:
            task, values = Task.from_record(predicted["task"]), np.asarray(predicted["values"], np.float32)
            if why := explain_uncombinable(self._ensemble, task, values):
                self._sum.remarks.append(f"{UNCOMBINED}: {why}")
        failed = report["failed"]
        if failed is not None and report["is_late"]:
            failed = self._note_late(part.identity, failed, report["failed_in"])
            if failed is None:  # another member shows whether it is of all
                return
        is_sound = failed is None and not (self._sum.refused and self._refuses)
        # Of members that are wider than others only the workers are tried, as the resume is the same.
        if is_sound and part.trained is None and part.identity.workers == self._narrowest:
            others = {one.member: one for one in self._candidates}
            self._queue += [others[name] for name in report.get("others", []) if part.number == 1]
            if self._launch(part.identity, part.number):
                return
        if report.get("is_unclear") and self._launch(part.identity, part.trained, again=part.number):
            return
        self._log(part.identity, failed=failed)

    def _note_late(self, identity: Identity, failed: str, where: str) -> str | None:
        """Refuse what two members, or the only one, meet after their first step; else try another one."""
        self._errors[identity.member] = _NUMBER.sub("0", failed)  # sizes are of the member
        others = [
            one for one in self._candidates if one.params != identity.params and one.workers == identity.workers
        ]
        if len(self._errors) == 1 and others and self._launch(others[-1], None):
            return None
        if len(set(self._errors.values())) == 1:
            self._sum.refused.append("; ".join(filter(None, (failed, where))))
            return ""
        return failed

    def _log(self, identity: Identity, failed: str | None, *, is_proof: bool = False) -> None:
        """Say what was found; the next one is rehearsed, or members start, or the run does not."""
        event = Rehearsed(
            of=identity.member,
            code=self._session.run.header.code,
            refused=self._sum.refused,
            remarks=self._sum.remarks,
            failed=failed or None,
            epochs=self._epochs,
            took_s=self._session.now - self._began,
        )
        fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in ("v", "t")}
        self._session.log("rehearsed", **fields)
        if event.refused and self._refuses and not is_proof:
            self.refusal = describe_refusal(identity.member, event.refused)
            self._queue.clear()
        self._session.actions.append(RemoveFolder(REHEARSAL))
        self._launch_next()
