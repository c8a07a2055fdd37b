"""Population based training (Jaderberg et al. 2017): who goes on from whose state, with which hyperparameters.

What a generation does follows from the results of the one before and the seed: neither how many members train side
by side nor an interruption makes a difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.spec import Ensemble, Identity
from ensemble.spec.identity import make_lineage
from ensemble.spec.population import identify_in_population
from ensemble.store.member import ENDED

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from ensemble.search.searcher import Searcher
    from ensemble.store import MemberState, RunState


class Population:
    """The members of a population; those that a user added to the run do not belong to it."""

    def __init__(self, ensemble: Ensemble, state: RunState, searcher: Searcher) -> None:
        assert ensemble.search is not None
        self._ensemble, self._search = ensemble, ensemble.search
        self._state, self._searcher = state, searcher
        self._options = self._search.sampler_options
        self.size: int = self._options["population"]

    @property
    def proposed(self) -> int:
        """How many members the log has, those included that it has lost."""
        places = (member.identity.get("population") for member in self._state.members.values())
        return max((where["generation"] * self.size + where["place"] + 1 for where in places if where), default=0)

    def _read_generation(self, generation: int) -> list[MemberState | None]:
        """The members of a generation by place; None where there is none yet, or its declaration was lost."""
        members: list[MemberState | None] = [None] * self.size
        for member in self._state.members.values():
            where = member.identity.get("population")
            if where and where["generation"] == generation and where["place"] < self.size:
                members[where["place"]] = member
        return members

    def _value(self, member: MemberState | None) -> float | None:
        """The objective of a member that has finished, so that higher is better; None where it has none."""
        value = None if member is None else member.metrics.get(str(self._ensemble.objective))
        if member is None or member.state != "finished" or value is None or not math.isfinite(value):
            return None
        return -value if self._ensemble.mode == "min" else value

    def count_ready(self, proposed: int) -> int:
        """How many members may be proposed now, after so many: those that the generation in progress lacks."""
        generation, place = divmod(proposed, self.size)
        if place or not generation:
            return self.size - place
        last = self._read_generation(generation - 1)
        has_ended = all(member is None or member.state in ENDED for member in last)
        return self.size if has_ended and any(self._value(member) is not None for member in last) else 0

    def explain_end(self, proposed: int) -> str | None:
        """Why no generation can follow after so many members: nobody of the last has finished. None: one can."""
        generation, place = divmod(proposed, self.size)
        if place or not generation:
            return None
        last = self._read_generation(generation - 1)
        if any(member is not None and member.state not in ENDED for member in last):
            return None
        if any(self._value(member) is not None for member in last):
            return None
        errors = [member.error or f"{member.id} was {member.state}" for member in last if member is not None]
        return f"no member of generation {generation - 1} finished, so none can go on: {', '.join(errors[:1])}"

    def propose(self, number: int, proposed: int) -> Identity:
        """The next member, after so many."""
        generation, place = divmod(proposed, self.size)
        where = {"generation": generation, "place": place}
        if not generation:
            return identify_in_population(
                self._ensemble, number, self._searcher.ask(number), **where, first=number
            )
        last, seed = self._read_generation(generation - 1), [self._search.seed, generation, place]
        at = choose_parent([self._value(member) for member in last], place, self._options["quantile"], seed)
        parent, before = last[at], last[place]
        assert parent is not None
        trial = self._searcher.get_trial(parent.number)
        suggested = trial.params if at == place else explore(trial, self._options, seed)
        code = parent.find_other_code(self._state.header.code)
        lineage = make_lineage(parent.id, warm=True, code=code, whole=True)
        params = self._searcher.ask(number, suggested, lineage)
        first = number if before is None else before.identity["population"]["first"]
        return replace(
            identify_in_population(self._ensemble, number, params, **where, first=first), lineage=lineage
        )


def choose_parent(values: Sequence[float | None], place: int, quantile: float, seed: Sequence[int]) -> int:
    """The place of the last generation from whose state the new member of a place goes on (truncation selection).

    Args:
        values: of the last generation by place, higher is better; None: it has failed. One has not.
        quantile: the part of the population that is replaced, at least one member, and by which; 0: nobody is. Who
            has failed is replaced in any case.
    """
    moved = max(1, round(quantile * len(values)))
    worst = len(values) - moved if quantile else len(values)
    ranked = sorted(range(len(values)), key=lambda at: math.inf if (value := values[at]) is None else -value)
    best = [at for at in ranked[:moved] if values[at] is not None]
    is_replaced = values[place] is None or (place in ranked[worst:] and place not in best)
    return int(np.random.default_rng(seed).choice(best)) if is_replaced else place


def explore(trial: FrozenTrial, options: dict[str, Any], seed: Sequence[int]) -> dict[str, Any]:
    """What is suggested to a member that takes the place of one of the worst: values kept or changed, by name."""
    rng = np.random.default_rng([*seed, 1])
    made: dict[str, Any] = {}
    for name, value in trial.params.items():
        is_drawn, goes_up = rng.random() < options["resample"], bool(rng.random() < 0.5)
        if name in options["inherit"]:
            made[name] = value
        elif not is_drawn:
            made[name] = perturb(trial.distributions[name], value, options["factor"], goes_up=goes_up)
    return made


def perturb(distribution: BaseDistribution, value: Any, factor: float, *, goes_up: bool) -> Any:
    """A neighbour of a value inside its distribution: multiplied or divided; of a choice of numbers, the next one.

    Other choices stay, as they have no order.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sign = 1 if goes_up else -1
    if isinstance(distribution, CategoricalDistribution):
        if not all(type(choice) in (int, float) for choice in distribution.choices):
            return value
        ordered: list[Any] = sorted(distribution.choices)
        return ordered[min(max(ordered.index(value) + sign, 0), len(ordered) - 1)]
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    moved, low, step = value * factor**sign, distribution.low, distribution.step
    if step is not None:
        steps, before = round((moved - low) / step), round((value - low) / step)
        moved = low + step * (before + sign if steps == before else steps)
    moved = min(max(moved, low), distribution.high)
    return int(moved) if isinstance(distribution, IntDistribution) else float(moved)
