"""Describes what the last bits of samples depend on: the model of processor, and versions of libraries."""

from __future__ import annotations

import contextlib
import functools
import platform
from importlib import metadata

from pipelines.environment.processor import find_processor

#: Libraries that compute values of samples.
LIBRARIES = (
    *("numpy", "scipy", "torch", "torchvision", "torchaudio", "opencv-python", "opencv-python-headless", "pillow"),
    *("simplejpeg", "albumentations", "kornia", "tokenizers", "transformers"),
)


@functools.cache
def describe_machine() -> str:
    """A text that is equal for processes whose samples must be equal to the last bit."""
    known = [find_processor(), f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            known.append(f"{name} {metadata.version(name)}")
    return ", ".join(known)
