"""Stages for `Pipeline.map`: decode, crop, resize, normalize, tokenize, pad.

Each function returns a stage: a callable `f(sample)`, or `f(sample, rng)` if it draws random numbers. It takes
a sample (a dict) and returns a new one; it does not change its argument. The first parameter names the field that
the stage works on. Images are numpy arrays [C, H, W]. A stage that cannot be applied to a sample raises
`PipelineError`, which the pipeline reports as the `SampleError` of that sample.
It is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.providers import Providers

if TYPE_CHECKING:
    from pipelines.stages._declared import binary, ragged, text
    from pipelines.stages._decode import decode_image, decode_jpeg
    from pipelines.stages._fields import drop, rename, select
    from pipelines.stages._geometry import center_crop, random_crop, random_flip, random_resized_crop, resize
    from pipelines.stages._joint import tv_transform
    from pipelines.stages._table import fit, mean_std
    from pipelines.stages._text import build_vocabulary, tokenize
    from pipelines.stages._values import cast, pad, scale

__all__ = [
    "binary", "build_vocabulary", "cast", "center_crop", "decode_image", "decode_jpeg", "drop", "fit", "mean_std",
    "pad", "ragged", "random_crop", "random_flip", "random_resized_crop", "rename", "resize", "scale", "select",
    "text", "tokenize", "tv_transform",
]  # fmt: skip

_NAMES_IN = {
    "_declared": "binary ragged text",
    "_decode": "decode_image decode_jpeg",
    "_fields": "drop rename select",
    "_geometry": "center_crop random_crop random_flip random_resized_crop resize",
    "_joint": "tv_transform",
    "_table": "fit mean_std",
    "_text": "build_vocabulary tokenize",
    "_values": "cast pad scale",
}
#: name -> function that makes a stage; those of other distributions are attributes of this package as well.
STAGES = Providers(
    "stages",
    {name: f"{__name__}.{module}:{name}" for module, names in _NAMES_IN.items() for name in names.split()},
)


def __getattr__(name: str) -> Any:
    value = globals()[name] = STAGES.load_attribute(__name__, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *STAGES.names()})
