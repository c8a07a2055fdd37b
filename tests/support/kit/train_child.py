"""Members for tests of training; `python train_child.py RANK FOLDER cuda` trains some on GPUs, as one of two."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ensemble.spec import EMA, SWA, EarlyStopping, Ensemble, Folds, Recipe, Resources
from ensemble.store import RunDir
from ensemble.train import Inbox, Job, work
from kit.checkpoints import newest_checkpoint
from pipelines import Pipeline, sources

N, CLASSES = 23, 3


def data(n: int = N, seed: int = 0, dtype: str = "float32") -> Pipeline:
    """n samples x [6] with a label in 0..2 that follows from them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6)).astype(dtype)
    return Pipeline(sources.arrays(x=x, label=(x[:, :3].argmax(axis=1)).astype(np.int64)), seed=seed)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        layers = [
            nn.Linear(6, 16),
            nn.BatchNorm1d(16) if norm else nn.Identity(),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(16, CLASSES),
        ]
        self.layers = nn.Sequential(*layers).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def plain(params: dict[str, Any]) -> nn.Module:
    return Net(dtype=getattr(torch, params.get("dtype", "float32")))


def noisy(params: dict[str, Any]) -> nn.Module:
    return Net(dropout=0.3, norm=True)


def normed(params: dict[str, Any]) -> nn.Module:
    return Net(norm=True)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def optimizer(model: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=params["lr"], betas=(0.8, 0.99))


def schedule(optimizer: torch.optim.Optimizer, params: dict[str, Any], steps: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=params["lr"], total_steps=steps)


def metrics(outputs: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
    return {"margin": outputs.amax(dim=1) - outputs.amin(dim=1)}


def overflowing(model: nn.Module, batch: Any) -> torch.Tensor:
    """Sample 7 has a finite loss whose fp16 gradient overflows at a loss scale of 2**16 and not at 2**15."""
    outputs = model(batch["x"])
    losses = nn.functional.cross_entropy(outputs.float(), batch["label"], reduction="none")
    huge = (batch["index"] == 7) * outputs.float().sum(dim=1)
    return losses + (huge - huge.detach()) * 1.05 * batch.global_size


def diverging(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss(model, batch) + torch.where(batch["index"] == 7, torch.nan, 0.0)


def faulty(model: nn.Module, batch: Any) -> torch.Tensor:
    if model.training and int(os.environ.get("TEST_RANK", "0")) == 1:
        raise RuntimeError("the fault of rank 1")
    return loss(model, batch)


SMOOTH = Recipe(model=plain, loss=loss, metrics=metrics)
CLIPPED = replace(SMOOTH, clip_norm=0.3)
NOISY = Recipe(model=noisy, loss=loss, optimizer=optimizer, schedule=schedule, clip_norm=1.0)


def head_only(model: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    """Transfer learning: the body has gradients, and nobody to take them."""
    return torch.optim.SGD(model.layers[-1].parameters(), lr=params["lr"])


HEAD = Recipe(model=plain, loss=loss, optimizer=head_only, clip_norm=0.3)


def own_loop(member: Any) -> None:
    """What NOISY says, as a script would write it."""
    model = noisy(member.params)
    opt = optimizer(model, member.params)
    model, opt = member.prepare(model, opt, schedule(opt, member.params, member.steps), clip_norm=1.0)

    def measure(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        outputs = model(batch["x"])
        losses = nn.functional.cross_entropy(outputs, batch["label"], reduction="none")
        return {"loss": losses, "accuracy": (outputs.argmax(dim=1) == batch["label"]).double()}

    for _ in member.epochs():
        model.train()
        for batch in member.batches():
            with member.autocast():
                losses = nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")
            member.backward(losses)
            member.step()
        member.report(**member.evaluate(measure))

    probabilities, index = [], []
    with member.evaluating():
        for batch in member.batches("valid"):
            with member.autocast():
                outputs = model(batch["x"])
            probabilities.append(outputs.float().softmax(dim=1))
            index.append(batch["index"].clone())
    member.predictions("valid", torch.cat(probabilities), torch.cat(index))


class Script(Inbox):
    """Answers the n-th time that it is asked with a command.

    It is asked once a step and at the end of each epoch; and for each evaluated batch, which counts if
    `in_evaluation`.
    """

    def __init__(self, at: int | None, command: str, *, in_evaluation: bool = False) -> None:
        super().__init__()
        self._left, self._command, self._in_evaluation = at, command, in_evaluation

    def poll(self) -> Any:
        is_evaluated = sys._getframe(2).f_code.co_name == "_interrupt"
        if self._left is not None and (self._in_evaluation or not is_evaluated):
            self._left -= 1
            if self._left == 0:
                return self._command
        return super().poll()


def declare(recipe: Any, workers: int, **options: Any) -> Ensemble:
    """An ensemble of one member, trained for 3 epochs of 5 batches: 5, 5, 5, 5 and 3 samples."""
    params = {"lr": 0.05, **options.pop("params", {})}
    given = {"train": data(), "valid": data(13, seed=1), "epochs": 3, "batch_size": 5}
    given |= {"checkpoint_every": 1, "resources": Resources(workers=workers), **options}
    return Ensemble(name="case", recipe=recipe, members=[params], **given)


def ending(way: str, last: int, ranks: tuple[int, ...] = (0, 1)) -> Any:
    """A train function that ends its member after the own epoch `last`, on these ranks."""

    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": loss(model, batch)}

    def train(member: Any) -> None:
        model = noisy(member.params)
        model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        member.validate_with(measure)
        ends = member.rank in ranks
        for epoch in member.epochs():
            if ends and way == "break before" and epoch == last + 1:
                break
            model.train()
            for step, batch in enumerate(member.batches()):
                member.backward(loss(model, batch))
                member.step()
                if ends and way == "stop at once" and epoch == last:
                    member.stop("good enough")
                if ends and way == "stop once" and member.position == {"epoch": last, "step": 1}:
                    member.stop("good enough")
                if ends and way == "break within" and (epoch, step) == (last, 1):
                    break
            member.report(**member.evaluate(measure))
            if ends and way == "stop" and epoch == last:
                member.stop("good enough")
            if ends and way == "break" and epoch == last:
                break
        with member.evaluating() as model:
            found = [(model(b["x"]).softmax(dim=1), b["index"].clone()) for b in member.batches("valid")]
        rows = tuple(map(torch.cat, zip(*found, strict=True))) if found else (None, None)
        member.predictions("valid", *rows)

    return train


def handing_over(member: Any) -> None:
    """A train function whose first rank alone has the weights that are to count."""
    model = plain(member.params)
    model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in member.epochs():
        for batch in member.batches():
            member.backward(loss(model, batch))
            member.step()
        member.report(loss=1.0)
    ones = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    member.use_weights(ones if member.rank == 0 else None, {"loss": 0.5})
    assert all(bool((tensor == 1).all()) for tensor in model.state_dict().values())


DOUBLE: dict[str, Any] = {
    "params": {"dtype": "float64"},
    "train": data(dtype="float64"),
    "valid": data(13, 1, "float64"),
}
# batches of 5, 5, 1 in float64: with three workers two of them have no sample of the last
RAGGED: dict[str, Any] = {
    "recipe": CLIPPED,
    "params": {"dtype": "float64"},
    "train": data(11, dtype="float64"),
    "valid": None,
}
PAIRS = {"name": "hierarchical", "group_size": 2}
TINY_QSGD4 = {"name": "qsgd4", "bucket": 32, "error_feedback": True, "min_size": 32}
KEPT: dict[str, Any] = {
    "recipe": NOISY,
    "params": {"lr": 0.4},
    "epochs": 9,
    "objective": "loss",
    "early_stopping": EarlyStopping(2),
    "keep": "best",
    "validate_every": 2,
}
EAGER = {"name": "default", "backend": "aot_eager"}
OVERFLOWING: dict[str, Any] = {"recipe": Recipe(model=plain, loss=overflowing), "precision": "fp16"}
ONEBIT = {"name": "onebit", "min_size": 32}
TINY_POWERSGD = {"name": "powersgd", "rank": 2, "min_size": 32}

# name -> (ensemble options, [(steps before a stop, None: to the end) of each attempt])
CASES: dict[str, tuple[dict[str, Any], list[int | None]]] = {
    "smooth": ({"recipe": SMOOTH}, [None]),
    "float64": ({**DOUBLE, "recipe": SMOOTH}, [None]),
    "ragged": ({**RAGGED, "recipe": SMOOTH}, [None]),
    # the weights of 3 of its 11 samples are 0: the last batch has one of them alone
    "folds": ({**RAGGED, "recipe": SMOOTH, "weights": Folds(4)}, [None]),
    "clipped": (RAGGED, [None]),
    "clipped in 2": ({**RAGGED, "accumulate": 2}, [None]),
    "clipped in 4": ({**RAGGED, "accumulate": 4}, [None]),  # of at most 3 rows
    # autocast leaves float64 as it is: what is tested is the scale
    "scaled in 2": ({**RAGGED, "accumulate": 2, "precision": "bf16", "loss_scale": 1000.0}, [None]),
    "folds in 2": ({**RAGGED, "recipe": SMOOTH, "weights": Folds(4), "accumulate": 2}, [None]),
    "noisy in 2": ({"recipe": NOISY, "accumulate": 2}, [None]),
    "mid-noisy in 2": ({"recipe": NOISY, "accumulate": 2}, [8, None]),
    "bootstrap": ({"recipe": NOISY, "weights": "bootstrap"}, [None]),
    "mid-bootstrap": ({"recipe": NOISY, "weights": "bootstrap"}, [4, None]),
    "whole-fp32": ({"recipe": NOISY}, [None]),
    # 3: in the first epoch. 5: at its last step, so at its end.
    "mid-fp32": ({"recipe": NOISY}, [3, None]),
    "end-fp32": ({"recipe": NOISY}, [5, None]),
    "whole-bf16": ({"recipe": NOISY, "precision": "bf16"}, [None]),
    "mid-bf16": ({"recipe": NOISY, "precision": "bf16"}, [8, 2, None]),
    "fp16": (OVERFLOWING, [7, None]),
    "fp16-static": ({**OVERFLOWING, "loss_scale": 2.0**16}, [7, None]),
    # batches of one: the second worker has no sample of any of them
    "fp16-empty": (
        {"recipe": SMOOTH, "precision": "fp16", "batch_size": 1, "train": data(5), "epochs": 2},
        [3, None],
    ),
    "head": ({**DOUBLE, "recipe": HEAD}, [None]),
    # the second worker sees another run directory, without the checkpoint
    "apart": ({"recipe": SMOOTH, "communicator": "hybrid", "apart": True}, [3, None]),
    "qsgd4": ({"recipe": NOISY, "compression": TINY_QSGD4}, [None]),
    "mid-qsgd4": ({"recipe": NOISY, "compression": TINY_QSGD4}, [4, None]),
    "grouped": ({"recipe": NOISY, "communicator": PAIRS}, [None]),
    "mid-grouped": ({"recipe": NOISY, "communicator": PAIRS}, [4, None]),
    "clipped in groups": ({**RAGGED, "communicator": PAIRS}, [None]),
    "mid-measured": ({"recipe": NOISY, "communicator": "hybrid"}, [4, None]),
    "powersgd": ({"recipe": NOISY, "compression": TINY_POWERSGD}, [None]),
    "mid-powersgd": ({"recipe": NOISY, "compression": TINY_POWERSGD}, [4, 3, None]),
    # an overflow whose residuals must leave no trace
    "fp16-onebit": ({**OVERFLOWING, "compression": ONEBIT}, [None]),
    "mid-fp16-onebit": ({**OVERFLOWING, "compression": ONEBIT}, [2, 4, None]),
    "loop": ({"recipe": own_loop}, [4, None]),
    "kept": ({**KEPT, "averaging": EMA(0.8)}, [None]),
    "mid-kept": ({**KEPT, "averaging": EMA(0.8)}, [2, 7, None]),
    "swa": ({**KEPT, "averaging": SWA(2), "mixup": 0.3}, [None]),
    "mid-swa": ({**KEPT, "averaging": SWA(2), "mixup": 0.3}, [18, None]),
    "compiled": ({"recipe": replace(NOISY, model=normed), "compile": EAGER, "mixup": 0.3}, [7, None]),
    "not compiled": ({"recipe": replace(NOISY, model=normed), "mixup": 0.3}, [None]),
    "cancel": ({"recipe": SMOOTH, "command": "cancel"}, [7]),
    # rank 0 is told to go on, then to prune
    "awaits_pruner": ({"recipe": SMOOTH, "answers": ["continue", "prune"]}, [None]),
    # one of two ranks ends the member
    "stop of rank 1": ({"recipe": ending("stop", 1, (1,)), "epochs": 5, "averaging": SWA(1)}, [None]),
    "leave of rank 0": ({"recipe": ending("break", 1, (0,)), "epochs": 5, "averaging": SWA(1)}, [None]),
    "stop of both": ({"recipe": ending("stop", 1), "epochs": 5, "averaging": SWA(1)}, [None]),
    "handed over": ({"recipe": handing_over}, [None]),
    "nan": ({"recipe": Recipe(model=plain, loss=diverging, task="classification")}, [None]),
    "fault": ({"recipe": Recipe(model=plain, loss=faulty, task="classification")}, [None]),
}

ON_CUDA = ("float64", "ragged", "whole-bf16", "mid-bf16", "fp16", "fp16-static", "clipped in 2")
ACCUMULATED = {
    "clipped in 2": "clipped",
    "clipped in 4": "clipped",
    "scaled in 2": "clipped",
    "folds in 2": "folds",
}
#: Groups of workers, and ranks without a sample beside ranks with one, begin with three.
WITH_THREE = (*("ragged", "clipped in 2", "clipped in groups"), *("grouped", "mid-grouped", "mid-measured"))
#: A compiler needs seconds for each.
COMPILED = ("compiled", "not compiled")
#: Two workers train these in the second tier: others show most of it.
SECOND = (
    *("float64", "clipped in 4", "scaled in 2", "noisy in 2", "mid-noisy in 2"),
    *("fp16-static", "powersgd", "mid-powersgd", "fp16-onebit", "mid-fp16-onebit", "swa", "mid-swa"),
    *("leave of rank 0", "stop of both", "handed over"),
)
WITH_TWO = tuple(
    name for name in CASES if name not in COMPILED + SECOND and (name == "ragged" or name not in WITH_THREE)
)


def make_job(folder: Path, ensemble: Ensemble, **changes: Any) -> Job:
    """A job for one worker on the CPU without a feeder, but for the changes, after its newest checkpoint."""
    attempt = changes.get("attempt", 0)
    found = [newest_checkpoint(RunDir(folder), "member-0", number) for number in (attempt, attempt - 1)]
    last = found[0] or found[1]
    job = Job(
        run_dir=str(folder),
        identity=ensemble.identify(0),
        attempt=0,
        rank=0,
        rendezvous=None,
        interface="lo",
        device="cpu",
        feeder=None,
        checkpoints=[] if last is None else [(last.name, None)],
    )
    return replace(job, **changes)


def train_case(name: str, folder: Path, rank: int = 0, world: int = 1, device: str = "cpu") -> dict[str, Any]:
    """Train a case, attempt after attempt; what came of it."""
    options, attempts = CASES[name]
    options = dict(options)
    command, answers = options.pop("command", "stop"), list(options.pop("answers", []))
    seen = f"{name} of {rank}" if options.pop("apart", False) else name
    ensemble = declare(workers=world, **options)
    events: list[dict[str, Any]] = []
    outcomes = []
    for attempt, steps in enumerate(attempts):
        inbox = Script(steps, command)

        def emit(event: dict[str, Any], inbox: Inbox = inbox) -> None:
            events.append(event)
            if event["type"] == "epoch" and answers:
                inbox.put(answers.pop(0))

        meet = (folder / f"{name}-{attempt}").as_uri() if world > 1 else None
        where = {"rank": rank, "rendezvous": meet, "device": device, "awaits_pruner": bool(answers)}
        job = make_job(folder / seen, ensemble, **where)
        outcomes.append(work(job, ensemble, emit, inbox))
        (folder / f"{name}-{attempt} over {rank}").touch()  # the next job names what all have seen written
        while not all((folder / f"{name}-{attempt} over {each}").exists() for each in range(world)):
            time.sleep(0.005)
    return {"outcomes": outcomes, "events": events}


def train_cases(
    rank: int, world: int, names: tuple[str, ...], folder: Path, device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """What one rank says of each case."""
    os.environ["TEST_RANK"] = str(rank)
    return {name: train_case(name, folder, rank, world, device) for name in names}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2]) / "2"
    folder.mkdir(exist_ok=True)
    said = train_cases(rank, 2, ON_CUDA, folder, f"cuda:{rank}")
    (folder / f"{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
