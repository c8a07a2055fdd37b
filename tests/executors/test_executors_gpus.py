"""Real nodes' GPUs: partly somebody else's, exclusive, in MIG mode, broken; NVML is a stand-in that says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_child import Run, make_machine, several
from kit.event_dicts import ledger, read_events

from ensemble.controller.node_table import NodeTable
from ensemble.executors.gpu_offers import has_changed, offer_gpus
from ensemble.meter.devices import GpuState
from ensemble.meter.gpu_activity import IN_USE, MIG, MPS, OTHER_NAMESPACE
from ensemble.reporting import RunProjection, status_notes
from ensemble.schedule.needs import Node
from ensemble.store import RunState

# That ranks have GPUs of their own is in the first tier in test_executors_forks.py, what is offered of GPUs below.
EXECUTORS = [
    pytest.param("local", marks=pytest.mark.more),
    pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow]),
]


def machine(folder: Path, gpus: int = 1, state: str = "") -> dict[str, str]:
    return make_machine(folder, ",".join(["A100:80"] * gpus), state)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_others_leave_of_a_gpu_is_used_and_what_they_free(executor: str, tmp_path: Path) -> None:
    held, members = machine(tmp_path, 2, "GPU-0 held 79\nGPU-1 held 40\n"), several(3, holds=30, until="go")
    run = Run(tmp_path, held, executor, members, ("started 1", "GPU-0 held 0"), ("started 3", "go"), share=0.5)
    first, freed = run.of_kind("node")
    assert (first["gpu_ids"], first["gpu_free"]) == (["GPU-0", "GPU-1"], [0.0, 0.5])
    assert freed["gpu_free"] == [1.0, 0.5], "what a member holds on GPU-1 is the run's own"
    assert list(run.given_once().values()) == [{"GPU-1"}, {"GPU-0"}, {"GPU-0"}]
    assert run.of_kind("placed")[1]["t"] >= freed["t"]
    reasons = [f"other programs hold {gib} of 80.0 GiB of GPU GPU-{gpu}" for gpu, gib in enumerate((79.0, 40.0))]
    assert "; ".join(reasons) in run.said


@pytest.mark.parametrize("executor", EXECUTORS)
def test_members_wait_for_what_others_hold(executor: str, tmp_path: Path) -> None:
    """Somebody takes a part of the only GPU, and gives it back when no member is left that runs."""
    steps = ("started 1", "GPU-0 held 45"), ("node 2", "go"), ("finished 1", "GPU-0 held 1")
    members = several(2, holds=30, until="go")
    run = Run(tmp_path, machine(tmp_path, 1, "GPU-0 held 1\n"), executor, members, *steps)
    assert set(run.states.values()) == {"finished"}
    assert [event["gpu_free"] for event in run.of_kind("node")] == [[1.0], [0.438], [1.0]]
    assert run.of_kind("placed", "member-1")[0]["t"] >= run.of_kind("node")[2]["t"]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_compute_modes_are_obeyed(executor: str, tmp_path: Path) -> None:
    modes = machine(tmp_path, 3, "GPU-0 mode 3\nGPU-1 mode 2\n")
    run = Run(tmp_path, modes, executor, several(6, until="go"), ("started 5", "go"), share=0.25)
    spans = [(*gpus, run.state.members[member].spans[0]) for member, gpus in run.given_once().items()]
    for gpu, most in (("GPU-0", 1), ("GPU-2", 4)):
        mine = [span for own, span in spans if own == gpu]
        assert max(sum(a.placed <= b.placed < (a.ended or 0) for a in mine) for b in mine) == most
    for what in ("GPU-0 is in compute mode EXCLUSIVE_PROCESS", "GPU-1 is in compute mode PROHIBITED"):
        assert len(re.findall(f"WARNING.*GPU {what}|GPU {what}", run.said)) == 1, run.said
    assert run.of_kind("node")[0]["gpu_ids"] == ["GPU-0", "GPU-2"]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_ranks_of_a_member_get_instances_of_different_gpus(executor: str, tmp_path: Path) -> None:
    members = [{"lr": 9.0, "workers": 2}, *several(4, until="go")]
    wide, *alone = Run(
        tmp_path, make_machine(tmp_path, "A100:80:2,A100:80:2"), executor, members, ("started 4", "go")
    ).given_once().values()  # fmt: skip
    assert {name[:5] for name in wide} == {"MIG-0", "MIG-1"}
    assert set.union(*alone) == {"MIG-0-0", "MIG-0-1", "MIG-1-0", "MIG-1-1"}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_who_keeps_gpus_busy_is_in_the_power_events(executor: str, tmp_path: Path) -> None:
    """Until all of that was seen in one event."""
    # Power is read once a second: forks are reported before a reading on Ray, and after one here.
    slow = {"FORKS_REPORTED_AFTER_S": "1.2" if executor == "local" else "0.0"}
    shares = {"member-0": 0.4, "member-1": 0.3, "member-2": 0.2}
    members = [{"lr": used, "holds": 1, "uses": round(100 * used), "until": "go"} for used in shares.values()]
    seen = (f"active {' '.join(shares)}", "go")
    run = Run(tmp_path, machine(tmp_path, 2) | slow, executor, members, seen, share=0.5)
    assert {event["power"]["gpu_activity"] for event in run.of_kind("node")} == {IN_USE}
    placed, active = run.given_once(), set()
    for event in run.of_kind("power"):
        for part in event["parts"]:
            for role, member, used_s in part["activity"] or ():
                assert role == "train" and {part["device"]} == placed[member]
                assert used_s == pytest.approx(shares[member] * event["interval_s"], abs=1e-6)
                active.add(member)
    assert active == set(shares)


@pytest.mark.more
def test_who_has_ended_since_the_last_reading_has_what_it_used(tmp_path: Path) -> None:
    members = [{"lr": 0.1, "uses": 40}, {"lr": 0.2, "holds": 1, "until": "go"}]
    run = Run(tmp_path, machine(tmp_path), "local", members, ("active member-0", "go"), share=0.5)
    active = [part["activity"] for e in run.of_kind("power") for part in e["parts"] if part.get("activity")]
    [[role, member, _]] = active[0]
    assert (role, member) == ("train", "member-0")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_node_says_when_activity_is_known_no_more(executor: str, tmp_path: Path) -> None:
    """A process of the run is listed where the run has none, until the node says that it trusts no more."""
    members = several(1, holds=1, uses=40, haunts=True, until="go")
    run = Run(tmp_path, machine(tmp_path, 2), executor, members, ("node 2", "go"), share=0.5)
    assert set(run.states.values()) == {"finished"}
    assert [event["power"]["gpu_activity"] for event in run.of_kind("node")] == [IN_USE, OTHER_NAMESPACE]
    known_until = run.of_kind("node")[1]["t"]
    later = [e for e in run.of_kind("power") if e["t"] > known_until]
    assert not any(part["activity"] for event in later for part in event["parts"])


@pytest.mark.more
@pytest.mark.parametrize(("gpus", "with_mps", "why"), [("A100:80:2", False, MIG), ("A100:80", True, MPS)])
def test_where_activity_is_not_known_the_node_says_why(
    gpus: str, with_mps: bool, why: str, tmp_path: Path
) -> None:
    environment = make_machine(tmp_path, gpus)
    if with_mps:
        control = tmp_path / "nvidia-cuda-mps-control"
        control.write_text("#!/bin/sh\nexit 0\n")
        control.chmod(0o755)
        environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    describe = [sys.executable, "-c", DESCRIBE, "mps" if with_mps else ""]
    assert subprocess.check_output(describe, env=environment, text=True).splitlines()[-1] == why


DESCRIBE = """
import selectors, sys
from kit.execute_members import an_ensemble
from ensemble.executors.node_services import NodeServices

declared = an_ensemble([{"lr": 0.1}], devices="cuda", mps=sys.argv[1] == "mps")
services = NodeServices("a", declared, selectors.DefaultSelector(), emit=lambda event: None)
print(services.describe().as_event()["power"]["gpu_activity"])
services.close()
"""

INLINE = """
import json, os, sys
from pathlib import Path
from kit.execute_members import an_ensemble
import ensemble
from ensemble.executors import inline

clock = [0.0]
inline.time.monotonic = lambda: clock[0]

def train(member):
    raise AssertionError("there is no GPU to train on")

def react(event):
    clock[0] += 2.0  # power is read with each event
    if event["type"] == "usage" and event["role"] == "startup" and event["member"]:
        with open(os.environ["STAND_IN_STATE"], "w") as state:
            state.write(f"GPU-0 process {os.getpid()} 1\\nGPU-0 util {os.getpid()} 50\\n")

declared = an_ensemble([{"lr": 0.1}, {"lr": 0.2}], devices="cuda", sharing="independent", valid=None, retries=0)
ensemble.submit(declared, Path(sys.argv[1]), executor="inline", on_event=react).wait()
"""


@pytest.mark.more
def test_a_member_that_trains_in_this_process_keeps_the_gpu_busy(tmp_path: Path) -> None:
    environment = make_machine(tmp_path, "A100:80")
    subprocess.run([sys.executable, "-c", INLINE, str(tmp_path / "run")], env=environment, check=True)
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    active = [a for e in events for part in e.get("parts", ()) for a in part["activity"] or ()]
    assert {(role, member) for role, member, _ in active} >= {("train", "member-0"), ("train", "member-1")}
    assert {e["power"]["gpu_activity"] for e in events if e["type"] == "node"} == {IN_USE}


BROKEN = {"xid 79": "XID 79: GPU has fallen", "ecc 2": "2 uncorrectable ECC errors", "lost 1": "GPU is lost"}
BROKEN |= {"xid 48": "XID 48: double-bit ECC error"}
LOCAL, RAY = pytest.mark.more, [pytest.mark.ray, pytest.mark.slow]


def break_gpu(folder: Path, executor: str, befalls: str, fails: bool = True, workers: int = 1) -> Run:
    """The GPU of a member breaks; the others' members end when that is known."""
    broken = {"lr": 9.0, "befalls": befalls, "fails": fails, "rank": workers - 1, "workers": workers}
    steps = ("gpu_quarantined 1", "go"), ("failed 1", "go")
    return Run(folder, machine(folder, 4), executor, [broken, *several(2, until="go")], *steps)


@pytest.mark.parametrize(
    ("executor", "befalls", "fails", "workers"),
    [
        *(pytest.param("local", *how, marks=LOCAL) for how in (("xid 79", True, 1), ("ecc 2", False, 1))),
        *(pytest.param("local", *how, marks=LOCAL) for how in (("lost 1", True, 2), ("xid 48", False, 2))),
        *(pytest.param("ray", *how, marks=RAY) for how in (("xid 79", True, 2), ("lost 1", False, 1))),
    ],
)
def test_a_gpu_that_breaks_is_used_no_more_and_costs_no_retry(
    executor: str, befalls: str, fails: bool, workers: int, tmp_path: Path
) -> None:
    run = break_gpu(tmp_path, executor, befalls, fails, workers)
    assert set(run.states.values()) == {"finished"}, run.said
    [quarantined] = run.of_kind("gpu_quarantined")
    gpu = str(quarantined["gpu"])
    assert BROKEN[befalls] in quarantined["detail"] and quarantined["devices"] == [gpu]
    before, after = run.given("member-0")
    assert gpu in before and gpu not in after
    [failed] = run.of_kind("failed")
    assert failed["retry"] and failed["reason"] == "lost" and f"GPU {gpu} is quarantined" in failed["error"]
    assert gpu not in run.of_kind("node")[-1]["gpu_ids"]
    said = f"GPU {gpu} is not used any more: "
    assert said in "\n".join(status_notes(RunProjection(run.state, ledger([]))))
    assert said in (run.path / "report.html").read_text()


@pytest.mark.more
def test_the_applications_errors_are_its_own(tmp_path: Path) -> None:
    run = break_gpu(tmp_path, "local", "xid 31")
    assert run.states == {"member-0": "failed", "member-1": "finished", "member-2": "finished"}
    assert not run.of_kind("gpu_quarantined") and [e["retry"] for e in run.of_kind("failed")] == [False]


OFFERS = """
import os, selectors, subprocess, sys
from pathlib import Path
from ensemble.executors.gpu_offers import GpuOffers
from ensemble.executors.process_pool import ProcessPool
from ensemble.schedule.needs import Node

host = Node("a", 4, ("A100",) * 3, 16, "a", gpu_memory_gb=(80.0,) * 3, gpu_ids=("GPU-0", "GPU-1", "GPU-2"))
says = "import os; print(os.getpid(), flush=True); input()"
nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {says!r}])"
rank = subprocess.Popen([sys.executable, "-c", nested], stdin=-1, stdout=-1, text=True)
child = int(rank.stdout.readline())
with open(os.environ["STAND_IN_STATE"], "w") as state:
    for gpu, pid in enumerate((os.getpid(), rank.pid, child)):
        state.write(f"GPU-{gpu} process {pid} 60\\n")
ranks = ProcessPool("a", selectors.DefaultSelector(), print, None)
ranks.list_pids = lambda: {rank.pid}
offers = GpuOffers("a", Path("/none"), print, ranks)
print(*offers.offer(host).gpu_free)
print(*offers.list_reasons())
rank.communicate("")
with open(os.environ["STAND_IN_STATE"], "a") as state:
    state.write("GPU-1 xid 79\\n")
offers._emit = lambda event: print(event["type"], *event.get("gpu_ids", ()))
offers.check()
"""


def test_a_driver_holds_memory_as_others_do_and_a_rank_without_environment_does_not(tmp_path: Path) -> None:
    environment = make_machine(tmp_path, "A100:80,A100:80,A100:80")
    found = subprocess.check_output([sys.executable, "-c", OFFERS], env=environment, text=True)
    reason = (("GPU-0", "0"), "other programs hold 60.0 of 80.0 GiB of GPU GPU-0")
    broken = "gpu_quarantined\nnode GPU-0 GPU-2\n"
    assert found == f"0.25 1.0 1.0\n{reason}\n{broken}"


def test_what_is_offered_of_each_gpu() -> None:
    host = Node("a", 4, ("A100",) * 4, 16, "a", gpu_memory_gb=(80.0,) * 4, gpu_ids=("g0", "g1", "g2", "g3"))
    states = {"g0": GpuState("exclusive", 10.0, True), "g1": GpuState("exclusive"), "g2": GpuState(held_gb=3.9)}
    alone, reasons = offer_gpus(host, states, {"g3": "XID 79"}, with_mps=False)
    assert {gpu for gpu, _ in reasons} == {"g0", "g1", "g3"} and alone.no_gpus.startswith(reasons[0][1])
    assert (alone.gpu_ids, alone.gpu_free) == (("g0", "g1", "g2"), (0.0, 1.0, 1.0)), "somebody is on g0"
    assert alone.gpu_exclusive == (True, True, False)
    together, _ = offer_gpus(host, states, {}, with_mps=True)
    assert (together.gpu_free, together.gpu_exclusive) == ((0.875, 1.0, 1.0, 1.0), (False,) * 4)
    assert has_changed(alone, together) and not has_changed(alone, alone)
    for held_gb, is_reported in ((3.0, False), (4.5, False), (6.0, True), (78.0, True)):
        states["g2"] = GpuState(held_gb=held_gb)
        assert has_changed(together, offer_gpus(host, states, {}, with_mps=True)[0]) == is_reported


def test_a_cause_is_warned_of_once_however_much_others_hold(caplog: pytest.LogCaptureFixture) -> None:
    host = Node("a", 4, ("A100",) * 2, 16, "a", gpu_memory_gb=(80.0,) * 2, gpu_ids=("g0", "g1"))
    nodes = NodeTable(RunState())
    for held_gb in (20.0, 40.0, 0.0, 20.0):
        nodes.warn_of_gpus("a", offer_gpus(host, {"g0": GpuState(held_gb=held_gb)}, {}, with_mps=False)[0].no_gpus)
    states = {"g0": GpuState(held_gb=40.0), "g1": GpuState("exclusive", 20.0)}
    nodes.warn_of_gpus("a", offer_gpus(host, states, {}, with_mps=False)[0].no_gpus)
    nodes.warn_of_gpus("b", "other programs hold 40.0 of 80.0 GiB of GPU g0")
    assert caplog.messages == [
        "node a: other programs hold 20.0 of 80.0 GiB of GPU g0",
        "node a: GPU g1 is in compute mode EXCLUSIVE_PROCESS: one rank at a time; "
        "other programs hold 20.0 of 80.0 GiB of GPU g1",
        "node b: other programs hold 40.0 of 80.0 GiB of GPU g0",
    ]
