"""A hyperparameter search as a user declares it: the space, the sampler, the pruner, the objective."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ensemble.events import Objective
from ensemble.spec.limits import check_budget
from ensemble.spec.objectives import check_direction, infer_mode
from ensemble.spec.options import NamedOptions, resolve
from ensemble.spec.samplers import (
    OBJECTIVES,
    PRUNER_TYPES,
    PRUNERS,
    SAMPLER_TYPES,
    SAMPLERS,
    SAMPLERS_OF_SEVERAL,
    SAMPLERS_WITH_CONSTRAINTS,
)
from ensemble.spec.search_space import (
    Space,
    as_space,
    list_probes,
    list_values,
    sample_space,
    warn_of_constants,
)
from ensemble.spec.validation import (
    SpecError,
    as_json_value,
    check_choice,
    check_number,
    option_class,
    unknown_name,
)
from pipelines.errors import PipelineError
from pipelines.providers import Providers

#: Objectives of a search beside the one that ranks its members.
MOST_FURTHER = 2
#: Trials of a search without a limit on them: 20, and with another limit as many as that allows, up to this.
TRIALS, MOST_TRIALS = 20, 10_000


@option_class
@dataclass(frozen=True)
class Search:
    """A hyperparameter search; each trial is a member.

    Attributes:
        space: hyperparameter -> `choice(...)`, `uniform`, `loguniform`, `integer`, a distribution of Optuna, or a
            fixed value, which is no list. A name of an option of `Member`, from `seed` to `mixup`, of the
            optimizer or the schedule sets that option. Or a function `space(trial)` that asks for values
            (`trial.suggest_float` ..., as in Optuna), also under conditions, and returns the
            hyperparameters (None: those that it asked for). The choices of a name are always the same.
        trials: number of members that are trained in all. None: 20, or with a budget as many as that allows, up
            to 10,000.
        sampler: what proposes hyperparameters (Optuna): tpe, random, grid, gp, cmaes, nsga2, nsga3 (of the two
            genetic ones `{"name": "nsga2", "population_size": 12}`, of which the first generation is drawn at
            random); or a sampler of Optuna or OptunaHub, of which each trial gets a copy, or a sampler of
            your own, which is not copied: its attributes are lost at a resume. Or population based training
            (Jaderberg et al. 2017): `{"name": "pbt", "population": 8, "generations": 4, "quantile": 0.25,
            "resample": 0.25, "factor": 1.2, "inherit": []}`. Each generation trains its part of the epochs. When
            all of it have ended, a member goes on from its own state, or, if it is in the worst `quantile` or
            has failed, from that of one of the best: with the hyperparameters of that one, each drawn again with
            the probability `resample`, else multiplied or divided by `factor` (of a choice of numbers, the next
            one), except those in `inherit`, such as widths of layers. There are population x generations trials,
            and no pruner.
        pruner: what stops trials early (Optuna): hyperband, asha, median, patience, none; a dict of the name
            and options; or a pruner of Optuna. A resource is an epoch: a trial's step is its number of finished
            epochs. None: hyperband, and none with further objectives or a genetic sampler.

            - `{"name": "hyperband", "reduction_factor": 3, "min_resource": 1}`, the same for asha;
            - `{"name": "median", "startup_trials": 5, "warmup_epochs": 0, "interval_epochs": 1}`;
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
        seed: the seed of the sampler; a sampler of your own has another one.
        storage: an Optuna storage URL, or the path of a SQLite database (.db, .sqlite, .sqlite3) or a journal;
            None keeps a journal file in the run directory.
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
    budget: Mapping[str, float] | None = None
    stop: Callable[[Any], bool] | None = None
    terminator: Any = None

    def __post_init__(self) -> None:
        for name, types in (("sampler", SAMPLER_TYPES), ("pruner", PRUNER_TYPES)):
            object.__setattr__(self, name, _make_foreign(f"Search.{name}", getattr(self, name), types))
            if isinstance(cls := getattr(self, name), type):
                raise SpecError(f"Search.{name} must be an instance, {cls.__name__}(), not the class")
        object.__setattr__(self, "space", as_space(self.space))
        warn_of_constants(self.space, self.probes[1])
        if self.storage is not None:
            object.__setattr__(self, "storage", _as_absolute(self.storage))
        if self.budget is not None:
            check_budget("Search.budget", self.budget)
        object.__setattr__(self, "trials", self._count_trials())
        check_number("Search.trials", self.trials, low=1, integer=True)
        check_number("Search.seed", self.seed, low=0, integer=True)
        object.__setattr__(self, "further_objectives", read_further_objectives(self.further_objectives))
        if self.stop is not None and not callable(self.stop):
            raise SpecError(f"Search.stop must be a function stop(trial), got {self.stop!r:.60}")
        if self.terminator is not None and not hasattr(self.terminator, "should_terminate"):
            raise SpecError(f"Search.terminator must have should_terminate(study), got {self.terminator!r:.60}")
        if not isinstance(self.enqueue, list | tuple) or not all(isinstance(one, Mapping) for one in self.enqueue):
            raise SpecError("Search.enqueue must be a list of dicts of hyperparameters")
        object.__setattr__(self, "enqueue", as_json_value("Search.enqueue", list(self.enqueue)))
        if len(self.enqueue) > self.trials:
            raise SpecError(f"Search.enqueue has {len(self.enqueue)} trials, more than trials={self.trials}")
        if not isinstance(self.sampler, str | Mapping) and not hasattr(self.sampler, "sample_relative"):
            names = ", ".join(SAMPLERS)
            raise SpecError(
                f"Search.sampler must be a name ({names}) or a sampler of Optuna, got {self.sampler!r:.60}"
            )
        for is_made, mistake in self._list_mistakes():
            if is_made:
                raise SpecError(f"Search.{mistake}")

    @functools.cached_property
    def probes(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What stands for all points of the space, see `list_probes`: a function is called once for them."""
        return list_probes(self.space)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a declaration of an earlier version, its `second_objective` becomes one of `further_objectives`."""
        old = state.pop("second_objective", None)
        further = {} if old is None else {"further_objectives": ({"metric": old, "mode": "min"},)}
        self.__dict__.update({**state, **further})

    def _count_trials(self) -> int:
        options, limit = self.sampler_options, self.budget or {}
        if "population" in options:
            size, generations = options["population"], options["generations"]
            if self.trials not in (None, size * generations) or "trials" in limit:
                raise SpecError(
                    f"Search.sampler='pbt' has {size} x {generations} trials: leave out trials= (trials=None "
                    "where another search is replaced), and take another population or number of generations"
                )
            return int(size * generations)
        if self.trials is not None and "trials" not in limit:
            return self.trials
        return int(limit.get("trials") or MOST_TRIALS) if self.budget is not None else TRIALS

    def _list_mistakes(self) -> Iterator[tuple[Any, str]]:
        """What does not go together: whether it was declared, and what to say."""
        name, prunes, gain, options = self.sampler_name, self.prunes, self.gain, self.sampler_options
        what, several = f"sampler={name!r}", bool(self.further_objectives)
        if name == "pbt":
            for option in ("further_objectives", "terminator", "constraints"):
                yield (
                    getattr(self, option),
                    f"{what} ranks a population by its objective alone: leave out {option}=",
                )
            yield gain, f"{what} needs objective='metric'"
            yield prunes, f"{what} replaces the worst of a population: leave out pruner= and stop="
            yield (
                len(self.enqueue) > options["population"],
                f"enqueue has {len(self.enqueue)} trials, more than the first generation: {options['population']}"
                "; later ones follow from it",
            )
            space = self.space if isinstance(self.space, Mapping) else dict.fromkeys(options["inherit"])
            for own in options["inherit"]:
                yield own not in space, unknown_name("sampler['inherit']: the space has no", own, list(space))
        yield gain and not name, "objective='gain' needs a sampler by name: tpe or gp"
        yield (
            gain and name not in ("tpe", "gp"),
            f"objective='gain' needs a sampler that accepts changing values (valid: tpe, gp), not {name!r}",
        )
        is_whole = name in ("cmaes", "grid")
        yield is_whole and callable(self.space), f"{what} needs a space that is a dict"
        yield name == "grid" and self.enqueue, f"{what} tries all points: leave out enqueue="
        knows: Sequence[str] = SAMPLERS_WITH_CONSTRAINTS if name else ("",)
        yield (
            self.constraints is not None and not callable(self.constraints),
            f"constraints must be a function, f(metrics) -> {{name: number}}, got {self.constraints!r:.60}",
        )
        yield (
            self.constraints is not None and name not in knows,
            f"constraints needs a sampler that supports them (valid: {', '.join(knows)}), not {name!r}",
        )
        if (size := options.get("population_size")) is not None:
            yield (
                size >= self.trials,
                f"{what} draws its first {size} trials at random (population_size): {self.trials} trials are too "
                "few",
            )
            yield prunes, f"{what} needs finished trials: leave out pruner= and stop="
        knows = SAMPLERS_OF_SEVERAL if name else ("",)
        yield (
            several and name not in knows,
            f"further_objectives needs a sampler of several objectives (valid: {', '.join(knows)}), not {name!r}",
        )
        how = "further_objectives needs"
        yield several and prunes, f"{how} pruner='none' or no pruner: Optuna prunes by one objective only"
        yield several and gain, f"{how} objective='metric': gains change with each member that finishes"

    @property
    def _named_pruner(self) -> NamedOptions:
        if self.pruner is not None:
            return self.pruner
        is_of_generations = self.sampler_options.keys() & {"population", "population_size"}
        return "none" if self.further_objectives or is_of_generations else "hyperband"

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
        return tuple(Objective(objective["metric"], objective["mode"]) for objective in self.further_objectives)  # type: ignore[index]

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
        if isinstance(self.objective, str) and self.objective not in OBJECTIVES:
            raise SpecError(
                f"Search.objective cannot be {self.objective!r} (valid: {', '.join(OBJECTIVES)}): the metric that "
                f"ranks members is Ensemble(objective={self.objective!r}), which 'metric' optimizes"
            )
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

    def check_population(self, options: Collection[str], points: Iterable[Mapping[str, Any]]) -> None:
        """Raise SpecError for options of members that a population cannot change between two generations."""
        inherited = self.sampler_options.get("inherit", ())
        names = {name for point in points for name in point} & set(options) if self.population else ()
        for name in sorted(names):
            if name in ("seed", "epochs"):
                raise SpecError(f"{name!r} is one for all generations of sampler 'pbt': give Ensemble({name}=...)")
            if name not in inherited:
                raise SpecError(
                    f"{name!r} stays as it is while a state of sampler 'pbt' is trained on: name it in 'inherit', "
                    f"{{'name': 'pbt', 'inherit': [{name!r}]}}"
                )

    def sample(self, seed: int) -> Iterator[dict[str, Any]]:
        """Some random points of the space."""
        return sample_space(self.space, seed)

    def list_items(self) -> list[tuple[str, Any]]:
        """Names and values of hyperparameters that trials may have; of a function, those of some trials."""
        if callable(self.space):
            return [item for point in self.sample(0) for item in point.items()]
        return [(name, own) for name, declared in self.space.items() for own in list_values(declared)]


def read_further_objectives(declared: object) -> tuple[dict[str, str], ...]:
    """The further objectives of a search, as `{"metric": name, "mode": "max" or "min"}` each.

    Raises:
        SpecError: there are too many, one is there twice, or nothing says how it is better.
    """
    where = "Search.further_objectives"
    if isinstance(declared, str | Mapping) or not isinstance(declared, Sequence) or len(declared) > MOST_FURTHER:
        raise SpecError(f"{where} must be a list of at most {MOST_FURTHER} metrics or costs, got {declared!r:.80}")
    objectives: dict[str, dict[str, str]] = {}
    for objective in declared:
        named = {"metric": objective} if isinstance(objective, str) else objective
        if not isinstance(named, Mapping) or not {"metric"} <= set(named) <= {"metric", "mode"}:
            raise SpecError(
                f'{where} has names, or dicts {{"metric": name, "mode": "max"}}, got {objective!r:.60}'
            )
        name, mode = named["metric"], named.get("mode")
        if not isinstance(name, str) or not name.strip() or name in (*objectives, "gain"):
            raise SpecError(f"{where} must be different names of metrics or costs, got {name!r:.60}")
        if mode is None and (mode := infer_mode(name)) is None:
            raise SpecError(
                f'{where}: say whether {name!r} is maximized or minimized: {{"metric": {name!r}, "mode": "min"}}'
            )
        check_choice(f"{where}: the mode of {name!r}", mode, ("max", "min"))
        check_direction(name, mode)
        objectives[name] = {"metric": name, "mode": mode}
    return tuple(objectives.values())


def _make_foreign(where: str, declared: Any, types: Providers) -> Any:
    """The object of a name that another distribution provides; all else as it was given."""
    name = declared.get("name") if isinstance(declared, Mapping) else declared
    provider = types.find(name) if isinstance(name, str) else None
    if provider is None or not provider.distribution:
        return declared
    try:
        return provider.load()(
            **({k: v for k, v in declared.items() if k != "name"} if name is not declared else {})
        )
    except (PipelineError, TypeError, ValueError) as error:
        raise SpecError(f"{where}: {name!r} of {provider.distribution}: {error}") from None


#: The URL of a SQLite database that is a file.
DATABASE = re.compile(r"(?P<scheme>sqlite(\+\w+)?:///)(?P<path>(?!file:|:memory:)[^?]+)(?P<query>\?.*)?")


def _as_absolute(storage: str | os.PathLike[str]) -> str:
    """A storage whose path does not depend on the folder from which a run is resumed."""
    if not isinstance(storage, str | os.PathLike):
        raise SpecError(f"Search.storage must be an Optuna storage URL or a path, got {storage!r:.60}")
    storage = os.fspath(storage)
    if path := DATABASE.fullmatch(storage):
        return f"{path['scheme']}{os.path.abspath(path['path'])}{path['query'] or ''}"
    return storage if "://" in storage else os.path.abspath(os.path.expanduser(storage))
