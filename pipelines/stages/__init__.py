"""Stages for `Pipeline.map`: decode, crop, resize, normalize, tokenize, pad.

Each function returns a stage: a callable `f(sample)`, or `f(sample, rng)` if it draws random numbers. It takes
a sample (a dict) and returns a new one; it does not change its argument. The first parameter names the field that
the stage works on. Images are numpy arrays [C, H, W]. A stage that cannot be applied to a sample raises
`PipelineError`, which the pipeline reports as the `SampleError` of that sample.
"""

from pipelines.stages._declared import binary, ragged, text
from pipelines.stages._decode import decode_image, decode_jpeg, shrink_jpeg
from pipelines.stages._fields import drop, rename, select
from pipelines.stages._geometry import center_crop, random_crop, random_flip, random_resized_crop, resize
from pipelines.stages._joint import tv_transform
from pipelines.stages._table import fit, mean_std
from pipelines.stages._text import build_vocabulary, tokenize
from pipelines.stages._values import cast, pad, scale

__all__ = [
    "binary",
    "build_vocabulary",
    "cast",
    "center_crop",
    "decode_image",
    "decode_jpeg",
    "drop",
    "fit",
    "mean_std",
    "pad",
    "ragged",
    "random_crop",
    "random_flip",
    "random_resized_crop",
    "rename",
    "resize",
    "scale",
    "select",
    "shrink_jpeg",
    "text",
    "tokenize",
    "tv_transform",
]
