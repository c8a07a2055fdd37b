"""What the ranks of `test_hierarchical` do; in a module of its own, so that they can import it."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch

from ensemble.comm import Communicator
from ensemble.comm.exchange_plan import ExchangePlan, open_communicator
from ensemble.comm.hierarchical import Hierarchical
from ensemble.comm.hosts import gather_host_keys, group_by_host


@functools.cache
def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank has: not to be written to."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(size, generator=generator, dtype=torch.float64) * 100 - 50).to(dtype)


@functools.cache
def sum_exactly(world: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([values(rank, size, dtype).double() for rank in range(world)]).sum(0)


def correct(comm: Communicator, hierarchical: Communicator) -> dict[str, Any]:
    """Sums, largest and smallest against the flat ones, in exact arithmetic and beyond the size of a gather."""
    said: dict[str, Any] = {}
    sizes = {torch.int64: (1, 300_000), torch.float64: (1000,), torch.float32: (1, 1000, 300_000)}
    for dtype in sizes:
        for size in sizes[dtype]:
            own = values(comm.rank, size, dtype)
            one, other = own.clone(), own.clone()
            comm.all_reduce_(one)
            hierarchical.all_reduce_(other)
            again = own.clone()
            hierarchical.start_all_reduce_(again).wait()
            exact = sum_exactly(comm.world, size, dtype)
            limit = 0 if dtype == torch.int64 else 1e-13 if dtype == torch.float64 else 1e-5
            assert all((sums.double() - exact).abs().max() <= limit * 400 for sums in (one, other)), (dtype, size)
            assert torch.equal(other, again), "the same from run to run"
            said[f"{dtype} {size}"] = other.view(torch.uint8).sum().item(), other[:3].tolist()
    for op in ("max", "min"):
        one, other = (values(comm.rank, 100, torch.float32).clone() for _ in range(2))
        comm.all_reduce_(one, op)  # type: ignore[arg-type]
        hierarchical.all_reduce_(other, op)  # type: ignore[arg-type]
        assert torch.equal(one, other), op
    return said


def in_order(comm: Communicator, hierarchical: Communicator) -> None:
    tensors = [torch.full((size,), float(comm.rank + i)) for i, size in enumerate((10, 300_000, 20, 5000, 1))]
    pending = [hierarchical.start_all_reduce_(tensor) for tensor in tensors]
    between = torch.ones(7)
    hierarchical.all_reduce_(between)
    for each in pending:
        each.wait()
    ranks = sum(range(comm.world))
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, ranks + i * comm.world)), i
    assert torch.equal(between, torch.full((7,), float(comm.world)))


def together(comm: Communicator, options: dict[str, Any]) -> list[Any]:
    said = []
    for groups in options["groups"]:
        hierarchical = Hierarchical(comm, tuple(map(tuple, groups)))
        said.append(correct(comm, hierarchical))
        in_order(comm, hierarchical)
        hierarchical.ways = ((1000, "hierarchical"), (100_000, "flat"), (1 << 30, "hierarchical"))
        in_order(comm, hierarchical)
        row = torch.tensor([comm.rank])
        assert torch.cat(hierarchical.all_gather(row)).tolist() == list(range(comm.world))
        hierarchical.stop_thread()
    return said


def tuned(comm: Communicator, options: dict[str, Any]) -> list[Any]:
    said = []
    for word in options["words"]:
        opened, chosen = open_communicator(comm, word, 4 * 320_305, budget_s=0.3)
        kept = ExchangePlan.from_dict(asdict(ExchangePlan(chosen))).tuned
        assert kept == chosen
        again, _ = open_communicator(comm, word, 0, known=kept)
        for each in (opened, again):
            tensor = values(comm.rank, 1000, torch.float32).clone()
            each.all_reduce_(tensor)
            said.append(tensor.view(torch.uint8).sum().item())
            if isinstance(each, Hierarchical):
                each.stop_thread()
        said.append(asdict(chosen))
    return said


def on_hosts(comm: Communicator, options: dict[str, Any]) -> Any:
    groups = group_by_host(gather_host_keys(comm))
    hierarchical = Hierarchical(comm, groups)
    said = correct(comm, hierarchical)
    in_order(comm, hierarchical)
    return {"groups": groups, "message": said}
