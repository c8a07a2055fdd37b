"""`python -m benchmarks all`: one page of every study."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import everything
from benchmarks.everything import STUDIES
from ensemble.bench.launch.ranks import RanksError
from ensemble.bench.results import Claim, Outcome, Report, Study, outcome_of, show_claims
from ensemble.cli.parser import Parser


def make_study(name: str, monkeypatch: pytest.MonkeyPatch, found: Outcome | Exception) -> None:
    def run(options: Namespace, report: Report) -> Outcome:
        if isinstance(found, Exception):
            raise found
        return found

    study = Study(name=name, summary="made", description="", add_options=lambda parser: None, run=run)
    monkeypatch.setitem(everything.STUDIES, name, study)
    monkeypatch.setitem(everything.ARGUMENTS, name, ("", ""))


def test_one_study_that_fails_is_named_and_the_others_are_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Claim(paper="P 2018", claim="a < b", published="2 x", measured="3 x", ratio=1.5)
    make_study("bad", monkeypatch, ValueError("no <net>"))
    make_study("good", monkeypatch, show_claims([claim]) + outcome_of([claim], "A table"))
    options = Namespace(out=str(tmp_path / "out"), quick=True, data=None, studies=["bad", "good"])
    lines: list[str] = []
    with pytest.raises(RanksError, match=r"says why: bad$"):
        everything.run(options, lines.append)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "ValueError: no &lt;net&gt;" in page and page.count("a &lt; b") == 3
    assert "<code>python -m benchmarks good</code>" in page
    record = json.loads((tmp_path / "out" / "good.json").read_text())
    assert record["command"] == "python -m benchmarks good"
    assert [row.get("part") for row in record["rows"]] == ["claim", None]
    assert not (tmp_path / "out" / "bad.json").exists()


def test_every_study_understands_its_arguments() -> None:
    assert set(everything.ARGUMENTS) == set(STUDIES)
    for name, study in STUDIES.items():
        parser = Parser()
        study.add_options(parser)
        for arguments in everything.ARGUMENTS[name]:
            parser.parse_args(shlex.split(arguments.format(data="", photos="photos.tar")))


ALL = ",".join(STUDIES)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param("schedule,attribution,shapley", marks=pytest.mark.more, id="cheap ones"),
        pytest.param(ALL, marks=pytest.mark.slow, id="all"),  # minutes of processor time
    ],
)
def test_a_quick_run_makes_one_page_with_the_claims_of_each_paper(tmp_path: Path, names: str) -> None:
    command = [sys.executable, "-m", "benchmarks", "all", "--quick", "--studies", names, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    page = (tmp_path / "index.html").read_text()
    assert "https://" not in page.partition("<script")[0]
    papers = set()
    for name in names.split(","):
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert record["rows"] and f'id="{name}"' in page, name
        papers |= {row["paper"] for row in record["rows"] if row.get("part") == "claim"}
    assert len(papers) >= (5 if names == ALL else 1), papers
