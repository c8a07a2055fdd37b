"""The private API of Optuna that this package uses; no other module uses any.

Checked with the versions in `CHECKED_WITH`. With any other, `tests/test_compat.py` fails and lists the names to
look at; `tests/search/test_search_compat.py` fails when one of them has changed or lost its effect.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import optuna
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

CHECKED_WITH = ("5.0.0",)


def import_optuna() -> None:
    """Import Optuna in a thread of its own.

    Its module for Redis keeps the error of an import that failed, with every frame of the stack. In the caller's
    thread these would be the frames of a run and of the user's program, whose arrays stay in memory with them.

    Unnecessary with: an `optuna._imports` that keeps no traceback.
    """
    thread = threading.Thread(target=importlib.import_module, args=("optuna",), name="import optuna")
    thread.start()
    thread.join()


@contextlib.contextmanager
def silence_optuna() -> Iterator[None]:
    """Suppress Optuna's messages about new studies on stderr."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def without_constraints(attrs: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a trial without its constraints, which are to be set again: Optuna changes none.

    Unnecessary with: a `Trial.set_constraint` that replaces one.
    """
    from optuna.study._constrained_optimization import _CONSTRAINTS_KEY

    return {key: value for key, value in attrs.items() if not key.startswith(_CONSTRAINTS_KEY)}


def find_generators(sampler: BaseSampler) -> tuple[list[Any], bool]:
    """The generators of random numbers in a sampler, in a fixed order, and whether all its samplers are Optuna's.

    `LazyRandomState` is the generator of most: it is made when it is first used. No public method seeds a sampler:
    `reseed_rng` takes entropy of the system.

    Unnecessary with: a sampler that is seeded anew by a given number.
    """
    from optuna.samplers._lazy_random_state import LazyRandomState

    found: list[Any] = []
    seen: dict[int, Any] = {}
    waiting: list[Any] = [sampler]
    while waiting:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, LazyRandomState | np.random.RandomState | np.random.Generator | random.Random):
            found.append(part)
        elif isinstance(part, list | tuple):
            waiting += part
        elif part is sampler or type(part).__module__.startswith("optuna"):
            waiting += [value for _, value in sorted(getattr(part, "__dict__", {}).items())]
    parts = [part for part in seen.values() if hasattr(part, "sample_relative")]
    return found, all(type(part).__module__.startswith("optuna") for part in parts)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed one of `find_generators`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        getattr(generator, "rng", generator).seed(seed)


def draw_number(generator: Any) -> int:
    """A number that follows from the state of one of `find_generators`; 0 where it was given no seed."""
    if getattr(generator, "_rng", generator) is None:
        return 0
    generator = getattr(generator, "rng", generator)
    if isinstance(generator, random.Random):
        return generator.getrandbits(31)
    draw = generator.integers if isinstance(generator, np.random.Generator) else generator.randint
    return int(draw(2**31))


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


def without_first(study: optuna.Study, first: int) -> optuna.Study:
    """A study as pruners see it: without its first trials, whose steps may be other ones.

    Not for a hyperband, which finds a trial by its number; trials without values at its rungs do not count there.
    """
    from optuna.pruners import HyperbandPruner

    if not first or isinstance(study.pruner, HyperbandPruner):
        return study
    view = copy.copy(study)

    def get_trials(deepcopy: bool = True, states: Any = None) -> list[optuna.trial.FrozenTrial]:
        return [trial for trial in study.get_trials(deepcopy, states) if trial.number >= first]

    view.get_trials = get_trials  # type: ignore[method-assign]
    return view


class _Bracket:
    """What a successive-halving pruner asks of a study, of the trials of one bracket.

    It writes what it has seen of a trial to `Study._storage` (in 3.0 already), which no public attribute names.
    """

    def __init__(self, study: optuna.Study, trials: list[optuna.trial.FrozenTrial]) -> None:
        self._storage, self.direction, self._trials = study._storage, study.direction, trials

    def get_trials(self, deepcopy: bool = True) -> list[optuna.trial.FrozenTrial]:
        """The trials themselves, which nobody changes."""
        return self._trials
