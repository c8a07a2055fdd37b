"""What the run cost: CPU-seconds by role and member, power over time with its origin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ensemble.reporting import text
from ensemble.reporting.theme import ROLE_WORDS, ROLES, SERIES, apply_theme, make_translucent

if TYPE_CHECKING:
    from ensemble.meter.ledger import Ledger, NodeTotal

SHOWN = 40  # members with a bar of their own; the rest is one bar
POINTS = 1500  # of a power curve
GAP_S = 2.0  # between two samples of a power curve, from which on it is broken: nobody measured
SHARED = "shared, by all"
UNUSED, UNUSED_ROW = ("idle", "other"), "not the run's"


def cpu_seconds(ledger: Ledger) -> go.Figure | str:
    """CPU-seconds as stacked bars: the whole run by role, below it each member, and what all members share."""
    used = [(row.role, row.member, row.cpu_s) for row in ledger.rows if row.role not in UNUSED and row.cpu_s > 0]
    if not used:
        return "No process has reported its CPU time yet."
    return _stack(used, list(ledger.by_member()), "whole run", "CPU-seconds")


def joules_by_role(ledger: Ledger) -> go.Figure | str:
    """Joules as stacked bars: all nodes by role, below it each member, what all share, and what nobody of the run
    used.
    """
    used = [(row.role, row.member, row.energy_j) for row in ledger.rows if row.energy_j]
    if not used:
        return (
            "There is no energy to share out: no node has a power source that could be read, or none has reported."
        )
    origin = text.origins(row.origin for row in ledger.rows if row.energy_j)
    return _stack(used, list(ledger.by_member()), "whole nodes", f"joules ({origin})")


def _stack(used: Sequence[tuple[str, str | None, float]], members: list[str], whole: str, unit: str) -> go.Figure:
    """Stacked bars by role of (role, member, amount)."""
    by_row: dict[str, dict[str, float]] = {}
    totals: dict[str, float] = {}
    for role, member, amount in used:
        roles = by_row.setdefault(member or (UNUSED_ROW if role in UNUSED else SHARED), {})
        roles[role] = roles.get(role, 0.0) + amount
        totals[role] = totals.get(role, 0.0) + amount
    names = _select_members(by_row, members)
    everything = sum(totals.values())
    below = 30 * len(names)
    figure = make_subplots(
        rows=2, cols=1, row_heights=[34, below], vertical_spacing=min(0.3, 46 / (below + 80)), shared_xaxes=False
    )
    for role in [*ROLES, *(role for role in totals if role not in ROLES)]:
        if not totals.get(role):
            continue
        word = ROLE_WORDS.get(role, role)
        share = totals[role] / everything
        common = {
            "orientation": "h",
            "name": f"{word} {share:.0%}" if share >= 0.005 else f"{word} <1%",
            "marker": {"color": ROLES.get(role, SERIES[-1]), "line": {"width": 0}},
            "legendgroup": role,
            "hovertemplate": f"<b>%{{y}}</b><br>{word}: %{{x:.2f}} {unit}<extra></extra>",
        }
        figure.add_trace(go.Bar(**common, y=[whole], x=[totals[role]]), row=1, col=1)
        values = [by_row[name].get(role, 0.0) for name in names]
        figure.add_trace(go.Bar(**common, y=names, x=values, showlegend=False), row=2, col=1)
    figure.update_xaxes(range=[0, everything], row=1, col=1, nticks=8)
    figure.update_xaxes(title_text=unit, row=2, col=1)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return apply_theme(figure, height=170 + below, barmode="stack", bargap=0.3)


def _select_members(by_row: dict[str, dict[str, float]], members: list[str]) -> list[str]:
    """The rows to draw; adds up the members beyond `SHOWN`, those that used least."""
    known = [m for m in members if m in by_row]
    if len(known) > SHOWN:
        rank = sorted(known, key=lambda m: -sum(by_row[m].values()))
        rest = rank[SHOWN - 1 :]
        label = f"{len(rest)} other members"
        by_row[label] = {role: sum(by_row[m].get(role, 0.0) for m in rest) for role in ROLES}
        kept = set(rank[: SHOWN - 1])
        known = [m for m in known if m in kept] + [label]
    return known + [row for row in (SHARED, UNUSED_ROW) if row in by_row]


def power_over_time(ledger: Ledger, begin: float) -> go.Figure | str:
    """Watts of each node since `begin` (Unix seconds); legend and axis name the origin, the legend the source."""
    curves = ((node, _curve(node, (watts for _, watts, _, _ in node.power))) for node in ledger.nodes)
    drawn = [(node, curve) for node, curve in curves if curve]
    if not drawn:
        return "There is no power reading: no node has a source that could be read, or none has reported yet."
    scale, unit = text.time_unit(max(curve[-1][0] for _, curve in drawn) - begin)
    figure = go.Figure()
    for i, (node, curve) in enumerate(drawn):
        colour = SERIES[i % len(SERIES)]
        estimated = node.origin == "estimated"
        figure.add_trace(
            go.Scatter(
                x=[(t - begin) / scale for t, _ in curve],
                y=[watts for _, watts in curve],
                mode="lines",
                line={"color": colour, "width": 1.6, "shape": "vh", "dash": "dash" if estimated else "solid"},
                fill="tozeroy" if len(drawn) == 1 else None,
                fillcolor=make_translucent(colour, 0.1),
                name=f"{node.node}, {node.origin}: {text.joules(node.energy_j)} ({', '.join(node.sources)})",
                showlegend=True,
                hovertemplate=f"<b>{node.node}</b>, {node.origin}<br>%{{x:.1f}} {unit}: %{{y:.1f}} W"
                "<extra></extra>",
            )
        )
        if node.idle_j:
            idle = _curve(node, (idle_w for *_, idle_w in node.power))
            figure.add_trace(
                go.Scatter(
                    x=[(t - begin) / scale for t, _ in idle],
                    y=[watts for _, watts in idle],
                    mode="lines",
                    line={"color": colour, "width": 1.2, "shape": "vh", "dash": "dot"},
                    name=f"idle: {text.joules(node.idle_j)}",
                    hovertemplate=f"<b>{node.node}</b>, idle<br>%{{x:.1f}} {unit}: %{{y:.1f}} W<extra></extra>",
                )
            )
    origin = text.origins([node.origin for node, _ in drawn])
    figure.update_xaxes(title_text=f"{unit} since the start", rangemode="tozero")
    figure.update_yaxes(title_text=f"watts ({origin})", rangemode="tozero")
    return apply_theme(figure, height=300)


def _curve(node: NodeTotal, watts: Iterable[float | None]) -> list[tuple[float, float | None]]:
    """(time, watts) of a node, a point at the beginning and the end of each stretch, without watts between two.

    It is thinned to means of neighbours: a long run stays a light figure.

    Args:
        watts: at each sample; None where that is not known.
    """
    stretches: list[list[tuple[float, float, float]]] = []
    for begin, (end, *_), power in zip(node.begins, node.power, watts, strict=True):
        if power is None:
            continue
        if not stretches or begin - stretches[-1][-1][1] > GAP_S:
            stretches.append([])
        stretches[-1].append((begin, end, power))
    every = -(-sum(map(len, stretches)) // POINTS) or 1
    curve: list[tuple[float, float | None]] = []
    for stretch in stretches:
        groups = [stretch[i : i + every] for i in range(0, len(stretch), every)]
        means = [(group[-1][1], sum(power for *_, power in group) / len(group)) for group in groups]
        begin = stretch[0][0]
        curve += [*([(begin, None)] if curve else []), (begin, means[0][1]), *means]
    return curve
