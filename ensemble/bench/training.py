"""One rank of a member in training as `ensemble.train` does it, without a run around it: for studies of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.bench import models
from ensemble.bench.models import Net

if TYPE_CHECKING:
    from torch import Tensor

    from ensemble.comm import Communicator
    from ensemble.spec.identity import Precision
    from ensemble.spec.options import NamedOptions
    from pipelines import Batch

# So many batches are prepared before the clock starts, and used in turn.
BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, as ranks read it.

    Attributes:
        net: the network.  data: the directory with what it learns from, None for the digits.
        batch_size: samples of a global batch.
        device: "cpu" or "cuda".
    """

    net: Net
    data: str | None
    batch_size: int
    device: str = "cpu"

    def to_options(self, **more: Any) -> dict[str, Any]:
        """As options of `run_ranks`."""
        return {**dataclasses.asdict(self), **more}

    @classmethod
    def of(cls, options: dict[str, Any]) -> Training:
        """What `to_options` wrote."""
        own = {field.name: options[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**own, "net": Net(**own["net"])})

    def batches(self, rank: int = 0, world: int = 1) -> list[Batch]:
        """A rank's part of a few global batches, on the device; the same with each call."""
        pipe = models.splits(self.net, self.data, BATCHES * self.batch_size, self.batch_size).train
        loader = pipe.loader(
            self.batch_size, epochs=1, rank=rank, world=world, drop_last=len(pipe) >= self.batch_size
        )
        return [_own(batch).to(self.device) for batch in loader]


def _own(batch: Batch) -> Batch:
    """A copy that stays valid when the loader goes on."""
    from pipelines import Batch

    fields = {name: value.clone() for name, value in batch.items()}
    return Batch(fields, epoch=batch.epoch, step=batch.step, global_size=batch.global_size)


class Trainer:
    """A network with its optimizer on one rank.

    Args:
        training: what is trained.
        precision: fp32, bf16 or fp16.
        comm: the member's ranks.
        compression: what gradients travel as between them: a choice of `ensemble.spec.options.COMPRESSIONS`.

    Attributes:
        model: the network.
    """

    def __init__(
        self, training: Training, precision: Precision, comm: Communicator, compression: NamedOptions = "none"
    ) -> None:
        import torch

        from ensemble.comm.autotune.plan import ExchangeOptions
        from ensemble.spec.options import COMPRESSIONS, resolve
        from ensemble.train.optimization import Optimization
        from ensemble.train.optimizers import make_optimizer
        from ensemble.train.precision import MixedPrecision

        net, device = training.net, torch.device(training.device)
        torch.manual_seed(0)
        self._recipe = models.recipe(net)
        self.model = models.model(net.params(training.data)).to(device)
        optimizer = make_optimizer(models.OPTIMIZERS[net.kind], self.model, {})
        self._precision = MixedPrecision(precision, device)
        declared = ExchangeOptions(
            None if compression == "none" else resolve("compression", compression, COMPRESSIONS)
        )
        self._optimization = Optimization(
            self.model, optimizer, None, self._recipe.clip_norm, self._precision, comm, device, declared
        )
        self._optimization.start(None)
        self._waited_s = 0.0

    def step(self, batch: Batch, emulated_s: float | None = None) -> tuple[float, float]:
        """Train on one batch; the seconds that took, and of them those spent on the other ranks.

        Args:
            emulated_s: how long an emulated accelerator takes for the whole global batch: this rank waits for its
                part, using no processor, and has gradients of zeros. None computes for real.
        """
        began, self._waited_s = time.perf_counter(), 0.0
        with self._waiting():
            self._optimization.share_buffers()
        self._optimization.begin(None, self._losses(batch, emulated_s), batch)
        self._optimization.end(batch, self._waiting())  # reads the loss: the device is done
        return time.perf_counter() - began, self._waited_s

    def _losses(self, batch: Batch, emulated_s: float | None) -> Tensor:
        rows = len(batch["index"])
        if emulated_s is None:
            with self._precision.autocast():
                return self._recipe.loss(self.model, batch)  # type: ignore[no-any-return]
        time.sleep(emulated_s * rows / batch.global_size)
        nothing = sum(weight.reshape(-1)[0] for weight in self.model.parameters()) * 0.0
        return nothing.expand(rows)  # type: ignore[union-attr]

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - began
