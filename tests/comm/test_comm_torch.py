"""What every communicator does, over each backend that this machine has; a member's gradients over it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.launch.backends import unavailable_reason  # noqa: E402
from benchmarks.launch.ranks import run_ranks  # noqa: E402
from ensemble.comm import CommunicatorError, SingleRank  # noqa: E402
from ensemble.comm.gradients import FusedBroadcast, GradientExchange  # noqa: E402


@pytest.fixture(
    scope="module",
    params=[
        "gloo",
        pytest.param("horovod", marks=pytest.mark.more),
        pytest.param("horovod-mpi", marks=pytest.mark.slow),
    ],
)
def three(request: pytest.FixtureRequest) -> list[Any]:
    """What each of three ranks said."""
    if (reason := unavailable_reason(request.param)) is not None:
        pytest.skip(reason)
    return run_ranks("comm_ranks:together", {}, placement=[0] * 3, backend=request.param)


def test_summed_gradients_are_those_of_one_process(three: list[Any]) -> None:
    import comm_ranks

    model = comm_ranks.Branches(torch.float64)
    x = torch.arange(50, dtype=torch.float64).reshape(10, 5).sin()
    outputs = torch.cat([model(x[:7], branch=True), model(x[7:], branch=False)])
    (outputs.square().sum() / 10).backward()
    for said in three:
        for step in said["exchange"]["steps"]:
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    assert step[name] is None, f"{name} has no gradient anywhere: the optimizer must skip it"
                else:
                    assert step[name] == pytest.approx(parameter.grad.flatten().tolist(), rel=1e-12)


def test_all_ranks_have_the_same_bits_and_the_same_messages(three: list[Any]) -> None:
    assert three[0]["exchange"] == three[1]["exchange"] == three[2]["exchange"]
    said = three[0]["exchange"]
    first, second = said["sizes"][: said["messages"]], said["sizes"][said["messages"] :]
    assert first == second, "the buckets never change"
    assert 1 < said["messages"] < 8, "fused, but not into one"


def test_half_precision_is_summed_in_fp32(three: list[Any]) -> None:
    assert all(said["half"] == [2050.0, 40000.0] for said in three)


def test_uneven_and_empty_shares_are_gathered_in_rank_order(three: list[Any]) -> None:
    assert all(said["gathered"] == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]] for said in three)


def test_buffers_of_any_float_type_are_those_of_rank_0_exactly(three: list[Any]) -> None:
    third = torch.tensor(1 / 3, dtype=torch.bfloat16).item()
    for rank, said in enumerate(three):
        assert said["broadcast"] == [[0.1, 0.1], [third], [rank]], "integers are left alone"
        assert said["max"] == 2.0


def test_each_rank_gets_its_part_of_what_is_reduced_scattered_and_exchanged(three: list[Any]) -> None:
    total = [3.0 * i + 300 for i in range(6)]
    assert [said["collectives"]["reduce"] for said in three] == [None, total, None]
    for rank, said in enumerate(three):
        assert said["collectives"]["reduce_scatter"] == total[2 * rank : 2 * rank + 2]
        assert said["collectives"]["all_gather"] == [0.0, 100.0, 200.0]
        own = [2 * rank, 2 * rank + 1]
        assert said["collectives"]["all_to_all"] == [i + 100 * peer for peer in range(3) for i in own]


def test_groups_number_their_ranks_anew_in_rank_order(three: list[Any]) -> None:
    assert [said["groups"]["everyone"] for said in three] == [[0, 3], [1, 3], [2, 3]]
    assert [said["groups"].get("last") for said in three] == [[0, 2, 2.0, 0, 2], None, [1, 2, 2.0, 0, 2]]


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
