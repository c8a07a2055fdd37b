"""What the user of a study got wrong is said in one line, before anything is measured or written."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.sc18.config import write_photographs

PHOTOS = "sc18 --data photos.tar"
MISTAKES = {
    "fabric --links 1x2@1gbit": "a link is loopback, or HOSTSxRANKS@RATE with at least two hosts",
    "fabric --links 2x2@fast": "got 'fast'",
    "fabric --sizes 4Q": "got '4Q'",
    "fabric --collectives all_reduc": "did you mean 'all_reduce'",
    "fabric --parts traning": "did you mean 'training'",
    "fabric --backends glue": "there is no backend 'glue'",
    "fabric --nets resnet5": "did you mean 'resnet50'",
    "fabric --link 1gbit": "--link is for several hosts: say how many with --hosts",
    "fabric --parts workers --links loopback --workers 128": "a batch of 64 is too small for 128 workers",
    "fabric --parts workers --links loopback --worker-batch 500": "a batch of 4000 is more than the 1078 samples",
    "sc18 --data nowhere.tar": "nowhere.tar",
    "sc18 --data rows.txt": "rows.txt",
    "sc18 --data empty.tar": "empty.tar",
    f"{PHOTOS} --members 0": "--members",
    f"{PHOTOS} --members 1,x": "--members",
    f"{PHOTOS} --designs nod": "did you mean 'node'",
    f"{PHOTOS} --cores 4096": "4096",
    f"{PHOTOS} --step-ms -1": "--step-ms",
    f"{PHOTOS} --link 1gbit": "--hosts",
    f"{PHOTOS} --designs single": "--hosts",
    f"{PHOTOS} --hosts 2 --link fast": "1gbit",
    f"{PHOTOS} --repeats 0": "--repeats",
    f"{PHOTOS} --hosts 2 --members 1 --designs all": "with a member each",
    f"{PHOTOS}": "a batch of 32 is more than the 2 photographs",
    "precision --models lstn": "there is no model 'lstn'; did you mean 'lstm'?",
    "precision --precisions fp8": "--precisions cannot be 'fp8'",
    "precision --seeds 0": "must be an integer of at least 1, got '0'",
    "precision --data nowhere": "there is no directory 'nowhere'",
    "compression --parts step": "--parts cannot be 'step'; did you mean 'steps'?",
    "compression --schemes qsgd3": "--schemes cannot be 'qsgd3'",
    "compression --schemes none+ef": "'none' has no options, got 'error_feedback'",
    "compression --train-schemes auto": "--train-schemes cannot be 'auto'",
    "compression --links fast": "a link's rate is a number and kbit, mbit or gbit",
    "compression --train resnett": "there is no model 'resnett'; did you mean 'resnet'?",
    "batches --batches 32,4096": "--batches: two at least, of at most 1078 samples, got [32, 4096]",
    "batches --rates 0.1,-1": "must be numbers above 0 with commas between them",
    "batches --net lstm": "'lstm' is no network of images",
    "batches --seeds 1": "must be at least 2",
    "fleet --parts reel": "did you mean 'real'",
    "fleet --executor x": "ray",
    "what_it_buys --tasks imdb": "give --data",
    "fleet --nonsense": "`python -m benchmarks fleet --help`",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: with a few photographs, and files that are none."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_photographs(folder / "photos.tar", 2)
    tarfile.open(folder / "empty.tar", "w").close()
    (folder / "rows.txt").write_text("no archive")
    return folder


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_answered_with_one_line(
    arguments: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = list(folder.iterdir())
    words = arguments.split()
    try:
        status: object = main(words)
    except SystemExit as ended:
        status = ended.code
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    (line,) = shown.err.splitlines()
    assert MISTAKES[arguments] in line
    assert list(folder.iterdir()) == before
