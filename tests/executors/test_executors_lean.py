"""What the processes of a run share: members' memory beside that of a program that imports torch for itself."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import simplejpeg

import ensemble
from benchmarks.sc18.processes import read_memory
from ensemble import Ensemble, Recipe, Resources
from ensemble.store import RunDir
from pipelines import Pipeline, sources, stages

#: What a program needs to train, before it has a model.
ALONE = """
import gc, torch
torch.optim.SGD([torch.nn.Parameter(torch.empty(0))], lr=0.0)
gc.collect()
from benchmarks.sc18.processes import read_memory
import os
print(read_memory(os.getpid())["Private_Dirty"])
"""
#: Libraries that only preparation or the controller use, by what their mapped files are called.
HEAVY = ("cv2", "simplejpeg", "pyarrow", "sklearn", "numba", "libtorch_cpu", "optuna", "ray/_raylet")


def describe(pid: int) -> dict[str, Any]:
    """What a process has loaded, what it holds for itself."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {"loaded": [name for name in HEAVY if name in maps], "private": read_memory(pid)["Private_Dirty"]}


def model(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 8 * 8, 2))


def loss(net: Any, batch: Any) -> Any:
    """Of each sample; in the second epoch the member describes itself and the processes that feed it."""
    from torch.nn import functional

    if getattr(batch, "epoch", 0) == 1 and batch.step == 0:
        before = describe(os.getpid())
        gc.collect()
        siblings = psutil.Process(os.getppid()).parent().children()  # the fork server's, which the feeder is
        [feeder] = [process for process in siblings if is_feeder(process)]
        seen = {"member": before, "collected": describe(os.getpid()), "feeder": describe(feeder.pid)}
        seen["workers"] = [describe(worker.pid) for worker in feeder.children()]
        seen["modules"] = [name for name in ("cv2", "simplejpeg", "pyarrow", "optuna") if name in sys.modules]
        print(json.dumps(seen), flush=True)
    return functional.cross_entropy(net(batch["image"].float() / 255), batch["index"] % 2, reduction="none")


def is_feeder(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it has ended
        return "pipelines.feeder.process" in process.cmdline()
    return False


def write_photos(path: Path) -> Path:
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w") as archive:
        for number in range(16):
            data = simplejpeg.encode_jpeg(rng.integers(0, 256, (80, 96, 3)).astype(np.uint8))
            member = tarfile.TarInfo(f"{number:03d}.jpeg")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.more
def test_members_share_what_the_fork_server_imported_and_load_no_decoder(tmp_path: Path) -> None:
    pipeline = Pipeline(sources.tar(write_photos(tmp_path / "photos.tar"), rename={"jpeg": "image"}), seed=0)
    pipeline = pipeline.map(stages.decode_jpeg("image")).map(stages.resize("image", 64))
    still = pipeline.map(stages.select("image"))
    needs, members = Resources(cpus_per_worker=0.1, memory_gb=0.5), [{"lr": 0.01}, {"lr": 0.02}]
    usual = {"epochs": 2, "batch_size": 8, "precision": "fp32", "devices": "cpu", "resources": needs}
    recipe = Recipe(model=model, loss=loss)
    declared = Ensemble(name="lean", recipe=recipe, members=members, train=still, valid=still, **usual)
    result = ensemble.submit(declared, tmp_path / "run", "local").wait()
    assert [row["state"] for row in result.members] == ["finished", "finished"]
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    alone = int(done.stdout)
    for row in result.members:
        log = RunDir(tmp_path / "run").log(row["member"]).read_text()
        [seen] = [json.loads(line) for line in log.splitlines() if "loaded" in line]
        # The rest of what it imports is the fork server's, and stays so through a collection of garbage.
        assert seen["member"]["private"] < alone / 4, (seen, alone)
        assert seen["collected"]["private"] - seen["member"]["private"] < alone / 40, (seen, alone)
        assert seen["member"]["loaded"] == ["libtorch_cpu"]
        assert seen["modules"] == []
        # What stages need is imported in the feeder's process, and shared by the workers that are forked from it.
        assert seen["feeder"]["loaded"] == seen["workers"][0]["loaded"] == ["cv2", "simplejpeg"]
        assert all(each["private"] < alone / 12 for each in seen["workers"]), (seen, alone)
