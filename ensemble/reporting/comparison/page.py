"""The document of several runs side by side: what `ensemble compare` says as tables, and the best members' curves.

Code of a run is never executed here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemble.reporting.comparison.compare import Declared, compare_runs, read_declared
from ensemble.reporting.comparison.result import ALIKE, list_tables
from ensemble.reporting.dashboard.plots import draw_axis, draw_curve, draw_plot
from ensemble.reporting.dashboard.run_section import TONES
from ensemble.reporting.model_figures import describe_figure
from ensemble.reporting.sections import Table
from ensemble.store import StoreError
from ensemble.store.folding import EVENT_ERRORS

Document = dict[str, Any]


def describe_comparison(paths: Mapping[str, Path]) -> Document:
    """Returns the document.

    Args:
        paths: of the runs, by their keys, in order; the others are compared with the first.

    Returns:
        `runs`: `key`, `name`, `state` of each; series name runs by their places here. `notes`: what is not
        compared, and why; `plots`; `tables`.
    """
    folder = os.path.commonpath([path.parent for path in paths.values()])
    names = {key: str(path.relative_to(folder)) for key, path in paths.items()}
    declared, notes = dict[str, Declared](), list[str]()
    for key, path in paths.items():
        try:
            declared[key] = read_declared(path)
        except (OSError, StoreError, *EVENT_ERRORS) as error:
            notes.append(f"{names[key]} cannot be read: {' '.join(str(error).split()) or type(error).__name__}")
    tables = list[Table]()
    if len(declared) > 1:
        try:
            comparison = compare_runs(list(declared.values()), [names[key] for key in declared], runs_code=False)
        except Exception as error:
            notes.append(f"they cannot be compared: {type(error).__name__}: {error}")
        else:
            notes += comparison.notes + ([] if comparison.declared else [ALIKE])
            tables = [
                Table(
                    title,
                    title.partition(";")[0].capitalize(),
                    title.partition("; ")[2],
                    [(name, "text long") for name in head],
                    rows,
                )
                for title, head, rows in list_tables(comparison)
                if rows
            ]
    words = {key: declared[key].run.word if key in declared else "unreadable" for key in paths}
    return {
        "runs": [
            {"key": key, "name": names[key], "state": {"word": words[key], "tone": TONES.get(words[key], "soft")}}
            for key in paths
        ],
        "notes": notes,
        "plots": _plot_best(list(paths), declared),
        "tables": [table.as_dict() for table in tables],
    }


def _plot_best(keys: Sequence[str], declared: Mapping[str, Declared]) -> list[Document]:
    """The objective after each epoch of the best member of each run, one figure for each objective."""
    series: dict[tuple[str, str], list[Document]] = {}
    for key, one in declared.items():
        best, state = one.run.best, one.state
        drawn = draw_curve(keys.index(key), [] if best is None else best.history, state.objective)
        if drawn["points"]:
            series.setdefault((state.objective, state.direction), []).append(drawn)
    reading = "The objective on the validation split after each epoch of the best member."
    return [
        draw_plot(
            f"best {ranking[0]} {ranking[1]}",
            "Best member of each run",
            reading,
            draw_axis("epoch"),
            draw_axis(describe_figure(ranking[0], ranking=ranking).title),
            curves,
        )
        for ranking, curves in series.items()
    ]
