"""On which nodes a member may be, as it is declared: words, selectors, what its ensemble says, mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ensemble import Ensemble, Member, Resources, SpecError
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


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (["H100"], "Resources.nodes must be a dict such as {'gpu_type': 'H100', 'spot': False}, got ['H100']"),
        ({"gpu_typ": "H100"}, "Resources.nodes has no 'gpu_typ'; did you mean 'gpu_type'?"),
        ({"gpu-type": "H100"}, "did you mean 'gpu_type'?"),
        ({"gpu_memory": 40}, "did you mean 'gpu_memory_gb'?"),
        ({"ray.io/accelerator_type": "H100"}, f"did you mean '{TYPE}'?"),
        (
            {"my label": "a"},
            "has 'my label', which is neither one of gpu_type, spot, gpu_memory_gb nor a node's label",
        ),
        ({5: "a"}, "has 5, which is neither"),
        ({"ray.io/node-id": "ab"}, "nodes are not chosen by ray.io/node-id, which is new at each start of one"),
        ({"gpu_type": "H100", TYPE: "T4"}, f"has '{TYPE}' and another word for the same: give one of them"),
        (
            {"gpu_type": ["H100", "T4"]},
            "nodes['gpu_type'] must be 'value', '!value', 'in(a,b)' or '!in(a,b)', got ['",
        ),
        (
            {"team": "in(a,b"},
            "Resources.nodes['team'] must be 'value', '!value', 'in(a,b)' or '!in(a,b)', got 'in(a,b'",
        ),
        ({"team": ""}, "must be 'value'"),
        ({"team": "!!a"}, "must be 'value'"),
        ({"spot": "spot"}, "Resources.nodes['spot'] must be True or False, got 'spot'"),
        ({"gpu_memory_gb": 0}, "Resources.nodes['gpu_memory_gb'] must be above 0, got 0"),
        (
            {"gpu_type": "in(T4,L4)", "gpu_memory_gb": 40},
            "no GPU has gpu_memory_gb=40, gpu_type=in(T4,L4) (T4 has 16 GB, L4 has 24",
        ),
    ],
)
def test_a_selection_that_means_nothing_is_refused_where_it_is_declared(nodes: Any, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        declare(nodes)
    assert said in str(refused.value)


def test_who_takes_no_gpu_selects_none() -> None:
    with pytest.raises(SpecError, match=r"members\[0\].*asks for GPUs \(gpu_type=H100\), and gpus_per_worker=0"):
        declare({"gpu_type": "H100"}, Member({}, gpus_per_worker=0.0))
    with pytest.raises(SpecError, match=r"members\[1\].*asks for GPUs \(gpu_memory_gb=8\).*devices='cpu'"):
        declare(None, {}, Member({}, nodes={"gpu_memory_gb": 8}), devices="cpu")
    with pytest.raises(SpecError, match=r"no option 'nodes'; give it as resources=Resources\(nodes=...\)"):
        Ensemble(nodes={"spot": True})  # type: ignore[call-arg]
