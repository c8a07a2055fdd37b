"""`ensemble bench energy`: whether the account of energy can be trusted (`ensemble.bench.energy`).

A further part is a function here that returns a `PartOutcome`, its options in `OPTIONS`, and a line in `PARTS`;
mistakes in its options are found in `check_options`, before any part runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, milliseconds, option, path, seconds, words
from ensemble.spec.validation import SpecError, check_choice

if TYPE_CHECKING:
    from ensemble.bench.energy.parts import PartOutcome

ATTRIBUTION, SHAPLEY, SHARING, OVERHEAD = "attribution", "shapley", "sharing", "overhead"
MODEL, EMULATED = "model", "emulated"
_SWITCH: Mapping[str, Any] = {"action": "store_true"}


@dataclass(frozen=True)
class PartOption:
    """An option that some parts have.

    Attributes:
        parts: that have it.
        name: such as "--seconds".  default: None where it has none, or depends on others.
        text: its help, without the default.
        more: arguments of argparse.
    """

    parts: tuple[str, ...]
    name: str
    default: Any
    text: str
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its attribute among parsed options."""
        return self.name.removeprefix("--").replace("-", "_")


def _numbers(parts: str, name: str, default: int | None, text: str, **more: Any) -> PartOption:
    return PartOption(tuple(parts.split()), name, default, text, {"type": count, **more})


OPTIONS = (
    _numbers(
        f"{ATTRIBUTION} {SHAPLEY} {SHARING}",
        "--repeats",
        None,
        "medians of that many runs (default: 3, of the part 'sharing' 2)",
    ),
    _numbers(ATTRIBUTION, "--seconds", 3, "of a run on the synthetic node"),
    _numbers(SHAPLEY, "--window-s", None, "seconds of the window of each coalition (default: 1, with --gpu 60)"),
    PartOption(
        (SHAPLEY,),
        "--gpu",
        False,
        "three members that train on this machine's first GPU, instead of a synthetic node",
        _SWITCH,
    ),
    PartOption(
        (SHAPLEY,), "--cool-s", 20.0, "seconds without load before each window, with --gpu", {"type": seconds}
    ),
    PartOption(
        (SHAPLEY,),
        "--run-dir",
        None,
        "keeps each window's energy as soon as it is measured, and has those that were measured before",
        {"type": path, "metavar": "DIR"},
    ),
    _numbers(
        SHAPLEY,
        "--most-s",
        None,
        "measure for at most so many seconds now, and the rest with another call; needs --run-dir",
        metavar="SECONDS",
    ),
    PartOption(
        (SHARING,),
        "--data",
        None,
        "a tar archive of JPEG photographs (default: parts of the two that come with scikit-learn)",
        {"type": path, "metavar": "FILE"},
    ),
    _numbers(SHARING, "--members", 4, "members that train at once"),
    _numbers(SHARING, "--cores", None, "pin everything to that many cores (default: no pinning)"),
    PartOption(
        (SHARING,),
        "--steps",
        [MODEL, EMULATED],
        "members' steps: model, a small net, and emulated, an accelerator that uses no CPU "
        f"(default: {MODEL},{EMULATED})",
        {"type": words},
    ),
    PartOption(
        (SHARING,),
        "--step-ms",
        100.0,
        "milliseconds of the emulated accelerator for a batch",
        {"type": milliseconds},
    ),
    _numbers(SHARING, "--samples", 500, "that each member consumes at least, on both sides; whole epochs"),
    _numbers(OVERHEAD, "--metered-members", 64, "members that report their usage every second"),
    _numbers(OVERHEAD, "--metered-s", 15, "seconds of each of two measurements"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    option(parser, "--parts", ",".join(PARTS), f"what is studied, of {', '.join(PARTS)}", type=words)
    groups: dict[str, argparse._ActionsContainer] = {}
    for each in OPTIONS:
        if len(each.parts) > 1:
            group: argparse._ActionsContainer = parser
        else:
            (part,) = each.parts
            group = groups.setdefault(part, parser.add_argument_group(f"part '{part}'"))
        plain = each.default not in (None, False) and not isinstance(each.default, list)
        shown = f"{each.text} (default: {each.default:g})" if plain else each.text
        # parsed as None where it is not given: `run` fills in the default, and refuses what would be ignored
        option(group, each.name, None, shown, **each.more)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from ensemble.bench.energy.parts import join_parts

    for part in options.parts:
        check_choice("--parts", part, tuple(PARTS))
    chosen = {name: study for name, study in PARTS.items() if name in options.parts}
    given = {each.name for each in OPTIONS if getattr(options, each.key) is not None}
    check_combination(chosen, given)
    for each in OPTIONS:
        if each.name not in given:
            setattr(options, each.key, each.default)
    for part, check in CHECKS.items():
        if part in chosen:
            check(options)
    return join_parts({name: study(options, report) for name, study in chosen.items()})


def check_combination(parts: Mapping[str, Any], given: set[str]) -> None:
    """Refuses options that would be ignored.

    Args:
        parts: the names of those that are chosen.
        given: the names of the options that were given.

    Raises:
        SpecError: an option is not one of the chosen parts', or needs another option.
    """
    for each in OPTIONS:
        if each.name in given and not set(each.parts) & set(parts):
            of = ", ".join(each.parts)
            raise SpecError(f"{each.name} is an option of a part that --parts leaves out: {of}")
    for name, needed in (("--most-s", "--run-dir"), ("--cool-s", "--gpu")):
        if name in given and needed not in given:
            raise SpecError(f"{name} needs {needed}")


def _check_shapley(options: argparse.Namespace) -> None:
    from ensemble.bench.energy import gpu_bed
    from ensemble.bench.energy.coalitions import open_run_dir

    least_s = _choose_window_s(options) + (options.cool_s if options.gpu else 0)
    if options.most_s is not None and options.most_s <= least_s:
        raise SpecError(
            f"--most-s {options.most_s} is too short for a window, which takes more than {least_s:g} s"
        )
    if options.gpu:
        gpu_bed.find_gpu()
    if options.run_dir is not None:
        open_run_dir(Path(options.run_dir))


def _check_sharing(options: argparse.Namespace) -> None:
    from ensemble.bench.energy import sharing

    for step in options.steps:
        check_choice("--steps", step, (MODEL, EMULATED))
    sharing.check(options.data, options.members, options.cores)


def _study_attribution(options: argparse.Namespace, report: Report) -> PartOutcome:
    from ensemble.bench.energy import attribution_study

    return attribution_study.study(options.seconds, options.repeats or 3, report)


def _study_shapley(options: argparse.Namespace, report: Report) -> PartOutcome:
    from ensemble.bench.energy import splits
    from ensemble.bench.energy.coalitions import Bed, SyntheticBed
    from ensemble.bench.energy.gpu_bed import GpuBed

    opened: AbstractContextManager[Bed] = GpuBed.open(options.cool_s) if options.gpu else SyntheticBed.open()
    with opened as bed:
        kept = None if options.run_dir is None else Path(options.run_dir)
        return splits.study(bed, _choose_window_s(options), options.repeats or 3, kept, options.most_s, report)


def _choose_window_s(options: argparse.Namespace) -> int:
    return options.window_s or (60 if options.gpu else 1)


def _study_sharing(options: argparse.Namespace, report: Report) -> PartOutcome:
    from ensemble.bench.energy import sharing

    return sharing.outcome(
        options.data,
        members=options.members,
        cores=options.cores,
        steps=options.steps,
        step_ms=options.step_ms,
        samples=options.samples,
        repeats=options.repeats or 2,
        report=report,
    )


def _study_overhead(options: argparse.Namespace, report: Report) -> PartOutcome:
    from ensemble.bench.energy import overhead

    return overhead.study(options.metered_members, options.metered_s, report)


PARTS: dict[str, Callable[[argparse.Namespace, Report], PartOutcome]] = {
    ATTRIBUTION: _study_attribution,
    SHAPLEY: _study_shapley,
    SHARING: _study_sharing,
    OVERHEAD: _study_overhead,
}
#: What is checked of a part's options before any part runs.
CHECKS: dict[str, Callable[[argparse.Namespace], None]] = {SHAPLEY: _check_shapley, SHARING: _check_sharing}

STUDY = Study(
    name="energy",
    summary="whether the account of energy can be trusted",
    description=(
        "Attributed joules beside the true ones on a node whose power is known; three ways to share a node's "
        "energy beside the Shapley value; one shared pipeline beside own ones; what the account costs. "
        "As it is it needs neither data nor a GPU, and some three minutes on two free cores."
    ),
    add_options=add_options,
    run=run,
)
