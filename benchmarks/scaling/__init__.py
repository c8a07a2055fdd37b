"""`python -m benchmarks scaling`: one member over more workers, and how their gradients are exchanged.

**Workers** (Svyatkovskiy et al. 2019): one member data-parallel over 1 to k workers, its step split into computing
and synchronization, beside the model t = compute / n + communication(n).

**Exchange** (Jia et al. 2018): fused and hierarchical exchange of gradients inside training.
"""

from __future__ import annotations

import argparse

from benchmarks.options import check_names, chosen_nets, data_options
from ensemble.bench.results import Outcome, Report, Study, run_parts
from ensemble.cli.arguments import count, counts, milliseconds_each, option, words
from ensemble.spec.options import COMPRESSIONS, resolve
from ensemble.spec.validation import SpecError


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_options(parser)
    option(parser, "--parts", "workers,exchange", "what is studied", type=words)
    option(
        parser, "--worker-batch", 64, "samples of a batch: global in strong scaling, else a worker's", type=count
    )
    shown = (
        "emulated accelerators: a timed wait of that length for such a batch, which uses no processor; 0: this "
        "machine computes, without --workers with at most one worker a core"
    )
    option(parser, "--step-ms", "0,100", shown, type=milliseconds_each)
    option(parser, "--steps", 10, "timed steps", type=count)
    option(parser, "--compression", "none", "compression of gradients between workers, such as bf16 or qsgd4")
    option(parser, "--hosts", 1, "hosts in network namespaces, for the workers (needs root)", type=count)
    option(parser, "--link", None, "rate of the hosts' links, as in 1gbit (default: unlimited)")

    part = parser.add_argument_group("part 'workers'")
    option(part, "--model", "lstm", "cnn, cnn-small, lstm, lstm-small or lstm-large")
    option(part, "--workers", None, "numbers of workers, as in 1,2,4,8 (default: 1,2,4,8)", type=counts)
    option(part, "--scalings", "strong,weak", "strong: one batch for all; weak: one for each worker", type=words)

    part = parser.add_argument_group("part 'exchange'")
    option(part, "--exchange-models", "resnet-deep,lstm", "networks that are trained", type=words)
    option(part, "--exchange-workers", 4, "workers", type=count)
    shown = "exchanges of gradients: each tensor by itself, or fused; flat, hierarchical or both"
    known = "unfused,fused,hierarchical-unfused,hierarchical,hybrid"
    option(part, "--communicators", known, shown, type=words)
    shown = "of workers on several hosts: neighbouring ranks on one host, or on different ones"
    option(part, "--placements", "contiguous,interleaved", shown, type=words)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.scaling.exchange import COMMUNICATORS, PLACEMENTS, study_exchange
    from benchmarks.scaling.expected import show_exchange, show_workers
    from benchmarks.scaling.laws import predict_rows
    from benchmarks.scaling.workers import SCALINGS, study_workers
    from ensemble.bench.launch import hosts

    check_names("--scalings", options.scalings, SCALINGS)
    check_names("--communicators", options.communicators, COMMUNICATORS)
    check_names("--placements", options.placements, PLACEMENTS)
    resolve("--compression", options.compression, COMPRESSIONS)
    if options.link is not None and options.hosts == 1:
        raise SpecError("--link is for several hosts: say how many with --hosts")
    if options.hosts > 1 and (reason := hosts.unavailable()):
        raise SpecError(f"--hosts {options.hosts}: {reason}")
    if options.exchange_workers < options.hosts and "exchange" in options.parts:
        raise SpecError(f"{options.exchange_workers} workers cannot be on {options.hosts} hosts")
    [net], exchanged = chosen_nets(options, [options.model]), chosen_nets(options, options.exchange_models)
    parts = {  # whatever the user may have got wrong is raised before anything is measured
        "workers": lambda: show_workers(*predict_rows(study_workers(net, options, report))),
        "exchange": lambda: show_exchange(study_exchange(exchanged, options, report)),
    }
    return run_parts(options.parts, parts, "Scaling")


STUDY = Study(
    name="scaling",
    summary="one member over more workers",
    description="One member over 1 to k workers, and fused and hierarchical exchange of their gradients.",
    add_options=add_options,
    run=run,
)
