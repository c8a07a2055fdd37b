"""The policies that the session asks are there, and pure."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import sys
import textwrap

import pytest

from ensemble.controller.policies import POLICIES, load_planner

IMPURE = {"open", "time", "os", "random", "socket", "subprocess", "threading", "log", "print"}


@pytest.mark.parametrize("question", POLICIES)
def test_a_policy_decides_from_its_arguments_alone(question: str) -> None:
    module, _, name = POLICIES[question].partition(":")
    policy = operator.attrgetter(name)(importlib.import_module(module))
    assert inspect.getdoc(policy), "it says what it decides"
    names = {
        node.id
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(policy))))
        if isinstance(node, ast.Name)
    }
    assert not names & IMPURE


def test_a_planner_that_lacks_what_it_imports_is_not_taken_for_one_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ensemble.controller.planner", None)
    assert load_planner() is None
    monkeypatch.delitem(sys.modules, "ensemble.controller.planner")
    monkeypatch.setitem(sys.modules, "ensemble.schedule.flotilla.allocate", None)
    with pytest.raises(ModuleNotFoundError, match="allocate"):
        load_planner()
