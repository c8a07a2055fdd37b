"""Stages on images, each against a plain formula written here."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
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
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(channels), indexing="ij")
    return (127 + 60 * np.sin(x / 9 + c) + 60 * np.cos(y / 7 - c)).astype(np.uint8)


def noise(channels: int, height: int, width: int, dtype: str = "uint8", *, last: bool = False) -> Image:
    """Noise [C, H, W]; `last`: as a view of [H, W, C] memory, as a decoder leaves it."""
    image = np.random.default_rng(0).integers(0, 256, (channels, height, width)).astype(dtype)
    return np.ascontiguousarray(image.transpose(1, 2, 0)).transpose(2, 0, 1) if last else image


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def run(stage: Any, image: Any, generator: np.random.Generator | None = None) -> Image:
    """Apply a stage; the sample and its arrays must come out of it as they were."""
    sample = {"image": image, "label": 3}
    before = image.copy() if isinstance(image, np.ndarray) else image
    after = stage(sample) if generator is None else stage(sample, generator)
    assert list(sample) == ["image", "label"] and sample["image"] is image and after["label"] == 3
    np.testing.assert_array_equal(image, before)
    return after["image"]  # type: ignore[no-any-return]


def test_jpeg_is_decoded_to_channels_rows_columns() -> None:
    pixels = smooth(40, 56)
    data = simplejpeg.encode_jpeg(pixels, quality=95, colorsubsampling="444")
    image = run(stages.decode_jpeg("image"), data)
    assert (image.shape, image.dtype) == ((3, 40, 56), np.uint8)
    error = np.abs(image.astype(int) - pixels.transpose(2, 0, 1))
    assert error.mean() < 3 and error.max() < 20
    np.testing.assert_array_equal(run(stages.decode_jpeg("image", mode="BGR"), data), image[::-1])
    assert run(stages.decode_jpeg("image", mode="GRAY"), data).shape == (1, 40, 56)
    np.testing.assert_array_equal(run(stages.decode_image("image"), data), image, strict=True)
    for same in (np.frombuffer(data, np.uint8), bytearray(data), memoryview(data)):
        np.testing.assert_array_equal(stages.decode_jpeg("image")({"image": same})["image"], image)
    grey = run(stages.decode_jpeg("image"), simplejpeg.encode_jpeg(smooth(16, 24, 1), colorspace="GRAY"))
    assert grey.shape == (3, 16, 24) and (grey == grey[0]).all()


def test_min_size_decodes_no_larger_than_needed_and_never_below() -> None:
    data = simplejpeg.encode_jpeg(smooth(200, 300))
    for asked, shape in ((99, (100, 150)), ((100, 20), (100, 150)), (101, (200, 300)), (25, (25, 38))):
        assert run(stages.decode_jpeg("image", min_size=asked), data).shape[1:] == shape


def test_the_size_in_a_jpeg_is_found_as_its_decoder_finds_it() -> None:
    for space, channels in (("GRAY", 1), ("RGB", 3)):
        data = bytes(simplejpeg.encode_jpeg(smooth(30, 40, channels), 90, space, "420"))
        assert _image_size.read_jpeg_size(data) == simplejpeg.decode_jpeg_header(data)[:2] == (30, 40)
    comment = b"\xff\xfe\x00\x0b\xff\xc0\x00\x11\x08\xff\xff\xff\xff"  # which looks like a frame header
    for other in (data[:2] + comment + data[2:], data[:40], data[1:], b""):
        assert _image_size.read_jpeg_size(other) is None  # the decoder is asked
    with pytest.raises(PipelineError, match="30 x 40 pixels, more than max_pixels=1199"):
        stages.decode_jpeg("image", max_pixels=1199)({"image": data[:2] + comment + data[2:]})


@pytest.mark.parametrize(
    "extension", ["png", "bmp", "webp", "lossless.webp", "tiff", "gif", "ppm", "pgm", "pbm", "pfm"]
)
def test_another_format_is_decoded_and_refused_from_its_header_too(extension: str) -> None:
    pixels = noise(3, 42, 68, "float32" if extension == "pfm" else "uint8").transpose(1, 2, 0)
    if extension in ("pgm", "pbm"):
        pixels = pixels[:, :, 0]
    options = [cv2.IMWRITE_WEBP_QUALITY, 101] if extension == "lossless.webp" else []
    data = cv2.imencode(f".{extension}", np.ascontiguousarray(pixels), options)[1].tobytes()
    image = run(stages.decode_image("image", max_pixels=2856, dtype=pixels.dtype.name), data)
    assert image.shape == (3, 42, 68)
    if extension == "png":
        np.testing.assert_array_equal(image, pixels.transpose(2, 0, 1)[::-1])
        np.testing.assert_array_equal(run(stages.decode_image("image", mode="BGR"), data), image[::-1])
        assert run(stages.decode_image("image", mode="GRAY"), data).shape == (1, 42, 68)
    with pytest.raises(PipelineError, match="the image claims 42 x 68 pixels, more than max_pixels=2855"):
        stages.decode_image("image", max_pixels=2855)({"image": data})
    for cut in range(min(len(data), 600)):
        assert _image_size.read_size(data[:cut]) in (None, (42, 68))  # and no other error


def test_an_archive_of_images_that_claim_to_be_huge_takes_no_memory() -> None:
    data = bytearray(simplejpeg.encode_jpeg(smooth(8, 8)))
    frame = data.index(b"\xff\xc0")  # the frame header (SOF0) is told to
    data[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    # In a process with a gigabyte of addresses: an image of this size has twelve.
    code = f"""
import resource
from pipelines import Pipeline, sources, stages

pipe = Pipeline(sources.arrays(image=[{bytes(data)!r}]))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
pipe.map(stages.decode_jpeg("image")).fields
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "SampleError: sample 0" in done.stderr and "claims 65500 x 65500 pixels" in done.stderr, done.stderr


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
    least = run(stages.decode_jpeg("image", min_size=(8, 12)[::order], orient=True), data)
    assert least.shape[1:] == (8, 12)[::order]


def test_values_of_more_than_8_bits_are_kept_or_made_8(tmp_path: Path) -> None:
    pixels = np.arange(4096, dtype=np.uint16).reshape(64, 64)  # 12 bits
    for extension, kept in (("png", pixels), ("tiff", pixels), ("tiff", pixels.astype("float32"))):
        data = cv2.imencode(f".{extension}", kept)[1].tobytes()
        image = run(stages.decode_image("image", "GRAY", dtype=str(kept.dtype)), data)
        np.testing.assert_array_equal(image[0], kept, strict=True)
    data = cv2.imencode(".png", pixels)[1].tobytes()
    np.testing.assert_array_equal(run(stages.decode_image("image", dtype="uint8"), data)[1], pixels >> 8)
    (tmp_path / "a.png").write_bytes(data)
    pipe = Pipeline(sources.image_folder(tmp_path)).map(stages.decode_image("image"))
    with pytest.raises(PipelineError, match=r'a\.png.*holds uint16.*dtype="uint16"\) keeps .*0 to 15 in 12-bit'):
        pipe.fields  # noqa: B018


def bilinear(image: Image, height: int, width: int) -> Image:
    """Linear interpolation in float64 between pixel centres, edges repeated."""
    blended: Image = image.astype(np.float64)
    for axis, wanted in ((1, height), (2, width)):
        size = image.shape[axis]
        at = (np.arange(wanted) + 0.5) * size / wanted - 0.5
        low = np.floor(at).astype(int)
        below, above = (np.take(blended, np.clip(low + step, 0, size - 1), axis) for step in (0, 1))
        part = (at - low).reshape(-1, *[1] * (2 - axis))
        blended = below * (1 - part) + above * part
    return blended


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("channels", [1, 3, 7])
def test_resize_interpolates_linearly_and_other_methods_go_by_values_alone(
    channels: int, last: bool, dtype: str
) -> None:
    image = noise(channels, 20, 30, dtype, last=last)
    for size in ((11, 23), (20, 7), (64, 50)):
        result = run(stages.resize("image", size=size), image)
        assert (result.shape, result.dtype) == ((channels, *size), image.dtype)
        assert np.abs(result.astype(float) - bilinear(image, *size)).max() <= (1.0 if dtype == "uint8" else 0.01)
    for method in ("linear", "area", "cubic", "nearest"):
        stage = stages.resize("image", (9, 31), interpolation=method)
        np.testing.assert_array_equal(run(stage, image), run(stage, np.ascontiguousarray(image)))
    assert run(stages.resize("image", 16), image).shape[1:] == (16, 16)
    assert run(stages.resize("image", shorter=10), image).shape[1:] == (10, 15)
    assert run(stages.resize("image", shorter=10), image.transpose(0, 2, 1)).shape[1:] == (15, 10)
    result = run(stages.resize("image", (10, 10), interpolation="area"), image.astype(np.float32))
    np.testing.assert_allclose(result, image.reshape(-1, 10, 2, 10, 3).mean(axis=(2, 4)), rtol=1e-5)


def sizes(most: int) -> Any:
    return st.tuples(st.integers(1, most), st.integers(1, most))


@given(sizes(12), sizes(14), st.integers(0, 6), st.booleans(), st.integers(0, 2**32))
def test_random_crop_is_a_window_of_the_padded_image_and_center_crop_its_middle(
    size: tuple[int, int], crop: tuple[int, int], padding: int, last: bool, seed: int
) -> None:
    image = noise(2, *size, last=last)
    stage = stages.random_crop("image", crop, padding=padding)
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    spare = padded.shape[1] - crop[0], padded.shape[2] - crop[1]
    if min(spare) < 0:
        with pytest.raises(PipelineError, match=r"field 'image' has shape .* too small to cut out"):
            stage({"image": image}, rng())
        return
    draws = rng(seed)
    top, left = (int(draws.random() * (places + 1)) for places in spare)
    cut = padded[:, top : top + crop[0], left : left + crop[1]]
    np.testing.assert_array_equal(run(stage, image, rng(seed)), cut)
    top, left = spare[0] // 2, spare[1] // 2
    middle = padded[:, top : top + crop[0], left : left + crop[1]]
    np.testing.assert_array_equal(run(stages.center_crop("image", crop), padded), middle)


def test_random_crops_reach_every_place_alike_and_resized_parts_are_within_their_bounds() -> None:
    image = np.arange(25, dtype=np.uint8).reshape(1, 5, 5)
    generator, stage = rng(1), stages.random_crop("image", 3)
    corners = [int(stage({"image": image}, generator)["image"][0, 0, 0]) for _ in range(9000)]
    values, counts = np.unique(corners, return_counts=True)
    assert values.tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 12] and counts.min() > 850 and counts.max() < 1150
    # Each pixel holds its own place, so that the part can be read off the nearest-neighbour result.
    image, generator = np.indices((60, 80)).astype(np.float32), rng(3)
    options: dict[str, Any] = {"scale": (0.2, 0.5), "ratio": (0.5, 2.0), "interpolation": "nearest"}
    stage = stages.random_resized_crop("image", (200, 200), **options)
    height, width = (np.ptp([run(stage, image, generator) for _ in range(300)], axis=(2, 3)) + 1).T
    areas, ratios = height * width / 4800, width / height
    assert 0.18 < areas.min() < 0.22 and 0.47 < areas.max() < 0.53 and abs(areas.mean() - 0.35) < 0.03
    assert 0.45 < ratios.min() < 0.6 and 1.7 < ratios.max() < 2.2 and abs(np.log(ratios).mean()) < 0.1


def test_flip_mirrors_left_and_right_with_its_probability() -> None:
    images = [noise(1, 6, 9), noise(3, 6, 9, last=True), noise(6, 6, 9, "float32", last=True)]
    images += [noise(3, 6, 9, "int64"), noise(6, 6, 9, "bool")]
    images += [noise(*shape, "float32") for shape in ((200, 3, 3), (12, 1000, 1), (8, 4, 4))]
    for image in images:
        np.testing.assert_array_equal(run(stages.random_flip("image", p=1), image, rng()), image[:, :, ::-1])
        np.testing.assert_array_equal(run(stages.random_flip("image", p=0), image, rng()), image)
    generator, stage = rng(2), stages.random_flip("image", p=0.3)
    flipped = sum(not np.array_equal(run(stage, images[0], generator), images[0]) for _ in range(600))
    assert 130 < flipped < 230


def test_random_resized_crop_falls_back_to_the_middle_and_of_the_whole_is_resize() -> None:
    image = noise(3, 4, 400)
    stage = stages.random_resized_crop("image", (4, 5), scale=(1, 1), ratio=(0.75, 4 / 3), interpolation="nearest")
    np.testing.assert_array_equal(run(stage, image, rng()), image[:, :, 197:202])
    image = noise(3, 30, 30, last=True)
    whole = stages.random_resized_crop("image", (12, 17), scale=(1, 1), ratio=(1, 1))
    np.testing.assert_array_equal(run(whole, image, rng()), run(stages.resize("image", (12, 17)), image))
    part = stages.random_resized_crop("image", (8, 9))
    results = [run(part, image, rng(seed)).tobytes() for seed in (5, 5, 6, 7, 8, 9)]
    assert results[0] == results[1] and len(set(results)) == 5


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "mirrored", "float32", "uint16"])
def test_scale_is_this_float32_arithmetic_to_the_last_bit(last: bool, dtype: str) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    for shape in ((3, 7, 5), (3, 150, 160)):
        image = noise(*shape, "uint8" if dtype == "mirrored" else dtype, last=last)
        image = image[:, :, ::-1] if dtype == "mirrored" else image
        image = image / np.float32(256) if dtype == "float32" else image
        result = run(stages.scale("image", mean=mean, std=std), image)
        full = {"uint8": 255, "uint16": 65535, "float32": 1}[str(image.dtype)]
        parts = np.ascontiguousarray(image).astype(np.float32) / np.float32(full)
        turned = (parts - np.float32(mean)[:, None, None]) / np.float32(std)[:, None, None]
        np.testing.assert_array_equal(result, turned, strict=True)
        assert result.flags.c_contiguous
    same = run(stages.scale("image", mean=[0.5] * 3, std=np.full(3, 0.25)), image)
    for to in ("float16", "float32", "float64"):  # one number for all channels
        converted = run(stages.scale("image", 0.5, 0.25, to), image)
        np.testing.assert_array_equal(converted, same.astype(to), strict=True)
