"""`ensemble bench schedule`: how well the scheduler uses a machine (`ensemble.bench.schedule`)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ensemble.bench.results import Outcome, Say, Study
from ensemble.cli.arguments import count, counts, directory, milliseconds_each, option, words
from ensemble.spec.validation import check_choice

if TYPE_CHECKING:
    from ensemble.bench.schedule import fleet, real, throughput

REAL, SIMULATED, THROUGHPUT = "real", "simulated", "throughput"
PARTS = (REAL, SIMULATED, THROUGHPUT)


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    option(parser, "--parts", ",".join(PARTS), "what is studied", type=words)
    option(parser, "--repeats", 3, "medians of that many runs, of the parts real and throughput", type=count)

    part = parser.add_argument_group("part 'real'")
    option(part, "--members", 8, "that are trained", type=count)
    shown = "milliseconds of a batch, of each member (default: from 40 to 160, evenly spread in ratio)"
    option(part, "--step-ms", None, shown, type=milliseconds_each)
    option(part, "--epochs", 3, "of each member", type=count)
    option(part, "--samples", 256, "of an epoch", type=count)
    option(part, "--batch-size", 32, "samples of a batch", type=count)
    option(part, "--pixels", 384, "of a side of the photographs that are made", type=count)
    shown = "holds cifar10/train.parquet; photographs are made without it"
    option(part, "--data", None, shown, type=directory, metavar="DIR")
    option(part, "--prep-workers", 1, "preparation processes of a feeder", type=count)
    option(part, "--executor", "local", "local or ray")

    part = parser.add_argument_group("part 'simulated'")
    option(part, "--seeds", 20, "ensembles that are drawn from the table of members", type=count)
    option(part, "--devices", 100, "and as many members, on nodes of 4 devices and 20 cores", type=count)
    shown = "core-milliseconds to prepare a sample, as in 0,10,100 (default: 0,50,100,200,400)"
    option(part, "--prep-ms", None, shown, type=milliseconds_each)
    option(
        part,
        "--streams",
        None,
        "at one time, of ours; the first with all --prep-ms, the others with the first (default: 2,1,4)",
        type=counts,
    )
    shown = "members of the large set-up, on 8 devices for each 10; 0 leaves it out"
    option(part, "--large", 10_000, shown, type=int)

    part = parser.add_argument_group("part 'throughput'")
    option(part, "--reporting", 1000, "members that report at the same time", type=count)
    option(part, "--reports", 9, "of each", type=count)
    option(part, "--round", 256, "events that are handed over together, at most", type=count)
    option(part, "--modes", "list,search", "a fixed list of members; a search with TPE and hyperband", type=words)


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """See `Study`."""
    import dataclasses

    from ensemble.bench.schedule import fleet, real, throughput
    from ensemble.bench.schedule.figures import write_plot

    for part in options.parts:
        check_choice("--parts", part, PARTS)
    for mode in options.modes:
        check_choice("--modes", mode, throughput.MODES)
    check_choice("--executor", options.executor, ("local", "ray"))
    of_real = _real(options, say) if REAL in options.parts else []
    of_fleet = _fleet(options, say) if SIMULATED in options.parts else []
    of_throughput = _throughput(options, say) if THROUGHPUT in options.parts else []
    tables: list[tuple[str, list[dict[str, Any]]]] = []
    tables += [("Members of uneven steps", real.table(of_real))] if of_real else []
    tables += [("On a virtual clock", fleet.table(of_fleet))] if of_fleet else []
    tables += [("The controller", [dataclasses.asdict(row) for row in of_throughput])] if of_throughput else []
    rows = [{"part": REAL, **dataclasses.asdict(row)} for row in of_real]
    rows += [{"part": SIMULATED, **fleet.as_json(row)} for row in of_fleet]
    rows += [{"part": THROUGHPUT, **dataclasses.asdict(row)} for row in of_throughput]
    return Outcome(
        tables=tables,
        rows=rows,
        findings=[*real.findings(of_real), *fleet.findings(of_fleet), *throughput.findings(of_throughput)],
        draw=lambda path: write_plot(of_real, of_fleet, of_throughput, path),
    )


def _real(options: argparse.Namespace, say: Say) -> list[real.Row]:
    from ensemble.bench.schedule import real, workload

    plan = real.Plan(
        steps=options.step_ms or workload.steps_ms(options.members),
        epochs=options.epochs,
        samples=options.samples,
        batch_size=options.batch_size,
        pixels=options.pixels,
        data=options.data,
        executor=options.executor,
        prep_workers=options.prep_workers,
        repeats=options.repeats,
    )
    return real.study(plan, say)


def _fleet(options: argparse.Namespace, say: Say) -> list[fleet.Row]:
    from ensemble.bench.schedule import fleet

    costs, streams = options.prep_ms or (0.0, 50.0, 100.0, 200.0, 400.0), options.streams or (2, 1, 4)
    # the cost is varied with the usual number of streams, the number of streams with the first cost
    varied = [(cost, streams[0]) for cost in costs] + [(costs[0], number) for number in streams[1:]]
    set_ups = [
        fleet.SetUp(
            members=options.devices,
            nodes=-(-options.devices // fleet.DEVICES),
            devices=fleet.DEVICES,
            cores=fleet.CORES,
            prep_ms=cost,
            streams=number,
        )
        for cost, number in varied
    ]
    found = fleet.study(set_ups, options.seeds, say)
    if options.large:
        large = fleet.SetUp(
            members=options.large,
            nodes=max(1, options.large // 10),
            devices=fleet.LARGE_DEVICES,
            cores=fleet.LARGE_CORES,
            prep_ms=costs[0],
            streams=2,
        )
        found += fleet.study([large], 1, say)
    return found


def _throughput(options: argparse.Namespace, say: Say) -> list[throughput.Row]:
    from ensemble.bench.schedule import throughput

    return throughput.study(
        options.modes,
        members=options.reporting,
        epochs=options.reports,
        round=options.round,
        repeats=options.repeats,
        say=say,
    )


STUDY = Study(
    name="schedule",
    says="how well the scheduler uses a machine",
    description=(
        "Members of uneven steps in MLPerf HPC's figures; FLEET's set-up and ten thousand members on a virtual "
        "clock; the reports that the controller records in a second. As it is some ten minutes on two cores, most "
        "of it for the part 'real'."
    ),
    add_options=add_options,
    run=run,
)
