"""How fast accelerators train, as published: what studies emulate by timed waits.

Images/s of one accelerator with synthetic data: TensorFlow's benchmarks of May 2017
(tensorflow/docs_src/performance/benchmarks.md, www.tensorflow.org/performance/benchmarks; CUDA 8, cuDNN 5.1; a K80
in Google's cloud, a P100 of a DGX-1). AlexNet's, published for batches of 512 only, stands for those of 32, too:
its real step of 32 takes longer.
"""

from __future__ import annotations

#: By device and batch.
IMAGES_PER_S: dict[tuple[str, int], dict[str, float]] = {
    ("k80", 32): {"alexnet": 656.0, "vgg16": 35.4, "resnet50": 49.5, "inception": 29.3},
    ("p100", 32): {"alexnet": 2987.0, "vgg16": 144.0, "resnet50": 195.0, "inception": 128.0},
    ("p100", 64): {"resnet50": 219.0, "inception": 142.0, "vgg16": 154.0},
}
DEVICES = tuple(dict.fromkeys(device for device, _ in IMAGES_PER_S))


def step_seconds(device: str, net: str, batch: int) -> float | None:
    """Seconds of a training step; None where nobody has published it."""
    rate = IMAGES_PER_S[device, batch].get(net)
    return None if rate is None else batch / rate
