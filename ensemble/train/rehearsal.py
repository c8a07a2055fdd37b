"""Rehearses a member before the first epoch counts: what a run will need of the user's code is tried on it.

One process trains short epochs and writes checkpoints. A fresh one goes on from these, by the code of a resume,
and must go the same way: equal before its first step, equal weights after it (docs/concepts/rehearsal.md).
"""

from __future__ import annotations

import contextlib
import copy
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
from ensemble.spec import Ensemble, Identity, Recipe
from ensemble.spec.recipe import has_own_loop
from ensemble.store import DamagedError, RunDir, load_checkpoint
from ensemble.store.files import write_json
from ensemble.store.member import UNCOMBINED
from ensemble.train.batchnorm import BATCH_NORMS
from ensemble.train.checkpoint import Checkpointer, Position
from ensemble.train.fit_to_task import explain_predictions, predict_few
from ensemble.train.forward_errors import describe_error
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
from ensemble.train.member import TrainContext
from ensemble.train.model_signature import build_without_memory
from ensemble.train.own_tensors import note_process, own_state, use_base
from ensemble.train.recipe import run_training_loop
from ensemble.train.reporter import EventReporter, append_log
from ensemble.train.same_predictions import explain_varying
from ensemble.train.seeding import process_settings, seed_everything
from ensemble.train.short_epochs import EndOfRehearsal, ShortData
from ensemble.train.state import TrainState
from ensemble.train.trajectory import (
    DECIDING,
    Digests,
    describe_state,
    describe_weights,
    find_change,
    find_differences,
)
from ensemble.train.worker import check_gpu, classify, connect

Emit = Callable[[dict[str, Any]], None]

#: Short epochs at most, and at least where so many are declared.
MOST_EPOCHS, LEAST_EPOCHS = 12, 3
#: What a rehearsal may take: this share of an epoch, or so many seconds.
SHARE, LEAST_S = 0.1, 3.0
#: Structures of models that are rehearsed, at most.
MOST_STRUCTURES = 3
HEARTBEAT_S = 1.0
#: How much further apart two processes may be than one is from itself, where training is not reproducible.
_SPREADS, _ROUNDING = 4.0, 1e-5
_ENDS = "the rehearsal ends here"
#: How far several workers may be from one, in parts of the way that it has gone: rounding, and Adam's first steps.
_ALIKE = 0.25
_NAMED = 2
#: Of a trajectory after its first step.
_AFTER = ("weights", "kept", "requires_grad")


@dataclass
class Trip:
    """What one process has seen of a member's training, from the beginning or from a checkpoint.

    Attributes:
        trajectory: the state where each epoch began, and where the last one ended.
        weights: those in training, where they were to be kept.
        epoch_s: seconds of a short epoch.
    """

    trajectory: dict[int, Digests] = field(default_factory=dict)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    epoch_s: float = 0.0


@dataclass
class Findings:
    """What a rehearsal has found.

    Attributes:
        refused: why the run should not start.
        remarks: what its user should know.
        failed: the error that ended it early; is_late: whether members would meet it after their first step.
        others: the first member of each further structure.
        epochs: short ones that were trained.
        predicted: the task, and values of a few samples.
    """

    refused: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    failed: str | None = None
    is_late: bool = False
    others: list[str] = field(default_factory=list)
    epochs: int = 0
    predicted: dict[str, Any] | None = None


def run(job: Job, ensemble: Ensemble, emit: Emit, inbox: Inbox, clock: CpuClock | None = None) -> Outcome:
    """Run one rank of a part of a rehearsal.

    Rank 0 emits `rehearsing`, as a sign of life, and at the end `rehearsed` with the fields of `Findings`; another
    rank emits it where it fails. All CPU time has the role "profile".
    """
    clock, findings, outcome = clock or CpuClock(), Findings(), "finished"
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
        append_log(RunDir(job.run_dir).log(PROFILE), "".join(traceback.format_exception(error)))
        reason, outcome = classify(error)[0], "failed"
        findings.failed = findings.failed or f"{describe_error(error)}"
        findings.is_late = isinstance(error, LabelError) or (findings.is_late and reason == "error")
        if reason == "lost" and job.rank:
            findings = Findings()
    finally:
        emit(clock.report(job.node, "profile", rank=job.rank))
        clock.switch(before)
    if outcome in ("finished", "failed") and (job.rank == 0 or findings.failed):
        part = "train" if (job.rehearsal and job.rehearsal.trained is None) else "resume"
        emit({"type": "rehearsed", "member": REHEARSAL, "attempt": job.attempt, "part": part, **vars(findings)})
    return outcome  # type: ignore[return-value]


def rehearse_here(ensemble: Ensemble, member: Identity, directory: str) -> Findings:
    """Rehearse a member in this process, as one worker, for a dry run; files in `directory` are left behind."""
    from ensemble.train.profile import make_job_here

    reports: list[dict[str, Any]] = []
    alone, clock = dataclasses.replace(member, workers=1), CpuClock()
    for trained in (None, 0):
        request = RehearsalRequest(members=[alone], trained=trained)
        run(make_job_here(ensemble, alone, directory, rehearsal=request), ensemble, reports.append, Inbox(), clock)
        report = next(one for one in reversed(reports) if one["type"] == "rehearsed")
        if report["failed"] or report["refused"]:
            break
    findings = [one for one in reports if one["type"] == "rehearsed"]
    joined = {name: [text for one in findings for text in one[name]] for name in ("refused", "remarks")}
    return Findings(**joined, failed=report["failed"], is_late=report["is_late"])  # type: ignore[arg-type]


class _Rehearsal:
    def __init__(
        self, job: Job, ensemble: Ensemble, comm: Communicator, emit: Emit, inbox: Inbox, findings: Findings
    ) -> None:
        assert job.rehearsal is not None
        self._job, self._request, self._comm, self._emit, self._inbox = job, job.rehearsal, comm, emit, inbox
        self._ensemble = copy.copy(ensemble)
        object.__setattr__(self._ensemble, "checkpoint_every", 1)
        self._findings, self._heard_at = findings, 0.0
        self._member = self._request.members[0]
        trained = job.attempt if self._request.trained is None else self._request.trained
        self._record_file = RunDir(job.run_dir).member(REHEARSAL) / f"record-{trained}.json"

    def perform(self) -> None:
        self._say_alive()
        if self._request.proves is not None:
            self._prove(self._request.proves)
        elif self._request.trained is None:
            self._findings.others += _list_structures(self._ensemble, self._request.members)
            self._train()
        else:
            self._resume(_Record(**json.loads(self._record_file.read_text(encoding="utf-8"))))

    def _say_alive(self) -> None:
        if self._job.rank == 0 and time.monotonic() >= self._heard_at + HEARTBEAT_S:
            self._heard_at = time.monotonic()
            event = {"type": "rehearsing", "member": REHEARSAL, "attempt": self._job.attempt}
            self._emit({**event, "of": self._member.member})

    # --- the first process --------------------------------------------------------------------------------

    def _train(self) -> None:
        """Train short epochs, write checkpoints, and try the predictions."""
        loop = _Loop(self._job, self._ensemble, self._comm, self._inbox, self._say_alive)
        trip = Trip()
        try:
            loop.run(trip, checks=self._check_trained)
        except Exception as error:
            self._note_failure(loop, error)
            raise
        last, budget_s = max(trip.trajectory), max(LEAST_S, SHARE * loop.whole_epoch_s)
        record = _Record(
            {str(epoch): digests for epoch, digests in trip.trajectory.items()},
            loop.checkpoints,
            last,
            trip.epoch_s,
            max(0.0, budget_s - last * trip.epoch_s),
        )
        self._findings.epochs = last
        if self._job.rank == 0:
            write_json(self._record_file, vars(record))

    def _note_failure(self, loop: _Loop, error: Exception) -> None:
        where = "" if isinstance(error, LabelError) else loop.failed_in
        self._findings.failed = "; ".join(filter(None, (describe_error(error), where)))
        self._findings.is_late = loop.has_stepped and not isinstance(error, Diverged)

    def _check_trained(self, state: TrainState, trip: Trip) -> None:
        """Try the predictions of a member at the end of its short epochs, and compare its ranks."""
        findings, last = self._findings, max(trip.trajectory)
        own = trip.trajectory[last]
        weights = {path: digest for path, digest in own.items() if path.startswith("weights.")}
        shares = gather_json(self._comm, weights)
        unequal = [path for path in weights if len({share.get(path) for share in shares}) > 1]
        if unequal:
            findings.refused.append(
                f"the workers have different weights after {last} short epochs: {_name_paths(unequal)}: what is "
                "trained is exchanged if the optimizer that member.prepare() got holds it; buffers need the same "
                "values on all workers"
            )
        trained = [path for path in weights if own.get(f"requires_grad.{path.partition('.')[2]}") == "True"]
        if trained and all(trip.trajectory.get(0, {}).get(path) == own[path] for path in trained):
            findings.remarks.append("no weight has changed in the short epochs: is the learning rate 0?")
        if self._comm.rank == 0:
            findings.remarks += (unfit := list(explain_predictions(state)))
            if not any(text.startswith(UNCOMBINED) for text in unfit):
                findings.predicted = predict_few(state)
                findings.refused += explain_varying(state)

    # --- the fresh process --------------------------------------------------------------------------------

    def _resume(self, record: _Record) -> None:
        """Go on from the checkpoints of the first process, and compare."""
        for start, until in record.plan():
            trip = self._go_on(record, start, until)
            why = None if trip is None else self._explain(record, trip, start)
            if (why := gather_json(self._comm, why)[0]) is not None:
                self._findings.refused.append(why)
            if trip is None or why is not None:
                return
        if self._comm.world > 1:
            why = self._compare_with_one(record) if self._comm.rank == 0 else None
            self._findings.refused += filter(None, [gather_json(self._comm, why)[0]])

    def _compare_with_one(self, record: _Record) -> str | None:
        """Return how far several workers are from one worker after the first epoch; None where they are alike.

        With batch normalization they are not alike, and what draws random numbers is as far from itself.
        """
        own = dataclasses.replace(self._job.identity, workers=1)
        job, trips = dataclasses.replace(self._job, identity=own, rendezvous=None), [Trip(), Trip()]
        for trip, alone in zip(trips, (SingleRank(), _OtherDraws()), strict=True):
            loop = _Loop(job, self._ensemble, alone, self._inbox, self._say_alive, is_resumed=True)
            loop.last, loop.is_end, loop.keeps = 1, record.last == 1, (0, 1)
            try:
                loop.run(trip)
            except Exception:  # one worker may not have the memory for a whole batch
                return None
            if loop.has_batch_norm:
                return None
        name, _ = record.checkpoints["1"]
        saved = load_checkpoint(self._record_file.parent / name, ("model", "kept"))
        several, one = (saved.get("kept") or {}).get("trained", saved["model"]), trips[0].weights[1]
        moved = _distance(one, trips[0].weights[0]) or 1.0
        apart, spread = (_distance(one, other) / moved for other in (several, trips[1].weights[1]))
        if apart <= _ALIKE + _SPREADS * spread:
            return None
        return (
            f"{self._comm.world} workers train other weights than one on the same batches: after a short epoch "
            f"they are {apart:.2g} of the way apart that one has gone: is a loss divided by a worker's samples?"
        )

    def _prove(self, checkpoint: tuple[str, str | None]) -> None:
        """Go on from a checkpoint of a member in training, up to the first step, and compare the weights."""
        folder = RunDir(self._job.run_dir).member(self._member.member)
        try:
            saved = load_checkpoint(folder / checkpoint[0], digest=checkpoint[1])
        except DamagedError as error:
            self._findings.failed = str(error)
            return
        job = dataclasses.replace(self._job, checkpoints=[checkpoint])
        loop = _Loop(job, self._ensemble, self._comm, self._inbox, self._say_alive, is_resumed=True)
        loop.last, loop.is_end, loop.folder, trip = saved["position"]["epoch"], False, self._member.member, Trip()
        failed = self._try(loop, trip, f"in epoch {loop.last} it is another model than it was, and a resume")
        written = describe_weights((saved.get("kept") or {}).get("trained", saved["model"]))
        differing = [] if failed else find_differences(written, trip.trajectory[loop.last], ("weights",))
        if differing:
            self._findings.refused.append(f"{_BROKEN}: behind epoch {loop.last} {_name_paths(differing)} differs")

    def _go_on(self, record: _Record, start: int, until: int, keeps: int | None = None) -> Trip | None:
        """Train on from a checkpoint; None where it fails, which is noted."""
        trip, job = Trip(), dataclasses.replace(self._job, checkpoints=[record.checkpoints[str(start)]])
        loop = _Loop(job, self._ensemble, self._comm, self._inbox, self._say_alive, is_resumed=True)
        loop.last, loop.is_end = until, until == record.last
        loop.keeps = () if keeps is None else (keeps,)
        return None if self._try(loop, trip, f"a resume behind epoch {start - 1}") else trip

    def _try(self, loop: _Loop, trip: Trip, what: str) -> bool:
        """Run a loop from a checkpoint; returns whether it failed, which is noted."""
        try:
            loop.run(trip)
        except Exception as error:
            if classify(error)[0] not in ("error", "impossible", "nan"):
                raise
            append_log(RunDir(self._job.run_dir).log(PROFILE), "".join(traceback.format_exception(error)))
            self._findings.refused.append(f"{what} would fail: {describe_error(error)}")
            return True
        return False

    def _explain(self, record: _Record, trip: Trip, start: int) -> str | None:
        """Return why a member that was resumed goes another way; None where it goes the same."""
        before = record.find_trajectory()
        differing = find_differences(before[start], trip.trajectory[start], DECIDING)
        if differing:
            changed = find_change(before, differing[0], start)
            cause = f", which changed in epoch {changed}" if changed is not None else ""
            return f"{_BROKEN}: after one behind epoch {start - 1} {_name_paths(differing)} differs{cause}"
        for epoch in sorted(trip.trajectory):
            if epoch > start and (differing := find_differences(before[epoch], trip.trajectory[epoch], _AFTER)):
                return self._explain_later(record, trip, start, epoch, differing)
        return None

    def _explain_later(
        self, record: _Record, trip: Trip, start: int, epoch: int, differing: list[str]
    ) -> str | None:
        """Return why weights differ after a resume; None where training does not even repeat itself."""
        again = self._go_on(record, start, epoch)
        is_noise = again is None or find_differences(again.trajectory[epoch], trip.trajectory[epoch], _AFTER)
        if not is_noise:
            hidden = find_differences(
                record.find_trajectory()[start], trip.trajectory[start], ("loose", "modules", "callbacks")
            )
            cause = (
                f"{_name_paths(hidden)} differed" if hidden else f"all that a checkpoint holds is equal{_OUTSIDE}"
            )
            when = f"in epoch {epoch - 1}" if epoch > start + 1 else "after its first steps"
            return f"{_BROKEN}: {when} {_name_paths(differing)} differs, though before it {cause}"
        self._findings.remarks.append(
            f"your training is not reproducible: {_name_paths(differing)} differs between two processes that go "
            "on from one checkpoint (a generator of your own, or atomic operations on a GPU)"
        )
        return self._compare_spreads(record, start)

    def _compare_spreads(self, record: _Record, start: int) -> str | None:
        """Return why two processes are further apart than one is from itself; None where they are not."""
        until = min((int(other) for other in record.checkpoints if int(other) > start), default=None)
        if until is None:
            return None
        trips = [self._go_on(record, start, until, keeps=until) for _ in range(2)]
        weights = [trip.weights[until] for trip in trips if trip is not None]
        if len(weights) < 2:
            return None
        name, _ = record.checkpoints[str(until)]
        saved = load_checkpoint(self._record_file.parent / name, ("model", "kept"))
        written = (saved.get("kept") or {}).get("trained", saved["model"])
        apart, spread = _distance(written, weights[0]), _distance(*weights)
        if apart <= _SPREADS * spread + _ROUNDING * _distance(written, {}):
            return None
        return (
            f"{_BROKEN}: its weights then are {apart:.3g} from those without one, and only {spread:.3g} from each "
            f"other{_OUTSIDE}"
        )


_BROKEN = "a resume would not continue this training"
_OUTSIDE = (
    ": is there a number, a list or a generator that lives in a variable? keep it as a buffer, by member.state(), "
    "or in MemberCallback.state_dict()"
)


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

    def find_trajectory(self) -> dict[int, Digests]:
        return {int(epoch): digests for epoch, digests in self.trajectory.items()}

    def plan(self) -> list[tuple[int, int]]:
        """Return from which checkpoints a process goes on, and to which epochs: as far as there is time."""
        starts = sorted(int(start) for start in self.checkpoints)
        middle = max(start for start in starts if start <= (self.last + 1) // 2)
        whole = dict.fromkeys([(middle, self.last), (starts[0], self.last), (starts[-1], self.last)])
        if sum(until - start for start, until in whole) * self.epoch_s <= self.left_s:
            return list(whole)
        near = dict.fromkeys([(middle, min(middle + 1, self.last)), (starts[-1], self.last)])
        return list(near)


class _Loop:
    """The training loop of a member over short epochs, in a process that is thrown away.

    Attributes:
        last: the short epochs to be trained; None until the first one shows what they take.
        is_end: whether the loop runs to its end then; else it is left.
        keeps: before which epochs the weights are kept.
        has_stepped, failed_in: where an error was raised: after a first step, in which batch.
    """

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        inbox: Inbox,
        say_alive: Callable[[], None],
        *,
        is_resumed: bool = False,
    ) -> None:
        own = dataclasses.replace(job.identity, member=REHEARSAL)
        self._job = dataclasses.replace(job, identity=own, rehearsal=None)
        self._ensemble, self._comm, self._inbox, self._say_alive = ensemble, comm, inbox, say_alive
        self._is_resumed, self._began = is_resumed, (0.0, 0.0)
        self.last: int | None = None
        self.keeps: tuple[int, ...] = ()
        self.has_batch_norm = False
        self.is_end, self.folder = True, REHEARSAL
        self.whole_epoch_s = 0.0
        self.checkpoints: dict[str, tuple[str, str]] = {}
        reads = SingleRank() if comm.world == 1 else comm
        self.data = ShortData(ensemble, own, None, torch.device(job.device), reads)
        self.has_stepped, self.failed_in = False, ""

    def run(self, trip: Trip, checks: Callable[[TrainState, Trip], None] | None = None) -> None:
        """Train the member; `checks` are called at the end, with its kept weights."""
        device = self.data._device
        with process_settings(self._job.identity.threads, device):
            seed_everything(self._job.identity.seed, device)
            reporter, saves = _Reporter(self._job, self._say_alive), _Checkpoints(self._job, self._ensemble, self)
            state = TrainState(self._job, self._ensemble, self._comm, reporter, self._inbox, self.data, saves)
            state.steps_per_epoch = self.data.steps
            member = TrainContext(state)
            state.throughput.memory = None
            self.data.on_epoch = lambda epoch: self._begin_epoch(state, trip, epoch)
            try:
                with contextlib.suppress(EndOfRehearsal):
                    run_training_loop(self._ensemble.recipe, member)
                    member.finish()
                self._note(state, trip, state.at.epoch)
                if checks is not None:
                    checks(state, trip)
            except Exception:
                self.has_stepped, self.failed_in = state.global_step > 0, self.data.describe_given()
                raise
            finally:
                member.close()

    def _begin_epoch(self, state: TrainState, trip: Trip, epoch: int) -> None:
        own, began = state.identity, self._began
        self._began = time.perf_counter(), time.process_time()
        if epoch == 0:
            modules = state.optimization.model.modules()
            self.has_batch_norm = any(isinstance(module, BATCH_NORMS) for module in modules)
        if self.last is None and own.epochs < LEAST_EPOCHS:
            self.last = own.epochs
        elif self.last is None and epoch == LEAST_EPOCHS - 1:  # the first epochs load what they need
            # Others may have the cores: what counts is what it uses.
            trip.epoch_s = min(now_s - then_s for now_s, then_s in zip(self._began, began, strict=True))
            self.last = gather_json(self._comm, self._choose_last(own, trip.epoch_s))[0]
        self._note(state, trip, epoch)
        if self.last is not None and epoch >= self.last:
            raise EndOfRehearsal
        ends = epoch + 1 == self.last and self.is_end and self.last < own.epochs
        if ends and not state.steps_elsewhere:
            state.at.stop_asked = _ENDS

    def _choose_last(self, own: Identity, epoch_s: float) -> int:
        """Return how many short epochs are trained: as many as take about a third of what a rehearsal may take."""
        steps = -(-self._ensemble.samples // own.batch_size)
        self.whole_epoch_s = epoch_s * steps / self.data.steps
        affordable = max(LEAST_S, SHARE * self.whole_epoch_s) / 3 / max(epoch_s, 1e-6)
        return min(own.epochs, MOST_EPOCHS, max(LEAST_EPOCHS, int(affordable)))

    def _note(self, state: TrainState, trip: Trip, epoch: int) -> None:
        self._say_alive()
        trip.trajectory[epoch] = describe_state(state)
        if epoch in self.keeps:
            model = own_state(state.optimization.model)
            trip.weights[epoch] = {name: tensor.detach().cpu().clone() for name, tensor in model.items()}

    def wants(self, position: Position) -> bool:
        """Whether the checkpoint at a position is one to go on from: after the first, a middle, the last epoch."""
        places = {1, 2} if self.last is None else {1, (self.last + 1) // 2, self.last}
        return not self._is_resumed and position.step == 0 and position.epoch in places


class _OtherDraws(SingleRank):
    """One worker that draws other random numbers."""

    rank = 1


class _Checkpoints(Checkpointer):
    """Writes those checkpoints of a rehearsal from which a fresh process goes on."""

    def __init__(self, job: Job, ensemble: Ensemble, loop: _Loop) -> None:
        own = dataclasses.replace(job.identity, member=loop.folder)
        super().__init__(dataclasses.replace(job, identity=own), ensemble)
        self._loop = loop

    def load_initial_weights(self) -> None: ...

    def load_inherited(self) -> None: ...

    def save(self, first_epoch: int, position: Position, parts: Mapping[str, Any]) -> dict[str, str]:
        if not self._loop.wants(position):
            return {"path": "", "digest": "", "weights_sha256": ""}
        saved = super().save(first_epoch, position, parts)
        self._loop.checkpoints[str(position.epoch)] = Path(saved["path"]).name, saved["digest"]
        return saved


class _Reporter(EventReporter):
    """Writes lines to the log of the rehearsal; nothing else is reported."""

    def __init__(self, job: Job, say_alive: Callable[[], None]) -> None:
        super().__init__(job, lambda event: None, CpuClock())
        self._say_alive = say_alive
        self._log = RunDir(job.run_dir).log(PROFILE)

    def event(self, type: str, **fields: Any) -> None: ...

    def progress(self, fields: Callable[[], Mapping[str, Any]]) -> bool:
        self._say_alive()
        return False


def _list_structures(ensemble: Ensemble, members: list[Identity]) -> list[str]:
    """Return the first member of each structure but the first: other parameters, classes of modules, callbacks."""
    first: dict[Any, str] = {}
    for identity in members:
        first.setdefault(json.dumps(_describe_structure(ensemble, identity)), identity.member)
    return list(first.values())[1:MOST_STRUCTURES]


def _describe_structure(ensemble: Ensemble, identity: Identity) -> list[Any]:
    options: list[Any] = [
        identity.averaging,
        identity.early_stopping,
        bool(identity.mixup),
        identity.keep,
        identity.precision,
    ]
    options += [identity.callbacks, identity.optimizer and identity.optimizer["name"], identity.schedule is None]
    recipe = ensemble.recipe
    if not isinstance(recipe, Recipe) or has_own_loop(recipe):
        words = {name: value for name, value in identity.params.items() if isinstance(value, str | bool)}
        return [options, words]
    try:
        model = build_without_memory(recipe, ensemble.as_declared(identity.params))
    except Exception:  # the member itself shows it
        return [options]
    kinds = sorted({type(module).__name__ for module in model.modules()})
    return [options, kinds, [name for name, _ in model.named_parameters()]]


def _name_paths(paths: list[str]) -> str:
    """Return paths of a trajectory as a reader knows them."""
    named = [_name_path(path) for path in paths[:_NAMED]]
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(named) + more


def _name_path(path: str) -> str:
    part, _, name = path.partition(".")
    where = {
        "kept": "of the weights that count ",
        "requires_grad": "`requires_grad` of ",
        "optimizer": "the optimizer's ",
        "schedule": "the schedule's ",
        "states": "of member.state() ",
        "loose": "outside the state_dict ",
        "modules": "the attribute ",
        "callbacks": "of a callback ",
    }.get(part, "")
    return f"{where}`{name}`"


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance between weights; of a name that one lacks, from 0."""

    def read(tensor: Tensor | None) -> Any:
        return 0.0 if tensor is None else tensor.detach().cpu().double()

    floats = {name: tensor for name, tensor in one.items() if tensor.is_floating_point()}
    squares = [(read(tensor) - read(other.get(name))).square().sum() for name, tensor in floats.items()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
