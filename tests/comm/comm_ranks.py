"""What every communicator does, as `test_comm_torch` has its ranks check it over each backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ensemble.comm import Communicator
from ensemble.comm.communicator import CommunicatorError
from ensemble.comm.gradients import FusedBroadcast, GradientExchange


class Recording:
    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def start_all_reduce_(self, tensor: torch.Tensor, op: str = "sum") -> Any:
        self.sizes.append(tensor.numel())
        return self._comm.start_all_reduce_(tensor, op)  # type: ignore[arg-type]


class Branches(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7, dtype=dtype), nn.Linear(7, 3, dtype=dtype)
        self.often, self.never = (nn.Linear(7, 7, dtype=dtype) for _ in range(2))

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.often(x)) if branch else x)


def gradients(model: Branches) -> dict[str, list[float] | None]:
    return {n: None if p.grad is None else p.grad.flatten().tolist() for n, p in model.named_parameters()}


def check_gradients(comm: Communicator) -> dict[str, Any]:
    """Summed gradients of a float64 model, 10 samples shared out unevenly, the last rank with none."""
    model = Branches(torch.float64)
    recording = Recording(comm)
    fused = GradientExchange(list(model.parameters()), recording, bucket_bytes=200, first_bucket_bytes=100)
    x = torch.arange(50, dtype=torch.float64).reshape(10, 5).sin()
    alone = Branches(torch.float64)
    outputs = torch.cat([alone(x[:7], branch=True), alone(x[7:], branch=False)])
    (outputs.square().sum() / 10).backward()
    bounds = [0, 7, 10] + [10] * (comm.world - 2)
    steps = []
    for _ in range(2):
        share = x[bounds[comm.rank] : bounds[comm.rank + 1]]
        if len(share):
            with fused.overlap_backward():
                (model(share, branch=comm.rank == 0).square().sum() / 10).backward()
        fused.finish()
        steps.append(gradients(model))
        for name, expected in gradients(alone).items():
            # What has no gradient anywhere has none: the optimizer must skip it.
            assert steps[-1][name] == (expected and pytest.approx(expected, rel=1e-12)), name
        model.zero_grad(set_to_none=True)
    assert 1 < len(fused) < 8, "fused, but not into one"
    assert recording.sizes[: len(fused)] == recording.sizes[len(fused) :], "the buckets never change"
    return {"steps": steps, "sizes": recording.sizes}


def check_half(comm: Communicator) -> None:
    """A sum that fp16 cannot hold on the way: 2048 + 1 + 1 and 40000 + 40000 - 40000."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    fused = GradientExchange([p], comm)
    p.grad = torch.tensor([[2048.0, 1.0, 1.0][comm.rank], [40000.0, 40000.0, -40000.0][comm.rank]]).half()
    fused.finish()
    assert p.grad.dtype == torch.float16 and p.grad.tolist() == [2050.0, 40000.0]


def check_broadcast(comm: Communicator) -> None:
    """Buffers of any float type are those of rank 0 exactly; integers are left alone."""
    shares, thirds = torch.full((2,), 0.1, dtype=torch.float64), torch.full((1, 1), 1 / 3, dtype=torch.bfloat16)
    buffers = [shares + comm.rank, thirds + comm.rank, torch.tensor(comm.rank)]
    FusedBroadcast(buffers, comm)()
    third = torch.tensor(1 / 3, dtype=torch.bfloat16).item()
    assert [b.flatten().tolist() for b in buffers] == [[0.1, 0.1], [third], [comm.rank]]


def check_collectives(comm: Communicator) -> None:
    """Each rank gets its part; uneven and empty shares come in the order of the ranks."""
    rank, rows = comm.rank, torch.arange(6, dtype=torch.float32).reshape(-1, 1) + 100 * comm.rank
    total, summed = rows.clone(), [3.0 * i + 300 for i in range(6)]
    comm.reduce_(total, root=1)
    assert rank != 1 or total.flatten().tolist() == summed
    assert comm.reduce_scatter(rows).flatten().tolist() == summed[2 * rank : 2 * rank + 2]
    own = [2 * rank, 2 * rank + 1]
    exchanged = comm.all_to_all(rows.to(torch.uint8)).flatten().tolist()
    assert exchanged == [(i + 100 * peer) % 256 for peer in range(3) for i in own]
    assert torch.cat(comm.all_gather(rows[:1], equal=True)).flatten().tolist() == [0.0, 100.0, 200.0]
    shares = torch.cat(comm.all_gather(torch.full((rank, 2), float(rank))))
    assert shares.tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    top = torch.tensor([float(rank)])
    comm.all_reduce_(top, "max")
    assert top.item() == 2.0


def check_groups(comm: Communicator) -> None:
    """Groups number their ranks anew, in rank order; every rank may be in several, and one has them all."""
    last, everyone = comm.group([2, 0]), comm.group(range(comm.world))
    assert everyone is not None and (everyone.rank, everyone.world) == (comm.rank, 3)
    assert (last is None) == (comm.rank == 1)
    if last is not None:
        values = torch.tensor([float(comm.rank + 1)])
        last.broadcast_(values, root=0)
        last.all_reduce_(values)
        with pytest.raises(CommunicatorError, match=r"group.* made|make a group"):
            last.group([0, 1])  # rank 1 would never make it
        gathered = torch.cat(last.all_gather(torch.tensor([comm.rank]), equal=True))
        assert [last.rank, last.world, values.item(), *gathered.tolist()] == [comm.rank // 2, 2, 2.0, 0, 2]


def check_many_under_way(comm: Communicator) -> None:
    """More messages of one kind at once than Horovod has names; each rank waits in another order."""
    tensors = [torch.full((3,), float(i)) for i in range(40)]
    pending = [comm.start_all_reduce_(tensor) for tensor in tensors]
    for message in pending if comm.rank else reversed(pending):
        message.wait()
    assert [tensor.tolist() for tensor in tensors] == [[3.0 * i] * 3 for i in range(40)]


def check_together(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    for check in (check_half, check_broadcast, check_collectives, check_groups, check_many_under_way):
        check(comm)
    alike = check_gradients(comm)
    comm.barrier(300.0)
    return alike
