"""What both sides of the study of memory train: one small net on photographs.

It is a spec file (`ensemble run`) for the members that share a pipeline, and the program of a process that trains
alone with a DataLoader: `python -m ensemble.bench.pipelines.training DATA SIZE BATCH_SIZE`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ensemble.bench.pipelines.baselines import make_dataloader
from ensemble.bench.pipelines.config import read_images
from pipelines import Pipeline, stages

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ensemble import Ensemble

CLASSES, LEARNING_RATE = 10, 1e-3
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WORKERS = 2  # preparation workers: of the shared pipeline, and of each DataLoader


def make_pipeline(data: str, size: int) -> Pipeline:
    """Photographs of `size` pixels a side, float32."""
    return read_images(data, size).map(stages.scale("image", mean=MEAN, std=STD))


def make_net(params: dict[str, Any] | None = None) -> nn.Module:
    """A small convolutional net for images of any size."""
    from torch import nn

    return nn.Sequential(
        nn.AvgPool2d(4),
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def loss(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of each sample with a label made of its index."""
    from torch.nn import functional

    return functional.cross_entropy(net(batch["image"]), batch["index"] % CLASSES, reduction="none")


def spec(data: str, size: int = 224, members: int = 8, batch_size: int = 32, epochs: int = 1000) -> Ensemble:
    """Members that differ in their learning rate, and train on the CPU until they are stopped."""
    from ensemble import Ensemble, Recipe, Resources

    return Ensemble(
        name="memory",
        recipe=Recipe(model=make_net, loss=loss),
        members=[{"lr": LEARNING_RATE * (1 + number / members)} for number in range(members)],
        train=make_pipeline(data, size),
        epochs=epochs,
        batch_size=batch_size,
        precision="fp32",
        devices="cpu",
        prep_workers=WORKERS,
        resources=Resources(cpus_per_worker=0.125),
    )


class Photographs:
    """A map-style dataset of what a pipeline prepares: float32 [3, size, size]."""

    def __init__(self, pipeline: Pipeline) -> None:
        from pipelines.prepare.sample_maker import SampleMaker

        self._maker = SampleMaker(pipeline)

    def __len__(self) -> int:
        return len(self._maker.pipeline)

    def __getitem__(self, index: int) -> torch.Tensor:
        import torch

        return torch.from_numpy(self._maker.make(index, epoch=0)["image"])


def main() -> None:
    """Train alone, a line of output an epoch, until the parent process ends."""
    import torch

    from pipelines.ipc.child_processes import end_with_parent

    end_with_parent()
    data, size, batch_size = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = make_dataloader(Photographs(make_pipeline(data, int(size))), int(batch_size), WORKERS)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    while True:
        for images in loader:
            optimizer.zero_grad()
            mean = loss(net, {"image": images, "index": torch.arange(len(images))}).mean()
            mean.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        print("epoch", flush=True)


if __name__ == "__main__":
    main()
