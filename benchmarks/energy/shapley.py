"""The Shapley value: what each player of a game is worth, by what it adds to the others.

A **game** gives each coalition (a set of players) a value v. The Shapley value of a player is the mean of what it
adds to those who came before it, over all orders in which the players may come:

    phi(i) = sum over S without i of |S|! (n - |S| - 1)! / n! (v(S + i) - v(S))

It is the only split of v(all) - v(none) that gives equal players equal parts and players that add nothing nothing,
and that adds up over games (L. S. Shapley, A Value for n-Person Games, 1953). It takes the values of all 2**n
coalitions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

Coalition = frozenset[str]


def list_coalitions(players: Iterable[str]) -> list[Coalition]:
    """All coalitions of the players, the empty one first, smaller ones before larger ones."""
    players = list(players)
    sizes = range(len(players) + 1)
    return [frozenset(chosen) for size in sizes for chosen in itertools.combinations(players, size)]


def shapley_values(values: Mapping[Coalition, float]) -> dict[str, float]:
    """The Shapley value of each player.

    Args:
        values: of each coalition of the players, the empty one as well.

    Raises:
        ValueError: a coalition's value is missing.
    """
    players = sorted(frozenset().union(*values))
    coalitions = list_coalitions(players)
    missing = [sorted(each) for each in coalitions if each not in values]
    if missing:
        raise ValueError(f"no value is known of {missing[0]}, one of {len(missing)} coalitions")
    n = len(players)
    weights = [math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n) for size in range(n)]
    return {
        player: math.fsum(
            weights[len(others)] * (values[others | {player}] - values[others])
            for others in coalitions
            if player not in others
        )
        for player in players
    }
