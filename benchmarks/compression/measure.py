"""What the compression study measures: codecs on one core, exchanges over links, and the accuracy of members."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import models
from benchmarks.members import Accuracy, MemberResult, compare, declare_variants, train_members
from benchmarks.models import Net
from benchmarks.training import TrainingSetup
from ensemble.bench.launch import hosts
from ensemble.bench.launch.ranks import LOOPBACK, run_ranks
from ensemble.bench.results import Report, format_bytes
from ensemble.spec import Ensemble, SpecError
from ensemble.spec.options import COMPRESSIONS, resolve

UNLIMITED = "unlimited"
PLAIN = "none"
WORKERS = 2  # of each member
Schemes = Mapping[str, dict[str, Any]]
_VARIANTS = {
    "onebit-zero": {"name": "onebit", "threshold": "zero"},
    "onebit-tensor": {"name": "onebit", "column": "tensor"},
}
_RANKS, _TIMEOUT_S = "benchmarks.compression.ranks:", 3600.0
_CODEC_BYTES = 64 * 2**20  # of fp32, with which codecs are timed


@dataclass(frozen=True, kw_only=True)
class CodecRow:
    """One codec on one core.

    Attributes:
        scheme: the compression.  form: what runs it: "numba", "torch".
        ratio: fp32 bytes over packed bytes.
        encode_gbs, feedback_gbs, decode_gbs: 10^9 bytes of fp32 a second; feedback: with the error in place.
        error: relative error of a message of normally distributed values.
        mean_error, fed_error: of the mean of 16 messages of the same values, without and with error feedback.
    """

    scheme: str
    form: str
    ratio: float
    encode_gbs: float
    feedback_gbs: float
    decode_gbs: float
    error: float
    mean_error: float
    fed_error: float


@dataclass(frozen=True, kw_only=True)
class ExchangeRow:
    """One scheme over one link.

    Attributes:
        hosts, rate: hosts, a rank each, and the rate of their links, or "unlimited".
        reached_bps: bit/s that the plain exchange of this message reached on a host's link: a little less than the
            link's rate (headers), or much less where not the link but the machine limits it.
        what: the message, such as "16 MiB", or the network whose gradient it was.
        scheme: its compression.
        time_ms: an exchange, the median of the slowest rank.
        speedup: times as fast as the plain exchange.
        sent_mb: 10^6 bytes a rank sent, by the communicator's count.  wire_mb: the same at the busiest host's
            interface, with headers and acknowledgements; None on the loopback.
        ratio: of the plain exchange's sent bytes to these.
        error: relative error of the sum.
    """

    hosts: int
    rate: str
    reached_bps: float
    what: str
    scheme: str
    time_ms: float
    speedup: float
    sent_mb: float
    wire_mb: float | None
    ratio: float
    error: float


@dataclass(frozen=True, kw_only=True)
class AccuracyRow(Accuracy):
    """One scheme's accuracy on the test split.

    Attributes:
        model, data: what was trained.  scheme: their compression.
        bits: of a gradient's value on the wire, on the average over the model; small parameters travel as fp32.
    """

    model: str
    data: str
    scheme: str
    bits: float


@dataclass(frozen=True, kw_only=True)
class SameTimeRow(Accuracy):
    """What a scheme has reached over a link at the time at which fp32 has finished, of members that have finished.

    Attributes:
        model, data, scheme: as of an `AccuracyRow`.  rate: of the links of two hosts, a worker on each.
        step_ms: of training, without emulation.  speedup: over fp32's.
        trained: share of the scheme's epochs that are trained by then.
    """

    model: str
    data: str
    rate: str
    scheme: str
    step_ms: float
    speedup: float
    trained: float


def measure_codecs(rounds: int, schemes: Schemes, report: Report) -> Iterator[CodecRow]:
    """Time each scheme's codec.

    Raises:
        RanksError: the rank failed.
    """
    packed = {given["name"]: given for given in schemes.values() if given["name"] not in (PLAIN, "powersgd")}
    forms = [(name, "torch" if name in ("fp16", "bf16") else "numba") for name in packed]
    forms += [("qsgd4", "torch")] if "qsgd4" in packed else []
    report(f"codecs: {format_bytes(_CODEC_BYTES)} on one core")
    cases = [{"options": packed[name], "form": form} for name, form in forms]
    options = {"cases": cases, "size": _CODEC_BYTES, "iterations": 3 * rounds}
    (measured,) = run_ranks(_RANKS + "measure_codecs", options, placement=[0], timeout_s=_TIMEOUT_S)
    for (name, form), found in zip(forms, measured, strict=True):
        yield CodecRow(scheme=name, form=form, **found)


def measure_exchanges(
    options: Namespace, nets: Sequence[Net], schemes: Schemes, report: Report
) -> Iterator[ExchangeRow]:
    """Exchange messages, and the networks' gradients, over hosts and links as the command's options list them.

    Raises:
        RanksError: a rank failed.
    """
    counts, rates, reason = options.hosts, options.rates, hosts.unavailable()
    if reason is not None:
        counts, rates = counts[-1:], [UNLIMITED]
        report(f"{reason}; only {counts[0]} ranks on this machine's loopback")
    for count in counts:
        payloads: dict[str, dict[str, Any]] = {format_bytes(size): {"size": size} for size in options.sizes}
        for net in nets if count == max(counts) else ():
            setup = TrainingSetup(net=net, data=options.data, batch_size=models.BATCH_SIZE)
            payloads[net.name] = {"setup": asdict(setup)}
        given = {
            "schemes": schemes,
            "payloads": list(payloads.values()),
            "rounds": options.rounds,
            "iterations": options.iterations,
            "interface": LOOPBACK if reason else hosts.INTERFACE,
        }
        for rate in rates:
            report(f"exchanges: {count} hosts, {rate}: {', '.join(payloads)}")
            with hosts.make_hosts(0 if reason else count, None if rate == UNLIMITED else rate) as made:
                by_rank = run_ranks(
                    _RANKS + "measure", given, placement=range(count), hosts=made, timeout_s=_TIMEOUT_S
                )
            for label, cases in zip(payloads, zip(*by_rank, strict=True), strict=True):
                yield from exchange_rows(count, rate, label, cases, reason is None)


def exchange_rows(
    count: int, rate: str, label: str, by_rank: Sequence[dict[str, dict[str, Any]]], on_wire: bool
) -> Iterator[ExchangeRow]:
    """The rows of what each rank's `measure` returned.

    Args:
        count: of hosts.  label: what was exchanged.  on_wire: whether an interface counted the bytes.
    """
    plain_s = plain_sent = 0.0
    for scheme in by_rank[0]:  # the plain exchange is the first
        found = [rank[scheme] for rank in by_rank]
        median_s = max(statistics.median(rank["times"]) for rank in found)
        sent = max(rank["sent"] for rank in found)
        plain_s, plain_sent = plain_s or median_s, plain_sent or sent
        yield ExchangeRow(
            hosts=count,
            rate=rate,
            reached_bps=8 * plain_sent / plain_s,
            what=label,
            scheme=scheme,
            time_ms=1e3 * median_s,
            speedup=plain_s / median_s,
            sent_mb=sent / 1e6,
            wire_mb=max(rank["wire"] for rank in found) / 1e6 if on_wire else None,
            ratio=plain_sent / sent,
            error=found[0]["error"],
        )


def measure_accuracies(
    options: Namespace, declared: Sequence[tuple[Net, Ensemble]], schemes: Schemes, report: Report
) -> tuple[list[AccuracyRow], list[SameTimeRow]]:
    """Train what `declare_members` has declared of each network, and time its steps over links."""
    accuracies, same_time = list[AccuracyRow](), list[SameTimeRow]()
    for net, ensemble in declared:
        results = train_members(ensemble, options.run_dir, report)
        accuracies += accuracy_rows(net, options.data, schemes, results)
        for rate, step_s in _time_members(options, net, schemes, report):
            same_time += same_time_rows(net, options.data, rate, step_s, results)
    return accuracies, same_time


def _time_members(
    options: Namespace, net: Net, schemes: Schemes, report: Report
) -> Iterator[tuple[str, dict[str, float]]]:
    """For each link, seconds of a member's step by scheme, a worker on each of two hosts."""
    reason = hosts.unavailable()
    setup = TrainingSetup(net=net, data=options.data, batch_size=models.BATCH_SIZE)
    given = {"setup": asdict(setup), "schemes": schemes, "rounds": options.rounds}
    given |= {"interface": LOOPBACK if reason else hosts.INTERFACE}
    for rate in options.time_links if reason is None else [UNLIMITED]:
        report(f"{net.name}: timing steps over {rate}" + (f" ({reason})" if reason else ""))
        with hosts.make_hosts(0 if reason else WORKERS, None if rate == UNLIMITED else rate) as made:
            ranks = run_ranks(
                _RANKS + "time_members", given, placement=range(WORKERS), hosts=made, timeout_s=_TIMEOUT_S
            )
        yield rate, {scheme: max(statistics.median(rank[scheme]) for rank in ranks) for scheme in schemes}


def same_time_rows(
    net: Net, data: str | None, rate: str, step_s: Mapping[str, float], results: Sequence[MemberResult]
) -> Iterator[SameTimeRow]:
    """The rows of one network and link, of its members' results as `declare_members` numbers them."""
    shares = {scheme: step_s[PLAIN] / seconds for scheme, seconds in step_s.items()}
    reached = [
        dataclasses.replace(result, accuracy=accuracy_at(result, share))
        for result, share in zip(results, itertools.cycle(shares.values()), strict=False)
    ]
    compared = compare(reached, list(step_s), PLAIN)
    for scheme, share in shares.items():
        yield SameTimeRow(
            model=net.name,
            data=net.data(data),
            rate=rate,
            scheme=scheme,
            step_ms=1e3 * step_s[scheme],
            speedup=share,
            trained=min(1.0, share),
            **vars(compared[scheme]),
        )


def accuracy_at(result: MemberResult, share: float) -> float | None:
    """Accuracy after a share of all epochs, the last one's from 1 on; None of a member that did not finish.

    Interpolated between the ends of epochs; before the first one from 0.
    """
    curve = result.history
    if result.accuracy is None or not curve:
        return None
    return float(np.interp(share * len(curve), range(len(curve) + 1), [0.0, *curve]))


def declare_members(net: Net, schemes: Schemes, options: Namespace) -> Ensemble:
    """The run: seeds draw weights and the codecs' random numbers.

    Raises:
        SpecError: there is too little data.
        PipelineError: the data cannot be read.
    """
    variants = [{"workers": WORKERS, "compression": given} for given in schemes.values()]
    return declare_variants(f"compression-{net.name}", net, options, variants, WORKERS)


def accuracy_rows(
    net: Net, data: str | None, schemes: Schemes, results: Sequence[MemberResult]
) -> list[AccuracyRow]:
    """The rows of one network, of its members' results as `declare_members` numbers them."""
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in models.model(net.params(data)).parameters()]
    compared = compare(results, list(schemes), PLAIN)
    same: dict[str, Any] = {"model": net.name, "data": net.data(data)}
    return [
        AccuracyRow(**same, scheme=label, bits=mean_bits(given, shapes), **vars(compared[label]))
        for label, given in schemes.items()
    ]


# --- schemes, by name ----------------------------------------------------------------------------------------


def parse_schemes(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The options of schemes, each once, by their names in tables; the plain exchange, the baseline, comes first.

    `qsgd4+ef` is with error feedback, `onebit-ef` without; without an ending it is the compression's default.
    `onebit-zero` has its threshold at zero, `onebit-tensor` columns of each tensor's own, as in the original.

    Raises:
        SpecError: there is no such compression, or it has no error feedback; or it is chosen by measurement.
    """
    schemes = {}
    for name in (PLAIN, *names):
        base, ending = (name[:-3], name[-3:]) if name.endswith(("+ef", "-ef")) else (name, "")
        if base == "auto":
            raise SpecError("--schemes: 'auto' is one of the others, chosen by measurement; name those")
        feedback = {"error_feedback": ending == "+ef"} if ending else {}
        options = resolve("--schemes", {"name": base, **_VARIANTS.get(base, {}), **feedback}, COMPRESSIONS)
        schemes[base + ("+ef" if options.get("error_feedback") else "")] = options
    return schemes


def mean_bits(options: Mapping[str, Any], shapes: Iterable[Sequence[int]]) -> float:
    """Mean bits of a value of parameters of these shapes on the wire; small parameters are sent as fp32."""
    sent = values = 0.0
    for shape in shapes:
        n = math.prod(shape)
        values += n
        sent += _bits(options, n, shape) if n >= options.get("min_size", n + 1) else 32 * n
    return sent / values


def _bits(options: Mapping[str, Any], n: int, shape: Sequence[int]) -> float:
    from ensemble.comm.codecs import make_codec, options_for
    from ensemble.comm.powersgd import is_worth_compressing, matrix_shape

    if options["name"] != "powersgd":
        return 8 * make_codec(options_for(options, shape)).wire_bytes(n)
    rank = options["rank"]
    return 32 * rank * sum(matrix_shape(shape)) if is_worth_compressing(shape, rank) else 32 * n
