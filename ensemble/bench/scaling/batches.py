"""The batch grows, the epochs do not: SGD against LARS, each at the best learning rate of a grid.

Two Ensembles, each on one shared pipeline. In the first every batch size and optimizer trains with every rate of
its grid, one seed, and is measured on the validation split: that chooses the rate. In the second the chosen ones
train with fresh seeds and are measured on the test split, by which nothing was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.bench import models
from ensemble.bench.intervals import Interval, flat, interval, paired
from ensemble.bench.members import Came, shares, train_members
from ensemble.bench.models import Net
from ensemble.spec import Ensemble, Member, SpecError

SGD, LARS, LARS_DECAY = "sgd", "lars", "lars-decay"
# Percentage points by which the best SGD is behind itself at a smaller batch, where LARS is looked at.
LOSS = 2.0
_DECAY, _MOMENTUM = 5e-4, 0.9
# The share of a layer's norm that a step of rate 1 changes. The usual 0.001 goes with rates of 10 to 30, which
# biases and normalization, not being adapted, would take as they are.
_TRUST = 0.02
# Running statistics of normalization are averages over as many samples as is usual with this batch, 1,280. Over
# ten batches of any size they would lag behind the weights where there are few steps: SGD at 8,192 then has a
# point less, LARS, which changes weights faster, eight. (Akiba et al. 2017 take the last batch's for this reason.)
_NORM_BATCH = 128
_COMMON = {"momentum": _MOMENTUM, "weight_decay": _DECAY}
#: Words of the declaration, and the learning rates of the grid. Biases and normalization are neither decayed nor
#: adapted, but by the last one.
OPTIMIZERS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    SGD: ({"name": "sgd", **_COMMON, "decay_norm": False}, (0.05, 0.1, 0.2, 0.4, 0.8)),
    LARS: ({"name": "lars", **_COMMON, "trust": _TRUST, "decay_norm": False}, (0.5, 1.0, 2.0, 4.0)),
    LARS_DECAY: (
        {"name": "lars", **_COMMON, "trust": _TRUST, "decay_norm": True},
        (0.5, 1.0, 2.0, 4.0),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained.

    Attributes:
        net, data, precision: the network, the directory with what it learns from, the precision.
        batches: sizes, ascending.
        grids: optimizer -> its learning rates, ascending.
        epochs: of all members.  warmup: the share of the epochs in which the rate rises; then it falls, squared.
        samples, held_out: to learn from; to choose by, and as many to measure by.
        seeds: of the chosen.
        micro_batch: larger batches are trained in parts of so many; None trains them whole. Batch normalization
            then sees the parts.
    """

    net: Net
    data: str | None
    precision: str = "bf16"
    batches: tuple[int, ...] = (128, 512, 2048, 8192)
    grids: dict[str, tuple[float, ...]] = field(default_factory=lambda: {k: v for k, (_, v) in OPTIMIZERS.items()})
    epochs: int = 12
    warmup: float = 0.2
    samples: int = 10_000
    held_out: int = 2_000
    seeds: int = 5
    micro_batch: int | None = None

    def member(self, optimizer: str, batch: int, lr: float, seed: int) -> Member:
        """One of them."""
        parts = 1 if self.micro_batch is None else -(-batch // self.micro_batch)
        norm = min(1.0, models.NORM_MOMENTUM * batch / parts / _NORM_BATCH)
        return Member(
            {**self.net.params(self.data), "lr": lr, "norm_momentum": norm},
            batch_size=batch,
            seed=seed,
            optimizer=OPTIMIZERS[optimizer][0],
            accumulate=parts,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One batch size with one optimizer, at the best learning rate of its grid.

    Attributes:
        batch_size, optimizer: what was run; "lars-decay" decays and adapts normalization too.
        steps: of the whole training.
        lr: the best on the validation split.  edge: whether it is an end of the grid: the best may lie beyond.
        grid: rate -> accuracy there in percent, one seed; None where it diverged.
        accuracy: on the test split, fresh seeds; None where all diverged.
        against_sgd: the difference from SGD at the same batch, paired by seed, points.
        diverged: seeds that did not finish.
    """

    batch_size: int
    optimizer: str
    steps: int
    lr: float | None
    edge: bool
    grid: dict[float, float | None]
    accuracy: Interval | None = None
    against_sgd: Interval | None = None
    diverged: int = 0


def study(plan: Plan, *, run_dir: str | None = None, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Train all of it.

    Raises:
        SpecError: a batch is larger than the data, or there are not so many data.
        PipelineError: the data cannot be read.
    """
    splits = models.splits(plan.net, plan.data, plan.samples, plan.held_out)
    if plan.batches[-1] > len(splits.train):
        raise SpecError(f"a batch of {plan.batches[-1]} is more than the {len(splits.train)} samples: take more")

    def run(name: str, members: list[Member], measured: Any) -> list[Came]:
        say(f"{name}: {len(members)} members, {plan.epochs} epochs of {len(splits.train)} samples")
        declared = Ensemble(
            name=name,
            recipe=models.recipe(plan.net),
            members=members,
            train=splits.train,
            valid=measured,
            epochs=plan.epochs,
            batch_size=plan.batches[0],
            precision=plan.precision,  # type: ignore[arg-type]
            schedule={"name": "polynomial", "power": 2.0, "warmup_epochs": plan.warmup * plan.epochs},
            cache=None if plan.data is None else "memory",  # digits are not decoded
            resources=shares(len(members)),
            checkpoint_every=plan.epochs,
            combine="average",
            calibrate=False,
            retries=0,
        )
        return train_members(declared, run_dir, say)

    asked = [(b, o, lr) for b in plan.batches for o, grid in plan.grids.items() for lr in grid]
    came = run("scaling-grid", [plan.member(o, b, lr, 0) for b, o, lr in asked], splits.valid)
    grids: dict[tuple[int, str], dict[float, float | None]] = {}
    for (batch, optimizer, lr), member in zip(asked, came, strict=True):
        grids.setdefault((batch, optimizer), {})[lr] = member.percent
    best = {key: chosen(grid) for key, grid in grids.items()}
    seeds = range(1, plan.seeds + 1)
    again = [(key, lr, seed) for key, lr in best.items() if lr is not None for seed in seeds]
    members = [plan.member(key[1], key[0], lr, seed) for key, lr, seed in again]
    came = run("scaling-seeds", members, splits.test) if members else []
    found: dict[tuple[int, str], list[float | None]] = {key: [] for key in grids}
    for (key, _, _), member in zip(again, came, strict=True):
        found[key].append(member.percent)
    return [_row(plan, key, grids[key], best[key], found, len(splits.train)) for key in grids]


def chosen(grid: dict[float, float | None]) -> float | None:
    """The learning rate with the highest accuracy, the smaller one of equals; None where all diverged."""
    done = {lr: accuracy for lr, accuracy in grid.items() if accuracy is not None}
    return max(sorted(done), key=lambda lr: done[lr]) if done else None


def _row(
    plan: Plan,
    key: tuple[int, str],
    grid: dict[float, float | None],
    lr: float | None,
    found: dict[tuple[int, str], list[float | None]],
    samples: int,
) -> Row:
    own, sgd = found[key], found.get((key[0], SGD), [])
    done = [accuracy for accuracy in own if accuracy is not None]
    both = [(a, b) for a, b in zip(own, sgd, strict=False) if a is not None and b is not None]
    compared = key[1] != SGD and bool(both)
    return Row(
        batch_size=key[0],
        optimizer=key[1],
        steps=plan.epochs * -(-samples // key[0]),
        lr=lr,
        edge=lr in (min(grid), max(grid)),
        grid=grid,
        accuracy=interval(done) if done else None,
        against_sgd=paired([a for a, _ in both], [b for _, b in both]) if compared else None,
        diverged=len(own) - len(done),
    )


def first_loss(rows: Sequence[Row], points: float = LOSS) -> tuple[Row, Row] | None:
    """The smallest batch where the best SGD loses so many points, and its best at a smaller one; None: nowhere."""
    sgd = sorted((row for row in rows if row.optimizer == SGD and row.accuracy), key=lambda row: row.batch_size)
    best: Row | None = None
    for row in sgd:
        assert row.accuracy is not None
        if best is None or best.accuracy is None or row.accuracy.mean > best.accuracy.mean:
            best = row
        elif best.accuracy.mean - row.accuracy.mean >= points:
            return row, best
    return None


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """LARS against SGD where SGD begins to lose, and what to know about the grid."""
    lost = first_loss(rows)
    if lost is None:
        yield f"nowhere does the best SGD lose {LOSS:g} points against a smaller batch: take larger --batches"
    else:
        row, best = lost
        yield (
            f"the best SGD has {best.accuracy} % at batch {best.batch_size} and loses {LOSS:g} points first at "
            f"{row.batch_size}: {row.accuracy} %"
        )
        for other in rows:
            if other.batch_size == row.batch_size and other.against_sgd is not None:
                yield f"{other.optimizer} at {row.batch_size}: {other.accuracy} %, {_against(other.against_sgd)}"
    largest = max(row.batch_size for row in rows)
    if lost is None or lost[0].batch_size != largest:
        for other in rows:
            if other.batch_size == largest and other.against_sgd is not None:
                yield f"{other.optimizer} at {largest}: {other.accuracy} %, {_against(other.against_sgd)}"
    edges = [f"{row.optimizer} at {row.batch_size} (lr {row.lr:g})" for row in rows if row.edge]
    if edges:
        yield f"the best rate is an end of its grid, a better one may lie beyond: {', '.join(edges)}"


def _against(difference: Interval) -> str:
    said = f"{difference.mean:+.2f} points against SGD"
    if difference.low is None or difference.high is None:
        return f"{said}, one seed"
    return f"{said}, 95 % interval {difference.low:+.2f} to {difference.high:+.2f} over {difference.n} seeds"


def table(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Rows for people."""
    return [
        {
            "batch": row.batch_size,
            "steps": row.steps,
            "optimizer": row.optimizer,
            "lr": row.lr,
            "grid, %": "  ".join(f"{lr:g}: {'-' if a is None else f'{a:.1f}'}" for lr, a in row.grid.items()),
            "accuracy, %": None if row.accuracy is None else str(row.accuracy),
            "less SGD": None if row.against_sgd is None else str(row.against_sgd),
        }
        for row in rows
    ]


def as_json(row: Row) -> dict[str, object]:
    """The row's figures, intervals as their mean and ends."""
    return {**flat(vars(row), "accuracy", "against_sgd"), "seeds": row.accuracy.n if row.accuracy else 0}
