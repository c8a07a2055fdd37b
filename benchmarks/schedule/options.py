"""`python -m benchmarks schedule`: how well the scheduler uses a machine (`benchmarks.schedule`)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ensemble.bench.results import Outcome, Report, Study, flatten, tabulate
from ensemble.cli.arguments import count, counts, directory, milliseconds_each, option, words
from ensemble.spec.validation import check_choice

if TYPE_CHECKING:
    from benchmarks.schedule.fleet import FleetRow
    from benchmarks.schedule.real import ArmRow
    from benchmarks.schedule.throughput import ThroughputRow

REAL, SIMULATED, THROUGHPUT = "real", "simulated", "throughput"
PARTS = (REAL, SIMULATED, THROUGHPUT)


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    option(parser, "--parts", ",".join(PARTS), "what is studied", type=words)
    option(parser, "--repeats", 3, "medians of that many runs, of the parts real and throughput", type=count)

    part = parser.add_argument_group("part 'real'")
    option(part, "--members", 8, "members that are trained", type=count)
    shown = "milliseconds of a batch, of each member (default: from 40 to 160, evenly spread in ratio)"
    option(part, "--step-ms", None, shown, type=milliseconds_each)
    option(part, "--epochs", 3, "epochs of each member", type=count)
    option(part, "--samples", 256, "samples of an epoch", type=count)
    option(part, "--batch-size", 32, "samples of a batch", type=count)
    shown = "holds cifar10/train.parquet; photographs are generated without it"
    option(part, "--data", None, shown, type=directory, metavar="DIR")
    option(part, "--executor", "local", "local or ray")

    part = parser.add_argument_group("part 'simulated'")
    option(part, "--seeds", 20, "ensembles that are drawn from the table of members", type=count)
    option(part, "--devices", 100, "devices, and as many members, on nodes of 4 devices and 20 cores", type=count)
    shown = "core-milliseconds to prepare a sample, as in 0,10,100 (default: 0,50,100,200,400)"
    option(part, "--prep-ms", None, shown, type=milliseconds_each)
    option(
        part,
        "--streams",
        None,
        "streams at one time, of ours; the first with all --prep-ms, the others with the first (default: 2,1,4)",
        type=counts,
    )
    shown = "members of the large set-up, on 8 devices for each 10; 0 leaves it out"
    option(part, "--large", 10_000, shown, type=int)

    part = parser.add_argument_group("part 'throughput'")
    option(part, "--reporting", 1000, "members that report at the same time", type=count)
    option(part, "--reports", 9, "reports of each", type=count)
    option(part, "--modes", "list,search", "a fixed list of members; a search with TPE and hyperband", type=words)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.schedule import figures, fleet, real, throughput

    for part in options.parts:
        check_choice("--parts", part, PARTS)
    for mode in options.modes:
        check_choice("--modes", mode, throughput.MODES)
    check_choice("--executor", options.executor, ("local", "ray"))
    arms = _study_real(options, report) if REAL in options.parts else []
    fleets = _study_fleets(options, report) if SIMULATED in options.parts else []
    modes = _study_throughput(options, report) if THROUGHPUT in options.parts else []
    rows = [{"part": REAL, **vars(row)} for row in arms]
    rows += [{"part": SIMULATED, **flatten(row)} for row in fleets]
    rows += [{"part": THROUGHPUT, **vars(row)} for row in modes]
    panels = [*figures.real_panels(arms), *figures.fleet_panels(fleets), *figures.throughput_panels(modes)]
    return Outcome(
        tables=[
            ("Members of uneven steps", tabulate(arms)),
            ("On a virtual clock", tabulate(fleets)),
            ("The controller", tabulate(modes)),
        ],
        rows=rows,
        findings=[*real.findings(arms), *fleet.findings(fleets), *throughput.findings(modes)],
        title=figures.TITLE,
        notes=figures.NOTES,
        panels=panels,
    )


def _study_real(options: argparse.Namespace, report: Report) -> list[ArmRow]:
    from benchmarks.schedule import real, workload

    plan = real.RealPlan(
        steps=options.step_ms or workload.steps_ms(options.members),
        epochs=options.epochs,
        samples=options.samples,
        batch_size=options.batch_size,
        data=options.data,
        executor=options.executor,
        repeats=options.repeats,
    )
    return real.study(plan, report)


def _study_fleets(options: argparse.Namespace, report: Report) -> list[FleetRow]:
    from benchmarks.schedule import fleet

    costs, streams = options.prep_ms or (0.0, 50.0, 100.0, 200.0, 400.0), options.streams or (2, 1, 4)
    # the cost is varied with the usual number of streams, the number of streams with the first cost
    varied = [(cost, streams[0]) for cost in costs] + [(costs[0], number) for number in streams[1:]]
    fleets = [
        fleet.Fleet(
            members=options.devices,
            nodes=-(-options.devices // fleet.DEVICES),
            devices=fleet.DEVICES,
            cores=fleet.CORES,
            prep_ms=cost,
            streams=number,
        )
        for cost, number in varied
    ]
    found = fleet.study(fleets, options.seeds, report)
    if options.large:
        large = fleet.Fleet(
            members=options.large,
            nodes=max(1, options.large // 10),
            devices=fleet.LARGE_DEVICES,
            cores=fleet.LARGE_CORES,
            prep_ms=costs[0],
            streams=2,
        )
        found += fleet.study([large], 1, report)
    return found


def _study_throughput(options: argparse.Namespace, report: Report) -> list[ThroughputRow]:
    from benchmarks.schedule import throughput

    return throughput.study(
        options.modes,
        members=options.reporting,
        epochs=options.reports,
        repeats=options.repeats,
        report=report,
    )


STUDY = Study(
    name="schedule",
    summary="how well the scheduler uses a machine",
    description=(
        "Members of uneven steps in MLPerf HPC's figures; FLEET's set-up and ten thousand members on a virtual "
        "clock; the reports that the controller records in a second. As it is some ten minutes on two cores, most "
        "of it for the part 'real'."
    ),
    add_options=add_options,
    run=run,
)
