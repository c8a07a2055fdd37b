"""The parts of the live page that do not draw: a test imports a module of the page in Node and calls it."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from documents import HOSTILE, make_change, make_documents
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples
from kit.run_events import START

from ensemble.reporting import text
from ensemble.reporting.dashboard.rows import FIELDS

Call = Callable[..., Any]


def make_store(code: str) -> str:
    return f"(m, docs, ...rest) => {{ const s = new m.Store(); s.load(docs.state); {code} }}"


FORMATS = {name: getattr(text, name) for name in ("duration", "number", "score", "cpu", "joules", "watts")}
EDGES = st.sampled_from([0.0, 9.949, 9.95, 59.4, 59.6, 99.96, 999.4, 3599.4, 86399.0, 1e-7, 123456.0])
NUMBERS = EDGES | st.floats(min_value=1e-6, max_value=1e13) | st.integers(0, 10**12)


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


MEMBER = {"id": "member-12", "state": "failed", "place": "node-0, GPU 1", "options": "bf16", "metric": 0.91}
MEMBER |= {"epoch": 3, "left_s": None, "params": {"lr": 0.01, "width": 64, "name": "two words", "deep": True}}
MEMBER |= {"metrics": {"accuracy": 0.91, "loss": 0.2}}
PASSES = (
    "", "member-1", "MEMBER", "gpu", "-nothing", "lr<0.1", "lr<=0.01", "lr>=1e-2", "lr=0.01", "lr=1e-2",
    "width=64 accuracy>0.9", "state:failed", "state:fail", "state:running,failed", 'name="two words"',
    '"two words"', "name:two", "deep=true", "-",
)  # fmt: skip
REFUSES = (
    "nothing", "-member", "lr<0.01", "lr!=0.01", "-lr<0.1", "width=64 accuracy>0.95", "state:running",
    "state!=failed", '"two  words"', "left_s<10", "left_s>10", "lr<", "lr<abc", "unknown=3", "constructor:x",
)  # fmt: skip
NAMES = [*FORMATS, "memory", "share", "clock", "moment", "value"]
ROUTE = {"view": "curves", "run": None, "member": None, "select": ["a", "b"], "filter": "lr<0.1", "set": {}}
DEFAULTS = {"log": False, "axis": "epoch", "zoom": None, "k": 3}
SETTINGS = """(m, hash, defaults) => m.readSettings(m.parseRoute(hash).set, defaults, {
    axis: (given) => ["epoch", "run"].includes(given), zoom: Array.isArray })"""
VALUES = [("0.1", 0.2), ("1e-3", 0.2), ("true", False), ("adam", "sgd"), ("0.1", "sgd"), ("adam", 3), ("null", 3)]
VERBS = """(m, actions, live) => ["running", "waiting", "paused", "failed"].map((state) =>
    m.verbsFor({ source: { live }, store: { run: { actions } } }, { state }))"""
ALL_VERBS = ["stop", "pause", "resume", "cancel", "add"]
ACTIVE, PAUSED = ["pause", "cancel", "add"], ["resume", "cancel", "add"]
CURVE = {"epoch": [0, 1], "t": [START + 7, START + 9]}
TEN, TWELVE, MANY, THOUSAND = (make_documents(members) for members in (10, 12, 40, 1000))
LATER = make_change(TWELVE, 1, touched=2)
EPOCH = TWELVE["state"]["members"]["columns"].index("epoch")
ROWS = [dict(zip(FIELDS, row, strict=True)) for row in THOUSAND["state"]["members"]["rows"].values()]
FILTERED = [row["id"] for row in ROWS if row["params"]["lr"] < 0.01 and row["state"] != "failed"]
#: What is shown, the module, code on it, arguments, and what comes back.
CALLS: dict[str, tuple[str, str, tuple[Any, ...], Any]] = {
    "what is absent is a dash and never a zero": (
        "format.js", "(m, names) => names.map((name) => m[name](null))", (NAMES,), ["–"] * len(NAMES)),
    "counts, clocks and shares": (
        "format.js",
        """(m) => [m.count(1, "member"), m.count(10000, "member"), m.clock(3723), m.clock(7), m.share(0.68),
            m.share(0.004), m.watts(690), m.watts(23400), m.joules(201234, "measured"),
            m.hyperparameters({ lr: 0.1, width: 32, name: "a\\u202eb" })]""", (),
        ["1 member", "10,000 members", "1:02:03", "0:07", "68 %", "0.4 %", "690 W", "23.4 kW",
         "201 kJ (measured)", "lr 0.1, width 32, name a\\u202eb"]),
    "the filter": (
        "filter.js", "(m, texts, member) => texts.filter((text) => m.matcher(text)(member))",
        ([*PASSES, *REFUSES], MEMBER), [*PASSES]),
    "an unknown name in a filter is said": (
        "filter.js", "(m, texts, member) => texts.map((text) => m.filterProblem(text, [member]))",
        (["lr<0.1 state:failed loss>0", "lrr<0.1"], MEMBER),
        [None, "No column, hyperparameter or metric is called lrr."]),
    "an address that somebody wrote": (
        "route.js", "(m, hash) => m.parseRoute(hash)", ("#curves?select=a,b&filter=lr%3C0.1",), ROUTE),
    "addresses that say little": (
        "route.js", "(m) => [m.parseRoute('').view, m.parseRoute('#x?filter=100%').filter]", (), ["", "100%"]),
    **{f"settings that somebody wrote are the defaults: {query}": (
        "route.js", SETTINGS, (f"#curves?{query}", DEFAULTS), DEFAULTS)
       for query in ("log=1&axis=constructor&zoom={&k=x", "log=%00&axis[]=&zoom=9&k=",
                     "__proto__=1&toString=2", "")},
    "settings that fit": (
        "route.js", SETTINGS, ("#curves?log=true&axis=run&zoom=[1,2]&k=4", DEFAULTS),
        {"log": True, "axis": "run", "zoom": [1, 2], "k": 4}),
    "a changed value is json or text": (
        "actions.js", "(m, pairs) => pairs.map(([said, before]) => m.parseValue(said, before))",
        ([*VALUES, ("[1, 2]", [1])],), [0.1, 0.001, True, "adam", "0.1", "adam", None, [1, 2]]),
    "what can be done with a member": ("actions.js", VERBS, (ALL_VERBS, True), [ACTIVE, ACTIVE, PAUSED, ["add"]]),
    "nothing can be done when the run has ended": ("actions.js", VERBS, ([], True), [[]] * 4),
    "nothing can be done in a report": ("actions.js", VERBS, (ALL_VERBS, False), [[]] * 4),
    "members are read by column and in order": (
        "store.js", make_store("return [s.order, s.members.get('member-3')];"), (TWELVE,),
        [[f"member-{i}" for i in range(12)],
         dict(zip(FIELDS, TWELVE["state"]["members"]["rows"]["member-3"], strict=True))]),
    "a later state takes the place of the one before and says which documents are stale": (
        "store.js", make_store("""
            s.loadDocument("curves", docs.curves); s.select(["member-3"]);
            const stale = s.load(rest[0].state);
            return [stale, s.load(rest[0].state), s.offset, [...s.selection], s.curves !== null,
                    s.order.map((id) => s.members.get(id).epoch)];"""), (TWELVE, LATER),
        [["curves"], [], LATER["state"]["offset"], ["member-3"], True,
         [row[EPOCH] for row in LATER["state"]["members"]["rows"].values()]]),
    "few members keep their own colours": (
        "store.js", make_store("""
            const before = s.order.map((id) => s.colour(id)); s.select(["member-3"]);
            return [new Set(before).size, s.order.every((id, i) => s.colour(id) === before[i]),
                    s.order.filter((id) => s.isPale(id)).length];"""), (TEN,), [10, True, 9]),
    "of many the selected have colours that they keep, and the others but one beside that of the best": (
        "store.js", make_store("""
            const none = new Set(s.order.map((id) => s.colour(id)));
            s.select(["member-5", "member-7"]); const first = s.colour("member-7");
            s.toggle("member-5"); s.toggle("member-20");
            const [kept, freed, gone] = ["member-7", "member-20", "member-5"].map((id) => s.colour(id));
            const other = [kept, freed].includes(gone);
            return [none.size, first === kept, kept === freed, other, [...s.selection]];"""),
        (MANY,), [2, True, False, False, ["member-7", "member-20"]]),
    "what the filter leaves is selected at once": (
        "store.js", make_store("""s.setFilter("lr<0.01 -state:failed"); const shown = s.visible();
            s.select(shown); return [shown, [...s.selection]];"""), (THOUSAND,), [FILTERED, FILTERED]),
    **{f"the clock of a run that has{'' if ended else ' not'} ended": (
        "store.js", make_store("""const a = s.now(), until = performance.now() + 30;
            while (performance.now() < until); return s.now() - a > 0.02;"""),
        (make_documents(2, ended=ended),), not ended) for ended in (False, True)},
    "quartiles are of those that came so far": (
        "curve_series.js", """(m) => {
            const make = (k) => (k < 5 ? { xs: [1, 2], ys: [k, 10 * k] } : { xs: [1], ys: [k] });
            return m.band([1, 2, 3, 4, 5].map(make), [1, 2]); }""", (), [[1, 2, 3, 4], [2, 17.5, 25, 32.5]]),
    "smoothing weighs by distance: what lies a half-life of 3 back weighs a half, whatever lies between": (
        "curve_series.js", "(m) => [m.smooth([1, null, 1, 4], [0, 1, 2, 5], 3), m.smooth([1, 2], [0, 1], 0)]", (),
        [[1, None, pytest.approx(1), pytest.approx((4.5 + 0.5 ** (5 / 3)) / (1.5 + 0.5 ** (5 / 3)))], [1, 2]]),
    "a curve lies over epochs, samples or the time of the run or of the member": (
        "curve_series.js",
        "(m, curve, origins) => ['epoch', 'samples', 'run', 'own'].map((x) => m.positions(curve, x, origins))",
        (CURVE, {"run": START, "own": START + 5, "samples": 1000}), [[1, 2], [1000, 2000], [7, 9], [2, 4]]),
    "what the page itself noticed stays when it loads the run anew and goes with the run": (
        "store.js", make_store("""s.addNotice("warning", "refused"); s.load(docs.state);
            const again = s.notices.filter((each) => each.text === "refused").length;
            s.load({...docs.state, run: {...docs.state.run, run_id: "another"}});
            return [again, s.notices.filter((each) => each.text === "refused").length];"""), (TEN,), [1, 0]),
    "a document that takes long holds up no other; of another run all are fetched anew": (
        "documents.js", """async (m) => {
            const asked = [], loaded = [], never = new Promise(() => {});
            const document = (name) => (asked.push(name), name === "importances" ? never : {});
            const source = {live: true, document};
            const store = {loadDocument: (name) => loaded.push(name)};
            const documents = new m.Documents(source, store, () => ["importances", "curves"], () => {});
            documents.fetchNeeds(); documents.fetchNeeds();
            await Promise.resolve(); await Promise.resolve();
            const first = [...loaded];
            documents.clear(); documents.fetchNeeds();
            return [asked, first]; }""", (), [["importances", "curves"] * 2, ["curves"]]),
    **{f"ticks are round and within the scale: {options}": (
        "scales.js", """(m, options) => m.makeScale(options, 100, 600).ticks
            .filter(({ at }) => 100 <= at && at <= 600).map(({ label }) => label)""", (options,), labels.split())
       for options, labels in (
            ({"kind": "linear", "values": [0, 10]}, "0 2 4 6 8 10"),
            ({"kind": "linear", "values": [1, 3], "whole": True}, "1 2 3"),
            ({"kind": "log", "values": [0.001, 10]}, "0.001 0.01 0.1 1 10"),
            ({"kind": "log", "values": [1, 9]}, "1 2 5"),
            ({"kind": "category", "values": ["b", 10, 9, "a"]}, "9 10 a b"),
            ({"kind": "linear", "values": [5]}, "4.8 4.9 5 5.1 5.2"),
            ({"kind": "linear", "values": []}, "0 0.2 0.4 0.6 0.8 1"))},
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_a_module_answers(call: Call, what: str) -> None:
    modules, code, arguments, expected = CALLS[what]
    assert call(modules, code, *arguments) == expected


@examples(40)
@given(written=st.text(alphabet='ab <>=!:"-,0.e~%', max_size=30))
def test_no_text_breaks_the_filter(call: Call, written: str) -> None:
    assert call("filter.js", "(m, text, member) => m.matcher(text)(member)", written, MEMBER) in (True, False)


@examples(20)
@given(
    select=st.lists(st.sampled_from([*HOSTILE, "a", "%", "%2C", ","]), max_size=4),
    written=st.text(st.characters(codec="utf-8"), max_size=20),
    member=st.sampled_from([None, *HOSTILE]),
    settings=st.dictionaries(st.sampled_from([*HOSTILE, "axis"]), st.sampled_from([True, *HOSTILE, "1", "[]"])),
)
def test_an_address_says_what_was_put_into_it(
    call: Call, select: list[str], written: str, member: str | None, settings: dict[str, Any]
) -> None:
    route = {"view": "curves", "run": None, "member": member, "select": select, "filter": written}
    code = """(m, route, settings) => {
        const set = m.changeSettings(new Map([["axis", "old"]]), { axis: null, ...settings });
        const found = m.parseRoute(m.formatRoute({ ...route, set }));
        const of = (value) => Object.fromEntries(Object.keys(settings).map((name) => [name, value]));
        const read = m.readSettings(found.set, of(null), of(() => true));
        return [{ ...found, set: null }, read, [...found.set.keys()]];
    }"""
    settings.pop("__proto__", None)
    found, read, names = call("route.js", code, route, settings)
    assert found == route | {"set": None} and read == settings and sorted(names) == sorted(settings)


def test_members_lie_on_cores_and_gpus_by_share_at_any_moment(call: Call) -> None:
    t, gpu = START, "GPU-node-0-0"
    documents = make_documents(3, gpus=2)
    spans = {"member-0": [[0, "node-0", [gpu], 0, t, t + 1, t + 50, "finished"]]}
    spans |= {"member-1": [[0, "node-0", [gpu], 0, t + 40, None, t + 60, "finished"]]}
    documents["state"]["spans"] = spans | {"member-2": [[0, "node-9", [], 0, t + 90, t + 91, None, "running"]]}
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
    assert pieces == [[("member-0", 2, False), ("member-1", 1, True)], [("member-1", 1, True)], []]
