"""A member between its steps: its epochs, its events, its commands, its checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ensemble.spec.objectives import describe_missing_objective
from ensemble.store import weights_sha256
from ensemble.train.evaluator import Evaluator
from ensemble.train.gather import find_first, gather_json
from ensemble.train.job import Command, Diverged, Outcome, StepAction, StopTraining, TrainingError
from ensemble.train.loose_tensors import copy_loose
from ensemble.train.optimization import OWN_STEPS, StepResult
from ensemble.train.reporter import to_json_metrics
from ensemble.train.resumption import Resumption
from ensemble.train.same_model import Answers, limit_bytes
from ensemble.train.state import TrainState
from pipelines.loader.ragged import find_tensors

#: Of a checkpoint that takes so long to write that it is said before.
LARGE_BYTES = 2**30

_OUTCOMES: dict[str, Outcome] = {"stop": "stopped", "prune": "pruned", "cancel": "cancelled"}


class Lifecycle:
    """One member on one rank, from `begin` to `finish`.

    Attributes:
        resumption: what gives the member the state of its checkpoint.
        has_left: whether its train function has left `epochs` early, and nothing has followed from it yet.
    """

    def __init__(self, state: TrainState, evaluator: Evaluator) -> None:
        self._state, self._evaluator, self._answers = state, evaluator, Answers(state)
        self._identity, self._comm, self._data = state.identity, state.comm, state.data
        self._reporter, self._checkpointer = state.reporter, state.effects.checkpointer
        self.has_left = self._has_begun = self._stops_at_epoch_end = False
        minutes = state.ensemble.checkpoint_minutes
        self._save_every_s = float("inf") if minutes is None else 60 * minutes
        self._save_due = float("inf")  # by the monotonic clock of this rank
        self._digest = ""
        self._data.on_wait = self._wait
        self.resumption = Resumption(state, self._answers)

    def _wait(self) -> None:
        """Report progress and execute commands while the stream keeps this rank waiting.

        Several ranks execute a command after a step only, when they have agreed on it.
        """
        self._state.report_progress()
        if self._comm.world == 1:
            command = self._state.poll_command()
            if command == "stop" and self._state.steps_elsewhere:  # only the loop knows its state within an epoch
                raise StopTraining("stopped")
            self.execute(command)

    # --- steps ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Report the start of training; called when the first batch is there. All before it counts as start-up."""
        if self._has_begun:
            return
        self._has_begun = True
        self._save_due = time.monotonic() + self._save_every_s
        self._state.throughput.restart_clock(self._data.stats())
        startup_cpu_s = self._reporter.training_begins(self._data.stats()["prepare_cpu_s"])
        last = self._state.at.last_epoch_event
        self._reporter.event(
            "started",
            pid=os.getpid(),
            **self._state.position,
            startup_cpu_s=startup_cpu_s,
            first_epoch=self._data.first_epoch,
            **({"last_epoch": last} if last else {}),
        )

    def choose_action(self) -> StepAction | None:
        """What rank 0 has all ranks do after the step in progress: the next command, or a checkpoint."""
        command = self._state.poll_command()
        is_due = self._comm.rank == 0 and time.monotonic() >= self._save_due
        return "checkpoint" if command is None and is_due else command

    def end_step(self, step: StepResult, samples: int) -> None:
        """Count a step over a global batch of `samples`, and execute the command that all ranks agreed on."""
        state, at = self._state, self._state.at
        at.step += 1
        is_last = at.step == state.steps_per_epoch
        state.optimization.kept.end_step(at.epoch, is_last=is_last, applied=not step.skipped)
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
            self.execute(step.command)

    def execute(self, command: Command | None) -> None:
        """Leave the training loop where the command says so, with a checkpoint where the member may resume."""
        if command == "stop":
            self.save()
        if command in _OUTCOMES:
            raise StopTraining(_OUTCOMES[command])

    def add_validation(self, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation within an epoch."""
        at = self._state.at
        at.validations.append([at.step, to_json_metrics(metrics)])
        shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        self._reporter.log(f"epoch {at.epoch}, step {at.step}: {shown}")
        self._select(metrics)

    def _select(self, metrics: Mapping[str, float] | None) -> bool:
        """Decide whether the weights that were evaluated are the best so far, by the figures of rank 0.

        Args:
            metrics: None where this rank has reported none.

        Returns:
            Whether the objective was measured. A train function need not measure it each time, once it has.
        """
        own, state = self._identity, self._state
        by, selection, at = own.selected_by, state.selection, state.at
        if by is None:
            objective = state.ensemble.objective
            if state.is_own_loop and objective is not None and objective not in (metrics or {}):
                state.remark(describe_missing_objective(objective, metrics or {}))
            return False
        reported = gather_json(self._comm, None if metrics is None else dict(metrics))[0] or {}
        if by["metric"] not in reported:
            # Within the first epoch it may not be known yet what is predicted.
            if selection.is_measured or not state.observer.is_settled or (state.reports_later and not reported):
                return False
            raise TrainingError(describe_missing_objective(by["metric"], reported))
        delta = (own.early_stopping or {}).get("min_delta", 0.0)
        is_best = selection.add(by["mode"], delta, at.epoch, at.step, reported[by["metric"]], reported)
        if is_best and own.keep == "best":
            state.optimization.kept.keep_best()
        return True

    # --- epochs -----------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """See `TrainContext.epochs`."""
        state = self._state
        _ = state.optimization  # raises where it is not prepared
        state.effects.open(state.inbox, None if state.is_over else state.at)
        while not state.is_over:
            self.begin_epoch()
            try:
                yield state.at.epoch
            except GeneratorExit:  # nothing is to be done here: the loop may be left by an exception
                self.has_left = True
                raise
            self.end_epoch()
        self.conclude()

    def begin_epoch(self) -> None:
        """Start counting an epoch."""
        state = self._state
        state.throughput.begin_epoch(self._data.stats())
        if state.at.step == state.steps_per_epoch:  # only its evaluation is left, in which it was stopped
            self.begin()

    def end_left_epoch(self) -> None:
        """Where the train function has left `epochs` early: end the epoch in progress, and the member with it.

        Raises:
            TrainingError: it has trained no epoch.
        """
        if not self.has_left:
            return
        self.has_left = False
        at, reason = self._state.at, "its train function left member.epochs()"
        if at.step:
            at.stop_asked = at.stop_asked or reason
            self.end_epoch()
        elif not self._state.is_over:
            if not at.epoch:
                raise TrainingError(
                    "the member has trained no epoch: its train function never entered member.epochs(), or left "
                    "it before the first step; train each epoch's member.batches(), with member.step() after each"
                )
            at.stop_reason = reason
        self.conclude()

    def end_epoch(self) -> None:
        """Report an epoch whose steps are all done, wait for the pruner's decision, and save."""
        state, at, optimization = self._state, self._state.at, self._state.optimization
        state.effects.end_training(optimization)
        at.stop_asked = find_first(self._comm, at.stop_asked)
        if at.step != state.steps_per_epoch:
            once = "read all of member.batches(), once an epoch; member.stop(reason) ends the member after it"
            raise TrainingError(
                f"epoch {at.epoch} was left after {at.step} of {state.steps_per_epoch} steps: "
                f"{OWN_STEPS if state.steps_elsewhere else once}"
            )
        if self._may_be_kept():
            self._evaluator.renew_known_statistics()
        if at.metrics.get("loss") != at.metrics.get("loss"):
            raise Diverged(f"the validation loss is NaN after epoch {at.epoch}, learning rate {optimization.lr:g}")
        if self._select(at.metrics if at.is_reported else None) or at.validations:
            state.selection.end_epoch((self._identity.early_stopping or {}).get("patience"))
        self._report_epoch()
        decision, change = self._receive_decision()
        at.next_epoch()
        if at.epoch < self._identity.epochs:
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
        if decision == "continue" and (state.is_over or self._is_checkpoint_due(at.epoch)):
            self.save()
        self.execute(decision)

    def _may_be_kept(self) -> bool:
        """Whether the weights after the epoch in progress may be those that are saved or kept."""
        own, at = self._identity, self._state.at
        is_selected = own.keep == "best" or own.early_stopping is not None or at.stop_asked is not None
        return is_selected or at.epoch + 1 >= own.epochs or self._is_checkpoint_due(at.epoch + 1)

    def _is_checkpoint_due(self, epochs: int) -> bool:
        return epochs % self._state.ensemble.checkpoint_every == 0

    def _report_epoch(self) -> None:
        state, at, stats = self._state, self._state.at, self._data.stats()
        optimization = state.optimization
        at.last_epoch_event = {
            **self._state.position,
            "metrics": to_json_metrics(at.metrics),
            "train_loss": at.loss_sum / at.samples if at.samples and not state.steps_elsewhere else None,
            "lr": optimization.lr,
            "samples": at.samples,
            "skipped_steps": at.skipped_steps,
            "loss_scale": optimization.loss_scale,
            "grad_norm": optimization.read_grad_norm(),
            "sent_bytes": optimization.sent_bytes(),
            **({"validations": at.validations} if at.validations else {}),
            **({"reports_later": True} if state.reports_later and not at.metrics else {}),
            **self._state.throughput.end_epoch(stats),
        }
        self._reporter.event("epoch", **at.last_epoch_event)
        self._reporter.usage(stats["prepare_cpu_s"])

    def _receive_decision(self) -> tuple[Command, dict[str, Any] | None]:
        """The command after an epoch, and the deferred command; the same on all ranks.

        Rank 0 waits for the command where a pruner decides.
        """
        decision: Command | None = None
        change, inbox = None, self._state.inbox
        if self._comm.rank == 0:
            if not self._stops_at_epoch_end:
                decision = inbox.wait() if self._state.job.awaits_pruner else inbox.poll()
            change = inbox.pop_deferred()
        decision = "stop" if self._stops_at_epoch_end else decision or "continue"
        agreed = gather_json(self._comm, [decision, change])[0]
        return agreed[0], agreed[1]

    def _switch_feeder(self, command: dict[str, Any]) -> None:
        """Read the stream of another feeder from here on, or none; report it when done."""
        feeder, epoch = command.get("feeder"), self._state.at.epoch
        shared = self._data.switch_feeder(feeder, epoch)
        self._reporter.event("moved", cohort=command.get("cohort"), feeder=feeder, epoch=epoch, shared=shared)

    # --- the end ----------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Give the model the weights that are kept, and leave the stream, where the member stops early."""
        self._state.optimization.kept.adopt()
        if self._state.ends_early:
            self._data.leave()

    def report_end(self, metrics: Mapping[str, float]) -> None:
        """See `TrainContext.report_end`."""
        at, best = self._state.at, self._state.selection.best
        at.metrics = {name: float(value) for name, value in metrics.items()}
        if best is not None and self._identity.keep == "best":
            by = (self._identity.selected_by or {}).get("metric")
            best.update(metrics=dict(at.metrics), value=at.metrics.get(by or "", best["value"]))

    def use_weights(self, weights: Mapping[str, Tensor] | None, metrics: Mapping[str, float] | None) -> None:
        """See `TrainContext.use_weights`."""
        optimization = self._state.optimization
        if not self._state.is_over:
            raise TrainingError("member.use_weights() comes after the end of member.epochs()")
        optimization.replace_weights(weights)
        self._state.at.handed_over = {name: float(value) for name, value in (metrics or {}).items()}
        self._state.saved_at, self._digest = None, ""

    def finish(self) -> None:
        """Save and report the end of the training loop; end an epoch that it left after the last step."""
        state, optimization = self._state, self._state.optimization
        self.has_left = self.has_left or not state.is_over
        self.end_left_epoch()
        self.conclude()
        self.begin()
        if (why := optimization.kept.explain_absence()) is not None:
            self._reporter.log(why)
        if state.saved_at != (state.at.epoch, state.at.step):
            self.save()
        if self._comm.rank == 0:
            self._evaluator.compare_reported()
            predictions = self._evaluator.predictions
            self._reporter.event(
                "finished",
                epoch=state.at.epoch - 1,
                weights_sha256=self._digest or weights_sha256(optimization.model.state_dict()),
                **self._describe_end(),
                **({"predictions": predictions} if predictions else {}),
            )

    def _describe_end(self) -> dict[str, Any]:
        """Fields of the `finished` event: which evaluation is kept, and why the member ended early."""
        own, at, best = self._identity, self._state.at, self._state.selection.best
        fields: dict[str, Any] = {"metrics": to_json_metrics(at.metrics)}
        which: dict[str, Any] = {}
        if own.selected_by is not None and best is not None:
            which = {**own.selected_by, **{name: best[name] for name in ("epoch", "step", "value")}}
        if at.handed_over is not None:
            fields = {"metrics": to_json_metrics(at.handed_over or at.metrics), "kept": {"by": "use_weights"}}
        elif which and own.keep == "best" and best is not None:
            fields = {"metrics": to_json_metrics(best["metrics"]), "kept": which}
        if at.stop_reason is not None:
            fields["early_stopping"] = {"reason": at.stop_reason, "epochs": own.epochs}
        elif which and self._state.selection.is_stopped:
            fields["early_stopping"] = {**(own.early_stopping or {}), "epochs": own.epochs, "best": which}
        fields["metrics"] = {**self._evaluator.footprint, **fields["metrics"]}
        return fields

    def save(self) -> None:
        """Save the member's whole state; all ranks call it, rank 0 writes."""
        state, at = self._state, self._state.at
        state.saved_at = (at.epoch, at.step)
        at.stop_asked = find_first(self._comm, at.stop_asked)  # a resume within an epoch ends after it, too
        at.selection = {} if self._identity.selected_by is None else state.selection.as_dict()
        parts = state.optimization.state_dict()
        if own := state.own.state_dict():
            parts["own"] = own
        if state.observer.seen is not None:
            parts |= state.observer.seen.as_record()
            if state.observer.otherwise is not None:
                parts["outputs"]["otherwise"] = state.observer.otherwise
        if not at.step and (answers := self._answers.record()) is not None:
            parts["answers"] = answers
        if self._comm.rank != 0:
            return
        model = state.optimization.model
        parts["loose"] = copy_loose(model, limit_bytes(model))
        began = time.monotonic()
        if (size := sum(tensor.nbytes for tensor in find_tensors(parts))) >= LARGE_BYTES:
            self._reporter.event("progress", **state.describe_progress(), saves_bytes=size)
        saved = self._checkpointer.save(self._data.first_epoch or 0, at, parts)
        self._digest, self._save_due = saved["weights_sha256"], time.monotonic() + self._save_every_s
        self._reporter.event("checkpoint", **state.position, **saved, write_s=time.monotonic() - began)
