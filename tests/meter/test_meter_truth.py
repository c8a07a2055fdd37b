"""Joules of members on nodes whose power is known are those that the members caused.

The node draws idle power, shared by what is reserved, and watts for each busy core and each busy GPU. Members
come and go; they differ in what they reserve and in how busy they are; other people work on the node, too.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.event_dicts import ledger

IDLE_W, CORE_W = 40.0, 12.0
GPU_IDLE_W, GPU_BUSY_W = 60.0, 240.0
CORES = 8.0
GPU = "GPU-a"
_NODE = {"t": 0.0, "type": "node", "node": "n0", "cpus": CORES, "gpu_ids": [GPU], "gpu_parents": [GPU]}


class Member(NamedTuple):
    """A member that trains from second `first` to second `last`, as busy in each as `cores` and `gpu` say."""

    name: str
    first: int
    last: int
    cpus: float
    gpu_share: float
    reports_every: int
    cores: list[float]
    gpu: list[float]

    def busy(self, second: int) -> tuple[float, float]:
        """Busy cores, and the busy share of the GPU, in that second: the same between two reports."""
        place = (second - self.first) // self.reports_every
        return self.cores[place], self.gpu[place]


@st.composite
def members(draw: st.DrawFn) -> list[Member]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        first, seconds = draw(st.integers(0, 3)), draw(st.integers(1, 8))
        every = draw(st.integers(1, 3))
        reports = -(-seconds // every)
        busy = st.lists(st.floats(0, 1), min_size=reports, max_size=reports)
        cpus, share = draw(st.sampled_from([0.5, 1.0, 2.0])), draw(st.sampled_from([0.125, 0.25]))
        cores, gpu = draw(busy), [part / 4 for part in draw(busy)]  # four members at most have one GPU
        found.append(Member(f"member-{number}", first, first + seconds, cpus, share, every, cores, gpu))
    return found


def simulate(declared: list[Member], others_cores: float) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The events of a run with these members, and the true joules of each, of others, and of idle places."""

    def usage(at: float, member: Member, cpu_s: float) -> dict[str, Any]:
        who = {"node": "n0", "role": "train", "member": member.name, "rank": 0, "pid": 100 + int(member.name[-1])}
        return {"v": 2, "t": at, "type": "usage", "cpu_s": cpu_s, "origin": "measured", **who}

    events: list[dict[str, Any]] = [{"v": 2, "t": 0.0, "type": "run_started"}, _NODE]
    truth: dict[str, float] = defaultdict(float)
    cpu_s: dict[str, float] = defaultdict(float)
    for second in range(max(member.last for member in declared)):
        end = second + 1.0
        running = [member for member in declared if member.first <= second < member.last]
        for member in (member for member in running if member.first == second):
            wanted = {"cpus_per_worker": member.cpus, "gpus_per_worker": member.gpu_share}
            events.append({"t": float(second), "type": "member", "member": member.name, **wanted})
            place = {"node": "n0", "devices": [GPU], "cohort": 0}
            events.append({"t": float(second), "type": "placed", "member": member.name, **place})
            events.append(usage(float(second), member, 0.0))
        activity = []
        for member in running:
            cores, gpu = member.busy(second)
            cpu_s[member.name] += cores
            activity.append(["train", member.name, gpu])
            truth[member.name] += CORE_W * cores + GPU_BUSY_W * gpu
            truth[member.name] += IDLE_W * member.cpus / CORES + GPU_IDLE_W * member.gpu_share
            if (second + 1 - member.first) % member.reports_every == 0 or second + 1 == member.last:
                events.append(usage(end, member, cpu_s[member.name]))
        truth["other"] += CORE_W * others_cores
        reserved = sum(member.cpus for member in running), sum(member.gpu_share for member in running)
        truth["idle"] += IDLE_W * (1 - reserved[0] / CORES) + GPU_IDLE_W * (1 - reserved[1])
        busy = sum(member.busy(second)[0] for member in running) + others_cores
        cpu_j, gpu_j = IDLE_W + CORE_W * busy, GPU_IDLE_W + GPU_BUSY_W * sum(each[2] for each in activity)
        same = {"origin": "measured", "interval_s": 1.0}
        parts = [
            {"name": "cpu", "kind": "cpu", "device": None, "energy_j": cpu_j, "idle_j": IDLE_W, **same},
            {"name": "gpu", "kind": "gpu", "device": GPU, "energy_j": gpu_j, "idle_j": GPU_IDLE_W, **same},
        ]
        parts[1]["activity"] = activity
        whole = {"node": "n0", "watts": cpu_j + gpu_j, "energy_j": cpu_j + gpu_j, "source": "synthetic", **same}
        events.append({"v": 2, "t": end, "type": "power", **whole, "busy_s": busy, "parts": parts})
        for member in (member for member in running if member.last == second + 1):
            events.append({"t": end, "type": "finished", "member": member.name, "epoch": 0, "metrics": {}})
    return events, truth


@given(declared=members(), others_cores=st.sampled_from([0.0, 0.5, 2.0]))
def test_attributed_joules_are_those_that_members_caused(declared: list[Member], others_cores: float) -> None:
    events, truth = simulate(declared, others_cores)
    book = ledger(events)
    found = {member: total.energy_j or 0.0 for member, total in book.by_member().items()}
    by_role = book.by_role()
    found |= {role: by_role[role].energy_j or 0.0 for role in ("other", "idle") if role in by_role}
    for name, joules in truth.items():
        assert found.get(name, 0.0) == pytest.approx(joules, rel=1e-3, abs=0.01), name
    assert sum(found.values()) == pytest.approx(sum(truth.values()))
