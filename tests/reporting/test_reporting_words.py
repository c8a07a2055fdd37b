"""What a view must say of a run, and what it must not: a row each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit import run_events as runs
from kit import task_events as tasks
from kit.event_dicts import collect_notices, fold, ledger, project

from ensemble.reporting import status_head, status_notes
from ensemble.reporting.progress import head_line
from ensemble.reporting.sections.cost import summarize
from ensemble.reporting.sections.training import describe_plan
from ensemble.reporting.status import status_gpus
from ensemble.reporting.summary import summary
from ensemble.reporting.text import joules
from ensemble.schedule.needs import Node

Event, Words = dict[str, Any], tuple[str, ...]

RUN, BEGUN, SEARCH, FRESH = runs.list_run(), runs.list_run(until=9.0), runs.search_run(), runs.just_started()
MEASURED, LABELS, POINTS = runs.measured(RUN), tasks.task_run("multilabel"), tasks.task_run("regression")
LEDGER, END_T = ledger(MEASURED), RUN[-1]["t"]


def change(kind: str, events: list[Event] = RUN, **fields: Any) -> list[Event]:
    return [event | fields if event["type"] == kind else event for event in events]


def add(kind: str, *more: Event, events: list[Event] = RUN, **fields: Any) -> list[Event]:
    return [*events, *({"v": 2, "t": events[-1]["t"], **event} for event in ({"type": kind, **fields}, *more))]


def alone(kind: str, **fields: Any) -> list[Event]:
    return [{"v": 2, "t": 9.0, "type": kind, **fields}]


def split_energy(events: list[Event] = MEASURED, **part: Any) -> list[Event]:
    return [e | {"parts": [old | part for old in e["parts"]]} if e["type"] == "power" else e for e in events]


def summarize_run(events: list[Event]) -> list[str]:
    lines = summary(project(events), Path("runs/a digit"), everything=True, width=300)
    return [" ".join(line.split()) for line, _ in lines]


def summarize_energy(events: list[Event]) -> list[str]:
    labels, lines = zip(*summarize(fold(events), ledger(events)), strict=True)
    return list(lines[labels.index("energy") :][:2])


VIEWS: dict[str, Callable[[list[Event]], list[str]]] = {
    "summary": summarize_run, "energy": summarize_energy, "status": lambda events: status_notes(project(events)),
    "head": lambda events: [status_head(project(events))], "nodes": lambda events: status_gpus(fold(events)),
    "progress": lambda events: [head_line(fold(events), None)], "plan": lambda events: describe_plan(fold(events)),
    "notices": lambda events: [notice.text for notice in collect_notices(events)],
}  # fmt: skip


def says(what: str, view: str, events: list[Event], words: Words, never: Words = ()) -> Any:
    """A row: what a view must say of a run, and what it must never."""
    return pytest.param(view, events, words, never, id=f"{view}: {what}")


PLAN = {"v": 2, "t": 2.0, "type": "planned"}
NO_FIGURES = {"metrics": None, "reason": "no class"}
FULL = {"node": "full", "detail": "No space left on device", "retry_s": 60.0}
NEW = [{"v": 2, "t": END_T, "type": "member", "member": f"new-{n}", "number": 90 + n} for n in range(2)]
MEASURING = add("measuring", events=[*RUN, *NEW], members=["new-0", "new-1"])
PROFILE = {"shape": "s", "device": "cpu", "step_s": {"1": 0.0125}, "samples_per_s": {"1": 5120.0}}
PROFILE |= {"cpus": {"1": 0.9}, "memory_gb": 0.25, "members": ["new-0"]}
HALF = add("profile", events=MEASURING, **PROFILE)
WHY = "its recipe is a train function alone"
NOT_COMBINED = [event for event in RUN if event["type"] in ("run_started", "run_finished", "member")]
WELL = [e for e in RUN if e.get("member") != "member-6" or e["type"] != "failed"]
WELL += [e | {"member": "member-6"} for e in WELL if e["type"] == "finished"][:1]
LONG = "ValueError: " + "it says much " * 20  # said in full where the member fails
ROWS = [
    says("a run that just started", "summary", FRESH, ("no samples are prepared yet",), ("combined", "next")),
    says("no power source", "summary", SEARCH, ("unavailable", "member-23"), ("0 J", "more")),
    says("records", "summary", RUN, ("4 could not be prepared",), ("skipped", "0 within noise")),
    says("not combined", "summary", change("combined", **NO_FIGURES, members=[], weights={}),
         ("combined none: no class",), ("best member",)),
    says("stopped", "summary", add("run_stopped", reason="disk full", events=BEGUN),
         ("stopped disk full\n", "next `ensemble resume 'runs/a digit'` goes on\n")),
    says("calibrated", "summary", change("combined", intervals={"best": {"ece": [0.0, 0.0]}}),
         ("0 within noise",), ("0.0000 … 0.0000",)),
    says("a cause", "summary", RUN, ("failed member-6: failed (nan): loss is nan at epoch 5, step 12",
         "log `ensemble logs 'runs/a digit'"), ("(lost)",)),
    says("a model", "summary", RUN, ('model `ensemble.load("runs/a digit")` in Python\n`ensemble export ',
         "next `ensemble resume 'runs/a digit'` tries failed members again\n")),
    says("all went well", "summary", WELL,
         ("`ensemble resume 'runs/a digit' --epochs N` continues", "to N epochs in all"), ("failed members",)),
    says("no model", "summary", change("combined", unloadable=WHY), (f"cannot be loaded as one model: {WHY}",),
         ("ensemble export",)),
    says("no members trained", "summary", NOT_COMBINED, ("sharing no samples were prepared",),
         ("model ", "ensemble resume")),
    says("joules", "status", MEASURED,
         (f"energy: {joules(LEDGER.run.energy_j)} attributed, of {joules(LEDGER.total.energy_j)} ",
          "(source: RAPL package-0)\n")),
    says("joules may come yet", "status", FRESH, (), ("energy",)),
    says("joules never came", "status", [event for event in RUN if event["type"] != "power"],
         ("energy: unavailable: no node has a power source that could be read\n",)),
    says("a combined model", "status", LABELS, ("combined: F1, macro ↑ 0.", "within noise", "on the test split",
         "uncertainty: total 0.4000, aleatoric 0.2500, epistemic 0.1500 nats",
         "conformal, intervals of one width (absolute residual): level 0.9000, coverage 0.8940"), ("too few",)),
    says("none combined", "status", change("combined", LABELS, **NO_FIGURES, members=[]),
         ("combined: none: no class",)),
    says("combined, not measured", "status", change("combined", LABELS, **NO_FIGURES, members=["member-0"]),
         ("combined: by average: no class",)),
    says("sets of everything", "status", change("combined", POINTS,
         conformal={"absolute": {"level": 0.9, "threshold": None, "coverage": 1.0}}),
         ("coverage 1.0000, too few samples to calibrate on: everything is predicted",)),
    says("running", "head", BEGUN, ("digits · running · executor local · 0:08 · objective accuracy, max\n",)),
    says("ended", "head", RUN, ("digits · finished, with failures ·",)),
    says("a full node", "nodes", add("node_unusable", events=BEGUN, **FULL),
         ("full: nothing can be started there: No space left on device; it is tried again after 60 s\n",)),
    says("a node that is usable again", "nodes", add("node_unusable", {"type": "node",
         **Node("full", 4.0, (), 8.0, "full").as_event()}, events=BEGUN, **FULL), (), ("full:",)),
    says("split", "energy", MEASURED, (
         f"{joules(LEDGER.run.energy_j)} attributed, of {joules(LEDGER.total.energy_j)} measured for all nodes, ",
         f"\nidle {joules(LEDGER.run.idle_j)} by reservation, "
         f"dynamic {joules(LEDGER.run.energy_j - LEDGER.run.idle_j)} by CPU time\n")),
    says("idle energy not known", "energy", split_energy(idle_j=None),
         ("idle and dynamic energy together, split by CPU time\n",)),
    says("no idle energy", "energy", split_energy(idle_j=0.0), ("\nsplit by CPU time\n",), ("idle",)),
    says("an estimate", "energy", RUN, (
         f"{joules(ledger(RUN).run.energy_j)} estimated (source: 12 W per busy core)\n",
         "split by CPU time; the estimate does not include idle power\n")),
    says("shared cores", "plan", [*RUN, PLAN | {"concurrent": ["member-0", "member-1"], "pace_s": 12.0}],
         ("2 members share the cores and one stream: an epoch takes all of them 12 s",)),
    says("flotillas", "plan", [*RUN, PLAN | {"flotillas": [{"members": ["member-0"]}] * 3, "makespan_s": 60.0,
         "lower_bound_s": 48.0}], ("3 flotillas, all done in 1 min 00 s; nothing could be faster than 48 s",)),
    *(says(f"remedy {what}", "notices", add("remedy", members=["member-0"], what=what, cohort=3, workers=4),
           ("member-0: ", words))
      for what, words in (("alone", "its own batches"), ("move", "stream group 3"), ("apart", "stream group 3"),
                          ("widen", "4 workers"))),
    says("measuring", "progress", MEASURING, ("2 measuring",)),
    says("half measured", "progress", HALF, ("1 measuring",)),
    says("measured", "progress", add("unmeasured", members=["new-1"], error="it died", events=HALF), (),
         ("measuring",)),
    says("not measured, at length", "notices", alone("unmeasured", members=["new-1"], error=LONG),
         ("it says much ...\n",), (LONG[:140],)),
    says("attempts", "notices", RUN, (
         "member-3, attempt 1: failed (lost): killed by signal 9 (SIGKILL); it will be tried again\n",
         "member-3, attempt 2: goes on at epoch 4, step 0\n")),
    says("skipped", "notices", alone("epoch", member="member-1", epoch=1, skipped_steps=1, private_skipped=2),
         ("member-1, epoch 2: 1 step skipped because gradients were not finite\n"
          "member-1, epoch 2: 2 records could not be prepared\n",)),
]  # fmt: skip


@pytest.mark.parametrize(("view", "events", "words", "never"), ROWS)
def test_a_view_says_what_it_must(view: str, events: list[Event], words: Words, never: Words) -> None:
    text = "".join(f"{line}\n" for line in VIEWS[view](events))
    assert [word for word in words if word not in text] == [] == [word for word in never if word in text], text


def test_skipped_records_are_told_once_for_each_cohort() -> None:
    assert sum("2 records could not be prepared" in line for line in VIEWS["notices"](RUN)) == 2
