"""`python -m benchmarks all`: runs every study, keeps what each measured, and makes one page of all.

In the directory are then `index.html`, which needs no network; for each study NAME.json, a `Record`: the
command, the machine, the seconds and the rows; and photographs, where no data were given. The figures in
docs/studies are made of such records.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import metadata
from pathlib import Path

from benchmarks import batches, buys, compression, energy, many, precision, scaling, schedule
from benchmarks.options import check_names
from ensemble.bench.launch.ranks import RanksError
from ensemble.bench.results import Outcome, Report, Rows, Study, outcome_of
from ensemble.cli import parser as cli
from ensemble.cli.arguments import directory, option, words
from ensemble.cli.bench import STUDIES as INSTALLED
from ensemble.cli.bench import add_studies

#: Those that answer questions of papers, and all, by name.
PAPERS = (
    precision.STUDY,
    compression.STUDY,
    scaling.STUDY,
    batches.STUDY,
    schedule.STUDY,
    energy.ATTRIBUTION,
    energy.SHAPLEY,
    energy.SC18,
    buys.STUDY,
    many.STUDY,
)
STUDIES = {study.name: study for study in (*INSTALLED, *PAPERS)}
#: Of each study the arguments of its usual run and of a quick one. {data} is `--data DIR`, or nothing.
ARGUMENTS = {
    "pipelines": (
        "--data {photos}",
        "--data {photos} --hosts 2 --members 4 --designs independent,all --step emulated,model "
        "--samples 200 --samples-alone 200 --repeats 1",
    ),
    "precision": (
        "{data}",
        "{data} --models lstm-small,cnn-small --train cnn-small --batch-size 16 --steps 3 --seeds 2 --epochs 2 "
        "--samples 250 --held-out 250",
    ),
    "scaling": (
        "{data}",
        "{data} --model lstm-small --workers 1,2 --step-ms 50 --steps 3 --exchange-models resnet --width 4 "
        "--exchange-workers 2",
    ),
    "batches": (
        "{data}",
        "{data} --batches 32,256 --rates 0.1 --lars-rates 1 --epochs 2 --samples 500 --held-out 250 --seeds 2 "
        "--law-models plasma --law-workers 1,8 --law-seeds 2 --law-epochs 1 --law-samples 256 --width 4",
    ),
    "compression": (
        "{data}",
        "{data} --nets resnet50 --primitives ring,gloo --step-schemes fp16,qsgd4 --workers 2 --links 10gbit "
        "--check 0 --hosts 2 --rates 200mbit --sizes 1MiB --models none --train cnn-small "
        "--train-schemes qsgd4,onebit+ef --time-links 100mbit --seeds 2 --samples 250 --held-out 250 --epochs 2",
    ),
    "fabric": (
        "",
        "--emulate hosts=2,ranks=2,rate=1gbit --sizes 4KiB,1MiB --collectives all_reduce "
        "--backends gloo,hierarchical --parts collectives,training --nets resnet50 --iterations 5",
    ),
    "schedule": ("", "--parts simulated --devices 20 --seeds 2 --prep-ms 0,100 --large 0"),
    "energy": ("--data {photos}", "--data {photos} --parts sharing --members 4 --samples 250 --repeats 1"),
    "attribution": ("", "--repeats 1"),
    "shapley": ("", "--repeats 1"),
    "sc18": ("--data {photos}", "--data {photos} --step-ms 20,120 --samples 400 --repeats 1"),
    "many": ("", "--members 20"),
    "what_it_buys": ("{data} --large-seeds 3", "--tasks wine --methods optuna,random --seeds 2 --scale 50"),
}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1300px;margin:2em auto;padding:0 1em;color:#1c2733}
table{border-collapse:collapse;font-size:13px;margin:.5em 0 1.5em}
td,th{padding:3px 9px;border-bottom:1px solid #d8dee5;text-align:left;vertical-align:top}
.number{text-align:right} .wide{overflow-x:auto} .soft{color:#5b6875} .bad{color:#b3261e} code{font-size:13px}
"""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one command measured.

    Attributes:
        command: as it is typed.  machine: on which it ran.
        seconds: that it took.
        rows: see `Outcome`.
    """

    command: str
    machine: str
    seconds: float
    rows: Rows

    def write(self, path: Path) -> None:
        """Write it as JSON, one row a line."""
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n]}}\n', encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A study that was run.

    Attributes:
        outcome: what it found; None where it failed.
        failure: the reason then.
    """

    study: Study
    record: Record
    outcome: Outcome | None = None
    failure: str = ""

    @property
    def claims(self) -> Rows:
        """Its rows of `Claim`."""
        return [row for row in self.record.rows if row.get("part") == "claim"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    parser.add_argument("--out", required=True, metavar="DIR", help="where the page and the records are written")
    option(parser, "--quick", False, "a small run of each: five minutes on two cores", action="store_true")
    shown = "holds cifar10/, imdb/ and photos/photos.tar (default: data that ship with dependencies)"
    option(parser, "--data", None, shown, type=directory, metavar="DIR")
    option(parser, "--studies", ",".join(STUDIES), "which", type=words)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """Run the studies; one that fails is named on the page, and the others go on.

    Raises:
        SpecError: there is no such study.
        RanksError: a study failed; the page has been written.
    """
    check_names("--studies", options.studies, STUDIES)
    folder, ended = Path(options.out), list[Finished]()
    folder.mkdir(parents=True, exist_ok=True)
    data = _name_data(options.data, folder)
    for name in dict.fromkeys(options.studies):
        arguments = ARGUMENTS[name][options.quick].format_map(data)
        ended.append(measure(STUDIES[name], shlex.split(arguments), report))
        if ended[-1].outcome is not None:
            ended[-1].record.write(folder / f"{name}.json")
        (folder / "index.html").write_text(write_page(ended), encoding="utf-8")
    report(f"page: {folder / 'index.html'}")
    if failed := [each.study.name for each in ended if each.outcome is None]:
        raise RanksError(f"these studies failed, and {folder / 'index.html'} says why: {', '.join(failed)}")
    return outcome_of([each.record for each in ended], columns="command seconds")


def _name_data(given: str | None, folder: Path) -> dict[str, str]:
    """What stands for {data} and {photos}; photographs are made in a folder where no data are given."""
    if given is not None:
        return {"data": f"--data {shlex.quote(given)}", "photos": shlex.quote(f"{given}/photos/photos.tar")}
    from ensemble.bench.energy.sharing import write_photographs

    made = folder / "photos.tar"
    write_photographs(made)
    return {"data": "", "photos": shlex.quote(str(made))}


def measure(study: Study, arguments: Sequence[str], report: Report) -> Finished:
    """Run a study with these arguments, and time it."""
    parser = cli.Parser(prog=study.name)
    add_studies(parser, [study])
    program = ("ensemble", "bench") if study in INSTALLED else ("python", "-m", "benchmarks")
    command = shlex.join([*program, study.name, *arguments])
    report(f"== {command}")
    start, outcome, failure = time.monotonic(), None, ""
    try:
        outcome = study.run(parser.parse_args([study.name, *arguments]), report)
    except (Exception, SystemExit) as error:  # the parser's of a wrong option is of the second kind
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
        report(f"== {study.name} failed: {failure}")
    record = Record(
        command=command,
        machine=describe_machine(),
        seconds=round(time.monotonic() - start, 1),
        rows=[] if outcome is None else json.loads(json.dumps(outcome.rows)),
    )
    return Finished(study=study, record=record, outcome=outcome, failure=failure)


def describe_machine() -> str:
    """The cores that this process may use, the processor, and torch's version."""
    from pipelines.environment.processor import find_processor

    cores = f"{len(os.sched_getaffinity(0))} cores of {find_processor()}"
    return f"{cores}, {platform.system()}, torch {metadata.version('torch')}"


STUDY = Study(
    name="all",
    summary="every study, and one page of all",
    description="Every study, one after the other, and one page of all: claims of papers, tables, figures.",
    add_options=add_options,
    run=run,
)


# --- the page ------------------------------------------------------------------------------------------------


def write_page(ended: Sequence[Finished]) -> str:
    """The page of these studies: all claims first, then of each study its claims, tables, findings and figures."""
    claims = [{"study": each.study.name, **_shown(claim)} for each in ended for claim in each.claims]
    parts = ["<h1>What papers claim, and what was measured</h1>", _tabulate(claims)]
    minutes = sum(each.record.seconds for each in ended) / 60
    parts += [f'<p class="soft">{escape(describe_machine())}; {minutes:.1f} minutes in all</p>']
    links = (f'<a href="#{each.study.name}">{escape(each.study.name)}</a>' for each in ended)
    parts += [f"<p>{' · '.join(links)}</p>"]
    has_script = False
    for each in ended:
        parts += [f'<h2 id="{each.study.name}">{escape(each.study.name)}: {escape(each.study.summary)}</h2>']
        parts += [f"<p><code>{escape(each.record.command)}</code>, {each.record.seconds:.0f} s</p>"]
        if each.outcome is None:
            parts += [f'<p class="bad">It failed: {escape(each.failure)}</p>']
            continue
        for title, rows in each.outcome.tables:
            if rows:
                parts += [f"<h3>{escape(title)}</h3>" if title else "", _tabulate(rows)]
        parts += [f"<p>{escape(line)}</p>" for line in each.outcome.findings]
        if each.outcome.panels:
            parts += [_draw(each.outcome, with_script=not has_script)]
            has_script = True
    head = f'<!doctype html><meta charset="utf-8"><title>Studies</title><style>{_STYLE}</style>'
    return "\n".join([head, *parts, ""])


def _shown(claim: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in claim.items() if name != "part"}


def _tabulate(rows: Rows) -> str:
    from ensemble.cli.console import format_cell

    def cell(value: object) -> str:
        kind = ' class="number"' if isinstance(value, (int, float)) else ""
        return f"<td{kind}>{escape(format_cell(value))}</td>"

    if not rows:
        return ""
    head = "".join(f"<th>{escape(str(name))}</th>" for name in rows[0])
    lines = ("".join(map(cell, row.values())) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _draw(outcome: Outcome, *, with_script: bool) -> str:
    from ensemble.bench import charts

    if not charts.is_plotly_installed():
        return "<p>No figures: they need plotly; pip install 'ray-ensemble[bench]'</p>"
    drawn = charts.figure(outcome.title, outcome.notes, outcome.panels)
    return str(drawn.to_html(full_html=False, include_plotlyjs=with_script))
