"""A member between its steps: its position, its events, its commands, its checkpoints."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from ensemble.comm import Communicator
from ensemble.comm.autotune.plan import ExchangePlan
from ensemble.spec import Ensemble
from ensemble.store import weights_sha256
from ensemble.train.checkpoint import Checkpointer, Position
from ensemble.train.data import Data
from ensemble.train.gather import gather_json
from ensemble.train.job import Command, Diverged, Inbox, Job, StopTraining, TrainingError
from ensemble.train.optimization import Optimization, StepResult
from ensemble.train.reporter import Reporter, to_json_metrics
from ensemble.train.throughput import Throughput


class Lifecycle:
    """One member on one rank, from `resume` to `finish`.

    Attributes:
        at: its position.
        throughput: how fast it trains.
        steps_per_epoch: global batches of an epoch.
    """

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        data: Data,
        reporter: Reporter,
        inbox: Inbox,
        steps_per_epoch: int,
        checkpointer: Checkpointer,
    ) -> None:
        self.at = Position()
        self.throughput = Throughput()
        self.steps_per_epoch = steps_per_epoch
        self._job, self._identity, self._comm, self._data = job, job.identity, comm, data
        self._reporter, self._inbox, self._ensemble = reporter, inbox, ensemble
        self._checkpointer = checkpointer
        self._has_begun = self._stop_at_epoch_end = False
        self._saved_at: tuple[int, int] | None = None
        self._digest = ""

    @property
    def is_over(self) -> bool:
        """Whether all epochs are done."""
        return self.at.epoch >= self._identity.epochs

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
            TrainingError: the checkpoint is missing, belongs to another identity, or was trained on other data.
        """
        state = self._checkpointer.load()
        # Before the first collective whose order depends on it.
        position = None if state is None else [state["position"][name] for name in ("epoch", "step")]
        if any(peer != position for peer in gather_json(self._comm, position)):
            raise RuntimeError(
                f"the workers of {self._identity.member} do not see the same checkpoint: the run directory "
                f"{self._job.run_dir} must be shared by all nodes"
            )
        optimization.start(state, self._job.exchange_plan)
        if optimization.plan != ExchangePlan():
            compressions = sorted(optimization.bucket_compressions.items())
            self._reporter.event("plan", **asdict(optimization.plan), auto=compressions)
        if state is not None:
            self._data.first_epoch = state["first_epoch"]
            self.at = Position(**state["position"])
            self._saved_at = (self.at.epoch, self.at.step)

    def begin(self) -> None:
        """Report the start of training; called when the first batch is there. All before it counts as start-up."""
        if self._has_begun:
            return
        self._has_begun = True
        self.throughput.restart_clock(self._data.stats())
        startup_cpu_s = self._reporter.training_begins(self._data.stats()["prepare_cpu_s"])
        self._reporter.event(
            "started",
            pid=os.getpid(),
            **self.position,
            startup_cpu_s=startup_cpu_s,
            first_epoch=self._data.first_epoch,
            **({"last_epoch": self.at.told} if self.at.told else {}),
        )

    def poll_command(self) -> Command | None:
        """The next command to this rank, if any; only rank 0 gets commands."""
        return self._inbox.poll() if self._comm.rank == 0 else None

    def end_step(self, step: StepResult, samples: int, optimization: Optimization) -> None:
        """Count a step over a global batch of `samples`, and execute the command that all ranks agreed on."""
        at = self.at
        at.step += 1
        if step.skipped:
            at.skipped_steps += 1
        else:
            at.loss_sum += step.loss_sum
            at.samples += samples
        self.throughput.add_step(samples)
        if at.step == self.steps_per_epoch:
            self.throughput.end_training()
        self.report_progress()
        if step.command == "stop" and at.step == self.steps_per_epoch:
            self._stop_at_epoch_end = True  # an epoch that is trained is worth its evaluation
        else:
            self.execute(step.command, optimization)

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

    def end_epoch(self, optimization: Optimization) -> None:
        """Report an epoch whose steps are all done, wait for the verdict, and save."""
        at = self.at
        if at.step != self.steps_per_epoch:
            raise TrainingError(
                f"epoch {at.epoch} was left after {at.step} of {self.steps_per_epoch} steps: "
                "read member.batches() to its end"
            )
        if at.metrics.get("loss") != at.metrics.get("loss"):
            raise Diverged(f"the validation loss is NaN after epoch {at.epoch}, learning rate {optimization.lr:g}")
        stats = self._data.stats()
        at.told = {
            **self.position,
            "metrics": to_json_metrics(at.metrics),
            "train_loss": at.loss_sum / at.samples if at.samples else None,
            "lr": optimization.lr,
            "samples": at.samples,
            "skipped_steps": at.skipped_steps,
            "loss_scale": optimization.loss_scale,
            "sent_bytes": optimization.sent_bytes(),
            **self.throughput.end_epoch(stats),
        }
        self._reporter.event("epoch", **at.told)
        self._reporter.usage(stats["prepare_cpu_s"])
        verdict, change = self._receive_verdict()
        at.next_epoch()
        if change is not None and verdict in (None, "continue") and not self.is_over:
            if change["command"] == "stop_after_epoch":
                verdict = "stop"
            else:
                self._switch_feeder(change)
        is_due = self.is_over or at.epoch % self._ensemble.checkpoint_every == 0
        if verdict in (None, "continue") and is_due:
            self.save(optimization)
        self.execute(verdict, optimization)

    def _receive_verdict(self) -> tuple[Command | None, dict[str, Any] | None]:
        """The command after an epoch, and the deferred command; the same on all ranks.

        Rank 0 waits for the command where a pruner decides.
        """
        verdict: Command | None = None
        if self._stop_at_epoch_end:
            verdict = "stop"
        elif self._comm.rank == 0:
            verdict = self._inbox.wait() if self._job.gated else self._inbox.poll()
        change = self._inbox.pop_deferred() if self._comm.rank == 0 else None
        agreed = gather_json(self._comm, [verdict, change])[0]
        return agreed[0], agreed[1]

    def _switch_feeder(self, command: dict[str, Any]) -> None:
        """Read the stream of another feeder from here on, or none; report it when done."""
        feeder = command.get("feeder")
        shared = self._data.switch_feeder(feeder, self.at.epoch)
        self._reporter.event(
            "moved", cohort=command.get("cohort"), feeder=feeder, epoch=self.at.epoch, shared=shared
        )

    def finish(self, optimization: Optimization) -> None:
        """Save and report the end of the training loop; end an epoch that it left after the last step."""
        if self.at.step:
            self.end_epoch(optimization)
        self.begin()
        if self._saved_at != (self.at.epoch, self.at.step):
            self.save(optimization)
        if self._comm.rank == 0:
            digest = self._digest or weights_sha256(optimization.model.state_dict())
            metrics = to_json_metrics(self.at.metrics)
            self._reporter.event("finished", epoch=self.at.epoch - 1, metrics=metrics, weights_sha256=digest)

    def save(self, optimization: Optimization) -> None:
        """Save the member's whole state; all ranks call it, rank 0 writes."""
        self._saved_at = (self.at.epoch, self.at.step)
        parts = optimization.state_dict()
        if self._comm.rank != 0:
            return
        saved = self._checkpointer.save(self._data.first_epoch or 0, self.at, parts)
        self._digest = saved["weights_sha256"]
        self._reporter.event("checkpoint", **self.position, **saved)

    def close(self) -> None:
        """Leave the stream, and report the CPU time used to the end."""
        self._data.close()
        self._reporter.usage(self._data.stats()["prepare_cpu_s"], is_last=True)
