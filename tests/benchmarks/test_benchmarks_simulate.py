"""The simulator: what it must conserve, and closed forms of what is simple enough to have one."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples

from benchmarks.fleet.policies import Flotillas, in_cohorts, one_by_one
from benchmarks.fleet.simulate import Policy, Preparation, Simulated, Trainee, simulate
from ensemble.schedule.flotilla.model import Capacity
from ensemble.schedule.needs import Node
from ensemble.schedule.placement import ClusterSnapshot, Start
from ensemble.spec import Identity

SAMPLES = 100
rates = st.floats(1.0, 1000.0)


def trainee(number: int, rate: float = 100.0, epochs: int = 3) -> Trainee:
    identity = Identity(
        member=f"member-{number}", number=number, params={}, seed=number, workers=1, threads=1, precision="fp32",
        epochs=9, batch_size=10, cpus_per_worker=0.01, gpus_per_worker=1.0, memory_gb=None,
    )  # fmt: skip
    by_width = {width: rate * width**0.9 for width in (1, 2)}
    return Trainee(identity=identity, samples_per_s=by_width, epochs=epochs)


def cluster(nodes: int, gpus: int = 2, cores: float = 4.0) -> list[Node]:
    return [Node(f"node-{n}", cores, ("gpu",) * gpus, 64.0, f"node-{n}") for n in range(nodes)]


def flotillas(trainees: Sequence[Trainee], nodes: Sequence[Node]) -> Policy:
    room = Capacity(slots=tuple(len(node.gpus) for node in nodes), streams=2)
    return Flotillas(trainees, room, SAMPLES).starts


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Trainee], int, Preparation]:
    """Members, how many nodes there are, and what their preparation costs."""
    one = st.tuples(rates, st.integers(1, 9))
    trainees = [
        trainee(n, rate, epochs) for n, (rate, epochs) in enumerate(draw(st.lists(one, min_size=1, max_size=9)))
    ]
    prep = Preparation(cpu_s=draw(st.floats(0, 0.1)), workers=2, alone=draw(st.integers(1, 2)))
    return trainees, draw(st.integers(1, 3)), prep


@given(runs())
def test_all_members_complete_their_epochs_and_no_device_is_held_twice(
    run: tuple[list[Trainee], int, Preparation],
) -> None:
    check_run(*run, one_by_one, in_cohorts)


@examples(6)  # the plan of an example takes a fifth of a second
@given(runs())
def test_members_of_flotillas_complete_their_epochs_and_no_device_is_held_twice(
    run: tuple[list[Trainee], int, Preparation],
) -> None:
    check_run(*run, flotillas(run[0], cluster(run[1])))


def watch(policy: Policy, seen: list[Start]) -> Policy:
    """The policy, of which every start is kept."""

    def starts(cluster: ClusterSnapshot, now_s: float) -> Sequence[Start]:
        seen.extend(found := policy(cluster, now_s))
        return found

    return starts


def check_run(trainees: list[Trainee], nodes: int, prep: Preparation, *policies: Policy) -> None:
    for policy in policies:
        starts_seen: list[Start] = []

        found = simulate(trainees, cluster(nodes), watch(policy, starts_seen), prep, samples=SAMPLES)
        conserved(found, trainees, prep, nodes)
        held: dict[tuple[str, int | None], list[tuple[float, float]]] = {}
        for start in starts_seen:
            for device in start.placement.devices:
                held.setdefault((start.placement.node, device), []).append(found.spans[start.placement.member])
        for spans in held.values():
            ordered = sorted(spans)
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(ordered))


def conserved(found: Simulated, trainees: Sequence[Trainee], prep: Preparation, nodes: int) -> None:
    """Work is neither lost nor made, and nobody is faster than alone."""
    busy = 0.0
    for each in trainees:
        member = each.identity.member
        workers = found.workers[member]
        alone_s = each.epochs * SAMPLES / each.samples_per_s[workers]
        busy += workers * alone_s
        start, end = found.spans[member]
        assert end - start >= alone_s * (1 - 1e-9)
    assert found.busy_s == pytest.approx(busy)
    assert found.cpu_s == pytest.approx(found.prepared * prep.cpu_s)
    assert found.cpu_s <= 4.0 * nodes * max(end for _, end in found.spans.values()) * (1 + 1e-7)


@given(st.integers(1, 12), rates, st.integers(1, 9))
def test_equal_members_with_free_preparation_gain_nothing_from_being_planned(
    count: int, rate: float, epochs: int
) -> None:
    trainees, nodes = [trainee(n, rate, epochs) for n in range(count)], cluster(2)
    one, equal = (
        simulate(trainees, nodes, policy, Preparation(), samples=SAMPLES).makespan_s
        for policy in (one_by_one, in_cohorts)
    )
    waves = -(-count // 4)
    assert one == pytest.approx(waves * epochs * SAMPLES / rate)
    assert equal == pytest.approx(one)
    if count == 4:
        planned = simulate(trainees, nodes, flotillas(trainees, nodes), Preparation(), samples=SAMPLES).makespan_s
        assert planned == pytest.approx(one)


def test_a_cohort_goes_at_the_pace_of_its_slowest_and_faster_when_that_has_ended() -> None:
    trainees = [trainee(0, 50.0, 1), trainee(1, 100.0, 3)]
    found = simulate(trainees, cluster(1), in_cohorts, Preparation(), samples=SAMPLES)
    assert found.spans == {"member-0": (0.0, 2.0), "member-1": (0.0, pytest.approx(4.0))}
    alone = simulate(trainees, cluster(1), one_by_one, Preparation(), samples=SAMPLES)
    assert alone.spans["member-1"][1] == pytest.approx(3.0)


def test_preparation_limits_those_who_share_once_and_those_who_do_not_each() -> None:
    trainees = [trainee(n) for n in range(4)]  # 100 samples/s each
    prep = Preparation(cpu_s=0.05, workers=2, alone=2)  # 40 samples/s of two processes
    shared = simulate(trainees, cluster(1, gpus=4, cores=2), in_cohorts, prep, samples=SAMPLES)
    assert shared.makespan_s == pytest.approx(300 / 40) and shared.prepared == pytest.approx(300)
    own = simulate(trainees, cluster(1, gpus=4, cores=2), one_by_one, prep, samples=SAMPLES)
    assert own.makespan_s == pytest.approx(4 * 300 / 40) and own.prepared == pytest.approx(1200)
    spread = simulate(trainees, cluster(2, gpus=2, cores=2), in_cohorts, prep, samples=SAMPLES)
    assert spread.makespan_s == pytest.approx(300 / 80)
