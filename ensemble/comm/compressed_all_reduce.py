"""All-reduce through a codec: scatter-reduce, then all-gather, both encoded (Seide et al. 2014, section 3.2).

Each rank owns one stripe: it gets the others' encoded versions, adds them in fp32, and sends the encoded sum to
all, so a rank sends 2 (n - 1) / n of the encoded message. With error feedback, encoding errors are added to the
next step. All ranks decode the same bytes, so all have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ensemble.comm.codecs import Codec
from ensemble.comm.communicator import Communicator
from ensemble.comm.error_feedback import CompressedReduction
from ensemble.comm.reductions import ExchangeStep, mix_integers
from ensemble.comm.worker_thread import WorkerThread


class CompressedAllReduce(CompressedReduction):
    """A `Reduction` of fp32 values through a codec; its residuals are of the values and of the own stripe.

    Args:
        comm, thread, revertible: see `CompressedReduction`.
        codec: encodes the stripes.
        sizes: values of the parameters, which are contiguous. A byte for each one's presence follows every stripe.
        number: of the bucket, so that no two buckets draw the same random numbers.
        error_feedback: whether encoding errors are added to the next step.
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
        self._codec, self._number = codec, number
        n, parameters, world, grain = sum(sizes), len(sizes), comm.world, codec.granularity
        self._stripe = math.ceil(n / (world * grain)) * grain
        self._n = n
        kept = (world * self._stripe, self._stripe) if error_feedback else ()
        residuals = [torch.zeros(size, device=device) for size in kept]
        super().__init__(comm, thread, sizes, residuals=residuals, revertible=revertible)
        self._all = torch.zeros(world * self._stripe, device=device)
        self.values = self._all[:n]
        self.present = torch.ones(parameters, dtype=torch.uint8, device=device)
        self._encoded = codec.wire_bytes(self._stripe)
        # Rows begin at multiples of 16 bytes, which codecs read and write fastest.
        row = -(-(self._encoded + parameters) // 16) * 16
        self._presence_bytes = slice(self._encoded, self._encoded + parameters)
        self._outgoing = torch.zeros((world, row), dtype=torch.uint8, device=device)
        self._sum = torch.zeros(self._encoded, dtype=torch.uint8, device=device)
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile the codec now, not in the first step."""
        values, wire = self._all[: self._stripe], self._outgoing[0, : self._encoded]
        self._codec.encode(values, wire, key=0, error=self._next_state[1] if self._state else None)
        self._codec.decode(wire, values)
        self._codec.decode(wire, values, add=True)

    @torch.no_grad()
    def _exchange(self, step: ExchangeStep) -> None:
        rank, world = self._comm.rank, self._comm.world
        stripes = self._all.view(world, self._stripe)
        peers = [peer for peer in range(world) if peer != rank]
        absent = [self._places[number] for number in step.absent]
        with self._feed_back(0, self._all, absent, step) as residual:
            self._all[self._n :].zero_()
            errors = None if residual is None else residual.view(world, self._stripe)
            for peer in peers:
                error = None if errors is None else errors[peer]
                self._encode(stripes[peer], self._outgoing[peer, : self._encoded], step, peer, error)
            if errors is not None:
                errors[rank].zero_()
            self._outgoing[:, self._presence_bytes] = self.present
            received = self._comm.all_to_all(self._outgoing)
            self.present.copy_(received[:, self._presence_bytes].amax(dim=0))
        for peer in peers:
            self._codec.decode(received[peer, : self._encoded], stripes[rank], add=True)
        own, first = stripes[rank], rank * self._stripe
        absent = [_clip_slice(place, first, self._stripe) for place in absent]
        with self._feed_back(1, own, absent, step) as error:
            self._encode(own, self._sum, step, world, error)
        for stripe, wire in zip(stripes, self._comm.all_gather(self._sum, equal=True), strict=True):
            self._codec.decode(wire, stripe)

    def _encode(self, values: Tensor, wire: Tensor, step: ExchangeStep, to: int, error: Tensor | None) -> None:
        """Encode the message to rank `to`, or, for `to` = world, to all ranks."""
        key = mix_integers(step.key, self._number, self._comm.rank, to)
        self._codec.encode(values, wire, key=key, error=error)


def _clip_slice(place: slice, first: int, length: int) -> slice:
    """The part of a slice in [first, first + length), relative to `first`."""
    start = min(max(place.start - first, 0), length)
    return slice(start, min(max(place.stop - first, start), length))
