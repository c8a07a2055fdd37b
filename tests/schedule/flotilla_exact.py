"""The least makespan of `ensemble.schedule.flotilla`'s model, exactly: a mixed-integer linear program, by HiGHS.

For member i: x[i, w] its width is w; s[i] its start; d[i, k] the pace of its flotilla in segment k of the stream,
where the segments lie between the numbers of epochs that members have; e[i] = s[i] + sum of segment lengths x d[i,
k] its end. For a pair: same[i, j] they are one flotilla (then they start together, and d of each is at least the
time of the other in every segment that the other reaches); before[i, j] i ends before j starts; early[i, j] j
starts no later than i, an order of all starts. Slots: where i starts, its width and those of the members on its
node that started no later and have not ended are together at most the node's slots. Streams: each flotilla has one
of `streams` lanes, and two in a lane are the same, or one ends before the other starts. Nothing is relaxed: nodes,
streams, paces by segment and slots freed by members that end early are those of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from ensemble.schedule.flotilla.initial import FlotillaPlan
from ensemble.schedule.flotilla.model import Problem


@dataclass(frozen=True)
class Exact:
    """`makespan` is the least (in the problem's unit) where `proven`; `bound` no plan can be below.

    `starts` are those of the plan's flotillas, which are in this order.
    """

    makespan: float
    bound: float
    proven: bool
    plan: FlotillaPlan | None
    starts: tuple[float, ...] = ()

    def list_orders(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """The plan's flotillas in each order of those that start together."""
        assert self.plan is not None
        timed = zip(self.plan.flotillas, self.starts, strict=True)
        together = [[f for f, _ in group] for _, group in itertools.groupby(timed, lambda one: round(one[1], 6))]
        for order in itertools.product(*map(itertools.permutations, together)):
            yield tuple(itertools.chain.from_iterable(order))


class _Program:
    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[dict[int, float], float]] = []

    def variable(self, lower: float = 0.0, upper: float = 1.0, integral: bool = True) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.integral.append(int(integral))
        return len(self.lower) - 1

    def at_most(self, terms: list[tuple[float, int]], limit: float) -> None:
        row: dict[int, float] = {}
        for factor, variable in terms:
            row[variable] = row.get(variable, 0.0) + factor
        self.rows.append((row, limit))

    def equal(self, terms: list[tuple[float, int]], value: float) -> None:
        self.at_most(terms, value)
        self.at_most([(-factor, variable) for factor, variable in terms], -value)


def least_makespan(problem: Problem, upper: float, time_limit_s: float = 600.0) -> Exact:
    """The optimum of a problem of few members with nothing busy.

    Args:
        upper: a makespan that some plan reaches.
    """
    assert not problem.busy
    count, slots, lanes = len(problem.names), problem.capacity.slots, problem.capacity.streams
    program = _Program()
    epochs = problem.epochs.tolist()
    times = problem.times
    levels = [0, *sorted(set(epochs))]
    segments = list(itertools.pairwise(levels))
    end = program.variable(problem.lower_bound, upper, integral=False)
    options = [[w for w in range(1, times.shape[1]) if times[i, w] < times[i, w - 1]] for i in range(count)]
    x = [{w: program.variable() for w in options[i]} for i in range(count)]
    s = [program.variable(0.0, upper, integral=False) for _ in range(count)]
    d = [
        {k: program.variable(0.0, upper, integral=False) for k, (_, b) in enumerate(segments) if b <= epochs[i]}
        for i in range(count)
    ]
    width = [[(float(w), v) for w, v in x[i].items()] for i in range(count)]
    time = [[(float(times[i, w]), v) for w, v in x[i].items()] for i in range(count)]
    stop = [[(1.0, s[i])] + [(float(b - a), d[i][k]) for k, (a, b) in enumerate(segments) if k in d[i]]
            for i in range(count)]  # fmt: skip
    slowest = [float(times[i, options[i][0]]) for i in range(count)]
    pairs = list(itertools.combinations(range(count), 2))
    both = list(itertools.permutations(range(count), 2))
    same = {pair: program.variable() for pair in pairs}
    same |= {(j, i): v for (i, j), v in same.items()}
    before = {pair: program.variable() for pair in both}
    early = {pair: program.variable() for pair in both}

    for i in range(count):
        program.equal([(1.0, v) for v in x[i].values()], 1.0)
        program.at_most([*stop[i], (-1.0, end)], 0.0)
        for k in d[i]:
            program.at_most([*time[i], (-1.0, d[i][k])], 0.0)
    area = [(float(w * times[i, w] * epochs[i]), v) for i in range(count) for w, v in x[i].items()]
    program.at_most([*area, (-float(sum(slots)), end)], 0.0)
    for i, j in both:
        program.at_most([(1.0, s[i]), (-1.0, s[j]), (upper, same[i, j])], upper)
        for k in d[i]:
            if k in d[j]:
                program.at_most([*time[j], (-1.0, d[i][k]), (slowest[j], same[i, j])], slowest[j])
        program.at_most([*stop[i], (-1.0, s[j]), (upper, before[i, j])], upper)
        # j starts no later than i where early[i, j]; one of each pair does, both where they are the same
        program.at_most([(1.0, s[j]), (-1.0, s[i]), (upper, early[i, j])], upper)
        program.at_most([(1.0, same[i, j]), (-1.0, early[i, j])], 0.0)
        program.at_most([(1.0, before[i, j]), (-1.0, early[j, i])], 0.0)
    for i, j in pairs:
        program.at_most([(-1.0, early[i, j]), (-1.0, early[j, i])], -1.0)
        program.at_most([(1.0, same[i, j]), (1.0, before[i, j]), (1.0, before[j, i])], 1.0)
    for i, j, k in itertools.permutations(range(count), 3):
        program.at_most([(1.0, early[i, j]), (1.0, early[j, k]), (-1.0, early[i, k])], 1.0)
        program.at_most([(1.0, same[i, j]), (1.0, same[j, k]), (-1.0, same[i, k])], 1.0)

    # slots: held[i, j] is what j holds on i's node where i starts
    on = [[program.variable() for _ in slots] for _ in range(count)]
    most = float(max(slots))
    held = {pair: program.variable(0.0, most, integral=False) for pair in both}
    for i in range(count):
        program.equal([(1.0, v) for v in on[i]], 1.0)
        capacity = [(-float(slots[n]), on[i][n]) for n in range(len(slots))]
        program.at_most([*width[i], *((1.0, held[i, j]) for j in range(count) if j != i), *capacity], 0.0)
    for i, j in both:
        for n in range(len(slots)):
            # width of j - most x (not early, or ended before, or on another node)
            program.at_most(
                [
                    *width[j],
                    (-1.0, held[i, j]),
                    (most, early[i, j]),
                    (-most, before[j, i]),
                    (most, on[i][n]),
                    (most, on[j][n]),
                ],
                3 * most,
            )
    if lanes < count:
        lane = [[program.variable(0.0, float(k <= i)) for k in range(lanes)] for i in range(count)]
        for i in range(count):
            program.equal([(1.0, v) for v in lane[i]], 1.0)
        for i, j in pairs:
            apart = [(-1.0, same[i, j]), (-1.0, before[i, j]), (-1.0, before[j, i])]
            for k in range(lanes):
                program.at_most([(1.0, lane[i][k]), (1.0, lane[j][k]), *apart], 1.0)
                program.at_most([(1.0, lane[i][k]), (-1.0, lane[j][k]), (1.0, same[i, j])], 1.0)
                program.at_most([(1.0, lane[j][k]), (-1.0, lane[i][k]), (1.0, same[i, j])], 1.0)
    return _solve(program, problem, end, x, s, same, time_limit_s)


def _solve(
    program: _Program,
    problem: Problem,
    end: int,
    x: list[dict[int, int]],
    s: list[int],
    same: dict[tuple[int, int], int],
    time_limit_s: float,
) -> Exact:
    entries = [(r, c, v) for r, (row, _) in enumerate(program.rows) for c, v in row.items()]
    row, column, value = (np.array(part) for part in zip(*entries, strict=True))
    shape = (len(program.rows), len(program.lower))
    matrix = coo_array((value, (row, column)), shape=shape).tocsr()
    cost = np.zeros(shape[1])
    cost[end] = 1.0
    found = milp(
        cost,
        constraints=LinearConstraint(matrix, -np.inf, np.array([limit for _, limit in program.rows])),
        bounds=Bounds(np.array(program.lower), np.array(program.upper)),
        integrality=np.array(program.integral),
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
    )
    if found.x is None:
        return Exact(np.inf, found.mip_dual_bound or 0.0, False, None)
    widths = tuple(max(options, key=lambda w: found.x[options[w]]) for options in x)
    flotillas: list[list[int]] = []
    for i in sorted(range(len(s)), key=lambda i: (found.x[s[i]], i)):
        mate = next((f for f in flotillas if found.x[same[f[0], i]] > 0.5), None)
        if mate is None:
            flotillas.append([i])
        else:
            mate.append(i)
    plan = FlotillaPlan(tuple(map(tuple, flotillas)), widths)
    starts = tuple(float(found.x[s[flotilla[0]]]) for flotilla in flotillas)
    return Exact(float(found.fun), float(found.mip_dual_bound), found.status == 0, plan, starts)
