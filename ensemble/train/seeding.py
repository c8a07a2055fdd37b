"""Makes a member's training reproducible to the bit: seeds, and the number of threads.

The randomness of a step (dropout, noise, mixing) is a function of (seed, rank, global step): generators are
reseeded before each step, so a member that resumes needs no generator state and gets the same bits.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from ensemble.comm.reductions import mix_integers
from ensemble.train.compilation import remove_empty

_CPU = torch.device("cpu")


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the global generators of torch, numpy and Python, from which a model or a loss may draw.

    Args:
        seed: its lowest 63 bits count.
        device: of the member; of torch's generators, the CPU's and this device's are seeded. (torch.manual_seed
            would note a stack trace for every backend that is not in use, each step, which costs more than a small
            model's step.)
    """
    torch.default_generator.manual_seed(seed & (2**63 - 1))
    if device.type == "cuda":
        torch.cuda.manual_seed(seed & (2**63 - 1))
    np.random.seed(seed & (2**32 - 1))
    random.seed(seed)


def step_seed(seed: int, rank: int, step: int) -> int:
    """The seed of one step of one rank, 63 bits."""
    return mix_integers(seed, rank, step)


@contextlib.contextmanager
def process_settings(threads: int, device: torch.device) -> Iterator[None]:
    """Run the block with this many torch threads on this device, and with gradients; then leave the process, the
    user's, as it was.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        with _restored_generators(), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(before)
        remove_empty()


@contextlib.contextmanager
def seeded(seed: int, device: torch.device = _CPU) -> Iterator[None]:
    """Run the block with the generators as a member's training begins, then restore them: models are built so."""
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        with _restored_generators():
            seed_everything(seed, device)
            yield
    finally:
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)


@contextlib.contextmanager
def _restored_generators() -> Iterator[None]:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
