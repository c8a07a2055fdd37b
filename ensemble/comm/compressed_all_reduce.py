"""All-reduce through a codec: scatter-reduce, then all-gather, both encoded (Seide et al. 2014, section 3.2).

The values are split into one stripe for each rank. Every rank encodes its own version of each stripe and sends it
to the stripe's owner; the owner decodes and adds them in fp32, encodes the sum and sends it to all. So a rank
sends 2 (n - 1) / n of the *encoded* message, as in a ring all-reduce, for any number of ranks; an all-gather of
all encoded messages would send n - 1 times the message.

**Error feedback**: the encoding error of a rank is added to its values of the next step, and the encoding error of
a stripe's sum to the owner's next sum. Then all values sent and the residuals add up to the sum of all gradients:
nothing is lost, only delayed.

The owner's version of its own stripe is not encoded, since it is not sent. All ranks, the owner included, decode
the same bytes, so all have the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ensemble.comm.codecs import Codec, make_codec
from ensemble.comm.communicator import Communicator, Pending
from ensemble.comm.error_feedback import StepState
from ensemble.comm.reductions import ExchangeStep, mix_integers
from ensemble.comm.worker_thread import WorkerThread, run_immediately


def make_exchange_codec(compression: Mapping[str, Any]) -> Codec:
    """The codec of a declared compression (`ensemble.spec.options.COMPRESSIONS`)."""
    exchange = ("error_feedback", "min_size")
    return make_codec({name: value for name, value in compression.items() if name not in exchange})


class CompressedAllReduce:
    """A `Reduction` of fp32 values through a codec.

    Args:
        comm: the ranks; used by `thread` alone.
        thread: runs the exchange beside the backward pass; None runs it in the calling thread, which on CUDA only
            queues it on the device.
        codec: encodes the stripes.
        sizes: values of the parameters, which are contiguous. A byte for each one's presence follows every stripe.
        number: of the bucket, so that no two buckets draw the same random numbers.
        error_feedback: whether encoding errors are added to the next step.
        revertible: whether a step may be reverted (a loss scale overflows), which needs the residuals twice.
    """

    def __init__(
        self,
        comm: Communicator,
        thread: WorkerThread | None,
        codec: Codec,
        sizes: Sequence[int],
        *,
        number: int,
        error_feedback: bool,
        revertible: bool,
        device: torch.device,
    ) -> None:
        self._comm, self._thread, self._codec, self._number = comm, thread, codec, number
        world, grain = comm.world, codec.granularity
        ends = list(itertools.accumulate(sizes))
        self._places = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        n, parameters = ends[-1], len(ends)
        self._stripe = math.ceil(n / (world * grain)) * grain
        self._n = n
        self._all = torch.zeros(world * self._stripe, device=device)
        self.values = self._all[:n]
        self.present = torch.ones(parameters, dtype=torch.uint8, device=device)
        self._encoded = codec.wire_bytes(self._stripe)
        # Rows begin at multiples of 16 bytes, which codecs read and write fastest.
        row = -(-(self._encoded + parameters) // 16) * 16
        self._parcel = slice(self._encoded, self._encoded + parameters)
        self._outgoing = torch.zeros((world, row), dtype=torch.uint8, device=device)
        self._sum = torch.zeros(self._encoded, dtype=torch.uint8, device=device)
        self._state: StepState | None = None
        if error_feedback:
            kept = [torch.zeros(size, device=device) for size in (world * self._stripe, self._stripe)]
            self._state = StepState(kept, revertible)
        self._warm_up()

    def start(self, step: ExchangeStep) -> Pending:
        """See `Reduction`."""
        begin = run_immediately if self._thread is None else self._thread.start
        return begin(lambda: self._exchange(step))

    def _warm_up(self) -> None:
        """Compile the codec now, not in the first step."""
        values, wire = self._all[: self._stripe], self._outgoing[0, : self._encoded]
        self._codec.encode(values, wire, key=0, error=None if self._state is None else self._state.next[1])
        self._codec.decode(wire, values)
        self._codec.decode(wire, values, add=True)

    def end_step(self, applied: bool) -> None:
        """See `Reduction`."""
        if self._state is not None:
            self._state.end_step(applied)

    def rank_state(self) -> list[Tensor]:
        """See `Reduction`: the residual of this rank's values, and of the stripe whose sum it makes."""
        return [] if self._state is None else self._state.current

    def shared_state(self) -> list[Tensor]:
        """See `Reduction`: nothing."""
        return []

    @torch.no_grad()
    def _exchange(self, step: ExchangeStep) -> None:
        state, rank, world = self._state, self._comm.rank, self._comm.world
        absent = [self._places[number] for number in step.absent]
        held = [] if state is None else state.copies(0, absent)
        if state is not None:
            self._all.add_(state.current[0], alpha=step.loss_scale)
        self._all[self._n :].zero_()
        stripes = self._all.view(world, self._stripe)
        errors = None if state is None else state.next[0].view(world, self._stripe)
        peers = [peer for peer in range(world) if peer != rank]
        for peer in peers:
            error = None if errors is None else errors[peer]
            self._encode(stripes[peer], self._outgoing[peer, : self._encoded], step, peer, error)
        self._outgoing[:, self._parcel] = self.present
        received = self._comm.all_to_all(self._outgoing)
        self.present.copy_(received[:, self._parcel].amax(dim=0))
        for peer in peers:
            self._codec.decode(received[peer, : self._encoded], stripes[rank], add=True)
        self._encode_sum(stripes[rank], step)
        for stripe, wire in zip(stripes, self._comm.all_gather(self._sum, equal=True), strict=True):
            self._codec.decode(wire, stripe)
        if state is not None:
            assert errors is not None
            errors[rank].zero_()
            if step.loss_scale != 1:
                state.next[0].div_(step.loss_scale)
            for number, place, before in zip(step.absent, absent, held, strict=True):
                if not self.present[number]:
                    state.next[0][place] = before

    def _encode_sum(self, own: Tensor, step: ExchangeStep) -> None:
        """Encode the sum of this rank's stripe."""
        state, first = self._state, self._comm.rank * self._stripe
        if state is None:
            self._encode(own, self._sum, step, self._comm.world, None)
            return
        places = [_clip_slice(self._places[number], first, self._stripe) for number in step.absent]
        held = state.copies(1, places)
        own.add_(state.current[1], alpha=step.loss_scale)
        self._encode(own, self._sum, step, self._comm.world, state.next[1])
        if step.loss_scale != 1:
            state.next[1].div_(step.loss_scale)
        for number, place, before in zip(step.absent, places, held, strict=True):
            if not self.present[number]:
                state.next[1][place] = before

    def _encode(self, values: Tensor, wire: Tensor, step: ExchangeStep, to: int, error: Tensor | None) -> None:
        """Encode the message to rank `to`, or, for `to` = world, to all ranks."""
        key = mix_integers(step.key, self._number, self._comm.rank, to)
        self._codec.encode(values, wire, key=key, error=error)


def _clip_slice(place: slice, first: int, length: int) -> slice:
    """The part of a slice in [first, first + length), relative to `first`."""
    start = min(max(place.start - first, 0), length)
    return slice(start, min(max(place.stop - first, start), length))
