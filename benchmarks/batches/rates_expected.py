"""What Svyatkovskiy et al. 2019 claim of learning rates, beside what the part 'rates' measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.batches.rates import CAPPED, DAMPED, LAWS, UNSCALED, RateRow
from ensemble.bench.charts import Panel
from ensemble.bench.results import Claim, Outcome, group_by, outcome_of, series_of, show_claims

_FRNN, _FRNN_WORKERS = "Svyatkovskiy et al. 2019", 100
_COLUMNS = "model metric workers batch_size steps law lr accuracy difference less_one epochs_to_target note"
_HEADINGS = {"batch_size": "batch", "accuracy": "metric, %", "difference": "less damped"}
_HEADINGS |= {"less_one": "less one worker"}
_COLOURS = {UNSCALED: "#8a94a3", CAPPED: "#d97a2b", DAMPED: "#2f7bc4"}


def show_rates(rows: Sequence[RateRow]) -> Outcome:
    """What the part 'rates' prints, writes and draws."""
    return show_claims(list(rate_claims(rows))) + outcome_of(
        rows,
        "The learning rate of n workers, by accumulation",
        _COLUMNS,
        headings=_HEADINGS,
        part="rates",
        findings=rate_findings(rows),
        notes=["n workers by accumulation: each law's rate for n workers"],
        panels=rate_panels(rows),
    )


def rate_claims(rows: Sequence[RateRow]) -> Iterator[Claim]:
    """Up to how many workers the damped law keeps the metric, and where these seeds show it to lose."""
    for model, own in group_by(rows, lambda row: row.model).items():
        kept = {law: kept_to(own, law) for law in LAWS}
        damped, most = [row for row in own if row.law == DAMPED], max(row.workers for row in own)
        if not damped:
            continue
        worse = {f"{law} is better": _signs(own, law)[1] for law in LAWS if law != DAMPED}
        worse["less than one worker"] = [row.workers for row in damped if row.less_one and row.less_one.sign < 0]
        loses = [f"{what} at {', '.join(map(str, where))}" for what, where in worse.items() if where]
        at_end = "; ".join(
            f"{row.workers}: {row.accuracy} %"
            for row in own
            if row.accuracy and row.workers in (1, most)
            if row.law == (DAMPED if row.workers > 1 else UNSCALED)
        )
        others = " and ".join(f"{law} {kept[law]}" for law in LAWS if law != DAMPED)
        yield Claim(
            paper=_FRNN,
            claim=f"the damped law keeps the metric up to about 100 workers; here {model}, {own[0].data}",
            published="about 100 workers",
            measured=f"{kept[DAMPED]} workers, of {most} at most ({others}), by accumulation",
            ratio=kept[DAMPED] / _FRNN_WORKERS,
            spread=at_end,
            loses="; ".join(loses),
        )


def rate_findings(rows: Sequence[RateRow]) -> Iterator[str]:
    """Of each model: the rate of one worker, how far each law keeps the metric, and which is better where."""
    for model, own in group_by(rows, lambda row: row.model).items():
        first = own[0]
        edge = ", an end of the grid: a better one may lie beyond" if first.edge else ""
        yield f"{model}: {first.optimizer} of rate {first.lr0:g} for one worker{edge}; target {first.target:.2f} %"
        for law in LAWS:
            yield f"{model}, {law}: all seeds reach the target up to {kept_to(own, law)} workers"
            said = {1: "better at", -1: "worse at", 0: "no difference that these seeds show at"}
            parts = [f"{said[sign]} {', '.join(map(str, at))}" for sign, at in _signs(own, law).items() if at]
            if parts:
                yield f"{model}, {law} against {DAMPED}: {'; '.join(parts)} workers"


def _signs(rows: Sequence[RateRow], law: str) -> dict[int, list[int]]:
    """The numbers of workers at which a law is better (1), worse (-1) and not seen to differ (0) from damped."""
    own = [(row.workers, row.difference.sign) for row in rows if row.law == law and row.difference]
    return {sign: [workers for workers, its in own if its == sign] for sign in (1, -1, 0)}


def kept_to(rows: Sequence[RateRow], law: str) -> int:
    """The largest number of workers up to which all seeds reach the target; 0 where not even one worker's do."""
    most = 0
    for row in sorted((row for row in rows if row.workers == 1 or row.law == law), key=lambda row: row.workers):
        if row.reached < row.trained:
            break
        most = row.workers
    return most


def rate_panels(rows: Sequence[RateRow]) -> Iterator[Panel]:
    """The final metric, and the epochs to the target, over workers."""
    for model, own in group_by(rows, lambda row: row.model).items():
        first = own[0]
        at = f"{first.optimizer}, {first.lr0:g} for one worker, batches of {first.batch_size}; 95 % intervals"
        ticks = {row.workers: str(row.workers) for row in own}
        for title, y, field in (
            (f"{model}: final {first.metric}, %", "%", "accuracy"),
            (f"{model}: epochs until {first.target:.1f} %, at least", "epochs", "epochs"),
        ):
            series = series_of(own, "workers", field, "law", _COLOURS)
            yield Panel(title=title, at=at, x="workers", y=y, series=series, x_scale="log", x_text=ticks)
