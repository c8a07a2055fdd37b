"""Codecs: what is packed and unpacked, without any communication."""

from __future__ import annotations

import itertools
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import codec_child
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples
from torch import Tensor

from ensemble.comm.codecs import Codec, make_codec
from ensemble.comm.codecs.common import choose_form
from ensemble.spec.options import CODECS, COMPRESSIONS, resolve
from pipelines.providers import Provider

VARIANTS: list[dict[str, Any]] = [{"name": "fp16"}, {"name": "bf16"}]
VARIANTS += [{"name": f"qsgd{bits}", "norm": norm} for bits in (2, 4, 8, 16) for norm in ("max", "l2")]
ONEBIT = ({"threshold": "mean"}, {"threshold": "zero"}, {"column": 256}, {"column": 3})
VARIANTS += [{"name": "qsgd4", "bucket": 32}, *({"name": "onebit", **options} for options in ONEBIT)]
VARIANTS.append({"name": "onebit", "column": 100, "threshold": "zero"})
#: Those with groups, and with more than one form: odd columns of 1-bit SGD are packed in plain torch only.
PACKED = [options for options in VARIANTS[2:] if options.get("column") not in (3, 100)]


def said(options: Any) -> str:
    return "-".join(map(str, options.values())) if isinstance(options, dict) else str(options)


every = pytest.mark.parametrize("options", VARIANTS, ids=said)
#: Numbers of values: one, less than a group, just less, one, several and a part. Each variant has three of them.
SIZES = itertools.cycle([(1, 127, 5003), (3, 512, 1000), (31, 600, 5003)])


def normal(n: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale


def encode(codec: Codec, values: Tensor, key: int = 0, error: Tensor | None = None) -> Tensor:
    wire = torch.full((codec.wire_bytes(values.numel()),), 0x55, dtype=torch.uint8)
    codec.encode(values, wire, key=key, error=error)
    return wire


def decode(codec: Codec, wire: Tensor, n: int) -> Tensor:
    out = torch.full((n,), 7.0)
    codec.decode(wire, out)
    return out


def round_trip(codec: Codec, values: Tensor, key: int = 0) -> Tensor:
    return decode(codec, encode(codec, values, key), values.numel())


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


def test_packed_sizes_are_those_of_the_formula() -> None:
    n = 2**22
    many = {"fp16": 2 * n, "qsgd2": n // 128 * 36, "qsgd4": n // 512 * 260, "onebit": n // 64 * 16}
    many |= {"qsgd8": n // 512 * 516, "qsgd16": n // 8192 * (4 + 2 * 8192)}
    sized: list[Any] = [({"name": name}, n, size) for name, size in many.items()]
    sized += [({"name": "qsgd4"}, 0, 0), ({"name": "qsgd4"}, 513, 260 + 5), ({"name": "onebit"}, 65, 16 + 12)]
    sized += [
        ({"name": "qsgd8", "bucket": 32}, 33, 36 + 5),
        ({"name": "qsgd2"}, 129, 36 + 5),
        ({"name": "bf16"}, 3, 6),
    ]
    columns = ((9216, 2 * 9216, 2 * (8 + 4 * 288)), (32, 64, 24), (1, 5, 60), (3, 9, 36))
    sized += [({"name": "onebit", "column": column}, n, size) for column, n, size in columns]
    for options, n, size in sized:
        assert make_codec(options).wire_bytes(n) == size, (options, n)


@every
def test_a_wire_is_the_wires_of_its_pieces_at_any_address(options: dict[str, Any]) -> None:
    codec = make_codec(options)
    first, second = 3 * codec.granularity, codec.granularity + 5
    wires = [encode(codec, normal(n, seed=n)) for n in (first, second)]
    whole = decode(codec, torch.cat(wires), first + second)
    parts = [decode(codec, wire, n) for wire, n in zip(wires, (first, second), strict=True)]
    assert bits(whole) == bits(torch.cat(parts))
    for form in ("numba", "torch"):  # at an odd address
        odd, values = make_codec(options, form), normal(700)
        wire = torch.zeros(odd.wire_bytes(700) + 3, dtype=torch.uint8)[3:]
        odd.encode(values, wire, key=1)
        assert wire.tolist() == encode(odd, values, 1).tolist()
        assert bits(decode(odd, wire, 700)) == bits(decode(odd, wire.clone(), 700))


@pytest.mark.parametrize(
    ("options", "n"), [(o, n) for o, sizes in zip(PACKED, SIZES, strict=False) for n in sizes], ids=said
)
def test_all_forms_write_the_same_bits(options: dict[str, Any], n: int) -> None:
    values = codec_child.values_of(n)
    plain, compiled = (codec_child.outcome(options, form, values) for form in ("torch", "numba"))
    assert all(map(torch.equal, plain, compiled))
    *_, out, added = compiled
    finite = out != codec_child.NOT_FINITE
    assert torch.equal(added[finite], 1 + out[finite])


def test_without_numba_torch_is_taken_and_a_warning_names_the_extra(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    choose_form.cache_clear()
    kernels = [make_codec({"name": name})._kernels(normal(9)) for name in ("qsgd4", "onebit")]  # type: ignore
    choose_form.cache_clear()
    assert [module.__name__.rpartition("_")[2] for module in kernels] == ["torch"] * 2
    assert caplog.text.count("pip install 'ray-ensemble[compression]'") == 1


@pytest.mark.parametrize("name", ["qsgd4", "onebit"])
def test_threads_and_forked_processes_pack_the_same_bits(name: str) -> None:
    codec, values = make_codec({"name": name}), normal(100_000)
    wanted = encode(codec, values, 3).numpy().tobytes()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: encode(codec, values, 3).numpy().tobytes(), range(8))) == {wanted}
    wire = torch.zeros(len(wanted), dtype=torch.uint8).share_memory_()
    child = os.fork()
    if child == 0:
        codec.encode(values, wire, key=3)  # and nothing of torch's own, whose threads are not in the child
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and wire.numpy().tobytes() == wanted


@every
def test_the_error_is_what_was_lost_to_the_bit_and_a_key_gives_the_same_bits(options: dict[str, Any]) -> None:
    codec, values = make_codec(options), normal(3000, scale=1e-2)
    error = torch.empty(3000)
    wire = encode(codec, values, 5, error)
    assert bits(error) == bits(values - decode(codec, wire, 3000))
    in_place = values.clone()
    assert encode(codec, in_place, 5, in_place).tolist() == wire.tolist() and bits(in_place) == bits(error)
    other = encode(codec, values, 6).tolist() != encode(codec, values, 5).tolist()
    assert other is codec.name.startswith("qsgd")


@pytest.mark.parametrize("keys", [range(400), [k << 32 for k in range(400)], [-k for k in range(400)]])
def test_draws_of_different_keys_and_places_are_unrelated(keys: Any) -> None:
    codec, n = make_codec({"name": "qsgd2"}), 512
    values = torch.full((n,), 0.5)
    values[::128] = 1.0  # the norm: the others are drawn with equal chances
    drawn = torch.stack([round_trip(codec, values, key) for key in keys]).double()
    loose = torch.ones(n, dtype=torch.bool)
    loose[::128] = False
    table = drawn[:, loose] - 0.5
    for a, b in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table[:, 64:], table[:, :-64])):
        assert abs(float((a * b).mean())) * 4 < 5 / math.sqrt(a.numel())
    assert abs(float(table.mean())) * 2 < 5 / math.sqrt(table.numel())


@pytest.mark.parametrize(
    "options", [{"name": "qsgd2", "norm": "l2"}, {"name": "qsgd4", "bucket": 32}, {"name": "qsgd8"}], ids=said
)
def test_qsgd_is_unbiased(options: dict[str, Any]) -> None:
    codec, n, draws = make_codec(options), 704, 2000
    values, bits_each = normal(n), int(codec.name[-1])
    mean = torch.zeros(n, dtype=torch.float64)
    for key in range(draws):
        mean += round_trip(codec, values, key) / draws
    order = 2 if options.get("norm") == "l2" else math.inf
    norms = [float(torch.linalg.vector_norm(v.double(), ord=order)) for v in values.split(codec.granularity)]
    step = max(norms) / (2 ** (bits_each - 1) - 1)
    off = (mean - values) * values.sign()
    # A draw between two levels has a standard deviation of half a step at most.
    assert float(off.abs().max()) <= 5 * step / 2 / math.sqrt(draws)
    assert abs(float(off.mean())) <= 5 * step / 2 / math.sqrt(draws * n)  # and nothing is drawn towards zero


@pytest.mark.parametrize(("bits_each", "bucket"), [(2, 512), (4, 32), (8, 128), (4, 512), (2, 32)])
def test_qsgd_keeps_the_variance_bound_of_its_theorem(bits_each: int, bucket: int) -> None:
    codec, draws = make_codec({"name": f"qsgd{bits_each}", "norm": "l2", "bucket": bucket}), 100
    levels = 2 ** (bits_each - 1) - 1
    for values in (normal(bucket), torch.ones(bucket), torch.eye(bucket)[0] + 1e-3):
        lost = sum(float((round_trip(codec, values, key) - values).square().sum()) for key in range(draws)) / draws
        assert lost <= min(bucket / levels**2, math.sqrt(bucket) / levels) * float(values.square().sum())


@pytest.mark.parametrize(("name", "bound"), [("qsgd2", 1.15), ("qsgd4", 0.2), ("qsgd8", 0.011), ("onebit", 0.61)])
def test_the_relative_error_of_a_normal_vector(name: str, bound: float) -> None:
    values = normal(2**16)
    error = float((round_trip(make_codec({"name": name}), values) - values).norm() / values.norm())
    assert 0.8 * bound < error < bound


def test_onebit_unpacks_to_the_means_of_its_classes_and_a_cast_overflows_where_fp16_does() -> None:
    largest = torch.tensor([65504.0, 65519.0, 65520.0, -1e6])
    assert round_trip(make_codec({"name": "fp16"}), largest).tolist() == [65504.0, 65504.0, math.inf, -math.inf]
    values = torch.tensor([1.0, 2.0, 3.0, 10.0] * 16)
    assert round_trip(make_codec({"name": "onebit"}), values).tolist() == [2.0, 2.0, 2.0, 10.0] * 16
    zero = make_codec({"name": "onebit", "threshold": "zero"})
    assert round_trip(zero, torch.tensor([-1.0, -3.0, 4.0, 0.0])).tolist() == [-2.0, -2.0, 2.0, 2.0]


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=300),
    st.sampled_from(VARIANTS),
    st.integers(-(2**63), 2**64),
)
@examples(5 * len(VARIANTS))
def test_any_values_go_through(numbers: list[float], options: dict[str, Any], key: int) -> None:
    codec, values = make_codec(options), torch.tensor(numbers)
    error = torch.empty_like(values)
    wire = encode(codec, values, key, error)
    out = decode(codec, wire, len(numbers))
    assert bits(error) == bits(values - out)
    groups = zip(values.split(max(codec.granularity, 1)), out.split(max(codec.granularity, 1)), strict=True)
    # The smallest numbers of a cast (2^-24 apart in fp16, 2^-133 in bf16) may be half of that away from a value.
    cast = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(codec.name)
    nearest = 0.0 if cast is None else torch.finfo(cast).smallest_normal * torch.finfo(cast).eps / 2
    for given_values, got in groups:
        # No value leaves its group's range by more than a level: with 2 bits and the Euclidean norm that is all.
        assert float(got.abs().max()) <= float(given_values.double().norm()) * 1.01 + nearest


@pytest.mark.parametrize("options", [o for o in VARIANTS if said(o) not in ("qsgd2-l2", "qsgd4-l2")], ids=said)
def test_what_is_sent_and_the_residual_are_the_sum_of_gradients(options: dict[str, Any]) -> None:
    codec, n, steps, largest = make_codec(options), 1500, 200, 0.0
    residual, (sent, wanted) = torch.zeros(n), torch.zeros(2, n, dtype=torch.float64)
    for step in range(steps):
        gradient = normal(n, seed=step, scale=1e-2) + 1e-3
        wanted += gradient
        residual += gradient
        sent += decode(codec, encode(codec, residual, step, residual), n)
        largest = max(largest, float(residual.abs().max()))
    assert largest < 10.0  # what is kept back does not grow without end
    assert float((sent + residual - wanted).abs().max()) < steps * 2**-23 * max(largest, 0.1)


@every
def test_extreme_numbers_zeros_and_no_values_stay_and_harm_no_other_group(options: dict[str, Any]) -> None:
    cases = [(1, 0, math.nan), (1, 0, math.inf), (40, 39, math.nan), (40, 20, -math.inf)]
    cases += [(1100, 0, math.nan), (1100, 1099, math.inf), (1100, 550, -math.inf)]
    for n, place, bad in cases:
        values = normal(n)
        values[place] = bad
        codec, error = make_codec(options), torch.full((n,), math.nan)
        out = decode(codec, encode(codec, values, 3, error), n)
        group = place // codec.granularity
        for number, part in enumerate(out.split(codec.granularity)):
            assert bool(part.isfinite().all()) is (number != group)
        assert bool(error.isfinite().all()) and float(error.split(codec.granularity)[group].abs().max()) == 0
    for scale in (1.7e37, 1e-30, 1e-36, 1e-44) if "qsgd" in options["name"] else ():
        values, error = torch.full((100,), scale), torch.empty(100)
        out = decode(codec, encode(codec, values, 3, error), 100)
        assert bool(out.isfinite().all()) and bits(error) == bits(values - out)
    if "qsgd" in options["name"]:
        assert not round_trip(codec, torch.full((100,), 1.8e38)).isfinite().any()
    values, error = torch.zeros(700), torch.full((700,), 1.0)
    values[1::2] = -0.0
    out = decode(codec, encode(codec, values, 3, error), 700)
    assert set(out.tolist()) == {0.0} and set(error.tolist()) == {0.0}
    nothing = torch.empty(0)
    wire = encode(codec, nothing, 0, nothing.clone())
    codec.decode(wire, nothing, add=True)
    assert wire.numel() == 0


@pytest.mark.parametrize("name", ["fp16", "qsgd4", "onebit"])
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    codec, values = make_codec({"name": name}), torch.zeros(100)
    wire = torch.zeros(codec.wire_bytes(100), dtype=torch.uint8)
    wrong: list[dict[str, Any]] = [{"wire": wire[:-1]}, {"values": values.double()}, {"error": torch.zeros(99)}]
    for options in (*wrong, {"values": torch.zeros(200)[::2]}):
        with pytest.raises(ValueError, match=r"must be|strided"):
            codec.encode(**({"values": values, "wire": wire, "error": None} | options), key=0)
    with pytest.raises(ValueError, match="must be contiguous fp32"):
        codec.decode(wire, values.half())


class Halves(Codec):
    def __init__(self, depth: int) -> None:
        self.name, self.granularity = f"halves-{depth}", depth


def test_a_codec_of_another_distribution_is_named_like_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = Provider("codecs", "halves", f"{__name__}:Halves", "halves 1.0")
    monkeypatch.setattr(CODECS, "_foreign", ({"halves": halves}, []))
    options = resolve("compression", {"name": "halves", "depth": 3}, COMPRESSIONS)
    assert options == {"name": "halves", "error_feedback": False, "min_size": 10_000, "depth": 3}
    assert make_codec(options).name == "halves-3"
