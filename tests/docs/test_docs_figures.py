"""Figures on the pages of studies are those of kept records."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_site"))
import figures  # noqa: E402

CLAIM = {"claim": "It is fast.", "published": "2 x", "measured": "3 x", "ratio": 1.5, "spread": "", "loses": ""}
STEP = {"part": "step", "net": "a", "gain": 2.0, "gain_low": 1.5}
ROWS = [
    {"part": "claim", **CLAIM},
    STEP | {"rate": "1gbit", "time_ms": 12.345, "gain_high": 2.5},
    STEP | {"rate": "10gbit", "time_ms": 1234.5, "gain_high": 3.5},
]
PAGE = """# A study

<!-- claims made -->
<!-- end -->

## Figures

<!-- table made part=step: net; time_ms as step, ms; gain -->
<!-- end -->

<!-- pivot made part=step: net across rate of time_ms -->
<!-- end -->

<!-- text made: On a it takes {part=step rate=1gbit: time_ms} ms, {part=step rate=10gbit: time_ms /
part=step rate=1gbit: time_ms} times as long at 10 Gbit/s ({command}). -->
<!-- end -->

<!-- given -->
Two authors measured 9.9 ms.
<!-- end -->

It takes `12.3` ms with 64 workers, see [page 2.1](page-2.1.md).
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    record = {"command": "python -m benchmarks x", "machine": "2 cores", "seconds": 120.0, "rows": ROWS}
    (tmp_path / "made.json").write_text(json.dumps(record))
    monkeypatch.setattr(figures, "RECORDS", tmp_path)
    return figures.write_figures(PAGE)


def test_a_page_shows_what_was_measured_with_its_command(made: str) -> None:
    assert "| It is fast. | 2 x | 3 x | 1.50 |  |  |" in made
    assert "| a | 12.3 | 2.00 ± 0.50 |" in made and "| a | 1,234 | 2.00 (1.50 to 3.50) |" in made
    assert "| net \\ rate | 1gbit | 10gbit |\n|---|---|---|\n| a | 12.3 | 1,234 |" in made
    assert made.count("`python -m benchmarks x`: 2 min on 2 cores") == 3
    assert figures.write_figures(made) == made


def test_sentences_have_values_and_ratios_of_one_row_each(made: str) -> None:
    assert "\nOn a it takes 12.3 ms, 100 times as long at 10 Gbit/s (python -m benchmarks x).\n" in made


def test_no_figure_stands_outside_of_a_block(made: str) -> None:
    assert figures.find_figures(made) == []
    for line, found in {
        "And 12.4 ms with 1,235 of 2.": ["12.4"],
        "It is up to 12 % less, and 3 times as fast": ["12", "3"],
        "| a | 1,234 | 7 / 8 |": ["1,234", "7"],
        "| 1, 4 and 16 members | SC18 |": [],
        "```\nit prints 12.4 ms\n```\n\n### 3 times": [],
    }.items():
        assert figures.find_figures(f"{made}\n{line}\n") == found


def test_a_comment_that_asks_for_what_is_not_there_is_an_error(made: str) -> None:
    for asked in (
        "table made part=other: net",
        "table made part=step: speed",
        "pivot made part=step: net; rate",
        "text made: {part=step: gain} of two rows",
        "text made: {part=step rate=1gbit: speed}",
    ):
        with pytest.raises(ValueError):
            figures.write_figures(f"<!-- {asked} -->\n{figures.END}\n")


def test_pages_have_the_figures_of_their_records_and_no_others() -> None:
    for path in figures.pages():
        page = path.read_text(encoding="utf-8")
        assert page == figures.write_figures(page), f"python docs/_site/figures.py writes {path} anew"
        if path.parent == figures.STUDIES:
            assert figures.find_figures(page) == [], path
