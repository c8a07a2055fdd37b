"""What the members of these tests are; in a module of its own, so that worker processes can import it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ensemble import Ensemble, Member, Recipe, Resources
from ensemble.spec import Identity
from ensemble.store import RunDir
from ensemble.train import Job
from kit.once import is_first
from pipelines import Pipeline, sources


def model(params: dict[str, Any]) -> Any:
    import torch

    if "width" not in params:
        return torch.nn.Linear(4, 3)
    layers = (torch.nn.Linear(4, params["width"]), torch.nn.BatchNorm1d(params["width"]))
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(params["width"], 3))


def momentum(model: Any, params: dict[str, Any]) -> Any:
    """An optimizer with a state of its own, whose learning rate may be 0."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)


def loss(model: Any, batch: Any) -> Any:
    import torch

    fault = getattr(model, "fault", None)
    if fault is not None:
        fault()
    if model.training and getattr(model, "record", None):
        with open(model.record, "a") as file:
            file.write(json.dumps([batch.epoch, batch.step, batch["index"].tolist()]) + "\n")
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def faulty_model(params: dict[str, Any]) -> Any:
    """A model whose loss goes astray, or kills its process once: a marker file says that it has."""
    import torch

    made = model(params)
    steps = 0
    marker = Path(params["marker"]) if "marker" in params else None

    if params.get("hold_mb"):
        made.held = np.ones(params["hold_mb"] << 20, np.uint8)

    if params.get("spawn"):
        subprocess.Popen(["sleep", "600"])

    if params.get("fault") == "build":
        raise ValueError("this model cannot be built")

    def first() -> bool:
        """Whether this has not happened before; without a marker it happens each time."""
        return marker is None or is_first(marker)

    def fault() -> None:
        nonlocal steps
        steps += 1
        if params.get("fault") == "hang" and steps == params["after"] and first():
            time.sleep(3600)
        if params.get("fault") == "wait" and steps == params["after"]:
            while marker is None or not marker.exists():
                time.sleep(0.005)
        if params.get("fault") == "slow" and marker is not None and not marker.exists():
            time.sleep(1.0)
        until_s = time.process_time() + params.get("burn_s", 0.0)
        while time.process_time() < until_s:
            pass
        if "step_s" in params:
            time.sleep(params["step_s"])
        if params.get("fault") == "nan" and steps >= params.get("after", 0):
            with torch.no_grad():
                made.weight.fill_(float("nan"))
        if params.get("fault") == "kill" and steps == params["after"] and first():
            os.kill(os.getpid(), signal.SIGKILL)
        if params.get("fault") == "exit" and steps == params["after"]:
            os._exit(3)

    made.fault, made.record = fault, params.get("record")
    return made


def poison(sample: dict[str, Any]) -> dict[str, Any]:
    """A stage that ends whoever prepares certain samples."""
    if sample["key"] in (7, 70):
        os.kill(os.getpid(), signal.SIGKILL)
    return {name: value for name, value in sample.items() if name != "key"}


def no_sample(sample: dict[str, Any]) -> dict[str, Any]:
    """A stage that can prepare none."""
    raise ValueError("no sample")


def bad(sample: dict[str, Any]) -> dict[str, Any]:
    """As `poison`, but an error."""
    if sample["key"] in (7, 70):
        raise ValueError("unreadable")
    return {name: value for name, value in sample.items() if name != "key"}


def keyed(stage: Any, on_error: Any) -> Pipeline:
    """`samples` that know their index, through a stage."""
    rng = np.random.default_rng(0)
    label, key = rng.integers(0, 3, 96), np.arange(96)
    x = rng.normal(size=(96, 4)).astype(np.float32)
    return Pipeline(sources.arrays(x=x, label=label, key=key), seed=0, on_error=on_error, max_skipped=1.0).map(
        stage
    )


class HangsInAFeeder:
    """A stage that a feeder's process cannot even unpickle."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    def __getstate__(self) -> dict[str, Any]:
        return {"any": "state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if sys.argv[0].endswith("feeder/process.py"):
            threading.Event().wait()


def samples(n: int, seed: int) -> Pipeline:
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, n)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    x[np.arange(n), label] += 2.0
    return Pipeline(sources.arrays(x=x, label=label), seed=seed)


def an_ensemble(members: list[Member | dict[str, Any]] | None = None, **options: Any) -> Ensemble:
    defaults: dict[str, Any] = {
        "name": "executed",
        "recipe": Recipe(model=faulty_model, loss=loss),
        "train": samples(96, 0),
        "valid": samples(48, 1),
        "epochs": 2,
        "checkpoint_every": 1,
        "batch_size": 32,
        "gate_timeout_s": 300.0,
        # so that nothing is measured: what befalls a member is to befall it in training
        "resources": Resources(cpus_per_worker=1.0, gpus_per_worker=0.0, memory_gb=1.0),
    }
    if "search" not in options:
        defaults["members"] = members or [{"lr": 0.1}, {"lr": 0.3}]
    return Ensemble(**{**defaults, **options})


def make_job(identity: Identity, run_dir: RunDir | str, **fields: Any) -> Job:
    """The first attempt of a member's only rank, on the CPU, without a feeder."""
    usual: dict[str, Any] = {"attempt": 0, "rank": 0, "rendezvous": None, "interface": None, "device": "cpu"}
    path = run_dir if isinstance(run_dir, str) else str(run_dir.path)
    return Job(run_dir=path, identity=identity, **{**usual, "feeder": None, **fields})


def when_sent(controller: Any, then: Callable[[], None]) -> None:
    """Call `then` once, when the controller has sent members what it has decided to send by now."""
    from ensemble.controller.actions import Action, Send

    performer = controller.performer
    perform = performer.perform

    def performed(actions: Sequence[Action]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = perform(actions)
        if any(isinstance(action, Send) for action in actions):
            performer.perform = perform
            then()
        return answers

    performer.perform = performed
