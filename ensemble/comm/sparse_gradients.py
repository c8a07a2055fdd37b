"""Sparse gradients of embeddings (`nn.Embedding(sparse=True)`): found, summed over ranks, clipped, made dense.

The gradient of an embedding has as many rows as a batch has different indices; the embedding may have millions.
Ranks therefore exchange rows: each gathers the indices and the values of all ranks, and adds up equal indices.
They all add up the same rows in the same order, so the sums have the same bits. Rows are not compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ensemble.comm.buckets import accumulation_dtype
from ensemble.comm.communicator import Communicator

_ABSENT, _SPARSE, _DENSE = 0, 1, 2


def find_sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The weights of a model's embeddings that are made with `sparse=True`, each once."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    weights = {id(m.weight) for m in model.modules() if isinstance(m, kinds) and m.sparse}
    return [parameter for parameter in model.parameters() if id(parameter) in weights]


def coalesce_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Add up the rows of each sparse gradient that have the same index: then its values are the gradient's."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


def clip_gradients(parameters: Sequence[nn.Parameter], clip_norm: float) -> Tensor:
    """Scale all gradients so that their L2 norm is at most `clip_norm`; sparse ones are coalesced.

    Returns:
        The norm that they had, on their device: nothing waits for it here.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    values = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients]
    norm = torch.nn.utils.get_total_norm(values)
    factor = clip_norm / (norm + 1e-6)  # as clip_grad_norm_ does
    for part in values:
        part.mul_(torch.clamp(factor, max=1.0))
    return norm


def make_dense(state: Any) -> Any:
    """An optimizer's state with its sparse tensors (SGD's momentum of sparse gradients) made dense."""
    if isinstance(state, Tensor):
        return state.to_dense() if state.is_sparse else state
    if isinstance(state, dict):
        return {key: make_dense(value) for key, value in state.items()}
    return [make_dense(value) for value in state] if isinstance(state, list) else state


def sum_sparse_gradients(parameters: Sequence[nn.Parameter], comm: Communicator) -> None:
    """Set the gradient of each parameter to the sum over all ranks; all ranks call it together.

    It is sparse, unless some rank has a dense one, as where the weights are also those of the last layer. A
    parameter without a gradient on any rank keeps None.

    Args:
        parameters: of embeddings, in the same order on every rank.
    """
    if not parameters or comm.world == 1:
        return
    own = torch.tensor([_kind(p.grad) for p in parameters], device=parameters[0].device)
    kinds = torch.stack(comm.all_gather(own, equal=True)).amax(dim=0).tolist()
    for parameter, kind in zip(parameters, kinds, strict=True):
        if kind == _DENSE:
            parameter.grad = _sum_dense(parameter, comm)
        elif kind == _SPARSE:
            parameter.grad = _sum_rows(parameter, comm)


def _kind(gradient: Tensor | None) -> int:
    return _ABSENT if gradient is None else _SPARSE if gradient.is_sparse else _DENSE


def _sum_dense(parameter: nn.Parameter, comm: Communicator) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
    total = gradient.to(accumulation_dtype(parameter.dtype))
    comm.all_reduce_(total)
    return total.to(parameter.dtype)


def _sum_rows(parameter: nn.Parameter, comm: Communicator) -> Tensor:
    wide = accumulation_dtype(parameter.dtype)
    if parameter.grad is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        values = torch.empty(0, *parameter.shape[1:], dtype=wide, device=parameter.device)
    else:
        gradient = parameter.grad.coalesce()
        rows, values = gradient.indices()[0].contiguous(), gradient.values().to(wide)
    all_rows, all_values = torch.cat(comm.all_gather(rows)), torch.cat(comm.all_gather(values))
    total = torch.sparse_coo_tensor(all_rows[None], all_values, parameter.shape, check_invariants=False)
    return total.coalesce().to(parameter.dtype)
