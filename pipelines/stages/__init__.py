"""What is done to each sample.

Every function here makes a stage: a callable `f(sample)`, or `f(sample, rng)` where it draws random numbers, that
takes a dict and returns one, and leaves the one it was given as it was. A stage names its field first. Images are
numpy arrays `[C, H, W]`.
"""

from pipelines.stages._decode import decode_image, decode_jpeg
from pipelines.stages._fields import drop, rename, select
from pipelines.stages._geometry import center_crop, random_crop, random_flip, random_resized_crop, resize
from pipelines.stages._text import build_vocabulary, tokenize
from pipelines.stages._values import cast, pad, scale

__all__ = [
    "build_vocabulary",
    "cast",
    "center_crop",
    "decode_image",
    "decode_jpeg",
    "drop",
    "pad",
    "random_crop",
    "random_flip",
    "random_resized_crop",
    "rename",
    "resize",
    "scale",
    "select",
    "tokenize",
]
