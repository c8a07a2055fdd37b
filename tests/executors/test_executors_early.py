"""The command forks the fork server off itself, and what members then have is what they have without that."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

#: An installed package that notes who imports it.
PACKAGE = """
import os, random, sys
import numpy as np
with open(os.environ["NOTES"], "a") as notes:
    notes.write(f"{os.getpid()}\\n")
generators = random.Random(), np.random.default_rng()
"""
SPEC = """
{before}
import json, os, resource, sys, tempfile
import numpy as np
import torch
import some_package
from own import build
{after}
from ensemble import Ensemble, Recipe, Resources, Search, uniform
from pipelines import Pipeline, sources


def model(params):
    made = build(params)
    shown = dict(
        pid=os.getpid(), parent=os.getppid(), color=os.environ.get("COLOR"), folder=os.getcwd(), argv=sys.argv[0],
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0], niceness=os.getpriority(os.PRIO_PROCESS, 0),
        cores=sorted(os.sched_getaffinity(0)), temporary=tempfile.gettempdir(),
        threads=some_package.count_threads(), drawn=[str(one.random()) for one in some_package.generators],
        descriptors=[os.readlink(f"/proc/self/fd/{{fd}}") for fd in (2, 1, 0)], group=os.getpgid(0),
        bytecode=sys.dont_write_bytecode, signals=[str(__import__("signal").getsignal(n)) for n in (1, 15)],
        path=list(dict.fromkeys(folder for folder in sys.path if "__editable__" not in folder)),
        file=some_package.__file__, opened=len(os.listdir("/proc/self/fd")),
        main=sys.modules["__main__"].__file__, umask=oct(os.umask(0o027)), hash=str(hash("abc")),
    )
    print("SHOWN", json.dumps(shown), file=sys.stderr if params["lr"] == 0.1 else sys.stdout)
    return made


def spec(workers: int = 1, trials: int = 0):
    rng = np.random.default_rng(0)
    records = sources.arrays(x=rng.normal(size=(64, 4)).astype(np.float32), label=rng.integers(0, 3, 64))
    return Ensemble(
        name="early", recipe=Recipe(model=model, loss="cross_entropy"), optimizer="sgd",
        members=None if trials else [{{"lr": lr}} for lr in (0.1, 0.2, 0.3)],
        search=Search({{"lr": uniform(0.1, 0.3)}}, trials=trials, pruner="none") if trials else None,
        train=Pipeline(records, seed=0), valid=Pipeline(records) if trials else None, epochs=2,
        resources=Resources(workers=workers, cpus_per_worker=0.3),
    )
"""
OWN = """
import torch
def build(params):
    return torch.nn.Linear(4, 3)
"""
COUNTS = """
def count_threads():
    import threadpoolctl
    return sorted(pool["num_threads"] for pool in threadpoolctl.threadpool_info())
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory for temporary files with a short path, as sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


@pytest.fixture
def command(tmp_path: Path, temporary: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts `ensemble run` of a spec file, with lines before and after its imports."""
    site = tmp_path / "site-packages"
    for name, text in (
        ("some_package/__init__.py", PACKAGE + COUNTS),
        ("some_package-1.0.dist-info/METADATA", ""),
    ):
        (site / name).parent.mkdir(parents=True)
        (site / name).write_text(text)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "own.py").write_text(OWN)
    path = os.pathsep.join([str(site), *filter(None, (os.environ.get("PYTHONPATH"), os.getcwd()))])
    environment = {
        **os.environ,
        "NOTES": str(tmp_path / "notes"),
        "PYTHONPATH": path,
        "TMPDIR": str(temporary),
    }

    def start(*more: str, before: str = "", after: str = "", **variables: str) -> subprocess.Popen[str]:
        spec = tmp_path / "specs" / "some_spec.py"
        spec.write_text(SPEC.format(before=before, after=after))
        arguments = ["run", str(spec), "--executor", "local", "--run-dir", str(tmp_path / "run"), *more]
        return subprocess.Popen(
            [sys.executable, "-m", "ensemble", *arguments],
            cwd=spec.parent,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def show(tmp_path: Path, process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What the members' processes say of themselves, when the command has ended."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    logs = [(tmp_path / "run" / "members" / f"member-{number}" / "log.txt").read_text() for number in range(3)]
    return [json.loads(re.findall("SHOWN (.*)", log)[-1]) for log in logs]


def list_importers(tmp_path: Path) -> set[int]:
    return set(map(int, (tmp_path / "notes").read_text().split()))


def read_weights(tmp_path: Path) -> list[str]:
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    return sorted(event["weights_sha256"] for event in events if event["type"] == "finished")


#: What a member's process has of its own, or what says whether the fork server is of the command.
OWN_STATE = ("pid", "parent", "drawn", "descriptors", "group", "hash")


def test_members_of_a_server_that_the_command_forked_have_what_others_have(
    command: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    after = "resource.setrlimit(resource.RLIMIT_NOFILE, (700, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
    shown, weights = {}, {}
    for name, before in (("early", ""), ("usual", "print('first of all')")):
        process = command("--fresh", before=before, after=after)
        shown[name], weights[name] = show(tmp_path, process), read_weights(tmp_path)
        importers = list_importers(tmp_path)
        assert (importers == {process.pid}) == (name == "early"), "only then the command alone has imported it"
        assert len({str(member["drawn"]) for member in shown[name]}) == 3, (
            "generators without a seed are their own"
        )
        assert len({member["parent"] for member in shown[name]}) == 1
        (tmp_path / "notes").unlink()
        (tmp_path / "run").rename(tmp_path / name)
    assert weights["early"] == weights["usual"]
    for number, (early, usual) in enumerate(zip(shown["early"], shown["usual"], strict=True)):
        log = tmp_path / "run" / "members" / f"member-{number}" / "log.txt"
        assert early["files"] == 700
        assert {key: early[key] for key in early if key not in OWN_STATE} == {
            key: usual[key] for key in usual if key not in OWN_STATE
        }
        assert early["group"] == early["pid"]
        assert early["descriptors"] == [str(log), str(log), "/dev/null"]


def test_a_search_has_such_a_server_too(command: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = command("--set", "trials=3")
    show(tmp_path, process)
    assert list_importers(tmp_path) == {process.pid}


#: What a spec may do after its imports that a process inherits, and what then shows it.
CHANGES = {
    "os.environ['COLOR'] = 'red'": ("color", "red"),
    "os.environ['PYTHONHASHSEED'] = '42'": ("hash", "3869580338025362921"),
    "os.umask(0o027)": ("umask", "0o27"),
    "os.chdir('/')": ("folder", "/"),
    "os.setpriority(os.PRIO_PROCESS, 0, 3)": ("niceness", 3),
    "os.environ['TMPDIR'] = '/var/tmp'": ("temporary", "/var/tmp"),
}


@pytest.mark.parametrize("change", [pytest.param(change, marks=pytest.mark.more) for change in CHANGES])
def test_what_a_spec_changes_members_inherit(
    change: str, command: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    shown = show(tmp_path, command(after=change))
    name, value = CHANGES[change]
    assert {member[name] for member in shown} == {value}


@pytest.mark.parametrize(
    ("texts", "more", "variables"),
    [
        ({"before": "import os; os.environ['COLOR'] = 'blue'"}, (), {}),
        ({"after": "os.environ['COLOR'] = 'blue'"}, (), {}),
        pytest.param({}, (), {"SLURM_PROCID": "0"}, marks=pytest.mark.more),
        pytest.param({}, (), {"PYTHONWARNINGS": "error::ResourceWarning"}, marks=pytest.mark.more),
        pytest.param({}, ("--set", "workers=2"), {}, marks=pytest.mark.more),
    ],
    ids=["a variable is set first", "a variable is set last", "a rank of a job", "a flag", "members of two ranks"],
)
def test_where_a_fork_could_differ_the_server_is_a_new_process(
    texts: dict[str, str],
    more: tuple[str, ...],
    variables: dict[str, str],
    command: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    temporary: Path,
) -> None:
    process = command(*more, **texts, **variables)
    shown = show(tmp_path, process)
    assert list_importers(tmp_path) > {process.pid}
    assert {member["color"] for member in shown} == {"blue" if texts else None}
    assert list(temporary.iterdir()) == [], "the server that was given up leaves nothing"


#: What a spec may do with the command's children. The server may die of it: then the next one is a new process.
TREATS_CHILDREN = {
    "no child is waited for": "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "children are ended": "import psutil\nfor child in psutil.Process().children(): child.kill(); child.wait()",
    "a child is left": "os.fork() or (os.setsid(), os.execlp('sleep', 'sleep', '1'))",
}


@pytest.mark.more
@pytest.mark.parametrize("treats", TREATS_CHILDREN)
def test_a_spec_may_treat_the_children_of_the_command(
    treats: str, command: Callable[..., subprocess.Popen[str]], tmp_path: Path, temporary: Path
) -> None:
    show(tmp_path, command(after=TREATS_CHILDREN[treats]))
    assert list(temporary.iterdir()) == []


@pytest.mark.more
def test_a_package_keeps_the_streams_and_files_that_it_has_opened(
    command: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "site-packages" / "some_package" / "__init__.py").write_text(f"""{PACKAGE}{COUNTS}
import logging
log = logging.getLogger("some")
log.addHandler(logging.StreamHandler())
out, err, device = sys.stdout, sys.stderr, open("/dev/zero", "rb")
""")
    after = """
def build(params, build=build):
    some_package.log.warning("LOGGED")
    for stream in (some_package.out, some_package.err, sys.__stdout__, sys.__stderr__):
        print("PRINTED", file=stream)
    assert some_package.device.read(1) == b"\\0" and not sys.stdin.read()
    return build(params)
"""
    process = command(after=after)
    show(tmp_path, process)
    assert list_importers(tmp_path) == {process.pid}
    log = (tmp_path / "run" / "members" / "member-0" / "log.txt").read_text()
    assert (log.count("LOGGED"), log.count("PRINTED")) == (1, 4)


def find_processes(tmp_path: Path) -> list[psutil.Process]:
    """Those that have this test's variables, or had them when they were forked."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("NOTES") == str(tmp_path / "notes"):
                found.append(process)
        except psutil.Error:
            pass
    return found


def wait_until_none_is_left(tmp_path: Path) -> None:
    until = time.monotonic() + 60
    while (remaining := find_processes(tmp_path)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not remaining, [process.cmdline() for process in remaining]


def test_a_spec_that_cannot_be_loaded_leaves_no_process_and_no_folder(
    command: Callable[..., subprocess.Popen[str]], tmp_path: Path, temporary: Path
) -> None:
    process = command(after="raise ValueError('some reason')")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "some reason" in output.splitlines()[-1], output
    assert list(temporary.iterdir()) == []
    wait_until_none_is_left(tmp_path)


@pytest.mark.parametrize(
    "moment", [pytest.param("while the spec is loaded", marks=pytest.mark.more), "while members train"]
)
def test_a_killed_command_leaves_no_process(
    moment: str, command: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    waits = f"open({str(mark)!r}, 'w').close(); __import__('time').sleep(600)"
    is_loading = moment == "while the spec is loaded"
    process = command(
        after=waits if is_loading else f"def on_build():\n    {waits}\nbuild = lambda params: on_build()"
    )
    until = time.monotonic() + 120
    while not mark.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert mark.exists()
    servers = [
        child for child in psutil.Process(process.pid).children() if "forkserver" in " ".join(child.cmdline())
    ]
    assert len(servers) == (0 if is_loading else 1), "it has the command line of a fork server"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    wait_until_none_is_left(tmp_path)
