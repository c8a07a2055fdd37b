"""Runs the code of pages, each in a process of its own, forked from this one, which has imported the libraries.

Reads a line of JSON for each page, `{"page": ..., "folder": ..., "data": ...}`, and writes one, `{"error": ...}`,
empty if all went well. A page's code is the module `__main__`, as a user's script is: its blocks are written to
`page.py` with the line numbers that they have in the page.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import json
import os
import subprocess
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from code_blocks import QUICK_START, SHELLS, Block, read_blocks

#: What pages import, and what runs import when they are started.
LIBRARIES = (
    *("optuna", "pyarrow.parquet", "rich.console", "sklearn.datasets", "sklearn.metrics", "torch.export"),
    *("ensemble.api", "ensemble.artifact", "ensemble.executors.inline", "ensemble.train.worker"),
    *("ensemble.reporting.dashboard.analysis", "pipelines"),
)


def run_page(page: Path, folder: Path, data: Path) -> None:
    """Runs the blocks of a page in a folder.

    Raises:
        AssertionError: a block printed something else than the page says, or a command failed.
    """
    os.chdir(folder)
    blocks = [block for block in read_blocks(page) if not block.reason and not block.is_snippet]
    script = folder / "page.py"
    lines: list[str] = []
    for block in blocks:
        if block.language == "python" and not block.is_file:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    script.write_text("\n".join(lines) + "\n")
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(script), data=data)
    sys.modules["__main__"] = main
    sys.argv = [str(script)]
    sys.path[0] = str(folder)
    printed = ""
    for block in read_blocks(QUICK_START):
        write_file(block)
    for block in blocks:
        write_file(block)
        if block.language == "python" and not block.is_file:
            printed = run_python(block, script, main.__dict__)
        elif block.title == "prints":
            checker = doctest.OutputChecker()
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert checker.check_output(block.text, printed, flags), f"{block.where}: it printed\n{printed}"
        elif block.language in SHELLS and block.comment == "run":
            run_shell(block)


def write_file(block: Block) -> None:
    if block.is_file:
        Path(block.title).write_text(block.text)


def run_python(block: Block, script: Path, names: dict[str, Any]) -> str:
    output = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, str(script), "exec")
    with contextlib.redirect_stdout(output):
        exec(code, names)
    sys.stderr.write(output.getvalue())
    return output.getvalue()


def run_shell(block: Block) -> None:
    done = subprocess.run(["bash", "-ec", block.text], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{block.where}: exit status {done.returncode}\n{done.stdout}{done.stderr}"


def main() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    answers = os.dup(1)
    os.dup2(2, 1)  # what pages print to the file descriptor
    for line in sys.stdin:
        given = {name: Path(value) for name, value in json.loads(line).items()}
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reads)
            error = ""
            try:
                run_page(**given)
            except BaseException:
                error = traceback.format_exc()
            with os.fdopen(writes, "w") as pipe:
                pipe.write(error)
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as pipe:
            error = pipe.read()
        _, status = os.waitpid(child, 0)
        answer = {"error": error or (f"wait status {status}" if status else "")}
        os.write(answers, f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    main()
