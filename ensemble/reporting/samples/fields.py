"""Describes a record for the page: its images made small, its series as lines, its texts and numbers in words.

Runs only in the process of limited memory that reads records (`reader_main`): what is decoded here is anybody's.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.reporting import text
from pipelines import stages
from pipelines.errors import PipelineError
from pipelines.samples.nested import iterate_leaves
from pipelines.stages._decode import is_jpeg
from pipelines.stages._image_size import read_size
from pipelines.stages._pictures import image_to_array, is_pil_image
from pipelines.stages._sample import load_jpeg_decoder, load_jpeg_encoder, load_opencv

Array = npt.NDArray[Any]
#: What the page gets of a field: `name`, `text`, and where it has some, a `picture` (a data URI) or `lines`.
Field = dict[str, Any]

MOST_FIELDS, MOST_TEXT, MOST_NUMBERS = 40, 800, 12
#: Pixels of the longer side of a picture; an array of more elements is thinned before anything is made of it.
PIXELS, MOST_ELEMENTS = 256, 2**22
QUALITY = 85
#: Of the drawing of a series: its size, how many points a line has, how many lines there are.
WIDTH, HEIGHT, POINTS, MOST_LINES = 240.0, 64.0, 240, 4
_CHANNELS = (1, 3, 4)
_LEAST_SIDE, _MOST_RATIO = 6, 8  # of a matrix that is taken for an image


def describe_record(record: Any) -> list[Field]:
    """The fields of a record, the first `MOST_FIELDS` of them; those in dicts and tuples by their paths."""
    if not isinstance(record, Mapping):
        return [_describe("", record)]
    leaves = [(".".join(map(str, path)), value) for path, value in iterate_leaves(dict(record))]
    fields = [_describe(name, value) for name, value in leaves[:MOST_FIELDS]]
    if len(leaves) > MOST_FIELDS:
        fields.append({"name": "", "text": f"{len(leaves) - MOST_FIELDS} more fields"})
    return fields


def _describe(name: str, value: Any) -> Field:
    try:
        return {"name": name[:MOST_TEXT], **_describe_value(value)}
    except (PipelineError, ValueError) as error:  # such as of a damaged image
        return {"name": name[:MOST_TEXT], "text": _cut(str(error))}


def _describe_value(value: Any) -> Field:
    if isinstance(value, str):
        return {"text": _cut(value)}
    if isinstance(value, bytes | bytearray | memoryview):
        return _describe_bytes(bytes(value))
    if is_pil_image(value):
        return _draw(image_to_array(value), as_jpeg=False)
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "biuf":
        return _describe_array(value)
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if value is None or isinstance(value, bool):
        return {"text": str(value)}
    if isinstance(value, int | float):
        is_short = isinstance(value, float) or abs(value) < 10**18
        return {"text": (f"{value:.6g}" if isinstance(value, float) else str(value)) if is_short else "an integer"}
    if (
        isinstance(value, list)
        and value
        and all(isinstance(each, str | int | float) for each in value[:MOST_TEXT])
    ):
        shown = ", ".join(str(each)[:MOST_TEXT] for each in value[:MOST_NUMBERS])
        return {"text": _cut(shown + (f" and {len(value) - MOST_NUMBERS} more" if value[MOST_NUMBERS:] else ""))}
    shape = getattr(value, "shape", None)
    return {"text": type(value).__name__ + (f" {list(shape)}" if isinstance(shape, tuple) else "")}


def _cut(given: str) -> str:
    more = len(given) - MOST_TEXT
    return text.visible(given[:MOST_TEXT]) + (f" … {more:,} more characters" if more > 0 else "")


def _describe_bytes(data: bytes) -> Field:
    if not is_jpeg(data) and read_size(data) is None:
        return {"text": f"{len(data):,} bytes"}
    if is_jpeg(data):
        height, width = load_jpeg_decoder()[0](data)[:2]
        data = stages.shrink_jpeg("image", PIXELS)({"image": data})["image"]
        drawn = _draw(stages.decode_jpeg("image", orient=True)({"image": data})["image"], as_jpeg=True)
        return drawn | {"text": _describe_size(height, width)}
    return _draw(stages.decode_image("image", orient=True, dtype="uint8")({"image": data})["image"], as_jpeg=False)


def _describe_array(value: Array) -> Field:
    summary = f"{value.dtype} {list(value.shape)}"
    if value.size <= MOST_NUMBERS and value.ndim == 1:
        return {"text": ", ".join(f"{each:.4g}" for each in value.tolist())}
    if not value.size:
        return {"text": summary}
    picture = _find_picture(value)
    if picture is not None:
        return {**_draw(picture, as_jpeg=False), "text": summary + _describe_range(value)}
    if value.ndim <= 2:
        columns = value[:, None] if value.ndim == 1 else value if len(value) >= value.shape[1] else value.T
        summary += f", the first {MOST_LINES}" if columns.shape[1] > MOST_LINES else ""
        return {"text": summary + _describe_range(value), "lines": list(_draw_lines(columns[:, :MOST_LINES]))}
    return {"text": summary + _describe_range(value)}


def _describe_range(value: Array) -> str:
    thin = value.ravel()[:: max(1, value.size // MOST_ELEMENTS)].astype(np.float64)
    finite = thin[np.isfinite(thin)]
    return f", {finite.min():.4g} … {finite.max():.4g}" if finite.size else ", nothing finite"


def _find_picture(value: Array) -> Array | None:
    """What looks like an image as `[C, H, W]`, uint8; None for anything else."""
    if value.ndim == 2:
        short, long = sorted(value.shape)
        channels = value[None] if short >= _LEAST_SIDE and long <= _MOST_RATIO * short else None
    elif value.ndim == 3 and value.shape[0] in _CHANNELS and min(value.shape[1:]) > 1:
        channels = value
    elif value.ndim == 3 and value.shape[2] in _CHANNELS and min(value.shape[:2]) > 1:
        channels = value.transpose(2, 0, 1)
    else:
        return None
    if channels is None or channels.dtype == np.uint8:
        return channels
    step = max(1, int((channels.size / MOST_ELEMENTS) ** 0.5))
    thin = channels[:, ::step, ::step].astype(np.float64)
    finite = np.isfinite(thin)
    low, high = (float(thin[finite].min()), float(thin[finite].max())) if finite.any() else (0.0, 1.0)
    scaled = np.where(finite, (thin - low) / ((high - low) or 1.0), 0.0)
    return np.round(255 * scaled).astype(np.uint8)


def _draw(image: Array, *, as_jpeg: bool) -> Field:
    """An image `[C, H, W]` as a picture of at most `PIXELS` pixels a side."""
    cv2 = load_opencv()
    _, height, width = image.shape
    pixels = np.ascontiguousarray(image[:4].transpose(1, 2, 0) if image.shape[0] != 2 else image[0][:, :, None])
    if max(height, width) > PIXELS:
        factor = PIXELS / max(height, width)
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
        pixels = pixels.reshape(*pixels.shape[:2], -1)
    if as_jpeg:
        kind, data = "jpeg", bytes(load_jpeg_encoder()(np.ascontiguousarray(pixels), QUALITY, "RGB", "420"))
    else:
        order = {3: cv2.COLOR_RGB2BGR, 4: cv2.COLOR_RGBA2BGRA}.get(pixels.shape[2])
        done, coded = cv2.imencode(".png", pixels if order is None else cv2.cvtColor(pixels, order))
        if not done:
            raise PipelineError("the image cannot be made small")
        kind, data = "png", coded.tobytes()
    return {
        "text": _describe_size(height, width),
        "picture": f"data:image/{kind};base64,{base64.b64encode(data).decode()}",
    }


def _describe_size(height: int, width: int) -> str:
    return f"{width:,} × {height:,} pixels"


def _draw_lines(columns: Array) -> Iterator[str]:
    """The points of a line for each column `[n, k]`, all on one scale, as SVG has them."""
    edges = np.linspace(0, len(columns), min(len(columns), POINTS) + 1).astype(int)[:-1]
    thin = columns[edges].astype(np.float64)
    if len(columns) > POINTS:  # peaks are kept: the lowest and the highest value of parts, in turn
        low, high = (f.reduceat(columns.astype(np.float64), edges, axis=0) for f in (np.fmin, np.fmax))
        thin = np.where(np.arange(len(edges))[:, None] % 2 == 0, low, high)
    finite = thin[np.isfinite(thin)]
    bottom, top = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    x = np.linspace(0, WIDTH, len(thin))
    for column in thin.T:
        y = HEIGHT - 2 - (HEIGHT - 4) * (column - bottom) / ((top - bottom) or 1.0)
        yield " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True) if np.isfinite(b))
