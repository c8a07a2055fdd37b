"""Codecs: fp32 values packed into few bytes (casts, QSGD, 1-bit SGD); they send nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ensemble.comm.codecs.casts import make_cast
from ensemble.comm.codecs.common import Codec
from ensemble.comm.codecs.onebit import make_onebit
from ensemble.comm.codecs.qsgd import make_qsgd

__all__ = ["CODECS", "Codec", "make_codec"]

_MAKERS: dict[str, Callable[[str, Mapping[str, Any], str | None], Codec]] = {
    "fp16": make_cast,
    "bf16": make_cast,
    "qsgd2": make_qsgd,
    "qsgd4": make_qsgd,
    "qsgd8": make_qsgd,
    "onebit": make_onebit,
}

#: Names of all codecs.
CODECS = tuple(_MAKERS)


def make_codec(options: Mapping[str, Any], form: str | None = None) -> Codec:
    """A codec by name and options, such as `{"name": "qsgd4", "bucket": 512, "norm": "max"}`.

    Options: `bucket` (values that share a scale) and `norm` (`"max"`, `"l2"`) of QSGD, `column` and `threshold`
    (`"mean"`, `"zero"`) of 1-bit SGD; what is absent has its default.

    Args:
        options: name and options.
        form: `"numba"`, `"torch"` or `"triton"`, to compare them; by default what is fastest on a tensor's device.

    Raises:
        ValueError: a name or an option is unknown or impossible.
    """
    name = options.get("name")
    if name not in _MAKERS:
        raise ValueError(f"no codec is called {name!r} (valid: {', '.join(_MAKERS)})")
    return _MAKERS[name](name, options, form)
