"""What the user of a study got wrong is said in one line, before anything is measured or written."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmarks
from ensemble.bench.energy.sharing import write_photographs
from ensemble.cli.parser import main as ensemble
from ensemble.meter.power import list_gpus

PHOTOS = "bench pipelines --data photos.tar"
MISTAKES = {
    "bench fabric --emulate hosts=1": "hosts is an integer from 2 to 250, got '1'",
    "bench fabric --emulate host=2": "an emulated link has no 'host'; did you mean 'hosts'",
    "bench fabric --emulate hosts=2,rate=fast": "got 'fast'",
    "bench fabric --emulate place=somewhere": "'somewhere'",
    "bench fabric --emulate hosts": "needs a value",
    "bench fabric --sizes 4Q": "got '4Q'",
    "bench fabric --collectives all_reduc": "did you mean 'all_reduce'",
    "bench fabric --parts fusio": "did you mean 'fusion'",
    "bench fabric --backends glue": "there is no backend 'glue'",
    "bench fabric --ranks 0": "nothing to measure",
    "bench fabric --meet nowhere": "there is no directory 'nowhere'",
    "bench fabric --meet .": "started; this process is none",
    "bench fabric --rate 1gbit": "with --meet",
    "bench fabric --plot no/such/folder/page.html": "no/such/folder",
    "bench pipelines --data nowhere.tar": "nowhere.tar",
    "bench pipelines --data rows.txt": "rows.txt",
    "bench pipelines --members 1": "--data",
    f"{PHOTOS} --members 0": "--members",
    f"{PHOTOS} --members 1,x": "--members",
    f"{PHOTOS} --designs nod": "did you mean 'node'",
    f"{PHOTOS} --cores 4096": "4096",
    f"{PHOTOS} --step-ms -1": "--step-ms",
    f"{PHOTOS} --step-ms 5,x": "--step-ms",
    f"{PHOTOS} --step model --step-ms 5": "--step-ms",
    f"{PHOTOS} --link 1gbit": "--hosts",
    f"{PHOTOS} --designs single": "--hosts",
    f"{PHOTOS} --hosts 2 --link fast": "1gbit",
    f"{PHOTOS} --step modle": "did you mean 'model'",
    f"{PHOTOS} --preparers 2": "--hosts",
    f"{PHOTOS} --repeats 0": "--repeats",
    f"{PHOTOS} --preparers 3 --hosts 2": "--preparers are more than the 2 hosts",
    f"{PHOTOS} --preparers 2 --hosts 2 --designs all": "--preparers is for single and multi",
    f"{PHOTOS} --hosts 2 --members 1 --designs all": "with a member each",
    f"{PHOTOS} --samples 9000 --designs loader,dataloader": "say --samples-alone",
    f"{PHOTOS} --samples-alone 200 --designs node": "--samples-alone is for the designs independent, loader",
    f"{PHOTOS} --batch-size 3": "a batch of 3 is more than the 2 photographs",
    f"{PHOTOS} --memory --members 4": "--members is not for --memory",
    f"{PHOTOS} --memory --samples 9": "--samples is not for --memory",
    f"{PHOTOS} --memory --prep-workers 2": "--prep-workers is not for --memory",
    "bench energy --parts overhaed": "did you mean 'overhead'",
    "bench energy --data none.tar": "none.tar",
    "bench energy --data empty.tar": "empty.tar",
    "bench energy --cores 4096": "4096 cores",
    "bench energy --steps walk": "--steps",
    "precision --models lstn": "there is no model 'lstn'; did you mean 'lstm'?",
    "precision --precisions fp8": "--precisions cannot be 'fp8'",
    "precision --seeds 0": "must be an integer of at least 1, got '0'",
    "precision --data nowhere": "there is no directory 'nowhere'",
    "compression --primitives hierarchical": "give --ranks-per-host 2 or more",
    "compression --ranks-per-host 2": "2 workers are not two or more hosts of --ranks-per-host 2",
    "compression --parts codec": "--parts cannot be 'codec'; did you mean 'codecs'?",
    "compression --schemes qsgd3": "--schemes cannot be 'qsgd3'",
    "compression --schemes none+ef": "'none' has no options, got 'error_feedback'",
    "compression --schemes auto": "'auto' is one of the others",
    "compression --rates fast": "a link's rate is a number and kbit, mbit or gbit",
    "compression --models resnett": "there is no model 'resnett'; did you mean 'resnet'?",
    "scaling --parts worker": "--parts cannot be 'worker'; did you mean 'workers'?",
    "scaling --link 1gbit": "--link is for several hosts: say how many with --hosts",
    "scaling --compression qsgd3": "--compression cannot be 'qsgd3'",
    "scaling --workers 128": "a batch of 64 is too small for 128 workers",
    "scaling --worker-batch 500": "a batch of 4000 is more than the 1078 samples",
    "scaling --communicators fusd": "did you mean 'fused'",
    "batches --batches 32,4096": "--batches: two at least, of at most 1078 samples, got [32, 4096]",
    "batches --rates 0.1,-1": "must be numbers above 0 with commas between them",
    "batches --optimizers larss": "did you mean 'lars'",
    "batches --net lstm": "'lstm' is no network of images",
    "batches --law-models resnet": "'resnet' is no network of texts",
    "batches --law-seeds 1": "must be at least 2",
    "batches --law-workers 1000 --law-models lstm-small": "a batch of 8000 is more than the 1024 samples",
    "schedule --parts reel": "did you mean 'real'",
    "schedule --executor x": "ray",
    "shapley --gpu": "no NVIDIA driver",
    "shapley --gpu --cool-s -2": "must be a number of seconds",
    "shapley --gpu --cool-s nan": "must be a number of seconds",
    "shapley --nonsense": "`python -m benchmarks shapley --help`",
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
    if arguments == "shapley --gpu" and list_gpus():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(folder)
    before = list(folder.iterdir())
    words = arguments.split()
    try:
        status: object = (ensemble if words[0] == "bench" else benchmarks)(words)
    except SystemExit as ended:
        status = ended.code
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    (line,) = shown.err.splitlines()
    assert MISTAKES[arguments] in line
    assert list(folder.iterdir()) == before
