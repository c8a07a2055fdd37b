"""A run leaves the machine as it was: as root, who may write anywhere, and as a user who owns nothing here.

Both happen in a mount namespace of their own, with a /dev of their own and everything else read-only but one
directory: a fault shown here harms nobody's machine.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.event_dicts import read_events

NOBODY = 65534
PROFILING = Path(__file__).parents[1] / "controller" / "profiling_members.py"
SPEC = """
import functools
from beside import an_ensemble
from ensemble.controller import planner

# A busy machine may take a minute to start a process, after which members are left unmeasured.
planner.Profiler = functools.partial(planner.Profiler, timeout_s=600.0)

def spec():
    return an_ensemble([{"width": 8 + number // 2, "lr": 0.1 + number} for number in range(4)])
"""
#: $1: the one directory that may be written; the rest: the command.
NAMESPACE = """
set -e
mount -t tmpfs -o mode=755 tmpfs /dev
mkdir -m 1777 /dev/shm
for device in null:3 zero:5 full:7 random:8 urandom:9; do
  mknod -m 666 /dev/${device%:*} c 1 ${device#*:}
done
mount --bind "$1" "$1"
mount -o remount,ro,bind /
shift
"$@"
echo "-- in /dev"
stat -c '%F %a %t:%T' /dev/null
find /dev | sort
"""
USERS = {
    "root": [],
    # whatever lies in root's home, such as this interpreter, can be read all the same
    "nobody": f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups --inh-caps +dac_read_search "
    "--ambient-caps +dac_read_search --bounding-set -all,+dac_read_search".split(),
}


@dataclass
class Done:
    """What a run left: in the directories it was given, and in /dev."""

    run_dir: Path
    work: Path
    home: Path
    scratch: Path
    dev: list[str]


@pytest.fixture(scope="module", params=["root", pytest.param("nobody", marks=pytest.mark.more)])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run of a spec file whose members are measured, in a shell of that user."""
    allowed = os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    if not allowed:
        pytest.skip("needs root, and to be allowed a mount namespace (unshare -m)")
    root = tmp_path_factory.mktemp(request.param)
    work, home, scratch = (root / name for name in ("work", "home", "tmp"))
    for directory in (work, home, scratch):
        directory.mkdir(mode=0o700)
    (work / "untouched.py").write_text(SPEC)
    shutil.copy(PROFILING, work / "beside.py")
    if request.param == "nobody":
        for path in (root, work, home, scratch, *work.iterdir()):
            os.chown(path, NOBODY, NOBODY)
    command = [*USERS[request.param], sys.executable, "-m", "ensemble.cli", "run", "untouched.py"]
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": ""}
    said = subprocess.run(
        ["unshare", "-m", "sh", "-c", NAMESPACE, "sh", str(root), *command, "--executor", "local"],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    dev = said.stdout.split("-- in /dev\n")[1].splitlines()
    return Done(work / "runs" / "measured", work, home, scratch, dev)


def test_devices_are_what_they_were(done: Done) -> None:
    null, *paths = done.dev
    assert null == "character special file 666 1:3"
    assert paths == [f"/dev{name}" for name in ("", "/full", "/null", "/random", "/shm", "/urandom", "/zero")]


def test_all_members_are_measured(done: Done) -> None:
    events = read_events(done.run_dir / "events.jsonl")
    assert {member for event in events if event["type"] == "profile" for member in event["members"]} == {
        f"member-{number}" for number in range(4)
    }
    assert not [event for event in events if event["type"] == "unmeasured"]


def test_nothing_is_written_but_the_run_directory(done: Done) -> None:
    assert list(done.home.iterdir()) == []
    assert list(done.scratch.iterdir()) == []
    assert sorted(path.name for path in done.work.iterdir()) == ["beside.py", "runs", "untouched.py"]
    assert [path.name for path in (done.work / "runs").iterdir()] == ["measured"]


def test_what_it_wrote_is_the_users_alone(done: Done) -> None:
    owner = done.work.stat().st_uid
    for path in (done.run_dir, *done.run_dir.rglob("*")):
        found = path.lstat()
        assert found.st_uid == owner
        assert not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o022
