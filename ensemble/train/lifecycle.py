"""A member between its steps: its position, its events, its commands, its checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from ensemble.comm import Communicator
from ensemble.comm.autotune.plan import ExchangePlan
from ensemble.spec import Ensemble
from ensemble.spec.objectives import describe_missing_objective
from ensemble.store import weights_sha256
from ensemble.train.call import Observation
from ensemble.train.checkpoint import Position
from ensemble.train.effects import Effects
from ensemble.train.gather import find_first, gather_json
from ensemble.train.initial_weights import check_fit
from ensemble.train.job import Command, Diverged, Inbox, Job, StepAction, StopTraining, TrainingError
from ensemble.train.observer import Observer
from ensemble.train.optimization import Optimization, StepResult
from ensemble.train.reporter import to_json_metrics
from ensemble.train.selection import Selection
from ensemble.train.throughput import Throughput
from pipelines.loader.ragged import find_tensors

#: Of a checkpoint that takes so long to write that it is said before.
LARGE_BYTES = 2**30


class Lifecycle:
    """One member on one rank, from `resume` to `finish`.

    Attributes:
        at: its position.
        throughput: how fast it trains.
        steps_per_epoch: global batches of an epoch.
        selection: which evaluation was the best, and whether the member has stopped early.
    """

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        effects: Effects,
        inbox: Inbox,
        observer: Observer,
    ) -> None:
        self.at = Position()
        self.selection = Selection()
        self.throughput = Throughput()
        self.steps_per_epoch = effects.steps_per_epoch
        self._job, self._identity, self._comm, self._data = job, job.identity, comm, effects.data
        self._reporter, self._inbox, self._ensemble = effects.reporter, inbox, ensemble
        self._checkpointer, self._observer = effects.checkpointer, observer
        self._has_begun = self._stop_at_epoch_end = False
        self._saved_at: tuple[int, int] | None = None
        minutes = ensemble.checkpoint_minutes
        self._save_every_s = float("inf") if minutes is None else 60 * minutes
        self._save_due = float("inf")  # by the monotonic clock of this rank
        self._digest = ""
        self._predictions: dict[str, str] = {}

    @property
    def is_over(self) -> bool:
        """Whether all epochs are done, or the member has stopped early."""
        return self.at.epoch >= self._identity.epochs or self.ends_early

    @property
    def ends_early(self) -> bool:
        """Whether the member has stopped early: by its objective, or by its train function."""
        return self.selection.is_stopped or self.at.stop_reason is not None

    @property
    def may_be_kept(self) -> bool:
        """Whether the weights after the epoch in progress may be those that are saved or kept."""
        own, done = self._identity, self.at.epoch + 1
        is_selected = own.keep == "best" or own.early_stopping is not None or self.at.stop_asked is not None
        return is_selected or done >= own.epochs or self._is_checkpoint_due(done)

    def stop(self, reason: str) -> None:
        """Train no epoch after the one in progress; one rank that says so suffices."""
        self.at.stop_asked = self.at.stop_asked or reason

    def agree_on_stop(self) -> None:
        """Take the reason to stop of the first rank that has one; all ranks call it together."""
        self.at.stop_asked = find_first(self._comm, self.at.stop_asked)

    def _is_checkpoint_due(self, epochs: int) -> bool:
        return epochs % self._ensemble.checkpoint_every == 0

    @property
    def position(self) -> dict[str, int]:
        """Own epoch and step in it, as fields of events."""
        return {"epoch": self.at.epoch, "step": self.at.step}

    @property
    def global_step(self) -> int:
        """Steps done since the member's first."""
        return self.at.epoch * self.steps_per_epoch + self.at.step

    def resume(self, optimization: Optimization) -> None:
        """Start from the member's checkpoint, if it has one, else from the beginning.

        Raises:
            TrainingError: the checkpoint belongs to another identity, or was trained on other data.
            ShapeMismatchError: the weights with which the member is to begin are not of this model.
        """
        if self._comm.rank == 0 and (why := self._checkpointer.keep_network(optimization.model)) is not None:
            self._reporter.log(f"load and resume need Recipe.model: the network is in no checkpoint, as {why}")
        state = self._checkpointer.load(self._report_damage)
        # Before the first collective whose order depends on it.
        position = None if state is None else [state["position"][name] for name in ("epoch", "step")]
        if any(peer != position for peer in gather_json(self._comm, position)):
            raise RuntimeError(
                f"the workers of {self._identity.member} do not see the same checkpoint: the run directory "
                f"{self._job.run_dir} must be shared by all nodes"
            )
        initial = self._checkpointer.load_initial_weights() if state is None else None
        if initial is not None:
            self._check_initial(optimization, initial)
        optimization.start(state, self._job.exchange_plan, initial)
        if optimization.plan != ExchangePlan():
            compressions = sorted(optimization.bucket_compressions.items())
            self._reporter.event("plan", **asdict(optimization.plan), auto=compressions)
        if state is not None:
            self._data.first_epoch = state["first_epoch"]
            self._observer.seen = Observation.from_checkpoint(state)
            self.at = Position(**state["position"])
            self.selection = Selection(**self.at.selection)
            self._saved_at = (self.at.epoch, self.at.step)
            if "optimizer" not in state and not self.is_over:
                raise TrainingError(
                    f"{self._identity.member} cannot be trained further: the state of its optimizer was not kept"
                )
            if self.at.handed_over is not None and not self.is_over:  # it was given more epochs
                self.at.handed_over, self.selection = None, Selection()
                optimization.kept.drop_best()

    def restore_network(self) -> nn.Module:
        """See `Checkpointer`."""
        return self._checkpointer.restore_network()

    def _report_damage(self, file: str, error: str) -> None:
        self._reporter.event("damaged", file=file, error=error)

    def _check_initial(self, optimization: Optimization, initial: Mapping[str, Tensor]) -> None:
        lineage = self._identity.lineage
        assert lineage is not None
        check_fit(optimization.model, initial, lineage["from"])
        at = "" if lineage["epoch"] is None else f" at epoch {lineage['epoch']}, step {lineage['step']}"
        self._reporter.log(f"starts with the weights of {lineage['from']}{at}")

    def begin(self) -> None:
        """Report the start of training; called when the first batch is there. All before it counts as start-up."""
        if self._has_begun:
            return
        self._has_begun = True
        self._save_due = time.monotonic() + self._save_every_s
        self.throughput.restart_clock(self._data.stats())
        startup_cpu_s = self._reporter.training_begins(self._data.stats()["prepare_cpu_s"])
        self._reporter.event(
            "started",
            pid=os.getpid(),
            **self.position,
            startup_cpu_s=startup_cpu_s,
            first_epoch=self._data.first_epoch,
            **({"last_epoch": self.at.last_epoch_event} if self.at.last_epoch_event else {}),
        )

    def poll_command(self) -> Command | None:
        """The next command to this rank, if any; only rank 0 gets commands."""
        return self._inbox.poll() if self._comm.rank == 0 else None

    def choose_action(self) -> StepAction | None:
        """What rank 0 has all ranks do after the step in progress: the next command, or a checkpoint."""
        command = self.poll_command()
        is_due = self._comm.rank == 0 and time.monotonic() >= self._save_due
        return "checkpoint" if command is None and is_due else command

    def end_step(self, step: StepResult, samples: int, optimization: Optimization) -> None:
        """Count a step over a global batch of `samples`, and execute the command that all ranks agreed on."""
        at = self.at
        at.step += 1
        is_last = at.step == self.steps_per_epoch
        optimization.kept.end_step(at.epoch, is_last=is_last, applied=not step.skipped)
        if step.skipped:
            at.skipped_steps += 1
        else:
            at.loss_sum += step.loss_sum
            at.samples += samples
        self.throughput.add_step(samples)
        if is_last:
            self.throughput.end_training()
        self.report_progress()
        if step.command == "stop" and is_last:
            self._stop_at_epoch_end = True  # an epoch that is trained is worth its evaluation
        elif step.command == "checkpoint":
            if not is_last:  # a resume from there would not evaluate the epoch; the next one begins with it
                with self.throughput.pausing():
                    self.save(optimization)
        else:
            self.execute(step.command, optimization)

    def validation_is_due(self) -> bool:
        """Whether the position is one at which the member is evaluated within an epoch, and was not yet."""
        every, at = self._identity.validate_every, self.at
        is_place = bool(every) and 0 < at.step < self.steps_per_epoch and self.global_step % every == 0
        return is_place and (not at.validations or at.validations[-1][0] != at.step)

    def add_validation(self, metrics: Mapping[str, float], optimization: Optimization) -> None:
        """Take note of an evaluation within an epoch."""
        self.at.validations.append([self.at.step, to_json_metrics(metrics)])
        shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        self._reporter.log(f"epoch {self.at.epoch}, step {self.at.step}: {shown}")
        self._select(metrics, optimization)

    def _select(self, metrics: Mapping[str, float] | None, optimization: Optimization) -> bool:
        """Decide whether the weights that were evaluated are the best so far, by the figures of rank 0.

        Args:
            metrics: None where this rank has reported none.

        Returns:
            Whether the objective was measured. A train function need not measure it each time, once it has.
        """
        by, at = self._identity.selected_by, self.at
        if by is None:
            return False
        reported = gather_json(self._comm, None if metrics is None else dict(metrics))[0] or {}
        if by["metric"] not in reported:
            # Within the first epoch it may not be known yet what is predicted.
            if self.selection.is_measured or not self._observer.is_settled:
                return False
            raise TrainingError(describe_missing_objective(by["metric"], reported))
        delta = (self._identity.early_stopping or {}).get("min_delta", 0.0)
        is_best = self.selection.add(by["mode"], delta, at.epoch, at.step, reported[by["metric"]], reported)
        if is_best and self._identity.keep == "best":
            optimization.kept.keep_best()
        return True

    def report_progress(self) -> None:
        """Emit a progress event, at most once a second. A silent member would be taken to hang."""
        self._reporter.progress(self._progress)

    def _progress(self) -> dict[str, Any]:
        samples_per_s = self.throughput.samples_per_s()
        return {**self.position, "steps": self.steps_per_epoch, "samples_per_s": samples_per_s}

    def execute(self, command: Command | None, optimization: Optimization) -> None:
        """Leave the training loop where the command says so, with a checkpoint where the member may resume."""
        if command == "stop":
            self.save(optimization)
            raise StopTraining("stopped")
        if command == "prune":
            raise StopTraining("pruned")
        if command == "cancel":
            raise StopTraining("cancelled")

    def interrupt_evaluation(self) -> None:
        """Execute a command while the member is evaluated; a resume evaluates it from the beginning.

        The checkpoint is written once the loop has been left: until then the model may have other weights than
        those in training.
        """
        command = self.poll_command()
        if command == "stop":
            ended = StopTraining("stopped")
            ended.is_unsaved = self._saved_at != (self.at.epoch, self.at.step)
            raise ended
        if command == "cancel":
            raise StopTraining("cancelled")

    def end_epoch(self, optimization: Optimization) -> None:
        """Report an epoch whose steps are all done, wait for the pruner's decision, and save."""
        at = self.at
        if at.step != self.steps_per_epoch:
            raise TrainingError(
                f"epoch {at.epoch} was left after {at.step} of {self.steps_per_epoch} steps: read all of "
                "member.batches(), as a member sees each sample of an epoch once; member.stop(reason) ends it then"
            )
        if at.metrics.get("loss") != at.metrics.get("loss"):
            raise Diverged(f"the validation loss is NaN after epoch {at.epoch}, learning rate {optimization.lr:g}")
        if self._select(at.metrics if at.is_reported else None, optimization) or at.validations:
            self.selection.end_epoch((self._identity.early_stopping or {}).get("patience"))
        stats = self._data.stats()
        at.last_epoch_event = {
            **self.position,
            "metrics": to_json_metrics(at.metrics),
            "train_loss": at.loss_sum / at.samples if at.samples else None,
            "lr": optimization.lr,
            "samples": at.samples,
            "skipped_steps": at.skipped_steps,
            "loss_scale": optimization.loss_scale,
            "sent_bytes": optimization.sent_bytes(),
            **({"validations": at.validations} if at.validations else {}),
            **self.throughput.end_epoch(stats),
        }
        self._reporter.event("epoch", **at.last_epoch_event)
        self._reporter.usage(stats["prepare_cpu_s"])
        prune_decision, change = self._receive_prune_decision()
        at.next_epoch()
        if at.epoch < self._identity.epochs:
            at.stop_reason = at.stop_asked
        at.stop_asked = None
        if prune_decision == "prune" and self.is_over:
            prune_decision = (
                "continue"  # it has stopped early by itself: it is as good as its weights that are kept
            )
        if change is not None and prune_decision in (None, "continue") and not self.is_over:
            if change["command"] == "stop_after_epoch":
                prune_decision = "stop"
            else:
                self._switch_feeder(change)
        is_due = self.is_over or self._is_checkpoint_due(at.epoch)
        if prune_decision in (None, "continue") and is_due:
            self.save(optimization)
        self.execute(prune_decision, optimization)

    def _receive_prune_decision(self) -> tuple[Command | None, dict[str, Any] | None]:
        """The command after an epoch, and the deferred command; the same on all ranks.

        Rank 0 waits for the command where a pruner decides.
        """
        prune_decision: Command | None = None
        if self._stop_at_epoch_end:
            prune_decision = "stop"
        elif self._comm.rank == 0:
            prune_decision = self._inbox.wait() if self._job.awaits_pruner else self._inbox.poll()
        change = self._inbox.pop_deferred() if self._comm.rank == 0 else None
        agreed = gather_json(self._comm, [prune_decision, change])[0]
        return agreed[0], agreed[1]

    def conclude(self, optimization: Optimization) -> None:
        """Give the model the weights that are kept, and leave the stream, where the member stops early."""
        optimization.kept.adopt()
        if self.ends_early:
            self._data.leave()

    def stop_between_epochs(self, reason: str, optimization: Optimization) -> None:
        """End the member where no epoch is in progress; all ranks call it."""
        self.at.stop_reason = reason
        self.conclude(optimization)

    def use_weights(
        self, optimization: Optimization, weights: Mapping[str, Tensor] | None, metrics: Mapping[str, float] | None
    ) -> None:
        """Let other weights count for the member; see `TrainContext.use_weights`."""
        optimization.replace_weights(weights)
        self.at.handed_over = {name: float(value) for name, value in (metrics or {}).items()}
        self._saved_at, self._digest = None, ""

    def _describe_end(self) -> dict[str, Any]:
        """Fields of the `finished` event: which evaluation is kept, and why the member ended early."""
        own, best = self._identity, self.selection.best
        fields: dict[str, Any] = {"metrics": to_json_metrics(self.at.metrics)}
        which: dict[str, Any] = {}
        if own.selected_by is not None and best is not None:
            which = {**own.selected_by, **{name: best[name] for name in ("epoch", "step", "value")}}
        if self.at.handed_over is not None:
            metrics = self.at.handed_over or self.at.metrics
            fields = {"metrics": to_json_metrics(metrics), "kept": {"by": "use_weights"}}
        elif which and own.keep == "best" and best is not None:
            fields = {"metrics": to_json_metrics(best["metrics"]), "kept": which}
        if self.at.stop_reason is not None:
            fields["early_stopping"] = {"reason": self.at.stop_reason, "epochs": own.epochs}
        elif which and self.selection.is_stopped:
            fields["early_stopping"] = {**(own.early_stopping or {}), "epochs": own.epochs, "best": which}
        return fields

    def _switch_feeder(self, command: dict[str, Any]) -> None:
        """Read the stream of another feeder from here on, or none; report it when done."""
        feeder = command.get("feeder")
        shared = self._data.switch_feeder(feeder, self.at.epoch)
        self._reporter.event(
            "moved", cohort=command.get("cohort"), feeder=feeder, epoch=self.at.epoch, shared=shared
        )

    def finish(self, optimization: Optimization) -> None:
        """Save and report the end of the training loop."""
        self.conclude(optimization)
        self.begin()
        if (why := optimization.kept.explain_absence()) is not None:
            self._reporter.log(why)
        if self._saved_at != (self.at.epoch, self.at.step):
            self.save(optimization)
        if self._comm.rank == 0:
            digest = self._digest or weights_sha256(optimization.model.state_dict())
            self._reporter.event(
                "finished",
                epoch=self.at.epoch - 1,
                weights_sha256=digest,
                **self._describe_end(),
                **({"predictions": self._predictions} if self._predictions else {}),
            )

    def add_predictions(self, split: str, digest: str) -> None:
        """Take note of the digest of saved predictions."""
        self._predictions[split] = digest

    def save(self, optimization: Optimization) -> None:
        """Save the member's whole state; all ranks call it, rank 0 writes."""
        self._saved_at = (self.at.epoch, self.at.step)
        self.agree_on_stop()  # a resume within an epoch ends after it, too
        self.at.selection = {} if self._identity.selected_by is None else self.selection.as_dict()
        parts = optimization.state_dict()
        if self._observer.seen is not None:
            parts |= self._observer.seen.as_record()
        if self._comm.rank != 0:
            return
        began = time.monotonic()
        if (size := sum(tensor.nbytes for tensor in find_tensors(parts))) >= LARGE_BYTES:
            self._reporter.event("progress", **self._progress(), saves_bytes=size)
        saved = self._checkpointer.save(self._data.first_epoch or 0, self.at, parts)
        self._digest, self._save_due = saved["weights_sha256"], time.monotonic() + self._save_every_s
        self._reporter.event("checkpoint", **self.position, **saved, write_s=time.monotonic() - began)

    def close(self) -> None:
        """Leave the stream, and report the CPU time used to the end."""
        self._data.close()
        self._reporter.usage(self._data.stats()["prepare_cpu_s"], is_last=True)
