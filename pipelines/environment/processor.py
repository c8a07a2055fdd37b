"""The processor, as /proc/cpuinfo describes it."""

from __future__ import annotations

import contextlib
import functools
import platform
from importlib import metadata
from pathlib import Path

#: Libraries that compute values of samples.
LIBRARIES = (
    *("numpy", "scipy", "torch", "torchvision", "torchaudio", "opencv-python", "opencv-python-headless", "pillow"),
    *("simplejpeg", "albumentations", "tokenizers", "transformers"),
)
_FAST_BF16 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


@functools.cache
def read_processor() -> dict[str, str]:
    """The fields of the first core, such as "model name" and "flags"; empty where there is no such file."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def find_processor() -> str:
    """The processor's name."""
    return read_processor().get("model name") or platform.processor() or platform.machine()


def has_fast_bf16() -> bool:
    """Whether oneDNN has fast kernels for bf16 on this processor: of x86, those with AVX-512."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not is_x86 or set(read_processor().get("flags", "").split()) >= _FAST_BF16


@functools.cache
def describe_machine() -> str:
    """A text that is equal for processes whose samples must be equal to the last bit."""
    versions = [find_processor(), f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return ", ".join(versions)
