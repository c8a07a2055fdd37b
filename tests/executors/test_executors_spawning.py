"""What a member spawns finds the classes of the spec by name, as it would in a program of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ensemble.store import fold, read_events

PROGRAM = """
import collections, functools, pickle
import torch
from torch.utils.data import DataLoader, Dataset
import ensemble
from ensemble import Ensemble

STATE = {}
UNUSED = 5
Batch = collections.namedtuple("Batch", "x y")


@functools.lru_cache
def scale():
    return 2.0


class DS(Dataset):
    class Row:
        pass

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((3,), i * scale()), STATE["begun"] + i % 2


def begin(worker):
    STATE["begun"] = 1


def collate(rows):
    return Batch(*map(torch.stack, zip(*((x, torch.tensor(y)) for x, y in rows))))


def train(member):
    assert type(pickle.loads(pickle.dumps(DS.Row()))) is DS.Row and pickle.loads(pickle.dumps(scale)) is scale
    model = torch.nn.Linear(3, 3)
    member.prepare(model, torch.optim.SGD(model.parameters(), lr=member.params["lr"]))
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "worker_init_fn": begin}
    loader = DataLoader(DS(), batch_size=4, collate_fn=collate, **options)
    if __name__ == "habits":
        import habits

        assert habits.DS is DS and habits.UNUSED == 5
    for _ in member.epochs():
        batches = list(loader)
        assert all(type(batch) is Batch for batch in batches)
        member.report(loss=float(sum(batch.x.sum() + batch.y.sum() for batch in batches)))


def spec():
    return Ensemble(name="habits", train=None, recipe=train, epochs=1, members=[{"lr": 0.1}], retries=0)


if __name__ == "__main__":
    ensemble.submit(spec(), "run").wait()
"""


@pytest.mark.more
@pytest.mark.parametrize(
    "command", [["-m", "ensemble.cli", "run", "habits.py", "--run-dir", "run"], ["habits.py"]]
)
def test_a_dataloader_of_a_member_spawns_workers_over_classes_of_the_spec(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "habits.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    (member,) = fold(read_events(tmp_path / "run" / "events.jsonl")).members.values()
    assert member.state == "finished", (member.error, done.stdout, done.stderr)
    assert member.metrics["loss"] == 28 * 3 * 2 + 8 + 4
