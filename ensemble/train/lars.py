"""LARS, layer-wise adaptive rate scaling (You et al. 2017), as Jia et al. 2018 use it for very large batches.

Each layer has the rate at which a step changes it by a set share of its norm:

    λ = η ‖w‖ / (‖g‖ + β ‖w‖)          η: trust coefficient, β: weight decay, g: gradient of the loss
    v ← m v + γ λ (g + β w)            m: momentum, γ: learning rate
    w ← w − v

The learning rate is inside the momentum, as in the paper: where a schedule changes it, earlier steps keep the rate
they were taken with (timm's `Lars` and torch's SGD multiply it in afterwards).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from ensemble.comm import _compat
from ensemble.comm.buckets import accumulation_dtype

_MOMENTUM = "momentum_buffer"
_ROW = 16384


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling with momentum.

    Computed in fp32 for parameters of any half precision (float64 for those of float64); half-precision parameters
    are rounded after each step, so keep weights in fp32 and let autocast narrow them.

    Args:
        params: parameters, or groups of them; each argument below can be set for a group.
        lr: γ, of the whole model; several times SGD's, often 1 to 30.
        trust: η, the share of its norm by which a layer changes in a step at γ = 1.
        nesterov: step by m v + γ λ (g + β w) instead of v.
        adapt: whether decay and adaptation apply (else v ← m v + γ g). None: to parameters of two dimensions or
            more, so not to biases and the usual normalizations.
        foreach: one call for many tensors; None: on CUDA, where it saves launches. On a CPU it is slower, as each
            call reads all tensors from memory again: ResNet-50's 161 take 48 ms one by one and 154 ms so (one
            core, medians of 9; torch's SGD 45 ms).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        nesterov: bool = False,
        adapt: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        bounds = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        for name, value in {**bounds, "trust": trust}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"LARS: {name} must be a number of at least 0, got {value!r}")
        if nesterov and momentum == 0:
            raise ValueError("LARS: nesterov needs a momentum above 0")
        options = {"trust": trust, "nesterov": nesterov, "adapt": adapt, "foreach": foreach}
        super().__init__(params, {**bounds, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; refuses complex parameters."""
        super().add_param_group(param_group)
        if any(p.is_complex() for p in self.param_groups[-1]["params"]):
            raise ValueError("LARS does not take complex parameters: a layer's rate is made for real ones")

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Change every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            kinds: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError("LARS needs dense gradients: make the embedding with sparse=False")
                adapt = parameter.dim() > 1 if group["adapt"] is None else group["adapt"]
                kinds.setdefault((parameter.device, parameter.dtype, adapt), []).append(parameter)
            for (device, _, adapt), parameters in kinds.items():
                together = device.type == "cuda" if group["foreach"] is None else group["foreach"]
                change = _change_together if together else _change_each
                change(parameters, [self._get_velocity(p, group) for p in parameters], group, adapt)
        return loss

    def _get_velocity(self, parameter: Tensor, group: dict[str, Any]) -> Tensor | None:
        """v of a parameter, zeros at first; None without momentum."""
        if group["momentum"] == 0:
            return None
        state = self.state[parameter]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype))
        return cast(Tensor, state[_MOMENTUM])

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Go on from a `state_dict`, with the very bits of its momentum.

        torch casts state to its parameter's type; the momentum of half-precision parameters is fp32.
        """
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(saved, parameters, strict=True):
            velocity = state_dict["state"].get(number, {}).get(_MOMENTUM)
            if velocity is not None and accumulation_dtype(parameter.dtype) != parameter.dtype:
                self.state[parameter][_MOMENTUM] = velocity.to(
                    device=parameter.device, dtype=accumulation_dtype(parameter.dtype), copy=True
                )


def _norm(tensor: Tensor) -> float:
    """The L2 norm. On a CPU torch adds fp32 squares one after another: at 70 M values 0.6 % is lost.

    Norms of short rows, added in float64, cost the same time and are right to 1e-7.
    """
    flat = tensor.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    norms = torch.cat([rows, torch.linalg.vector_norm(flat[whole:])[None]])
    return float(torch.linalg.vector_norm(norms, dtype=torch.float64))


def _change_each(
    parameters: list[Tensor], velocities: list[Tensor | None], group: dict[str, Any], adapt: bool
) -> None:
    """The formula, one parameter after another; the rates pass through Python, which on a CPU costs nothing."""
    lr, momentum, eta = group["lr"], group["momentum"], group["trust"]
    decay = group["weight_decay"] if adapt else 0.0
    for parameter, velocity in zip(parameters, velocities, strict=True):
        assert parameter.grad is not None
        weight, grad = (t.to(accumulation_dtype(parameter.dtype)) for t in (parameter, parameter.grad))
        rate = lr
        if adapt:
            norm, grad_norm = _norm(weight), _norm(grad)
            below = grad_norm + decay * norm
            rate = lr * (eta * norm / below if norm > 0 and below > 0 else 1.0)
        if velocity is not None:
            velocity.mul_(momentum).add_(grad, alpha=rate)
            if decay:
                velocity.add_(weight, alpha=rate * decay)
        if velocity is None or group["nesterov"]:
            change = grad.mul(rate)
            if decay:
                change.add_(weight, alpha=rate * decay)
            if velocity is not None:
                change.add_(velocity, alpha=momentum)
            weight.sub_(change)
        else:
            weight.sub_(velocity)
        if weight is not parameter:
            parameter.copy_(weight)


def _change_together(
    parameters: list[Tensor], velocities: list[Tensor | None], group: dict[str, Any], adapt: bool
) -> None:
    """The same for all at once, without a wait for the device."""
    lr, momentum, eta = group["lr"], group["momentum"], group["trust"]
    wide = accumulation_dtype(parameters[0].dtype)
    weights = [p.to(wide) for p in parameters]
    grads = [cast(Tensor, p.grad).to(wide) for p in parameters]
    if adapt:
        decay = group["weight_decay"]
        norms, grad_norms = _compat.foreach_norms(weights), _compat.foreach_norms(grads)
        below = grad_norms + decay * norms
        ratios = torch.where((norms > 0) & (below > 0), eta * norms / below, 1.0)
        changes = _compat.foreach_add(grads, weights, decay) if decay else grads
        changes = _compat.foreach_multiply(changes, list((lr * ratios).unbind()))
    else:
        changes = _compat.foreach_multiply(grads, lr)
    if momentum != 0:
        kept = cast(list[Tensor], velocities)
        _compat.foreach_multiply_(kept, momentum)
        _compat.foreach_add_(kept, changes)
        if group["nesterov"]:
            _compat.foreach_add_(changes, kept, momentum)
        else:
            changes = kept
    _compat.foreach_subtract_(weights, changes)
    for parameter, weight in zip(parameters, weights, strict=True):
        if weight is not parameter:
            parameter.copy_(weight)
