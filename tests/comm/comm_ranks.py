"""What the ranks of `test_comm_torch` do; in a module of its own, so that they can import it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ensemble.comm import Communicator
from ensemble.comm.communicator import CommunicatorError
from ensemble.comm.gradients import FusedBroadcast, GradientExchange


class Recording:
    """A communicator that notes the size of each all-reduce."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def start_all_reduce_(self, tensor: torch.Tensor, op: str = "sum") -> Any:
        self.sizes.append(tensor.numel())
        return self._comm.start_all_reduce_(tensor, op)  # type: ignore[arg-type]


class Branches(nn.Module):
    """Layers that some ranks do not use."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7, dtype=dtype)
        self.often = nn.Linear(7, 7, dtype=dtype)
        self.never = nn.Linear(7, 7, dtype=dtype)
        self.last = nn.Linear(7, 3, dtype=dtype)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.often(x)) if branch else x)


def gradients(model: Branches) -> dict[str, list[float] | None]:
    return {n: None if p.grad is None else p.grad.flatten().tolist() for n, p in model.named_parameters()}


def exchange(comm: Communicator) -> dict[str, Any]:
    """Summed gradients of a float64 model, 10 samples shared out unevenly, the last rank with none."""
    model = Branches(torch.float64)
    recording = Recording(comm)
    fused = GradientExchange(list(model.parameters()), recording, bucket_bytes=200, first_bucket_bytes=100)
    x = torch.arange(50, dtype=torch.float64).reshape(10, 5).sin()
    bounds = [0, 7, 10] + [10] * (comm.world - 2)
    steps = []
    for _ in range(2):
        share = x[bounds[comm.rank] : bounds[comm.rank + 1]]
        if len(share):
            with fused.overlap_backward():
                (model(share, branch=comm.rank == 0).square().sum() / 10).backward()
        fused.finish()
        steps.append(gradients(model))
        model.zero_grad(set_to_none=True)
    return {"steps": steps, "messages": len(fused), "sizes": recording.sizes}


def half(comm: Communicator) -> list[float]:
    """A sum that fp16 cannot hold on the way: 2048 + 1 + 1 and 40000 + 40000 - 40000."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    fused = GradientExchange([p], comm)
    first = [2048.0, 1.0, 1.0][comm.rank]
    second = [40000.0, 40000.0, -40000.0][comm.rank]
    p.grad = torch.tensor([first, second], dtype=torch.float16)
    fused.finish()
    assert p.grad.dtype == torch.float16
    return p.grad.tolist()


def together(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {"exchange": exchange(comm), "half": half(comm)}
    share = torch.full((comm.rank, 2), float(comm.rank))
    said["gathered"] = torch.cat(comm.all_gather(share)).tolist()
    buffers = [
        torch.full((2,), 0.1 + comm.rank, dtype=torch.float64),
        torch.full((1, 1), 1 / 3 + comm.rank, dtype=torch.bfloat16),
        torch.tensor(comm.rank),
    ]
    FusedBroadcast(buffers, comm)()
    said["broadcast"] = [b.flatten().tolist() for b in buffers]
    said["collectives"] = collectives(comm)
    said["groups"] = groups(comm)
    top = torch.tensor([float(comm.rank)])
    comm.all_reduce_(top, "max")
    said["max"] = top.item()
    comm.barrier(300.0)
    return said


def collectives(comm: Communicator) -> dict[str, Any]:
    rows = torch.arange(comm.world * 2, dtype=torch.float32).reshape(-1, 1) + 100 * comm.rank
    total = rows.clone()
    comm.reduce_(total, root=1)
    return {
        "reduce": total.flatten().tolist() if comm.rank == 1 else None,
        "reduce_scatter": comm.reduce_scatter(rows).flatten().tolist(),
        "all_to_all": comm.all_to_all(rows.to(torch.uint8)).flatten().tolist(),
        "all_gather": torch.cat(comm.all_gather(rows[:1], equal=True)).flatten().tolist(),
    }


def groups(comm: Communicator) -> dict[str, Any]:
    """Groups number their ranks anew, in rank order; every rank may be in several, and one has them all."""
    last, everyone = comm.group([2, 0]), comm.group(range(comm.world))
    assert everyone is not None
    said: dict[str, Any] = {"everyone": [everyone.rank, everyone.world]}
    if last is not None:
        values = torch.tensor([float(comm.rank + 1)])
        last.broadcast_(values, root=0)
        last.all_reduce_(values)
        with pytest.raises(CommunicatorError, match=r"group.* made|make a group"):
            last.group([0, 1])  # rank 1 would never make it
        gathered = torch.cat(last.all_gather(torch.tensor([comm.rank]), equal=True))
        said["last"] = [last.rank, last.world, values.item(), *gathered.tolist()]
    return said
