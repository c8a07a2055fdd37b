"""Where the live page says that it is: with its token for the user alone."""

from __future__ import annotations

import contextlib
import http.client
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import ENSEMBLE, environment

from ensemble.cli.dashboard import PageProcess
from ensemble.cli.page_address import announced
from ensemble.spec import SpecError

URL = "http://127.0.0.1:8270/"


def test_elsewhere_the_token_is_in_a_private_file(capsys: pytest.CaptureFixture[str]) -> None:
    with announced(f"{URL}?token=one", is_shown=False):
        said = capsys.readouterr().out
        assert URL in said and "token=" not in said and said.count("\n") == 1
        file = Path(said.split()[-1].rstrip(")"))
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert file.read_text() == f"{URL}?token=one\n"
    assert not file.parent.exists()


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(SpecError, match="TMPDIR"), announced(f"{URL}?token=one", is_shown=False):
        pass


@pytest.mark.more
def test_a_log_in_succeeds_when_the_terminal_is_gone(tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    command = [*ENSEMBLE, "dashboard", str(tmp_path), "--port", "0"]
    server = subprocess.Popen(command, env=environment(), stdout=theirs, stderr=subprocess.DEVNULL)
    try:
        os.close(theirs)
        said = ""
        while not (found := re.search(r":(\d+)(/\?token=\S+)\r?\n", said)):
            said += os.read(mine, 4096).decode()
        os.close(mine)
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=300.0)
        connection.request("GET", found[2])
        answer = connection.getresponse()
        assert answer.status == 303 and answer.getheader("set-cookie")
        connection.close()
    finally:
        server.terminate()
        server.wait(300.0)


@pytest.mark.more
def test_the_page_beside_a_run_is_served_when_its_output_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with PageProcess(tmp_path / "run", 0) as page:
            is_read = page._printer.is_alive()
    assert is_read, "what the page prints"
