"""Codecs: fp32 values packed into few bytes (casts, QSGD, 1-bit SGD); they send nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ensemble.comm.codecs.common import Codec
from ensemble.spec.options import CODECS, COMPRESSIONS, resolve

__all__ = ["Codec", "make_codec", "options_for"]


def make_codec(compression: Mapping[str, Any], form: str | None = None) -> Codec:
    """The codec of a declared compression, such as `{"name": "qsgd4", "bucket": 512, "norm": "max"}`.

    Args:
        compression: name and options (`ensemble.spec.options.COMPRESSIONS`); what is absent has its default.
        form: `"numba"`, `"torch"` or `"triton"`, to compare them; by default what is fastest on a tensor's device.

    Raises:
        SpecError: a name or an option is unknown or impossible.
    """
    options = resolve("compression", compression, COMPRESSIONS)
    make = CODECS.load(options["name"])
    left_out = ["error_feedback", "min_size"] + ["name"] * (options["name"] not in COMPRESSIONS)
    options = {option: value for option, value in options.items() if option not in left_out}
    codec: Codec = make(**options) if form is None else make(**options, form=form)
    return codec


def options_for(compression: Mapping[str, Any], shape: Sequence[int]) -> Mapping[str, Any]:
    """The options with which a tensor of this shape is packed: its own columns where `column` is "tensor"."""
    if compression.get("column") != "tensor":
        return compression
    return {**compression, "column": shape[-1]}
