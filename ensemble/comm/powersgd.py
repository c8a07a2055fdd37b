"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): sums gradients of matrices as products of two thin matrices.

The sum M is approximated by one step of a power iteration: P = M Q is summed and orthonormalized, Q = Mᵀ P is
summed, the result is P Qᵀ. Q starts from the step before; the error is added to the next gradient (algorithm 2
there).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ensemble.comm.communicator import Communicator
from ensemble.comm.error_feedback import CompressedReduction
from ensemble.comm.reductions import ExchangeStep, mix_integers
from ensemble.comm.worker_thread import WorkerThread


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix: all dimensions but the first become one."""
    rows, columns = shape[0], 1
    for size in shape[1:]:
        columns *= size
    return rows, columns


def is_worth_compressing(shape: Sequence[int], rank: int) -> bool:
    """Whether a parameter's two thin matrices are smaller than itself."""
    if len(shape) < 2:
        return False
    rows, columns = matrix_shape(shape)
    return rank * (rows + columns) < rows * columns


class PowerSGD(CompressedReduction):
    """A `Reduction` of contiguous fp32 matrices; Q is its shared state.

    Args:
        comm, thread, number, error_feedback, revertible: see `CompressedAllReduce`.
        shapes: of the parameters; each `is_worth_compressing`.
        rank: columns of the thin matrices.
        seed: of the initial Q.
    """

    def __init__(
        self,
        comm: Communicator,
        thread: WorkerThread | None,
        shapes: Sequence[Sequence[int]],
        *,
        rank: int,
        seed: int,
        number: int,
        error_feedback: bool,
        revertible: bool,
        device: torch.device,
    ) -> None:
        sizes = [matrix_shape(shape) for shape in shapes]
        self.values = torch.zeros(sum(a * b for a, b in sizes), device=device)
        self._matrices = _split_matrices(self.values, sizes)
        # One presence for each parameter follows the values of P in the same message.
        self._p_message = torch.zeros(sum(a * rank for a, _ in sizes) + len(sizes), device=device)
        self._ps = _split_matrices(self._p_message, [(a, rank) for a, _ in sizes])
        self.present = self._p_message[-len(sizes) :]
        right = torch.empty(sum(b * rank for _, b in sizes))
        right.normal_(generator=torch.Generator().manual_seed(mix_integers(seed, number)))
        self._q_sizes = [(b, rank) for _, b in sizes]
        self._initial_qs = _split_matrices(right.to(device), self._q_sizes)
        super().__init__(
            comm,
            thread,
            [a * b for a, b in sizes],
            shared=[right.to(device, copy=True)],
            residuals=[torch.zeros_like(self.values)] if error_feedback else [],
            revertible=revertible,
        )

    @torch.no_grad()
    def _exchange(self, step: ExchangeStep) -> None:
        old_qs = _split_matrices(self._state[0], self._q_sizes)
        new_q = self._next_state[0]
        new_qs = _split_matrices(new_q, self._q_sizes)
        absent = [self._places[number] for number in step.absent]
        with self._feed_back(0, self.values, absent, step) as residual:
            for m, p, q in zip(self._matrices, self._ps, old_qs, strict=True):
                torch.mm(m, q, out=p)
            self._comm.all_reduce_(self._p_message)
            for p in self._ps:
                p.copy_(_orthonormalize(p))
            for m, p, q in zip(self._matrices, self._ps, new_qs, strict=True):
                torch.mm(m.t(), p, out=q)
            if residual is not None:
                errors = _split_matrices(residual, [tuple(m.shape) for m in self._matrices])
                for m, p, q, error in zip(self._matrices, self._ps, new_qs, errors, strict=True):
                    torch.addmm(m, p, q.t(), alpha=-1, out=error)
        self._comm.all_reduce_(new_q)
        for m, p, q, first in zip(self._matrices, self._ps, new_qs, self._initial_qs, strict=True):
            torch.mm(p, q.t(), out=m)
            # The next step's Q: only its directions matter; without a gradient there are none, and Q is reset.
            norm = torch.linalg.vector_norm(q)
            q.copy_(torch.where(norm > 0, q / norm, first))


def _split_matrices(flat: Tensor, sizes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of consecutive parts of `flat` as matrices of these sizes."""
    views, start = [], 0
    for rows, columns in sizes:
        views.append(flat[start : start + rows * columns].view(rows, columns))
        start += rows * columns
    return views


def _orthonormalize(p: Tensor) -> Tensor:
    """An orthonormal basis of the columns; all NaN where a value is not finite, to show the overflow."""
    finite = torch.isfinite(p)
    basis: Tensor = torch.linalg.qr(torch.where(finite, p, 0.0)).Q
    return torch.where(finite.all(), basis, torch.nan)
