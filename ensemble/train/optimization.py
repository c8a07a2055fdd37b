"""The step of a data-parallel member in mixed precision: from losses to new weights, the same on all ranks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemble.comm import Communicator
from ensemble.comm.autotune.plan import ExchangeOptions, ExchangePlan, plan_exchange
from ensemble.comm.gradients import FusedBroadcast, GradientExchange
from ensemble.train.batchnorm import guard_small_batches
from ensemble.train.gather import gather_json
from ensemble.train.job import Command, Diverged, TrainingError
from ensemble.train.precision import MixedPrecision, step_schedule
from ensemble.train.step_sync import StepSync

if TYPE_CHECKING:
    from pipelines import Batch


@dataclass(frozen=True)
class StepResult:
    """What a step did, alike on all ranks.

    Attributes:
        loss_sum: the losses of the global batch, added up.  lr: the learning rate that was used.
        skipped: whether a loss-scale overflow left the weights as they were.
        command: what rank 0 was asked to do meanwhile.
    """

    loss_sum: float
    lr: float
    skipped: bool
    command: Command | None


class Optimization:
    """A model, its optimizer and schedule: `start`, then `begin` and `end`, once for each global batch.

    Args:
        model, optimizer, schedule: see `TrainContext.prepare`.
        clip_norm: largest L2 norm of a step's gradient, None for no clipping.
        precision: of the member.
        comm: its ranks.
        device: where the model goes.
        declared: how its gradients are exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        clip_norm: float | None,
        precision: MixedPrecision,
        comm: Communicator,
        device: torch.device,
        declared: ExchangeOptions = ExchangeOptions(),  # noqa: B008 - frozen
    ) -> None:
        self.model = model.to(device)
        self._optimizer, self._schedule, self._clip_norm, self._precision = (
            optimizer,
            schedule,
            clip_norm,
            precision,
        )
        everything, buffers = list(model.parameters()), list(model.buffers())
        precision.prepare(model)
        _check_owned(everything, optimizer)
        _move_state(optimizer, device)
        guard_small_batches(model)
        self._everything = everything
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # What the optimizer does not hold is not trained: its gradient, if it gets one, goes nowhere.
        self._parameters = [p for p in everything if p.requires_grad and id(p) in owned]
        self._declared, self._comm = declared, comm
        self.plan = ExchangePlan()
        self._exchange = GradientExchange([], comm)  # of nothing, until `start`
        self._sync = StepSync(comm, device)
        self._losses_before: Tensor | None = None
        self.share_buffers = FusedBroadcast(buffers, comm)
        FusedBroadcast([*everything, *buffers], comm)()
        self._sent = 0.0

    @property
    def lr(self) -> float:
        """The learning rate of the optimizer's first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def loss_scale(self) -> float | None:
        """What losses are multiplied by now; None where the precision needs no such thing."""
        return self._precision.loss_scale if self._precision.may_skip else None

    @property
    def bucket_compressions(self) -> dict[str, int]:
        """How many buckets of gradients travel as what."""
        return self._exchange.bucket_compressions

    def sent_bytes(self) -> float:
        """What a rank has sent to the others since the last call, on the average; all ranks call it together."""
        before, self._sent = self._sent, self._comm.sent_bytes
        shares: list[float] = gather_json(self._comm, self._sent - before)
        return sum(shares) / len(shares)

    def begin(
        self,
        command: Command | None,
        losses: Tensor | None,
        batch: Batch,
        weight: Tensor | None = None,
        *,
        last: bool = True,
    ) -> None:
        """This rank's part of the gradient of the global batch's mean loss; its exchange begins as it comes.

        With gradient accumulation it is called for one part of this rank's rows after the other; the gradients add
        up, and the exchange begins with the last.

        Args:
            command: what this rank was asked to do, to be agreed on by all; given with the last part.
            losses: [b], one for each sample; None from a rank without samples.
            batch: to which they belong.
            weight: [b], what each loss is multiplied by; None for 1.
            last: whether this rank has no more of the global batch.
        """
        self._exchange.loss_scale = self._precision.loss_scale
        if losses is None:
            self._sync.send(command, None)
            return
        size = len(batch["index"])
        if losses.shape != (size,):
            raise TrainingError(
                f"the loss must be one value per sample, [{size}], got a tensor of shape {list(losses.shape)}: "
                'leave it unreduced (reduction="none"), averaged over everything but the samples'
            )
        narrow = losses.dtype in (torch.float16, torch.bfloat16)
        losses = losses.float() if narrow else losses
        loss_sum = (losses if weight is None else losses * weight).sum()
        scaled = self._precision.scale(loss_sum / batch.global_size)
        so_far = loss_sum.detach()
        if self._losses_before is not None:
            so_far = self._losses_before + so_far
        self._losses_before = None if last else so_far
        with contextlib.ExitStack() as around:
            around.enter_context(self._precision.explained())
            if last:
                self._sync.send(command, so_far)
                around.enter_context(self._exchange.overlap_backward())
            scaled.backward()  # type: ignore[no-untyped-call]

    def end(self, batch: Batch, waiting: contextlib.AbstractContextManager[None]) -> StepResult:
        """Exchange, clip and step; `waiting` is entered while peers are waited for.

        Raises:
            Diverged: the loss of some rank is NaN or infinite, and no loss scale is to blame.
        """
        lr = self.lr
        applied = True
        # Without a single sample (all were skipped on request) there is nothing to learn.
        if batch.global_size > 0:
            with waiting:
                self._exchange.finish()
            applied = self._precision.step(self._optimizer, self._parameters, self._clip_norm)
            self._exchange.end_step(applied)
        for parameter in self._everything:
            parameter.grad = None
        step_schedule(self._schedule, stepped=applied and batch.global_size > 0)
        synced = self._sync.receive()
        if applied and not synced.is_finite:
            raise Diverged(f"the loss is {synced.loss_sum} at learning rate {lr:g}")
        return StepResult(synced.loss_sum, lr, not applied, synced.command)

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs, by part; all ranks call it together."""
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
            "precision": self._precision.state_dict(),
            "exchange": {"plan": self.plan.as_dict(), **self._exchange.state_dict()},
        }

    def start(self, state: dict[str, Any] | None) -> None:
        """Be ready for the first step: from the beginning, or where `state_dict` was taken."""
        exchange = None if state is None else state.get("exchange")  # absent from those of the first version
        known = None
        if exchange is not None and exchange.get("world", self._comm.world) == self._comm.world:
            known = ExchangePlan.from_dict(exchange["plan"])  # with other workers other things are best
        self._exchange, self.plan = plan_exchange(
            self._comm, self._parameters, self._declared, revertible=self._precision.may_skip, known=known
        )
        self._sent = self._comm.sent_bytes  # what came before was no training
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._schedule is not None:
            self._schedule.load_state_dict(state["schedule"])
        self._precision.load_state_dict(state["precision"])
        if exchange is not None:
            self._exchange.load_state_dict(exchange)

    def close(self) -> None:
        """Let go of the model and of the other workers."""
        self._exchange.close()


def _check_owned(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    known = {id(p) for p in parameters}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise TrainingError(
            "the optimizer holds a parameter that is not the model's: it would be neither exchanged between "
            "workers nor saved; make it part of the model"
        )


def _move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """State that an optimizer made when it was built (Adagrad) goes where its parameters went."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = value.to(device)
