"""`deploy/build-horovod.sh` runs nothing of a source that is not the one it was written for."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "build-horovod.sh"


def test_a_source_of_another_digest_is_refused_before_anything_of_it_runs(tmp_path: Path) -> None:
    source = tmp_path / "horovod-0.28.1"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (tmp_path / "index").mkdir()
    with tarfile.open(tmp_path / "index" / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("cmake", "g++", "make", "patch"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    usual = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index")}
    own = {"PATH": f"{tools}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([SCRIPT, sys.executable], env=usual | index | own, capture_output=True, text=True)
    assert done.returncode == 1
    assert "with the sha256 92a43f5a" in done.stderr
    assert not (tmp_path / "executed").exists()
