"""What an image file says of itself, its size above all: read from its header, before anything is decoded.

A file of a few hundred bytes may claim four billion pixels, and a decoder believes it. JPEG's claim is read by the
decoder itself (`simplejpeg`); here are the other usual formats. OpenCV itself refuses 2^30 pixels.
"""

from __future__ import annotations

import re
import struct

from pipelines.errors import PipelineError

# Where Pillow warns of a "decompression bomb" (`PIL.Image.MAX_IMAGE_PIXELS`): a quarter of a GiB in RGB.
MAX_PIXELS = 1024 * 1024 * 1024 // 4 // 3

_TEXT = 4096  # bytes in which a header of text lies
# JPEG (ITU-T T.81, B.2) up to a frame's size: SOI, APP0 of JFIF, tables DQT of one or two, SOF0 to SOF2 of 8 bits.
# All segments have the lengths that they claim here, so a decoder reads this frame header, too.
_JPEG = re.compile(
    rb"\xff\xd8(?:\xff\xe0\0\x10.{14})?(?:\xff\xdb(?:\0\x43.{65}|\0\x84.{130}))*\xff[\xc0-\xc2]\0.\x08(?=.{4})",
    re.DOTALL,
)
_JPEG_SIZE = struct.Struct(">HH")
_APPLICATION = {bytes([marker]) for marker in range(0xE0, 0xF0)}  # JPEG's segments APP0 to APP15
_WIDTH, _HEIGHT, _PHOTOMETRIC, _ORIENTATION = 256, 257, 262, 274  # tags of TIFF
_PALETTE = 3  # the photometric interpretation, and the type of colour of a PNG file
_INTEGERS = {3: "H", 4: "I", 16: "Q"}  # and their types


def check_pixels(field: str, height: int, width: int, max_pixels: int) -> None:
    """Raise a `PipelineError` where an image claims more pixels than there may be."""
    if height * width > max_pixels:
        raise PipelineError(
            f"field {field!r}: the image claims {height} x {width} pixels, more than max_pixels={max_pixels}: it "
            "was not decoded"
        )


def read_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) that a JPEG file claims; None where it does not begin as most encoders let it begin."""
    match = _JPEG.match(data)
    return None if match is None else _JPEG_SIZE.unpack_from(data, match.end())


def read_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) that an image file claims; None where that is not known: it is of no format named here."""
    try:
        return _parse_size(data)
    except struct.error:  # it ends within its header, which its decoder will say
        return None


def has_palette(data: bytes) -> bool:
    """Whether the pixels of a PNG, GIF, TIFF or BMP file are indices of a palette, other than of all greys."""
    try:
        if data.startswith((b"\x89PNG", b"GIF8")):
            return data.startswith(b"GIF8") or data[25:26] == bytes([_PALETTE])
        if data.startswith((b"II", b"MM")):
            return _read_tags(data).get(_PHOTOMETRIC) == _PALETTE
        if not data.startswith(b"BM"):
            return False
        begin, header, bits = (*struct.unpack_from("<II", data, 10), *struct.unpack_from("<H", data, 28))
    except struct.error:
        return False
    greys = bytes(255 * value // (2**bits - 1) for value in range(2**bits)) if bits <= 8 else b""
    return bits <= 8 and any(not greys.startswith(data[14 + header + band : begin : 4]) for band in range(3))


def _parse_size(data: bytes) -> tuple[int, int] | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _to_height_width(struct.unpack_from(">II", data, 16))
    if data.startswith(b"GIF8"):
        return _to_height_width(struct.unpack_from("<HH", data, 6))
    if data.startswith(b"BM"):
        (header,) = struct.unpack_from("<I", data, 14)
        return _to_height_width(struct.unpack_from("<HH" if header == 12 else "<ii", data, 18))
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return _tiff(data)
    if re.match(rb"P[1-6Ff]\s", data):  # PBM, PGM, PPM, PFM
        match = re.match(rb"..\s*(\d{1,10})\s+(\d{1,10})\s", re.sub(rb"#[^\n]*", b"", data[:_TEXT]))
        return None if match is None else (int(match[2]), int(match[1]))
    return None


def _to_height_width(sides: tuple[int, ...]) -> tuple[int, int]:
    """Most formats name the width first; BMP's height is negative where the first row is the top one."""
    width, height = sides
    return abs(height), abs(width)


def _webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return height & 0x3FFF, width & 0x3FFF
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if kind == b"VP8X":
        return int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1
    return None


def read_orientation(data: bytes) -> int:
    """The EXIF orientation of a JPEG file, 1 to 8; 1 where it names none."""
    at = 2
    while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] in _APPLICATION:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 4 : at + 10] == b"Exif\0\0":
            try:
                orientation = _read_tags(data[at + 10 : end]).get(_ORIENTATION, 1)
            except struct.error:
                return 1
            return orientation if 1 <= orientation <= 8 else 1
        at = end
    return 1


def _tiff(data: bytes) -> tuple[int, int] | None:
    tags = _read_tags(data)
    return (tags[_HEIGHT], tags[_WIDTH]) if _HEIGHT in tags and _WIDTH in tags else None


def _read_tags(data: bytes) -> dict[int, int]:
    """The size and the orientation that a TIFF file's first directory has."""
    order = "<" if data[:2] == b"II" else ">"
    big = b"+" in data[2:4]
    (directory,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, directory)
    first, entry = (directory + 8, 20) if big else (directory + 2, 12)
    tags = {}
    for at in range(first, min(first + entry * count, len(data)), entry):
        tag, kind = struct.unpack_from(order + "HH", data, at)
        if tag in (_WIDTH, _HEIGHT, _PHOTOMETRIC, _ORIENTATION) and kind in _INTEGERS:
            (tags[tag],) = struct.unpack_from(order + _INTEGERS[kind], data, at + (12 if big else 8))
    return tags
