"""Decodes of a JPEG file only the part that the crop after it keeps, where libjpeg-turbo could be built in.

A pipeline stays as it is written: `SampleMaker` asks here which two neighbours of its stages are done at once, and
does them one after the other where the answer for a sample is None. The bits are the same, by `jpeg_part.c`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.stage import Stage
from pipelines.stages import _image_size
from pipelines.stages._decode import MASK, DecodeImage, DecodeJpeg, find_orientation
from pipelines.stages._geometry import CenterCrop, Crop, RandomCrop, RandomResizedCrop
from pipelines.stages._sample import Sample, load_jpeg_decoder

#: Built with the package where a C compiler and libjpeg-turbo are (setup.py).
LIBRARY = Path(__file__).with_name("_jpeg_part.so")
_CROPS = (CenterCrop, RandomCrop, RandomResizedCrop)
_MORE_ROWS, _MORE_COLUMNS = 4, 35  # decoded with a part, at most: its edge, and the columns of its first block


@dataclass(frozen=True)
class DecodedPart:
    """A stage that decodes and the crop after it, as one function of a sample.

    Attributes:
        decode, crop: what the two stages call.
        library: `load_library`.
    """

    decode: DecodeJpeg | DecodeImage
    crop: Crop
    library: ctypes.CDLL

    def __call__(self, sample: Any, rng: np.random.Generator) -> Sample | None:
        """The sample after both stages; None: it has to go through them, which also says what is wrong with it.

        Args:
            rng: of this sample and the crop.
        """
        field = self.decode.field
        data = sample.get(field) if type(sample) is dict else None
        size = _read_size(data) if type(data) is bytes else None
        if type(data) is not bytes or size is None or size[0] * size[1] > self.decode.max_pixels:
            return None
        if find_orientation(data, self.decode.orient) != 1:
            return None
        part = self.crop.find_part(*size, rng)
        if part is None:
            return None
        pixels = decode_part(self.library, data, size, part, self.decode.mode)
        return None if pixels is None else {**sample, field: self.crop.finish(pixels.transpose(2, 0, 1))}


def find_decoded_parts(stages: Iterable[Stage]) -> dict[int, DecodedPart]:
    """Position of a stage that decodes -> it and the crop right after it; none without the library."""
    parts: dict[int, DecodedPart] = {}
    for position, (first, second) in enumerate(itertools.pairwise(stages)):
        decode: Any = first.call
        crop: Any = second.call
        # A class derived from one of ours may do something else.
        if type(decode) not in (DecodeJpeg, DecodeImage) or type(crop) not in _CROPS:
            continue
        if (
            crop.field != decode.field
            or getattr(decode, "min_size", None)
            or getattr(decode, "dtype", None) not in (None, "uint8")
            or decode.mode == MASK
        ):
            continue
        declared = (first.field, first.random, second.field, second.random)
        if declared == (None, None, None, crop.draws) and (library := load_library()) is not None:
            parts[position] = DecodedPart(decode, crop, library)
    return parts


def _read_size(data: bytes) -> tuple[int, int] | None:
    if size := _image_size.read_jpeg_size(data):
        return size
    try:
        height, width = load_jpeg_decoder()[0](data)[:2]
    except ValueError:
        return None
    return height, width


def decode_part(
    library: ctypes.CDLL, data: Any, size: tuple[int, int], part: tuple[int, int, int, int], mode: str
) -> Any:
    """Rows and columns of the image that a decoder makes of JPEG bytes, uint8 [H, W, C]; None: ask a decoder.

    Args:
        size: height and width of the image.
        part: top, left, height and width.
        mode: as of `decode_jpeg`.
    """
    top, left, height, width = part
    channels = 1 if mode == "GRAY" else 3
    memory = np.empty((height + _MORE_ROWS) * (width + _MORE_COLUMNS) * channels, np.uint8)
    place = (ctypes.c_uint * 3)()
    if not library.decode_jpeg_part(
        data, len(data), *size, *part, channels, mode == "BGR", memory.ctypes.data, memory.size, place
    ):
        return None
    rows = memory[: len(memory) // (place[2] * channels) * place[2] * channels].reshape(-1, place[2], channels)
    row, column = top - place[0], left - place[1]
    return rows[row : row + height, column : column + width]


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The library; None where it was not built, cannot be loaded, or decodes to other bits than simplejpeg."""
    return open_library(LIBRARY)


def open_library(path: Path) -> ctypes.CDLL | None:
    """As `load_library`, of a file."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    numbers: list[Any] = [ctypes.c_size_t, *[ctypes.c_uint] * 6, *[ctypes.c_int] * 2]
    written: list[Any] = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint)]
    library.decode_jpeg_part.argtypes = [ctypes.c_char_p, *numbers, *written]
    library.decode_jpeg_part.restype = ctypes.c_int
    return library if _is_equal_to_decoder(library) else None


def _is_equal_to_decoder(library: ctypes.CDLL) -> bool:
    """Whether parts of an image are those of the decoder of `decode_jpeg`, whose libjpeg-turbo is another one."""
    import simplejpeg

    _, decode = load_jpeg_decoder()
    rows, columns, part = 75, 91, (32, 32, 22, 32)  # its edges need their neighbours
    y, x, c = np.meshgrid(np.arange(rows), np.arange(columns), np.arange(3), indexing="ij")
    image = (x * x * (c + 1) + y * y * 3 + x * y * c).astype(np.uint8)
    for subsampling in ("444", "422", "420", "440", "411"):
        data = bytes(simplejpeg.encode_jpeg(image, 80, "RGB", subsampling))
        for mode in ("RGB", "BGR", "GRAY"):
            pixels = decode_part(library, data, (rows, columns), part, mode)
            expected = decode(data, mode)[part[0] : part[0] + part[2], part[1] : part[1] + part[3]]
            if pixels is None or not np.array_equal(pixels, expected):
                return False
    return True
