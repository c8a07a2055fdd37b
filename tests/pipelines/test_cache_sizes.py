"""Caches of images that were made smaller: other samples, said so; the same ones wherever they are prepared."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from core_pipes import Feeder, Job, leaves_nothing, read, together  # noqa: F401
from test_decoded_parts import draw, encode

from pipelines import Pipeline, PipelineError, attach, sources, stages
from pipelines.cache.content import count_cached_stages, estimate_bytes, shrink_images
from pipelines.errors import SampleError
from pipelines.prepare.decoded_part import find_decoded_parts, load_library

N, SHORTER = 20, 64
#: Larger and smaller ones, upright and not, grey.
FILES = [
    encode(70 + 9 * (i % 8), 50 + 11 * (i % 7), "GRAY" if i % 6 == 5 else ("444", "420", "422")[i % 3], seed=i)
    for i in range(N)
]
CROP = stages.random_resized_crop("image", 24)


def data(files: list[bytes] = FILES) -> Any:
    return sources.arrays(number=np.arange(len(files)))


class Opened:
    """Puts the bytes of a file into its record."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "image": self.files[int(sample["number"])]}


def whole(files: list[bytes] = FILES, decode: Any = None) -> Pipeline:
    decode = decode or stages.decode_jpeg("image")
    return Pipeline(data(files), seed=4).map(Opened(files)).map(decode).map(CROP).map(stages.random_flip("image"))


def small(files: list[bytes] = FILES, shorter: int = SHORTER) -> Pipeline:
    return shrink_images(whole(files), shorter)


def reading(pipeline: Pipeline, feeder: Any = None, epochs: int = 3) -> list[Any]:
    loader = pipeline.loader(8, range(epochs)) if feeder is None else attach(feeder.address, pipeline, 8, epochs)
    return read(loader, Job(epochs=(0, epochs)))


def test_a_file_is_made_smaller_and_nothing_else() -> None:
    smooth = cv2.GaussianBlur(draw(410, 300), (0, 0), 6)
    for given in [*FILES, bytes(simplejpeg.encode_jpeg(smooth, 90))]:
        made = stages.shrink_jpeg("image", SHORTER)({"image": given, "label": 3})
        rows, columns, space, _ = simplejpeg.decode_jpeg_header(given)
        assert made["label"] == 3
        if min(rows, columns) <= SHORTER:
            assert made["image"] == given, "never larger, and not encoded again for nothing"
            continue
        mode, sampling = ("GRAY", "444") if space == "Gray" else ("RGB", "420")
        height, width, same, _ = simplejpeg.decode_jpeg_header(made["image"])
        assert min(height, width) == SHORTER and abs(height / width - rows / columns) < 0.02 and same == space
        pixels = simplejpeg.decode_jpeg(given, mode)
        expected = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA).reshape(height, width, -1)
        if min(rows, columns) < 4 * SHORTER:
            assert made["image"] == simplejpeg.encode_jpeg(expected, 90, mode, sampling)
        else:  # decoded at a fraction of its size
            found = simplejpeg.decode_jpeg(made["image"], "GRAY")[..., 0].astype(int)
            assert np.abs(found - cv2.cvtColor(expected, cv2.COLOR_RGB2GRAY)).mean() < 2


@pytest.mark.parametrize("form", ["jpeg", "raw"])
def test_what_is_kept_gives_the_samples_of_the_pipeline_alone(form: Any, tmp_path: Path) -> None:
    expected = reading(small())
    assert expected != reading(whole())
    sizes = []
    for turn in range(2):
        options: dict[str, Any] = {"cache": "disk", "cache_dir": tmp_path, "cache_format": form}
        with Feeder(small(), workers=2, **options) as feeder:
            assert reading(small(), feeder) == expected
        kept = feeder.stats()["cache"]
        assert kept["hits"] >= (3 if turn else 2) * N - 2 and kept["wrong"] == 0
        sizes.append(kept["expected_bytes"])
    found = estimate_bytes(small(), count_cached_stages(small(), form))
    assert found == pytest.approx(sizes[0], rel=0.2)
    assert sizes[1] >= sizes[0]


def test_a_decoder_after_the_cache_decodes_what_the_crop_keeps() -> None:
    pipeline = small()
    assert count_cached_stages(pipeline) == 2 and count_cached_stages(pipeline, "raw") == 3
    if load_library() is not None:
        assert list(find_decoded_parts(pipeline.stages)) == [2]


def test_size_is_part_of_the_fingerprint_and_format_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = Pipeline(sources.arrays(image=np.zeros((4, 3), np.uint8)), seed=4)
    stage = stages.shrink_jpeg
    stems = [named.map(each) for each in (stage("image", 64), stage("image", 65), stage("image", 64, quality=80))]
    assert len({each.fingerprint for each in (named, *stems)}) == 4
    assert shrink_images(small(), SHORTER).fingerprint == small().fingerprint is not None
    assert small().find_difference(small(shorter=48).describe_for_peers()) is not None
    for pipeline, form, hits in (
        (small(), "jpeg", 0),
        (small(shorter=48), "jpeg", 0),
        (small(), "raw", 0),
        (small(), "jpeg", N),
    ):
        with Feeder(pipeline, cache="disk", cache_dir=tmp_path, cache_format=form) as feeder:  # type: ignore[arg-type]
            assert reading(pipeline, feeder, epochs=1) == reading(pipeline, epochs=1)
        assert feeder.stats()["cache"]["hits"] == hits, "no cache of another size or format is read"
    other = tmp_path / "libraries" / "simplejpeg-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Name: simplejpeg\nVersion: 0.0.1\n")
    monkeypatch.syspath_prepend(other.parent)
    with Feeder(small(), cache="disk", cache_dir=tmp_path) as feeder:
        assert feeder.stats()["cache"]["samples"] == 0, "nor of another version of the library"


def test_damage_on_disk_is_noticed_and_prepared_again(tmp_path: Path) -> None:
    pipeline = small()
    with Feeder(pipeline, cache="disk", cache_dir=tmp_path) as feeder:
        expected = reading(pipeline, feeder, epochs=2)
    (path,) = tmp_path.glob("*/samples")
    raw = bytearray(path.read_bytes())
    places = [at for at in range(8192, len(raw)) if raw.startswith(b"\xff\xda", at)]  # of a scan
    assert len(places) >= N
    for at in places[::2]:
        raw[at + 20] ^= 1
    path.write_bytes(raw)
    with Feeder(pipeline, cache="disk", cache_dir=tmp_path) as feeder:
        assert reading(pipeline, feeder, epochs=2) == expected
    assert feeder.stats()["cache"]["wrong"] > 0


def test_a_reader_that_resumes_and_others_that_share_read_what_one_alone_does(tmp_path: Path) -> None:
    ends = [small().map(stages.scale("image", mean=mean)) for mean in (0.4, 0.5)]
    with Feeder(small(), expect=2, cache="disk", cache_dir=tmp_path) as feeder:
        jobs = [
            partial(read, attach(feeder.address, end, 8, range(2), name=str(number)), Job(epochs=(0, 2)))
            for number, end in enumerate(ends)
        ]
        assert together(jobs) == [read(end.loader(8, range(2)), Job(epochs=(0, 2))) for end in ends]
    rest = {"epochs": range(1, 3), "start_step": 1}
    with Feeder(small(), cache="disk", cache_dir=tmp_path) as feeder:
        resumed = read(attach(feeder.address, small(), 8, **rest), Job(epochs=(1, 3)))  # type: ignore[arg-type]
    assert resumed == read(small().loader(8, **rest), Job(epochs=(1, 3)))  # type: ignore[arg-type]
    assert feeder.stats()["cache"]["hits"] >= 2 * N - 8


def test_too_little_room_is_said_when_the_first_samples_are_known() -> None:
    files = [encode(300, 300, quality=95, seed=i % 4) for i in range(60)]
    pipeline = small(files, 128)
    with pytest.warns(UserWarning, match=r"room for about \d+% of the samples: all need about \d+ MiB"):  # noqa: SIM117
        with Feeder(pipeline, cache="memory", cache_format="raw", cache_bytes=2**21) as feeder:
            assert reading(pipeline, feeder, epochs=2) == reading(pipeline, epochs=2)
    kept = feeder.stats()["cache"]
    assert kept["samples"] < 60 and kept["bytes"] <= 2**21 < kept["expected_bytes"]


def png(image: Any) -> bytes:
    return bytes(cv2.imencode(".png", image)[1].tobytes())


PNG = [png(np.zeros((80, 80, 3), np.uint8))]


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (Pipeline(data()).map(CROP), "no stage decode_jpeg or decode_image before its first random stage"),
        (Pipeline(data()).map(CROP).map(stages.decode_jpeg("image")), "no stage decode_jpeg"),
        (
            Pipeline(data()).map(stages.decode_jpeg("image")).map(stages.decode_image("mask")),
            "has 2 stages that decode",
        ),
        (
            whole().map(stages.tv_transform(abs, images="image", boxes="boxes")),
            "boxes, masks or keypoints would not follow",
        ),
        (
            whole().map(stages.resize("image", (8, 80))),
            "Resize makes images of 80 pixels, for which those of 64 would be enlarged",
        ),
        (small(shorter=48), "smaller already, by .*shorter=48"),
        (whole(PNG, stages.decode_image("image")), "the first image is no JPEG file.*shorter=64"),
    ],
)
def test_what_cannot_be_made_smaller_is_refused(pipeline: Pipeline, said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        shrink_images(pipeline, SHORTER)


def test_other_formats_pass_and_damaged_files_fail() -> None:
    stage = stages.shrink_jpeg("image", 16)
    assert stage({"image": PNG[0]})["image"] == PNG[0]
    for broken in (FILES[0][:400], b"\xff\xd8\xff" + bytes(100)):
        with pytest.raises(PipelineError, match="field 'image': cannot decode JPEG"):
            stage({"image": broken})
    with pytest.raises(PipelineError, match=r"claims .* more than max_pixels=100"):
        stages.shrink_jpeg("image", 16, max_pixels=100)({"image": FILES[0]})
    with pytest.raises(PipelineError, match=r"cache_format='raw' is for images that stages.shrink_jpeg"):
        Feeder(whole(), cache="memory", cache_format="raw")
    with pytest.raises(SampleError, match="ShrinkJpeg: field 'image': cannot decode JPEG"):
        list(small([*FILES, FILES[0][:400]]).loader(8, 1))
