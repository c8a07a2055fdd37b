"""Rows of results: dicts that can be read as attributes, too, and lists of them that become DataFrames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ensemble.spec.validation import unknown_name

if TYPE_CHECKING:
    import pandas


class Row(dict[str, Any]):
    """A row of figures: a dict whose keys are attributes as well, and after them its metrics.

    `row.metric` is `row["metric"]`, and `row.accuracy` is `row["metrics"]["accuracy"]`; of the combined model it
    is the ensemble's, `row["metrics"]["ensemble"]["accuracy"]`. Names that a dict has itself (`items`, `get`)
    remain the dict's.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        metrics = self._find_metrics()
        if name in metrics:
            return metrics[name]
        if name.startswith("__"):  # asked for by copy, pickle and the like
            raise AttributeError(name)
        raise AttributeError(unknown_name("the row has no", name, [*map(str, self), *map(str, metrics)]))

    def _find_metrics(self) -> Mapping[str, Any]:
        metrics = self.get("metrics")
        if not isinstance(metrics, Mapping):
            return {}
        of_ensemble = metrics.get("ensemble")
        return of_ensemble if isinstance(of_ensemble, Mapping) else metrics

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *map(str, self), *map(str, self._find_metrics())})


class Rows(list[Row]):
    """A list of rows."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        super().__init__(Row(row) for row in rows)

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a DataFrame: hyperparameters and metrics are columns of their own.

        A hyperparameter or a metric whose name another column has already is called `params.NAME` or
        `metrics.NAME`.

        Raises:
            ImportError: pandas is not installed.
        """
        return make_frame([_flatten(row) for row in self])


def _flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = {name: value for name, value in row.items() if not isinstance(value, Mapping)}
    for group in ("params", "metrics"):
        values = row.get(group)
        for name, value in values.items() if isinstance(values, Mapping) else ():
            columns[f"{group}.{name}" if name in row or (name in columns) else name] = value
    return columns


def make_frame(rows: list[dict[str, Any]] | dict[str, Any]) -> pandas.DataFrame:
    """A DataFrame.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise ImportError(
            "a DataFrame needs pandas, which is not installed: pip install 'ray-ensemble[notebook]'"
        ) from None
    return pandas.DataFrame(rows)
