"""Trains one rank of a member with the code of `ensemble.train`, without a run: for studies that time a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import models
from benchmarks.models import Net
from ensemble.train.optimizers import warm_up

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ensemble.comm import Communicator
    from ensemble.spec import Recipe
    from ensemble.spec.identity import Precision
    from ensemble.spec.options import NamedOptions
    from pipelines import Batch

# What every rank needs is imported before ranks are forked.
warm_up()
with contextlib.suppress(ModuleNotFoundError):  # which the digits need, and nothing else
    import sklearn.datasets  # noqa: F401

# Batches that are prepared before the clock starts, and used in turn.
BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """What ranks train.

    Attributes:
        net: the network.  data: the directory of the data sets; None for the digits.
        batch_size: samples of a global batch.
        device: "cpu" or "cuda".
    """

    net: Net
    data: str | None
    batch_size: int
    device: str = "cpu"

    @classmethod
    def of(cls, fields: dict[str, Any]) -> TrainingSetup:
        """The set-up of which `given` is `dataclasses.asdict`, as ranks receive it."""
        return cls(**{**fields, "net": Net(**fields["net"])})

    def batches(self, rank: int = 0, world: int = 1) -> list[Batch]:
        """A rank's part of the first global batches, on the device."""
        pipe = models.splits(self.net, self.data, BATCHES * self.batch_size, self.batch_size).train
        loader = pipe.loader(
            self.batch_size, epochs=1, rank=rank, world=world, drop_last=len(pipe) >= self.batch_size
        )
        return [batch.clone().to(self.device) for batch in loader]  # the loader's next batch overwrites this one


class RecipeTrainer:
    """A recipe's network with its optimizer on one rank.

    Args:
        recipe: makes the network, and the losses of a batch.
        params: hyperparameters of the network.
        optimizer: as in `Ensemble.optimizer`.
        precision: fp32, bf16 or fp16.
        device: of the network and of the batches.
        comm: the member's ranks.
        compression: of the gradients that they exchange: a choice of `ensemble.spec.options.COMPRESSIONS`.

    Attributes:
        model: the network.
        exchanged_s: seconds from the start of the last step until gradients were exchanged: without clipping them
            and without the optimizer.
    """

    def __init__(
        self,
        recipe: Recipe,
        params: dict[str, Any],
        optimizer: NamedOptions,
        precision: Precision,
        device: str,
        comm: Communicator,
        compression: NamedOptions = "none",
    ) -> None:
        import torch

        from ensemble.comm.exchange_plan import ExchangeOptions
        from ensemble.spec.options import COMMUNICATORS, COMPRESSIONS, resolve
        from ensemble.train.optimization import Optimization
        from ensemble.train.optimizers import make_optimizer
        from ensemble.train.precision import MixedPrecision

        torch.manual_seed(0)
        self._recipe = recipe
        self.model: nn.Module = recipe.model(params).to(torch.device(device))
        self._precision = MixedPrecision(precision, torch.device(device))
        declared = ExchangeOptions(
            None if compression == "none" else resolve("compression", compression, COMPRESSIONS),
            resolve("communicator", "torch", COMMUNICATORS),
        )
        self._optimization = Optimization(
            self.model,
            make_optimizer(optimizer, self.model, {}),
            None,
            recipe.clip_norm,
            self._precision,
            comm,
            torch.device(device),
            declared,
        )
        self._optimization.start(None)
        self._waited_s = self._exchanged = self.exchanged_s = 0.0

    def step(self, batch: Batch, emulated_s: float | None = None) -> tuple[float, float]:
        """Train on one batch; returns its seconds, and of them those in which it waited for other ranks.

        Args:
            emulated_s: seconds that an emulated accelerator takes for the global batch: this rank sleeps for its
                part and has gradients of zeros. None computes the gradients.
        """
        start, self._waited_s = time.perf_counter(), 0.0
        with self._waiting():
            self._optimization.share_buffers()
        self._optimization.begin(None, self._losses(batch, emulated_s), batch)
        self._optimization.end(batch, self._waiting())  # reads the loss, so the device has finished
        self.exchanged_s = self._exchanged - start
        return time.perf_counter() - start, self._waited_s

    def _losses(self, batch: Batch, emulated_s: float | None) -> Tensor:
        rows = len(batch["index"])
        if emulated_s is None:
            with self._precision.autocast():
                return self._recipe.loss(self.model, batch)  # type: ignore[no-any-return]
        time.sleep(emulated_s * rows / batch.global_size)
        zero = sum(weight.reshape(-1)[0] for weight in self.model.parameters()) * 0.0
        return zero.expand(rows)  # type: ignore[union-attr]

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._exchanged = time.perf_counter()
            self._waited_s += self._exchanged - start


def make_trainer(
    setup: TrainingSetup,
    precision: Precision,
    comm: Communicator,
    compression: NamedOptions = "none",
) -> RecipeTrainer:
    """A rank of a network of the studies; all arguments but `setup` as `RecipeTrainer` has them."""
    net, optimizer = setup.net, models.OPTIMIZERS[setup.net.kind]
    params, recipe = net.params(setup.data), models.recipe(net)
    return RecipeTrainer(recipe, params, optimizer, precision, setup.device, comm, compression)
