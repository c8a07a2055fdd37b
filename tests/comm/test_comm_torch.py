"""What every communicator does, over each backend that this machine has; a member's gradients over it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from benchmarks.launch.backends import unavailable_reason
from benchmarks.launch.ranks import run_ranks
from ensemble.comm import CommunicatorError, SingleRank
from ensemble.comm.gradients import FusedBroadcast, GradientExchange


@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("horovod", marks=pytest.mark.more), pytest.param("horovod-mpi", marks=pytest.mark.slow)],
)
def test_every_communicator_does_the_same(backend: str) -> None:
    if (reason := unavailable_reason(backend)) is not None:
        pytest.skip(reason)
    ranks = run_ranks("comm_ranks:check_together", {}, placement=[0] * 3, backend=backend)
    assert ranks == [ranks[0]] * 3, "the same bits, and the same messages"


@pytest.mark.parametrize("backend", ["torch_dist", "horovod"])
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, backend: str) -> None:
    if backend == "horovod" and (reason := unavailable_reason(backend)) is not None:
        pytest.skip(reason)
    connect = importlib.import_module(f"ensemble.comm.{backend}").connect
    where = {"rank": 0, "world": 3, "device": torch.device("cpu"), "rendezvous_timeout_s": 0.2}
    with pytest.raises(CommunicatorError, match=r"waited 0\.2 s .* missing ranks: 1, 2"):
        connect((tmp_path / "meet").as_uri(), **where)


def test_one_worker_has_no_hooks_and_no_messages() -> None:
    model = torch.nn.Linear(3, 2)
    exchange = GradientExchange(list(model.parameters()), SingleRank())
    with exchange.overlap_backward():
        model(torch.ones(1, 3)).sum().backward()
    before = model.weight.grad
    exchange.finish()
    FusedBroadcast(list(model.parameters()), SingleRank())()
    assert len(exchange) == 0 and model.weight.grad is before
    assert not model.weight._post_accumulate_grad_hooks
