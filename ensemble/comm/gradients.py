"""The gradient exchange of a data-parallel member: fixed buckets, fused, overlapped with the backward pass.

Each rank computes the gradient of *its part of the sum* over the global batch (losses are divided by the global
batch's true size before), so the exchange is a plain SUM and every sample weighs alike, however unevenly the
samples lie on the ranks. A rank without any sample takes part with zeros.

Gradients become ready roughly from the last layer to the first. They are fused into flat buckets in that order;
a bucket's all-reduce starts as soon as its last gradient is there, while the backward pass goes on. The buckets
are decided **once, from the parameter list**, not from the order seen in the first backward pass as torch's
DistributedDataParallel does: which values are summed in one message decides in which order a ring adds them,
so a resumed run would get other bits than one that was never stopped.

Half-precision gradients travel and are summed in fp32 (gloo would sum fp16 in fp16: 2048 + 1 + 1 is 2048).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ensemble.comm.communicator import Communicator, Pending

#: Bytes of a bucket: large enough that latency does not count, small enough that the exchange overlaps.
BUCKET_BYTES = 4 * 2**20
#: The first bucket is smaller, so that the exchange begins early.
FIRST_BUCKET_BYTES = 2**20
#: Parameters start at multiples of this many elements: 64 bytes of fp32.
_ALIGN = 16


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of this type are summed: fp32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass
class _Bucket:
    """Some parameters, their values' places in `flat`, and behind the values one presence count for each."""

    parameters: list[torch.nn.Parameter]
    views: list[Tensor]
    present: Tensor
    flat: Tensor
    waiting_for: set[int] = field(default_factory=set)
    absent: list[int] = field(default_factory=list)
    pending: Pending | None = None


class GradientExchange:
    """Sums the gradients of all ranks into `parameter.grad`; with one rank it does nothing at all.

    A parameter that has a gradient on some ranks counts as zeros on the others; one that has none anywhere
    keeps None, so that an optimizer skips it as it would in one process.

    A step is: `with exchange.overlapped(): loss.backward()`, then `exchange.finish()` before the optimizer. A
    rank without samples calls only `finish`.

    Args:
        parameters: those that get gradients, in the same order on every rank.
        comm: the ranks.
        bucket_bytes: size of a bucket.
        first_bucket_bytes: size of the first one.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        comm: Communicator,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    ) -> None:
        self._comm = comm
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._next = 0
        self._listening = False
        if comm.world == 1:
            return
        for group in _groups(parameters, first_bucket_bytes, bucket_bytes):
            bucket = _make_bucket(group)
            self._buckets.append(bucket)
            for parameter in group:
                self._bucket_of[id(parameter)] = bucket
                hook = parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        self._reset()

    def __len__(self) -> int:
        """Messages a step."""
        return len(self._buckets)

    @contextlib.contextmanager
    def overlapped(self) -> Iterator[None]:
        """Begin the exchange of each bucket as the backward pass inside fills it."""
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def finish(self) -> None:
        """Exchange what is left, wait for all of it and put the sums into `parameter.grad`."""
        while self._next < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            _take_sums(bucket)
        self._reset()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _reset(self) -> None:
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting_for, bucket.pending = {id(p) for p in bucket.parameters}, None

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        if not self._listening:
            return
        bucket = self._bucket_of[id(parameter)]
        if id(parameter) not in bucket.waiting_for:
            raise RuntimeError(
                "a parameter got a second gradient in one backward pass "
                "(re-entrant activation checkpointing does this: use use_reentrant=False)"
            )
        bucket.waiting_for.remove(id(parameter))
        # In bucket order on every rank, whatever order the gradients came in.
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting_for:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        _fill(bucket)
        bucket.pending = self._comm.start_all_reduce_(bucket.flat)


def _groups(
    parameters: Sequence[torch.nn.Parameter], first_bytes: int, bytes_each: int
) -> Iterator[list[torch.nn.Parameter]]:
    """Parameters in reverse order, cut where a bucket is full or the type or device changes."""
    group: list[torch.nn.Parameter] = []
    size, limit = 0, first_bytes
    for parameter in reversed(parameters):
        kind = (wire_dtype(parameter.dtype), parameter.device)
        other = bool(group) and kind != (wire_dtype(group[-1].dtype), group[-1].device)
        if group and (other or size >= limit):
            yield group
            group, size, limit = [], 0, bytes_each
        group.append(parameter)
        size += parameter.numel() * kind[0].itemsize
    if group:
        yield group


def _make_bucket(parameters: list[torch.nn.Parameter]) -> _Bucket:
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // _ALIGN) * _ALIGN
    some = parameters[0]
    flat = torch.zeros(end + len(parameters), dtype=wire_dtype(some.dtype), device=some.device)
    views = [flat[a : a + p.numel()].view(p.shape) for a, p in zip(starts, parameters, strict=True)]
    return _Bucket(parameters, views, flat[end:], flat)


def _fill(bucket: _Bucket) -> None:
    """This rank's gradients into the flat buffer, zeros where it has none."""
    bucket.present.fill_(1)
    bucket.absent = []
    for number, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        grad = parameter.grad
        if grad is None:
            view.zero_()
            bucket.present[number] = 0
            bucket.absent.append(number)
        elif grad.is_sparse:
            raise RuntimeError("sparse gradients cannot be exchanged: use sparse=False with more than one worker")
        else:
            view.copy_(grad)


def _take_sums(bucket: _Bucket) -> None:
    # Where this rank has a gradient, somebody has one: only what it lacks needs a look, which on CUDA waits.
    counts = bucket.present.tolist() if bucket.absent else None
    for number, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        if counts is not None and counts[number] == 0:
            continue
        # The sum stays where it is until the next exchange fills the buffer again.
        parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
