"""Population based training (Jaderberg et al. 2017): who goes on from whose state, with which hyperparameters.

A population trains in generations, of which each takes its part of the epochs. When all members of a generation
have ended, each place in it is filled anew: by the member that had it, or, where that was among the worst or has
failed, by one that starts with the state of one of the best (exploit) and with its hyperparameters, changed
(explore). So what a generation does follows from the results of the one before and the seed: how many members
train side by side, and whether the run was interrupted, makes no difference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.spec import Ensemble, Identity, Member
from ensemble.spec.identity import make_lineage
from ensemble.store.member import ENDED

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from ensemble.search.searcher import Searcher
    from ensemble.store import MemberState, RunState


class Population:
    """The members of a population; those that a user added to the run do not belong to it.

    Args:
        state: of the run, which grows.
        searcher: knows what was suggested to each trial.
    """

    def __init__(self, ensemble: Ensemble, state: RunState, searcher: Searcher) -> None:
        assert ensemble.search is not None
        self._ensemble, self._search = ensemble, ensemble.search
        self._state, self._searcher = state, searcher
        self._options = self._search.sampler_options
        self.size: int = self._options["population"]

    def _list_members(self) -> list[MemberState]:
        """The members so far, by generation and place."""
        members = [member for member in self._state.members.values() if not member.identity.get("added")]
        return sorted(members, key=lambda member: member.number)

    def count_ready(self, proposed: int) -> int:
        """How many members may be proposed now, after so many: those that the generation in progress lacks."""
        generation, place = divmod(proposed, self.size)
        if place or not generation:
            return self.size - place
        return self.size if all(member.state in ENDED for member in self._list_members()[-self.size :]) else 0

    def explain_end(self) -> str | None:
        """Why no generation can follow: nobody of the last one has finished. None: one can."""
        made = self._list_members()
        last = made[-self.size :]
        if not made or len(made) % self.size or any(member.state not in ENDED for member in last):
            return None
        if any(self._value(member) is not None for member in last):
            return None
        error = next((member.error for member in last if member.error), "none has the objective")
        return f"no member of generation {len(made) // self.size - 1} finished, so none can go on: {error}"

    def _value(self, member: MemberState) -> float | None:
        """The objective of a member that has finished, so that higher is better; None where it has none."""
        value = member.metrics.get(str(self._ensemble.objective))
        if member.state != "finished" or value is None or not math.isfinite(value):
            return None
        return -value if self._ensemble.mode == "min" else value

    def propose(self, number: int, proposed: int) -> Identity:
        """The next member, after so many.

        Raises:
            SpecError: its hyperparameters cannot be trained.
        """
        generation, place = divmod(proposed, self.size)
        if not generation:
            return self._identify(number, self._searcher.ask(number), 0, number)
        made = self._list_members()
        last, seed = made[(generation - 1) * self.size :][: self.size], [self._search.seed, generation, place]
        at = choose_parent([self._value(member) for member in last], place, self._options["quantile"], seed)
        parent, trial = last[at], self._searcher.get_trial(last[at].number)
        given = trial.params if at == place else explore(trial, self._options, seed)
        params = self._searcher.ask(number, given)
        code = parent.find_other_code(self._state.header.code)
        lineage = make_lineage(parent.id, warm=True, code=code, whole=True)
        return dataclasses.replace(self._identify(number, params, generation, made[place].number), lineage=lineage)

    def _identify(self, number: int, params: dict[str, Any], generation: int, first: int) -> Identity:
        """The identity of a member, without what it goes on from.

        Args:
            first: the number of the first member in its place, which gives all of them their seed.
        """
        seed = self._ensemble.identify(first, {}).seed
        trained = self._ensemble.identify(number, Member(params, seed=seed))
        epochs = self._search.last_epoch(generation, trained.epochs)
        return dataclasses.replace(trained, epochs=epochs, schedule_epochs=trained.epochs)

    def redeclare(self, number: int, params: dict[str, Any]) -> Identity:
        """The identity of an earlier member by the present declaration."""
        made = self._list_members()
        at = next(at for at, member in enumerate(made) if member.number == number)
        identity = self._identify(number, params, at // self.size, made[at % self.size].number)
        return dataclasses.replace(identity, lineage=made[at].identity.get("lineage"))


def choose_parent(values: Sequence[float | None], place: int, quantile: float, seed: Sequence[int]) -> int:
    """The place of the last generation from whose state the new member of a place goes on (truncation selection).

    Args:
        values: of the last generation by place, higher is better; None: it has failed. One has not.
        quantile: the part of the population that is replaced, at least one member, and by which; 0: nobody is. Who
            has failed is replaced in any case.
        seed: of the choice among the best.
    """
    moved = max(1, round(quantile * len(values)))
    worst = len(values) - moved if quantile else len(values)
    ranked = sorted(range(len(values)), key=lambda at: math.inf if (value := values[at]) is None else -value)
    best = [at for at in ranked[:moved] if values[at] is not None]
    is_replaced = values[place] is None or (place in ranked[worst:] and place not in best)
    return int(np.random.default_rng(seed).choice(best)) if is_replaced else place


def explore(trial: FrozenTrial, options: dict[str, Any], seed: Sequence[int]) -> dict[str, Any]:
    """What is suggested to a member that takes the place of one of the worst.

    Args:
        trial: of the member from whose state it goes on.
        options: `Search.sampler_options`.
        seed: of the changes.

    Returns:
        The values that are kept or changed, by name; what is missing is drawn anew.
    """
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
