"""The documentation does what it says: its Python runs, its commands are the parser's, its links lead to files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from code_blocks import PAGES, ROOT, SHELLS, Block, read_blocks, read_commands
from kit.event_dicts import fold, read_events

from benchmarks.__main__ import make_parser
from ensemble.cli.parser import make_command_parser

BLOCKS = {page: read_blocks(page) for page in PAGES}


def is_run(block: Block) -> bool:
    return block.language == "python" and not block.reason and not block.is_snippet


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


#: Of the pages whose code does not run in the second tier: one in the first, and one that starts many processes.
TIERS = {"README.md": (), "docs/how-to/port-a-script.md": pytest.mark.slow}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages may read as `data`: `cifar10/{train,test}.parquet`, `photos/{cat,dog}/N.jpg`."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import simplejpeg

    def draw(side: int, seed: int) -> bytes:
        pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), np.uint8)
        return bytes(simplejpeg.encode_jpeg(pixels))

    folder = tmp_path_factory.mktemp("data")
    (folder / "cifar10").mkdir()
    images = [{"bytes": draw(32, seed), "path": None} for seed in range(90)]
    for split, rows in (("train", 90), ("test", 20)):
        table = pa.table({"image": images[:rows], "label": [i % 10 for i in range(rows)]})
        pq.write_table(table, folder / "cifar10" / f"{split}.parquet")
    for label in ("cat", "dog"):
        (folder / "photos" / label).mkdir(parents=True)
        for seed in range(3):
            (folder / "photos" / label / f"{seed}.jpg").write_bytes(draw(64, seed))
    return folder


@pytest.fixture(scope="module")
def run_page(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, Path], str]]:
    """`run_page(page, folder)` runs the code of a page in a folder and returns the error, or ""."""
    tools = tmp_path_factory.mktemp("tools")
    command = tools / "ensemble"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ensemble.cli "$@"\n')
    command.chmod(0o755)
    path = (ROOT, ROOT / "tests" / "docs", ROOT / "deploy" / "torchvision_on_cpu")
    env = os.environ | {"PYTHONPATH": ":".join(map(str, path)), "PATH": f"{tools}:{os.environ['PATH']}"}
    runner = [sys.executable, str(ROOT / "tests" / "docs" / "run_pages.py")]
    with subprocess.Popen(runner, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(page: Path, folder: Path) -> str:
            given = {"page": str(page), "folder": str(folder), "data": str(data)}
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, "the process that runs the pages has ended"
            return str(json.loads(answer)["error"])

        yield run
        process.stdin.close()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=TIERS.get(name_of(page), pytest.mark.more))
        for page in PAGES
        if any(map(is_run, BLOCKS[page]))
    ],
    ids=name_of,
)
def test_the_code_of_a_page_runs(page: Path, run_page: Callable[[Path, Path], str], tmp_path: Path) -> None:
    error = run_page(page, tmp_path)
    assert not error, error
    for log in tmp_path.rglob("events.jsonl"):
        state = fold(read_events(log))
        failed = {name: member.error for name, member in state.members.items() if member.state == "failed"}
        assert failed == {}, log
        if page.name == "README.md":  # what is seen first: its members are worth combining
            assert state.combined is not None
            best, combined = ((state.combined.metrics or {})[of] for of in ("best", "ensemble"))
            assert len(state.combined.members) > 1 and combined["nll"] < best["nll"]
            assert combined["accuracy"] > best["accuracy"]


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left = {block.where: block.reason for blocks in BLOCKS.values() for block in blocks if block.reason}
    assert all(len(reason) > 10 for reason in left.values())
    assert len(left) <= 6, left
    comments = {block.comment.split(":")[0] for blocks in BLOCKS.values() for block in blocks}
    assert comments <= {"", "run", "not run"}, comments


def test_each_command_of_a_shell_block_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen, wrong = 0, []
    shell = [b for blocks in BLOCKS.values() for b in blocks if b.language in SHELLS and not b.is_snippet]
    for block in shell:
        for words in read_commands(block):
            of_studies = words[:3] == ["python", "-m", "benchmarks"]
            if words[0] == "ensemble" or of_studies:
                seen += 1
                try:
                    (
                        make_parser().parse_args(words[3:])
                        if of_studies
                        else make_command_parser().parse_args(words[1:])
                    )
                except SystemExit:
                    wrong.append((block.where, " ".join(words), capsys.readouterr().err))
            elif words[0] == "make":
                goals = [word for word in words[1:] if "=" not in word]
                wrong += [(block.where, goal, "no target") for goal in goals if goal not in targets]
            elif words[0] in ("python", "python3") and words[1].startswith("examples/"):
                assert (ROOT / words[1]).is_file(), (block.where, words)
    assert seen > 3 and wrong == []
