"""Compressed exchanges between real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.launch.ranks import run_ranks
from ensemble.comm.buckets import assign_buckets
from ensemble.comm.codecs import make_codec
from ensemble.spec.options import COMPRESSIONS, resolve

WORLD = 3
#: Values that are large enough to be compressed, and the bytes of a plain ring all-reduce of them.
LARGE = 300 * 200 + 64 * 32 * 3 * 3 + 120 * 100
PLAIN = 2 * (WORLD - 1) / WORLD * 4 * LARGE


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = str(tmp_path_factory.mktemp("compression"))
    return run_ranks("compression_ranks:together", {"folder": folder}, placement=[0] * WORLD)


@pytest.mark.parametrize("name", ["fp16", "qsgd4", "qsgd8", "onebit", "powersgd"])
def test_all_ranks_have_the_same_bits_and_what_was_sent_and_is_remembered_are_all_gradients(
    three: list[Any], name: str
) -> None:
    """Value by value, through loss scales that change and steps that came to nothing; a resume goes on."""
    schemes = [said["schemes"][name] for said in three]
    assert schemes[0]["digests"] == schemes[1]["digests"] == schemes[2]["digests"]
    for scheme in schemes:
        assert scheme["again"] == scheme["digests"][-1], "a resume goes on with the same bits"
        assert scheme["unused"], "a parameter without a gradient anywhere has none after"
    assert schemes[0]["lost"]["kept"], "the sum of what is remembered, by another number of ranks"
    lost = schemes[0]["lost"]
    assert name == "qsgd8" or lost["gap"] < 5e-6 < 1e-3 < lost["without_memory"]
    for said in three:  # an infinity on one rank is seen by all and leaves no trace
        assert said["overflow"] == dict.fromkeys(("fp16", "bf16", "qsgd2", "onebit", "powersgd"), [True] * 3)


@pytest.mark.more
def test_nothing_that_is_remembered_is_lost_when_there_are_more_ranks(tmp_path: Path) -> None:
    run_ranks("compression_ranks:narrow", {"folder": str(tmp_path)}, placement=[0] * 2)
    three = run_ranks("compression_ranks:wider", {"folder": str(tmp_path)}, placement=[0] * WORLD)
    for name in ("qsgd4", "onebit", "powersgd"):
        lost = three[0][name]["lost"]
        assert lost["gap"] < 5e-6 < 1e-3 < lost["without_memory"]
        shares = [said[name]["share"] for said in three]
        assert shares[0] == shares[1] == shares[2] and max(shares[0]) > 0, "each has an equal part of it"


@pytest.mark.parametrize(
    ("name", "error", "times"),
    [("fp16", 5e-4, 1.98), ("qsgd8", 0.02, 3.8), ("qsgd4", 0.35, 7.5), ("onebit", None, 14.0)],
)
def test_a_sum_is_about_what_it_would_be_in_as_few_bytes_as_the_codec_promises(
    three: list[Any], name: str, error: float | None, times: float
) -> None:
    scheme = three[0]["schemes"][name]
    assert error is None or 0 < scheme["error"] < error
    small = 2 * (WORLD - 1) / WORLD * 4 * (304 + 1)  # the bias, aligned, and its presence
    assert PLAIN / (scheme["sent_bytes"] - small) > times


def test_what_is_too_small_is_left_alone_and_columns_of_its_own_give_each_height_a_bucket() -> None:
    def assign(given: Any, *shapes: tuple[int, ...]) -> list[Any]:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        return assign_buckets(parameters, resolve("", given, COMPRESSIONS), 2**20, 2**20)

    groups = assign("qsgd4", (100, 100), (100,), (99, 100), (200, 100))
    compressed = [[len(p) for p in g.parameters] for g in groups if g.compression is not None]
    plain = [[len(p) for p in g.parameters] for g in groups if g.compression is None]
    assert compressed == [[200, 100]] and plain == [[99, 100]]
    groups = assign({"name": "powersgd", "rank": 4}, (200, 200), (20_000,), (20_000, 2), (64, 64, 3, 3))
    taken = {tuple(p.shape) for g in groups if g.compression is not None for p in g.parameters}
    assert taken == {(200, 200), (64, 64, 3, 3)}, "matrices that a low rank makes smaller"
    shapes = ((200, 100), (64, 64, 3, 3), (128, 64, 3, 3), (150, 100), (100,))
    groups = [g for g in assign({"name": "onebit", "column": "tensor"}, *shapes) if g.compression]
    found = [(g.compression["column"], g.size, make_codec(g.compression).wire_bytes(g.size)) for g in groups]
    assert found == [(100, 15_000, 150 * (8 + 16)), (3, 110_592, 4 * 110_592), (100, 20_000, 200 * (8 + 16))]
