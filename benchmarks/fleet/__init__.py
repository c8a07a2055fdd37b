"""`python -m benchmarks fleet`: how well the scheduler uses a machine, and how fast its controller is.

**Real**: members of uneven step times, trained one after another, at once, and at once on one shared pipeline.
**Simulated**: the scheduler's own decisions on a virtual clock, for as many members as FLEET had.
**Throughput**: the reports that the controller records in a second.
"""

from __future__ import annotations

import argparse

from benchmarks.options import count, milliseconds_each, option, words
from benchmarks.results import Outcome, Report, Study, run_parts
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

    part = parser.add_argument_group("part 'throughput'")
    option(part, "--reporting", 1000, "members that report at the same time", type=count)
    option(part, "--reports", 9, "reports of each of them", type=count)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.fleet import expected, fleet, real, throughput, workload

    check_choice("--executor", options.executor, ("local", "ray"))

    def run_members() -> Outcome:
        steps_ms = workload.steps_ms(options.members)
        plan = real.Plan(
            steps_ms=steps_ms, epochs=options.epochs, samples=options.samples, executor=options.executor
        )
        return expected.show_arms(real.study(plan, options.repeats, report))

    def simulate_fleets() -> Outcome:
        fleets = fleet.list_fleets(options.devices, options.prep_ms or (0.0, 50.0, 100.0, 200.0, 400.0))
        return expected.show_fleets([fleet.measure(one_fleet, options.seeds, report) for one_fleet in fleets])

    def report_to_controller() -> Outcome:
        return expected.show_modes(throughput.study(options.reporting, options.reports, options.repeats, report))

    parts = {REAL: run_members, SIMULATED: simulate_fleets, THROUGHPUT: report_to_controller}
    return run_parts(options.parts, parts)


STUDY = Study(
    name="fleet",
    summary="how well the scheduler uses a machine",
    description=(
        "Members of uneven steps; FLEET's set-up on a virtual clock; reports that the "
        "controller records in a second."
    ),
    add_options=add_options,
    run=run,
)
