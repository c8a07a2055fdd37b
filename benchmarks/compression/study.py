"""Runs the parts of the compression study: codecs, exchanges over links, accuracy."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import models
from benchmarks.compression.rows import AccuracyRow, CodecRow, ExchangeRow, Results, exchange_rows
from benchmarks.compression.schemes import PLAIN, UNLIMITED, Scheme, parse_schemes
from benchmarks.members import MemberResult, compare, declare, train_members
from benchmarks.models import Net
from benchmarks.training import TrainingSetup
from ensemble.bench.launch import hosts
from ensemble.bench.launch.ranks import LOOPBACK, run_ranks
from ensemble.bench.results import Report, format_bytes
from ensemble.spec import Ensemble, Member

CODECS, EXCHANGES, ACCURACY = PARTS = ("codecs", "exchanges", "accuracy")
WORKERS = 2  # of each member
_MEASURE = "benchmarks.compression.measure:"
_TIMEOUT_S = 3600.0
_BATCH = 64
_CODEC_BYTES = 64 * 2**20  # of fp32, with which codecs are timed
# The digits are few: they are trained for as many times more epochs.
_DIGITS_EPOCHS = 4


def study(options: Namespace, nets: Sequence[Net], trained: Sequence[Net], report: Report) -> Results:
    """Measure what the command's options list.

    Args:
        options: of the study, and `seconds`: `iterations` are fewer where they take longer.
        nets: whose gradients are exchanged, and which are trained for a few steps.
        trained: whose accuracy is measured.

    Raises:
        SpecError: there is no such scheme or rate, or too little data.
        PipelineError: the data cannot be read.
        RanksError: a rank failed.
    """
    for rate in options.rates:
        if rate != UNLIMITED:
            hosts.rate_bps(rate)
    exchanged, compared = parse_schemes(options.schemes), parse_schemes(options.train_schemes)
    declared = []
    if ACCURACY in options.parts:  # raises before anything is measured
        declared = [(net, declare_members(net, compared, options)) for net in trained]
    codecs = list(_measure_codecs(options.rounds, exchanged, report)) if CODECS in options.parts else []
    exchanges = list(_measure_exchanges(options, nets, exchanged, report)) if EXCHANGES in options.parts else []
    accuracies: list[AccuracyRow] = []
    for net, ensemble in declared:
        report(f"{net.name}: training {len(ensemble.members or ())} members on {ensemble.samples} samples")
        results = train_members(ensemble, options.run_dir, report)
        accuracies += accuracy_rows(net, options.data, compared, results)
    return Results(codecs=codecs, exchanges=exchanges, accuracies=accuracies)


def _measure_codecs(rounds: int, exchanged: Sequence[Scheme], report: Report) -> Iterator[CodecRow]:
    packed = {scheme.name: scheme for scheme in exchanged if scheme.name not in (PLAIN, "powersgd")}
    cases: list[tuple[Scheme, str | None]] = [(scheme, None) for scheme in packed.values()]
    cases += [(packed["qsgd4"], "torch")] if "qsgd4" in packed else []
    report(f"codecs: {format_bytes(_CODEC_BYTES)} on one core")
    given = [{"options": scheme.options, "form": form} for scheme, form in cases]
    options = {"cases": given, "size": _CODEC_BYTES, "iterations": 3 * rounds}
    (measured,) = run_ranks(_MEASURE + "measure_codecs", options, placement=[0], timeout_s=_TIMEOUT_S)
    for (scheme, form), found in zip(cases, measured, strict=True):
        cast = scheme.name in ("fp16", "bf16")
        yield CodecRow(
            scheme=scheme.name,
            form=form or ("torch" if cast else "numba"),
            ratio=_CODEC_BYTES / found["wire"],
            bits=32 * found["wire"] / _CODEC_BYTES,
            encode_gbs=_CODEC_BYTES / found["encode_s"] / 1e9,
            feedback_gbs=_CODEC_BYTES / found["feedback_s"] / 1e9,
            decode_gbs=_CODEC_BYTES / found["decode_s"] / 1e9,
            **{name: found[name] for name in ("error", "mean_error", "fed_error")},
        )


def _measure_exchanges(
    options: Namespace, nets: Sequence[Net], exchanged: Sequence[Scheme], report: Report
) -> Iterator[ExchangeRow]:
    counts, rates = options.hosts, options.rates
    reason = hosts.unavailable()
    if reason is not None:
        counts, rates = counts[-1:], [UNLIMITED]
        report(f"{reason}; only {counts[0]} ranks on this machine's loopback")
    for count in counts:
        payloads = list(_payloads(options, nets if count == max(counts) else ()))
        measured = {
            "schemes": {scheme.label: scheme.options for scheme in exchanged},
            "payloads": [payload for _, _, payload in payloads],
            "rounds": options.rounds,
            "iterations": options.iterations,
            "seconds": options.seconds,
            "interface": LOOPBACK if reason else hosts.INTERFACE,
        }
        for rate in rates:
            report(f"exchanges: {count} hosts, {rate}: {', '.join(label for label, _, _ in payloads)}")
            with hosts.make_hosts(0 if reason else count, None if rate == UNLIMITED else rate) as made:
                by_rank = run_ranks(
                    _MEASURE + "measure", measured, placement=range(count), hosts=made, timeout_s=_TIMEOUT_S
                )
            for (label, values, _), cases in zip(payloads, zip(*by_rank, strict=True), strict=True):
                yield from exchange_rows(count, rate, label, values, cases, reason is None)


def _payloads(options: Namespace, nets: Sequence[Net]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """What is exchanged: its name, its number of values, and options."""
    from benchmarks.compression.measure import message_shape

    for size in options.sizes:
        rows, columns = message_shape(size)
        yield format_bytes(size), rows * columns, {"size": size}
    for net in nets:
        setup = TrainingSetup(net=net, data=options.data, batch_size=_BATCH)
        yield net.name, net.parameters(options.data), {"training": setup.to_options()}


def declare_members(net: Net, schemes: Sequence[Scheme], options: Namespace) -> Ensemble:
    """The run: for each seed a member in each scheme; accuracy is measured on the test split.

    Seeds draw weights and the codecs' random numbers.
    """
    splits = models.splits(net, options.data, options.samples, options.held_out)
    epochs = options.epochs or models.EPOCHS[net.kind] * (_DIGITS_EPOCHS if options.data is None else 1)
    members = [
        Member(net.params(options.data), seed=seed, workers=WORKERS, compression=scheme.options)
        for seed in range(options.seeds)
        for scheme in schemes
    ]
    return declare(f"compression-{net.name}", net, splits.train, splits.test, members, epochs, WORKERS)


def accuracy_rows(
    net: Net, data: str | None, schemes: Sequence[Scheme], results: Sequence[MemberResult]
) -> list[AccuracyRow]:
    """The rows of one network, of its members' results as `declare_members` numbers them."""
    import torch

    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in models.model(net.params(data)).parameters()]
    compared = compare(results, [scheme.label for scheme in schemes], PLAIN)
    return [
        AccuracyRow(
            model=net.name,
            data=net.data(data),
            scheme=scheme.label,
            feedback=scheme.feedback,
            bits=scheme.bits(shapes),
            **vars(compared[scheme.label]),
        )
        for scheme in schemes
    ]
