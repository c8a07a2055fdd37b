"""What each stage makes of each dtype: the table of docs/reference/stages.md, cell by cell; nothing wraps."""

from __future__ import annotations

import inspect
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import PipelineError, sources, stages

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stages.md"
DTYPES = ("uint8", "int16", "uint16", "float32", "float64", "bool")
MADE: dict[str, Any] = {
    "scale": stages.scale("x"),
    "resize": stages.resize("x", 4),
    "random_resized_crop": stages.random_resized_crop("x", 4),
    "center_crop": stages.center_crop("x", 4),
    "random_crop": stages.random_crop("x", 8, padding=2),
    "random_flip": stages.random_flip("x", 1.0),
    "pad": stages.pad("x", 9),
    "ragged": stages.ragged("x", 9),
    "select": stages.select("x"),
    "rename": stages.rename(x="y"),
    "drop": stages.drop("other"),
    "tv_transform": stages.tv_transform(lambda sample: sample, images="x"),
    **{f"cast to {to}": stages.cast("x", to) for to in ("float32", "uint8")},
    **{name: getattr(stages, name)("x", 99) for name in ("text", "binary")},
    "tokenize": stages.tokenize("x", ["a"]),
    "decode_image": stages.decode_image("x"),
    "decode_jpeg": stages.decode_jpeg("x"),
}


def read_table() -> list[tuple[str, str, str]]:
    """(stage, dtype, what comes of it) of each cell."""
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    start = rows.index(["stage", *DTYPES])
    table = []
    for row in rows[start + 2 :]:
        if len(row) != 1 + len(DTYPES):
            break
        table += [
            (name, dtype, cell)
            for name in re.split("`, `", row[0])
            for dtype, cell in zip(DTYPES, row[1:], strict=True)
        ]
    return table


@pytest.mark.parametrize(("name", "dtype", "cell"), read_table())
def test_a_stage_makes_of_a_dtype_what_the_table_says(name: str, dtype: str, cell: str) -> None:
    if name == "tv_transform":
        pytest.importorskip("torchvision")
    image = np.ones((3, 8, 8), dtype)
    if name == "fit":
        stage, sample = stages.fit(sources.arrays(x=image[:, 0, 0]), to="y"), {"x": image[0, 0, 0]}
    else:
        stage, sample = MADE[name], {"x": image, "other": 0}
    more = (np.random.default_rng(0),) if len(inspect.signature(stage).parameters) > 1 else ()
    if cell == "refused":
        with pytest.raises(PipelineError, match="'x'"):
            stage(sample, *more)
        return
    made = stage(sample, *more)
    assert next(iter(made.values())).dtype == cell if name != "fit" else made["y"].dtype == cell


def test_the_table_has_all_stages() -> None:
    named = {name.partition(" ")[0] for name, _, _ in read_table()}
    assert named == set(stages.__all__) - {"build_vocabulary", "mean_std"}


def scaled(image: Any) -> list[float]:
    return stages.scale("x", 0.5, 0.25)({"x": image})["x"].ravel().tolist()


def test_scale_divides_by_what_the_dtype_says() -> None:
    for dtype, full in (
        ("uint8", 255),
        ("uint16", 65535),
        ("float32", 1),
        ("float64", 1),
        ("float16", 1),
        ("bool", 1),
    ):
        assert scaled(np.array([0, full], dtype).reshape(1, 1, 2)) == [-2, 2]
    for wrong in (
        np.full((1, 1, 2), 200.0),
        np.full((1, 1, 2), -3.0, "f4"),
        *(np.ones((1, 1, 2), of) for of in ("int8", "int64")),
    ):
        with pytest.raises(PipelineError, match=r"'x'.*\.map\("):
            scaled(wrong)


@pytest.mark.parametrize(
    ("value", "to"),
    [
        (300, "uint8"), (-1, "uint16"), (40_000, "int16"), (1.5, "int64"), (np.nan, "int64"), (2, "bool"),
        (2**24 + 1, "float32"), (2**53 + 1, "float64"), (123_456_789.25, "float32"), (2049, "float16"),
        (0.5, "bool"), (1e6, "float16"), ("123456789", "float32"), (1 << 63, "int64"),
        (np.datetime64("2024-01-31T12:00:01"), "float32"),
    ],
)  # fmt: skip
def test_no_cast_loses_digits_or_wraps(value: Any, to: str) -> None:
    for of in (stages.cast("x", to), stages.ragged("x", 3, dtype=to)):
        if not isinstance(value, str | np.datetime64) or "Cast" in type(of).__name__:
            with pytest.raises(PipelineError, match=r"'x'.*cannot hold"):
                of({"x": value if "Cast" in type(of).__name__ else np.array([value])})
    for fits in (0, 1, True, 1.0):
        assert stages.cast("x", to)({"x": fits})["x"] == fits
    if np.dtype(to).kind == "f":
        assert stages.cast("x", to)({"x": 0.1})["x"] == np.dtype(to).type(0.1), "fractions are rounded"


@pytest.mark.parametrize(
    ("value", "dtype"), [(-1, "uint8"), (0.5, "int64"), (np.nan, "int16"), (300, "uint8"), (7, "bool")]
)
def test_pad_fills_with_what_the_dtype_holds(value: float, dtype: str) -> None:
    with pytest.raises(PipelineError, match=r"pad: value.*'x'"):
        stages.pad("x", 3, value)({"x": np.ones(2, dtype)})


def test_a_table_of_text_keeps_the_digits_of_a_declared_dtype(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id\n123456789\n")
    with pytest.raises(PipelineError, match=r"'id'.*123456789"):
        sources.csv(tmp_path / "t.csv", columns={"id": "float32"})[0]
    assert sources.csv(tmp_path / "t.csv")[0]["id"] == 123456789


# --- pictures with a palette, of one bit, of 16 bits


def encode(picture: Any, form: str = "PNG") -> bytes:
    picture.save(held := io.BytesIO(), form, optimize=False)  # which would number a palette anew
    return held.getvalue()


def voc_mask() -> Any:
    image = pytest.importorskip("PIL.Image")
    mask = image.fromarray(np.array([[0, 1, 2, 255]] * 4, np.uint8))
    mask.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0, *[9] * 756, 224, 224, 192])
    assert mask.mode == "P"
    return mask


@pytest.mark.parametrize("form", ["PNG", "GIF", "BMP", "TIFF"])
def test_the_indices_of_a_palette_are_kept_or_it_is_said(form: str) -> None:
    data = encode(voc_mask(), form)
    found = stages.decode_image("m", "MASK")({"m": data})["m"]
    assert (found.dtype, found.shape, found[0, 0].tolist()) == (np.uint8, (1, 4, 4), [0, 1, 2, 255])
    with pytest.raises(PipelineError, match=r"'m'.*'MASK'"):
        stages.decode_image("m", "GRAY")({"m": data})
    with pytest.warns(UserWarning, match=r"palette.*MASK"):
        assert stages.decode_image("m")({"m": data})["m"][:, 0, 1].tolist() == [128, 0, 0]


def test_pictures_of_a_dataset_keep_their_bands() -> None:
    image = pytest.importorskip("PIL.Image")
    with pytest.warns(UserWarning, match=r'mode P .*convert\("RGB"\)'):
        found = sources.dataset([(np.zeros(3), voc_mask())])[0]["label"]
    assert (found.dtype, found[0, 0].tolist()) == (np.uint8, [0, 1, 2, 255])
    deep = np.array([[1, 60_000]], np.uint16)
    cases = [(image.fromarray(deep), "uint16", [1, 60_000]), (image.fromarray(deep > 1), "bool", [False, True])]
    for picture, dtype, values in cases:
        found = sources.dataset([{"m": picture}])[0]["m"]
        assert (found.dtype, found.shape, found[0, 0].tolist()) == (dtype, (1, 1, 2), values)
    for mode, bands in (("LA", 2), ("RGBA", 4), ("YCbCr", 3)):
        assert sources.dataset([{"m": image.new(mode, (5, 4))}])[0]["m"].shape == (bands, 4, 5)
    with pytest.warns(UserWarning, match="CMYK"):
        assert sources.dataset([{"m": image.new("CMYK", (5, 4))}])[0]["m"].shape == (4, 4, 5)


def test_a_mask_of_one_bit_or_of_16_keeps_its_values_and_others_are_refused() -> None:
    image = pytest.importorskip("PIL.Image")
    deep = np.array([[1, 60_000]], np.uint16)
    bit, sixteen = encode(image.fromarray(deep > 1)), encode(image.fromarray(deep))
    assert stages.decode_image("m", "MASK")({"m": bit})["m"].tolist() == [[[0, 1]]]
    assert stages.decode_image("m", "MASK", dtype="uint16")({"m": sixteen})["m"].tolist() == [[[1, 60_000]]]
    assert stages.decode_image("m", "GRAY")({"m": encode(image.new("L", (5, 4), 77), "BMP")})["m"].max() == 77
    grey = image.new("L", (5, 4))
    for data in (
        sixteen,
        encode(image.new("LA", (5, 4))),
        encode(image.new("RGB", (5, 4))),
        encode(grey, "JPEG"),
        b"no",
    ):
        with pytest.raises(PipelineError, match="'m'"):
            stages.decode_image("m", "MASK")({"m": data})
