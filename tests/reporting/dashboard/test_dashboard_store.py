"""The parts of the live page that do not draw: documents and changes, filter, formats, addresses, fields.

They run in the browser: a test imports a module in a page of the server and calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from documents import COLUMNS, HOSTILE, START, make_change, make_documents
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_server import PageServer

from ensemble.reporting import text

pytestmark = pytest.mark.browser

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(browser: Any) -> Iterator[Call]:
    """`call("format.js", "(m, x) => m.number(x)", 3.5)` runs code on a module of the page."""
    with PageServer(make_documents(3)) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url + "static/icon.svg")  # a page of the same origin in which nothing runs

        def run(module: str, code: str, *arguments: Any) -> Any:
            return page.evaluate(
                "async ([module, values]) => {"
                f"const m = await import('/static/' + module); return ({code})(m, ...values); }}",
                [module, list(arguments)],
            )

        yield run
        context.close()


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
}
NUMBERS = st.one_of(
    st.floats(min_value=1e-6, max_value=1e13),
    st.integers(0, 10**12),
    st.sampled_from([0.0, 9.949, 9.95, 59.4, 59.6, 99.96, 999.4, 3599.4, 86399.0, 1e-7, 123456.0]),
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(NUMBERS, min_size=20, max_size=20))
def test_numbers_read_as_in_the_report(call: Call, name: str, values: list[float]) -> None:
    shown = call("format.js", f"(m, values) => values.map((each) => m.{name}(each))", values)
    for value, found in zip(values, shown, strict=True):
        assert found == FORMATS[name](value) or _is_tie(found, FORMATS[name](value)), value


def _is_tie(found: str, wanted: str) -> bool:
    """Whether the last digit alone differs, by one: Python rounds a half to even, JavaScript up."""
    digits = [re.sub(r"[^0-9.e+-]", "", shown) for shown in (found, wanted)]
    if re.sub(r"[0-9.,]", "", found) != re.sub(r"[0-9.,]", "", wanted) or not all(digits):
        return False
    a, b = map(Decimal, digits)
    last = min(int(each.as_tuple().exponent) for each in (a, b))
    return abs(a - b) <= Decimal(10) ** last


def test_what_is_absent_is_a_dash_and_never_a_zero(call: Call) -> None:
    names = [*FORMATS, "watts", "memory", "share", "clock", "moment", "value"]
    assert call("format.js", "(m, names) => names.map((name) => m[name](null))", names) == ["–"] * len(names)


def test_counts_clocks_and_shares(call: Call) -> None:
    shown = call(
        "format.js",
        """(m) => [m.count(1, "member"), m.count(10000, "member"), m.clock(3723), m.clock(7),
             m.share(0.68), m.share(0.004),
             m.gain(0.5, 0.75), m.gain(0.75, 0.5), m.watts(690), m.watts(23400), m.joules(201234, "measured"),
             m.hyperparameters({ lr: 0.1, width: 32, name: "a\\u202eb" })]""",
    )
    assert shown == [
        *("1 member", "10,000 members", "1:02:03", "0:07", "68 %", "0.4 %"),
        *("−0.2500", "+0.2500", "690 W", "23.4 kW", "201 kJ (measured)"),
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


@pytest.mark.parametrize(
    ("written", "passes"),
    [
        ("", True),
        ("member-1", True),
        ("MEMBER", True),
        ("gpu", True),
        ("nothing", False),
        ("-nothing", True),
        ("-member", False),
        ("lr<0.1", True),
        ("lr<0.01", False),
        ("lr<=0.01", True),
        ("lr>=1e-2", True),
        ("lr=0.01", True),
        ("lr=1e-2", True),
        ("lr!=0.01", False),
        ("-lr<0.1", False),
        ("width=64 accuracy>0.9", True),
        ("width=64 accuracy>0.95", False),
        ("state:failed", True),
        ("state:fail", True),
        ("state:running,failed", True),
        ("state:running", False),
        ("state!=failed", False),
        ('name="two words"', True),
        ('"two words"', True),
        ('"two  words"', False),
        ("name:two", True),
        ("deep=true", True),
        ("left_s<10", False),
        ("left_s>10", False),
        ("lr<", False),
        ("lr<abc", False),
        ("unknown=3", False),
        ("-", True),
        ("constructor:x", False),
    ],
)
def test_the_filter(call: Call, written: str, passes: bool) -> None:
    assert call("filter.js", "(m, text, member) => m.matcher(text)(member)", written, MEMBER) is passes


def test_an_unknown_name_in_a_filter_is_said(call: Call) -> None:
    code = "(m, text, member) => m.filterProblem(text, [member])"
    assert call("filter.js", code, "lr<0.1 state:failed loss>0", MEMBER) is None
    assert call("filter.js", code, "lrr<0.1", MEMBER) == "No column, hyperparameter or metric is called lrr."


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=st.text(alphabet='ab <>=!:"-,0.e~%', max_size=30))
def test_no_text_breaks_the_filter(call: Call, written: str) -> None:
    assert call("filter.js", "(m, text, member) => m.matcher(text)(member)", written, MEMBER) in (True, False)


# -- addresses -------------------------------------------------------------------------------------


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    select=st.lists(st.sampled_from([*HOSTILE, "a", "%", "%2C", ","]), max_size=4),
    written=st.text(st.characters(codec="utf-8"), max_size=20),
    member=st.sampled_from([None, *HOSTILE]),
)
def test_an_address_says_what_was_put_into_it(
    call: Call, select: list[str], written: str, member: str | None
) -> None:
    route = {"view": "curves", "run": None, "member": member, "select": select, "filter": written}
    assert call("route.js", "(m, route) => m.parseRoute(m.formatRoute(route))", route) == route


def test_an_address_that_somebody_wrote(call: Call) -> None:
    found = call("route.js", "(m, hash) => m.parseRoute(hash)", "#curves?select=a,b&filter=lr%3C0.1")
    assert found == {"view": "curves", "run": None, "member": None, "select": ["a", "b"], "filter": "lr<0.1"}
    assert call("route.js", "(m) => m.parseRoute('')")["view"] == ""
    assert call("route.js", "(m) => m.parseRoute('#x?filter=100%')")["filter"] == "100%"


# -- fields of a form ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "before", "value"),
    [
        ("0.1", 0.2, 0.1),
        ("1e-3", 0.2, 0.001),
        ("true", False, True),
        ("[1, 2]", [1], [1, 2]),
        ("adam", "sgd", "adam"),
        ("0.1", "sgd", "0.1"),
        ("adam", 3, "adam"),
        ("null", 3, None),
    ],
)
def test_a_changed_value_is_json_or_text(call: Call, written: str, before: Any, value: Any) -> None:
    assert call("actions.js", "(m, written, before) => m.parseValue(written, before)", written, before) == value


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
    assert seen == [["members", "power", "run"]]
    assert offset == change["offset"]
    assert states == dict.fromkeys(change["members"], "running")


def test_a_change_applied_twice_is_as_one_applied_once(call: Call) -> None:
    documents = make_documents(12)
    changes = [make_change(documents["state"], step, touched=4) for step in range(1, 6)]
    for change in changes:
        change["notices"] = [{"at_s": change["offset"], "level": "info", "text": "something"}]
    code = make_store("""
        s.loadDocument("curves", docs.curves);
        for (const change of rest[0]) for (let i = 0; i < rest[1]; i += 1) s.apply(change);
        return [[...s.members], s.curves.members, s.power, s.notices];""")
    once = call("store.js", code, documents, changes, 1)
    assert call("store.js", code, documents, changes, 2) == once
    assert len(once[3]) == len(documents["state"]["notices"]) + 5


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
    """An hour of changes, five a second, as one member that trains on and a node whose power is measured."""
    code = make_store("""
        s.loadDocument("curves", docs.curves);
        const node = docs.state.nodes[0].name, begin = docs.state.now;
        for (let i = 0; i < 18000; i += 1) {
          const now = begin + i / 5;
          s.apply({ offset: docs.state.offset + i, now,
            epochs: [["member-0", 100 + i, now, { accuracy: i / 18000 }]],
            power: [[node, now, now + 0.2, 100 + (i % 2), 40]],
            notices: [{ at_s: i, level: "info", text: `${i}` }],
            answers: [{ request: `${i}`, verb: "pause", member: null, done: true, said: "" }] });
        }
        const curve = s.curves.members["member-0"], points = s.power.nodes[0].points;
        return [curve.epoch.length, curve.values.accuracy.length, curve.epoch.at(-1), points.length,
                s.notices.length, s.answers.length];""")
    epochs, values, last, points, notices, answers = call("store.js", code, make_documents(2))
    assert epochs == values <= 2000
    assert last == 18099
    assert points <= 3000
    assert notices <= 2000
    assert answers <= 100


def test_averaging_power_keeps_its_energy(call: Call) -> None:
    documents = make_documents(1, nodes=1)
    documents["state"]["power"]["nodes"] = []
    code = make_store("""
        const node = docs.state.nodes[0].name;
        let wanted = 0;
        for (let i = 0; i < 4000; i += 1) {
          wanted += 3 * (i % 7);
          s.apply({ offset: 1, now: 1, power: [[node, 3 * i, 3 * i + 3, i % 7, 1]] });
        }
        const found = s.power.nodes[0].points.reduce((sum, p) => sum + p[2] * (p[1] - p[0]), 0);
        return [s.power.nodes[0].points.length, found, wanted];""")
    points, found, wanted = call("store.js", code, documents)
    assert points < 3001
    assert found == pytest.approx(wanted)


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


@pytest.mark.slow  # it measures time
def test_ten_thousand_are_filtered_and_selected_at_once(call: Call) -> None:
    code = make_store("""
        const begun = performance.now();
        s.setFilter("lr<0.01 -state:failed"); const shown = s.visible(); s.select(shown);
        return [shown.length, s.selection.size, performance.now() - begun];""")
    shown, selected, took_ms = call("store.js", code, make_documents(10_000))
    assert 0 < shown == selected < 10_000
    assert took_ms < 500


def test_the_clock_goes_on_and_stands_still_at_the_end(call: Call) -> None:
    code = make_store("""
        const a = s.now(), until = performance.now() + 30;
        while (performance.now() < until);
        return s.now() - a;""")
    assert call("store.js", code, make_documents(2)) > 0.02
    assert call("store.js", code, make_documents(2, ended=True)) == 0


# -- logs ------------------------------------------------------------------------------------------


def test_a_log_is_read_without_colours_and_overwritten_text(call: Call) -> None:
    raw = "\x1b[31mred\x1b[0m\r\n10 %\r20 %\r100 %\nplain\ttab\x00\u202eend\n"
    assert call("log_tail.js", "(m, raw) => m.cleanLog(raw)", raw) == "red\n100 %\nplain\ttab��end\n"
