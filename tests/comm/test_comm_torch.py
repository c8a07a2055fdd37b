from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

CHILD = Path(__file__).with_name("comm_child.py")
ROOT = Path(__file__).resolve().parents[2]


needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed (make horovod builds it)"
)
BACKENDS = ["torch_dist", pytest.param("horovod", marks=needs_horovod)]


def needs_mpi() -> pytest.MarkDecorator:
    found = importlib.util.find_spec("horovod")
    if found is None or found.origin is None:
        return needs_horovod
    built = subprocess.run(["grep", "-rqs", "MPI_Init", Path(found.origin).parent / "torch"], check=False)
    return pytest.mark.skipif(
        shutil.which("mpirun") is None or built.returncode != 0,
        reason="mpirun is not installed, or Horovod is built without MPI (openmpi-bin, libopenmpi-dev)",
    )


def start(backend: str, scenario: str, rank: int, world: int, where: Path) -> subprocess.Popen[str]:
    arguments = [backend, scenario, (where / "meet").as_uri(), str(rank), str(world), str(where / f"{rank}.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(CHILD), *arguments], env=environment, stderr=subprocess.PIPE, text=True
    )


def ranks(backend: str, scenario: str, world: int, where: Path) -> list[Any]:
    """What each rank of a group of processes said; None for one that said nothing."""
    where.mkdir(exist_ok=True)
    processes = [start(backend, scenario, rank, world, where) for rank in range(world)]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [p.returncode for p in processes] == [0] * world, "\n".join(errors)
    files = [where / f"{rank}.json" for rank in range(world)]
    return [json.loads(f.read_text()) if f.exists() else None for f in files]


def under_mpi(world: int, where: Path) -> list[Any]:
    """What ranks that `mpirun` started said."""
    from ensemble.comm.horovod import mpi_command

    child = [sys.executable, str(CHILD), "mpi", "together", (where / "meet").as_uri(), "-", "-", str(where / "{}")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        mpi_command(world, child), env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((where / str(rank)).read_text()) for rank in range(world)]


@pytest.fixture(scope="module", params=[*BACKENDS, pytest.param("mpi", marks=needs_mpi())])
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    where = tmp_path_factory.mktemp("three")
    return under_mpi(3, where) if request.param == "mpi" else ranks(request.param, "together", 3, where)


def test_summed_gradients_are_those_of_one_process(three: list[Any]) -> None:
    import comm_child

    model = comm_child.Branches(torch.float64)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lost_peer_is_known_at_once(tmp_path: Path, backend: str) -> None:
    began = time.monotonic()
    said = ranks(backend, "lost", 2, tmp_path)
    assert "another worker of this member is lost" in said[0]
    assert time.monotonic() - began < 25


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, backend: str) -> None:
    process = start(backend, "absent", 0, 3, tmp_path)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "waited 1 s" in error and "missing ranks: 1, 2" in error


def test_one_worker_has_no_hooks_and_no_messages() -> None:
    from ensemble.comm import SingleRank
    from ensemble.comm.gradients import FusedBroadcast, GradientExchange

    model = torch.nn.Linear(3, 2)
    exchange = GradientExchange(list(model.parameters()), SingleRank())
    with exchange.overlap_backward():
        model(torch.ones(1, 3)).sum().backward()
    before = model.weight.grad
    exchange.finish()
    FusedBroadcast(list(model.parameters()), SingleRank())()
    assert len(exchange) == 0 and model.weight.grad is before
    assert not model.weight._post_accumulate_grad_hooks
