"""Members are forked from a process that has loaded the declaration of their run, unless a fork would differ."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from kit.execute_members import an_ensemble, make_job
from kit.leftovers import wait_until

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.executors.base import dispatch
from ensemble.executors.process_pool import ProcessPool
from ensemble.executors.spawn import ForkServer
from ensemble.executors.templates import Template
from ensemble.store import RunDir
from pipelines import Pipeline, sources
from pipelines.ipc.child_processes import child_environment

#: A module of the user's: it notes who imports it, and does what a test wants.
MODULE = """
import os
with open(os.environ["NOTES"], "a") as notes:
    notes.write(f"{{os.getpid()}}\\n")
{body}
def build(params):
    import torch
    return torch.nn.Linear(4, 3)
"""
#: What a module may do at its import so that forks of the process are not as if each had imported it.
OBSTACLES = {
    "thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "waiting thread": "import threading; threading.Thread(target=threading.Event().wait).start()",
    "file": "log = open(os.environ['NOTES'] + '.log', 'w')",
    "lock": "import multiprocessing; lock = multiprocessing.get_context('fork').Lock()",
    "memory": "import mmap; memory = mmap.mmap(-1, 4096)",
    "process": "if (child := os.fork()) == 0: os.execlp('sh', 'sh', '-c', 'exec sleep 9 >/dev/null 2>&1')",
    "folder": "import tempfile; folder = tempfile.TemporaryDirectory()",
    "SIGCHLD": "import signal; signal.signal(signal.SIGCHLD, lambda *_: None)",
}
HARMLESS = {
    "nothing": "",
    "array in a file": "import numpy; array = numpy.memmap(__file__, mode='r')",
    "end": "import atexit; atexit.register(print, 'the end')",
    "numbers": "import numpy; numbers = numpy.random.default_rng().normal(size=4)",
    "threads of BLAS": "import scipy.linalg, numpy; scipy.linalg.inv(numpy.eye(500))",
}
LOOK = """
from ensemble.executors.template_main import _list_files, _list_shared_memory, find_obstacle
before = _list_files(), _list_shared_memory()
{}
import os
print(find_obstacle(*before), flush=True)
os._exit(0)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Ensemble]]:
    """Writes the user's module, with something that it does at its import, and declares a run of it."""
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def declare(body: str) -> Ensemble:
        (tmp_path / "users_module.py").write_text(MODULE.format(body=textwrap.dedent(body)))
        rng = np.random.default_rng(0)
        records = sources.arrays(x=rng.normal(size=(64, 4)).astype(np.float32), label=rng.integers(0, 3, 64))
        import users_module  # type: ignore[import-not-found]

        return Ensemble(
            name="templates",
            optimizer="sgd",
            recipe=Recipe(model=getattr(users_module, "build_shared", users_module.build), loss="cross_entropy"),
            members=[{"lr": lr} for lr in (0.1, 0.2, 0.3)],
            train=Pipeline(records, seed=0),
            epochs=2,
        )

    yield declare
    sys.modules.pop("users_module", None)


def count_imports(tmp_path: Path) -> int:
    """How many processes have imported the user's module, without this one."""
    return len({*(tmp_path / "notes").read_text().split()} - {str(os.getpid())})


def run(declared: Ensemble, folder: Path, executor: str) -> list[str]:
    """The digests of the members' weights."""
    result = ensemble.submit(declared, folder, executor).wait()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [row["state"] for row in result.members] == ["finished"] * 3, result.members
    return sorted(event["weights_sha256"] for event in events if event["type"] == "finished")


def test_the_declaration_is_loaded_once_for_all_members(write: Callable[[str], Ensemble], tmp_path: Path) -> None:
    declared = write("os.environ['OF_IMPORT'] = '1'")
    weights = run(declared, tmp_path / "run", "local")
    assert count_imports(tmp_path) == 1, "members, those that are measured, and the checker"
    assert weights == run(declared, tmp_path / "inline", "inline")


@pytest.mark.parametrize("body", OBSTACLES.values(), ids=OBSTACLES)
def test_a_process_that_cannot_be_forked_says_why(body: str, tmp_path: Path) -> None:
    environment = child_environment() | {"NOTES": str(tmp_path / "notes")}
    command = [sys.executable, "-c", "import os;" + LOOK.format(body)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert found != "None" and ("loading the declaration" in found or "SIGCHLD" in found)


@pytest.mark.parametrize("body", HARMLESS.values(), ids=HARMLESS)
def test_a_process_that_can_be_forked_is(body: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOOK.format(body))
    environment = child_environment() | {"OPENBLAS_NUM_THREADS": "2"}
    command = [sys.executable, str(script)]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "None\n"


@pytest.mark.parametrize(
    "body",
    [
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "if len({*open(os.environ['NOTES'])}) == 2: raise SystemExit('not twice')",
    ],
    ids=["thread", "does not load"],
)
def test_where_it_cannot_be_forked_each_member_loads_the_declaration(
    body: str, write: Callable[[str], Ensemble], tmp_path: Path
) -> None:
    declared = write(body)
    weights = run(declared, tmp_path / "run", "local")
    assert count_imports(tmp_path) >= 3
    assert weights == run(declared, tmp_path / "inline", "inline")


class Node:
    """Worker processes of this host, with the run of a module of the user's."""

    def __init__(self, declared: Ensemble, folder: Path, selector: selectors.BaseSelector) -> None:
        self.selector, self.events, self.ensemble = selector, list[dict[str, Any]](), declared
        self.run_dir = RunDir.create(folder / "run", declared)
        self.pool = ProcessPool("here", selector, self.events.append, lambda: ForkServer(folder))

    def launch(self, member: int = 0) -> None:
        self.pool.launch([make_job(self.ensemble.identify(member), self.run_dir)], [None])

    def wait_for(self, condition: Callable[[], object]) -> None:
        until_s = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < until_s, self.events
            dispatch(self.selector, 0.05)

    def wait_for_ends(self, count: int) -> list[dict[str, Any]]:
        self.wait_for(lambda: len([e for e in self.events if e["type"] == "exited"]) >= count)
        return [event for event in self.events if event["type"] == "exited"]

    @property
    def template(self) -> Template:
        (template,) = self.pool._templates._templates.values()
        return template


@pytest.fixture
def node(write: Callable[[str], Ensemble], tmp_path: Path) -> Iterator[Callable[[Ensemble], Node]]:
    nodes = []
    with selectors.DefaultSelector() as selector:

        def make(declared: Ensemble) -> Node:
            nodes.append(Node(declared, tmp_path, selector))
            return nodes[-1]

        yield make
        for made in nodes:
            children = psutil.Process().children(recursive=True)
            made.pool.close()
            assert not psutil.wait_procs(children, timeout=60)[1], "something was left"


HANGS = "import time\nwhile os.path.exists(os.environ['NOTES'] + '.hold'): time.sleep(0.01)"


def test_a_member_is_killed_while_the_declaration_is_still_loaded(
    write: Callable[[str], Ensemble], node: Callable[[Ensemble], Node], tmp_path: Path
) -> None:
    declared = write(HANGS)
    hold = tmp_path / "notes.hold"
    hold.touch()
    here = node(declared)
    here.launch(0)
    here.launch(1)
    wait_until(lambda: count_imports(tmp_path) == 1, "its import hangs")
    here.pool.kill("member-0")
    (end,) = here.wait_for_ends(1)
    assert end["member"] == "member-0" and "SIGKILL" in end["detail"]
    hold.unlink()
    ends = here.wait_for_ends(2)
    assert ends[1]["member"] == "member-1" and ends[1]["outcome"] == "finished"
    assert count_imports(tmp_path) == 1


def test_a_node_ends_though_the_declaration_never_loads(
    write: Callable[[str], Ensemble], node: Callable[[Ensemble], Node], tmp_path: Path
) -> None:
    declared = write(HANGS)
    (tmp_path / "notes.hold").touch()
    here = node(declared)
    here.launch()
    wait_until(lambda: count_imports(tmp_path) == 1, "its import hangs")


@pytest.mark.parametrize("when", ["while it loads", "when it is ready"])
def test_members_go_on_when_the_process_that_forks_them_dies(
    when: str, write: Callable[[str], Ensemble], node: Callable[[Ensemble], Node], tmp_path: Path
) -> None:
    hold = tmp_path / "notes.hold"
    declared = write(HANGS)
    here = node(declared)
    if when == "while it loads":
        hold.touch()
        here.launch(0)
        wait_until(lambda: count_imports(tmp_path) == 1, "its import hangs")
        hold.unlink()
    else:
        here.launch(0)
        here.wait_for(here.pool.list_pids)
    here.wait_for(lambda: here.template.pid is not None)
    assert here.template.pid is not None
    os.kill(here.template.pid, signal.SIGKILL)
    here.wait_for(lambda: here.template.refusal is not None)
    here.launch(1)
    ends = here.wait_for_ends(2)
    assert {end["outcome"] for end in ends} == {"finished"}
    assert count_imports(tmp_path) == 2 + (when == "while it loads")


def test_members_go_on_when_the_fork_server_behind_the_template_dies(
    write: Callable[[str], Ensemble], node: Callable[[Ensemble], Node], tmp_path: Path
) -> None:
    here = node(write(""))
    here.launch(0)
    here.wait_for(lambda: here.template.is_ready)
    os.kill(here.pool.connect().process.pid, signal.SIGKILL)
    here.launch(1)
    assert {end["outcome"] for end in here.wait_for_ends(2)} == {"finished"}
    assert count_imports(tmp_path) == 1


def test_what_it_used_is_counted_once(
    write: Callable[[str], Ensemble], node: Callable[[Ensemble], Node], tmp_path: Path
) -> None:
    here = node(write("import time\nuntil = time.process_time() + 1.0\nwhile time.process_time() < until: pass"))
    here.launch(0)
    here.wait_for_ends(1)
    server, template = here.pool.connect().process.pid, here.template.pid
    before_s = here.pool.connect().usage("here")["cpu_s"]
    here.pool.close()
    used = {event["pid"]: event["cpu_s"] for event in here.events if event["type"] == "usage"}
    assert used[template] >= 1.0
    assert used[server] - before_s < 0.5, "its child's are not its own"


def test_a_network_of_the_module_is_refused_as_without_it(
    write: Callable[[str], Ensemble], node: Callable[[Ensemble], Node]
) -> None:
    here = node(write("import torch\nNETWORK = torch.nn.Linear(4, 3)\ndef build_shared(params): return NETWORK\n"))
    here.launch()
    (end,) = here.wait_for_ends(1)
    (failed,) = (event for event in here.events if event["type"] == "failed")
    assert end["outcome"] == "failed" and "was there before it was built" in failed["error"]
    assert here.template.is_ready


def test_a_run_of_many_files_has_one(node: Callable[[Ensemble], Node]) -> None:
    here = node(an_ensemble([{"lr": 0.1}], epochs=1))
    job = make_job(here.ensemble.identify(0), here.run_dir)
    files = {f"code/{'0' * 64}/{number}.py": ["0" * 64] for number in range(20_000)}
    here.pool.launch([dataclasses.replace(job, files=files)], [None])
    assert here.wait_for_ends(1)[0]["outcome"] == "finished"
    assert here.template.is_ready


def test_a_warning_says_why_a_slow_import_is_repeated(
    write: Callable[[str], Ensemble],
    node: Callable[[Ensemble], Node],
    caplog: pytest.LogCaptureFixture,
) -> None:
    burns = "import time\nuntil = time.process_time() + 1.1\nwhile time.process_time() < until: pass\n"
    here = node(write(burns + OBSTACLES["thread"]))
    with caplog.at_level(logging.WARNING):
        here.launch()
        assert here.wait_for_ends(1)[0]["outcome"] == "finished"
    (text,) = (
        record.getMessage() for record in caplog.records if "loads the declaration itself" in record.getMessage()
    )
    assert "started threads" in text
