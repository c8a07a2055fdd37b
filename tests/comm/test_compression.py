"""Compressed exchanges between real processes."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of three ranks that go on from what two remembered."""
    folder = str(tmp_path_factory.mktemp("grown"))
    run_ranks("compression_ranks:narrow", {"folder": folder}, placement=[0] * 2)
    return run_ranks("compression_ranks:wider", {"folder": folder}, placement=[0] * WORLD)


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
    lost = schemes[0]["lost"]
    assert name == "qsgd8" or lost["gap"] < 5e-6 < 1e-3 < lost["without_memory"]


@pytest.mark.more
@pytest.mark.parametrize("name", ["qsgd4", "onebit", "powersgd"])
def test_nothing_that_is_remembered_is_lost_when_there_are_more_ranks(grown: list[Any], name: str) -> None:
    lost = grown[0][name]["lost"]
    assert lost["gap"] < 5e-6 < 1e-3 < lost["without_memory"]
    shares = [said[name]["share"] for said in grown]
    assert shares[0] == shares[1] == shares[2] and max(shares[0]) > 0, "each has an equal part of it"


@pytest.mark.parametrize(
    ("name", "error", "times"),
    [("fp16", 5e-4, 1.98), ("qsgd8", 0.02, 3.8), ("qsgd4", 0.35, 7.5), ("onebit", None, 14.0)],
)
def test_a_sum_is_about_what_it_would_be_in_as_few_bytes_as_the_codec_promises(
    three: list[Any], name: str, error: float | None, times: float
) -> None:
    """A message of a tenth of a megabyte has its padding and presences with it."""
    scheme = three[0]["schemes"][name]
    assert error is None or 0 < scheme["error"] < error
    small = 2 * (WORLD - 1) / WORLD * 4 * (304 + 1)  # the bias, aligned, and its presence
    assert PLAIN / (scheme["sent_bytes"] - small) > times


def test_an_infinity_on_one_rank_is_seen_by_all_and_leaves_no_trace(three: list[Any]) -> None:
    for said in three:
        assert said["overflow"] == dict.fromkeys(("fp16", "bf16", "qsgd2", "onebit", "powersgd"), [True] * 3)


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def test_small_tensors_are_left_alone() -> None:
    given = parameters((100, 100), (100,), (99, 100), (200, 100))
    groups = assign_buckets(given, resolve("", "qsgd4", COMPRESSIONS), 2**20, 2**20)
    compressed = [[len(p) for p in g.parameters] for g in groups if g.compression is not None]
    plain = [[len(p) for p in g.parameters] for g in groups if g.compression is None]
    assert compressed == [[200, 100]] and plain == [[99, 100]]


def test_low_rank_takes_only_matrices_that_it_makes_smaller() -> None:
    given = parameters((200, 200), (20_000,), (20_000, 2), (64, 64, 3, 3))
    groups = assign_buckets(given, resolve("", {"name": "powersgd", "rank": 4}, COMPRESSIONS), 2**20, 2**20)
    taken = {tuple(p.shape) for g in groups if g.compression is not None for p in g.parameters}
    assert taken == {(200, 200), (64, 64, 3, 3)}


def test_columns_of_its_own_give_each_height_a_bucket() -> None:
    given = parameters((200, 100), (64, 64, 3, 3), (128, 64, 3, 3), (150, 100), (100,))
    compression = resolve("", {"name": "onebit", "column": "tensor"}, COMPRESSIONS)
    groups = [(g.size, g.compression) for g in assign_buckets(given, compression, 2**20, 2**20) if g.compression]
    found = [(how["column"], size, make_codec(how).wire_bytes(size)) for size, how in groups]
    assert found == [(100, 15_000, 150 * (8 + 16)), (3, 110_592, 4 * 110_592), (100, 20_000, 200 * (8 + 16))]
