"""Mistakes in pipelines, feeders and their readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kit.mistakes import Mistake

from mistakes.of_sources import wrong
from pipelines import Feeder, Peers, Pipeline, PipelineError, attach, find_shared_stages, resident, sources
from pipelines.feeder.process import spawn

ROWS = [
    Mistake(
        "arrays of unequal length",
        lambda: Pipeline(sources.arrays(x=[1.0, 2.0], label=[1]), seed=0),
        PipelineError,
        ("the columns differ in length: x 2, label 1",),
    ),
    Mistake(
        "an object in a sample",
        lambda: Pipeline(sources.dataset([{"graph": Exception()}] * 2)).fields,
        PipelineError,
        (
            "'graph' is Exception, which a batch cannot hold",
            "as a dict of its arrays for collate=",
            "drop('graph')",
        ),
    ),
]

DATA = sources.arrays(x=np.zeros((64, 3), np.float32), label=np.arange(64))
PIPE, STILL = Pipeline(DATA, seed=3), Pipeline(DATA, shuffle=False)


class Listens:
    address = "/tmp/x/socket"


def add(call: Callable[..., Any], cases: Any, name: str) -> None:
    ROWS.extend(wrong(f"{name}: {options}", lambda o=options: call(**o), *words) for options, *words in cases)


add(
    lambda **options: Feeder(**{"pipeline": PIPE, **options}),
    (
        ({"pipeline": "data"}, "pipeline must be a Pipeline, got 'data', a path: give it to a source"),
        ({"pipeline": DATA}, "a source: write Pipeline(source)"),
        ({"pipeline": None}, "must be a Pipeline, got None"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"workers": True}, "workers must be an integer, at least 1, got True"),
        ({"capacity": 1}, "capacity must be at least 2, got 1"),
        ({"block": 0}, "block must be in 1.."),
        ({"block": 9, "capacity": 8}, "block must be in 1..8 (the capacity), got 9"),
        ({"expect": -1}, "expect must be at least 0, got -1"),
        ({"expect": None}, "expect must be an integer, at least 0, got None"),
        ({"gate_timeout_s": -1}, "gate_timeout_s must be at least 0 and at most 1000000 (seconds), got -1"),
        ({"gate_timeout_s": float("inf")}, "at most 1000000 (seconds), got inf"),
        ({"stall_limit_s": 0}, "stall_limit_s must be above 0 and at most 1000000 (seconds), got 0"),
        ({"stall_limit_s": float("nan")}, "got nan"),
        ({"replacement": "no"}, "replacement must be True or False, got 'no'"),
        ({"policy": ["wait"]}, "policy must be 'wait' or 'detach', got ['wait']"),
        ({"preparers": 2}, "preparers=2 is for several nodes: give peers= too"),
        ({"preparers": 0, "peers": Peers("p", 0, 2)}, "preparers must be at least 1, got 0"),
        ({"design": "ring"}, "no design 'ring'; the designs are node, single, multi, all and auto"),
        ({"peers": "p"}, "peers must be a pipelines.Peers or None, got 'p'"),
        ({"peers": Peers("p", 0, 2, "nowhere7")}, "Peers.interface must be one of this host's, which are "),
        ({"resident": STILL}, "resident must be a mapping of names to Pipelines, got Pipeline("),
        ({"resident": {1: STILL}}, "resident must have str for names, got 1"),
        ({"resident": {"valid": "data"}}, "resident['valid'] must be a Pipeline, got 'data'"),
        ({"address": 7}, "address must be a path (str or os.PathLike), got 7"),
        ({"cache_bytes": 1 << 20}, "cache_bytes= needs a cache: give cache="),
        ({"cache_dir": "kept"}, "cache_dir= needs a cache: give cache="),
        ({"cache": "disk", "cache_dir": 7}, "cache_dir must be a path (str or os.PathLike), got 7"),
    ),
    "Feeder",
)

EPOCHS = "epochs must be a number of at least 1 or range(first, last), got "
RANGE = "epochs must be range(first, last) with 0 <= first < last and step 1, got "
READINGS = (
    ({"epochs": 0}, EPOCHS + "0"),
    ({"epochs": 1.5}, EPOCHS + "1.5"),
    ({"epochs": True}, EPOCHS + "True"),
    ({"epochs": [0, 1]}, EPOCHS + "[0, 1]"),
    ({"epochs": range(0, 4, 2)}, RANGE + "range(0, 4, 2)"),
    ({"epochs": range(-1, 2)}, RANGE + "range(-1, 2)"),
    ({"epochs": range(3, 3)}, RANGE + "range(3, 3)"),
    ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"batch_size": "8"}, "batch_size must be an integer, at least 1, got '8'"),
    ({"world": 0}, "world must be at least 1, got 0"),
    ({"rank": 2, "world": 2}, "rank must be in 0..1 of world 2, got 2"),
    ({"start_step": -1}, "start_step must be at least 0, got -1"),
    ({"weights": [1.0]}, "weights must be a function or None, got [1.0]"),
    ({"collate": 3}, "collate must be a function or None, got 3"),
)
add(lambda **options: PIPE.loader(**{"batch_size": 8, **options}), READINGS, "loader")
add(lambda **options: attach("/nowhere/socket", PIPE, **{"batch_size": 8, **options}), READINGS, "attach")
add(
    lambda address="/nowhere/socket", pipeline=PIPE, **options: attach(address, pipeline, 8, **options),
    (
        ({"address": 7}, "address must be a path (str or os.PathLike), got 7"),
        ({"pipeline": "data"}, "the pipeline of attach() must be a Pipeline, got 'data', a path"),
        ({"on_wait": 5}, "on_wait must be a function or None, got 5"),
    ),
    "attach",
)
add(
    lambda **options: Peers(**{"directory": "d", "node": 0, "nodes": 2, **options}),
    (
        ({"node": 2}, "Peers.node must be in 0..1, got 2"),
        ({"node": "0"}, "Peers.node must be an integer, in 0..1, got '0'"),
        ({"nodes": 0}, "Peers.nodes must be at least 1, got 0"),
        ({"nodes": None}, "Peers.nodes must be an integer, at least 1, got None"),
        ({"directory": 3}, "Peers.directory must be a path (str or os.PathLike), got 3"),
        ({"timeout_s": 0}, "Peers.timeout_s must be above 0"),
        ({"interface": None}, "Peers.interface must be a name such as 'eth0', got None"),
    ),
    "Peers",
)


def touch(folder: Path, below: str) -> Path:
    (folder / "file").touch()
    return folder / "file" / below


def cache_in(below: str) -> Callable[[Path], Any]:
    return lambda folder: Feeder(PIPE.map(dict), cache="disk", cache_dir=touch(folder, below))


ROWS += [
    wrong("attach to an object", lambda: attach(Listens(), PIPE, 8), "got the Listens: pass feeder.address"),  # type: ignore[arg-type]
    wrong("resident of an object", lambda: resident(Listens(), "valid", PIPE), "pass feeder.address"),  # type: ignore[arg-type]
    wrong("resident of a number", lambda: resident(7, "valid", PIPE), "address must be a path"),  # type: ignore[arg-type]
    wrong("spawn with a list", lambda: spawn(PIPE, resident=["valid"]), "resident must be a mapping"),  # type: ignore[arg-type]
    Mistake("spawn with a misspelt option", lambda: spawn(PIPE, worker=2), TypeError, ("argument 'worker'",)),  # type: ignore[call-arg]
    wrong("a cache in a file", cache_in(""), "may make and write to, got ", "file"),
    wrong("a cache below a file", cache_in("kept"), "may make and write to, got ", "kept"),
    wrong("stages of a number", lambda: find_shared_stages(5), "takes several Pipelines, got 5"),  # type: ignore[arg-type]
    wrong("stages of one", lambda: find_shared_stages(PIPE), "takes several Pipelines, got Pipeline("),  # type: ignore[arg-type]
    wrong(
        "stages of a path", lambda: find_shared_stages(["data"]), "pipeline 0 of find_shared_stages() ", "a path"
    ),  # type: ignore[list-item]
    wrong("stages of none", lambda: find_shared_stages([]), "find_shared_stages() takes at least one pipeline"),
    wrong("other seeds", lambda: find_shared_stages([PIPE, Pipeline(DATA, seed=4)]), "nothing in common", "seed"),
    wrong("more stages than there are", lambda: PIPE.take_stages(3), "take_stages(3): the pipeline has 0 stages"),
    wrong("blocks of arrays", lambda: Pipeline(DATA, shuffle="blocks"), "shuffle='blocks' is for a source"),
]
