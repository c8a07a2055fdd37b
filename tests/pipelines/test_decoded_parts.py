"""A crop right after a JPEG's decoder: the samples and the errors of two stages, from fewer pixels."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import struct
import subprocess
import sys
import tarfile
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
from pipelines.errors import SampleError
from pipelines.prepare import decoded_part
from pipelines.prepare.decoded_part import decode_part, find_decoded_parts, open_library
from pipelines.prepare.sample_maker import SampleMaker

SOURCE = Path(decoded_part.__file__).with_name("jpeg_part.c")
SUBSAMPLINGS = ("444", "422", "420", "440", "411")
MODES = ("RGB", "BGR", "GRAY")
CROPS = {
    "center": stages.center_crop("image", (40, 33)),
    "random": stages.random_crop("image", (40, 33)),
    "padded": stages.random_crop("image", (40, 33), padding=4),
    "resized": stages.random_resized_crop("image", 24),
    "as it is": stages.random_resized_crop("image", (31, 29), scale=(0.1, 0.1), ratio=(29 / 31, 29 / 31)),
}


def build(folder: Path, old: str = "", new: str = "") -> Path:
    """The library as setup.py builds it; of its source, `old` is replaced."""
    if shutil.which("cc") is None or not Path("/usr/include/jpeglib.h").exists():
        pytest.skip("no C compiler, or no libjpeg-turbo to build with (Debian: libjpeg-dev)")
    source, path = folder / "part.c", folder / "part.so"
    text = SOURCE.read_text()
    assert old in text
    source.write_text(text.replace(old, new))
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", path, source, "-ljpeg"], check=True)
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = open_library(build(tmp_path_factory.mktemp("library")))
    assert found is not None
    return found


def draw(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray[Any, Any]:
    """A picture [H, W, C] with edges and noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (-(-height // 7), -(-width // 7), channels)).repeat(7, 0).repeat(7, 1)
    noise = rng.integers(-20, 21, (height, width, channels))
    return np.clip(coarse[:height, :width] + noise, 0, 255).astype(np.uint8)


def encode(height: int, width: int, subsampling: str = "420", quality: int = 80, seed: int = 0) -> bytes:
    space = "GRAY" if subsampling == "GRAY" else "RGB"
    image = draw(height, width, 1 if space == "GRAY" else 3, seed)
    return bytes(simplejpeg.encode_jpeg(image, quality, space, "444" if space == "GRAY" else subsampling))


def is_exact(library: ctypes.CDLL, data: bytes, part: tuple[int, int, int, int], mode: str = "RGB") -> bool:
    whole = simplejpeg.decode_jpeg(data, mode)
    decoded = decode_part(library, data, whole.shape[:2], part, mode)
    top, left, height, width = part
    return decoded is not None and np.array_equal(decoded, whole[top : top + height, left : left + width])


def draw_part(rng: np.random.Generator, rows: int, columns: int) -> tuple[int, int, int, int]:
    height, width = int(rng.integers(1, rows + 1)), int(rng.integers(1, columns + 1))
    return int(rng.integers(rows - height + 1)), int(rng.integers(columns - width + 1)), height, width


SIDES = st.tuples(st.integers(1, 90), st.integers(1, 90))
FILES = {"subsampling": st.sampled_from((*SUBSAMPLINGS, "GRAY")), "quality": st.sampled_from((20, 75, 98))}


@given(sides=SIDES, mode=st.sampled_from(MODES), seed=st.integers(0, 1 << 16), file=st.fixed_dictionaries(FILES))
def test_a_part_is_that_of_the_whole_image(
    library: ctypes.CDLL, sides: tuple[int, int], mode: str, seed: int, file: dict[str, Any]
) -> None:
    part = draw_part(np.random.default_rng(seed), *sides)
    assert is_exact(library, encode(*sides, seed=seed, **file), part, mode)


@pytest.mark.skipif("ENSEMBLE_DATA" not in os.environ, reason="ENSEMBLE_DATA is not set")
def test_every_photograph_is_decoded_as_the_whole_of_it_in_every_subsampling(library: ctypes.CDLL) -> None:
    rng, wrong, scans = np.random.default_rng(0), 0, 0
    with tarfile.open(Path(os.environ["ENSEMBLE_DATA"], "photos", "photos.tar")) as archive:
        photographs = [archive.extractfile(member).read() for member in archive if member.isfile()]  # type: ignore[union-attr]
    for number, data in enumerate(photographs):
        scans += b"\xff\xc2\x00\x11" in data
        image = simplejpeg.decode_jpeg(data)
        again = bytes(simplejpeg.encode_jpeg(image, 90, "RGB", SUBSAMPLINGS[number % 5]))
        for file in (data, again):
            wrong += not is_exact(library, file, draw_part(rng, *image.shape[:2]), MODES[number % 3])
    assert len(photographs) == 250 and wrong == scans <= 1  # those of several scans are decoded in full


def make(pipeline: Pipeline, library: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The samples of three epochs, or what is said of them."""
    monkeypatch.setattr(decoded_part, "load_library", lambda: library)
    maker, made = SampleMaker(pipeline), list[Any]()
    for epoch, index in itertools.product(range(3), range(len(pipeline.source))):
        try:
            sample = maker.make(index, epoch)
            made.append((list(sample), sample["image"].dtype, sample["image"].shape, sample["image"].tobytes()))
        except SampleError as error:
            made.append(str(error))
    return made


def with_orientation(data: bytes) -> bytes:
    """EXIF that says that the picture lies on its side."""
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", 1) + entry + bytes(4)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]


def collect_odd_files() -> list[bytes]:
    """Files of every kind that a decoder meets, good ones and damaged ones."""
    good, pixels = encode(75, 91), draw(75, 91)
    files = [good, *(encode(75, 91, name) for name in (*SUBSAMPLINGS, "GRAY"))]
    for option, value in (("PROGRESSIVE", 1), ("RST_INTERVAL", 3), ("OPTIMIZE", 1)):
        options = (getattr(cv2, f"IMWRITE_JPEG_{option}"), value)
        files.append(cv2.imencode(".jpg", pixels, options)[1].tobytes())
    cmyk = np.concatenate([pixels, pixels[:, :, :1]], axis=2)
    files += [bytes(simplejpeg.encode_jpeg(cmyk, 90, "CMYK", "444")), with_orientation(good), encode(20, 20)]
    files += [b"hello", b"", good[:-2], good[: len(good) // 2], good + b"more"]
    return [*files, good.replace(struct.pack(">HH", 75, 91), struct.pack(">HH", 75, 89), 1)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("crop", CROPS)
def test_samples_and_errors_are_those_of_two_stages(library: Any, monkeypatch: Any, crop: str, mode: str) -> None:
    files = collect_odd_files()
    source = sources.arrays(image=files, label=np.arange(len(files)))
    pipeline = Pipeline(source, seed=3).map(stages.decode_jpeg("image", mode)).map(CROPS[crop])
    made = make(pipeline, library, monkeypatch)
    assert made == make(pipeline, None, monkeypatch)
    assert 3 * 4 <= sum(isinstance(sample, str) for sample in made) <= 3 * 6


def test_an_error_anywhere_in_a_file_is_one(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    # In each file one byte is another one; most of them do not lie in what the crop keeps.
    good, rng = encode(200, 120, "420"), np.random.default_rng(0)
    files = []
    for at in rng.integers(20, len(good) - 2, 400).tolist():
        files.append(good[:at] + bytes([good[at] ^ int(rng.integers(1, 256))]) + good[at + 1 :])
    pipeline = Pipeline(sources.arrays(image=files)).map(JPEG).map(stages.random_crop("image", 16))
    made = make(pipeline, library, monkeypatch)
    assert made == make(pipeline, None, monkeypatch)
    assert 20 < sum(isinstance(sample, str) for sample in made) < 3 * 380


@pytest.mark.more
def test_the_fuzzer_runs_and_finds_nothing(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    for name in ("libasan.so", "libubsan.so", "libjpeg.a"):
        path = subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True)
        if not Path(path.strip()).is_absolute():
            pytest.skip(f"gcc has no {name}")
    environment = {name: value for name, value in os.environ.items() if name != "ENSEMBLE_DATA"}
    command = [sys.executable, Path(__file__).parents[1] / "fuzz" / "jpeg_part.py", "--count", "3000"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "seed 0: 3000 files" in done.stdout, done.stdout + done.stderr


JPEG, CROP = stages.decode_jpeg("image"), stages.center_crop("image", 8)


FOLLOWED: list[tuple[list[Any], list[int]]] = [
    ([stages.decode_image("image"), stages.random_crop("image", 8)], [0]),
    ([stages.cast("label", "float32"), JPEG, stages.random_resized_crop("image", 8)], [1]),
    ([JPEG, stages.random_flip("image"), CROP], []),
    ([JPEG, stages.center_crop("other", 8)], []),
    ([stages.decode_jpeg("image", min_size=8), CROP], []),
    ([CROP, JPEG], []),
]


@pytest.mark.parametrize(("mapped", "parts"), FOLLOWED)
def test_only_a_crop_right_after_its_decoder_is_done_with_it(
    library: Any, monkeypatch: Any, mapped: Any, parts: Any
) -> None:
    pipeline = Pipeline(sources.arrays(image=[encode(20, 20)], label=np.zeros(1)))
    for stage in mapped:
        pipeline = pipeline.map(stage)
    for loaded, expected in ((library, parts), (None, [])):
        monkeypatch.setattr(decoded_part, "load_library", lambda loaded=loaded: loaded)
        assert list(find_decoded_parts(pipeline.stages)) == expected


def test_what_is_kept_or_shared_after_the_decoder_is_the_whole_image(library: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(decoded_part, "load_library", lambda: library)
    source = sources.arrays(image=[encode(75, 91)])
    maker = SampleMaker(Pipeline(source).map(JPEG).map(stages.random_crop("image", 16)))
    whole = maker.make(0, 0, last=1)
    assert whole["image"].shape == (3, 75, 91)
    rest = maker.make(0, 0, whole, first=1)
    np.testing.assert_array_equal(rest["image"], maker.make(0, 0)["image"], strict=True)


@pytest.mark.parametrize(("old", "new"), [("JDCT_ISLOW", "JDCT_IFAST"), ("#define MARGIN 2", "#define MARGIN 0")])
def test_a_library_that_is_not_there_or_decodes_to_other_bits_is_not_used(
    tmp_path: Path, old: str, new: str
) -> None:
    assert open_library(tmp_path / "none.so") is open_library(build(tmp_path, old, new)) is None


def test_memory_is_not_written_beyond_its_end(library: ctypes.CDLL) -> None:
    data, size, place = encode(75, 91, "411"), 10 * 20 * 3, (ctypes.c_uint * 3)()
    memory = np.full(2 * size, 7, np.uint8)
    call: Callable[..., int] = library.decode_jpeg_part
    assert call(data, len(data), 75, 91, 40, 33, 10, 20, 3, 0, memory.ctypes.data, size, place) == 0
    assert (memory[size:] == 7).all()
