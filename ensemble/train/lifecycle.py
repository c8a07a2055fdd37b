"""A member between its steps: its epochs, its events, its commands, its checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ensemble.spec.objectives import describe_missing_objective
from ensemble.store import RunDir, weights_sha256
from ensemble.store.run_paths import FILES
from ensemble.train.evaluator import Evaluator
from ensemble.train.gather import find_first, gather_json
from ensemble.train.job import NO_IMPROVEMENT, Command, Diverged, Outcome, StepAction, StopTraining, TrainingError
from ensemble.train.loose_tensors import copy_loose
from ensemble.train.optimization import OWN_STEPS
from ensemble.train.own_tensors import BASES, own_state
from ensemble.train.reporter import to_json_metrics
from ensemble.train.resumption import Resumption
from ensemble.train.same_model import Answers, limit_bytes
from ensemble.train.state import TrainState
from ensemble.train.step_sync import StepResult
from ensemble.train.structure import describe_outline, set_modes
from pipelines.loader.ragged import find_tensors

#: Of a checkpoint that takes so long to write that it is said before.
LARGE_BYTES = 2**30
#: Of training between two checkpoints after epochs, at least, unless `checkpoint_every` says which.
SAVE_EVERY_S = 5.0
#: Predictions of all splits from which a member saves its state before it makes them.
MUCH_BYTES = 2**26

_OUTCOMES: dict[str, Outcome] = {"stop": "stopped", "prune": "pruned", "cancel": "cancelled"}


class Lifecycle:
    """One member on one rank, from `begin` to `finish`.

    Attributes:
        resumption: what gives the member the state of its checkpoint.
        has_left: whether its train function has left `epochs` early, and nothing has followed from it yet.
    """

    def __init__(self, state: TrainState, evaluator: Evaluator) -> None:
        self._state, self._evaluator, self._answers, self._digest = state, evaluator, Answers(state), ""
        self.has_left = self._has_begun = self._stops_at_epoch_end = False
        self.outline: Any = None  # of the last checkpoint, or of the beginning
        self._save_every_s = 60 * (state.ensemble.checkpoint_minutes or float("inf"))
        self._save_due = self._saved_s = float("inf")  # by the monotonic clock of this rank
        state.data.on_wait = self.wait
        self.resumption = Resumption(state, self._answers)

    def wait(self) -> None:
        """Report progress and execute commands while the stream keeps this rank waiting.

        Several ranks execute a command after a step only, when they have agreed on it.
        """
        self._state.report_progress()
        if self._state.comm.world == 1:
            command = self._state.poll_command()
            if command == "stop" and self._state.steps_elsewhere:  # only the loop knows its state within an epoch
                raise StopTraining("stopped")
            self._execute(command)

    # --- steps ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Report the start of training; called when the first batch is there. All before it counts as start-up."""
        if self._has_begun:
            return
        self._has_begun, state = True, self._state
        self._saved_s = time.monotonic()
        self._save_due = self._saved_s + self._save_every_s
        stats = state.data.stats()
        state.throughput.restart_clock(stats)
        last = state.at.last_epoch_event
        state.reporter.event(
            "started",
            pid=os.getpid(),
            **state.position,
            startup_cpu_s=state.reporter.training_begins(stats["prepare_cpu_s"]),
            first_epoch=state.data.first_epoch,
            **({"last_epoch": last} if last else {}),
        )

    def choose_action(self) -> StepAction | None:
        """What rank 0 has all ranks do after the step in progress: the next command, or a checkpoint."""
        command = self._state.poll_command()
        is_due = self._state.comm.rank == 0 and time.monotonic() >= self._save_due
        return "checkpoint" if command is None and is_due else command

    def end_step(self, step: StepResult, samples: int) -> None:
        """Count a step over a global batch of `samples`, and execute the command that all ranks agreed on."""
        state, at = self._state, self._state.at
        at.step += 1
        is_last = at.step == state.steps_per_epoch
        if state.callbacks.end_step:
            state.callbacks.call("end_step", applied=not step.skipped)
        if step.skipped:
            at.skipped_steps += 1
        else:
            at.loss_sum += step.loss_sum
            at.samples += samples
        state.throughput.add_step(samples)
        if is_last:
            state.throughput.end_training()
        state.report_progress()
        if step.command == "stop" and is_last:
            self._stops_at_epoch_end = True  # an epoch that is trained is worth its evaluation
        elif step.command == "checkpoint":
            if not is_last:  # a resume from there would not evaluate the epoch; the next one begins with it
                with state.throughput.pausing():
                    self.save()
        else:
            self._execute(step.command)

    def _execute(self, command: Command | None) -> None:
        """Leave the training loop where the command says so, with a checkpoint where the member may resume."""
        if command == "stop":
            self.save()
        if command in _OUTCOMES:
            raise StopTraining(_OUTCOMES[command])

    def add_validation(self, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation within an epoch."""
        state, at = self._state, self._state.at
        at.validations.append([at.step, to_json_metrics(metrics)])
        shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        state.reporter.log(f"epoch {at.epoch + 1}, step {at.step}: {shown}")
        state.reporter.event("progress", **state.describe_progress(), metrics=at.validations[-1][1])
        self._select(metrics)

    def _select(self, metrics: Mapping[str, float] | None) -> None:
        """Decide by the figures of rank 0 whether the evaluated weights are the best; others may have None."""
        own, state = self._state.identity, self._state
        by, selection, at = own.selected_by, state.selection, state.at
        objective = state.ensemble.objective
        if by is None and state.is_own_loop and objective is not None and objective not in (metrics or {}):
            state.remark(describe_missing_objective(objective, metrics or {}))
        if by is None and not state.callbacks.evaluated:
            return
        reported = gather_json(state.comm, None if metrics is None else dict(metrics))[0]
        if by is not None and by["metric"] not in (reported or {}):
            if selection.is_measured or (state.reports_later and not reported):
                return
            raise TrainingError(describe_missing_objective(by["metric"], reported or {}))
        if reported is not None:
            state.callbacks.call("evaluated", reported)
        if by is None or reported is None:
            return
        is_best = selection.add(by["mode"], at.epoch, at.step, reported[by["metric"]], reported)
        if is_best and own.keep == "best":
            state.optimization.kept.keep_best()

    # --- epochs -----------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """See `TrainContext.epochs`."""
        state = self._state
        _ = state.optimization  # raises where it is not prepared
        if not state.steps_elsewhere:  # else it is open
            state.open()
        while not state.is_over:
            self.begin_epoch()
            try:
                yield state.at.epoch
            except GeneratorExit:  # nothing is to be done here: the loop may be left by an exception
                self.has_left = True
                raise
            self.end_epoch()
        self._conclude()

    def begin_epoch(self) -> None:
        """Start counting an epoch."""
        state = self._state
        state.throughput.begin_epoch(state.data.stats())
        if not state.is_own_loop:  # a hook at the end of the epoch before may have left it in another mode
            set_modes(state.optimization.model, state.optimization.structure.get("modes"))
        if state.at.step == 0:  # else it goes on within the epoch, with the states that the hooks have made
            state.callbacks.call("begin_epoch", state.at.epoch)
        if state.at.step == state.steps_per_epoch:  # only its evaluation is left, in which it was stopped
            self.begin()

    def end_left_epoch(self) -> None:
        """Where the train function has left `epochs` early: end the epoch in progress, and the member with it."""
        if not self.has_left:
            return
        self.has_left = False
        at, reason = self._state.at, "its train function left member.epochs()"
        if at.step or (at.is_reported and not self._state.steps_per_epoch):
            at.stop_asked = at.stop_asked or reason
            self.end_epoch()
        elif not self._state.is_over:
            if not at.epoch:
                raise TrainingError(
                    "the member has trained no epoch: its train function never entered member.epochs(), or left "
                    "it before the first step; train each epoch's member.batches(), with member.step() after each"
                )
            at.stop_reason = reason
        self._conclude()

    def end_epoch(self) -> None:
        """Report an epoch whose steps are all done, wait for the pruner's decision, and save."""
        state, at, optimization = self._state, self._state.at, self._state.optimization
        state.on_trained()
        at.stop_asked = find_first(state.comm, at.stop_asked)
        if at.step != state.steps_per_epoch:
            once = "read all of member.batches(), once an epoch; member.stop(reason) ends the member after it"
            raise TrainingError(
                f"epoch {at.epoch + 1} was left after {at.step} of {state.steps_per_epoch} steps: "
                f"{OWN_STEPS if state.steps_elsewhere else once}"
            )
        is_last = at.stop_asked is not None or at.epoch + 1 >= state.identity.epochs
        is_selected = state.identity.keep == "best" or state.identity.early_stopping is not None
        if is_last or is_selected or self._may_save_after(at.epoch + 1):
            with optimization.kept.applied():  # it completes them, where the train function has not evaluated them
                pass
        if at.metrics.get("loss") != at.metrics.get("loss"):
            raise Diverged(f"the validation loss is NaN after epoch {at.epoch + 1}{state.explain_not_finite()}")
        if optimization.model in BASES:
            BASES[optimization.model].check_unwritten(whole=False)
        self._select(at.metrics if at.is_reported else None)
        if state.callbacks.end_epoch:
            before, best = dict(at.metrics), state.selection.best
            state.callbacks.call("end_epoch", at.epoch, at.metrics)
            if best is not None and (best["epoch"], best["step"]) == (at.epoch, at.step):
                best["metrics"] |= {name: value for name, value in at.metrics.items() if name not in before}
            at.stop_asked = find_first(state.comm, at.stop_asked)
        self._report_epoch()
        decision, change, is_save_due = self._receive_decision()
        at.next_epoch()
        if at.epoch < state.identity.epochs:
            at.stop_reason = at.stop_asked
        at.stop_asked = None
        if state.is_over:
            change = None
            if decision == "prune":  # it has stopped early by itself: it is as good as its weights that are kept
                decision = "continue"
        if change is not None and decision == "continue":
            if change["command"] == "stop_after_epoch":
                decision = "stop"
            else:
                self._switch_feeder(change)
        if decision == "continue" and (state.is_over or is_save_due):
            self.save()
        self._execute(decision)

    def _may_save_after(self, epochs: int) -> bool:
        return (every := self._state.ensemble.checkpoint_every) is None or epochs % every == 0

    def _report_epoch(self) -> None:
        state, at, stats = self._state, self._state.at, self._state.data.stats()
        at.last_epoch_event = {
            **state.position,
            "metrics": to_json_metrics(at.metrics),
            "train_loss": at.loss_sum / at.samples if at.samples and not state.steps_elsewhere else None,
            "samples": at.samples,
            "skipped_steps": at.skipped_steps,
            **state.optimization.describe(),
            **({"validations": at.validations} if at.validations else {}),
            **({"reports_later": True} if state.reports_later and not at.metrics else {}),
            **state.throughput.end_epoch(stats),
        }
        state.reporter.event("epoch", **at.last_epoch_event)
        state.reporter.usage(stats["prepare_cpu_s"])

    def _receive_decision(self) -> tuple[Command, dict[str, Any] | None, bool]:
        """The command after an epoch, the deferred command, and whether to save; the same on all ranks.

        Rank 0 waits for the command where a pruner decides.
        """
        decision: Command | None = "stop" if self._stops_at_epoch_end else None
        change, inbox = None, self._state.inbox
        is_save_due = self._may_save_after(self._state.at.epoch + 1)
        if self._state.comm.rank == 0:
            if decision is None:
                decision = inbox.wait() if self._state.job.awaits_pruner else inbox.poll()
            change = inbox.pop_deferred()
            if self._state.ensemble.checkpoint_every is None:
                is_save_due = time.monotonic() >= self._saved_s + SAVE_EVERY_S
        decision, change, is_save_due = gather_json(
            self._state.comm, [decision or "continue", change, is_save_due]
        )[0]
        assert decision is not None
        return decision, change, is_save_due

    def _switch_feeder(self, command: dict[str, Any]) -> None:
        """Read the stream of another feeder from here on, or none; report it when done."""
        feeder, epoch = command.get("feeder"), self._state.at.epoch
        shared = self._state.data.switch_feeder(feeder, epoch)
        self._state.reporter.event(
            "moved", cohort=command.get("cohort"), feeder=feeder, epoch=epoch, shared=shared
        )

    # --- the end ----------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        """Give the model the weights that are kept, and leave the stream, where the member stops early."""
        self._state.optimization.kept.adopt()
        if self._state.ends_early:
            self._state.data.leave()

    def report_end(self, metrics: Mapping[str, float]) -> None:
        """See `TrainContext.report_end`."""
        at, best, own = self._state.at, self._state.selection.best, self._state.identity
        at.metrics = {name: float(value) for name, value in metrics.items()}
        if best is not None and own.keep == "best":
            by = (own.selected_by or {}).get("metric")
            best.update(metrics=dict(at.metrics), value=at.metrics.get(by or "", best["value"]))

    def use_weights(self, weights: Mapping[str, Tensor] | None, metrics: Mapping[str, float] | None) -> None:
        """See `TrainContext.use_weights`."""
        if not self._state.is_over:
            raise TrainingError("call member.use_weights() after the end of member.epochs()")
        self._state.optimization.replace_weights(weights)
        self._state.at.handed_over = {name: float(value) for name, value in (metrics or {}).items()}
        self._state.saved_at, self._digest = None, ""

    def finish(self) -> None:
        """Save and report the end of the training loop; end an epoch that it left after the last step."""
        state, optimization = self._state, self._state.optimization
        self.has_left = self.has_left or not state.is_over
        self.end_left_epoch()
        self._conclude()
        self.begin()
        state.remark_chance()
        if optimization.model in BASES:
            BASES[optimization.model].check_unwritten(whole=True)
        if (why := optimization.kept.explain_absence()) is not None:
            state.reporter.log(why)
        if state.saved_at != (state.at.epoch, state.at.step):
            self.save()
        if state.comm.rank == 0:
            predictions, member = self._evaluator.predictions, state.identity.member
            has_files = ((run_dir := RunDir(state.job.run_dir)).member(member) / FILES).is_dir()
            state.reporter.event(
                "finished",
                epoch=state.at.epoch - 1,
                weights_sha256=self._digest or weights_sha256(own_state(optimization.model)),
                **self._describe_end(),
                **({"predictions": predictions} if predictions else {}),
                **({"files": run_dir.digest_files(member)} if has_files else {}),
            )

    def _describe_end(self) -> dict[str, Any]:
        """Fields of the `finished` event: which evaluation is kept, and why the member ended early."""
        own, at, best = self._state.identity, self._state.at, self._state.selection.best
        fields: dict[str, Any] = {"metrics": to_json_metrics(at.metrics)}
        which: dict[str, Any] = {}
        if own.selected_by is not None and best is not None:
            which = {**own.selected_by, **{name: best[name] for name in ("epoch", "step", "value")}}
        if at.handed_over is not None:
            fields = {"metrics": to_json_metrics(at.handed_over or at.metrics), "kept": {"by": "use_weights"}}
        elif which and own.keep == "best" and best is not None:
            fields = {"metrics": to_json_metrics(best["metrics"]), "kept": which}
        if at.stop_reason == NO_IMPROVEMENT and own.early_stopping is not None and which:
            fields["early_stopping"] = {**own.early_stopping, "epochs": own.epochs, "best": which}
        elif at.stop_reason is not None:
            fields["early_stopping"] = {"reason": at.stop_reason, "epochs": own.epochs}
        fields["metrics"] = {**self._evaluator.footprint, **fields["metrics"]}
        return fields

    def save_before_evaluation(self) -> None:
        """Save in the last epoch, once trained, where much is predicted: what fails there is repeated alone."""
        state = self._state
        is_large = (state.predictions_bytes or 0) >= MUCH_BYTES
        if state.at.epoch + 1 == state.identity.epochs and find_first(state.comm, is_large or None):
            self.save()

    def save(self) -> None:
        """Save the member's whole state; all ranks call it, rank 0 writes."""
        state, at = self._state, self._state.at
        state.saved_at = (at.epoch, at.step)
        at.stop_asked = find_first(state.comm, at.stop_asked)  # a resume within an epoch ends after it, too
        at.selection = {} if state.identity.selected_by is None else dict(vars(state.selection))
        parts = state.optimization.state_dict()
        if own := state.own.state_dict():
            parts["own"] = own
        if not at.step and (answers := self._answers.record()) is not None:
            parts["answers"] = answers
        if state.seen is not None:
            parts |= state.seen.as_record()
        if state.comm.rank != 0:
            return
        model = state.optimization.model
        parts |= {"base": BASES[model].describe()} if model in BASES else {}
        parts["loose"] = copy_loose(model, limit_bytes(model))
        began = time.monotonic()
        if (size := sum(tensor.nbytes for tensor in find_tensors(parts))) >= LARGE_BYTES:
            state.reporter.event("progress", **state.describe_progress(), saves_bytes=size)
        outline = describe_outline(parts["structure"], parts["model"])
        changed, self.outline = self.outline != outline, outline
        saved = state.checkpointer.save(state.data.first_epoch or 0, at, parts)
        self._digest, self._saved_s = saved["weights_sha256"], time.monotonic()
        self._save_due = self._saved_s + self._save_every_s
        write_s = time.monotonic() - began
        state.reporter.event("checkpoint", **state.position, **saved, write_s=write_s, changed=changed)
