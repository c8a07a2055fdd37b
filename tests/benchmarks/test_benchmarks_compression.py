"""`python -m benchmarks compression`: its words, where compression stops paying, and a small run."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_rows import make_row

from benchmarks import models
from benchmarks.__main__ import main
from benchmarks.compression.expected import (
    Crossover,
    claims,
    crossover,
    crossovers,
    show_accuracies,
    show_codecs,
    show_exchanges,
)
from benchmarks.compression.measure import (
    UNLIMITED,
    AccuracyRow,
    CodecRow,
    ExchangeRow,
    SameTimeRow,
    accuracy_at,
    accuracy_rows,
    declare_members,
    exchange_rows,
    mean_bits,
    parse_schemes,
    same_time_rows,
)
from benchmarks.compression.ranks import measure_codecs
from benchmarks.members import MemberResult
from ensemble.bench.charts import write
from ensemble.bench.launch.hosts import unavailable
from ensemble.comm import SingleRank

MIB = 2**20
positive = st.floats(1e-3, 1e3)

# --- words ---------------------------------------------------------------------------------------------------


def test_a_word_says_whether_errors_are_fed_back() -> None:
    words = {
        "qsgd4": "qsgd4",
        "qsgd4+ef": "qsgd4+ef",
        "qsgd4-ef": "qsgd4",
        "onebit": "onebit+ef",
        "onebit-ef": "onebit",
    }
    for word, label in words.items():
        (made,) = (options for name, options in parse_schemes([word]).items() if name == label)
        assert made["error_feedback"] == label.endswith("+ef")
    assert list(parse_schemes(["onebit", "onebit+ef", "fp16"])) == ["none", "onebit+ef", "fp16"]


@pytest.mark.parametrize(
    ("word", "bits"),
    [("none", 32), ("fp16", 16), ("qsgd4", 8 * 260 / 512), ("onebit", 2), ("powersgd", 32 * 4 * 1536 / 2**19)],
)
def test_bits_of_a_value_count_scales_and_means(word: str, bits: float) -> None:
    *_, options = parse_schemes([word]).values()
    assert mean_bits(options, [(1024, 512)]) == pytest.approx(bits)
    assert mean_bits(options, [(100,)]) == 32  # small ones travel as they are
    both = (bits * 2**19 + 32 * 9999) / (2**19 + 9999)
    assert mean_bits(options, [(1024, 512), (9999,)]) == pytest.approx(both)


# --- crossovers ----------------------------------------------------------------------------------------------


@given(positive, positive, st.floats(0.1, 3), st.floats(-3.0, 0.09))
def test_the_crossover_of_power_laws_is_found_exactly(at: float, time: float, steep: float, flat: float) -> None:
    rates = [at / 7, at / 2, at * 3, at * 20]
    points = [(rate, time * (rate / at) ** -steep, time * (rate / at) ** -flat) for rate in rates]
    kind, bps, at_time = crossover(points)
    assert kind == "below"
    assert bps == pytest.approx(at, rel=1e-6) and at_time == pytest.approx(time, rel=1e-6)


@given(
    st.lists(
        st.tuples(st.integers(1, 1000).map(float), positive, positive),
        min_size=2,
        max_size=6,
        unique_by=lambda point: point[0],
    )
)
def test_a_crossover_lies_where_the_sign_changes(points: list[tuple[float, float, float]]) -> None:
    kind, bps, _ = crossover(points)
    fastest = max(points)
    if bps is None:
        assert kind == ("always" if fastest[2] < fastest[1] else "never")
        return
    above = [point for point in points if point[0] >= bps * (1 - 1e-9)]
    assert above and all(packed >= plain * (1 - 1e-6) for _, plain, packed in above)


# --- rows ----------------------------------------------------------------------------------------------------


def said(seconds: float, sent: float) -> dict[str, Any]:
    return {"times": [seconds] * 3, "sent": sent, "wire": sent * 1.05, "error": 0.1}


def found_over(rates: dict[str, tuple[float, float]]) -> list[ExchangeRow]:
    """Exchanges of 4 hosts: by rate the seconds of fp32 and of 4 bits."""
    return [
        row
        for rate, (plain_s, packed_s) in rates.items()
        for row in exchange_rows(
            4, rate, "16 MiB", [{"none": said(plain_s, 24 * MIB), "qsgd4": said(packed_s, 3 * MIB)}] * 4, True
        )
    ]


def test_exchanges_become_rows_of_the_slowest_rank() -> None:
    by_rank = [{"none": said(each, 8e6), "qsgd4": said(each / 10, 1e6)} for each in (1.0, 2.0)]
    plain, packed = exchange_rows(2, "200mbit", "lstm", by_rank, True)
    assert (plain.time_ms, plain.speedup, plain.sent_mb) == (2000, 1, 8)
    assert (packed.time_ms, packed.speedup, packed.ratio) == (200, 10, 8)
    assert packed.reached_bps == pytest.approx(32e6) and packed.wire_mb == pytest.approx(1.05)
    assert next(exchange_rows(2, "200mbit", "lstm", by_rank, False)).wire_mb is None


def test_the_crossover_of_a_message_is_found() -> None:
    (only,) = crossovers(found_over({"200mbit": (1.0, 0.1), UNLIMITED: (0.1, 0.2)}))
    rate = 8 * 24 * MIB * 10 ** (math.log(10) / math.log(20))
    assert only == Crossover(
        hosts=4,
        what="16 MiB",
        scheme="qsgd4",
        kind="below",
        bps=pytest.approx(rate),
        at_ms=pytest.approx(1000 * 10 ** -(math.log(10) / math.log(20))),
    )
    assert only.is_faster == f"below {rate / 1e9:.3g} Gbit/s"


def whole() -> tuple[list[CodecRow], list[ExchangeRow], list[AccuracyRow]]:
    net, trained = models.net_of("cnn"), parse_schemes(["qsgd4", "onebit-ef", "onebit"])
    percents = [90.0, 89.0, 80.0, 88.0, 91.0, 90.0, 80.5, 88.5]
    came = [*(MemberResult(percent) for percent in percents), *[MemberResult(None, "the loss is infinite")] * 4]
    codec = make_row(CodecRow, scheme="qsgd4", form="numba")
    exchanges = found_over({"200mbit": (1.0, 0.1), UNLIMITED: (0.1, 0.2)})
    return [codec], exchanges, accuracy_rows(net, None, trained, came)


def test_accuracy_is_paired_by_seed_and_says_who_failed() -> None:
    by = {row.scheme: row for row in whole()[2]}
    assert by["onebit"].difference is not None and by["onebit"].difference.mean == pytest.approx(-10.25)
    assert by["qsgd4"].seeds == 2
    assert by["qsgd4"].note == "1 of 3 seeds failed: the loss is infinite"
    assert by["none"].bits == 32 and by["onebit"].bits < by["qsgd4"].bits < 6
    found = show_accuracies(whole()[2]).findings
    assert [line.split(",")[0] for line in found if "onebit" in line] == [
        "cnn: onebit at 2.65 bits a value less fp32 is -10.25 points"
    ]


def test_accuracy_is_compared_at_the_time_at_which_fp32_has_finished() -> None:
    net, step_s = models.net_of("cnn"), {"none": 0.2, "qsgd4": 0.1, "onebit+ef": 0.3}
    plain, fast, slow = (40.0, 80.0, 90.0), (30.0, 70.0, 88.0), (60.0, 75.0, 91.0)
    came = [MemberResult(curve[-1], history=curve) for curve in (plain, fast, slow)] * 2
    by = {row.scheme: row for row in same_time_rows(net, None, "1gbit", step_s, came)}
    assert (by["qsgd4"].speedup, by["qsgd4"].trained) == (2.0, 1.0)
    assert by["qsgd4"].difference is not None and by["qsgd4"].difference.mean == pytest.approx(-2)
    assert by["onebit+ef"].trained == pytest.approx(2 / 3)
    assert by["onebit+ef"].difference is not None and by["onebit+ef"].difference.mean == pytest.approx(75 - 90)
    assert by["none"].difference is None
    assert accuracy_at(came[0], 0.5) == 60.0 and accuracy_at(came[0], 1 / 6) == 20.0


def test_a_seed_that_failed_before_is_not_compared_at_the_same_time() -> None:
    net, lost = models.net_of("cnn"), MemberResult(None, "the loss is infinite", history=(10.0,))
    plain, packed = MemberResult(90.0, history=(80.0, 90.0)), MemberResult(88.0, history=(70.0, 88.0))
    # The first seed's 4 bits failed, the second's fp32.
    came = [plain, lost, lost, packed, plain, packed]
    _, row = same_time_rows(net, None, "1gbit", {"none": 0.2, "qsgd4": 0.1}, came)
    assert row.difference is not None and (row.difference.n, row.difference.mean) == (1, -2.0)
    assert row.accuracy is not None and row.accuracy.mean == 88.0 and row.seeds == 2
    assert row.note == (
        "1 of 3 seeds failed: the loss is infinite; 1 not compared, as none failed: the loss is infinite"
    )


def test_what_was_published_of_bits_stands_beside_what_was_measured() -> None:
    (claim,) = claims(whole()[2])
    assert claim.published.startswith("+0.02 to +0.55 points")
    assert (claim.measured, claim.loses) == ("cnn -1.00 ± 0.00 points", "accuracy of cnn")


def test_every_part_is_shown_written_and_drawn(tmp_path: Path) -> None:
    codecs, exchanges, accuracies = whole()
    late = [make_row(SameTimeRow, model="cnn", scheme="qsgd4", accuracy=None, difference=None)]
    shown = show_codecs(codecs) + show_exchanges(exchanges) + show_accuracies(accuracies, late)
    assert all(table for _, table in shown.tables) and len(shown.tables) == 6
    parts = [row["part"] for row in json.loads(json.dumps(shown.rows))]
    assert parts == ["codec", *["exchange"] * 4, "crossover", "claim", *["accuracy"] * 4, "same-time"]
    exchange, accuracy = shown.panels
    assert exchange.title == "Exchange of 16 MiB, ms"
    assert accuracy.title == "cnn on digits: accuracy less that of fp32, points"
    assert [mark.text for mark in exchange.marks] == ["qsgd4"]
    write("Compression", [], shown.panels, tmp_path / "plot.html")
    assert (tmp_path / "plot.html").stat().st_size > 1e6


def test_members_differ_in_what_their_gradients_travel_as_and_in_nothing_else() -> None:
    net = models.net_of("cnn-small")
    options = Namespace(data=None, seeds=2, epochs=1, samples=300, held_out=100)
    declared = declare_members(net, parse_schemes(["qsgd4+ef"]), options)
    made = [declared.identify(number) for number in range(4)]
    assert [(one.seed, (one.compression or {}).get("name")) for one in made] == [
        (0, None),
        (0, "qsgd4"),
        (1, None),
        (1, "qsgd4"),
    ]
    assert {one.workers for one in made} == {2}
    assert made[1].compression is not None and made[1].compression["error_feedback"] is True


# --- runs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_small_run_counts_the_same_bytes_in_code_and_at_the_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = "compression --parts exchanges --hosts 2 --rates unlimited --sizes 1MiB --models none"
    arguments += " --schemes qsgd4,onebit --iterations 2 --rounds 1 --json rows.json --plot -"
    assert main(arguments.split()) == 0
    made = json.loads(Path("rows.json").read_text())
    by = {row["scheme"]: row for row in made if row["part"] == "exchange"}
    assert list(by) == ["none", "qsgd4", "onebit+ef"]
    assert by["none"]["sent_mb"] == pytest.approx(MIB / 1e6, rel=1e-4)
    assert by["qsgd4"]["ratio"] >= 7.5 and by["onebit+ef"]["ratio"] >= 14
    assert by["none"]["error"] < 1e-6 < by["qsgd4"]["error"] < 0.4 < by["onebit+ef"]["error"]
    for row in by.values() if unavailable() is None else ():
        assert row["sent_mb"] < row["wire_mb"] < 1.2 * row["sent_mb"]


def test_codecs_are_timed_and_their_errors_fed_back() -> None:
    schemes = parse_schemes(["onebit+ef", "qsgd4"])
    cases = [{"options": schemes[name], "form": form} for name, form in (("onebit+ef", None), ("qsgd4", "torch"))]
    onebit, qsgd4 = measure_codecs(SingleRank(), {"cases": cases, "size": 2**18, "iterations": 1})
    assert (onebit["ratio"], qsgd4["ratio"]) == (16, 512 * 4 / 260)
    # Fed back, errors of 16 messages cancel; biased ones stay otherwise.
    assert onebit["fed_error"] < onebit["mean_error"] / 2 and onebit["mean_error"] == pytest.approx(
        onebit["error"]
    )
    assert qsgd4["mean_error"] < qsgd4["error"] / 3
    assert all(case[name] > 0 for case in (onebit, qsgd4) for name in ("encode_gbs", "feedback_gbs", "decode_gbs"))


@pytest.mark.slow
def test_members_are_trained_in_each_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = "compression --parts accuracy --train cnn --train-schemes qsgd4,onebit --seeds 1 --epochs 2"
    assert main([*arguments.split(), "--json", "rows.json", "--plot", "plot.html"]) == 0
    made = json.loads(Path("rows.json").read_text())
    for part in ("accuracy", "same-time"):
        own = [row for row in made if row["part"] == part]
        assert [row["scheme"] for row in own[:3]] == ["none", "qsgd4", "onebit+ef"]
        assert all(row["accuracy"] > 40 for row in own)
