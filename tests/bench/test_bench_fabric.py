"""`ensemble bench fabric`: predictions that can be checked on paper, and small runs on real links."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_rows import make_row

from ensemble.bench.fabric import expected, figures, measure, predict, study
from ensemble.bench.fabric.links import Link, parse_link
from ensemble.bench.fabric.predict import Message
from ensemble.bench.fabric.rows import CollectiveRow, FusionRow, TrainingRow
from ensemble.bench.launch import hosts
from ensemble.bench.launch.ranks import contiguous, interleaved, run_ranks
from ensemble.bench.results import format_bytes
from ensemble.bench.step_model import exchange_end
from ensemble.cli import parser as cli
from ensemble.comm import Communicator
from ensemble.comm.communicator import count_sent_bytes
from ensemble.comm.hosts import Groups, group_by_host
from ensemble.spec import SpecError

REASON = hosts.unavailable()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))
MIB = 2**20
GIGABIT = 125e6
ROOT = Path(__file__).parents[2]

# --- predictions -------------------------------------------------------------------------------------------------


def groups_of(placement: list[int]) -> Groups:
    return group_by_host([str(host) for host in placement])


@given(st.integers(2, 64), st.integers(1, 2**30))
def test_with_one_rank_a_host_a_ring_takes_what_the_textbook_says(hosts: int, size: int) -> None:
    each = range(hosts)
    for collective, factor in (("all_reduce", 2), ("all_gather", 1)):
        took = predict.seconds(predict.rounds(collective, each, size), each, GIGABIT)
        assert took == pytest.approx(factor * (hosts - 1) / hosts * size / GIGABIT)


@given(st.integers(2, 8), st.integers(1, 8))
def test_ranks_dealt_out_over_hosts_send_every_message_of_a_ring_over_a_link(number: int, each: int) -> None:
    near, far = contiguous(number * each, number), interleaved(number * each, number)
    ring = predict.rounds("all_reduce", range(number * each), 1.0)
    assert predict.wire_bytes(ring, far) == pytest.approx(each * predict.wire_bytes(ring, near))
    for placement in (near, far):
        two_levels = predict.hierarchical_rounds(groups_of(placement), 1.0)
        assert predict.wire_bytes(two_levels, placement) == pytest.approx(2 * (number - 1) / number)


@given(st.integers(2, 20), st.sampled_from(predict.COLLECTIVES))
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


def test_known_figures_are_predicted() -> None:
    four = range(4)
    flat = predict.rounds("all_reduce", four, 16 * MIB)
    assert predict.seconds(flat, four, GIGABIT) == pytest.approx(0.201, rel=0.01)
    eight, ring = interleaved(8, 2), predict.rounds("all_reduce", range(8), 16 * MIB)
    assert predict.seconds(ring, eight, GIGABIT) == pytest.approx(0.939, rel=0.01), "983 ms were measured"
    two = predict.hierarchical_rounds(groups_of(eight), 16 * MIB)
    assert predict.seconds(two, eight, GIGABIT) == pytest.approx(0.134, rel=0.01)
    assert predict.seconds(two, eight, GIGABIT, predict.PredictedMachine(1e9)) > 0.18, (
        "206 ms: the processor moves what stays on a host"
    )
    assert Link(hosts=2, rate="1gbit").payload_bps == pytest.approx(GIGABIT * 1448 / 1514)
    assert Link(hosts=2, rate="1gbit", mtu=9000).payload_bps == pytest.approx(GIGABIT * 8948 / 9014)


def test_a_prediction_begins_at_what_was_measured_and_adds_its_latency_to_the_rest() -> None:
    assert predict.with_latency([0.001, 0.1], 0.004) == pytest.approx([0.004, 0.103])
    assert predict.with_latency([0.001, 0.1], 0.0005) == pytest.approx([0.001, 0.1]), "latency is not negative"
    assert predict.bus_factor("all_reduce", 4) == 1.5 and predict.bus_factor("broadcast", 4) == 1.0


@given(
    st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_step_is_never_shorter_than_its_parts(
    given: list[tuple[float, float, float]], tail: float, busy: float, delay: float
) -> None:
    ready = itertools.accumulate(each for each, *_ in given)
    messages = [Message(at, *rest) for at, (_, *rest) in zip(ready, given, strict=True)]
    took = predict.step_seconds(messages, tail, busy)
    alone = messages[-1].ready_s + tail
    moved = sum(message.moving_s for message in messages)
    assert took >= max(alone, sum(message.link_s for message in messages) + tail) - 1e-9
    assert predict.step_seconds(messages, tail, 1.0) >= alone + moved - 1e-9, (
        "all cores compute: nothing is hidden"
    )
    later = [dataclasses.replace(message, link_s=message.link_s + delay) for message in messages]
    assert predict.step_seconds(later, tail, busy) >= took - 1e-9


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_buckets_are_exchanged_one_after_the_other_each_once_it_is_ready(
    buckets: list[tuple[float, float]],
) -> None:
    end = 0.0
    for ready, cost in buckets:
        end = max(end, ready) + cost
    assert exchange_end(*np.array(buckets).T) == pytest.approx(end)


def test_each_round_between_hosts_takes_the_delay() -> None:
    ring = predict.rounds("all_reduce", range(4), 4e6)
    near, far = contiguous(4, 2), [0] * 4
    machine = predict.PredictedMachine()
    plain, late = (predict.seconds(ring, near, GIGABIT, machine, delay_s) for delay_s in (0.0, 0.005))
    assert late == pytest.approx(plain + 6 * 0.005)
    assert predict.seconds(ring, far, GIGABIT, machine, 0.005) == 0.0
    assert [predict.message_delay(name, 0.005) for name in ("gloo", "horovod-mpi")] == [0.01, 0.005]


# --- what is asked for -------------------------------------------------------------------------------------------


def test_an_emulated_link_is_read_from_its_description() -> None:
    link = parse_link("hosts=2, ranks=4,rate=1gbit,place=interleaved")
    assert link == Link(hosts=2, ranks=4, rate="1gbit", place="interleaved")
    assert link.placement == [0, 1] * 4 and link.name == "1gbit, 2 x 4 ranks interleaved"
    assert parse_link("rate=10gbit,mtu=9000").name == "10gbit, 2 x 2 ranks, mtu 9000"
    assert parse_link("rate=1gbit,delay=500us").name == "1gbit + 0.5 ms, 2 x 2 ranks"
    with pytest.raises(SpecError, match="5ms"):
        parse_link("delay=5")
    assert Link().name == "loopback, 4 ranks" and not Link().is_emulated and Link().payload_bps is None


def test_where_hosts_cannot_be_made_it_is_said_and_what_there_is_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "unavailable", lambda: "hosts in network namespaces need root")
    said: list[str] = []
    gigabit = Link(hosts=2, ranks=2, rate="1gbit")
    assert study.possible_links([gigabit], said.append) == [Link(ranks=4)]
    assert study.possible_links([Link(ranks=2), gigabit], said.append) == [Link(ranks=2)]
    assert said[0] == "hosts in network namespaces need root; only loopback, 4 ranks"


# --- small runs --------------------------------------------------------------------------------------------------


def test_every_collective_is_right_on_the_loopback() -> None:
    options = {"collectives": list(predict.COLLECTIVES), "sizes": [100, 40_000], "layers": ["plain"]}
    options |= {"iterations": 4, "seconds": 1.0, "rounds": 2, "placement": [0, 0, 0], "interface": "lo"}
    by_rank = run_ranks("ensemble.bench.fabric.measure:measure_collectives", options, placement=[0, 0, 0])
    for said in by_rank:
        assert said["moved_bps"] > 1e6
        assert [(case["collective"], case["size"], case["wrong"]) for case in said["cases"]] == [
            (collective, size, 0) for collective in predict.COLLECTIVES for size in (96, 39_996)
        ]
        assert all(len(case["times"]) == 4 for case in said["cases"])


def test_wrong_results_are_counted() -> None:
    import torch

    from ensemble.bench.fabric.measure import count_wrong
    from ensemble.comm import SingleRank

    class Silent(SingleRank):
        """Two ranks that never hear of each other."""

        world = 2

    assert count_wrong("broadcast", Silent(), 34, torch.device("cpu")) == 0, "rank 0 has it anyway"
    assert count_wrong("all_reduce", Silent(), 34, torch.device("cpu")) > 30


@pytest.mark.slow  # and not beside others: it compares times
@needs_hosts
def test_a_shaped_link_carries_its_rate_and_the_bytes_that_were_predicted() -> None:
    link = Link(hosts=2, ranks=2, rate="100mbit", place="interleaved")
    only: dict[str, Any] = {
        "collectives": ["all_reduce"],
        "parts": ["collectives"],
        "machine": predict.PredictedMachine(),
    }
    backends = ["gloo", "hierarchical"]
    asked = study.FabricStudy(links=[link], backends=backends, sizes=[4096, MIB], iterations=5, **only)
    small, large, *two_levels = asked.run()[0]
    assert (small.size, large.size, large.count, large.wrong, small.wrong) == (4096, MIB, MIB // 4, 0, 0)
    assert large.busbw * large.time_us * 1e3 == pytest.approx(1.5 * MIB)
    # Each host sends two ranks' part of a ring of four, 2 * 3 / 4 of the message each, over its link; or all ranks
    # have what one of them sends of the message.
    assert [row.backend for row in two_levels] == ["hierarchical"] * 2
    for row, times in ((large, 3.0), (two_levels[1], 1.0)):
        assert row.size / row.time_us * times == pytest.approx(12.5, rel=0.25), "bytes / us: 100 Mbit/s"
        assert row.predicted_us == pytest.approx(row.time_us, rel=0.25)
        assert row.wire_mb == pytest.approx(times * MIB / 1e6 * 1514 / 1448, rel=0.05)
        assert row.predicted_mb == pytest.approx(times * MIB / 1e6)
    assert not [name for name in hosts.namespaces() if f"-{os.getpid()}-" in name]


def exchanging(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    nets = {"compute-heavy": None, "resnet50": 0.2}
    trained = measure.measure_training(comm, {"nets": nets, "steps": 1, "rounds": 2, "placement": [0, 0]})
    return {**trained["nets"], "fused": measure.measure_fusion(comm, options)}


@pytest.mark.more
def test_training_and_fusion_exchange_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    options = {"thresholds": [0, 16384, MIB], "rounds": 2, "steps": 1, "tune": False}
    shapes = {"shapes": [[64, 64], [64], [64, 64], [64]]}
    for said in run_ranks("test_bench_fabric:exchanging", {**options, **shapes}, placement=[0, 0]):
        for net in (said["compute-heavy"], said["resnet50"]):
            assert len(net["alone"]) == len(net["together"]) == 2 and net["parameters"] * 4 == net["grad_bytes"]
            assert net["sent_bytes"] == pytest.approx(net["grad_bytes"], rel=0.02), "2 (n - 1) / n of it"
            assert sum(net["sizes"]) == net["sent_bytes"] and net["ready"] == sorted(net["ready"])
        assert min(said["resnet50"]["alone"]) >= 0.2, "its step takes as long as is emulated"
        assert [(case["messages"], len(case["times"])) for case in said["fused"]] == [(4, 2), (2, 2), (1, 2)]


@pytest.mark.more
def test_the_command_writes_rows_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, plot = tmp_path / "rows.json", tmp_path / "plot.html"
    small = "--ranks 2 --parts collectives --collectives all_reduce,broadcast --sizes 4KiB,64KiB --iterations 3"
    small += " --backends gloo"
    assert cli.main(["bench", "fabric", *small.split(), "--json", str(rows), "--plot", str(plot)]) == 0
    said = capsys.readouterr()
    title, _, *lines = said.out.splitlines()
    assert title.startswith("collectives")
    assert len(lines) == len(json.loads(rows.read_text())) == 4
    assert "Plotly.newPlot" in plot.read_text()


@pytest.mark.more
def test_ranks_of_a_job_measure_together_and_the_first_one_shows(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    command = "-m ensemble.cli bench fabric --parts collectives --collectives all_reduce --sizes 4KiB --plot -"
    command += " --backends gloo --meet meet --interface lo --rate 10gbit --json rows.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    jobs = [
        subprocess.Popen(
            [sys.executable, *command.split()],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (first, _), (second, said) = (job.communicate(timeout=300) for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0] and (second, said) == ("", "")
    assert "lo, 2 ranks on 1 host" in first
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["ranks"], row["hosts"], row["rate"], row["wrong"]) == (2, 1, "10gbit", 0)


# --- what is shown -----------------------------------------------------------------------------------------------


def collective(size: int, backend: str = "gloo", **more: Any) -> CollectiveRow:
    usual = {"link": "1gbit", "hosts": 2, "rate": "1gbit", "collective": "all_reduce", "wrong": 0, **more}
    return make_row(CollectiveRow, size=size, backend=backend, **usual)


def training(link: str, net: str, efficiency: float) -> TrainingRow:
    about: dict[str, Any] = {"link": f"{link}, 2 x 2 ranks", "hosts": 2, "backend": "gloo", "net": net}
    about |= {"rate": None if link == "unlimited" else link, "delay_ms": None}
    about |= {"parameters": 1000, "step_ms": 40 / efficiency, "predicted": efficiency, "error": 0.0}
    about["compute"] = "emulated" if net in ("resnet50", "vgg16") else "measured"
    return make_row(TrainingRow, efficiency=efficiency, **about)


def fusion(threshold: int, time_ms: float, chosen: bool = False) -> FusionRow:
    spread = {"low_ms": time_ms - 1, "high_ms": time_ms + 1}
    return make_row(FusionRow, link="loopback", threshold=threshold, time_ms=time_ms, chosen=chosen, **spread)


BACKENDS = {"gloo": 900.0, "hierarchical": 300.0, "hybrid": 330.0}
FOUND: dict[str, Any] = {
    "collectives": [
        *(collective(size, name, time_us=us) for name, us in BACKENDS.items() for size in (4096, MIB)),
        collective(4096, collective="broadcast", wrong=3),
    ],
    "training": [
        training(link, net, efficiency)
        for net, slow in (("compute-heavy", 1.0), ("parameter-heavy", 0.3))
        for link, efficiency in (("unlimited", 1.0), ("1gbit", slow))
    ],
    "fusion": [fusion(0, 900.0), fusion(4 * MIB, 200.0, chosen=True), fusion(128 * MIB, 250.0)],
    "lost": {},
}


def test_findings_say_who_wins_and_what_is_wrong() -> None:
    said = figures.make_outcome(**FOUND).findings
    lossy = figures.make_outcome(**{**FOUND, "lost": {"1gbit + 5 ms": 7}}).findings
    assert lossy == ["1gbit + 5 ms: the relay that delays frames has lost 7", *said]
    assert said[0] == "WRONG: 3 elements of broadcast 4 KiB, gloo, 1gbit"
    assert said[1] == "all_reduce by hierarchical against gloo's, 1gbit: 3.00 x at 4 KiB, 3.00 x at 1 MiB"
    assert said[3] == "hybrid, 1gbit: at most 1.10 x the better of the two, at 4 KiB"
    assert said[5] == (
        "parameter-heavy net, 1,000 parameters, gloo: efficiency 100% (predicted 100%) on unlimited, 2 x 2 ranks, "
        "30% (predicted 30%) on 1gbit, 2 x 2 ranks"
    )
    assert said[6] == "4 of 4 steps are predicted within 10%"
    assert said[7].startswith("fusion, loopback: best 200 ms at 4 MiB; 900 ms at none, 250 at the largest")
    assert said[7].endswith("; tuned 4 MiB, 0% above the best")
    assert [format_bytes(size) for size in (0, 100, 1536, 25 * MIB)] == ["none", "100 B", "1.5 KiB", "25 MiB"]


def test_what_papers_claim_stands_beside_what_was_trained() -> None:
    rows = [
        training(link, net, efficiency)
        for net, slow in (("resnet50", 0.76), ("vgg16", 0.4))
        for link, efficiency in (("unlimited", 0.8), ("1gbit", slow))
    ]
    small, large, horovod = expected.training_claims(rows)
    assert (small.loses, large.loses) == ("", "below 90% on 1gbit, 2 x 2 ranks")
    assert small.measured == "1gbit, 2 x 2 ranks: 95% of the speed, gloo", "against the unlimited link's"
    assert (horovod.published, horovod.ratio) == ("efficiency 68%", None), "an upper bound has no ratio"
    assert 78 < int(horovod.measured.partition("%")[0]) < 86
    assert list(expected.training_claims([training("1gbit", "compute-heavy", 0.5)])) == []
    assert list(expected.training_claims([])) == []


def test_the_plot_has_each_part_with_its_predictions_dashed() -> None:
    drawn = figures.make_outcome(**FOUND).panels
    titles = [panel.title.split(",")[0].split(" of ")[0] for panel in drawn]
    assert titles == ["All-reduce", "Bus bandwidth", "Efficiency", "Fusion"]
    assert sorted(s.dash for s in drawn[0].series) == ["dash"] * 3 + ["solid"] * 3
    assert [mark.x for mark in drawn[-1].marks] == ["4 MiB"]
    assert figures.make_outcome([], [], [], {}).panels == []


def test_tables_have_the_columns_of_nccl_tests() -> None:
    shown = figures.make_outcome(**FOUND)
    _, (_, first), *_ = shown.tables
    assert list(first[0])[3:10] == ["size", "count", "type", "time_us", "algbw", "busbw", "wrong"]
    assert {row["part"] for row in shown.rows} == {"collective", "training", "fusion"}
