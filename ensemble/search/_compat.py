"""The private API of Optuna that this package uses; no other module uses any.

Checked with the versions in `CHECKED_WITH`. With any other, `tests/test_compat.py` fails and lists the names to
look at; `tests/search/test_search_compat.py` fails when one of them has changed or lost its effect.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna
    from optuna.pruners import BasePruner

CHECKED_WITH = ("5.0.0",)


def hyperband(min_resource: int, epochs: int, reduction_factor: int) -> BasePruner:
    """Optuna's, which remembers what bracket each trial is in: it would ask that of every trial at every rung.

    `HyperbandPruner._try_initialization`, `_pruners` and `_get_bracket_id` (in 3.0 already) make the brackets,
    prune in one and say in which a trial is. Samplers look at the trials of one bracket if the pruner is of that
    class; with another, by public API alone, they would propose otherwise.

    Unnecessary with: a HyperbandPruner that knows the brackets of the trials that it has seen.
    """
    from optuna import pruners

    class Hyperband(pruners.HyperbandPruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            if not self._pruners:
                self._try_initialization(study)
            trials = study.get_trials(deepcopy=False)
            for other in trials[len(bracket_of) :]:
                bracket_of.append(self._get_bracket_id(study, other))
                numbers[bracket_of[-1]].append(other.number)
            bracket = bracket_of[trial.number]
            among: Any = _Bracket(study, [trials[number] for number in numbers[bracket]])
            return self._pruners[bracket].prune(among, trial)

    bracket_of: list[int] = []
    numbers: defaultdict[int, list[int]] = defaultdict(list)
    return Hyperband(min_resource, epochs, reduction_factor)


class _Bracket:
    """What a successive-halving pruner asks of a study, of the trials of one bracket.

    It writes what it has seen of a trial to `Study._storage` (in 3.0 already), which no public attribute names.
    """

    def __init__(self, study: optuna.Study, trials: list[optuna.trial.FrozenTrial]) -> None:
        self._storage, self.direction, self._trials = study._storage, study.direction, trials

    def get_trials(self, deepcopy: bool = True) -> list[optuna.trial.FrozenTrial]:
        """The trials themselves, which nobody changes."""
        return self._trials
