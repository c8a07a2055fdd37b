"""The same members here, and as trials of Ray Tune; both run in this project's environment."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ensemble
from benchmarks.peers.systems import dataloader
from benchmarks.peers.training import BATCH, Photographs, build, prepare, train
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources


class Files:
    """The photographs as a source over any reader."""

    def __init__(self, archive: str) -> None:
        self._data = Photographs(archive)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> dict[str, Any]:
        content, label = self._data.read(number)
        return {"image": content, "label": label}


def prepare_sample(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The stage."""
    return {"image": prepare(sample["image"], rng), "label": sample["label"]}


def run_ours(options: dict[str, Any]) -> None:
    """One run of all members; those with a delay are added while it goes on."""
    members = [{"width": one["width"], "lr": one["lr"]} for one in options["members"]]
    early = [member for member, one in zip(members, options["members"], strict=True) if not one["delay_s"]]
    spec = Ensemble(
        name="peers",
        recipe=Recipe(
            model=lambda params: build(params["width"], options["classes"]),
            loss="cross_entropy",
            inputs=("image",),
        ),
        members=early,
        train=Pipeline(sources.dataset(Files(options["data"]), id="photographs"), seed=0).map(prepare_sample),
        batch_size=BATCH,
        epochs=options["epochs"],
        drop_last=True,
    )
    run = ensemble.submit(spec, f"{options['folder']}/run", "local")
    late = [(one["delay_s"], m) for m, one in zip(members, options["members"], strict=True) if one["delay_s"]]
    began_s = time.monotonic()

    def add_late() -> None:
        for delay_s, member in late:
            time.sleep(max(0.0, began_s + delay_s - time.monotonic()))
            run.add(member)

    threading.Thread(target=add_late, daemon=True).start()
    run.wait()
    samples = sum(row["samples"] for row in run.history())
    Path(options["out"]).write_text(json.dumps({"samples": samples}), encoding="utf-8")


def read_ray_data(options: dict[str, Any]) -> Iterator[Any]:
    """A Ray Data pipeline, as each trial executes it in each epoch."""
    import ray

    data = Photographs(options["data"])

    def load(row: dict[str, Any]) -> dict[str, Any]:
        content, label = data.read(int(row["id"]))
        return {"image": prepare(content, np.random.default_rng()), "label": label}

    for _ in range(options["epochs"]):
        prepared = ray.data.range(len(data)).random_shuffle().map(load)
        for batch in prepared.iter_torch_batches(batch_size=BATCH, drop_last=True):
            yield batch["image"], batch["label"]


def run_trial(options: dict[str, Any], config: dict[str, Any]) -> None:
    """A trial of Ray Tune: the loop that the plain members have, with their DataLoader or with Ray Data."""
    from ray import tune

    batches = read_ray_data(options) if options["system"] == "ray_data" else dataloader(options)
    tune.report(train(batches, config["member"]["width"], options["classes"], config["member"]["lr"]))


def run_tune(options: dict[str, Any]) -> None:
    """The members as trials of Ray Tune, all at a time."""
    from ray import tune

    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    grid = [{"width": one["width"], "lr": one["lr"]} for one in options["members"]]
    cores = float(len(os.sched_getaffinity(0)))
    if options["system"] == "ray_data":
        cores /= 2  # the others are for its tasks
    share = cores / len(grid)
    tuner = tune.Tuner(
        tune.with_resources(functools.partial(run_trial, options), {"cpu": share}),
        param_space={"member": tune.grid_search(grid)},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(storage_path=options["folder"], name="tune"),
    )
    results = tuner.fit()
    samples = sum((results[n].metrics or {})["samples"] for n in range(len(results)))
    Path(options["out"]).write_text(json.dumps({"samples": samples}), encoding="utf-8")


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    {"ray-ensemble": run_ours, "ray_tune": run_tune, "ray_data": run_tune}[chosen["system"]](chosen)
