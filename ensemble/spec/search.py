"""A hyperparameter search as a user declares it: the space, the sampler, the pruner, the objective."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ensemble.events import Objective
from ensemble.spec.objectives import check_direction, infer_mode
from ensemble.spec.options import OBJECTIVES, PRUNERS, SAMPLERS, NamedOptions, resolve
from ensemble.spec.search_space import Space, as_space, list_probes, warn_of_constants
from ensemble.spec.validation import (
    SpecError,
    as_json_value,
    check_choice,
    check_number,
    option_class,
    unknown_name,
)

#: Those that take several objectives; the others cannot, or learn from one only.
SAMPLERS_OF_SEVERAL = ("tpe", "random", "grid", "gp", "nsga2", "nsga3")
#: Those that prefer trials whose constraints hold.
SAMPLERS_WITH_CONSTRAINTS = ("tpe", "gp", "nsga2", "nsga3")
#: Objectives of a search beside the one that ranks its members.
MOST_FURTHER = 2
#: What a Recipe's members measure only where a search optimizes it.
FOOTPRINTS = ("latency_ms", "model_mb")
#: What a budget can limit.
BUDGETS = ("trials", "hours", "cpu_hours", "energy_kj")
#: Trials of a search without a limit on them: 20, and with another limit as many as that allows, up to this.
TRIALS, MOST_TRIALS = 20, 10_000


@dataclass(frozen=True)
class PriorTrials:
    """The completed trials of an Optuna study, without its storage.

    Attributes:
        directions: "MAXIMIZE" or "MINIMIZE", of each objective.
        trials: Optuna's `FrozenTrial`s.
    """

    name: str
    directions: tuple[str, ...]
    trials: tuple[Any, ...] = field(repr=False)


@option_class
@dataclass(frozen=True)
class Search:
    """A hyperparameter search; each trial is a member.

    Attributes:
        space: hyperparameter -> `choice(...)`, `uniform`, `loguniform`, `integer`, a distribution of Optuna, or a
            fixed value, which is no list. A name of an option of `Member`, from `seed` to `mixup`, of the
            optimizer or the schedule sets that option. Or a function `space(trial)` that asks for values
            (`trial.suggest_float` ..., as in Optuna), by conditions if it likes, but for a name always for the
            same choices, and returns the hyperparameters; None: those that it asked for.
        trials: number of members that are trained in all. None: 20, or with a budget as many as that allows, up
            to 10,000.
        sampler: what proposes hyperparameters (Optuna): tpe, random, grid, gp, cmaes, nsga2, nsga3 (of the two
            genetic ones `{"name": "nsga2", "population_size": 12}`, of which the first generation is drawn at
            random); or a sampler of Optuna or OptunaHub, of which each trial gets a copy, or one of another
            class, which is asked itself: what it keeps in itself is lost at a resume. Or population based training
            (Jaderberg et al. 2017): `{"name": "pbt", "population": 8, "generations": 4, "quantile": 0.25,
            "resample": 0.25, "factor": 1.2, "inherit": []}`. Each generation trains its part of the epochs. When
            all of it have ended, a member goes on from its own state, or, if it is in the worst `quantile` or
            has failed, from that of one of the best: with the hyperparameters of that one, each drawn anew with
            the probability `resample`, else multiplied or divided by `factor` (of a choice of numbers, the next
            one), except those in `inherit`, such as widths of layers. There are population x generations trials,
            and no pruner.
        pruner: what stops trials early (Optuna): hyperband, asha, median, patience, none; a dict of the name
            and options; or a pruner of Optuna. A resource is an epoch: a trial's step is its number of finished
            epochs. None: hyperband, and none with further objectives or a genetic sampler.

            - `{"name": "hyperband", "reduction_factor": 3, "min_resource": 1}`, the same for asha;
            - `{"name": "median", "startup_trials": 5, "warmup_epochs": 0, "interval_epochs": 1}`;
            - `{"name": "trend", "min_epochs": 4, "startup_trials": 5, "sigmas": 2.0}` stops a trial of which the
              extrapolated last value is worse than the best trial's by so many standard deviations;
            - `{"name": "patience", "epochs": 3, "min_delta": 0.0, "around": "none"}` stops a trial when none of
              its last `epochs` epochs is within `min_delta` of its best epoch before them. With `around`, another
              pruner stops trials, but none before this one would.
        objective: what the sampler optimizes: "metric", the `Ensemble.objective` of each member by itself, or
            "gain", how much a member improves the ensemble of those that have finished
            (`ensemble.search.marginal_gain`), in NLL (of points in the squared error, of quantiles in the
            pinball loss) or as `{"name": "gain", "metric": "accuracy"}` (nll, accuracy, brier). The pruner always
            uses the metric, because the gain of a member is known only when it has finished. "gain" needs the
            samplers tpe or gp.
        further_objectives: what the sampler optimizes beside the metric, one or two of: "energy_j", the joules
            that the account attributes to a trial; "cpu_s", its CPU-seconds; "latency_ms", the milliseconds of
            a forward pass of one sample by the member where it has trained; "model_mb", the megabytes of its
            parameters and buffers; any other metric that members report, such as "nll", as
            `{"metric": "price", "mode": "min"}` where its name does not say how it is better. The search then
            looks for the Pareto front; it needs the samplers tpe, random, grid, gp, nsga2 or nsga3, and no
            trial is pruned, because Optuna prunes by one objective only. A run in which one of them cannot be
            had stops when its first trial has ended.
        budget: what the run may use in all, resumes included: `{"trials": 200, "hours": 2, "cpu_hours": 4,
            "energy_kj": 50}`, one of them or more. When the first limit is reached, running members write a
            checkpoint and stop, and the finished ones are combined; a fiftieth of each limit is kept for that.
            `resume(..., budget=)` goes on. Hours are those in which a member has a place.
        stop: a function that gets the trial (Optuna's `FrozenTrial`: `params`, `intermediate_values` by finished
            epochs) after each of its epochs, and says whether to prune it, beside what the pruner decides.
        terminator: ends the search when its `should_terminate(study)`, called after each trial with the Optuna
            study, says so: one of `optuna.terminator`, or any object that has it.
        constraints: a function from the metrics of a finished trial (costs are none) to names and numbers; a
            number of at most 0 holds, and the samplers tpe, gp, nsga2 and nsga3 prefer trials of which all hold.
        enqueue: hyperparameters of the first trials; what one lacks is proposed.
        seed: of the sampler; one of your own has its own.
        storage: an Optuna storage URL, or the path of a SQLite database (.db, .sqlite, .sqlite3) or a journal;
            None keeps a journal file in the run directory.
        study: an Optuna study whose completed trials the sampler knows from the start, or the name of one in
            `storage`, which the run's trials are added to. Pruners do not compare with them.
    """

    space: Space
    trials: int = None  # type: ignore[assignment]  # `__post_init__` decides
    sampler: NamedOptions | Any = "tpe"
    pruner: NamedOptions | Any | None = None
    seed: int = 0
    storage: str | None = field(default=None, repr=False)  # it may hold a password
    objective: NamedOptions = "metric"
    further_objectives: Sequence[str | Mapping[str, str]] = ()
    enqueue: Sequence[Mapping[str, Any]] = ()
    constraints: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None
    study: str | Any | None = field(default=None, repr=False)
    budget: Mapping[str, float] | None = None
    stop: Callable[[Any], bool] | None = None
    terminator: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "space", as_space(self.space))
        warn_of_constants(self.space, self.probes[1])
        if self.storage is not None:
            object.__setattr__(self, "storage", _as_absolute(self.storage))
        if self.budget is not None:
            check_budget("Search.budget", self.budget)
        if self.population is not None:
            self._check_population()
        elif self.trials is None or "trials" in (self.budget or {}):
            usual = TRIALS if self.budget is None else (self.budget.get("trials") or MOST_TRIALS)
            object.__setattr__(self, "trials", usual)
        check_number("Search.trials", self.trials, low=1, integer=True)
        check_number("Search.seed", self.seed, low=0, integer=True)
        for name in ("sampler", "pruner"):
            if isinstance(cls := getattr(self, name), type):
                raise SpecError(f"Search.{name} must be an instance, {cls.__name__}(), not the class")
        self._check_sampler()
        if self.stop is not None and not callable(self.stop):
            raise SpecError(f"Search.stop must be a function stop(trial), got {self.stop!r:.60}")
        if self.terminator is not None and not hasattr(self.terminator, "should_terminate"):
            raise SpecError(f"Search.terminator must have should_terminate(study), got {self.terminator!r:.60}")
        object.__setattr__(self, "further_objectives", read_further_objectives(self.further_objectives))
        if self.further_objectives:
            self._check_several()
        if not hasattr(self.pruner, "prune"):
            resolve("Search.pruner", self._named_pruner, PRUNERS)
        if not isinstance(self.enqueue, list | tuple) or not all(isinstance(one, Mapping) for one in self.enqueue):
            raise SpecError("Search.enqueue must be a list of dicts of hyperparameters")
        object.__setattr__(self, "enqueue", as_json_value("Search.enqueue", list(self.enqueue)))
        if len(self.enqueue) > self.trials:
            raise SpecError(f"Search.enqueue has {len(self.enqueue)} trials, more than trials={self.trials}")
        if isinstance(self.study, str) and self.storage is None:
            raise SpecError(f"Search.study={self.study!r} needs storage=, which has a study of that name")
        if self.population is not None:
            self._check_first_generation(self.population)
        object.__setattr__(self, "study", take_trials(self.study))

    @functools.cached_property
    def probes(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What stands for all points of the space, see `list_probes`: a function is called once for them."""
        return list_probes(self.space)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a declaration of an earlier version, its `second_objective` becomes one of `further_objectives`."""
        old = state.pop("second_objective", None)
        further = {} if old is None else {"further_objectives": ({"metric": old, "mode": "min"},)}
        self.__dict__.update({**state, **further})

    def _check_population(self) -> None:
        options = self.sampler_options
        made = options["population"] * options["generations"]
        if self.trials not in (None, made) or "trials" in (self.budget or {}):
            raise SpecError(
                f"Search.sampler='pbt' has {options['population']} x {options['generations']} trials: leave out "
                "trials= (trials=None where another search is replaced), and take another population or number "
                "of generations"
            )
        object.__setattr__(self, "trials", made)
        for name in ("further_objectives", "study", "terminator", "constraints"):
            if getattr(self, name):
                raise SpecError(
                    f"Search.sampler='pbt' ranks a population by its objective alone: leave out {name}="
                )
        if self.gain is not None:
            raise SpecError("Search.sampler='pbt' needs objective='metric'")
        if self.prunes:
            raise SpecError("Search.sampler='pbt' needs no pruner: the worst of a population are replaced")

    def _check_first_generation(self, size: int) -> None:
        if len(self.enqueue) > size:
            raise SpecError(
                f"Search.enqueue has {len(self.enqueue)} trials, more than the first generation: {size}; "
                "later ones follow from it"
            )
        for name in self.sampler_options["inherit"]:
            if not callable(self.space) and name not in self.space:
                raise SpecError(
                    unknown_name("Search.sampler['inherit']: the space has no", name, list(self.space))
                )

    def _check_sampler(self) -> None:
        if not isinstance(self.sampler, str | Mapping):
            if not hasattr(self.sampler, "sample_relative"):
                raise SpecError(
                    f"Search.sampler must be a name ({', '.join(SAMPLERS)}) or a sampler of Optuna, "
                    f"got {self.sampler!r:.60}"
                )
            if self.gain is not None:
                raise SpecError("Search.objective='gain' needs a sampler by name: tpe or gp")
            return
        name = self.sampler_options["name"]
        if name == "cmaes" and callable(self.space):
            raise SpecError("Search.sampler='cmaes' needs a space that is a dict")
        if name == "grid" and (callable(self.space) or self.enqueue):
            what = "a space that is a dict" if callable(self.space) else "no enqueue=: it has all points"
            raise SpecError(f"Search.sampler='grid' needs {what}")
        if self.gain is not None and name not in ("tpe", "gp"):
            raise SpecError(
                "Search.objective='gain' needs a sampler that learns from values that change (valid: tpe, gp), "
                f"not {name!r}"
            )
        if self.constraints is not None and name not in SAMPLERS_WITH_CONSTRAINTS:
            valid = ", ".join(SAMPLERS_WITH_CONSTRAINTS)
            raise SpecError(f"Search.constraints needs a sampler that knows them (valid: {valid}), not {name!r}")
        if (size := self.sampler_options.get("population_size")) is not None:
            self._check_genetic(size)

    def _check_genetic(self, size: int) -> None:
        if size >= self.trials:
            raise SpecError(
                f"Search.sampler={self.sampler_name!r} draws its first {size} trials at random (population_size): "
                f"{self.trials} trials are too few"
            )
        if self.prunes:
            raise SpecError(
                f"Search.sampler={self.sampler_name!r} needs no pruner: it breeds from trials that have finished"
            )
        if self.study is not None:
            raise SpecError(
                f"Search.study needs another sampler: {self.sampler_name!r} learns from its own generations only"
            )

    def _check_several(self) -> None:
        what = "Search.further_objectives"
        if self.sampler_name and self.sampler_name not in SAMPLERS_OF_SEVERAL:
            valid = ", ".join(SAMPLERS_OF_SEVERAL)
            raise SpecError(
                f"{what} needs a sampler of several objectives (valid: {valid}), not {self.sampler_name!r}"
            )
        if self.prunes:
            raise SpecError(f"{what} needs pruner='none' or no pruner: Optuna prunes by one objective only")
        if self.gain is not None:
            raise SpecError(f"{what} needs objective='metric': gains change with each member that finishes")

    @property
    def _named_pruner(self) -> NamedOptions:
        if self.pruner is not None:
            return self.pruner
        has_none = self.further_objectives or self.population or "population_size" in self.sampler_options
        return "none" if has_none else "hyperband"

    @property
    def sampler_options(self) -> dict[str, Any]:
        """The sampler's name and all its options; the name is empty for a sampler of Optuna."""
        if not isinstance(self.sampler, str | Mapping):
            return {"name": ""}
        return resolve("Search.sampler", self.sampler, SAMPLERS)

    @property
    def sampler_name(self) -> str:
        """The sampler's name; empty for a sampler of Optuna."""
        return str(self.sampler_options["name"])

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """What is optimized beside the objective of the `Ensemble`."""
        return tuple(Objective(each["metric"], each["mode"]) for each in self.further_objectives)  # type: ignore[index]

    @property
    def population(self) -> int | None:
        """How many members a population has; None: there is none."""
        size: int | None = self.sampler_options.get("population")
        return size

    @property
    def has_trials(self) -> bool:
        """Whether it is known how many trials there will be at most; else another limit ends the search."""
        return self.budget is None or "trials" in self.budget or self.trials != MOST_TRIALS

    @property
    def expected_trials(self) -> int:
        """How many trials of all epochs an estimate is made for."""
        return self.population or (self.trials if self.has_trials else TRIALS)

    @property
    def gain(self) -> Literal["nll", "brier", "accuracy"] | None:
        """The metric whose gain is optimized; None where the metric itself is."""
        chosen = resolve("Search.objective", self.objective, OBJECTIVES)
        metric: Literal["nll", "brier", "accuracy"] | None = chosen.get("metric")
        return metric

    @property
    def pruner_options(self) -> dict[str, Any]:
        """The pruner's name and all its options; of a pruner of Optuna, the name of its class."""
        if hasattr(self.pruner, "prune"):
            return {"name": type(self.pruner).__name__}
        return resolve("Search.pruner", self._named_pruner, PRUNERS)

    @property
    def prunes(self) -> bool:
        """Whether trials may be pruned."""
        return self.stop is not None or self.pruner_options["name"] not in ("none", "NopPruner")

    def check_epochs(self, epochs: int) -> None:
        """Check that trials of so many epochs are long enough for the pruner, or for the generations.

        Raises:
            SpecError: its smallest resource is more epochs than a trial has, or there are more generations.
        """
        if (generations := self.sampler_options.get("generations", 1)) > epochs:
            raise SpecError(f"Search.sampler['generations'] is {generations}, but there are {epochs} epochs")
        smallest = self.pruner_options.get("min_resource", 1)
        if smallest > epochs:
            raise SpecError(f"Search.pruner['min_resource'] is {smallest} epochs, but a trial has {epochs}")


def check_population(search: Search, options: Collection[str], points: Iterable[Mapping[str, Any]]) -> None:
    """Raise SpecError for options of members that a population cannot change between two generations."""
    inherited = search.sampler_options.get("inherit", ())
    for name in sorted({name for point in points for name in point} & set(options)) if search.population else ():
        if name in ("seed", "epochs"):
            raise SpecError(f"{name!r} is one for all generations of sampler 'pbt': give Ensemble({name}=...)")
        if name not in inherited:
            raise SpecError(
                f"{name!r} stays as it is while a state of sampler 'pbt' is trained on: name it in 'inherit', "
                f"{{'name': 'pbt', 'inherit': [{name!r}]}}"
            )


def read_further_objectives(given: object) -> tuple[dict[str, str], ...]:
    """The further objectives of a search, as `{"metric": name, "mode": "max" or "min"}` each.

    Raises:
        SpecError: there are too many, one is there twice, or nothing says how it is better.
    """
    where = "Search.further_objectives"
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence) or len(given) > MOST_FURTHER:
        raise SpecError(f"{where} must be a list of at most {MOST_FURTHER} metrics or costs, got {given!r:.80}")
    found: dict[str, dict[str, str]] = {}
    for each in given:
        named = {"metric": each} if isinstance(each, str) else each
        if not isinstance(named, Mapping) or not {"metric"} <= set(named) <= {"metric", "mode"}:
            raise SpecError(f'{where} has names, or dicts {{"metric": name, "mode": "max"}}, got {each!r:.60}')
        name, mode = named["metric"], named.get("mode")
        if not isinstance(name, str) or not name.strip() or name in (*found, "gain"):
            raise SpecError(f"{where} must be different names of metrics or costs, got {name!r:.60}")
        if mode is None and (mode := infer_mode(name)) is None:
            raise SpecError(
                f'{where}: say whether {name!r} is maximized or minimized: {{"metric": {name!r}, "mode": "min"}}'
            )
        check_choice(f"{where}: the mode of {name!r}", mode, ("max", "min"))
        check_direction(name, mode)
        found[name] = {"metric": name, "mode": mode}
    return tuple(found.values())


def check_budget(where: str, given: object) -> None:
    """Raise SpecError for what is no dict of limits above 0."""
    if not isinstance(given, Mapping) or not given:
        raise SpecError(f"{where} must be a dict of one or more of {', '.join(BUDGETS)}, got {given!r:.60}")
    for name, limit in given.items():
        check_choice(f"a limit of {where}", name, BUDGETS)
        check_number(f"{where}[{name!r}]", limit, low=0, above=True, integer=name == "trials")


#: The URL of a SQLite database that is a file.
DATABASE = re.compile(r"(?P<scheme>sqlite(\+\w+)?:///)(?P<path>(?!file:|:memory:)[^?]+)(?P<query>\?.*)?")


def _as_absolute(storage: str | os.PathLike[str]) -> str:
    """A storage whose path does not depend on the folder from which a run is resumed."""
    if not isinstance(storage, str | os.PathLike):
        raise SpecError(f"Search.storage must be an Optuna storage URL or a path, got {storage!r:.60}")
    storage = os.fspath(storage)
    if found := DATABASE.fullmatch(storage):
        return f"{found['scheme']}{os.path.abspath(found['path'])}{found['query'] or ''}"
    return storage if "://" in storage else os.path.abspath(os.path.expanduser(storage))


def take_trials(study: Any) -> str | PriorTrials | None:
    """Of an Optuna study its completed trials: the declaration goes to other processes, its storage does not.

    Raises:
        SpecError: it is neither a study nor the name of one.
    """
    if study is None or isinstance(study, str | PriorTrials):
        return study
    if not hasattr(study, "get_trials"):
        raise SpecError(f"Search.study must be an Optuna study or the name of one, got {study!r:.60}")
    trials = tuple(trial for trial in study.get_trials() if trial.state.name == "COMPLETE")
    return PriorTrials(study.study_name, tuple(each.name for each in study.directions), trials)
