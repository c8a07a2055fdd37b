"""Runs the parts of the compression study: codecs, exchanges over links, accuracy."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.bench import models
from ensemble.bench.compression import accuracy
from ensemble.bench.compression.accuracy import Extent
from ensemble.bench.compression.rows import AccuracyRow, CodecRow, ExchangeRow, Found
from ensemble.bench.compression.schemes import PLAIN, Scheme, schemes
from ensemble.bench.fabric.results import quartiles
from ensemble.bench.fabric.rows import human
from ensemble.bench.launch import hosts as emulated
from ensemble.bench.launch.hosts import INTERFACE, Hosts, rate_bps
from ensemble.bench.launch.ranks import LOOPBACK, run_ranks
from ensemble.bench.members import train_members
from ensemble.bench.models import Net
from ensemble.bench.results import Say
from ensemble.bench.training import Training

CODECS, EXCHANGES, ACCURACY = PARTS = ("codecs", "exchanges", "accuracy")
UNLIMITED = "unlimited"
_ROOM = "ensemble.bench.compression.measure"
_LONGEST_S = 3600.0
_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured.

    Attributes:
        parts: of `PARTS`.
        words: schemes of the exchanges; the plain one is always among them.
        codec_size: bytes of fp32 that the codecs are timed with.
        hosts: numbers of hosts, a rank on each.  rates: of their links, as `tc` writes them, or "unlimited".
        sizes: of messages, bytes.  nets: whose gradients are exchanged, and that are trained for a few steps.
        iterations: of each case, at most; fewer where they take more than `seconds`.  rounds: by turns.
        trained: networks whose accuracy is measured.  accuracy_words: in which schemes.  extent: how much.
        data: the directory with real data; None takes the digits.
        run_dir: where the members' runs are kept, None for nowhere.
    """

    parts: Sequence[str]
    words: Sequence[str]
    codec_size: int
    hosts: Sequence[int]
    rates: Sequence[str]
    sizes: Sequence[int]
    nets: Sequence[Net]
    iterations: int
    seconds: float
    rounds: int
    trained: Sequence[Net]
    accuracy_words: Sequence[str]
    extent: Extent
    data: str | None
    run_dir: str | None


def study(plan: Plan, say: Say = lambda _: None) -> Found:
    """Measure what the plan says.

    Raises:
        SpecError: there is no such scheme or rate, or not so much data.
        PipelineError: the data cannot be read.
        RanksError: a rank failed.
    """
    for rate in plan.rates:
        if rate != UNLIMITED:
            rate_bps(rate)
    exchanged, trained = schemes(plan.words), schemes(plan.accuracy_words)
    declared = {}
    if ACCURACY in plan.parts:  # or says why it cannot be done, before anything is measured
        declared = {net.name: accuracy.ensemble_of(net, plan.data, trained, plan.extent) for net in plan.trained}
    codecs = list(_codecs(plan, exchanged, say)) if CODECS in plan.parts else []
    exchanges = list(_exchanges(plan, exchanged, say)) if EXCHANGES in plan.parts else []
    accuracies: list[AccuracyRow] = []
    for net in plan.trained if declared else ():
        ensemble = declared[net.name]
        say(f"{net.name}: training {len(ensemble.members or ())} members on {ensemble.samples} samples")
        accuracies += accuracy.rows_of(net, plan.data, trained, train_members(ensemble, plan.run_dir, say))
    return Found(codecs=codecs, exchanges=exchanges, accuracies=accuracies)


def _codecs(plan: Plan, exchanged: Sequence[Scheme], say: Say) -> Iterator[CodecRow]:
    packed = {scheme.name: scheme for scheme in exchanged if scheme.name not in (PLAIN, "powersgd")}
    cases: list[tuple[Scheme, str | None]] = [(scheme, None) for scheme in packed.values()]
    cases += [(packed["qsgd4"], "torch")] if "qsgd4" in packed else []
    say(f"codecs: {human(plan.codec_size)} on one core")
    given = [{"options": scheme.options, "form": form} for scheme, form in cases]
    options = {"cases": given, "size": plan.codec_size, "iterations": 3 * plan.rounds}
    (measured,) = run_ranks(f"{_ROOM}:codecs", options, placement=[0], timeout_s=_LONGEST_S)
    for (scheme, form), found in zip(cases, measured, strict=True):
        cast = scheme.name in ("fp16", "bf16")
        yield CodecRow(
            scheme=scheme.name,
            form=form or ("torch" if cast else "numba"),
            ratio=plan.codec_size / found["wire"],
            bits=32 * found["wire"] / plan.codec_size,
            encode_gbs=plan.codec_size / found["encode_s"] / 1e9,
            feedback_gbs=plan.codec_size / found["feedback_s"] / 1e9,
            decode_gbs=plan.codec_size / found["decode_s"] / 1e9,
            error=found["error"],
            mean_error=found["mean_error"],
            fed_error=found["fed_error"],
        )


def _exchanges(plan: Plan, exchanged: Sequence[Scheme], say: Say) -> Iterator[ExchangeRow]:
    counts, rates = plan.hosts, plan.rates
    reason = emulated.unavailable()
    if reason is not None:
        counts, rates = counts[-1:], [UNLIMITED]
        say(f"{reason}; only {counts[0]} ranks on this machine's loopback")
    for count in counts:
        payloads = list(_payloads(plan, count == max(counts)))
        options = {
            "schemes": {scheme.word: scheme.options for scheme in exchanged},
            "payloads": [what for _, what in payloads],
            "rounds": plan.rounds,
            "iterations": plan.iterations,
            "seconds": plan.seconds,
            "interface": LOOPBACK if reason else INTERFACE,
        }
        for rate in rates:
            say(f"exchanges: {count} hosts, {rate}: {', '.join(label for label, _ in payloads)}")
            with _made(count, rate, reason is None) as made:
                by_rank = run_ranks(
                    f"{_ROOM}:measure", options, placement=list(range(count)), hosts=made, timeout_s=_LONGEST_S
                )
            for (label, what), cases in zip(payloads, zip(*by_rank, strict=True), strict=True):
                yield from exchange_rows(count, rate, label, _values(what), cases, reason is None)


def _payloads(plan: Plan, largest: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is exchanged, and what it is called; networks on most hosts only."""
    for size in plan.sizes:
        yield human(size), {"size": size}
    for net in plan.nets if largest else ():
        yield net.name, {"training": Training(net=net, data=plan.data, batch_size=_BATCH).to_options()}


def _values(what: dict[str, Any]) -> int:
    if "size" in what:
        from ensemble.bench.compression.measure import message_shape

        rows, columns = message_shape(what["size"])
        return rows * columns
    training = Training.of(what["training"])
    return training.net.parameters(training.data)


@contextlib.contextmanager
def _made(count: int, rate: str, possible: bool) -> Iterator[Hosts | None]:
    if not possible:
        yield None
        return
    with Hosts(count, None if rate == UNLIMITED else rate) as made:
        yield made


def exchange_rows(
    count: int, rate: str, label: str, values: int, by_rank: Sequence[dict[str, dict[str, Any]]], on_wire: bool
) -> Iterator[ExchangeRow]:
    """The rows of `exchanges.measure`.

    Args:
        count: of hosts.  label: of what was exchanged.  values: in it.
        by_rank: what each rank returned.
        on_wire: whether there was an interface to count bytes at.
    """
    slowest = {word: max((said[word]["times"] for said in by_rank), key=statistics.median) for word in by_rank[0]}
    plain_s, plain_sent = statistics.median(slowest[PLAIN]), max(said[PLAIN]["sent"] for said in by_rank)
    for word, times in slowest.items():
        middle, (low, high) = statistics.median(times), quartiles(times)
        sent = max(said[word]["sent"] for said in by_rank)
        steps = max((said[word]["steps"] for said in by_rank), key=lambda each: statistics.median(each or [0.0]))
        yield ExchangeRow(
            hosts=count,
            rate=None if rate == UNLIMITED else rate,
            reached_bps=8 * plain_sent / plain_s,
            what=label,
            values=values,
            scheme=word,
            time_ms=1e3 * middle,
            low_ms=1e3 * low,
            high_ms=1e3 * high,
            speedup=plain_s / middle,
            sent_mb=sent / 1e6,
            wire_mb=max(said[word]["wire"] for said in by_rank) / 1e6 if on_wire else None,
            ratio=plain_sent / sent,
            error=by_rank[0][word]["error"],
            step_ms=1e3 * statistics.median(steps) if steps else None,
        )


def nets_of(names: Sequence[str], **changed: int | None) -> list[Net]:
    """Networks by name; "none" for none."""
    return [models.net_of(name, **changed) for name in names if name != "none"]
