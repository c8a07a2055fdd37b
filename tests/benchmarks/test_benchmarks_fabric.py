"""`python -m benchmarks fabric`: predictions that can be checked on paper, and small runs on real links."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.plain_rows import make_row

from benchmarks import models
from benchmarks.__main__ import main
from benchmarks.fabric import expected, predict, study
from benchmarks.fabric.links import Link, parse_link
from benchmarks.fabric.measure import COLLECTIVES
from benchmarks.fabric.study import CollectiveRow
from benchmarks.launch import hosts
from benchmarks.launch.ranks import run_ranks
from benchmarks.results import format_bytes
from benchmarks.training import TrainingSetup, make_trainer
from ensemble.comm import SingleRank
from ensemble.comm.communicator import count_sent_bytes
from ensemble.spec import SpecError

REASON = hosts.unavailable()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))
MIB = 2**20
GIGABIT = 125e6


@given(st.integers(2, 64), st.integers(1, 2**30))
def test_with_one_rank_a_host_a_ring_takes_what_the_textbook_says(hosts: int, size: int) -> None:
    each = range(hosts)
    for collective, factor in (("all_reduce", 2), ("all_gather", 1)):
        took = predict.seconds(predict.rounds(collective, each, size), each, GIGABIT)
        assert took == pytest.approx(factor * (hosts - 1) / hosts * size / GIGABIT)


@given(st.integers(2, 20), st.sampled_from(COLLECTIVES))
def test_what_ranks_send_adds_up_to_what_a_communicator_counts(world: int, collective: str) -> None:
    size = float(world * 1000)
    sent = sum(
        r.times * size for r in predict.rounds(collective, range(world), size, "") for *_, size in r.messages
    )
    handed = size / world if collective == "all_gather" else size
    expected = world * count_sent_bytes(collective, int(handed), world)  # type: ignore[arg-type]
    if collective == "reduce":  # a small one: every rank but the root sends it whole
        expected = (world - 1) * size
    assert sent == pytest.approx(expected)


@given(st.integers(2, 40))
def test_a_tree_reaches_every_rank_once_from_one_that_has_it(world: int) -> None:
    have = {0}
    for each in predict.rounds("broadcast", range(world), 1.0):
        assert all(a in have for a, *_ in each.messages), "nobody sends what it does not have"
        new = [b for _, b, _ in each.messages]
        assert have.isdisjoint(new) and len(set(new)) == len(new)
        have.update(new)
    assert have == set(range(world))


def test_a_prediction_begins_at_what_was_measured_and_adds_its_latency_to_the_rest() -> None:
    assert predict.with_latency([0.001, 0.1], 0.004) == pytest.approx([0.004, 0.103])
    assert predict.with_latency([0.001, 0.1], 0.0005) == pytest.approx([0.001, 0.1]), "latency is not negative"
    assert study.bus_factor("all_reduce", 4) == 1.5 and study.bus_factor("broadcast", 4) == 1.0


def test_a_link_is_read_from_its_description() -> None:
    link = parse_link("2x4@1gbit")
    assert link == Link(hosts=2, ranks=4, rate="1gbit") and link.name == "1gbit, 2 x 4 ranks"
    assert link.placement == [0] * 4 + [1] * 4
    assert parse_link("3x1@unlimited") == Link(hosts=3, ranks=1)
    for wrong in ("2x2", "1x2@1gbit", "2x0@1gbit", "2x2@quick"):
        with pytest.raises(SpecError, match="1gbit"):
            parse_link(wrong)
    loopback = parse_link("loopback")
    assert loopback.name == "loopback, 4 ranks" and not loopback.is_emulated and loopback.payload_bps is None


def test_where_hosts_cannot_be_made_it_is_said_and_what_there_is_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "unavailable", lambda: "hosts in network namespaces need root")
    said: list[str] = []
    gigabit = Link(hosts=2, ranks=2, rate="1gbit")
    assert study.possible_links([gigabit], said.append) == [Link(ranks=4)]
    assert study.possible_links([Link(ranks=2), gigabit], said.append) == [Link(ranks=2)]
    assert said[0] == "hosts in network namespaces need root; only loopback, 4 ranks"


def test_every_collective_is_right_on_the_loopback() -> None:
    options = {"collectives": list(COLLECTIVES), "sizes": [100, 40_000], "layers": ["plain"]}
    options |= {"iterations": 4, "seconds": 1.0, "rounds": 2}
    by_rank = run_ranks("benchmarks.fabric.measure:measure_collectives", options, placement=[0, 0, 0])
    for cases in by_rank:
        assert [(case["collective"], case["size"], case["wrong"]) for case in cases] == [
            (collective, size, 0) for collective in COLLECTIVES for size in (96, 39_996)
        ]
        assert all(len(case["times"]) == 4 for case in cases)


def test_wrong_results_are_counted() -> None:
    import torch

    from benchmarks.fabric.measure import count_wrong
    from ensemble.comm import SingleRank

    class Silent(SingleRank):
        """Two ranks that never hear of each other."""

        world = 2

    assert count_wrong("broadcast", Silent(), 34, torch.device("cpu")) == 0, "rank 0 has it anyway"
    assert count_wrong("all_reduce", Silent(), 34, torch.device("cpu")) > 30


@pytest.mark.slow  # and not beside others: it compares times
@needs_hosts
def test_a_shaped_link_carries_its_rate(tmp_path: Path) -> None:
    kept, small = tmp_path / "rows.json", "--collectives all_reduce --sizes 4KiB,1MiB --iterations 5"
    links = "--parts collectives --links 2x2@100mbit --backends gloo,hierarchical"
    assert main(["fabric", *links.split(), *small.split(), "--json", str(kept)]) == 0
    rows = json.loads(kept.read_text())
    plain, two_levels = (row for row in rows if row["size"] == MIB)
    assert (plain["backend"], two_levels["backend"]) == ("gloo", "hierarchical")
    assert not any(row["wrong"] for row in rows)
    assert plain["busbw"] * plain["time_us"] * 1e3 == pytest.approx(1.5 * MIB)
    # Neighbouring ranks are on one host, which sends one rank's part of the ring, 2 * 3 / 4 of the message.
    assert plain["size"] / plain["time_us"] * 1.5 == pytest.approx(12.5, rel=0.25), "bytes / us: 100 Mbit/s"
    assert plain["predicted_us"] == pytest.approx(plain["time_us"], rel=0.25)
    assert two_levels["predicted_us"] is None
    assert not [name for name in hosts.namespaces() if f"-{os.getpid()}-" in name]


@pytest.mark.more
def test_training_exchanges_and_takes_its_time() -> None:
    options = {"nets": {"resnet50": 0.2}, "steps": 2}
    trained = run_ranks("benchmarks.fabric.measure:measure_training", options, placement=[0, 0])
    for nets in trained:
        assert len(nets["resnet50"]["alone"]) == len(nets["resnet50"]["together"]) == 2
        assert min(nets["resnet50"]["alone"]) >= 0.2, "its step takes as long as is emulated"
    (row,) = study.training_rows(Link(ranks=2), "gloo", trained)
    assert row.efficiency == pytest.approx(row.alone_ms / row.step_ms) and row.parameters == 25_557_032


@pytest.mark.more
def test_the_command_writes_rows_and_keeps_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, record = tmp_path / "rows.json", tmp_path / "record.json"
    small = "--links loopback --parts collectives --collectives all_reduce,broadcast --sizes 4KiB,64KiB"
    small += " --iterations 3 --backends gloo"
    assert main(["fabric", *small.split(), "--json", str(rows), "--record", str(record)]) == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("collectives")
    found = json.loads(rows.read_text())
    assert len(lines) == len(found) == 4
    kept = json.loads(record.read_text())
    assert kept["rows"] == found and kept["seconds"] > 0 and " cores of " in kept["machine"]
    assert kept["command"].startswith("python -m benchmarks fabric")


@pytest.mark.slow
def test_the_command_studies_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = "--model lstm-small --hidden 8 --embed 8 --workers 1,2 --scalings strong --step-ms 200 --steps 3"
    assert main(["fabric", "--parts", "workers", *small.split(), "--json", "rows.json"]) == 0
    found = json.loads((tmp_path / "rows.json").read_text())
    one, two = (row for row in found if row["part"] == "workers")
    assert (one["workers"], two["workers"], two["compute"]) == (1, 2, "200 ms")
    # Timed waits need no processor: two workers wait half as long each.
    assert one["step_ms"] >= 200 and two["step_ms"] >= 100
    assert two["step_ms"] == pytest.approx(two["compute_ms"] + two["sync_ms"])
    assert one["sent_mb"] == 0 < two["sent_mb"]
    assert "strong scaling, compute 200 ms: 2 workers train" in capsys.readouterr().err


def test_an_emulated_worker_waits_its_part_of_the_batch_and_still_steps() -> None:
    setup = TrainingSetup(net=models.net_of("lstm-small", hidden=4, embed=4), data=None, batch_size=16)
    trainer = make_trainer(setup, "fp32", SingleRank())
    half = setup.batches(0, 2)[0]
    assert len(half["index"]) == 8 and half.global_size == 16
    assert 0.3 <= trainer.step(half, emulated_s=0.6)[0] < 0.6


def collective(size: int, backend: str = "gloo", **more: Any) -> CollectiveRow:
    usual = {"link": "1gbit", "hosts": 2, "rate": "1gbit", "collective": "all_reduce", "wrong": 0, **more}
    return make_row(CollectiveRow, size=size, backend=backend, **usual)


def test_findings_say_who_wins_and_what_is_wrong() -> None:
    us = {"gloo": 900.0, "hierarchical": 300.0}
    rows = [collective(size, name, time_us=us[name]) for name in us for size in (4096, MIB)]
    said = list(expected.judge_collectives([*rows, collective(4096, collective="broadcast", wrong=3)]))
    assert said == [
        "WRONG: 3 elements of broadcast 4 KiB, gloo, 1gbit",
        "all_reduce by hierarchical against gloo's, 1gbit: 3.00 x at 4 KiB, 3.00 x at 1 MiB",
    ]
    assert [format_bytes(size) for size in (0, 100, 1536, 25 * MIB)] == ["none", "100 B", "1.5 KiB", "25 MiB"]
