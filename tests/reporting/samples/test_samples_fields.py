"""What a record may hold is shown as what it is, made small, or named; nothing of it breaks the page."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from ensemble.reporting.samples.fields import MOST_FIELDS, PIXELS, describe_record
from ensemble.reporting.samples.reader import Answer, Field, _clean
from ensemble.reporting.samples.targets import digest_values


def describe(value: Any) -> dict[str, Any]:
    (field,) = describe_record({"x": value})
    assert field["name"] == "x" and len(field["text"]) < 2000
    return field


def picture_of(field: dict[str, Any]) -> np.ndarray:
    data = base64.b64decode(field["picture"].partition(",")[2])
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)


def claim_pixels(side: int) -> bytes:
    """A PNG of a few bytes that claims to be huge."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head)) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    return b"\x89PNG\r\n\x1a\n" + chunk


JPEG = cv2.imencode(".jpg", np.random.default_rng(0).integers(0, 255, (600, 400, 3), np.uint8))[1].tobytes()


def test_images_of_all_kinds_become_small_pictures() -> None:
    red = np.zeros((3, 30, 20), np.uint8)
    red[0] = 200
    for value in (red, red.transpose(1, 2, 0), red / np.float32(200), torch.from_numpy(red)):
        field = describe(value)
        pixels = picture_of(field)
        assert pixels.shape == (30, 20, 3) and pixels[0, 0, 2] >= 200 and pixels[0, 0, :2].tolist() == [0, 0]
    field = describe(JPEG)
    assert field["picture"].startswith("data:image/jpeg;base64,") and field["text"] == "400 × 600 pixels"
    assert max(picture_of(field).shape) == PIXELS
    assert max(picture_of(describe(np.zeros((3, 2000, 10), np.uint8))).shape) == PIXELS
    assert picture_of(describe(np.arange(64, dtype=np.float32).reshape(8, 8)))[7, 7] == 255
    assert picture_of(describe(np.full((9, 9), np.nan)))[0, 0] == 0


@pytest.mark.parametrize(
    "data", [JPEG[:100], JPEG[:-5000], claim_pixels(60_000), claim_pixels(40), b"\x89PNG\r\n\x1a\n"]
)
def test_a_damaged_image_or_one_that_claims_to_be_huge_is_named(data: bytes) -> None:
    field = describe(data)
    assert "picture" not in field and field["text"]


def test_series_are_lines_and_the_rest_is_said() -> None:
    field = describe(np.sin(np.arange(5000) / 50))
    (line,) = field["lines"]
    assert 100 < len(line.split()) <= 240 and field["text"] == "float64 [5000], -1 … 1"
    assert len(describe(np.random.default_rng(0).random((9, 300)))["lines"]) == 4
    for value, said in [
        ("<b>x</b>\x1b[31m", "<b>x</b>"),
        (np.float32(0.5), "0.5"),
        (np.array(7), "7"),
        (True, "True"),
        (10**10_000, "an integer"),
        (None, "None"),
        (b"\0\1", "2 bytes"),
        (np.arange(3), "0, 1, 2"),
        (np.zeros((0, 3)), "float64 [0, 3]"),
        (np.zeros((5, 6, 7, 8)), "float64 [5, 6, 7, 8], 0 … 0"),
        (["a", "b"], "a, b"),
        (object(), "object"),
        ("y" * 1000, "y" * 800 + " … 200 more characters"),
    ]:
        assert describe(value)["text"] == said
    many = describe_record({"a": {"b": (1, "two")}, **{str(each): each for each in range(100)}})
    assert [each["name"] for each in many[:2]] == ["a.b.0", "a.b.1"] and len(many) == MOST_FIELDS + 1
    assert describe_record(3) == [{"name": "", "text": "3"}]


def test_a_picture_that_is_none_does_not_reach_the_page() -> None:
    good = describe(JPEG)["picture"]
    script = "data:image/png;base64," + base64.b64encode(b"<svg onload=alert(1)>").decode()
    for uri in (
        "javascript:alert(1)",
        "data:text/html;base64,QQ==",
        "https://example.org/x.png",
        script,
        good + "!",
    ):
        assert "picture" not in _clean(Answer(index=0, fields=[Field("x", "", uri)]))["fields"][0]
    assert _clean(Answer(index=0, fields=[Field("x", "", good)]))["fields"][0]["picture"] == good


def test_the_digest_of_a_target_is_that_of_the_saved_one() -> None:
    for before, saved, task in [
        (np.float32(0.1), np.float64(np.float32(0.1)), "regression"),
        (0.1, np.float64(np.float32(0.1)), "regression"),
        (3, np.int64(3), "classification"),
        (np.float32(1), np.int64(1), "multilabel"),
        (np.array([1.0, np.nan]), np.array([1, -100]), "multilabel"),
        (torch.tensor([2, 3]), np.array([2.0, 3.0]), "gaussian"),
    ]:
        assert digest_values(before, task) == digest_values(saved, task) is not None
    assert digest_values(3, "classification") != digest_values(4, "classification")
    assert digest_values("text", "classification") is None
