"""JPEG files on their way to four small CNNs on one GPU: decoded once for all, and augmented in batches on the GPU
(`Pipeline.map_batches`), against four plain processes whose DataLoaders each do all of it on their cores."""

from __future__ import annotations

import functools
import importlib.util
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks import models
from gpu_cases.common import Absent, Row, Setting, attempt, check, row
from gpu_cases.networks import MADE_UP
from gpu_cases.runs import declare_alike, train, train_plain
from pipelines import Pipeline, sources
from pipelines.environment.machine_limits import usable_cpus

CODEC = next((name for name in ("PIL", "simplejpeg") if importlib.util.find_spec(name)), None)
_SHARED, _PLAIN = "prepared once, augmented in batches", "a DataLoader each"
_SAME = "samples are the same in batches of another size"


def encode(image: Any) -> bytes:
    """Uint8 [h, w, 3] as JPEG."""
    if CODEC == "simplejpeg":
        import simplejpeg

        return simplejpeg.encode_jpeg(image, quality=90)  # type: ignore[no-any-return]
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=90)
    return file.getvalue()


def decode(content: bytes) -> Any:
    """JPEG as uint8 [3, h, w]."""
    if CODEC == "simplejpeg":
        import simplejpeg

        return simplejpeg.decode_jpeg(content).transpose(2, 0, 1)
    from PIL import Image

    return np.array(Image.open(io.BytesIO(content))).transpose(2, 0, 1)


def augment(images: torch.Tensor, rngs: list[torch.Generator]) -> torch.Tensor:
    """Crop, flip and brighten, each image by its generator: uint8 [b, 3, h, h] to float32 of 7/8 the height."""
    draws = torch.stack([torch.rand(5, generator=rng, device=rng.device) for rng in rngs])
    size, left, top, flip, gain = draws.unsqueeze(-1).unbind(1)
    size = 0.6 + 0.4 * size
    line = torch.linspace(-1, 1, images.shape[-1] * 7 // 8, device=images.device)
    columns = (2 * left - 1) * (1 - size) + size * line * torch.where(flip < 0.5, -1.0, 1.0)
    rows = (2 * top - 1) * (1 - size) + size * line
    shape = (len(images), len(line), len(line))
    grid = torch.stack([columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)], -1)
    brightened = (images / 127.5 - 1) * (0.8 + 0.4 * gain[..., None, None])
    return functional.grid_sample(brightened, grid, align_corners=False)


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """The files of a folder with a folder for each class, prepared."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, rng = self._paths[index], torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        return augment(torch.from_numpy(decode(path.read_bytes()))[None], [rng])[0], int(path.parent.name)


def train_with_loader(
    number: int, folder: Path, params: dict[str, Any], device: str, batch_size: int, epochs: int, workers: int
) -> Iterator[int]:
    """Train one CNN as a plain script does; yields as `train_plain` asks for."""
    torch.manual_seed(number)
    net, data = models.model(params).to(device), Photographs(folder)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "pin_memory": device == "cuda"}
    options["multiprocessing_context"] = "fork"  # as in a plain script: a spawned process spawns its workers
    loader = DataLoader(data, batch_size, shuffle=True, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    def step(*fields: torch.Tensor) -> None:
        images, labels = (field.to(device, non_blocking=True) for field in fields)
        optimizer.zero_grad()
        models.loss(net, {"image": images, "label": labels}).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step(torch.zeros(2, *data[0][0].shape), torch.zeros(2, dtype=torch.long))  # the first one imports and compiles
    yield 0
    for _ in range(epochs):
        for images, labels in loader:
            step(images, labels)
        if device == "cuda":
            torch.cuda.synchronize()
        yield len(data)


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    if CODEC is None:
        raise Absent("neither Pillow nor simplejpeg is installed, to write and read JPEG files")
    with tempfile.TemporaryDirectory() as folder:
        _write_images(Path(folder), setting.choose(2048, 128), setting.choose(256, 32))
        data = Pipeline(sources.image_folder(folder), seed=0).map(decode, field="image")
        data = data.map_batches(augment, field="image", batch_size=32, device=setting.choose("auto", "cpu"))
        yield attempt(_SAME, functools.partial(_compare, data))
        for what in (_SHARED, _PLAIN):
            yield attempt(what, functools.partial(_measure, setting, what, data, Path(folder)))


def _write_images(folder: Path, count: int, pixels: int) -> None:
    """Blocks of random colours, and noise; brighter for a higher class."""
    rng = np.random.default_rng(0)
    for label in range(10):
        (folder / str(label)).mkdir()
    for number in range(count):
        blocks = rng.integers(0, 100, (pixels // 8, pixels // 8, 3)).repeat(8, 0).repeat(8, 1)
        image = blocks + rng.integers(0, 30, blocks.shape) + 12 * (number % 10)
        (folder / str(number % 10) / f"{number}.jpg").write_bytes(encode(image.astype(np.uint8)))


def _compare(data: Pipeline) -> Row:
    few, many = (next(iter(data.loader(size, epochs=1)))["image"].clone() for size in (16, 48))
    return check(_SAME, torch.equal(few, many[:16]) and not torch.equal(many[0], many[1]))


def _measure(setting: Setting, what: str, data: Pipeline, folder: Path) -> Row:
    net = setting.choose(models.NETS["cnn"], models.net_of("cnn-small", width=2))
    members, epochs, workers = setting.choose((4, 6, max(1, usable_cpus() // 4)), (2, 4, 1))
    if what == _SHARED:
        declared = declare_alike(setting, "images", net, data, members, epochs, prep_workers=workers)
        return row(what, workers=workers, codec=CODEC, **train(setting, declared))
    arguments = folder, net.params(MADE_UP), setting.device, setting.choose(64, 32), epochs, workers
    figures = train_plain(setting, members, epochs, train_with_loader, *arguments)
    return row(what, workers=members * workers, codec=CODEC, **figures)
