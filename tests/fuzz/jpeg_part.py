"""Fuzzes `pipelines/prepare/jpeg_part.c` under AddressSanitizer, UBSan, LeakSanitizer and a limit on memory.

`make fuzz`, or `python tests/fuzz/jpeg_part.py --minutes 60 --seed 7`. Photographs (of `$ENSEMBLE_DATA`, else
pictures drawn here) and small pieces of them in all subsamplings are damaged, and random parts compared with the
whole image that the same library decodes: no error may be missed, no bit differ, nothing be read or written
outside or leaked. A finding has a number: `--seed S --first N --count 1` repeats it with the same data, and
finding.jpg is its file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "pipelines" / "prepare"
BY_OPENCV = {
    "restarts": cv2.IMWRITE_JPEG_RST_INTERVAL,
    "optimized": cv2.IMWRITE_JPEG_OPTIMIZE,
    "progressive": cv2.IMWRITE_JPEG_PROGRESSIVE,
}
FORMS = ("444", "422", "420", "440", "411", "GRAY", *BY_OPENCV)
PIECES = 10  # of a photograph
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def read_photographs(rng: np.random.Generator) -> list[bytes]:
    if data := os.environ.get("ENSEMBLE_DATA"):
        with tarfile.open(Path(data, "photos", "photos.tar")) as archive:
            return [archive.extractfile(each).read() for each in archive if each.isfile()]  # type: ignore[union-attr]
    drawn = (rng.integers(0, 256, (24, 32, 3)).repeat(16, 0).repeat(16, 1) for _ in range(20))
    noisy = (np.clip(each + rng.normal(0, 9, each.shape), 0, 255).astype(np.uint8) for each in drawn)
    return [bytes(simplejpeg.encode_jpeg(each, 85, "RGB", FORMS[n % 5])) for n, each in enumerate(noisy)]


def make_pieces(photograph: bytes, rng: np.random.Generator) -> Iterator[bytes]:
    """Small files are damaged and decoded many more times in an hour."""
    image = simplejpeg.decode_jpeg(photograph)
    for _ in range(PIECES):
        rows, columns = rng.integers(1, 160, 2)
        top, left = rng.integers(0, image.shape[0] // 2), rng.integers(0, image.shape[1] // 2)
        piece = np.ascontiguousarray(image[top : top + rows, left : left + columns])
        form, quality = str(rng.choice(FORMS)), int(rng.integers(5, 101))
        if form in BY_OPENCV:
            yield cv2.imencode(".jpg", piece, [BY_OPENCV[form], 1])[1].tobytes()
        elif form == "GRAY":
            yield bytes(simplejpeg.encode_jpeg(piece[:, :, :1].copy(), quality, "GRAY", "444"))
        else:
            yield bytes(simplejpeg.encode_jpeg(piece, quality, "RGB", form))


def build(folder: Path, library: str | None, include: str | None) -> Path:
    """The program, with the library linked in, so that its allocations can be made to fail."""
    program = folder / "jpeg_part_fuzz"
    libjpeg = library or subprocess.check_output(["gcc", "-print-file-name=libjpeg.a"], text=True).strip()
    wrapped = "-Wl,--wrap=jpeg_get_small,--wrap=jpeg_get_large"
    includes = [f"-I{each}" for each in (include, SOURCES) if each]
    sources = [HERE / "jpeg_part_fuzz.c", libjpeg]
    command = ["gcc", "-O1", "-g", "-Wall", *SANITIZERS, *includes, *sources, wrapped, "-o", program]
    subprocess.run(command, check=True)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="wall time after which it ends")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--count", type=int, default=1 << 62, help="files at most")
    parser.add_argument("--library", help="libjpeg.a to link, such as one built with the sanitizers, too")
    parser.add_argument("--include", help="folder of its headers")
    args: Any = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    options = {
        "ASAN_OPTIONS": "max_allocation_size_mb=512:hard_rss_limit_mb=2048:quarantine_size_mb=16:detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), args.library, args.include)
        photographs = read_photographs(rng)
        names = []
        for data in [*photographs, *(piece for each in photographs for piece in make_pieces(each, rng))]:
            names.append(Path(folder, f"{len(names)}.jpg"))
            names[-1].write_bytes(data)
        numbers = map(str, (args.seed, args.first, args.first + args.count, args.minutes * 60))
        return subprocess.run([program, *numbers, *names], env={**os.environ, **options}).returncode


if __name__ == "__main__":
    sys.exit(main())
