"""What is expected of more workers: the tables, claims, findings and plot of the scaling study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.scaling.exchange import FUSED, UNFUSED, ExchangeRow
from benchmarks.scaling.laws import LOGARITHMIC, RING, FitRow
from benchmarks.scaling.workers import REAL, STRONG, WorkerRow
from ensemble.bench.charts import PREDICTED, Panel, Series, bar_panel
from ensemble.bench.results import Claim, Outcome, group_by, outcome_of, series_of, series_of_fields, show_claims

_FRNN, _JIA = "Svyatkovskiy et al. 2019", "Jia et al. 2018"
_EFFICIENCY = 0.879  # published, at 2,048 GPUs
_SAME, _LONGER = 0.95, 1.1  # a step below, and an exchange above these ratios is slower
_LINEAR = 0.9  # of linear scaling, below which it is said not to be
# Of a curve over workers: what was measured, the model, and the first row's examples/s by the number of workers.
_MODEL = "one worker and the law of communication"
_WORKER_FIELDS = {"measured": "examples_per_s", _MODEL: "predicted_per_s", "linear": "linear_per_s"}
_WORKER_COLOURS = {"measured": "#2f7bc4", _MODEL: "#2f7bc4", "linear": "#c0c5cc"}
_WORKER_DASHES = {_MODEL: PREDICTED, "linear": "dot"}
_WORKER_COLUMNS = "scaling compute workers hosts batch_size examples_per_s step_ms compute_ms sync_ms "
_WORKER_COLUMNS += "communication_ms predicted_ms error_percent efficiency sent_mb"
_FIT_COLUMNS = "law a_ms b_ms c_ms points residual_ms workers beyond_ms measured_ms best"
_HEADINGS = {"batch_size": "batch", "examples_per_s": "examples/s", "error_percent": "error, %"}
_HEADINGS |= {"predicted_ms": "predicted from others, ms"}
_EXCHANGE_COLUMNS = "model compute workers hosts placement communicator messages sent_mb step_ms exchange_ms "
_EXCHANGE_COLUMNS += "step_ratio exchange_ratio efficiency"
_EXCHANGE_HEADINGS = {"step_ratio": "step, times as fast", "exchange_ratio": "exchange, times as fast"}


# --- workers -------------------------------------------------------------------------------------------------


def show_workers(rows: Sequence[WorkerRow], fits: Sequence[FitRow]) -> Outcome:
    """What the part 'workers' prints, writes and draws; the fitted laws are rows of the part "fit"."""
    return (
        show_claims(list(worker_claims(rows, fits)))
        + outcome_of(
            rows,
            "One member over workers; predictions are from one worker and other numbers of workers",
            _WORKER_COLUMNS,
            headings=_HEADINGS,
            part="workers",
            findings=worker_findings(rows),
            notes=["one member over n workers"],
            panels=worker_panels(rows),
        )
        + outcome_of(
            fits,
            "Communication over n workers, fitted",
            _FIT_COLUMNS,
            headings={
                "beyond_ms": "fit to fewer says, ms",
                "measured_ms": "measured, ms",
                "workers": "most workers",
            },
            part="fit",
            findings=fit_findings(fits),
            panels=fit_panels(rows, fits),
        )
    )


def _curves(rows: Sequence[WorkerRow]) -> dict[tuple[str, str], list[WorkerRow]]:
    return group_by(rows, lambda row: (row.scaling, row.compute))


def worker_findings(rows: Sequence[WorkerRow]) -> Iterator[str]:
    """A line for each curve, of the most workers that had a core each."""
    for (scaling, compute), curve in _curves(rows).items():
        last = [row for row in curve if not row.shares_cores][-1]
        if last.workers > 1:
            said = "" if last.predicted_ms is None else f", where the model says {last.predicted_ms:.3g} ms"
            yield (
                f"{scaling} scaling, compute {compute}: {last.workers} workers train "
                f"{last.examples_per_s / curve[0].examples_per_s:.3g} x the examples/s of one; "
                f"{last.step_ms:.3g} ms a step{said}"
            )
    if any(row.shares_cores for row in rows):
        yield (
            f"more than {rows[0].cores} workers that compute share {rows[0].cores} cores: they cannot be faster; "
            "--step-ms emulates an accelerator for each worker"
        )


def worker_claims(rows: Sequence[WorkerRow], fits: Sequence[FitRow]) -> Iterator[Claim]:
    """Linear runtime of each curve, and logarithmic communication."""
    for (scaling, compute), curve in _curves(rows).items():
        last = [row for row in curve if not row.shares_cores][-1]
        if last.workers > 1:
            emulated = "computed" if compute == REAL else f"accelerators of {compute} emulated"
            yield Claim(
                paper=_FRNN,
                claim=f"the runtime scales linearly with the number of workers; here {scaling} scaling",
                published="linear",
                measured=f"{last.efficiency:.0%} of linear at {last.workers} workers, {emulated}",
                ratio=last.efficiency,
                loses="" if last.efficiency >= _LINEAR else f"below {_LINEAR:.0%} of linear",
            )
    if _can_compare(fits):
        logarithmic, ring = sorted(fits, key=lambda fit: (LOGARITHMIC, RING).index(fit.law))
        yield Claim(
            paper=_FRNN,
            claim="communication grows with the logarithm of the number of workers",
            published=LOGARITHMIC,
            measured=f"up to {ring.workers} workers {LOGARITHMIC} leaves {logarithmic.residual_ms:.3g} ms, "
            f"a ring's {RING} {ring.residual_ms:.3g} ms; {ring.measured_ms:.3g} ms at {ring.workers}",
            loses="" if logarithmic.best else "the ring's law fits better",
        )


def _can_compare(fits: Sequence[FitRow]) -> bool:
    """Whether there are more numbers of workers than either law has coefficients."""
    return bool(fits) and all(fit.residual_ms is not None for fit in fits)


def fit_findings(fits: Sequence[FitRow]) -> Iterator[str]:
    """Which law fits better, and what both say beyond the workers that they were fitted to."""
    for fit in fits:
        residual = "" if fit.residual_ms is None else f", residual {fit.residual_ms:.3g} ms"
        is_better = fit.best and _can_compare(fits)
        yield f"communication is {fit.law}{residual}" + (": the better fit" if is_better else "")


def fit_panels(rows: Sequence[WorkerRow], fits: Sequence[FitRow]) -> Iterator[Panel]:
    """What was measured, and the laws."""
    counts = sorted({row.workers for row in rows if row.workers > 1})
    if counts and fits:
        measured = [row for row in rows if row.workers > 1 and not row.shares_cores]
        series = series_of(measured, "workers", "communication_ms", lambda row: f"{row.scaling}, {row.compute}")
        series += [
            Series(name=fit.law, xs=counts, ys=[fit.at(n) for n in counts], dash=PREDICTED, points=False)
            for fit in fits
        ]
        yield Panel(title="Communication, ms", x="workers", y="ms", series=series)


def worker_panels(rows: Sequence[WorkerRow]) -> Iterator[Panel]:
    """Examples/s beside the model, of each curve."""
    for (scaling, compute), curve in _curves(rows).items():
        first = curve[0]
        kind = f"{first.cores} cores compute" if compute == REAL else f"accelerators of {compute} are emulated"
        batch = "one batch of {} for all" if scaling == STRONG else "a batch of {} for each"
        at = f"{first.model}, {batch.format(first.batch_size)}, {kind}"
        series = series_of_fields(curve, "workers", _WORKER_FIELDS, _WORKER_COLOURS, _WORKER_DASHES)
        yield Panel(title=f"Examples/s, {scaling} scaling", at=at, x="workers", y="examples/s", series=series)


# --- exchange inside training --------------------------------------------------------------------------------


def show_exchange(rows: Sequence[ExchangeRow]) -> Outcome:
    """What the part 'exchange' prints, writes and draws."""
    return show_claims(list(exchange_claims(rows))) + outcome_of(
        rows,
        "Exchange inside training",
        _EXCHANGE_COLUMNS,
        headings=_EXCHANGE_HEADINGS,
        part="exchange",
        notes=["fused and hierarchical exchange inside training"],
        panels=exchange_panels(rows),
    )


def exchange_claims(rows: Sequence[ExchangeRow]) -> Iterator[Claim]:
    """How much faster each network trains than with each tensor by itself, and how efficiently."""
    for model, own in group_by(rows, lambda row: row.model).items():
        faster = [row for row in own if row.step_ratio is not None and row.communicator != UNFUSED]
        if faster:
            best = max(faster, key=lambda row: row.step_ratio or 0.0)
            ratios = sorted(row.exchange_ratio for row in faster if row.exchange_ratio is not None)
            yield Claim(
                paper=_JIA,
                claim=f"fused and hierarchical exchange train faster than all-reduces of the day; here {model}",
                published="up to 3 x AlexNet, 11 x ResNet-50, against NCCL of 2018",
                measured=f"a step {best.step_ratio:.1f} x as fast as with each tensor by itself ({_where(best)})",
                spread=f"exchange alone {ratios[0]:.1f} to {ratios[-1]:.1f} x, over communicators and placements"
                if ratios
                else "",
                loses="; ".join(_losses(own)),
            )
        emulated = [row for row in own if row.efficiency is not None and row.compute != REAL]
        if emulated:
            best = max(emulated, key=lambda row: row.efficiency or 0.0)
            worst = min(row.efficiency or 0.0 for row in emulated)
            how = f"{best.workers} workers, accelerators of {best.compute} emulated"
            yield Claim(
                paper=_JIA,
                claim=f"most of many workers' speed is kept, each with a batch of its own; here {model}",
                published=f"{_EFFICIENCY:.1%} at 2,048 GPUs",
                measured=f"{best.efficiency:.1%} at {how} ({_where(best)})",
                spread=f"{worst:.1%} to {best.efficiency:.1%}, over communicators and placements",
            )


def _where(row: ExchangeRow) -> str:
    if row.placement is None:
        return f"{row.communicator}, one host"
    return f"{row.communicator}, {row.hosts} hosts, {row.link or 'unlimited'}, {row.placement}"


def _losses(rows: Sequence[ExchangeRow]) -> Iterator[str]:
    """The worst step against unfused ones, and the worst exchange of others against flat and fused messages."""

    def worst(found: list[tuple[float, ExchangeRow]], says: str) -> str:
        ratio, row = found[0]
        others = f", the worst of {len(found)}" if len(found) > 1 else ""
        return f"{says.format(ratio)} ({_where(row)}, compute {row.compute}{others})"

    flat = {(row.compute, row.placement): row.exchange_ms for row in rows if row.communicator == FUSED}
    steps = [(row.step_ratio, row) for row in rows if row.step_ratio is not None and row.step_ratio < _SAME]
    longer = [
        (row.exchange_ms / fused_ms, row)
        for row in rows
        if row.communicator not in (UNFUSED, FUSED) and (fused_ms := flat.get((row.compute, row.placement)))
    ]
    longer = [(ratio, row) for ratio, row in longer if ratio > _LONGER]
    if steps:
        yield worst(sorted(steps, key=lambda each: each[0]), "a step {:.2f} x as fast as unfused")
    if longer:
        yield worst(sorted(longer, key=lambda each: -each[0]), "exchange takes {:.1f} x as long as flat and fused")


def exchange_panels(rows: Sequence[ExchangeRow]) -> Iterator[Panel]:
    """Milliseconds of a step and of its exchange by communicator, for each network and computing."""
    for (model, compute), own in group_by(rows, lambda row: (row.model, row.compute)).items():
        first = own[0]
        for title, field in (("A step", "step_ms"), ("Exchange alone", "exchange_ms")):
            yield bar_panel(
                f"{title}, ms: {model}",
                series_of(own, "communicator", field, lambda row: row.placement or "one host"),
                at=f"{first.workers} workers on {first.hosts} hosts, links {first.link or 'unlimited'}, "
                f"compute {compute}",
                y="ms",
            )
