"""Rehearses a member before the first epoch counts: what a run will need of the user's code is tried on it.

One process trains short epochs and writes checkpoints. A fresh one goes on from these, by the code of a resume,
and must go the same way: equal before its first step, equal weights after it (docs/concepts/rehearsal.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ensemble.comm import Communicator, SingleRank
from ensemble.meter import CpuClock
from ensemble.spec import Ensemble, Identity
from ensemble.store import RunDir, load_checkpoint
from ensemble.store.files import write_json
from ensemble.store.member import UNCOMBINED
from ensemble.train.fit_to_task import explain_predictions, predict_few
from ensemble.train.forward_errors import describe_error, find_line
from ensemble.train.gather import gather_json
from ensemble.train.job import (
    PROFILE,
    REHEARSAL,
    Diverged,
    Inbox,
    Job,
    LabelError,
    Outcome,
    RehearsalRequest,
    StopTraining,
)
from ensemble.train.model_signature import list_structures
from ensemble.train.own_tensors import note_process, use_base
from ensemble.train.rehearsed_loop import LEAST_S, SHARE, RehearsedLoop
from ensemble.train.reporter import append_log
from ensemble.train.same_predictions import explain_varying
from ensemble.train.seeding import process_settings
from ensemble.train.state import TrainState
from ensemble.train.trajectory import (
    AFTER,
    DECIDING,
    HIDDEN,
    Digests,
    describe_weights,
    find_change,
    find_differences,
    measure_distance,
    name_paths,
)
from ensemble.train.worker import check_gpu, classify, connect

Emit = Callable[[dict[str, Any]], None]

HEARTBEAT_S = 1.0
#: How much further apart two processes may be than one is from itself, where training is not reproducible.
_SPREADS, _ROUNDING = 4.0, 1e-5
#: How far several workers may be from one, in parts of the way that it has gone: rounding, and Adam's first steps.
_ALIKE = 0.25
_BROKEN = "a resume would not continue this training"
_OUTSIDE = (
    ": does a number, a list or a generator live in a variable? Keep it as a buffer, by member.state(), or in "
    "MemberCallback.state_dict()"
)


@dataclass
class Findings:
    """What a rehearsal has found.

    Attributes:
        refused: why the run should not start.
        remarks: what its user should know.
        failed, failed_in: the error that ended it early, and the batch.
        is_late: whether members would meet it after their first step.
        others: the first member of each further structure.
        epochs: short ones that were trained.
        predicted: the task, and values of a few samples.
        is_unclear: whether another fresh process is to repeat what this one has done.
    """

    refused: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    failed: str | None = None
    failed_in: str = ""
    is_late: bool = False
    others: list[str] = field(default_factory=list)
    epochs: int = 0
    predicted: dict[str, Any] | None = None
    is_unclear: bool = False


def run(job: Job, ensemble: Ensemble, emit: Emit, inbox: Inbox, clock: CpuClock | None = None) -> Outcome:
    """Run one rank of a part of a rehearsal.

    Rank 0 emits `rehearsing`, as a sign of life, and at the end `rehearsed` with the fields of `Findings`; another
    rank emits it where it fails. All CPU time has the role "profile".
    """
    clock, findings = clock or CpuClock(), Findings()
    outcome: Outcome = "finished"
    before = clock.switch("profile")
    try:
        with contextlib.ExitStack() as leaving:
            device = torch.device(job.device)
            leaving.enter_context(process_settings(job.identity.threads, device))
            check_gpu(job.gpu, device)
            communicator = connect(job, device)
            leaving.callback(communicator.close)
            note_process()
            leaving.enter_context(use_base(job.run_dir, ensemble.recipe, device))
            _Rehearsal(job, ensemble, communicator, emit, inbox, findings).perform()
    except StopTraining as ended:
        outcome = ended.outcome
    except (Exception, SystemExit) as error:
        _log(job, error)
        reason, outcome = classify(error)[0], "failed"
        findings.failed = findings.failed or (None if findings.refused else describe_error(error))
        findings.is_late = isinstance(error, LabelError) or (findings.is_late and reason == "error")
        if reason == "lost" and job.rank:  # the rank that it has lost says why
            findings.failed = None
    finally:
        emit(clock.report(job.node, "profile", rank=job.rank))
        clock.switch(before)
    if outcome in ("finished", "failed") and (job.rank == 0 or findings.failed or findings.refused):
        emit({"type": "rehearsed", "member": REHEARSAL, "attempt": job.attempt, **vars(findings)})
    return outcome


def rehearse_here(ensemble: Ensemble, member: Identity, directory: str) -> Findings:
    """Rehearse a member in this process, as one worker, for a dry run; files in `directory` are left behind."""
    from ensemble.train.profile import make_job_here

    reports: list[dict[str, Any]] = []
    alone, clock, found = dataclasses.replace(member, workers=1), CpuClock(), Findings()
    for trained, again in ((None, None), (0, None), (0, 0)):
        request = RehearsalRequest(members=[alone], trained=trained, again=again)
        run(make_job_here(ensemble, alone, directory, rehearsal=request), ensemble, reports.append, Inbox(), clock)
        report = next(one for one in reversed(reports) if one["type"] == "rehearsed")
        found.refused, found.remarks = found.refused + report["refused"], found.remarks + report["remarks"]
        found.failed, found.is_late = report["failed"], report["is_late"]
        if found.failed or found.refused or (trained == 0 and not report["is_unclear"]):
            break
    return found


def _log(job: Job, error: BaseException) -> None:
    append_log(RunDir(job.run_dir).log(PROFILE), "".join(traceback.format_exception(error)))


@dataclass
class _Record:
    """What the first process has written for the fresh one.

    Attributes:
        trajectory: by epoch.
        checkpoints: the name and the digest of each, by the number of epochs before it.
        last: short epochs that were trained.
        left_s: seconds that are left for the fresh process.
    """

    trajectory: dict[str, Digests]
    checkpoints: dict[str, tuple[str, str]]
    last: int
    epoch_s: float
    left_s: float

    def plan(self) -> list[tuple[int, int]]:
        """Return from which checkpoints a process goes on, and to which epochs: as far as there is time."""
        starts = sorted(map(int, self.checkpoints))
        middle = max(start for start in starts if start <= (self.last + 1) // 2)
        whole = dict.fromkeys([(middle, self.last), (starts[0], self.last), (starts[-1], self.last)])
        if sum(until - start for start, until in whole) * self.epoch_s <= self.left_s:
            return list(whole)
        return list(dict.fromkeys([(middle, min(middle + 1, self.last)), (starts[-1], self.last)]))


class _Rehearsal:
    def __init__(
        self, job: Job, ensemble: Ensemble, comm: Communicator, emit: Emit, inbox: Inbox, findings: Findings
    ) -> None:
        assert job.rehearsal is not None
        self._job, self._request, self._comm, self._emit, self._inbox = job, job.rehearsal, comm, emit, inbox
        self._ensemble, self._findings, self._heard_at = ensemble, findings, 0.0
        self._folder = RunDir(job.run_dir).member(REHEARSAL)
        trained = job.attempt if self._request.trained is None else self._request.trained
        self._record_file = self._find_file("record", trained)

    def _find_file(self, what: str, attempt: int) -> Path:
        return self._folder / f"{what}-{attempt}.json"

    def perform(self) -> None:
        """Train, or go on from what was trained, or from a checkpoint of a member in training."""
        self._say_alive()
        if self._request.proves is not None:
            self._prove(*self._request.proves)
        elif self._request.trained is None:
            self._findings.others += list_structures(self._ensemble, self._request.members)
            self._train()
        else:
            self._resume(_Record(**json.loads(self._record_file.read_text(encoding="utf-8"))))

    def _say_alive(self) -> None:
        if self._job.rank == 0 and time.monotonic() >= self._heard_at + HEARTBEAT_S:
            self._heard_at = time.monotonic()
            self._emit({"type": "rehearsing", "member": REHEARSAL, "attempt": self._job.attempt})

    def _make_loop(self, comm: Communicator | None = None, folder: str = REHEARSAL, **job: Any) -> RehearsedLoop:
        job_now = dataclasses.replace(self._job, **job)
        return RehearsedLoop(job_now, self._ensemble, comm or self._comm, self._inbox, self._say_alive, folder)

    # --- the first process --------------------------------------------------------------------------------

    def _train(self) -> None:
        """Train short epochs, write checkpoints, and try the predictions."""
        loop, findings = self._make_loop(), self._findings
        try:
            loop.run(lambda state: self._check_trained(state, loop.trajectory))
        except Exception as error:
            findings.failed = describe_error(error) + find_line(error)
            findings.failed_in = "" if isinstance(error, LabelError) else loop.failed_in
            findings.is_late = loop.is_late and not isinstance(error, Diverged)
            raise
        findings.epochs = last = max(loop.trajectory)
        left_s = max(LEAST_S, SHARE * loop.whole_epoch_s) - last * loop.epoch_s
        trajectory = {str(epoch): digests for epoch, digests in loop.trajectory.items()}
        record = _Record(trajectory, loop.checkpoints, last, loop.epoch_s, left_s)
        if self._comm.rank == 0:
            write_json(self._record_file, vars(record))
        if self._comm.world > 1:
            why = self._compare_with_one(record) if self._comm.rank == 0 else None
            findings.refused += filter(None, [gather_json(self._comm, why)[0]])

    def _check_trained(self, state: TrainState, trajectory: Mapping[int, Digests]) -> None:
        """Try the predictions of a member at the end of its short epochs, and compare its ranks."""
        findings, last = self._findings, max(trajectory)
        weights = {path: digest for path, digest in trajectory[last].items() if path.startswith("weights.")}
        shares = gather_json(self._comm, weights)
        if unequal := [path for path in weights if len({share.get(path) for share in shares}) > 1]:
            findings.refused.append(
                f"the workers have different weights after {last} short epochs ({name_paths(unequal)}): what is "
                "trained is exchanged if the optimizer that member.prepare() got holds it; buffers need the same "
                "values on all workers"
            )
        if not find_differences(trajectory.get(0, {}), weights, ("weights",)) and weights:
            findings.remarks.append("no weight has changed in the short epochs: is the learning rate 0?")
        if self._comm.rank == 0:
            findings.remarks += (unfit := list(explain_predictions(state)))
            if not any(text.startswith(UNCOMBINED) for text in unfit):
                findings.predicted = predict_few(state)
                findings.refused += explain_varying(state)

    # --- the fresh process --------------------------------------------------------------------------------

    def _resume(self, record: _Record) -> None:
        """Go on from the checkpoints of the first process, and compare; all ranks do the same."""
        if self._request.again is not None:
            text = self._find_file("again", self._request.again).read_text(encoding="utf-8")
            self._repeat(record, json.loads(text))
            return
        for start, until in record.plan():
            loop = self._go_on(record, start, until)
            why = self._explain(record, loop, start)
            self._findings.refused += filter(None, [why])
            if why is not None or self._findings.is_unclear:
                return

    def _go_on(self, record: _Record, start: int, until: int, keeps: int = -1) -> RehearsedLoop:
        """Train on from a checkpoint."""
        loop = self._make_loop(checkpoints=[record.checkpoints[str(start)]])
        loop.last, loop.is_end, loop.keeps = until, until == record.last, (keeps,)
        self._try(loop, f"a resume after epoch {start}")
        return loop

    def _try(self, loop: RehearsedLoop, what: str) -> None:
        """Run a loop from a checkpoint; what it raises ends this process, as other ranks would wait for it."""
        try:
            loop.run()
        except Exception as error:
            if classify(error)[0] in ("error", "impossible", "nan"):
                text = (
                    " ".join(str(error).split()) if "loading state_dict" in str(error) else describe_error(error)
                )
                why = text.replace(f"{REHEARSAL} cannot", "it cannot")
                self._findings.refused.append(f"{what} would fail: {why}{find_line(error)}")
            raise

    def _differ(self, one: Digests, other: Digests, parts: tuple[str, ...]) -> list[str]:
        """Return the paths in these parts that differ on rank 0."""
        differing: list[str] = gather_json(self._comm, find_differences(one, other, parts))[0]
        return differing

    def _explain(self, record: _Record, loop: RehearsedLoop, start: int) -> str | None:
        """Return why a member that was resumed goes another way; None where it goes the same."""
        before = {int(epoch): digests for epoch, digests in record.trajectory.items()}
        if differing := self._differ(before[start], loop.trajectory[start], DECIDING):
            changed = find_change(before, differing[0], start)
            cause = f", which changed in epoch {changed + 1}" if changed is not None else ""
            return f"{_BROKEN}: after one in epoch {start + 1} {name_paths(differing)}{cause}"
        for epoch in sorted(set(loop.trajectory) - {start}):
            if differing := self._differ(before[epoch], loop.trajectory[epoch], AFTER):
                self._findings.is_unclear = True
                if self._comm.rank == 0:
                    about = {"start": start, "epoch": epoch, "differing": differing}
                    write_json(self._find_file("again", self._job.attempt), {**about, **loop.trajectory[epoch]})
                return None
        return None

    def _repeat(self, record: _Record, about: dict[str, Any]) -> None:
        """Go the way of another fresh process again: does training not repeat itself, or does a resume not?"""
        start, epoch, differing = (about.pop(name) for name in ("start", "epoch", "differing"))
        loop = self._go_on(record, start, epoch)
        if self._differ(about, loop.trajectory[epoch], AFTER):
            self._findings.remarks.append(
                f"your training is not reproducible: {name_paths(differing)} where two processes go on "
                "from one checkpoint (a generator of your own, or atomic operations on a GPU)"
            )
            self._findings.refused += filter(None, [self._compare_spreads(record, start)])
            return
        hidden = self._differ(record.trajectory[str(start)], loop.trajectory[start], HIDDEN)
        cause = f"before, {name_paths(hidden)}" if hidden else f"all that the checkpoint holds was equal{_OUTSIDE}"
        when = f"in epoch {epoch}" if epoch > start + 1 else "after its first steps"
        self._findings.refused.append(f"{_BROKEN}: {when} {name_paths(differing)}; {cause}")

    def _compare_spreads(self, record: _Record, start: int) -> str | None:
        """Return why two processes are further apart than one is from itself; None where they are not."""
        until = min((int(other) for other in record.checkpoints if int(other) > start), default=None)
        if until is None:
            return None
        weights = [self._go_on(record, start, until, keeps=until).weights[until] for _ in range(2)]
        written = self._read_weights(record, until)
        apart, spread = measure_distance(written, weights[0]), measure_distance(*weights)
        text = f"{_BROKEN}: weights are {apart:.3g} from those without one, only {spread:.3g} from each other"
        is_alike = apart <= _SPREADS * spread + _ROUNDING * measure_distance(written, {})
        found: str | None = gather_json(self._comm, None if is_alike else text + _OUTSIDE)[0]
        return found

    def _read_weights(self, record: _Record, epoch: Any) -> Mapping[str, Tensor]:
        """Return the weights in training of a checkpoint."""
        saved = load_checkpoint(self._folder / record.checkpoints[str(epoch)][0], ("model", "kept"))
        weights: Mapping[str, Tensor] = (saved.get("kept") or {}).get("trained", saved["model"])
        return weights

    def _compare_with_one(self, record: _Record) -> str | None:
        """Return how far several workers are from one worker after the first epoch; None where they are alike.

        With batch normalization they are not alike, and what draws random numbers is as far from itself.
        """
        own, loops = dataclasses.replace(self._job.identity, workers=1), list[RehearsedLoop]()
        for alone in (SingleRank(), _OtherDraws()):
            loops.append(loop := self._make_loop(alone, identity=own, rendezvous=None))
            loop.last, loop.is_end, loop.keeps = 1, record.last == 1, (0, 1)
            try:
                loop.run()
            except Exception:  # one worker may not have the memory for a whole batch
                return None
            if loop.has_batch_norm:
                return None
        one = loops[0].weights[1]
        moved = measure_distance(one, loops[0].weights[0]) or 1.0
        several, others = self._read_weights(record, 1), loops[1].weights[1]
        apart, spread = (measure_distance(one, other) / moved for other in (several, others))
        if apart <= _ALIKE + _SPREADS * spread:
            return None
        return (
            f"{self._comm.world} workers train other weights than one on the same batches: after a short epoch "
            f"they are {apart:.2g} of the way apart that one has gone: is a loss divided by a worker's samples?"
        )

    # --- a member in training -----------------------------------------------------------------------------

    def _prove(self, name: str, digest: str | None) -> None:
        """Go on from a checkpoint of a member in training, up to the first step, and compare the weights."""
        member = self._request.members[0].member
        saved = load_checkpoint(RunDir(self._job.run_dir).member(member) / name, digest=digest)
        loop = self._make_loop(folder=member, checkpoints=[(name, digest)])
        loop.last, loop.is_end = saved["position"]["epoch"], False
        self._try(loop, f"before epoch {loop.last + 1} it became another model than it was, and a resume")
        written = describe_weights((saved.get("kept") or {}).get("trained", saved["model"]))
        if differing := self._differ(written, loop.trajectory[loop.last], ("weights",)):
            self._findings.refused.append(f"{_BROKEN}: {name_paths(differing)} in epoch {loop.last + 1}")


class _OtherDraws(SingleRank):
    """One worker that draws other random numbers."""

    rank = 1
