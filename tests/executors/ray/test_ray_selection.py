"""Members that select nodes, on a model of Ray's rules: they get places on such nodes alone, and ask for such."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples
from ray._private.label_utils import validate_label_selector
from ray_model import Run, World, fits_alone, list_pending, make_member, make_record

from ensemble.executors.ray.agents import Agent
from ensemble.executors.ray.demand import plan_requests
from ensemble.executors.ray.lease_manager import KEPT_S
from ensemble.schedule.needs import Node
from ensemble.schedule.selection import explain_unselected, is_selected
from ensemble.spec import Identity, SpecError
from ensemble.spec.nodes import as_items, as_selection

TYPE = "ray.io/accelerator-type"
A100 = {TYPE: "A100", "ray.io/node-group": "large"}
#: Cores, GiB, GPUs, labels, memory of each GPU.
KINDS = {
    "H100": (8.0, 64.0, 2, {TYPE: "H100", "ray.io/market-type": "spot"}, 79.6),
    "T4": (8.0, 64.0, 2, {TYPE: "T4", "rack": "1"}, 14.7),
    "A100-40": (8.0, 64.0, 1, {TYPE: "A100", "ray.io/node-group": "small"}, 39.4),
    "A100-80": (8.0, 64.0, 1, A100, 80.0),
    "cores": (8.0, 64.0, 0, {"rack": "1"}),
}
LARGE: dict[str, Any] = {"gpu_type": "A100", "gpu_memory_gb": 80}
SELECTIONS: list[dict[str, Any] | None] = [None, *({"gpu_type": kind} for kind in ("H100", "in(T4,A100)")), LARGE]
SELECTIONS += [{"gpu_type": "!H100", "spot": False}, {"gpu_memory_gb": 24}, {"rack": "1"}, {"spot": False}]


def make_selecting(number: int, nodes: dict[str, Any] | None, **options: Any) -> Identity:
    selection = None if nodes is None else as_selection("nodes", nodes)
    return make_member(number, nodes=selection, **{"cpus_per_worker": 0.5, "gpus_per_worker": 0.5} | options)


def is_asked_for(nodes: dict[str, Any], kind: str) -> bool:
    """What a user means: whether a selection admits a kind of node."""
    _, _, gpus, labels, gpu_gb = (*KINDS[kind], 0.0)[:5]
    model = labels.get(TYPE)
    wanted = {"H100": model == "H100", "in(T4,A100)": model in ("T4", "A100"), "A100": model == "A100", None: True}
    wanted["!H100"] = bool(gpus) and model != "H100"
    is_large = gpu_gb >= 0.9 * nodes.get("gpu_memory_gb", 0)
    is_there = "rack" not in nodes or labels.get("rack") == nodes["rack"]
    return (
        wanted[nodes.get("gpu_type")]
        and is_large
        and is_there
        and not ("spot" in nodes and "ray.io/market-type" in labels)
    )


def turn(run: Run, chance: random.Random) -> None:
    run.cluster.clock += 1.0
    run.cluster.schedule(chance.choice)
    run.renew()
    run.place()


@examples(40)
@given(
    kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=4),
    asked=st.lists(st.sampled_from(SELECTIONS), min_size=1, max_size=8),
    widths=st.lists(st.sampled_from([1, 1, 2]), min_size=8, max_size=8),
    seed=st.integers(0, 2**16),
)
def test_members_get_places_on_nodes_that_they_select_and_nobody_waits_who_fits_somewhere(
    world: World, kinds: list[str], asked: list[dict[str, Any] | None], widths: list[int], seed: int
) -> None:
    cluster, chance = world.make([KINDS[kind] for kind in kinds]), random.Random(seed)
    by_name = dict(zip(cluster.total, kinds, strict=True))
    members = [make_selecting(n, nodes, workers=widths[n]) for n, nodes in enumerate(asked)]
    has_gpus = any(host.gpus for host in cluster.total.values())
    known = [one for one in members if fits_alone(one, cluster, "cuda" if has_gpus else "auto")]
    run = Run(cluster, "run", "auto", known)
    waits = set[str]()
    for _ in range(round(KEPT_S) * 3 + 10 * len(known)):
        turn(run, chance)
        for placement in run.running:
            nodes = asked[placement.identity.number]
            for name in placement.ranks_by_node:
                assert nodes is None or is_asked_for(nodes, by_name[name]), (nodes, by_name[name])
        if chance.random() < 0.3 and run.running:
            run.end(chance.choice(run.running))
        waits = {one.member for one in run.waiting}
    for one in known:
        nodes = asked[one.number] or {}
        fitting = [kind for kind in kinds if is_asked_for(nodes, kind) and (KINDS[kind][2] or not has_gpus)]
        room = sum(KINDS[kind][2] if has_gpus else 8 for kind in fitting)
        assert one.member not in waits or room < one.workers, (nodes, kinds)


def settle(run: Run, seconds: int = 3) -> None:
    for _ in range(seconds):
        turn(run, random.Random(0))


def list_selectors(run: Run) -> list[tuple[int, dict[str, str]]]:
    pending = list_pending(run)
    assert all(piece.pinned is None for group in pending for piece in group.pieces)
    return [(sum(piece.gpus for piece in group.pieces), dict(group.selector)) for group in pending]


def test_what_no_node_has_is_asked_for_by_its_labels_apart_from_what_others_ask_for(world: World) -> None:
    asked = [{"gpu_type": "H100", "spot": False}, {"gpu_memory_gb": 100}, {"rack": "7"}, None]
    members = [make_selecting(n, nodes, gpus_per_worker=0.0 if n > 1 else 0.5) for n, nodes in enumerate(asked)]
    run = Run(world.make([KINDS["cores"]]), "run", "auto", [*members, make_selecting(4, asked[0])])
    settle(run)
    assert [one.member for one in run.running] == ["member-3"]
    found = {str(sorted(selector.items())): gpus for gpus, selector in list_selectors(run)}
    assert found == {
        "[('ray.io/accelerator-type', 'H100'), ('ray.io/market-type', '!spot')]": 1,
        "[('ray.io/accelerator-type', 'in(H200,B200,GB200,B300,GB300)')]": 1,
        "[('rack', '7')]": 0,
    }
    said = run.manager.describe_pending()
    assert "1 x (1 GPU, 0.5 cores, on nodes with gpu_type=H100, spot=False; no node has gpu_type=H100" in said
    assert "(node-0: no GPU)" in said and "no node has rack=7 (node-0: 1)" in said


def test_a_gpu_that_turns_out_to_be_too_small_is_given_back_and_no_other_of_its_group_is_asked_for(
    world: World,
) -> None:
    run = Run(world.make([KINDS["A100-40"]]), "run", "auto", [make_selecting(0, LARGE)])
    settle(run, 2)
    assert run.cluster.free("node-0").gpus == (), "what an A100 has is seen by who runs there"
    settle(run, 3 * round(KEPT_S))
    assert run.cluster.free("node-0").gpus and not run.running
    expected = {TYPE: "in(A100)", "ray.io/node-group": "!in(small)", "ray.io/node-id": "!in(node-0)"}
    assert list_selectors(run) == [(1, expected)]
    assert "no node has gpu_memory_gb=80 (node-0: 39.4 GiB)" in run.manager.describe_pending()
    new = world.make([KINDS["A100-80"]]).total.pop("node-0")
    world.cluster, run.cluster.total["node-1"] = run.cluster, new
    settle(run, 10)
    assert [one.node for one in run.running] == ["node-1"]


@examples(300)
@given(st.from_regex(r"!{0,2}(in)?[(]?[A-Za-z_.-]{0,3}(, {0,2}[a-c]{0,2})?[)]?", fullmatch=True))
def test_selectors_are_what_ray_takes_for_selectors(text: str) -> None:
    def is_valid(check: Any) -> bool:
        try:
            return check() is None
        except SpecError:
            return False

    ours = is_valid(lambda: as_selection("nodes", {"team": text}) and None)
    rays = is_valid(lambda: validate_label_selector({"team": text}))
    assert ours == (rays and text not in ("", "!") and text.lstrip("!")[0] != "("), "what Ray does not document"


def make_node(name: str, *models: str, gb: Sequence[float] = (), **labels: str) -> Node:
    known = {key.replace("_", "-").replace("ray-io-", "ray.io/"): value for key, value in labels.items()}
    return Node(name, 4.0, models, 16.0, name, gpu_memory_gb=tuple(gb), labels=known)


def test_the_type_of_a_gpu_is_its_nodes_label_or_a_word_of_its_model() -> None:
    def fits(node: Node, **nodes: Any) -> bool:
        return is_selected(as_items(as_selection("nodes", nodes)), node)

    plain = make_node("a", "NVIDIA A100-SXM4-40GB", gb=[39.4])
    assert fits(plain, gpu_type="A100") and not fits(plain, gpu_type="A10") and not fits(plain, gpu_type="!A100")
    assert fits(plain, gpu_memory_gb=40) and not fits(plain, gpu_memory_gb=48)
    mixed = make_node("b", "NVIDIA A100-SXM4-80GB", "Tesla T4", gb=[80.0, 14.7], ray_io_accelerator_type="A100")
    assert not fits(mixed, gpu_type="T4"), "Ray gives it to nobody who asks for a T4"
    assert fits(mixed, gpu_type="A100") and not fits(mixed, gpu_type="A100", gpu_memory_gb=90)
    named = make_node("c", "GPU", ray_io_accelerator_type="T4")
    assert fits(named, gpu_type="in(T4,L4)") and not fits(named, gpu_memory_gb=24), "no T4 has as much"
    assert fits(make_node("d", "GPU"), gpu_memory_gb=24), "it is not known yet"
    assert not fits(make_node("e"), gpu_type="!H100"), "without a GPU"
    assert fits(make_node("f"), spot=False, team="!a") and not fits(make_node("f"), team="in(a,b)")


def test_a_refusal_names_the_nodes_and_what_they_have() -> None:
    nodes = [make_node("a", "Tesla T4"), make_node("b", "Tesla T4", rack="1"), make_node("c")]
    both = {"rack": "!1", "gpu_type": "T4"}

    def explain(among: Sequence[Node], selected: dict[str, Any]) -> str:
        return explain_unselected(as_items(as_selection("nodes", selected)), among)

    assert explain(nodes, {"gpu_type": "H100"}) == "no node has gpu_type=H100 (a, b: Tesla T4; c: no GPU)"
    assert explain(nodes, {"rack": "2"}) == "no node has rack=2 (a, c: no such label; b: 1)"
    assert explain(nodes, {**both, "spot": True}).startswith("no node has spot=True (")
    lacking = "no node has all of rack=!1, gpu_type=T4 (b lacks rack=!1; c lacks gpu_type=T4)"
    assert explain(nodes[1:], both) == lacking


def test_a_node_with_gpus_of_several_models_is_left_out_of_what_is_asked_for_by_the_label_of_one(
    world: World,
) -> None:
    cluster = world.make([(8.0, 64.0, 2, A100), (8.0, 64.0, 2, A100)])
    record = make_record("node-0", cluster.total["node-0"])
    seen = {"cpus": 8.0, "memory_gb": 64.0, "host": "node-0", "gpus": ["NVIDIA A100-SXM4-80GB", "Tesla T4"]}
    seen |= {"gpu_ids": ["a", "b"], "gpu_memory_gb": [80.0, 14.7]}
    offers = cluster.list_offers(on_gpus=True, agents={"node-0": Agent("node-0", record, seen)})
    busy = [offer._replace(free={}) for offer in offers]
    asked = make_selecting(0, {"gpu_type": "A100"})
    (request,) = plan_requests([asked], busy, "cuda")
    selectors = request.make_label_selectors()
    assert selectors == [{TYPE: "A100", "ray.io/node-id": "!in(node-0)"}]
