"""On which nodes a member may be, as it is declared: words, selectors, what its ensemble says, mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ensemble import Ensemble, Member, Resources
from pipelines import Pipeline, sources

TYPE, MARKET = "ray.io/accelerator-type", "ray.io/market-type"


def declare(nodes: Any, *members: Any, **options: Any) -> Ensemble:
    train = Pipeline(sources.arrays(x=np.zeros((64, 2), np.float32)))
    resources = Resources(nodes=nodes, **options.pop("needs", {}))
    return Ensemble(name="s", recipe=len, train=train, members=members or [{}], resources=resources, **options)


def test_a_member_has_its_ensembles_selection_and_label_by_label_its_own_in_place_of_it() -> None:
    declared = declare(
        {"gpu_type": "in(H100, H200)", "spot": False, "team": "vision"},
        {},
        Member({}, nodes={"spot": True, "gpu_memory_gb": np.float32(40)}),
        Member({}, nodes={"gpu_type": None, TYPE.replace("accelerator-type", "node-group"): "!small"}),
        Member({}, nodes={"gpu_type": None, "spot": None, "team": None}, gpus_per_worker=0.0),
    )
    first, second, third, last = (declared.identify(number) for number in range(4))
    ensembles = {TYPE: "in(H100,H200)", MARKET: "!spot", "team": "vision"}
    assert first.nodes == ensembles
    assert second.nodes == ensembles | {MARKET: "spot", "gpu_memory_gb": 40.0}
    assert third.nodes == ensembles | {TYPE: None, "ray.io/node-group": "!small"}
    assert set((last.nodes or {}).values()) == {None}
    assert declare(None).identify(0).nodes is None
    assert declare({"slot": "a", "xray.io/node-groups": "b"}).identify(0).nodes, "these are no misspelt words"
    assert not first.list_differences(second.as_dict() | {"member": "member-0", "number": 0, "seed": 0})
