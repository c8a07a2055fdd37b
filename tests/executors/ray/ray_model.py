"""A model of how Ray gives out a cluster, and a run that lives on it: leases, and the packing of its members."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from ensemble.executors.ray import lease_manager, leases
from ensemble.executors.ray.agents import Agent, describe_node, describe_offer, read_labels
from ensemble.executors.ray.lease_manager import REST_S, LeaseManager
from ensemble.executors.ray.leases import Lease
from ensemble.executors.ray.request import Offer, ResourceRequest
from ensemble.schedule.needs import UNITS, Node, Placement, resolve_devices
from ensemble.schedule.packing import pack
from ensemble.spec import Identity

GIB = 2**30


def make_member(number: int = 0, **options: Any) -> Identity:
    asked = {"workers": 1, "cpus_per_worker": 1.0, "gpus_per_worker": 1.0, "memory_gb": None, **options}
    plain = {"params": {}, "seed": 0, "threads": 1, "precision": "fp32", "epochs": 1, "batch_size": 64}
    return Identity(member=f"member-{number}", number=number, **plain, **asked)  # type: ignore[arg-type]


@dataclasses.dataclass(eq=False)
class Piece:
    """Amounts of one node, in ten-thousandths of a core and in bytes."""

    cpus: int
    memory: int
    gpus: int
    pinned: str | None = None
    node: str | None = None
    names: tuple[str, ...] = ()


@dataclasses.dataclass(eq=False)
class Group:
    """A placement group (or a foreign job): its pieces get their nodes together or not at all."""

    owner: str
    pieces: list[Piece]
    selector: Mapping[str, str] = dataclasses.field(default_factory=dict)  # unless a piece is pinned

    @property
    def is_placed(self) -> bool:
        return all(piece.node is not None for piece in self.pieces)


@dataclasses.dataclass
class Host:
    cpus: int
    memory: int
    gpus: tuple[str, ...]
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpu_gb: float = 80.0

    def has(self, piece: Piece) -> bool:
        return piece.cpus <= self.cpus and piece.memory <= self.memory and piece.gpus <= len(self.gpus)


class Cluster:
    """Nodes (cores, GiB, GPUs; labels, memory of a GPU), what is reserved there: groups whole or not at all."""

    def __init__(self, hosts: Sequence[tuple[Any, ...]]) -> None:
        self.clock = 1000.0
        self.total = dict[str, Host]()
        for n, (cpus, memory, gpus, *more) in enumerate(hosts):
            names = tuple(f"GPU-{n}-{g}" for g in range(gpus))
            self.total[f"node-{n}"] = Host(round(cpus * 1e4), int(memory * GIB), names, *more)
        self.groups: list[Group] = []
        self.draining: dict[str, float | None] = {}  # until when
        self.full: set[str] = set()  # nodes whose temporary directory is full: no process starts there

    def free(self, name: str) -> Host:
        total = self.total[name]
        here = [piece for group in self.groups for piece in group.pieces if piece.node == name]
        taken = {gpu for piece in here for gpu in piece.names}
        return Host(
            total.cpus - sum(piece.cpus for piece in here),
            total.memory - sum(piece.memory for piece in here),
            tuple(gpu for gpu in total.gpus if gpu not in taken),
        )

    def submit(self, owner: str, *parts: tuple[Sequence[Mapping[str, float]], str | None]) -> Group:
        group = Group(owner, [self.cut(*part) for part in parts])
        self.groups.append(group)
        return group

    def cut(self, bundles: Sequence[Mapping[str, float]], pinned: str | None) -> Piece:
        assert all(bundles), "Ray refuses an empty bundle"
        amounts = Counter[str]()
        for bundle in bundles:
            assert bundle.get("GPU", 1.0) == 1.0
            assert all(abs(amount * 1e4 - round(amount * 1e4)) < 1e-6 for amount in bundle.values())
            amounts.update({name: round(amount * 1e4) for name, amount in bundle.items()})
        return Piece(amounts["CPU"], amounts["memory"] // 10_000, amounts["GPU"] // 10_000, pinned)

    def remove(self, group: Group) -> None:
        self.groups.remove(group)

    def could_ever_place(self, group: Group) -> bool:
        empty = Cluster([])
        empty.total = self.total
        pieces = [dataclasses.replace(piece, node=None) for piece in group.pieces]
        return empty.give(Group(group.owner, pieces, group.selector))

    def has_labels(self, name: str, selector: Mapping[str, str]) -> bool:
        labels = {**self.total[name].labels, "ray.io/node-id": name}
        for key, text in selector.items():
            values = text.removeprefix("!").removeprefix("in(").removesuffix(")").split(",")
            if (labels.get(key) in values) == text.startswith("!"):
                return False
        return True

    def schedule(self, pick: Any = min) -> int:
        return sum(self.give(group, pick) for group in self.groups if not group.is_placed)

    def give(self, group: Group, pick: Any = min) -> bool:
        if group not in self.groups:
            self.groups.append(group)
        for piece in group.pieces:
            able = [name for name in self.total if piece.pinned in (None, name) and name not in self.draining]
            able = [name for name in able if piece.pinned or self.has_labels(name, group.selector)]
            fits = [name for name in able if self.free(name).has(piece)]
            if not fits:
                for each in group.pieces:
                    each.node, each.names = None, ()
                return False
            names = self.free(at := pick(fits)).gpus[: piece.gpus]
            piece.node, piece.names = at, names
        return True

    def list_offers(self, *, on_gpus: bool, agents: Mapping[str, Agent] = MappingProxyType({})) -> list[Offer]:
        offers = []
        for name, host in self.total.items():
            free = self.free(name)
            amounts = {"CPU": free.cpus / 1e4, "memory": float(free.memory), "GPU": float(len(free.gpus))}
            record = make_record(name, host)
            node = describe_offer(record, name, agents.get(name), on_gpus=on_gpus)
            offers.append(Offer(name, node, amounts, read_labels(record)))
        return offers


def make_record(name: str, host: Host) -> dict[str, Any]:
    resources = {"CPU": host.cpus / 1e4, "memory": float(host.memory), "GPU": float(len(host.gpus))}
    given = {key: amount for key, amount in resources.items() if amount}
    return {"NodeID": name, "Resources": given, "Labels": {"ray.io/node-id": name, **host.labels}}


class Run:
    """A run: its leases, and the packing of its members into them, as the executor and the controller do it."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        devices: str,
        members: Sequence[Identity],
        limits: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.cluster, self.name, self.devices = cluster, name, devices
        self.waiting, self.running = list(members), list[Placement]()
        self.manager = LeaseManager(name, devices, members, limits=limits)
        self.agents: dict[str, Agent] = {}
        self.broken: set[str] = set()  # GPUs that are not offered any more

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.running

    def list_held(self) -> dict[str, list[Lease]]:
        held = {name: self.manager.on_node(name) for name in self.cluster.total}
        return {name: found for name, found in held.items() if found}

    def list_nodes(self) -> dict[str, Node]:
        """What the run offers its members of each node."""
        nodes = {}
        for name, held in self.list_held().items():
            host = self.cluster.total[name]
            gpus = tuple(gpu for gpu in host.gpus if gpu not in self.broken)
            seen = {"name": name, "host": name, "cpus": host.cpus / 1e4, "memory_gb": host.memory / GIB}
            seen |= {"gpus": ("A",) * len(gpus), "gpu_ids": gpus, "gpu_memory_gb": (host.gpu_gb,) * len(gpus)}
            seen |= {"gpu_names": tuple((gpu,) for gpu in gpus), "gpu_reasons": ()}
            agent = self.agents.setdefault(name, Agent(name, make_record(name, host), seen))
            agent.described, agent.broken = seen, self.broken
            for lease in held:
                lease.devices = agent.find_devices(lease.gpus)
                lease.is_unusable = agent.is_unusable(lease)
            nodes[name] = describe_node(agent, held, on_gpus=self.devices != "cpu")
        return nodes

    def renew(self) -> None:
        """What the executor does in each of its rounds."""
        self.manager.collect()
        for ray_id, _ in self.manager.pop_failed():
            self.manager.rest(ray_id, REST_S)
        if self.manager.is_replan_due:
            offers = self.cluster.list_offers(on_gpus=self.devices != "cpu", agents=self.agents)
            self.manager.set_offers(offers)
            self.manager.replan()
        self.manager.release_unused(list(self.list_nodes().items()))
        self.check()

    def place(self) -> None:
        """What the controller does: start what has a place, and say what is missing."""
        before = len(self.waiting), len(self.running)
        found = pack(self.waiting, self.running, list(self.list_nodes().values()), self.manager.devices)
        started = Counter(placement.member for placement in found)
        self.waiting = [one for one in self.waiting if not started[one.member]]
        self.running += found
        if before != (len(self.waiting), len(self.running)):
            self.say_demand()
        self.check()

    def say_demand(self) -> None:
        self.manager.set_demand(self.waiting, self.running)

    def end(self, placement: Placement) -> None:
        self.running.remove(placement)
        self.say_demand()

    def close(self) -> None:
        self.waiting, self.running = [], []
        self.manager.close()

    def check(self) -> None:
        """What runs, runs in what Ray gave to this run."""
        held = self.list_held()
        for placement in self.running:
            gpus = [gpu for gpu in placement.devices if gpu is not None]
            assert len(gpus) == len(set(gpus))
        for name in {name for placement in self.running for name in placement.ranks_by_node}:
            pieces = [p for group in {lease.group for lease in held[name]} for p in group.pieces if p.node == name]
            members = [(p, ranks) for p in self.running if (ranks := p.ranks_by_node.get(name))]
            needs = [placement.need.take_ranks(len(ranks)) for placement, ranks in members]
            total = round(sum(lease.cpus for lease in held[name]) * UNITS)
            cpus = sum(need.cpus_on(total) for need in needs) / UNITS
            assert cpus <= sum(piece.cpus + 1 for piece in pieces) / 1e4, "amounts are rounded down for Ray"
            memory = sum(need.memory for need in needs) / UNITS * GIB
            assert memory <= sum(piece.memory + 1 for piece in pieces)
            shares = Counter[str]()
            for placement, ranks in members:
                gpus = [gpu for rank in ranks if (gpu := placement.devices[rank]) is not None]
                shares.update(dict.fromkeys(gpus, placement.need.share))
            assert shares.keys() <= {gpu for piece in pieces for gpu in piece.names}
            assert all(share <= UNITS for share in shares.values())
        assert all(lease.group.is_placed for found in held.values() for lease in found)


def list_pending(run: Run) -> list[Group]:
    return [group for group in run.cluster.groups if group.owner == run.name and not group.is_placed]


def fits_alone(identity: Identity, cluster: Cluster, devices: str) -> bool:
    nodes = [offer.node for offer in cluster.list_offers(on_gpus=devices != "cpu")]
    return bool(pack([identity], [], nodes, resolve(devices, nodes)))


def resolve(devices: str, nodes: Sequence[Node]) -> str:
    return resolve_devices(devices, has_gpus=any(node.gpus for node in nodes))


class World:
    cluster: Cluster

    def request(self, request: ResourceRequest, name: str, avoided: Collection[str] = ()) -> Lease:
        parts = [(part.bundle.as_resources(), part.ray_id) for part in request.list_parts()]
        group = self.cluster.submit(name, *parts)
        selectors = [] if request.is_pinned else request.make_label_selectors(avoided) or []
        group.selector = dict(selectors[0]) if selectors else {}
        assert all(each == group.selector for each in selectors)
        return Lease(request, group, request.bundle, since=self.cluster.clock)

    def find_nodes(self, lease: Lease) -> list[str] | None:
        return [piece.node for piece in lease.group.pieces] if lease.group.is_placed else None

    def find_given(self, lease: Lease) -> list[tuple[str, tuple[str, ...]]] | None:
        if not lease.group.is_placed:
            return None
        full = [piece.node for piece in lease.group.pieces if piece.gpus and piece.node in self.cluster.full]
        if full:
            raise leases.ProbeError(full[0], "Ray starts no process there: No space left on device")
        found = []
        for piece in lease.group.pieces:
            found += [(piece.node, (gpu,)) for gpu in piece.names] or [(piece.node, ())]
        return found

    def make(self, hosts: Sequence[tuple[Any, ...]]) -> Cluster:
        self.cluster = Cluster(hosts)
        return self.cluster


def replace_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Have the leases of runs on a model instead of on Ray, and time stand still."""
    world = World()
    clock = SimpleNamespace(monotonic=lambda: world.cluster.clock)
    for module in (leases, lease_manager):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(leases, "_request", world.request)
    monkeypatch.setattr(leases, "_find_given", world.find_given)
    monkeypatch.setattr(leases, "_find_nodes", world.find_nodes)
    monkeypatch.setattr("ray.util.remove_placement_group", lambda group: world.cluster.remove(group))
    yield world
