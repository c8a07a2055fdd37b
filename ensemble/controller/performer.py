"""Performs the actions of a session, and completes the events of executors: the controller's input and output.

`Performer.perform` writes all events of a batch to the log before it does anything else, so that nothing is
launched, sent or killed before the log has the reason. Failures and answers are returned as events.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ensemble.controller.actions import (
    Action,
    Add,
    AppendMemberLog,
    ClearRendezvous,
    Demand,
    EndTrial,
    ExpectReaders,
    Kill,
    Launch,
    Log,
    MeasureCost,
    Propose,
    ReduceCheckpoint,
    RemoveAttemptFiles,
    RemoveCheckpoints,
    RemoveFolder,
    Send,
    StartFeeder,
    StopFeeder,
)
from ensemble.controller.attempt import rendezvous_file
from ensemble.controller.retention import CheckpointReducer
from ensemble.controller.starts import describe_kept, find_start, keep_start
from ensemble.events import Event, Report, to_dict
from ensemble.executors import Executor
from ensemble.schedule.trials import ImpossibleError, NoObjectiveError, Trials
from ensemble.spec import Identity, SpecError
from ensemble.spec.identity import make_lineage
from ensemble.store import EventLog, RunDir, RunState, RunStatus, StoreError, keep_checkpoint
from ensemble.store.files import fsync_directory, make_directory
from ensemble.train.job import Job
from ensemble.train.poison_records import note_file, read_interrupted
from ensemble.train.reporter import FailureNote, append_log

log = logging.getLogger(__name__)


class Performer:
    """Performs actions on the executor, the trials, the log and the files of a run."""

    def __init__(
        self,
        run_dir: RunDir,
        executor: Executor,
        events: EventLog,
        trials: Trials,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        status: RunStatus | None = None,
        run: RunState | None = None,
    ) -> None:
        self._run_dir, self._executor, self._events, self._trials = run_dir, executor, events, trials
        self._status, self._run = status or RunStatus(run_dir), run or RunState()
        self.reducer = CheckpointReducer(run_dir)
        self._on_event = on_event

    def perform(self, actions: Sequence[Action]) -> list[Report]:
        """Write all `Log` actions to the log, then perform the others in their order; returns the answers, as
        events.
        """
        self._trials.flush()
        logged = [action for action in actions if isinstance(action, Log)]
        self._events.write([(entry.event, entry.line) for entry in logged])
        for entry in logged:
            self._notify(entry.event)
        answers = (self._perform(action) for action in actions if not isinstance(action, Log))
        return [answer for answer in answers if answer is not None]

    def _notify(self, event: Event) -> None:
        if self._on_event is not None:
            try:
                self._on_event(to_dict(event))
            except Exception:
                log.exception("on_event failed and is not called any more")
                self._on_event = None

    def _perform(self, action: Action) -> Report | None:
        run_dir, executor = self._run_dir, self._executor
        match action:
            case Launch(jobs, devices):
                return self._launch(jobs, devices)
            case Send(member, command, fields):
                executor.send(member, command, **fields)
            case Kill(member):
                executor.kill(member)
            case StartFeeder():
                return self._start_feeder(action)
            case ExpectReaders(node, cohort, members):
                executor.expect_readers(node, cohort, members)
            case StopFeeder(node, cohort):
                executor.stop_feeder(node, cohort)
            case ClearRendezvous(cohort):
                shutil.rmtree(run_dir.feeders(cohort), ignore_errors=True)
            case Demand(waiting, placed):
                executor.request(waiting, placed)
            case Propose():
                return self._propose()
            case Add():
                return self._add(action)
            case EndTrial(number, state, metrics):
                self._trials.ended(number, state, metrics)
            case MeasureCost(member, attempt):
                return self._measure_cost(member, attempt)
            case RemoveCheckpoints(member, kept, attempt, removes_start):
                _remove_checkpoints(run_dir, member, attempt, kept)
                if removes_start:
                    _unlink(run_dir.initial_weights(member))
                if attempt is None:
                    run_dir.remove_unfinished_predictions(member)
            case ReduceCheckpoint():
                self.reducer.add(action)
            case RemoveAttemptFiles(member, attempt):
                rendezvous_file(run_dir, member, attempt).unlink(missing_ok=True)
                FailureNote(run_dir, member, attempt).pop()
                for note in run_dir.member(member).glob(f"preparing-*-{attempt}"):
                    if not read_interrupted(note):  # else the next attempt tries the samples, and removes it
                        note.unlink(missing_ok=True)
            case RemoveFolder(member):
                shutil.rmtree(run_dir.member(member), ignore_errors=True)
            case AppendMemberLog(member, line):
                append_log(run_dir.log(member), line)
        return None

    def _launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> Report | None:
        try:
            meeting = rendezvous_file(self._run_dir, jobs[0].identity.member, jobs[0].attempt)
            make_directory(meeting.parent)
            meeting.unlink(missing_ok=True)
            self._executor.launch(jobs, devices)
        except OSError as error:
            who = {"member": jobs[0].identity.member, "attempt": jobs[0].attempt}
            return {"type": "launch_failed", **who, "detail": str(error)}
        return None

    def _measure_cost(self, member: str, attempt: int) -> Report:
        used = self._status.read_used().read(member).member(member)
        return {
            "type": "cost",
            "member": member,
            "attempt": attempt,
            "energy_j": used.energy_j,
            "energy_origin": used.origin,
            "cpu_s": used.cpu_s or None,
        }

    def _start_feeder(self, action: StartFeeder) -> Report:
        from pipelines.errors import PipelineError

        where = {"type": "feeder_ready", "node": action.node, "cohort": action.cohort, "number": action.number}
        try:
            address = self._executor.start_feeder(
                action.node, action.cohort, action.expected, action.capacity, action.peers, late=action.late
            )
        except (OSError, PipelineError) as error:
            return {**where, "address": None, "error": str(error)}
        return {**where, "address": address, "error": None}

    def _propose(self) -> Report:
        try:
            identity = self._trials.next()
        except ImpossibleError as error:
            return {"type": "impossible", "identity": error.identity, "error": str(error)}
        try:
            return {"type": "proposed", "identity": keep_start(self._run_dir, identity, self._run)}
        except StoreError as error:
            return {"type": "impossible", "identity": identity, "error": str(error), "reason": "error"}

    def _add(self, action: Add) -> Report:
        request, lineage, kept = {"request": action.request}, action.lineage, None
        try:
            if action.checkpoint is not None and action.logged is not None:
                kept = keep_checkpoint(self._run_dir, action.checkpoint, action.logged)
                lineage = describe_kept(lineage or {}, kept)
            elif action.declared.start is not None:
                source = str(action.declared.start)
                kept = find_start(source).keep(self._run_dir)
                lineage = describe_kept(lineage or make_lineage(source, warm=True), kept)
            identity = self._trials.add(action.declared, lineage)
            if kept is not None:
                kept.give_to(self._run_dir, identity.member)  # where it fails, the number is used up
            return {"type": "added", **request, "identity": identity}
        except (SpecError, StoreError, TypeError, KeyError) as error:
            if kept is not None:
                kept.remove()
            return {"type": "add_refused", **request, "error": str(error)}


def complete_event(
    event: Report, run_dir: RunDir, trials: Trials, find_reporter: Callable[[Report], Identity | None]
) -> Report:
    """Complete an executor's event with what the session needs from the run's files and from the trials.

    `find_reporter` returns the member whose attempt reports it, None where that attempt's outcome is known.
    `exited` gets what `add_exit_notes` reads, `finished` what a search makes of its metrics, `epoch` the
    `prune_decision`, or `unranked`, the reason why the member cannot be ranked.
    """
    kind = event["type"]
    if kind == "exited":
        return add_exit_notes(event, run_dir)
    if kind == "started" and (last := event.get("last_epoch")) and (reporter := find_reporter(event)) is not None:
        with contextlib.suppress(
            NoObjectiveError
        ):  # its event may have got lost with a controller that was killed
            trials.prune_decision(reporter.number, last["epoch"], last.get("metrics") or {})
    if kind not in ("epoch", "finished") or (identity := find_reporter(event)) is None:
        return event
    metrics = event.get("metrics") or {}
    if kind == "finished":
        _publish_predictions(run_dir, identity.member, event["attempt"])
        return {**event, **trials.final(identity.number, metrics)}
    if event.get("reports_later"):
        return {**event, "prune_decision": "continue"}
    try:
        decision = trials.prune_decision(identity.number, event["epoch"], metrics)
    except NoObjectiveError as error:
        return {**event, "unranked": str(error)}
    return {**event, "prune_decision": decision}


def add_exit_notes(event: Report, run_dir: RunDir) -> Report:
    """Complete an `exited` event with what the processes of the attempt have left in files.

    Where the rank failed or died: `note`, the failure that a rank above 0 has noted, and `preparing`, the [split,
    index] of samples in preparation.
    """
    if event["outcome"] not in (None, "failed"):
        return event
    member, attempt = event["member"], event["attempt"]
    prepared = read_interrupted(note_file(run_dir, member, event["rank"], attempt))
    return {
        **event,
        "note": FailureNote(run_dir, member, attempt).read(),
        "preparing": [[split, index] for split, (index, _) in prepared.items()],
    }


def _publish_predictions(run_dir: RunDir, member: str, attempt: int) -> None:
    """Make the predictions of a finished attempt the member's, before the log says that it has finished."""
    written = run_dir.predictions(member, attempt)
    if written.exists():
        os.replace(written, run_dir.predictions(member))
        fsync_directory(run_dir.member(member))


def _remove_checkpoints(run_dir: RunDir, member: str, attempt: int | None, kept: Sequence[str]) -> None:
    """Remove a member's checkpoints that the log does not name, but what a running attempt has written since."""
    with contextlib.suppress(OSError):
        names = {name for name in os.listdir(run_dir.member(member)) if name.startswith(("checkpoint", ".check"))}
        if names.issubset(kept):  # the usual case, found without a path for each
            return
    if attempt is None:  # what a killed attempt was writing
        for path in run_dir.member(member).glob(".checkpoint*.tmp"):
            _unlink(path)
    present = run_dir.list_checkpoints(member)
    paths = {path for _, path in present}
    for path in run_dir.member(member).glob("checkpoint*.safetensors"):
        if path not in paths and path.name not in kept:  # that has weights only, see `name_weights`
            _unlink(path)
    last = max((position for position, path in present if path.name in kept), default=None)
    for position, path in present:
        is_newer = position[0] == attempt and (last is None or position > last)
        if path.name not in kept and not is_newer:
            _unlink(path)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # it takes room, and no more
        log.warning("%s is not needed, and cannot be removed: %s", path, error)
