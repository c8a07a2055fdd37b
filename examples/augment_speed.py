"""Measures how many photographs a second of CPU time augments, by our stages and by torchvision's, in turn.

python examples/augment_speed.py PHOTOS.tar [--rounds 5] [--size 224]

The archive holds JPEG files. Each row is a pipeline: decode, random resized crop, flip, colour jitter (or none),
normalize. It is read by one process and thread, once in each round, one row after the other; the figure is the
median of the rounds, of CPU time, which other processes change little. It prints the table of
docs/how-to/augment.md.
"""

import argparse
import statistics
import time

import torch
from torchvision.transforms import v2

from pipelines import Pipeline, sources, stages

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pipelines(archive, size):
    """Name -> pipeline with jitter, and without."""
    source = sources.tar(archive)
    field = next(name for name in source[0] if name != "key")
    decoded = Pipeline(source, seed=0).map(stages.select(field)).map(stages.decode_jpeg(field))
    geometry = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]

    def by_torchvision(first, jitter):
        return decoded.map(v2.Compose([*first, *geometry, *jitter, v2.ToImage(), *floats]), field=field)

    def by_us(jitter):
        made = decoded.map(stages.random_resized_crop(field, size)).map(stages.random_flip(field))
        for transform in jitter:
            made = made.map(transform, field=field)
        return made.map(stages.scale(field, MEAN, STD))

    names = {
        "our stages": by_us,
        "torchvision, PIL images": lambda jitter: by_torchvision([], jitter),
        "torchvision, tensors": lambda jitter: by_torchvision([v2.ToImage()], jitter),
    }
    jitter = [v2.ColorJitter(0.4, 0.4, 0.4)]
    made = {(name, bool(some)): make(some) for name, make in names.items() for some in ((), jitter)}
    return {("decode alone", False): decoded.map(stages.center_crop(field, 64)), **made}


def rate(pipeline):
    """Samples of an epoch by its CPU-seconds."""
    started, count = time.process_time(), 0
    for batch in pipeline.loader(32, range(1)):
        count += len(batch["index"])
    return count / (time.process_time() - started)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=224)
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = pipelines(options.archive, options.size)
    rates = {key: [] for key in made}
    for _ in range(options.rounds + 1):  # the first warms up
        for key, pipeline in made.items():
            rates[key].append(rate(pipeline))
    found = {key: statistics.median(each[1:]) for key, each in rates.items()}
    print("| samples per CPU-second | | with colour jitter |\n|---|---:|---:|")
    for name in dict.fromkeys(name for name, _ in made):
        figures = (f"{found[name, some]:.0f}" if (name, some) in found else "" for some in (False, True))
        print(f"| {name} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
