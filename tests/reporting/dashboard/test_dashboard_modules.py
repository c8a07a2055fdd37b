"""The parts of the live page that do not draw: documents and changes, filter, formats, addresses, scales, trials.

A test imports a module of the page in Node and calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from documents import COLUMNS, HOSTILE, START, make_change, make_documents, make_notice
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from ensemble.reporting import text

Call = Callable[..., Any]


def make_store(code: str) -> str:
    """Code that loads a store from documents, does something and returns something."""
    return f"(m, docs, ...rest) => {{ const s = new m.Store(); s.load(docs.state); {code} }}"


# -- formats ---------------------------------------------------------------------------------------

FORMATS = {
    "duration": text.duration,
    "number": text.number,
    "score": text.score,
    "cpu": text.cpu,
    "joules": text.joules,
    "watts": text.watts,
}
NUMBERS = st.one_of(
    st.floats(min_value=1e-6, max_value=1e13),
    st.integers(0, 10**12),
    st.sampled_from([0.0, 9.949, 9.95, 59.4, 59.6, 99.96, 999.4, 3599.4, 86399.0, 1e-7, 123456.0]),
)


@examples(20)
@given(values=st.lists(NUMBERS, min_size=20, max_size=20))
def test_numbers_read_as_in_the_report(call: Call, values: list[float]) -> None:
    every = "(m, names, values) => names.map((name) => values.map((each) => m[name](each)))"
    for name, shown in zip(FORMATS, call("format.js", every, [*FORMATS], values), strict=True):
        for value, found in zip(values, shown, strict=True):
            assert found == FORMATS[name](value) or _is_tie(found, FORMATS[name](value)), (name, value)


def _is_tie(found: str, wanted: str) -> bool:
    """Whether the last digit alone differs, by one: Python rounds a half to even, JavaScript up."""
    digits = [re.sub(r"[^0-9.e+-]|-(?![0-9])", "", shown) for shown in (found, wanted)]
    if re.sub(r"[0-9.,]", "", found) != re.sub(r"[0-9.,]", "", wanted) or not all(digits):
        return False
    a, b = map(Decimal, digits)
    last = min(int(each.as_tuple().exponent) for each in (a, b))
    return abs(a - b) <= Decimal(10) ** last


def test_what_is_absent_is_a_dash_and_never_a_zero(call: Call) -> None:
    names = [*FORMATS, "memory", "share", "clock", "moment", "value"]
    assert call("format.js", "(m, names) => names.map((name) => m[name](null))", names) == ["–"] * len(names)


def test_counts_clocks_and_shares(call: Call) -> None:
    shown = call(
        "format.js",
        """(m) => [m.count(1, "member"), m.count(10000, "member"), m.clock(3723), m.clock(7),
             m.share(0.68), m.share(0.004),
             m.watts(690), m.watts(23400), m.joules(201234, "measured"),
             m.hyperparameters({ lr: 0.1, width: 32, name: "a\\u202eb" })]""",
    )
    assert shown == [
        *("1 member", "10,000 members", "1:02:03", "0:07", "68 %", "0.4 %"),
        *("690 W", "23.4 kW", "201 kJ (measured)"),
        "lr 0.1, width 32, name a\\u202eb",
    ]


# -- filter ----------------------------------------------------------------------------------------

MEMBER = {
    "id": "member-12",
    "state": "failed",
    "place": "node-0, GPU 1",
    "options": "bf16",
    "metric": 0.91,
    "epoch": 3,
    "left_s": None,
    "params": {"lr": 0.01, "width": 64, "name": "two words", "deep": True},
    "metrics": {"accuracy": 0.91, "loss": 0.2},
}


PASSES = (
    "", "member-1", "MEMBER", "gpu", "-nothing", "lr<0.1", "lr<=0.01", "lr>=1e-2", "lr=0.01", "lr=1e-2",
    "width=64 accuracy>0.9", "state:failed", "state:fail", "state:running,failed", 'name="two words"',
    '"two words"', "name:two", "deep=true", "-",
)  # fmt: skip
REFUSES = (
    "nothing", "-member", "lr<0.01", "lr!=0.01", "-lr<0.1", "width=64 accuracy>0.95", "state:running",
    "state!=failed", '"two  words"', "left_s<10", "left_s>10", "lr<", "lr<abc", "unknown=3", "constructor:x",
)  # fmt: skip


def test_the_filter(call: Call) -> None:
    every = "(m, texts, member) => texts.filter((text) => m.matcher(text)(member))"
    assert call("filter.js", every, [*PASSES, *REFUSES], MEMBER) == [*PASSES]


def test_an_unknown_name_in_a_filter_is_said(call: Call) -> None:
    code = "(m, text, member) => m.filterProblem(text, [member])"
    assert call("filter.js", code, "lr<0.1 state:failed loss>0", MEMBER) is None
    assert call("filter.js", code, "lrr<0.1", MEMBER) == "No column, hyperparameter or metric is called lrr."


@examples(40)
@given(written=st.text(alphabet='ab <>=!:"-,0.e~%', max_size=30))
def test_no_text_breaks_the_filter(call: Call, written: str) -> None:
    assert call("filter.js", "(m, text, member) => m.matcher(text)(member)", written, MEMBER) in (True, False)


# -- addresses -------------------------------------------------------------------------------------


@examples(20)
@given(
    select=st.lists(st.sampled_from([*HOSTILE, "a", "%", "%2C", ","]), max_size=4),
    written=st.text(st.characters(codec="utf-8"), max_size=20),
    member=st.sampled_from([None, *HOSTILE]),
    settings=st.dictionaries(
        st.sampled_from([*HOSTILE, "axis"]), st.one_of(st.booleans(), st.sampled_from([*HOSTILE, "1", "[]"]))
    ),
)
def test_an_address_says_what_was_put_into_it(
    call: Call, select: list[str], written: str, member: str | None, settings: dict[str, Any]
) -> None:
    route = {"view": "curves", "run": None, "member": member, "select": select, "filter": written}
    code = """(m, route, settings) => {
        const set = m.changeSettings(new Map([["axis", "old"]]), { axis: null, ...settings });
        const found = m.parseRoute(m.formatRoute({ ...route, set }));
        const defaults = Object.fromEntries(Object.keys(settings).map((name) => [name, null]));
        const fits = Object.fromEntries(Object.keys(settings).map((name) => [name, () => true]));
        return [{ ...found, set: null }, m.readSettings(found.set, defaults, fits), [...found.set.keys()]];
    }"""
    settings.pop("__proto__", None)
    found, read, names = call("route.js", code, route, settings)
    assert found == route | {"set": None} and read == settings and sorted(names) == sorted(settings)


def test_settings_of_an_address_that_somebody_wrote_are_the_defaults(call: Call) -> None:
    defaults = {"log": False, "axis": "epoch", "zoom": None, "k": 3}
    code = """(m, hash, defaults) => m.readSettings(m.parseRoute(hash).set, defaults, {
        axis: (given) => ["epoch", "run"].includes(given), zoom: Array.isArray })"""
    for query in ("log=1&axis=constructor&zoom={&k=x", "log=%00&axis[]=&zoom=9&k=", "__proto__=1&toString=2", ""):
        assert call("route.js", code, f"#curves?{query}", defaults) == defaults
    found = call("route.js", code, "#curves?log=true&axis=run&zoom=[1,2]&k=4", defaults)
    assert found == {"log": True, "axis": "run", "zoom": [1, 2], "k": 4}


def test_an_address_that_somebody_wrote(call: Call) -> None:
    found = call("route.js", "(m, hash) => m.parseRoute(hash)", "#curves?select=a,b&filter=lr%3C0.1")
    assert found.pop("set") == {} and found == {
        "view": "curves",
        "run": None,
        "member": None,
        "select": ["a", "b"],
        "filter": "lr<0.1",
    }
    assert call("route.js", "(m) => m.parseRoute('')")["view"] == ""
    assert call("route.js", "(m) => m.parseRoute('#x?filter=100%')")["filter"] == "100%"


# -- fields of a form ------------------------------------------------------------------------------


def test_a_changed_value_is_json_or_text(call: Call) -> None:
    written = {("0.1", 0.2): 0.1, ("1e-3", 0.2): 0.001, ("true", False): True, ("adam", "sgd"): "adam"}
    written |= {("0.1", "sgd"): "0.1", ("adam", 3): "adam", ("null", 3): None}
    for (said, before), value in written.items():
        assert call("actions.js", "(m, said, before) => m.parseValue(said, before)", said, before) == value
    assert call("actions.js", "(m) => m.parseValue('[1, 2]', [1])") == [1, 2]


def test_a_member_is_offered_what_can_be_done_with_it(call: Call) -> None:
    code = """(m, actions, live, states) => states.map((state) =>
        m.verbsFor({ source: { live }, store: { run: { actions } } }, { state }))"""
    all_of_them = ["stop", "pause", "resume", "cancel", "add"]
    states = ["running", "waiting", "paused", "failed"]
    active, paused = ["pause", "cancel", "add"], ["resume", "cancel", "add"]
    assert call("actions.js", code, all_of_them, True, states) == [active, active, paused, ["add"]]
    assert call("actions.js", code, [], True, states) == [[]] * 4, "the run has ended"
    assert call("actions.js", code, all_of_them, False, states) == [[]] * 4, "a report"


# -- documents and changes -------------------------------------------------------------------------


def test_members_are_read_by_column_and_in_order(call: Call) -> None:
    documents = make_documents(12)
    first = call("store.js", make_store("return [s.order, s.members.get('member-3')];"), documents)
    assert first[0] == [f"member-{i}" for i in range(12)]
    row = documents["state"]["members"]["rows"]["member-3"]
    assert first[1] == dict(zip(COLUMNS, row, strict=True))


def test_a_change_replaces_rows_and_says_what_changed(call: Call) -> None:
    documents = make_documents(12)
    change = make_change(documents["state"], 1, touched=2)
    code = make_store("""
        const seen = []; s.subscribe((changed) => seen.push([...changed].sort()));
        s.apply(rest[0]);
        const states = Object.keys(rest[0].members).map((id) => [id, s.members.get(id).state]);
        return [seen, s.offset, Object.fromEntries(states)];""")
    seen, offset, states = call("store.js", code, documents, change)
    assert seen == [["members", "run"]]
    assert offset == change["offset"]
    assert states == dict.fromkeys(change["members"], "running")


def test_a_change_applied_twice_is_as_one_applied_once(call: Call) -> None:
    documents = make_documents(12)
    changes = [make_change(documents["state"], step, touched=4) for step in range(1, 6)]
    for change in changes:
        change["notices"] = [make_notice(change["offset"], "info", "something")]
    code = make_store("""
        s.loadDocument("curves", docs.curves);
        for (const change of rest[0]) for (let i = 0; i < rest[1]; i += 1) s.apply(change);
        return [[...s.members], s.curves.members, s.notices];""")
    once = call("store.js", code, documents, changes, 1)
    assert call("store.js", code, documents, changes, 2) == once
    assert len(once[2]) == len(documents["state"]["notices"]) + 5


def test_epochs_replace_what_came_from_that_epoch_on(call: Call) -> None:
    documents = make_documents(2)
    documents["curves"]["members"] = {
        "member-0": {"epoch": [0, 1, 2, 3], "t": [1, 2, 3, 4], "values": {"accuracy": [0.1, 0.2, 0.3, 0.4]}}
    }
    change = {"offset": documents["state"]["offset"] + 1, "now": START, "epochs": []}
    change["epochs"] = [
        ["member-0", 2, 9.0, None],
        ["member-0", 2, 10.0, {"accuracy": 0.5, "loss": 1.0}],
        ["member-1", 0, 11.0, {"loss": 2.0}],
        ["__proto__", 0, 11.0, {"constructor": 2.0}],
    ]
    code = make_store("""s.loadDocument("curves", docs.curves); s.apply(rest[0]);
        return JSON.stringify(["member-0", "member-1", "__proto__"].map((id) => s.curves.members[id]));""")
    cut, new, odd = json.loads(call("store.js", code, documents, change))
    assert cut == {
        "epoch": [0, 1, 2],
        "t": [1, 2, 10.0],
        "values": {"accuracy": [0.1, 0.2, 0.5], "loss": [None, None, 1.0]},
    }
    assert new == {"epoch": [0], "t": [11.0], "values": {"loss": [2.0]}}
    assert odd["values"] == {"constructor": [2.0]}


def test_epochs_that_arrive_while_the_curves_are_fetched_are_not_lost(call: Call) -> None:
    documents = make_documents(2)
    documents["curves"] |= {"offset": 1000, "members": {"member-0": {"epoch": [0, 1], "t": [1, 2], "values": {}}}}
    early = {"offset": 900, "now": START, "epochs": [["member-0", 0, 1.0, {}]]}  # in the document already
    late = {"offset": 1100, "now": START, "epochs": [["member-0", 2, 3.0, {}]]}
    code = make_store("""s.expectCurves(); s.apply(rest[0]); s.apply(rest[1]);
        s.loadDocument("curves", docs.curves);
        return s.curves.members["member-0"].epoch;""")
    assert call("store.js", code, documents, early, late) == [0, 1, 2]


def test_nothing_that_grows_grows_without_end(call: Call) -> None:
    """A quarter of an hour of changes, five a second, as one member that trains on."""
    code = make_store("""
        s.loadDocument("curves", docs.curves);
        const begin = docs.state.now;
        for (let i = 0; i < 4500; i += 1) {
          const now = begin + i / 5;
          s.apply({ offset: docs.state.offset + i, now,
            epochs: [["member-0", 100 + i, now, { accuracy: i / 4500 }]],
            notices: [{ key: `${i}`, at_s: i, level: "info", text: `${i}`, who: "", count: 1 }],
            answers: [{ request: `${i}`, verb: "pause", member: null, done: true, message: "" }] });
        }
        const curve = s.curves.members["member-0"];
        const { length } = curve.epoch;
        return [length, curve.values.accuracy.length, curve.epoch.at(-1), s.notices.length, s.answers.length];""")
    epochs, values, last, notices, answers = call("store.js", code, make_documents(2))
    assert epochs == values <= 2000
    assert last == 4599
    assert notices <= 2000
    assert answers <= 100


# -- selection and colours -------------------------------------------------------------------------


def test_few_members_keep_their_own_colours(call: Call) -> None:
    code = make_store("""
        const before = s.order.map((id) => s.colour(id)); s.select(["member-3"]);
        return [before, s.order.map((id) => s.colour(id)), s.order.filter((id) => s.isPale(id)).length];""")
    before, after, pale = call("store.js", code, make_documents(10))
    assert len(set(before)) == 10
    assert after == before
    assert pale == 9


def test_of_many_the_selected_have_colours_that_they_keep(call: Call) -> None:
    code = make_store("""
        const none = new Set(s.order.map((id) => s.colour(id)));
        s.select(["member-5", "member-7"]); const first = s.colour("member-7");
        s.toggle("member-5"); s.toggle("member-20");
        const [kept, freed, gone] = ["member-7", "member-20", "member-5"].map((id) => s.colour(id));
        return [none.size, first, kept, freed, gone, [...s.selection]];""")
    kinds, first, kept, freed, gone, selection = call("store.js", code, make_documents(40))
    assert kinds == 2, "all alike, but the best"
    assert first == kept != freed
    assert gone not in (kept, freed)
    assert selection == ["member-7", "member-20"]


def test_what_the_filter_leaves_is_selected_at_once(call: Call) -> None:
    code = make_store("""s.setFilter("lr<0.01 -state:failed"); const shown = s.visible(); s.select(shown);
        return [shown, [...s.selection]];""")
    documents = make_documents(1000)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in documents["state"]["members"]["rows"].values()]
    wanted = [row["id"] for row in rows if row["params"]["lr"] < 0.01 and row["state"] != "failed"]
    assert call("store.js", code, documents) == [wanted, wanted]


def test_the_clock_goes_on_and_stands_still_at_the_end(call: Call) -> None:
    code = make_store("""
        const a = s.now(), until = performance.now() + 30;
        while (performance.now() < until);
        return s.now() - a;""")
    assert call("store.js", code, make_documents(2)) > 0.02
    assert call("store.js", code, make_documents(2, ended=True)) == 0


# -- curves ----------------------------------------------------------------------------------------


def test_smoothing_weighs_by_distance_and_quartiles_are_of_those_that_came_so_far(
    call: Call,
) -> None:
    code = """(m) => {
        const make = (k) => (k < 5 ? { xs: [1, 2], ys: [k, 10 * k] } : { xs: [1], ys: [k] });
        return [m.smooth([1, null, 1, 4], [0, 1, 2, 5], 3), m.smooth([1, 2], [0, 1], 0),
            m.band([1, 2, 3, 4, 5].map(make), [1, 2])];
    }"""
    smoothed, plain, rows = call("curve_series.js", code)
    assert smoothed[:3] == [1, None, pytest.approx(1)] and plain == [1, 2]
    # What lies a half-life of 3 back weighs a half, whatever lies between.
    assert smoothed[3] == pytest.approx((4 + 1 * 0.5 + 1 * 0.5 ** (5 / 3)) / (1 + 0.5 + 0.5 ** (5 / 3)))
    assert rows == [[1, 2, 3, 4], [2, 17.5, 25, 32.5]]


def test_a_curve_lies_over_epochs_samples_or_the_time_of_the_run_or_of_the_member(call: Call) -> None:
    code = "(m, curve, origins) => ['epoch', 'samples', 'run', 'own'].map((x) => m.positions(curve, x, origins))"
    curve = {"epoch": [0, 1], "t": [START + 7, START + 9]}
    origins = {"run": START, "own": START + 5, "samples": 1000}
    assert call("curve_series.js", code, curve, origins) == [[1, 2], [1000, 2000], [7, 9], [2, 4]]


# -- attempts and places ---------------------------------------------------------------------------


def with_spans(documents: dict[str, Any], spans: dict[str, list[list[Any]]]) -> dict[str, Any]:
    """The documents, with these attempts alone."""
    documents["state"]["spans"] = {name: spans.get(name, []) for name in documents["state"]["spans"]}
    return documents


def test_attempts_are_rows_by_node_and_cohort_that_do_not_overlap(call: Call) -> None:
    t = START
    spans = {
        "member-0": [[0, "node-0", [], 0, t, t + 1, t + 50, "finished"]],
        "member-1": [
            [0, "node-0", [], 0, t, t + 5, t + 60, "moved"],
            [0, "node-1", [], 1, t + 62, t + 64, None, "running"],
        ],
        "member-2": [
            [0, "node-0", [], 0, t + 55, t + 56, t + 70, "failed"],
            [1, "node-1", [], None, t + 80, None, None, "running"],
        ],
    }
    code = make_store("""
        const known = m.listAttempts(s, s.order);
        const flat = (packed) => m.arrange(m.listAttempts(s, s.order), "cohort", packed, s.nodes).map((group) =>
            [group.node, group.label, group.rows.map((row) => row.attempts.map((each) => each.id))]);
        return [known.map((each) => [each.id, each.outcome, each.again, each.moved]), flat(true), flat(false)];""")
    documents = with_spans(make_documents(3, gpus=0), spans)
    attempts, packed, by_member = call("store.js attempts.js", code, documents)
    assert attempts == [
        ["member-0", "finished", False, False],
        ["member-1", "moved", False, True],
        ["member-1", "running", False, False],
        ["member-2", "failed", False, False],
        ["member-2", "running", True, False],
    ]
    assert packed == [
        ["node-0", "stream group 0", [["member-0", "member-2"], ["member-1"]]],
        ["node-1", "stream group 1", [["member-1"]]],
        ["node-1", "alone", [["member-2"]]],
    ]
    assert by_member[0][2] == [["member-0"], ["member-1"], ["member-2"]]


def test_members_lie_on_cores_and_gpus_by_share_at_any_moment(call: Call) -> None:
    t, gpu = START, "GPU-node-0-0"
    spans = {
        "member-0": [[0, "node-0", [gpu], 0, t, t + 1, t + 50, "finished"]],
        "member-1": [[0, "node-0", [gpu], 0, t + 40, None, t + 60, "finished"]],
        "member-2": [[0, "node-9", [], 0, t + 90, t + 91, None, "running"]],
    }
    documents = with_spans(make_documents(3, gpus=2), spans)
    columns = documents["state"]["members"]["columns"]
    for row in documents["state"]["members"]["rows"].values():
        row[columns.index("shares")], row[columns.index("workers")] = {"cpus": 2.0, "gpus": 0.25}, 1
        row[columns.index("place")] = None
    for node in documents["state"]["nodes"]:
        node["cpus"] = 8.0
    code = make_store("""
        const at = (t) => m.layOut(s, m.holders(s, s.order, t)).map(({ node, cores, gpus }) =>
            [node.name, node.gone, cores.held, cores.pieces.map(({ id }) => id),
             gpus.map(({ held, pieces }) => [held, pieces.length])]);
        const [full] = m.layOut(s, m.holders(s, s.order, rest[0] + 45));
        return [m.busiest(s, s.order) - rest[0], at(rest[0] + 45), at(rest[0] + 95), m.rowsOf(full.cores, 3)];""")
    busiest, then, later, rows = call("store.js places.js", code, documents, t)
    assert 40 < busiest < 50, "when most were at work"
    free = ["node-1", False, 0, [], [[0, 0], [0, 0]]]
    assert then == [["node-0", False, 4, ["member-0", "member-1"], [[0.5, 2], [0, 0]]], free]
    assert later[1:] == [free, ["node-9", True, 2, ["member-2"], []]], "a node that only an attempt names is gone"
    assert [(row["units"], row["free"]) for row in rows] == [(3, 0), (3, 2), (2, 2)]
    pieces = [[(piece["id"], piece["share"], piece["starting"]) for piece in row["pieces"]] for row in rows]
    first, second = ("member-0", "member-1")
    assert pieces == [[(first, 2, False), (second, 1, True)], [(second, 1, True)], []]


# -- figures of models -----------------------------------------------------------------------------


def test_a_figure_is_better_in_its_own_direction(call: Call) -> None:
    figures = make_documents(2)["state"]["run"]["figures"]
    nominal = {"name": "coverage", "label": "coverage", "better": "nominal", "nominal": 0.9, "unit": ""}
    unknown = {"name": "angle", "label": "angle", "better": None, "nominal": None, "unit": ""}
    asked = [[figures["accuracy"], 0.9, 0.8], [figures["nll"], 0.9, 0.8], [nominal, 0.88, 0.95], [unknown, 1, 2]]
    code = "(m, asked) => asked.map(([figure, a, b]) => m.isBetter(figure, a, b))"
    assert call("figures.js", code, asked) == [True, False, True, None]


# -- scales and trials -----------------------------------------------------------------------------


@pytest.fixture
def apply(call: Call) -> Call:
    """Calls a function of a module: `apply("scales", "chooseKind", [1, 2])`."""
    return lambda name, what, *given: call(f"{name}.js", "(m, what, ...given) => m[what](...given)", what, *given)


def trial(number: int, value: float | None, phase: str = "finished", **fields: Any) -> dict[str, Any]:
    base = {"id": f"m{number}", "number": number, "value": value, "phase": phase, "epoch": 4, "further": []}
    return {**base, "params": {}, **fields}


def test_the_scale_suits_the_values(apply: Call) -> None:
    rates = [10 ** (-5 + 0.1 * i) for i in range(41)]
    assert apply("scales", "chooseKind", rates) == "log"
    assert apply("scales", "chooseKind", [0.5 * (i + 1) / 400 for i in range(400)]) == "linear", "even, not by log"
    assert apply("scales", "chooseKind", [-1.0, 0.0, 1000.0]) == "linear"
    assert apply("scales", "chooseKind", [16, 32, 64] * 5) == "category"
    assert apply("scales", "chooseKind", ["a", 1, None]) == "category"
    assert apply("scales", "possibleKinds", rates[:31]) == ["log", "linear"]
    assert apply("scales", "possibleKinds", [0, 1, 2]) == ["linear", "category"]


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"kind": "linear", "values": [0, 10]}, ["0", "2", "4", "6", "8", "10"]),
        ({"kind": "linear", "values": [1, 3], "whole": True}, ["1", "2", "3"]),
        ({"kind": "log", "values": [0.001, 10]}, ["0.001", "0.01", "0.1", "1", "10"]),
        ({"kind": "log", "values": [1, 9]}, ["1", "2", "5"]),
        ({"kind": "category", "values": ["b", 10, 9, "a"]}, ["9", "10", "a", "b"]),
        ({"kind": "linear", "values": [5]}, ["4.8", "4.9", "5", "5.1", "5.2"]),
        ({"kind": "linear", "values": []}, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_ticks_are_round_and_within_the_scale(apply: Call, options: Any, labels: list[str]) -> None:
    ticks = apply("scales", "makeScale", options, 100, 600)["ticks"]
    assert [tick["label"] for tick in ticks] == labels
    assert all(100 <= tick["at"] <= 600 for tick in ticks)


def test_the_best_so_far_follows_the_numbers_of_finished_trials(apply: Call) -> None:
    trials = [trial(3, 0.6), trial(0, 0.5), trial(1, 0.9, "pruned"), trial(2, 0.4), trial(4, None)]
    assert apply("trial_data", "bestSoFar", trials, "max") == [[0, 0.5], [2, 0.5], [3, 0.6]]
    assert apply("trial_data", "bestSoFar", trials, "min") == [[0, 0.5], [2, 0.4], [3, 0.4]]


def test_one_diverged_trial_does_not_flatten_the_others(apply: Call) -> None:
    values = [0.8 + 0.01 * i for i in range(12)]
    assert apply("trial_data", "plainRange", [*values, 1e9]) == [values[0], values[-1]]
    assert apply("trial_data", "plainRange", values) == [values[0], values[-1]]


def test_only_members_at_work_are_still_running(apply: Call) -> None:
    phases = {"running": "running", "placed": "running", "paused": "standing", "stopped": "standing"}
    phases |= {"interrupted": "standing", "waiting": "waiting"}
    assert {state: apply("trial_data", "phaseOf", state) for state in phases} == phases


def test_what_the_page_itself_noticed_stays_when_it_loads_the_run_anew_and_goes_with_the_run(call: Call) -> None:
    code = """s.addNotice("warning", "refused"); s.load(docs.state);
        const again = s.notices.map((each) => each.text); s.load({...docs.state, log: "another"});
        const left = s.notices.filter((each) => each.text === "refused");
        return [again.filter((text) => text === "refused"), left];"""
    assert call("store.js", make_store(code), make_documents(3)) == [["refused"], []]


def test_a_document_that_takes_long_holds_up_no_other(call: Call) -> None:
    code = """async (m) => {
        const asked = [], loaded = [], never = new Promise(() => {});
        const source = {live: true, document: (name) => (asked.push(name), name === "importances" ? never : {})};
        const store = {expectCurves: () => {}, loadDocument: (name) => loaded.push(name)};
        const documents = new m.Documents(source, store, () => ["importances", "curves"], () => {});
        documents.fetchNeeds(); documents.fetchNeeds();
        await Promise.resolve(); await Promise.resolve();
        const first = [...loaded];
        documents.clear(); documents.fetchNeeds();
        return [asked, first];
    }"""
    asked, loaded = call("documents.js", code)
    assert loaded == ["curves"] and asked == ["importances", "curves"] * 2, "anew for another run"
