"""Stages on images, each against a plain formula written here."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Pipeline, sources, stages
from pipelines.errors import PipelineError
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.stages import _image_size

Image = np.ndarray[Any, Any]


def smooth(height: int, width: int, channels: int = 3) -> Image:
    """A uint8 image [H, W, C] that JPEG keeps well."""
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(channels), indexing="ij")
    return (127 + 60 * np.sin(x / 9 + c) + 60 * np.cos(y / 7 - c)).astype(np.uint8)


def noise(
    channels: int, height: int, width: int, dtype: str = "uint8", *, last: bool = False, seed: int = 0
) -> Image:
    """Noise [C, H, W]; `last`: as a view of [H, W, C] memory, as a decoder leaves it."""
    image = np.random.default_rng(seed).integers(0, 256, (channels, height, width)).astype(dtype)
    return np.ascontiguousarray(image.transpose(1, 2, 0)).transpose(2, 0, 1) if last else image


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def run(stage: Any, image: Any, generator: np.random.Generator | None = None) -> Image:
    """Apply a stage; the sample and its arrays must come out of it as they were."""
    sample = {"image": image, "label": 3}
    before = image.copy() if isinstance(image, np.ndarray) else image
    after = stage(sample) if generator is None else stage(sample, generator)
    assert list(sample) == ["image", "label"] and sample["image"] is image
    np.testing.assert_array_equal(image, before)
    assert after["label"] == 3
    result: Image = after["image"]
    return result


# Decoding


def test_jpeg_is_decoded_to_channels_rows_columns() -> None:
    pixels = smooth(40, 56)
    data = simplejpeg.encode_jpeg(pixels, quality=95, colorsubsampling="444")
    image = run(stages.decode_jpeg("image"), data)
    assert (image.shape, image.dtype) == ((3, 40, 56), np.uint8)
    error = np.abs(image.astype(int) - pixels.transpose(2, 0, 1))
    assert error.mean() < 3 and error.max() < 20
    np.testing.assert_array_equal(run(stages.decode_jpeg("image", mode="BGR"), data), image[::-1])
    assert run(stages.decode_jpeg("image", mode="GRAY"), data).shape == (1, 40, 56)


def test_greyscale_jpeg_has_three_equal_channels_in_rgb() -> None:
    data = simplejpeg.encode_jpeg(smooth(16, 24, 1), colorspace="GRAY")
    image = run(stages.decode_jpeg("image"), data)
    assert image.shape == (3, 16, 24)
    assert (image == image[0]).all()


def test_bytes_may_come_as_an_array() -> None:
    data = simplejpeg.encode_jpeg(smooth(16, 16))
    for given_as in (np.frombuffer(data, np.uint8), bytearray(data), memoryview(data)):
        sample = {"image": given_as}
        np.testing.assert_array_equal(
            stages.decode_jpeg("image")(sample)["image"], run(stages.decode_jpeg("image"), data)
        )


@pytest.mark.parametrize(
    ("asked", "shape"), [(99, (100, 150)), ((100, 20), (100, 150)), (101, (200, 300)), (25, (25, 38))]
)
def test_min_size_decodes_no_larger_than_needed_and_never_below(asked: Any, shape: tuple[int, int]) -> None:
    data = simplejpeg.encode_jpeg(smooth(200, 300))
    assert run(stages.decode_jpeg("image", min_size=asked), data).shape[1:] == shape


@pytest.mark.parametrize("stage", [stages.decode_jpeg("image"), stages.decode_image("image")])
def test_damaged_jpeg_names_the_field(stage: Callable[..., Any]) -> None:
    data = simplejpeg.encode_jpeg(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for broken in (data[: len(data) // 2], data[:-2], data[:5], data[:20]):
        with pytest.raises(PipelineError, match="field 'image': cannot decode JPEG: ") as caught:
            stage({"image": broken})
        assert "\n" not in str(caught.value)


def test_other_formats_are_for_decode_image() -> None:
    import cv2

    pixels = noise(3, 20, 30).transpose(1, 2, 0)
    png = cv2.imencode(".png", np.ascontiguousarray(pixels[:, :, ::-1]))[1].tobytes()
    np.testing.assert_array_equal(run(stages.decode_image("image"), png), pixels.transpose(2, 0, 1))
    np.testing.assert_array_equal(
        run(stages.decode_image("image", mode="BGR"), png), pixels.transpose(2, 0, 1)[::-1]
    )
    assert run(stages.decode_image("image", mode="GRAY"), png).shape == (1, 20, 30)
    with pytest.raises(PipelineError, match=r"of another format .* decode_image"):
        stages.decode_jpeg("image")({"image": png})
    for broken in (b"", b"hello", png[: len(png) // 2]):
        with pytest.raises(PipelineError, match="field 'image': cannot decode image"):
            stages.decode_image("image")({"image": broken})


def test_decode_image_decodes_jpeg_as_decode_jpeg_does() -> None:
    data = simplejpeg.encode_jpeg(smooth(33, 47))
    np.testing.assert_array_equal(
        run(stages.decode_image("image"), data), run(stages.decode_jpeg("image"), data), strict=True
    )


def bomb(height: int, width: int) -> bytes:
    """A JPEG of a few hundred bytes that claims so many pixels: its frame header (SOF0) is told to."""
    data = bytearray(simplejpeg.encode_jpeg(smooth(8, 8)))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize(
    "stage",
    [stages.decode_jpeg("image"), stages.decode_jpeg("image", min_size=32), stages.decode_image("image")],
    ids=["decode_jpeg", "min_size", "decode_image"],
)
def test_a_jpeg_that_claims_to_be_huge_is_refused_from_its_header(stage: Callable[..., Any]) -> None:
    with pytest.raises(PipelineError, match="field 'image': the image claims 12000 x 15000 pixels, more than max"):
        stage({"image": bomb(12000, 15000)})


def test_an_archive_of_images_that_claim_to_be_huge_takes_no_memory() -> None:
    # In a process with a gigabyte of addresses: an image of this size has twelve.
    code = f"""
import resource
from pipelines import Pipeline, sources, stages

pipe = Pipeline(sources.arrays(image=[{bomb(65500, 65500)!r}]))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    pipe.map(stages.decode_jpeg("image")).fields
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("SampleError sample 0"), done.stdout
    assert "claims 65500 x 65500 pixels" in done.stdout


@pytest.mark.parametrize("space", ["RGB", "GRAY"])
@pytest.mark.parametrize("subsampling", ["444", "420"])
def test_the_size_in_a_jpeg_is_found_as_its_decoder_finds_it(space: str, subsampling: str) -> None:
    image = smooth(30, 40) if space == "RGB" else smooth(30, 40)[:, :, :1].copy()
    data = bytes(simplejpeg.encode_jpeg(image, 90, space, subsampling))
    assert _image_size.read_jpeg_size(data) == simplejpeg.decode_jpeg_header(data)[:2] == (30, 40)
    comment = b"\xff\xfe\x00\x0b\xff\xc0\x00\x11\x08\xff\xff\xff\xff"  # which looks like a frame header
    for other in (data[:2] + comment + data[2:], data[:40], data[1:], b""):
        assert _image_size.read_jpeg_size(other) is None  # the decoder is asked
    with pytest.raises(PipelineError, match="30 x 40 pixels, more than max_pixels=1199"):
        stages.decode_jpeg("image", max_pixels=1199)({"image": data[:2] + comment + data[2:]})


FORMATS = "png bmp webp lossless.webp tiff gif ppm pgm pbm pfm ras jp2 hdr avif"  # all that OpenCV writes


@pytest.mark.parametrize("extension", FORMATS.split())
def test_any_other_format_is_refused_from_its_header_too(extension: str) -> None:
    import cv2

    pixels = noise(3, 42, 68).transpose(1, 2, 0)
    if extension in ("pgm", "pbm"):
        pixels = pixels[:, :, 0]
    if extension in ("pfm", "hdr"):
        pixels = pixels.astype("float32")
    options = [cv2.IMWRITE_WEBP_QUALITY, 101] if extension == "lossless.webp" else []
    data = cv2.imencode(f".{extension}", np.ascontiguousarray(pixels), options)[1].tobytes()
    dtype = pixels.dtype.name
    assert run(stages.decode_image("image", max_pixels=2856, dtype=dtype), data).shape == (3, 42, 68)
    with pytest.raises(PipelineError, match="the image claims 42 x 68 pixels, more than max_pixels=2855"):
        stages.decode_image("image", max_pixels=2855)({"image": data})
    for cut in range(min(len(data), 600)):
        assert _image_size.read_size(data[:cut]) in (None, (42, 68))  # and no other error


def with_orientation(data: bytes, orientation: int) -> bytes:
    tag = struct.pack("<HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)
    return data[:2] + b"\xff\xe1\0\x22Exif\0\0II*\0\x08\0\0\0" + tag + data[2:]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_exif_says_where_that_is_declared(orientation: int) -> None:
    plain = simplejpeg.encode_jpeg(smooth(64, 96), colorsubsampling="444")
    data = with_orientation(plain, orientation)
    upright = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1].transpose(2, 0, 1)
    lying = run(stages.decode_jpeg("image"), plain)
    for decode in (stages.decode_jpeg, stages.decode_image):
        turned = run(decode("image", orient=True), data)
        assert turned.shape == upright.shape
        assert np.abs(turned.astype(int) - upright).max() <= 4  # another libjpeg
        np.testing.assert_array_equal(run(decode("image", orient=False), data), lying)
        with contextlib.nullcontext() if orientation == 1 else pytest.warns(UserWarning, match="orient=True"):
            np.testing.assert_array_equal(run(decode("image"), data), lying)
        crop = Pipeline(sources.arrays(image=[data]), seed=1).map(decode("image", orient=True))
        crop = crop.map(stages.random_crop("image", 32))
        part = SampleMaker(crop).make(0, 0)["image"]
        windows = np.lib.stride_tricks.sliding_window_view(turned, (3, 32, 32))
        assert part.shape == (3, 32, 32) and (windows == part).all(axis=(-1, -2, -3)).any()
    order = -1 if orientation > 4 else 1
    small = run(stages.shrink_jpeg("image", 16), data)
    assert run(stages.decode_jpeg("image", orient=True), small).shape[1:] == (16, 24)[::order]
    least = run(stages.decode_jpeg("image", min_size=(8, 12)[::order], orient=True), data)
    assert least.shape[1:] == (8, 12)[::order]


def test_values_of_more_than_8_bits_are_kept_or_refused() -> None:
    pixels = np.arange(4096, dtype=np.uint16).reshape(64, 64)  # 12 bits
    for extension, kept in (("png", pixels), ("tiff", pixels), ("tiff", pixels.astype("float32"))):
        data, dtype = cv2.imencode(f".{extension}", kept)[1].tobytes(), str(kept.dtype)
        with pytest.raises(PipelineError, match=f'holds {dtype}: .*dtype="{dtype}"'):
            stages.decode_image("image", "GRAY")({"image": data})
        made = run(stages.decode_image("image", "GRAY", dtype=dtype), data)
        assert made.dtype == dtype
        np.testing.assert_array_equal(made[0], kept)
    data = cv2.imencode(".png", pixels)[1].tobytes()
    np.testing.assert_array_equal(run(stages.decode_image("image", dtype="uint8"), data)[1], pixels >> 8)
    with pytest.raises(PipelineError, match="holds uint8"):
        stages.decode_image("image", dtype="uint16")({"image": simplejpeg.encode_jpeg(smooth(16, 16))})
    data = cv2.imencode(".tiff", pixels.astype("float64"))[1].tobytes()
    with pytest.raises(
        PipelineError, match=r'holds float64: decode_image\(.image., dtype="uint8"\) makes it 8 bits'
    ):
        stages.decode_image("image", "GRAY")({"image": data})
    with pytest.raises(PipelineError, match="dtype cannot be 'int8'"):
        stages.decode_image("image", dtype="int8")


# Resize


def test_an_image_of_one_row_is_not_made_as_long_as_it_would_be() -> None:
    with pytest.raises(PipelineError, match="1 x 60000 pixels would be made 256 x 15360000 by shorter=256"):
        run(stages.resize("image", shorter=256), np.zeros((3, 1, 60000), np.uint8))


def bilinear(image: Image, height: int, width: int) -> Image:
    """Linear interpolation in float64 between pixel centres, edges repeated."""

    def taps(size: int, wanted: int) -> tuple[Image, Image, Image]:
        at = (np.arange(wanted) + 0.5) * size / wanted - 0.5
        low = np.floor(at).astype(int)
        return np.clip(low, 0, size - 1), np.clip(low + 1, 0, size - 1), at - low

    low, high, part = taps(image.shape[1], height)
    rows = image[:, low] * (1 - part)[:, None] + image[:, high] * part[:, None]
    low, high, part = taps(image.shape[2], width)
    blended: Image = rows[:, :, low] * (1 - part) + rows[:, :, high] * part
    return blended


@pytest.mark.parametrize(
    ("channels", "last", "dtype", "size"),
    [
        (1, False, "uint8", (11, 23)),
        (1, True, "float32", (20, 7)),
        (2, False, "uint8", (20, 7)),
        (2, True, "float32", (64, 50)),
        (3, False, "float32", (11, 23)),
        (3, True, "uint8", (64, 50)),
        (4, False, "float32", (64, 50)),
        (4, True, "uint8", (20, 7)),
        (7, False, "float32", (64, 50)),
        (7, True, "uint8", (11, 23)),
    ],
)
def test_resize_interpolates_linearly(channels: int, last: bool, dtype: str, size: tuple[int, int]) -> None:
    image = noise(channels, 20, 30, dtype, last=last)
    result = run(stages.resize("image", size=size), image)
    assert (result.shape, result.dtype) == ((channels, *size), image.dtype)
    assert np.abs(result.astype(float) - bilinear(image, *size)).max() <= (1.0 if dtype == "uint8" else 0.01)


def test_resize_does_not_depend_on_the_memory_layout() -> None:
    for method in ("linear", "area", "cubic", "nearest"):
        stage = stages.resize("image", (9, 31), interpolation=method)
        first, last = run(stage, noise(3, 20, 30)), run(stage, noise(3, 20, 30, last=True))
        np.testing.assert_array_equal(first, last)


def test_area_takes_the_mean_of_what_a_pixel_covers() -> None:
    image = noise(3, 24, 36, "float32")
    expected = image.reshape(3, 12, 2, 12, 3).mean(axis=(2, 4))
    result = run(stages.resize("image", (12, 12), interpolation="area"), image)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_a_number_makes_a_square_and_shorter_keeps_the_ratio() -> None:
    assert run(stages.resize("image", 16), noise(3, 20, 30)).shape == (3, 16, 16)
    assert run(stages.resize("image", shorter=10), noise(3, 20, 30)).shape == (3, 10, 15)
    assert run(stages.resize("image", shorter=10), noise(3, 30, 20)).shape == (3, 15, 10)
    assert run(stages.resize("image", (20, 30)), noise(3, 20, 30)).shape == (3, 20, 30)


def test_resize_names_a_dtype_that_it_cannot_resize() -> None:
    with pytest.raises(PipelineError, match=r"field 'image' is of int64, which cannot be resized.*uint8"):
        stages.resize("image", 4)({"image": noise(3, 8, 8, "int64")})


# Crops and flip


@pytest.mark.parametrize(("channels", "last"), [(1, False), (3, True), (6, False), (6, True)])
def test_center_crop_cuts_the_middle(channels: int, last: bool) -> None:
    image = noise(channels, 21, 30, last=last)
    np.testing.assert_array_equal(run(stages.center_crop("image", (10, 20)), image), image[:, 5:15, 5:25])


@given(
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    crop=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    padding=st.integers(0, 6),
    last=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_random_crop_is_a_window_of_the_padded_image(
    height: int, width: int, crop: tuple[int, int], padding: int, last: bool, seed: int
) -> None:
    image = noise(2, height, width, last=last)
    stage = stages.random_crop("image", crop, padding=padding)
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    if crop[0] > padded.shape[1] or crop[1] > padded.shape[2]:
        with pytest.raises(PipelineError, match=r"field 'image' has shape .* too small to cut out"):
            stage({"image": image}, rng())
        return
    result = run(stage, image, rng(seed))
    draws = rng(seed)
    top = int(draws.random() * (padded.shape[1] - crop[0] + 1))
    left = int(draws.random() * (padded.shape[2] - crop[1] + 1))
    np.testing.assert_array_equal(result, padded[:, top : top + crop[0], left : left + crop[1]])


def test_random_crop_reaches_every_place_alike() -> None:
    image = np.arange(25, dtype=np.uint8).reshape(1, 5, 5)
    generator, stage = rng(1), stages.random_crop("image", 3)
    corners = [int(stage({"image": image}, generator)["image"][0, 0, 0]) for _ in range(9000)]
    values, counts = np.unique(corners, return_counts=True)
    assert values.tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 12]
    assert counts.min() > 850 and counts.max() < 1150


@pytest.mark.parametrize(
    ("channels", "last", "dtype"),
    [(1, False, "uint8"), (3, True, "uint8"), (6, True, "float32"), (3, False, "int64"), (6, False, "bool")],
)
def test_flip_mirrors_left_and_right_with_its_probability(channels: int, last: bool, dtype: str) -> None:
    image = noise(channels, 6, 9, dtype, last=last)
    np.testing.assert_array_equal(run(stages.random_flip("image", p=1), image, rng()), image[:, :, ::-1])
    np.testing.assert_array_equal(run(stages.random_flip("image", p=0), image, rng()), image)
    generator, stage = rng(2), stages.random_flip("image", p=0.3)
    flipped = sum(not np.array_equal(run(stage, image, generator), image) for _ in range(600))
    assert 130 < flipped < 230


def test_stages_hand_on_memory_that_torch_accepts() -> None:
    torch = pytest.importorskip("torch")
    for last in (False, True):
        image = noise(3, 12, 12, last=last)
        for stage in (
            stages.random_flip("image", p=1),
            stages.random_crop("image", 8),
            stages.random_resized_crop("image", 8),
        ):
            result = run(stage, image, rng())
            np.testing.assert_array_equal(torch.from_numpy(result).numpy(), result)


def test_random_resized_crop_takes_parts_within_its_bounds() -> None:
    # Each pixel holds its own place, so that the part can be read off the nearest-neighbour result.
    rows, columns = np.meshgrid(np.arange(60), np.arange(80), indexing="ij")
    image = np.stack([rows, columns]).astype(np.float32)
    generator = rng(3)
    stage = stages.random_resized_crop(
        "image", (200, 200), scale=(0.2, 0.5), ratio=(0.5, 2.0), interpolation="nearest"
    )
    areas, ratios = [], []
    for _ in range(300):
        part = run(stage, image, generator)
        height, width = (np.ptp(part[axis]) + 1 for axis in (0, 1))
        areas.append(height * width / 4800)
        ratios.append(width / height)
    assert 0.18 < min(areas) < 0.22 and 0.47 < max(areas) < 0.53
    assert 0.45 < min(ratios) < 0.6 and 1.7 < max(ratios) < 2.2
    assert abs(np.mean(areas) - 0.35) < 0.03
    assert abs(np.mean(np.log(ratios))) < 0.1


def test_random_resized_crop_falls_back_to_the_middle() -> None:
    image = noise(3, 4, 400)
    stage = stages.random_resized_crop("image", (4, 5), scale=(1, 1), ratio=(0.75, 4 / 3), interpolation="nearest")
    np.testing.assert_array_equal(run(stage, image, rng()), image[:, :, 197:202])


def test_random_resized_crop_of_the_whole_is_resize() -> None:
    image = noise(3, 30, 30, last=True)
    whole = stages.random_resized_crop("image", (12, 17), scale=(1, 1), ratio=(1, 1))
    np.testing.assert_array_equal(run(whole, image, rng()), run(stages.resize("image", (12, 17)), image))


@pytest.mark.parametrize(
    "stage",
    [
        stages.random_crop("image", 8, padding=2),
        stages.random_flip("image"),
        stages.random_resized_crop("image", (8, 9)),
    ],
)
def test_one_state_of_the_generator_gives_one_result(stage: Any) -> None:
    image = noise(3, 20, 20, last=True)
    results = [run(stage, image, rng(seed)).tobytes() for seed in (5, 5, 6, 7, 8, 9, 10, 11)]
    assert results[0] == results[1]
    assert len(set(results)) > 1


# Scale


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("shape", [(3, 7, 5), (3, 150, 160)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("flip", "dtype"), [(False, "uint8"), (True, "uint8"), (False, "float32"), (True, "int32")]
)
def test_scale_is_this_float32_arithmetic_to_the_last_bit(
    shape: tuple[int, int, int], last: bool, flip: bool, dtype: str
) -> None:
    image = noise(*shape, dtype, last=last)
    image = image[:, :, ::-1] if flip else image
    result = run(stages.scale("image", mean=MEAN, std=STD), image)
    expected = np.empty(shape, np.float32)
    for c in range(3):
        part = np.ascontiguousarray(image[c]).astype(np.float32) / np.float32(255)
        expected[c] = (part - np.float32(MEAN[c])) / np.float32(STD[c])
    np.testing.assert_array_equal(result, expected, strict=True)
    assert result.flags.c_contiguous


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_scale_converts_after_the_float32_arithmetic(dtype: str) -> None:
    image = noise(1, 5, 6)
    expected = run(stages.scale("image", 0.5, 0.25), image).astype(dtype)
    np.testing.assert_array_equal(run(stages.scale("image", 0.5, 0.25, dtype), image), expected, strict=True)


def test_scale_takes_a_number_or_one_for_each_channel() -> None:
    image = noise(5, 4, 4)
    same = run(stages.scale("image", mean=[0.5] * 5, std=np.full(5, 0.25)), image)
    np.testing.assert_array_equal(run(stages.scale("image", 0.5, 0.25), image), same)
    with pytest.raises(PipelineError, match=r"field 'image' has shape \[5, 4, 4\], but mean has 3 channels"):
        stages.scale("image", mean=MEAN, std=STD)({"image": image})


# What all have in common


WITH_IMAGE: list[Any] = [
    stages.resize("image", 8),
    stages.center_crop("image", 8),
    stages.random_crop("image", 8),
    stages.random_resized_crop("image", 8),
    stages.random_flip("image"),
    stages.scale("image"),
]


@pytest.mark.parametrize("stage", WITH_IMAGE, ids=lambda stage: type(stage).__name__)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros((8, 8), np.uint8), r"field 'image' has shape \[8, 8\], an image has \[C, H, W\]"),
        (np.zeros((3, 0, 8), np.uint8), r"field 'image' has shape \[3, 0, 8\]"),
        (b"\xff\xd8", "field 'image' holds bytes.*decode"),
        ([[1]], "field 'image' holds list"),
    ],
)
def test_what_is_no_image_is_refused_by_its_field(stage: Any, value: Any, said: str) -> None:
    arguments = (rng(),) if "random" in stage.__class__.__name__.lower() else ()
    with pytest.raises(PipelineError, match=said):
        stage({"image": value}, *arguments)
    with pytest.raises(PipelineError, match=r"no field 'image' \(the sample has: label, x\)"):
        stage({"label": 1, "x": 2}, *arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: stages.decode_jpeg("image", mode="HSV"),
        lambda: stages.decode_jpeg("image", min_size=0),
        lambda: stages.decode_image("image", mode="rgb"),
        lambda: stages.decode_image("image", max_pixels=0),
        lambda: stages.resize("image"),
        lambda: stages.resize("image", 8, shorter=8),
        lambda: stages.resize("image", (8, 8, 8)),  # type: ignore[arg-type]
        lambda: stages.resize("image", (8, 0)),
        lambda: stages.resize("image", shorter=0),
        lambda: stages.resize("image", 8, interpolation="bilinear"),
        lambda: stages.center_crop("image", -1),
        lambda: stages.random_crop("image", 8, padding=-1),
        lambda: stages.random_resized_crop("image", 8, scale=(1, 0.5)),
        lambda: stages.random_resized_crop("image", 8, ratio=(0, 1)),
        lambda: stages.random_flip("image", p=1.5),
        lambda: stages.scale("image", std=0),
        lambda: stages.scale("image", std=(1, 1, -1)),
        lambda: stages.scale("image", mean=()),
        lambda: stages.scale("image", mean=float("nan")),
        lambda: stages.scale("image", dtype="uint8"),
        lambda: stages.scale("image", dtype="no such"),
    ],
)
def test_impossible_arguments_are_refused_when_the_stage_is_made(make: Callable[[], Any]) -> None:
    with pytest.raises(PipelineError):
        make()


def test_pictures_of_16_bits_are_refused_until_a_dtype_says_what_becomes_of_them(tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 4096, (8, 8, 3)).astype(np.uint16)
    cv2.imwrite(str(tmp_path / "a.png"), deep)
    pipe = Pipeline(sources.image_folder(tmp_path))
    with pytest.raises(PipelineError, match=r'a\.png.*holds uint16.*dtype="uint16"\) keeps .*0 to 15 in 12-bit'):
        next(iter(pipe.map(stages.decode_image("image")).loader(1, epochs=1)))
    for dtype, wanted in (("uint16", deep), ("uint8", deep >> 8)):
        batch = next(iter(pipe.map(stages.decode_image("image", dtype=dtype)).loader(1, epochs=1)))
        assert np.array_equal(batch["image"][0].numpy(), wanted[..., ::-1].transpose(2, 0, 1))
