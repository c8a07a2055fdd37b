"""Clones on Ray: the weights of a local run, also where a worker is killed before its first checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from execute_members import an_ensemble, faulty_model, loss, momentum

import ensemble
from ensemble import Member, Recipe, Resources
from ensemble.store import RunState, fold, read_events

pytestmark = pytest.mark.ray


def run(path: Path, executor: str, marker: Path) -> RunState:
    """A member and three clones of it: one cold, one warm, and one warm of two workers that is killed."""

    def ask(event: dict[str, Any]) -> None:
        if (event["type"], event.get("member")) == ("finished", "member-0"):
            handle = ensemble.attach(path)
            killed = {"fault": "kill", "after": 2, "marker": str(marker)}
            handle.clone("member-0", {"lr": 0.05})
            handle.clone("member-0", {"lr": 0.05}, warm=True)
            handle.clone("member-0", Member(killed, workers=2), warm=True)

    made = an_ensemble(
        [{"lr": 0.1, "width": 8, "fault": "none", "after": 0, "marker": ""}],
        recipe=Recipe(model=faulty_model, loss=loss, optimizer=momentum),
        sharing="independent",
        resources=Resources(cpus_per_worker=0.2),
    )
    ensemble.submit(made, path, executor, on_event=ask).wait()
    return fold(read_events(path / "events.jsonl"))


def test_clones_on_ray_end_with_the_weights_of_a_local_run(tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    on_ray = run(tmp_path / "ray", "ray", marker)
    assert marker.exists() and on_ray.members["member-3"].attempts == 2
    local = run(tmp_path / "local", "local", marker)
    assert {member.state for member in on_ray.members.values()} == {"finished"} and len(on_ray.members) == 4
    for name, member in local.members.items():
        assert on_ray.members[name].weights_sha256 == member.weights_sha256, name
        assert on_ray.members[name].identity["lineage"] == member.identity["lineage"]
    assert len({member.weights_sha256 for member in local.members.values()}) == 4
