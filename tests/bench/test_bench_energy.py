"""`ensemble bench energy`: Shapley values, and how far meter and ledger are from a synthetic node's truth."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.bench.energy import attribution
from ensemble.bench.energy.shapley import Coalition, list_coalitions, shapley_values
from ensemble.bench.energy.synthetic_node import CONCAVE, LINEAR, PowerModel
from ensemble.cli.parser import main

PLAYERS = ("a", "b", "c", "d")
VALUE = st.floats(-1e6, 1e6)


@st.composite
def games(draw: st.DrawFn, players: tuple[str, ...] = PLAYERS) -> dict[Coalition, float]:
    return {coalition: draw(VALUE) for coalition in list_coalitions(players)}


# --- Shapley values ------------------------------------------------------------------------------------------


@given(games())
def test_shapley_values_add_up_to_what_all_players_add(game: dict[Coalition, float]) -> None:
    gain = game[frozenset(PLAYERS)] - game[frozenset()]
    assert sum(shapley_values(game).values()) == pytest.approx(gain, abs=1e-6)


@given(games())
def test_players_who_add_the_same_to_every_coalition_have_equal_values(game: dict[Coalition, float]) -> None:
    swap = {"a": "b", "b": "a"}
    symmetric = {
        coalition: game[coalition] + game[frozenset(swap.get(player, player) for player in coalition)]
        for coalition in game
    }
    values = shapley_values(symmetric)
    assert values["a"] == pytest.approx(values["b"], abs=1e-6)


@given(games(PLAYERS[:3]), VALUE)
def test_a_player_who_adds_the_same_to_all_is_worth_that(game: dict[Coalition, float], own: float) -> None:
    with_dummy = {**game, **{coalition | {"d"}: value + own for coalition, value in game.items()}}
    values = shapley_values(with_dummy)
    assert values["d"] == pytest.approx(own, abs=1e-6)
    assert {name: values[name] for name in "abc"} == pytest.approx(shapley_values(game), abs=1e-6)


@given(games(), games())
def test_shapley_values_of_a_sum_of_games_are_sums(
    one: dict[Coalition, float], two: dict[Coalition, float]
) -> None:
    values, others = shapley_values(one), shapley_values(two)
    together = shapley_values({coalition: one[coalition] + two[coalition] for coalition in one})
    assert together == pytest.approx({name: values[name] + others[name] for name in PLAYERS}, abs=1e-6)


@given(games(PLAYERS[:3]))
def test_a_shapley_value_is_the_mean_over_all_orders(game: dict[Coalition, float]) -> None:
    orders = list(itertools.permutations("abc"))
    means = dict.fromkeys("abc", 0.0)
    for order in orders:
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            means[player] += (game[before | {player}] - game[before]) / len(orders)
    assert shapley_values(game) == pytest.approx(means, abs=1e-6)


def test_a_coalition_without_a_value_is_named() -> None:
    game = dict.fromkeys(list_coalitions("ab"), 1.0)
    del game[frozenset("b")]
    with pytest.raises(ValueError, match=r"\['b'\]"):
        shapley_values(game)


# --- the synthetic node --------------------------------------------------------------------------------------


def test_two_who_share_a_concave_node_cost_less_than_each_alone() -> None:
    alone, both = CONCAVE.dynamic_w(0.5)["cpu"], CONCAVE.dynamic_w(1.0)["cpu"]
    assert alone < both < 2 * alone
    assert LINEAR.dynamic_w(1.0)["cpu"] == pytest.approx(2 * LINEAR.dynamic_w(0.5)["cpu"])


@pytest.fixture(scope="module")
def measured() -> attribution.Measured:
    """Some seconds of four members on a linear node without idle power, whose counters wrap around meanwhile."""
    return attribution.measure(6.0, PowerModel(cpu_idle_w=0.0, dram_idle_w=0.0))


def test_members_of_a_linear_node_are_charged_what_they_truly_used(measured: attribution.Measured) -> None:
    rows = {row.name: row for row in attribution.compare("", measured)}
    for name in (*attribution.BUSY, attribution.HALF):
        assert rows[name].true_j == pytest.approx(
            14.0 * rows[name].cpu_s
        )  # 12 W of the package, 2 W of the memory
        assert abs(rows[name].error_pct) < 3.0
    assert rows[attribution.RESTING].attributed_j < 0.2 * rows[attribution.HALF].attributed_j


def test_what_is_attributed_adds_up_to_the_meters_joules_and_these_to_the_truth(
    measured: attribution.Measured,
) -> None:
    found = attribution.ledger(measured.events)
    assert attribution.is_exact(found, measured.events)
    assert found.total.energy_j == pytest.approx(measured.truth.energy_j, rel=0.02)


def test_a_lost_joule_is_seen(measured: attribution.Measured) -> None:
    events = [*measured.events]
    last = max(number for number, event in enumerate(events) if event["type"] == "power")
    parts = [{**part, "energy_j": part["energy_j"] + 1.0} for part in events[last]["parts"]]
    found = attribution.ledger(events)
    assert not attribution.is_exact(found, [*events[:last], {**events[last], "parts": parts}])


# --- the command ---------------------------------------------------------------------------------------------


def test_the_study_prints_tables_and_writes_rows_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, plot = tmp_path / "rows.json", tmp_path / "plot.html"
    options = [
        "--parts",
        "attribution",
        "--seconds",
        "2",
        "--repeats",
        "1",
        "--json",
        str(rows),
        "--plot",
        str(plot),
    ]
    assert main(["bench", "energy", *options]) == 0
    found = json.loads(rows.read_text())
    assert {row["part"] for row in found} == {"attribution"}
    assert {row["name"] for row in found} >= {member.name for member in attribution.MEMBERS}
    shown = capsys.readouterr()
    assert "Attributed joules" in shown.out
    assert "to the tick" in shown.err
    assert plot.stat().st_size > 1000


def test_an_unknown_part_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "energy", "--parts", "attributoin"]) == 2
    assert "attribution" in capsys.readouterr().err


def test_a_member_ends_with_its_input() -> None:
    command = [sys.executable, "-m", "ensemble.bench.energy.busy", "m", "n", "0.5"]
    done = subprocess.run(command, input=b"work\n", capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    roles = [json.loads(line)["role"] for line in done.stdout.splitlines() if line != b"ok"]
    assert roles == ["startup", "train"]
