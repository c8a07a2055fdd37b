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
from pathlib import Path

import pytest
from kit.finished_runs import of_kind

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


@pytest.mark.parametrize("user", ["root", pytest.param("nobody", marks=pytest.mark.more)])
def test_nothing_is_written_but_the_run_directory(user: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """By a run of a spec file whose members are measured, in a shell of that user."""
    allowed = os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    if not allowed:
        pytest.skip("needs root, and to be allowed a mount namespace (unshare -m)")
    root = tmp_path_factory.mktemp(user)  # a name that is short enough for sockets
    work, home, scratch = (root / name for name in ("work", "home", "tmp"))
    for directory in (work, home, scratch):
        directory.mkdir(mode=0o700)
    (work / "untouched.py").write_text(SPEC)
    shutil.copy(PROFILING, work / "beside.py")
    if user == "nobody":
        for path in (root, work, home, scratch, *work.iterdir()):
            os.chown(path, NOBODY, NOBODY)
    command = [*USERS[user], sys.executable, "-m", "ensemble.cli", "run", "untouched.py", "--executor", "local"]
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": ""}
    words = ["unshare", "-m", "sh", "-c", NAMESPACE, "sh", str(root), *command]
    said = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr

    null, *devices = said.stdout.split("-- in /dev\n")[1].splitlines()
    assert null == "character special file 666 1:3"
    assert devices == [f"/dev{name}" for name in ("", "/full", "/null", "/random", "/shm", "/urandom", "/zero")]
    assert list(home.iterdir()) == list(scratch.iterdir()) == []
    assert sorted(path.name for path in work.iterdir()) == ["beside.py", "runs", "untouched.py"]
    assert [path.name for path in (work / "runs").iterdir()] == ["measured"]
    for path in (work / "runs" / "measured", *(work / "runs" / "measured").rglob("*")):
        found = path.lstat()
        assert found.st_uid == work.stat().st_uid, "what it wrote is the user's alone"
        assert not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o022
    profiled = [event["members"] for event in of_kind(work / "runs" / "measured", "profile")]
    assert {member for members in profiled for member in members} == {f"member-{number}" for number in range(4)}
    assert of_kind(work / "runs" / "measured", "unmeasured") == []
