"""Steps a data-parallel member in mixed precision: from losses to new weights, equal on all ranks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ensemble.comm import Communicator
from ensemble.comm.exchange_plan import ExchangeOptions, ExchangePlan, plan_exchange
from ensemble.comm.gradients import FusedBroadcast, GradientExchange
from ensemble.comm.sparse_gradients import coalesce_gradients, find_sparse_parameters, make_dense
from ensemble.train.batchnorm import guard_small_batches
from ensemble.train.best_weights import BestWeights
from ensemble.train.gather import compute_once, gather_json
from ensemble.train.job import Diverged, StepAction, TrainingError
from ensemble.train.own_tensors import check_same_base, fit_buffers, load_own, own_state, select_own
from ensemble.train.precision import MixedPrecision, step_schedule
from ensemble.train.step_sync import StepResult, StepSync
from ensemble.train.structure import describe, find_modes, restore, select_changed

if TYPE_CHECKING:
    from ensemble.train.callbacks import Callbacks
    from pipelines import Batch

#: What to write where `TrainContext.step` is not the member's step.
OWN_STEPS = (
    "a loop with steps of its own (LBFGS and its closure, the two optimizers of a GAN) is a train= of `for epoch "
    "in range(member.identity.epochs): for batch in member.dataloader('train'): ...`, which calls neither "
    "member.backward() nor member.step(), and keeps further models and optimizers by member.state(name, ...)"
)


class Optimization:
    """A model, its optimizer and schedule: `start`, then `begin` and `end`, once for each global batch.

    What it trains, exchanges and clips is what model and optimizer have when an epoch begins.

    Args:
        clip_norm: largest L2 norm of a step's gradient; None for no clipping.

    Attributes:
        structure: of the checkpoint that was loaded, or else of the model as it was built (`structure.restore`).
            `modes` in it are those of the last epoch's first batch.
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
        exchange: ExchangeOptions,
    ) -> None:
        if (
            comm.world > 1
            and (lazy := next((n for n, p in model.named_parameters() if is_lazy(p)), None)) is not None
        ):
            raise TrainingError(
                f"{lazy} has no shape before the first batch: with several workers declare its size"
            )
        if not hasattr(optimizer, "param_groups"):
            raise TrainingError(
                "a member has one optimizer (which may have several groups of parameters), got "
                f"{type(optimizer).__name__}; {OWN_STEPS}"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        self._needs_closure = closure is not None and closure.default is closure.empty
        self.model = model.to(device)
        self.optimizer = optimizer
        self._callbacks: Callbacks | None = None
        self.kept = BestWeights(self.model, None, keeps_best=False)
        self._schedule, self._clip_norm, self._precision = schedule, clip_norm, precision
        fit_buffers(model, dict(model.named_buffers()))
        precision.prepare(model)
        _check_state(model)
        self.structure = self._built = describe(model, optimizer)
        _move_state(optimizer, device)
        guard_small_batches(model)
        self._exchange_options, self._comm, self._device = exchange, comm, device
        self.plan = ExchangePlan()
        self._exchange = GradientExchange([], comm)  # of nothing, until `start`
        self._sync = StepSync(comm, device)
        self._losses_before: Tensor | None = None
        self._find_tensors()
        FusedBroadcast([*self._everything, *self._list_buffers()], comm)()
        self._sent = 0.0

    def _find_tensors(self) -> None:
        """Read which tensors the model has now, and which of its parameters are trained."""
        own = select_own(self.model)
        self._everything = list(filter(own, self.model.parameters()))
        self._holders = [module for module in self.model.modules() if module._buffers]
        owned = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        # Parameters that the optimizer does not hold are not trained: their gradients are not exchanged.
        self._parameters = [p for p in self._everything if p.requires_grad and id(p) in owned]

    def _list_buffers(self) -> list[Tensor]:
        """The model's own buffers as they are now: a module may have put others in their places."""
        own, buffers = select_own(self.model), (b for module in self._holders for b in module._buffers.values())
        return [buffer for buffer in buffers if buffer is not None and own(buffer)]

    def share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0."""
        if self._comm.world > 1:
            FusedBroadcast(self._list_buffers(), self._comm)()

    def begin_epoch(self) -> None:
        """Train, exchange and clip what model and optimizer have from here on; all ranks call it together."""
        had, trained = set(map(id, self._everything)), list(map(id, self._parameters))
        self._find_tensors()
        if not had.issuperset(map(id, self._everything)):
            self.model.to(self._device)
            FusedBroadcast([*self._everything, *self._list_buffers()], self._comm)()
        if trained != list(map(id, self._parameters)):
            self._exchange.exchange(self._parameters, find_sparse_parameters(self.model))

    def take_modes(self) -> None:
        """Remember which modules are in evaluation mode as an epoch is trained."""
        self.structure = {**self.structure, "modes": find_modes(self.model)}

    def restore_structure(self, *, as_built: bool = False) -> None:
        """Restore the structure of the checkpoint once more, where there is one; or that of the beginning."""
        if as_built or self.structure is not self._built:
            restore(self.model, self.optimizer, self._built if as_built else self.structure)

    def keep(self, callbacks: Callbacks, *, keeps_best: bool) -> None:
        """Call the callbacks, keep their weights and, with `keeps_best`, those after the best evaluation."""
        self._callbacks = callbacks
        self.kept = BestWeights(self.model, callbacks, keeps_best=keeps_best)

    @property
    def lr(self) -> float:
        """The learning rate of the optimizer's first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def bucket_compressions(self) -> dict[str, int]:
        """The number of gradient buckets by compression."""
        return self._exchange.bucket_compressions

    def describe(self) -> dict[str, Any]:
        """Fields of an `epoch` event; all ranks call it together.

        `grad_norm`, of the last step before it was clipped, waits for the device; `sent_bytes` is what a rank has
        sent since the last call, on average.
        """
        before, self._sent = self._sent, self._comm.sent_bytes
        shares: list[float] = gather_json(self._comm, self._sent - before)
        norm = self._precision.grad_norm
        return {
            "lr": self.lr if self._everything else None,
            "loss_scale": self._precision.loss_scale if self._precision.may_skip else None,
            "grad_norm": None if norm is None else float(norm),
            "sent_bytes": sum(shares) / len(shares),
        }

    def begin(
        self,
        command: StepAction | None,
        losses: Tensor | None,
        batch: Batch,
        weight: Tensor | None = None,
        *,
        last: bool = True,
    ) -> None:
        """Compute this rank's part of the gradient of the global batch's mean loss, and start its exchange.

        With gradient accumulation it is called for each micro-batch; the gradients add up, and the exchange starts
        with the last.

        Args:
            command: to this rank, sent to all ranks; given with the last micro-batch.
            losses: [b], one for each sample; None from a rank without samples.
            weight: [b], the factor of each loss; None for 1.
        """
        if self._needs_closure:
            kind = type(self.optimizer).__name__
            raise TrainingError(f"{kind} computes a step's loss several times; {OWN_STEPS}")
        precision = self._precision
        self._exchange.loss_scale = precision.loss_scale
        if losses is None:
            self._sync.send(command, None)
            return
        size = batch["index"].shape[0]
        if losses.shape != (size,):
            raise TrainingError(
                f"the loss must be one value per sample, [{size}], got a tensor of shape {list(losses.shape)}: "
                'leave it unreduced (reduction="none"), averaged over everything but the samples'
            )
        if losses.dtype in (torch.float16, torch.bfloat16):
            losses = losses.float()
        values = losses.detach() if weight is None else losses.detach() * weight
        so_far = values.sum()
        # Of the scaled mean over the global batch by each loss: what autograd would find by four more operations.
        gradient = torch.full_like(values, precision.loss_scale / batch.global_size)
        if weight is not None:
            gradient = (gradient * weight).to(losses.dtype)
        if self._losses_before is not None:
            so_far = self._losses_before + so_far
        self._losses_before = None if last else so_far
        if last:
            self._sync.send(command, so_far)
        exchanging = (
            self._exchange.overlap_backward() if last and len(self._exchange) else contextlib.nullcontext()
        )
        with precision.explain_missing_kernel(), exchanging:
            losses.backward(gradient)  # type: ignore[no-untyped-call]

    def end(
        self, batch: Batch, waiting: contextlib.AbstractContextManager[None], *, ends_at_nan: bool = True
    ) -> StepResult:
        """Exchange, clip and step.

        Args:
            waiting: a context manager around the wait for other ranks.
            ends_at_nan: whether a loss that is not finite raises Diverged.
        """
        applied = True
        # A batch may have no sample at all: those that cannot be prepared were skipped on request.
        if batch.global_size > 0:
            with waiting:
                self._exchange.finish()
            coalesce_gradients(self._parameters)
            self._precision.unscale(self.optimizer)
            if self._callbacks is not None and self._callbacks.after_backward:
                self._callbacks.call("after_backward")
            applied = self._precision.step(self.optimizer, self._parameters, self._clip_norm)
            self._exchange.end_step(applied)
        for parameter in self._everything:
            parameter.grad = None
        step_schedule(self._schedule, stepped=applied and batch.global_size > 0)
        result = self._sync.receive()
        if applied and not result.is_finite and ends_at_nan:
            raise Diverged(f"the loss is {result.loss_sum}")
        result.skipped = not applied
        return result

    def state_dict(self) -> dict[str, Any]:
        """The whole state, by part; all ranks call it together."""
        self.begin_epoch()  # a hook at the end of the epoch may have changed what the next one exchanges
        return {
            "model": own_state(self.model),
            "structure": self._describe_structure(),
            "optimizer": make_dense(self.optimizer.state_dict()),
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
            "precision": self._precision.state_dict(),
            "exchange": {"plan": asdict(self.plan), **self._exchange.state_dict()},
            **self.kept.state_dict(),
            "callbacks": [] if self._callbacks is None else self._callbacks.state_dict(),
        }

    def _describe_structure(self) -> dict[str, Any]:
        now = describe(self.model, self.optimizer)
        numbers = select_changed(now["numbers"], self._built["numbers"])
        return {**now, "numbers": numbers, "modes": self.structure.get("modes")}

    def _restore_structure(self, state: Mapping[str, Any]) -> None:
        """Restore that of a checkpoint; one from before there was any has none."""
        self.structure = state.get("structure", self._built)
        restore(self.model, self.optimizer, self.structure, state.get("optimizer", {}).get("param_groups", ()))
        self.begin_epoch()

    def start(
        self,
        state: dict[str, Any] | None,
        planned: dict[str, Any] | None = None,
        initial: dict[str, Tensor] | None = None,
        inherited_steps: int | None = None,
    ) -> None:
        """Prepare the first step: from the beginning, or from a `state_dict`.

        Args:
            planned: the `ExchangePlan` of an earlier attempt, as a dict, for a start from the beginning.
            initial: the model's weights and buffers for a start from the beginning; None: it has them.
            inherited_steps: where the state is another member's: steps that this one has done by its own count.
        """
        plan = None if planned is None or state is not None else ExchangePlan.from_dict(planned)
        if state is not None and state["exchange"]["world"] == self._comm.world:
            plan = ExchangePlan.from_dict(state["exchange"]["plan"])  # for another number it is measured anew
        if state is not None:
            self._restore_structure(state)
        self._exchange, self.plan = plan_exchange(
            self._comm,
            self._parameters,
            self._exchange_options,
            revertible=self._precision.may_skip,
            sparse=find_sparse_parameters(self.model),
            known=plan,
        )
        self._sent = self._comm.sent_bytes  # measurements are not counted
        if initial is not None:
            load_own(self.model, initial)
        if state is not None and inherited_steps is None:
            self.load(state)
        elif state is not None and inherited_steps is not None:
            self._inherit(state, inherited_steps)

    def _inherit(self, state: dict[str, Any], steps: int) -> None:
        """Load the `state_dict` of another member, without the hyperparameters of its optimizer and schedule."""
        saved, own = state["optimizer"], self.optimizer.state_dict()
        names = [[group.keys() - {"initial_lr"} for group in one["param_groups"]] for one in (saved, own)]
        if names[0] != names[1]:  # but for that one, which a schedule adds
            saved = own  # another optimizer, to which the state says nothing
        self.load({**state, "optimizer": {**saved, "param_groups": own["param_groups"]}, "schedule": None})
        for _ in range(steps):
            step_schedule(self._schedule, stepped=False)

    def load(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`."""
        check_same_base(self.model, state)
        self._restore_structure(state)
        load_own(self.model, state["model"])
        self.kept.load_state_dict(state)
        if "optimizer" not in state:  # it has ended: `keep_weights_only`
            return
        if self._callbacks is not None:
            self._callbacks.load_state_dict(state["callbacks"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._schedule is not None and state["schedule"] is not None:
            self._schedule.load_state_dict(state["schedule"])
        self._precision.load_state_dict(state["precision"])
        self._exchange.load_state_dict(state["exchange"])

    def replace_weights(self, weights: Mapping[str, Tensor] | None) -> None:
        """Give the model the weights and buffers of rank 0, in place of those that are kept; all ranks call it."""

        def load() -> None:
            if weights is None:
                raise TrainingError("member.use_weights() needs a state_dict on rank 0")
            try:
                self.kept.load(weights)
            except (RuntimeError, AttributeError, TypeError) as error:  # as torch says what does not fit
                message = " ".join(str(error).split())
                raise TrainingError(f"member.use_weights(): the weights are not this model's: {message}") from None

        compute_once(self._comm, load)
        FusedBroadcast([*self._everything, *self._list_buffers()], self._comm)()
        self.kept.take()

    def close(self) -> None:
        """Remove the hooks from the model, and end the exchange."""
        self._exchange.close()


def _check_state(model: nn.Module) -> None:
    odd = next((name for name, value in model.state_dict().items() if not isinstance(value, Tensor)), None)
    if odd is not None:
        raise TrainingError(
            f"the model's state has {odd!r}, which is not a tensor, as checkpoints need: make it a buffer, or "
            "leave out get_extra_state"
        )


def _move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state that an optimizer made when it was built (Adagrad) to the device of its parameters."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = value.to(device)
