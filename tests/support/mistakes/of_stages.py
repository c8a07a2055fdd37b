"""Mistakes in stages and in the samples that they are given or return."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
from kit.mistakes import Mistake

from mistakes.of_sources import bad_record, wrong
from pipelines import Pipeline, sources, stages
from pipelines.stages.records import as_record, from_record

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)
JPEG = bytes(simplejpeg.encode_jpeg(PIXELS))
PNG = cv2.imencode(".png", PIXELS)[1].tobytes()
DEEP = cv2.imencode(".png", np.zeros((8, 8), np.uint16))[1].tobytes()
DOUBLE = cv2.imencode(".tiff", np.zeros((8, 8)))[1].tobytes()
ROW = np.zeros((3, 1, 60000), np.uint8)
WORDS = ("the", "film")


def apply(stage: Any, value: Any = None, field: str = "image") -> Any:
    """What a stage makes of a sample with this value in its field."""
    sample = {field: value} if value is not None else {"label": 1, "x": 2}
    return stage(sample, RNG) if type(stage).__name__.startswith("Random") else stage(sample)


# --- values that a stage is not for

OF_IMAGES: list[Any] = [
    stages.resize("image", 8),
    stages.center_crop("image", 8),
    stages.random_crop("image", 8),
    stages.random_resized_crop("image", 8),
    stages.random_flip("image"),
    stages.scale("image"),
]
OF_ANY: list[Any] = [
    *(stages.select("image"), stages.drop("image"), stages.rename(image="y"), stages.cast("image", "int64")),
    *(stages.pad("image", 4), stages.tokenize("image", WORDS), stages.decode_jpeg("image")),
    stages.decode_image("image"),
]
FLAT, EMPTY = np.zeros((8, 8), np.uint8), np.zeros((3, 0, 8), np.uint8)
IMAGES = [
    *(
        wrong(f"{type(s).__name__}: no field", lambda s=s: apply(s), "no field 'image' (the sample has: label, x)")
        for s in (*OF_IMAGES, *OF_ANY)
    ),
    *(
        wrong(f"{type(s).__name__}: a matrix", lambda s=s: apply(s, FLAT), "'image' has shape [8, 8]", "[C, H, W]")
        for s in OF_IMAGES
    ),
    *(
        wrong(f"an image: {what}", lambda stage=stage, value=value: apply(stage, value), *words)
        for what, stage, value, *words in (
            ("empty", OF_IMAGES[0], EMPTY, "field 'image' has shape [3, 0, 8]"),
            ("bytes", OF_IMAGES[0], b"\xff\xd8", "field 'image' holds bytes", "decode"),
            ("a list", OF_IMAGES[0], [[1]], "field 'image' holds list"),
            ("of int64", OF_IMAGES[0], np.zeros((3, 9, 9), int), "of int64, which cannot be resized", "uint8"),
            ("one row", stages.resize("image", shorter=256), ROW, "1 x 60000 pixels would be made 256 x 15360000"),
            ("tiny", stages.random_crop("image", 9), np.zeros((3, 8, 8)), "field 'image'", "too small to cut out"),
            ("five", stages.scale("image", (0, 0, 0)), np.zeros((5, 4, 4)), "[5, 4, 4], but mean has 3 channels"),
            ("a PNG as JPEG", stages.decode_jpeg("image"), PNG, "of another format", "decode_image"),
            ("half a JPEG", stages.decode_image("image"), JPEG[:2000], "field 'image': cannot decode JPEG: "),
            ("a head of a JPEG", stages.decode_jpeg("image"), JPEG[:20], "field 'image': cannot decode JPEG: "),
            ("no end of a JPEG", stages.decode_jpeg("image"), JPEG[:-2], "field 'image': cannot decode JPEG: "),
            ("no bytes", stages.decode_image("image"), b"", "field 'image': cannot decode image"),
            ("half a PNG", stages.decode_image("image"), PNG[:2000], "field 'image': cannot decode image"),
            ("16 bits", stages.decode_image("image", "GRAY"), DEEP, "holds uint16: ", 'dtype="uint16"'),
            ("64", stages.decode_image("image", "GRAY"), DOUBLE, "holds float64: ", "uint16 and float32"),
            ("8 bits for 16", stages.decode_image("image", dtype="uint16"), JPEG, "holds uint8"),
        )
    ),
]
ONE, TWO = np.ones(1), np.ones(2)
VALUES = [
    wrong(f"{what}", lambda stage=stage, sample=sample: stage(sample), *words)
    for what, stage, sample, *words in (
        ("tokenize: a number", stages.tokenize("t", WORDS), {"t": 5}, "field 't' holds int, not a text"),
        ("no UTF-8", stages.tokenize("t", WORDS), {"t": b"\xff\xfe"}, "field 't' holds bytes", "not UTF-8"),
        ("cast: no number", stages.cast("x", "int64"), {"x": b"seven"}, "field 'x' holds 'seven', not a number"),
        ("pad: a scalar", stages.pad("x", 3), {"x": np.float32(1)}, "field 'x' ", "has no length"),
        ("pad: a text", stages.pad("x", 3), {"x": "text"}, "field 'x' ", "has no length"),
        ("pad: one axis", stages.pad("x", 3, axis=1), {"x": TWO}, "float64[2], which has no length along axis 1"),
        ("pad: lengths are there", stages.pad("x", 3, lengths="n"), {"x": TWO, "n": 1}, "has a field 'n' already"),
        ("pad: a mask is there", stages.pad("x", 3, mask="m"), {"x": TWO, "m": 1}, "has a field 'm' already"),
        ("too long", stages.pad("x", 1), {"x": TWO}, "field 'x' has 2 entries, more than length=1: ", "truncate="),
        ("rename to what is there", stages.rename(a="b"), {"a": 1, "b": 2}, "cannot rename to 'b'"),
    )
]


# --- arguments that no stage has

ARGUMENTS = [
    wrong(
        f"{stage}{arguments} {options or ''}",
        lambda s=stage, a=arguments, o=options: getattr(stages, s)(*a, **o),
        word,
    )
    for stage, arguments, options, word in (
        ("decode_jpeg", ("image",), {"mode": "HSV"}, "mode cannot be 'HSV'"),
        ("decode_jpeg", ("image",), {"min_size": 0}, "min_size must be (height, width) in pixels"),
        ("decode_image", ("image",), {"mode": "rgb"}, "mode cannot be 'rgb'"),
        ("decode_image", ("image",), {"max_pixels": 0}, "max_pixels must be at least 1"),
        ("decode_image", ("image",), {"dtype": "int8"}, "dtype cannot be 'int8'"),
        ("resize", ("image",), {}, "either size=(height, width) or shorter="),
        ("resize", ("image", 8), {"shorter": 8}, "either size=(height, width) or shorter="),
        ("resize", ("image", (8, 8, 8)), {}, "size must be (height, width) in pixels"),
        ("resize", ("image", (8, 0)), {}, "size must be (height, width) in pixels"),
        ("resize", ("image",), {"shorter": 0}, "shorter must be at least 1"),
        ("resize", ("image", 8), {"interpolation": "bilinear"}, "interpolation cannot be 'bilinear'"),
        ("center_crop", ("image", -1), {}, "size must be (height, width) in pixels"),
        ("random_crop", ("image", 8), {"padding": -1}, "padding must be at least 0"),
        ("random_resized_crop", ("image", 8), {"scale": (1, 0.5)}, "scale must be (least, largest)"),
        ("random_resized_crop", ("image", 8), {"ratio": (0, 1)}, "ratio must be (least, largest)"),
        ("random_flip", ("image",), {"p": 1.5}, "p must be between 0 and 1"),
        ("scale", ("image",), {"std": 0}, "std must be above 0"),
        ("scale", ("image",), {"std": (1, 1, -1)}, "std must be above 0"),
        ("scale", ("image",), {"mean": ()}, "mean must be a number, or one for each channel"),
        ("scale", ("image",), {"mean": float("nan")}, "mean must be a number, or one for each channel"),
        ("scale", ("image",), {"dtype": "uint8"}, "dtype cannot be 'uint8'"),
        ("scale", ("image",), {"dtype": "no such"}, "is not known to numpy"),
        ("tokenize", ("t", ()), {}, "vocabulary must be a sequence of words"),
        ("tokenize", ("t", "words"), {}, "vocabulary must be a sequence of words"),
        ("tokenize", ("t", ("a", "a")), {}, "has the word 'a' twice"),
        ("build_vocabulary", ("one text", 5), {}, "texts must be a sequence of texts"),
        ("build_vocabulary", (["a"], 0), {}, "size must be at least 1"),
        ("pad", ("x", 0), {}, "length must be at least 1"),
        ("pad", ("x", True), {}, "length must be an integer"),
        ("pad", ("x", 3), {"axis": 0.5}, "axis must be an integer"),
        ("pad", ("x", 3), {"side": "left"}, "side must be 'end' or 'start'"),
        ("pad", ("x", 3), {"truncate": True}, "truncate must be 'end' or 'start'"),
        ("pad", ("x", 3), {"lengths": "n", "mask": "n"}, "lengths and mask must be different fields"),
        ("cast", ("x", "no such"), {}, "is not known to numpy"),
        ("cast", ("x", "datetime64[s]"), {}, "dtype must be of numbers"),
        ("select", (), {}, "takes names of fields"),
        ("drop", (), {}, "takes names of fields"),
        ("rename", (), {}, "for one field or more"),
        ("rename", (), {"a": "x", "b": "x"}, "each new name once"),
        ("text", ("x", 0), {}, "must be at least 1"),
        ("binary", ("x", True), {}, "must be an integer, at least 1"),
        ("ragged", ("x", 2.5), {}, "must be an integer, at least 1"),
        ("ragged", ("x", None), {}, "must be an integer, at least 1"),
        ("ragged", ("x", 4), {"dtype": "object"}, "is not numeric"),
        ("ragged", ("x", 4), {"dtype": "datetime64[s]"}, "is not numeric"),
        ("ragged", ("x", 4), {"dtype": "U3"}, "is not numeric"),
        (
            "tv_transform",
            (abs,),
            {"images": "image", "box_format": "xyxy"},
            "box_format must be one of XYXY, XYWH",
        ),
        ("tv_transform", (abs,), {"images": ()}, "needs the name of a field with an image"),
        ("tv_transform", (abs,), {"images": "i", "masks": "m", "boxes": "m"}, "each field once, got i, m, m"),
    )
] + [
    wrong(
        f"a record of a stage: {record}", lambda record=record: from_record(record), "written by another version"
    )
    for record in ({"stage": "blur", "values": {}}, {"stage": "cast", "values": {"field": "x"}}, {})
]


# --- samples that no batch can hold


def pipe(samples: list[Any], *declared: Any, **options: Any) -> Pipeline:
    """A pipeline of these samples."""
    made = Pipeline(sources.arrays(at=np.arange(len(samples))), shuffle=False, **options)
    made = made.map(lambda sample: samples[int(sample["at"])], id="look up")
    for stage in declared:
        made = made.map(stage)
    return made


def batch(samples: list[Any], *declared: Any) -> Any:
    return next(iter(pipe(samples, *declared).loader(len(samples), 1)))


FIRST = {"x": {"a": np.zeros(2), "b": (1, 2)}}
SAMPLES = [
    *(
        wrong(f"a sample: {what}", lambda sample=sample: pipe([sample]).fields, *words)
        for what, sample, *words in (
            ("a text", {"x": "a text"}, "the field 'x' is str, ", ".map(stages.text('x', most_bytes=...))"),
            ("bytes", {"x": b"bytes"}, "the field 'x' is bytes, ", "stages.binary"),
            ("a list", {"x": {"y": [1, 2]}}, "the field 'x.y' is list, ", "stages.ragged('x.y', most=...)"),
            ("None", {"x": None}, "the field 'x' is NoneType"),
            ("a number for a name", {"x": {1: TWO}}, "the field name 1 in 'x' is no str"),
            ("index", {"index": {"a": TWO}}, "the field name 'index' is taken"),
            ("a path", {"a.b": TWO, "a": {"b": TWO}}, "two fields of a sample have the path 'a.b': rename one"),
        )
    ),
    *(
        bad_record(f"a sample: {type(sample)}", lambda sample=sample: pipe([sample]).fields, "sample 0 ", *words)
        for sample, *words in (
            ((TWO, 1), "returned tuple, not a dict: name its values, by a stage"),
            (TWO, "the last stage returned ndarray, not a dict"),
            ([{"x": TWO}], "the last stage returned list, not a dict: ", "crops[0]"),
        )
    ),
    *(
        bad_record(
            f"a sample of another structure: {what}", lambda s=sample: batch([FIRST, s]), "sample 1 ", *words
        )
        for what, sample, *words in (
            ("less", {"x": {"a": np.zeros(2)}}, "the field 'x.b' is missing"),
            ("more", {"x": {**FIRST["x"], "c": 1}}, "the field 'x.c' is not one of the pipeline's"),
            ("tuple", {"x": {**FIRST["x"], "b": (1,)}}, "'x.b' is a tuple of 1, in other samples a tuple of 2"),
            ("a number", {"x": 3}, "'x' is int, in other samples a dict"),
            ("len", {"x": {**FIRST["x"], "a": np.zeros(3)}}, "'x.a' is float64[3], ", "float64[2]; if its length"),
        )
    ),
    bad_record(
        "a number of another dtype", lambda: batch([{"t": {"n": 1}}, {"t": {"n": 1.5}}]), "'t.n' is float64[]"
    ),
    bad_record(
        "another axis than the first varies",
        lambda: batch([{"edge_index": np.zeros((2, length), np.int64)} for length in (3, 5)]),
        *("only the first axis may vary", "transpose, field='edge_index'"),
    ),
    bad_record("no field of a nested one", lambda: batch([FIRST], stages.select("x.c")), "no field 'x.c'"),
]
TEXT, BINARY, RAGGED = stages.text("x", 4), stages.binary("x", 4), stages.ragged("x", 4)


def ragged(dtype: str) -> Any:
    return stages.ragged("x", 4, dtype=dtype)


DECLARED = [
    bad_record(
        f"a declared field: {what}",
        lambda values=values, stage=stage: batch([{"x": value} for value in values], stage),
        *("sample 1 ", *words),
    )
    for what, stage, values, *words in (
        ("a long text", TEXT, ["ok", "too long"], "'x' has 8 bytes, more than most_bytes=4: take more, or trunc"),
        ("a number for a text", TEXT, ["ok", 3], "field 'x' is int, not a str"),
        ("not UTF-8", TEXT, [b"ok", b"\xff\xfe"], "bytes that are no UTF-8"),
        ("long bytes", BINARY, [b"ok", b"12345"], "'x' has 5 bytes, more than most_bytes=4"),
        ("a text for bytes", BINARY, [b"ok", "text"], "field 'x' is str, not bytes"),
        ("a long array", RAGGED, [TWO, np.zeros(5)], "'x' has 5 entries, more than most=4: ", "truncate='end'"),
        ("another shape", RAGGED, [TWO, np.zeros((2, 2))], "'x' is float64[2, 2], ", " float64[n]"),
        ("another dtype", RAGGED, [TWO, np.zeros(2, "int32")], "'x' is int32[2], ", " float64[n]"),
        ("a scalar", RAGGED, [TWO, np.float64(3)], "float64[], not an array [n, ...]"),
        ("empty", RAGGED, [[1], []], "an empty list, which says neither dtype nor shape", "give ragged shape="),
        ("entries", stages.ragged("x", 4, shape=(2,)), [[[1, 2]], [[1]]], "entries of [1], not [2]"),
        ("256", ragged("uint8"), [[1], [256]], "'x' holds 256, which uint8 cannot hold: ", "a stage"),
        ("-1", ragged("uint64"), [[1], [-1]], "'x' holds -1, which uint64 cannot"),
        ("1.5", ragged("int64"), [[1.0], [2.0, 1.5]], "'x' holds 1.5, which int64 cannot"),
        ("nan", ragged("int32"), [[1.0], [np.nan]], "'x' holds nan, which int32 cannot"),
        ("1e5", ragged("float16"), [[1.0], [1e5]], "'x' holds 100000.0, which float16 cannot"),
        ("1j", ragged("float32"), [[1], [1j]], "'x' holds 1j, which float32 cannot"),
        ("texts", ragged("int64"), [[1], ["1"]], "'x' is of <U1[1], not an array"),
        ("no array", RAGGED, [[[1, 2]], [[1], [2, 3]]], "'x' is no array"),
    )
]


# --- tables

HOMES = sources.arrays(area=np.array([50.0, 80, 65]), city=["Lyon", "Nice", "Lyon"], price=np.arange(3.0))


def fit(**options: Any) -> Callable[[], Any]:
    return lambda: stages.fit(HOMES, **{"target": "price", **options})


def fit_nothing(folder: Path) -> Any:
    (folder / "t.csv").write_text("a,b\n,1\n,2\n")
    source = sources.csv(folder / "t.csv", {"a": "float64", "b": "int64"}, missing="nan")
    return stages.fit(source, numbers=["a", "b"])


def read_other_version() -> Any:
    record = json.loads(json.dumps(as_record(stages.fit(HOMES, numbers=["area"]))))
    record["values"]["blocks"][0][2].append(["ordinal", [["a"]], -1.0])
    return from_record(record)


TABLE = [
    wrong(f"fit: {what}", do, word)
    for what, do, word in (
        ("a target as input", fit(numbers=["area", "price"]), "'price' is a target, not an input"),
        ("a target of another name", fit(target="prize"), "no target 'prize'; did you mean 'price'"),
        ("texts as numbers", fit(numbers=["city"]), "column 'city' holds 'Lyon', which is not a number"),
        ("nothing", fit(numbers=[]), "there is no column to turn into numbers"),
        ("no such column", fit(numbers=["c"]), "has no field 'c' (it has: area, city, price)"),
        ("no value", fit_nothing, "'a' has no value at all"),
        ("a name of the target", fit(numbers=["area"], to="price"), "have a field 'price' already"),
        ("a name of a column", fit(numbers=["area"], to="city"), "have a field 'city' already"),
        ("another version", read_other_version, "another version of ray-ensemble fitted this table"),
        ("the mean of texts", lambda: stages.mean_std(HOMES, "city"), "the field 'city' holds no numbers"),
        ("the mean of nothing", lambda: stages.mean_std(HOMES, "nothing"), "has no field 'nothing' (it has: "),
    )
]

ROWS: list[Mistake] = [*IMAGES, *VALUES, *ARGUMENTS, *SAMPLES, *DECLARED, *TABLE]
