"""`python -m benchmarks schedule`: how well the scheduler uses a machine, and how fast its controller is.

**Real**: members of uneven step times trained by the real controller, in MLPerf HPC's figures, against one after
another and against all at once without sharing.

**Simulated**: the scheduler's own decisions on a virtual clock, held against the real runs, then as many members
and devices as FLEET had, and thousands.

**Throughput**: the reports that the controller records in a second.
"""

from __future__ import annotations

import argparse

from ensemble.bench.results import Outcome, Report, Study, flatten, tabulate
from ensemble.cli.arguments import count, milliseconds_each, option, words
from ensemble.spec.validation import check_choice

REAL, SIMULATED, THROUGHPUT = "real", "simulated", "throughput"
PARTS = (REAL, SIMULATED, THROUGHPUT)


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    option(parser, "--parts", ",".join(PARTS), "what is studied", type=words)
    option(parser, "--repeats", 3, "medians of that many runs, of the parts real and throughput", type=count)

    part = parser.add_argument_group("part 'real'")
    shown = "members that are trained; their batches take from 40 to 160 ms, evenly spread in ratio"
    option(part, "--members", 8, shown, type=count)
    option(part, "--epochs", 3, "epochs of each member", type=count)
    option(part, "--samples", 256, "samples of an epoch", type=count)
    option(part, "--executor", "local", "local or ray")

    part = parser.add_argument_group("part 'simulated'")
    option(part, "--seeds", 20, "ensembles that are drawn from the table of members", type=count)
    option(part, "--devices", 100, "devices, and as many members, on nodes of 4 devices and 20 cores", type=count)
    shown = "core-milliseconds to prepare a sample, as in 0,10,100 (default: 0,50,100,200,400)"
    option(part, "--prep-ms", None, shown, type=milliseconds_each)
    shown = "members of the large set-up, on 8 devices for each 10; 0 leaves it out"
    option(part, "--large", 10_000, shown, type=int)

    part = parser.add_argument_group("part 'throughput'")
    option(part, "--reporting", 1000, "members that report at the same time", type=count)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.schedule import expected, fleet, real, throughput, workload

    for part in options.parts:
        check_choice("--parts", part, PARTS)
    check_choice("--executor", options.executor, ("local", "ray"))
    plan = real.Plan(
        steps_ms=workload.steps_ms(options.members),
        epochs=options.epochs,
        samples=options.samples,
        executor=options.executor,
    )
    arms = real.study(plan, options.repeats, report) if REAL in options.parts else []
    fleets = fleet.list_fleets(options.devices, options.prep_ms or (0.0, 50.0, 100.0, 200.0, 400.0))
    simulated = [fleet.measure(each, options.seeds, report) for each in fleets if SIMULATED in options.parts]
    if SIMULATED in options.parts and options.large:
        simulated.append(fleet.measure(fleet.large_fleet(options.large, fleets[0].prep_ms), 1, report))
    modes = throughput.study(options.reporting, options.repeats, report) if THROUGHPUT in options.parts else []
    return Outcome(
        tables=[
            ("Members of uneven steps", tabulate(arms)),
            ("On a virtual clock", tabulate(simulated)),
            ("The controller", tabulate(modes)),
        ],
        rows=[
            *({"part": REAL, **vars(row)} for row in arms),
            *({"part": SIMULATED, **flatten(row)} for row in simulated),
            *({"part": THROUGHPUT, **vars(row)} for row in modes),
        ],
        findings=[*expected.judge_arms(arms), *expected.judge_fleets(simulated), *expected.judge_modes(modes)],
        title="Scheduling",
        notes=("real: measured on this machine", "simulated: the scheduler's decisions on a virtual clock"),
        panels=[*expected.arm_panels(arms), *expected.fleet_panels(simulated), *expected.mode_panels(modes)],
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
