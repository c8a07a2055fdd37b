"""A member between its steps: where it is, what is told of it, what it is asked to do, when it is saved."""

from __future__ import annotations

import functools
import os
from typing import Any

from ensemble.comm import Communicator
from ensemble.comm.autotune.plan import ExchangePlan
from ensemble.spec import Ensemble
from ensemble.store import RunDir, save_checkpoint, weights_sha256
from ensemble.train import checkpoint
from ensemble.train.checkpoint import Position
from ensemble.train.data import Data
from ensemble.train.data_identity import training_data
from ensemble.train.gather import gather_json
from ensemble.train.job import Command, Diverged, Ended, Inbox, Job, TrainingError
from ensemble.train.optimization import Optimization, Stepped
from ensemble.train.reporter import Reporter, finite
from ensemble.train.throughput import Throughput


class Lifecycle:
    """One member on one rank, from `resume` to `finish`.

    Attributes:
        at: how far it is.  pace: how fast.
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
    ) -> None:
        self.at = Position()
        self.pace = Throughput()
        self.steps_per_epoch = steps_per_epoch
        self._job, self._identity, self._comm, self._data = job, job.identity, comm, data
        self._reporter, self._inbox = reporter, inbox
        self._ensemble = ensemble
        files = RunDir(job.run_dir)
        self._path = files.checkpoint(job.identity.member, job.attempt)
        # Where it wrote one itself, as when it is called again by hand, that is the last.
        before = job.checkpoint is not None and not self._path.exists()
        self._goes_on_from = files.member(job.identity.member) / str(job.checkpoint) if before else self._path
        self._begun = self._stop_at_epoch_end = False
        self._saved_at: tuple[int, int] | None = None
        self._digest = ""

    @property
    def over(self) -> bool:
        """Whether all epochs are done."""
        return self.at.epoch >= self._identity.epochs

    @property
    def where(self) -> dict[str, int]:
        """Own epoch and step in it, as events say it."""
        return {"epoch": self.at.epoch, "step": self.at.step}

    @property
    def global_step(self) -> int:
        """Steps done since the member began."""
        return self.at.epoch * self.steps_per_epoch + self.at.step

    @functools.cached_property
    def _reading(self) -> dict[str, Any]:
        return training_data(self._ensemble, self._identity.params)

    def resume(self, optimization: Optimization) -> None:
        """Go on from the member's checkpoint, if it has one.

        Raises:
            TrainingError: it belongs to another identity, or was trained on other data.
        """
        if self._job.checkpoint is not None and not self._goes_on_from.exists():
            raise TrainingError(f"{self._goes_on_from}, the checkpoint that the log names, is not there any more")
        state = checkpoint.read(self._goes_on_from, self._identity, self._reading, self._ensemble.elastic)
        # Before anything that the ranks do together depends on it.
        seen = None if state is None else [state["position"][name] for name in ("epoch", "step")]
        if any(peer != seen for peer in gather_json(self._comm, seen)):
            raise RuntimeError(
                f"the workers do not see the same {self._goes_on_from}: "
                "the run directory must be shared by all nodes"
            )
        optimization.start(state)
        if optimization.plan != ExchangePlan():
            travels = sorted(optimization.bucket_compressions.items())
            self._reporter.event("plan", **optimization.plan.as_dict(), auto=travels)
        if state is not None:
            self._data.first_epoch = state["first_epoch"]
            self.at = Position(**state["position"])
            self._saved_at = (self.at.epoch, self.at.step)

    def begin(self) -> None:
        """Before the first step: what came before, also the wait for the first batch, was start-up."""
        if self._begun:
            return
        self._begun = True
        self.pace.start_clock(self._data.stats())
        startup_cpu_s = self._reporter.training_begins(self._data.stats()["prepare_cpu_s"])
        self._reporter.event(
            "started",
            pid=os.getpid(),
            **self.where,
            startup_cpu_s=startup_cpu_s,
            first_epoch=self._data.first_epoch,
            **({"last_epoch": self.at.told} if self.at.told else {}),
        )

    def asked(self) -> Command | None:
        """What this rank was asked to do, if anything; only rank 0 is."""
        return self._inbox.poll() if self._comm.rank == 0 else None

    def stepped(self, step: Stepped, samples: int, optimization: Optimization) -> None:
        """A step over a global batch of `samples` is done; do what all ranks agreed on with it."""
        at = self.at
        at.step += 1
        if step.skipped:
            at.skipped_steps += 1
        else:
            at.loss_sum += step.loss_sum
            at.samples += samples
        self.pace.add(samples)
        if at.step == self.steps_per_epoch:
            self.pace.trained()
        self.alive()
        if step.command == "stop" and at.step == self.steps_per_epoch:
            self._stop_at_epoch_end = True  # an epoch that is trained is worth its evaluation
        else:
            self.obey(step.command, optimization)

    def alive(self) -> None:
        """Tell where it is, once a second, also while it evaluates: who says nothing is taken to hang."""
        self._reporter.progress(self._progress)

    def _progress(self) -> dict[str, Any]:
        return {**self.where, "steps": self.steps_per_epoch, "samples_per_s": self.pace.samples_per_s()}

    def obey(self, command: Command | None, optimization: Optimization) -> None:
        """End as asked, with a checkpoint where it is to go on one day."""
        if command == "stop":
            self._save(optimization)
            raise Ended("stopped")
        if command == "prune":
            raise Ended("pruned")
        if command == "cancel":
            raise Ended("cancelled")

    def end_epoch(self, optimization: Optimization) -> None:
        """All steps of an epoch are done: tell how it went, hear the verdict, save."""
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
            **self.where,
            "metrics": finite(at.metrics),
            "train_loss": at.loss_sum / at.samples if at.samples else None,
            "lr": optimization.lr,
            "samples": at.samples,
            "skipped_steps": at.skipped_steps,
            "loss_scale": optimization.loss_scale,
            "sent_bytes": optimization.sent_bytes(),
            **self.pace.end_epoch(stats),
        }
        self._reporter.event("epoch", **at.told)
        self._reporter.usage(stats["prepare_cpu_s"])
        verdict, change = self._verdict()
        at.next_epoch()
        if change is not None and verdict in (None, "continue") and not self.over:
            if change["command"] == "stop_after_epoch":
                verdict = "stop"
            else:
                self._move(change)
        if verdict in (None, "continue") and (self.over or at.epoch % self._ensemble.checkpoint_every == 0):
            self._save(optimization)
        self.obey(verdict, optimization)

    def _verdict(self) -> tuple[Command | None, dict[str, Any] | None]:
        """What rank 0 is told after an epoch, and what is to change now; it waits where a pruner decides.

        All ranks hear the same at the same epoch's end, whenever it was said.
        """
        verdict: Command | None = None
        if self._stop_at_epoch_end:
            verdict = "stop"
        elif self._comm.rank == 0:
            verdict = self._inbox.wait() if self._job.gated else self._inbox.poll()
        change = self._inbox.later() if self._comm.rank == 0 else None
        agreed = gather_json(self._comm, [verdict, change])[0]
        return agreed[0], agreed[1]

    def _move(self, asked: dict[str, Any]) -> None:
        """Read another stream from here on, or none; say so when it is done."""
        feeder = asked.get("feeder")
        shared = self._data.move(feeder, self.at.epoch)
        where = {"cohort": asked.get("cohort"), "feeder": feeder}
        self._reporter.event("moved", **where, epoch=self.at.epoch, shared=shared)

    def finish(self, optimization: Optimization) -> None:
        """The loop has come to its end: close an epoch that it left after its last step, and save."""
        if self.at.step:
            self.end_epoch(optimization)
        self.begin()
        if self._saved_at != (self.at.epoch, self.at.step):
            self._save(optimization)
        if self._comm.rank == 0:
            digest = self._digest or weights_sha256(optimization.model.state_dict())
            metrics = finite(self.at.metrics)
            self._reporter.event("finished", epoch=self.at.epoch - 1, metrics=metrics, weights_sha256=digest)

    def _save(self, optimization: Optimization) -> None:
        """Write the member's whole state; rank 0 does, for all."""
        self._saved_at = (self.at.epoch, self.at.step)
        parts = optimization.state_dict()
        if self._comm.rank != 0:
            return
        first_epoch = self._data.first_epoch or 0
        save_checkpoint(self._path, checkpoint.pack(self._identity, self._reading, first_epoch, self.at, parts))
        self._digest = weights_sha256(parts["model"])
        self._reporter.event("checkpoint", **self.where, path=str(self._path), weights_sha256=self._digest)

    def close(self) -> None:
        """Leave the stream, and tell the CPU time used to the end."""
        self._data.close()
        self._reporter.usage(self._data.stats()["prepare_cpu_s"])
