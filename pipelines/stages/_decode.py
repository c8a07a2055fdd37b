"""Stages that decode image files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.checks import check_integer
from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.stages import _image_size
from pipelines.stages._image_size import MAX_PIXELS
from pipelines.stages._sample import (
    Array,
    Sample,
    Transform,
    check_size,
    get_value,
    load_jpeg_decoder,
    load_opencv,
    to_chw,
)

MODES = ("RGB", "BGR", "GRAY")
MASK = "MASK"
DTYPES = (None, "uint8", "uint16", "float32")


@known_as("pipelines.stages.decode_jpeg")
@dataclass(frozen=True)
class DecodeJpeg(Transform):
    """See `decode_jpeg`."""

    field: str
    mode: str
    min_size: tuple[int, int] | None
    max_pixels: int = MAX_PIXELS
    orient: bool | None = None

    def __call__(self, sample: Sample) -> Sample:
        data = get_image_bytes(sample, self.field)
        if not is_jpeg(data):
            raise PipelineError(_format_refusal(self.field, data, "decode_image reads other formats"))
        least, orientation = self.min_size, find_orientation(data, self.orient)
        least = least[::-1] if least and orientation > 4 else least
        image = _decode_jpeg(self.field, data, self.mode, least, self.max_pixels)
        return {**sample, self.field: _turn(image, orientation)}


@known_as("pipelines.stages.decode_image")
@dataclass(frozen=True)
class DecodeImage(Transform):
    """See `decode_image`."""

    field: str
    mode: str
    max_pixels: int = MAX_PIXELS
    orient: bool | None = None
    dtype: str | None = None

    def __call__(self, sample: Sample) -> Sample:
        data = get_image_bytes(sample, self.field)
        if self.mode == MASK:
            image = self._read_mask(data)
        elif is_jpeg(data):
            image = _decode_jpeg(self.field, data, self.mode, None, self.max_pixels)
            image = _turn(image, find_orientation(data, self.orient))
        else:
            image = self._decode_other(data)
        if image.dtype != (self.dtype or "uint8"):
            ways = [f'dtype="{image.dtype}") keeps that'] if image.dtype.name in DTYPES else []
            if image.dtype == np.uint16 and self.mode != MASK:
                ways += ['dtype="uint8" makes it 8 bits a value: the upper 8 of 16, 0 to 15 in 12-bit pictures']
            shown = ", and ".join(ways) or "...) reads uint8, uint16 and float32: convert the file"
            raise PipelineError(
                f"field {self.field!r}: the image holds {image.dtype}: decode_image({self.field!r}, {shown}"
            )
        return {**sample, self.field: image}

    def _decode_other(self, data: bytes) -> Array:
        cv2 = load_opencv()
        _image_size.check_pixels(self.field, *(_image_size.read_size(data) or (0, 0)), self.max_pixels)
        if _image_size.has_palette(data):
            what = "a picture has a palette: its pixels are indices, and their colours"
            if self.mode == "GRAY":
                raise PipelineError(
                    f"field {self.field!r}: {what} no greys: decode_image({self.field!r}, {MASK!r}) gives the "
                    'indices, as of a mask, "RGB" the colours'
                )
            warnings.warn(f'{what} are taken; if it is a mask, decode_image(FIELD, "{MASK}")', stacklevel=2)
        flags = cv2.IMREAD_GRAYSCALE if self.mode == "GRAY" else cv2.IMREAD_COLOR
        flags |= 0 if self.orient else cv2.IMREAD_IGNORE_ORIENTATION
        flags |= 0 if self.dtype == "uint8" else cv2.IMREAD_ANYDEPTH
        pixels = None
        if data:
            try:
                pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
            except cv2.error as error:
                raise PipelineError(f"field {self.field!r}: cannot decode image: {error.err}") from error
        if pixels is None:
            problem = f"unknown format or damaged ({data[:8].hex(' ')} ...)" if data else "there are no bytes"
            raise PipelineError(f"field {self.field!r}: cannot decode image: {problem}")
        return to_chw(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB) if self.mode == "RGB" else pixels)

    def _read_mask(self, data: bytes) -> Array:
        """The values of a picture of one band, as its file has them."""
        try:
            import PIL.Image
        except ImportError:
            raise PipelineError(f"decode_image: the mode {MASK!r} needs Pillow: pip install pillow") from None
        _image_size.check_pixels(self.field, *(_image_size.read_size(data) or (0, 0)), self.max_pixels)
        try:
            with PIL.Image.open(io.BytesIO(data)) as picture:
                bands, values = picture.getbands(), np.asarray(picture)
        except (OSError, ValueError, SyntaxError) as error:
            raise PipelineError(f"field {self.field!r}: cannot decode image: {error}") from error
        if len(bands) > 1 or is_jpeg(data):
            why = "JPEG, which changes values" if is_jpeg(data) else f"bands {', '.join(bands)}; a mask has one"
            raise PipelineError(
                f"field {self.field!r}: the mode {MASK!r} keeps values, and the picture is of {why}"
            )
        # Of grey PNG files of 2 and 4 bits Pillow makes 8.
        step = {b"\2\0": 85, b"\4\0": 17}.get(data[24:26] if data.startswith(b"\x89PNG") else b"", 1)
        return (values.astype(np.uint8) if values.dtype == bool else values // step)[None]


def decode_jpeg(
    field: str,
    mode: str = "RGB",
    min_size: int | tuple[int, int] | None = None,
    max_pixels: int = MAX_PIXELS,
    *,
    orient: bool | None = None,
) -> DecodeJpeg:
    """Decodes JPEG bytes to an image, uint8 [C, H, W].

    A sample fails if the bytes are not JPEG (`decode_image` reads more formats), damaged or truncated. If the next
    stage is a crop, only what it keeps is decoded, with the same bits, where libjpeg-turbo could be built in; not
    with `min_size`.

    Args:
        field: holds the bytes, then the image.
        mode: "RGB" or "BGR" (3 channels each, also from greyscale files) or "GRAY" (1 channel).
        min_size: (height, width) in pixels, or one number for both. An image of at least twice that size is
            decoded at the smallest of 4/8, 3/8, 2/8 or 1/8 of its size that is not below `min_size`, which is
            faster; follow with `resize`.
        max_pixels: largest height x width of an image, checked in its header before it is decoded.
        orient: whether pictures are turned as EXIF says (boxes and masks do not follow); None: they are not, and a
            warning says so at the first that would be.

    Raises:
        PipelineError: an argument is invalid.

    Examples:
        >>> pipe = pipe.map(decode_jpeg("image", min_size=224)).map(stages.resize("image", 224))
    """
    smallest = None if min_size is None else check_size("min_size", min_size)
    pixels = _check_max_pixels("decode_jpeg", max_pixels)
    return DecodeJpeg(field, _check_mode("decode_jpeg", mode), smallest, pixels, orient)


def decode_image(
    field: str,
    mode: str = "RGB",
    max_pixels: int = MAX_PIXELS,
    *,
    orient: bool | None = None,
    dtype: str | None = None,
) -> DecodeImage:
    """Decodes bytes of any format that OpenCV reads (PNG, WebP, TIFF, BMP ...) to an image, uint8 [C, H, W].

    JPEG is decoded as by `decode_jpeg`. Transparency is dropped. A palette becomes its colours, with a warning; it
    has no greys. A sample fails if the format is unknown, the bytes are damaged, or its values are of more than 8
    bits and no `dtype` says what becomes of them.

    Args:
        field: holds the bytes, then the image.
        mode: "RGB" or "BGR" (3 channels each), "GRAY" (1 channel), or "MASK" (1 channel): the values of one band
            as the file has them, such as the indices of a palette, or 0 and 1 of one bit. It needs Pillow.
        max_pixels: largest height x width of an image, checked in its header before it is decoded.
        orient: as of `decode_jpeg`; the warning is of JPEG only.
        dtype: "uint16" or "float32" of pictures that hold such values (a file with others fails); "uint8": 16 bits
            become their upper 8.

    Raises:
        PipelineError: an argument is invalid.
    """
    if dtype not in DTYPES:
        raise PipelineError(f"decode_image: dtype cannot be {dtype!r} (valid: uint8, uint16, float32)")
    pixels = _check_max_pixels("decode_image", max_pixels)
    return DecodeImage(field, _check_mode("decode_image", mode, (*MODES, MASK)), pixels, orient, dtype)


def _check_max_pixels(stage: str, max_pixels: int) -> int:
    return check_integer(f"{stage}: max_pixels", max_pixels, 1)


def _check_mode(stage: str, mode: str, valid: Sequence[str] = MODES) -> str:
    if mode not in valid:
        raise PipelineError(f"{stage}: mode cannot be {mode!r} (valid: {', '.join(valid)})")
    return mode


def get_image_bytes(sample: Sample, field: str) -> bytes:
    """A field's value, the bytes of an image file."""
    data = sample[field] if field in sample else get_value(sample, field)
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1:
        return data.tobytes()
    raise PipelineError(f"field {field!r} holds {type(data).__name__}, not the bytes of an image file")


def is_jpeg(data: bytes) -> bool:
    """Whether a file begins as JPEG."""
    return data.startswith(b"\xff\xd8\xff")


def _format_refusal(field: str, data: bytes, hint: str) -> str:
    if not data:
        return f"field {field!r}: cannot decode JPEG: there are no bytes"
    return (
        f"field {field!r}: cannot decode JPEG: the bytes are of another format ({data[:8].hex(' ')} ...); {hint}"
    )


def _decode_jpeg(field: str, data: bytes, mode: str, min_size: tuple[int, int] | None, max_pixels: int) -> Array:
    height, width = min_size or (0, 0)
    header, decode = load_jpeg_decoder()
    try:
        rows, columns = _image_size.read_jpeg_size(data) or header(data)[:2]
        _image_size.check_pixels(field, rows, columns, max_pixels)
        # Strict: what libjpeg could only guess, such as the lower part of a file that was cut off, is an error.
        # From 7/8 to 5/8 libjpeg-turbo has no vector code: they take longer than the whole image.
        factor = 1 if min_size is None else 2
        pixels: Any = decode(data, mode, min_height=height, min_width=width, min_factor=factor)
    except ValueError as error:
        raise PipelineError(f"field {field!r}: cannot decode JPEG: {error}") from error
    return to_chw(pixels)


def find_orientation(data: bytes, orient: bool | None) -> int:
    """How the picture of a JPEG file is to be turned, as EXIF numbers it (1: not at all)."""
    orientation = 1 if orient is False else _image_size.read_orientation(data)
    if orient is None and orientation != 1:
        warnings.warn(
            "a JPEG file has an EXIF orientation, by which its picture is not turned: declare orient=True for the "
            "decoding stage to turn such pictures, orient=False to leave them",
            stacklevel=2,
        )
        return 1
    return orientation


def _turn(image: Array, orientation: int) -> Array:
    if orientation == 1:
        return image
    image = image.transpose(0, 2, 1) if orientation > 4 else image
    image = image[:, ::-1] if orientation in (3, 4, 7, 8) else image
    return np.ascontiguousarray(image[:, :, ::-1] if orientation in (2, 3, 6, 7) else image)
