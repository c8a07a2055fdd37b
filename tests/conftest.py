"""Where tests that share a helper module find it, and what holds for all of them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

for folder in ("executors", "reporting", "train"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

from kit.cpu_seconds import Measure  # noqa: E402
from kit.property_examples import FEW  # noqa: E402

from ensemble.spec import Ensemble  # noqa: E402

# How long one example takes says nothing on a machine that is shared, and to explain a failure may take minutes.
# The first tier tries the same examples each time; `make test-more` others (`--hypothesis-profile more`).
common = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "print_blob": True,
    "phases": [phase for phase in Phase if phase != Phase.explain],
}
settings.register_profile("default", max_examples=FEW, derandomize=True, database=None, **common)
settings.register_profile("more", max_examples=3 * FEW, **common)
settings.load_profile("default")

# Tests compute little, and several do at a time: threads that wait for each other only use up processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What trains needs torch, as its helpers do.
collect_ignore = [] if importlib.util.find_spec("torch") else ["comm", "integrations", "train"]

# What sources keep on disk, for all processes of `-n`, which inherit the variable; it is removed at the end.
SOURCES = tempfile.mkdtemp(prefix="ensemble-tests-") if "ENSEMBLE_SOURCES_DIR" not in os.environ else None
if SOURCES is not None:
    os.environ["ENSEMBLE_SOURCES_DIR"] = SOURCES

# A shell in whose background we start has us and our children ignore Ctrl-C, and nohup SIGHUP; tests send both.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# A rehearsal doubles the time of a short run: in these processes only tests that use `rehearses` have the default.
# What commands start in processes of their own has it.
DEFAULTS = Ensemble.__init__.__wrapped__.__kwdefaults__
REHEARSES, DEFAULTS["rehearsal"] = DEFAULTS["rehearsal"], None


@pytest.fixture
def rehearses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of the test rehearse as they do for a user."""
    monkeypatch.setitem(DEFAULTS, "rehearsal", REHEARSES)


# Unix time after which no test begins: what a limit of time would cut off is left out and named instead.
UNTIL = float(os.environ.get("ENSEMBLE_TESTS_UNTIL", "inf"))

# Of these folders tests are long: they begin first, so that none is still at work when all others have ended.
LONG = ("ray", "e2e", "faults", "executors", "benchmarks", "examples")


def pytest_configure(config: pytest.Config) -> None:
    """Measure the tests that this process runs, where it is asked for."""
    folder = os.environ.get("CPU_SECONDS")
    if folder and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Measure(Path(folder).resolve()))


def pytest_unconfigure() -> None:
    if SOURCES is not None:
        shutil.rmtree(SOURCES, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > UNTIL:
        pytest.skip("no time is left (ENSEMBLE_TESTS_UNTIL)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long ones first; refuse names that another process would not give them, with which `-n` fails."""
    if named := [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]:
        raise pytest.UsageError(f"a test's name holds an address in memory, give it an id: {named[0]}")
    items.sort(key=lambda item: item.path.parent.name not in LONG)


def pytest_xdist_auto_num_workers() -> int:
    """More than there are cores: much of what the tests do is wait for processes, timeouts and Ray."""
    return len(os.sched_getaffinity(0)) + 2


@pytest.fixture(autouse=True)
def _what_one_test_installs_no_other_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions whose providers a test has loaded are recorded in each run directory that follows."""
    monkeypatch.setattr("pipelines.providers._loaded", set())


@pytest.fixture
def requests_are_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller looks for requests before each event."""
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a test that looks at no report write none."""
    monkeypatch.setattr("ensemble.controller.finalize.Finalizer._write_report", lambda *_: None)
