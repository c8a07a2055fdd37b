"""What both sides of the study of memory train: one small net on photographs.

It is a spec file (`ensemble run`) for the members that share a pipeline, and the program of a process that trains
alone with a DataLoader: `python -m ensemble.bench.pipelines.training CONFIG`.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from ensemble.bench.pipelines.step import CLASSES, make_net
from pipelines import Pipeline, sources, stages

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ensemble import Ensemble

LEARNING_RATE = 1e-3
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WORKERS = 2  # preparation workers: of the shared pipeline, and of each DataLoader


def make_pipeline(data: str, size: int) -> Pipeline:
    """Photographs to `size` pixels a side, of a tar archive of JPEGs."""
    renamed = {"jpeg": "image", "jpg": "image"}
    return (
        Pipeline(sources.tar(data, rename=renamed), seed=0)
        .map(stages.decode_jpeg("image"))
        .map(stages.resize("image", size=(size, size)))
        .map(stages.select("image"))
        .map(stages.scale("image", mean=MEAN, std=STD))
    )


def model(params: dict[str, Any]) -> nn.Module:
    """The net of each member."""
    return make_net()


def loss(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of each sample with a label made of its index."""
    from torch.nn import functional

    return functional.cross_entropy(net(batch["image"]), batch["index"] % CLASSES, reduction="none")


def spec(data: str, size: int = 224, members: int = 8, batch_size: int = 32, epochs: int = 1000) -> Ensemble:
    """Members that differ in their learning rate, and train on the CPU until they are stopped."""
    from ensemble import Ensemble, Recipe, Resources

    return Ensemble(
        name="memory",
        recipe=Recipe(model=model, loss=loss),
        members=[{"lr": LEARNING_RATE * (1 + number / members)} for number in range(members)],
        train=make_pipeline(data, size),
        epochs=epochs,
        batch_size=batch_size,
        precision="fp32",
        devices="cpu",
        prep_workers=WORKERS,
        resources=Resources(cpus_per_worker=0.125),
    )


def main() -> None:
    """Train alone, a line of output an epoch, until standard input ends."""
    import torch

    from ensemble.bench.pipelines.baselines import Photographs
    from pipelines.child_processes import end_with_parent

    end_with_parent()
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader: torch.utils.data.DataLoader[torch.Tensor] = torch.utils.data.DataLoader(
        Photographs(make_pipeline(config["data"], config["size"])),  # type: ignore[arg-type]  # has items
        batch_size=config["batch_size"],
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        worker_init_fn=_start_worker,
    )
    net = model({})
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    while True:
        for images in loader:
            optimizer.zero_grad()
            mean = loss(net, {"image": images, "index": torch.arange(len(images))}).mean()
            mean.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        print("epoch", flush=True)


def _start_worker(_worker: int) -> None:
    import cv2

    cv2.setNumThreads(0)


if __name__ == "__main__":
    main()
