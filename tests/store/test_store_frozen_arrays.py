"""A run trains with arrays of its own: copies in its declaration, or files that all of its processes map."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.event_dicts import fold, read_events

import ensemble
from ensemble.spec import Ensemble, Recipe
from ensemble.spec.spec_file import load_spec
from ensemble.store import DamagedError, RunDir, StoreError
from ensemble.store.frozen_arrays import LEAST_BYTES, list_arrays
from ensemble.store.kept_code import pickle_ensemble
from ensemble.store.verification import verify
from pipelines import Pipeline
from pipelines.ipc import memory_pickle
from pipelines.sources import arrays, iterable
from pipelines.sources._mapped import MappedArray

ROWS = 64


def loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    print(f"mean {float(batch['x'].mean()):g}")
    return model(batch["x"][:, :4]).mean(1)


def declare(train: Any, members: int = 1, **options: Any) -> Ensemble:
    recipe = Recipe(model=lambda params: torch.nn.Linear(4, 2), loss=loss, task="classification")
    rates = [{"lr": 0.1 * (n + 1)} for n in range(members)]
    return Ensemble(name="frozen", recipe=recipe, train=train, members=rates, batch_size=32, **options)


def make_array(nbytes: int) -> Any:
    return np.ones((ROWS, nbytes // ROWS // 4), np.float32)


@pytest.mark.parametrize(
    ("nbytes", "by_function", "executor"),
    [
        *((ROWS * 16, False, "inline"), (LEAST_BYTES, True, "inline")),
        pytest.param(LEAST_BYTES, False, "local", marks=pytest.mark.more),
    ],
)
def test_an_array_that_is_changed_in_place_is_other_data_of_the_next_run_only(
    tmp_path: Path, capfd: Any, nbytes: int, by_function: bool, executor: str
) -> None:
    given = make_array(nbytes)
    pipeline = Pipeline(arrays(x=given, label=np.arange(ROWS) % 2))
    declared = declare((lambda params: pipeline) if by_function else pipeline, members=2)
    seen, fingerprints = [], []
    for name in ("first", "second"):
        run = ensemble.submit(declared, tmp_path / name, executor=executor)
        given -= 5
        run.wait()
        assert {member.state for member in run.state.members.values()} == {"finished"}
        lines = [*capfd.readouterr().out.splitlines(), *run.logs("member-1").splitlines()]
        seen.append({line for line in lines if line.startswith("mean ")})
        fingerprints.append(str(fold(read_events(tmp_path / name / "events.jsonl")).header.data))
    assert seen == [{"mean 1"}, {"mean -4"}] and fingerprints[0] != fingerprints[1]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_large_array_is_in_a_file_that_is_mapped_and_not_in_the_pickle(tmp_path: Path, order: Any) -> None:
    given = np.asarray(np.random.default_rng(0).random((ROWS, 300, 17)), order=order)
    train, _ = arrays(x=given, label=np.arange(ROWS)).split(0.5)
    run = RunDir.create(tmp_path, declare(Pipeline(train)))
    (file,) = run.data.iterdir()
    assert run.ensemble_file.stat().st_size < 20_000 and file.name.startswith("x-")
    assert (file.stat().st_mode & 0o777, run.data.stat().st_mode & 0o777) == (0o600, 0o700)
    np.testing.assert_array_equal(np.load(file), given)
    loaded = RunDir(tmp_path).load_ensemble()
    column = loaded.train.source.source.columns["x"]
    assert isinstance(column, MappedArray) and not column.array.flags.writeable
    assert column.array.strides == given.strides and column.array.tobytes() == given.tobytes()
    assert loaded.train.fingerprint == Pipeline(train).fingerprint
    with open(memory_pickle.dump(loaded.train), "rb") as given_to_feeders:
        assert given_to_feeders.seek(0, 2) < 20_000


def test_the_offsets_and_the_split_of_many_records_are_mapped_and_not_in_the_pickle(tmp_path: Path) -> None:
    train, _ = iterable(range(300_000), 300_000, names=("y",)).split(0.9)
    run = RunDir.create(tmp_path / "run", declare(Pipeline(train)))
    assert run.ensemble_file.stat().st_size < 20_000
    assert sorted(file.stat().st_size // 1000 for file in run.data.iterdir()) == [2160, 2400, 2400]
    loaded = RunDir(tmp_path / "run").load_ensemble().train.source
    for array in (loaded.indices, loaded.source._starts):
        memory = array
        while isinstance(memory, np.ndarray):
            memory = memory.base
        assert isinstance(memory, mmap.mmap)
    assert len(loaded) == 270_000 and loaded.indices.tolist() == train.indices.tolist()
    assert loaded.where(269_999) == train.where(269_999) and loaded[269_999] == train[269_999]


def test_arrays_that_functions_hold_are_files_too_and_may_be_written_by_each_process(tmp_path: Path) -> None:
    table = np.arange(LEAST_BYTES // 8)
    weights = torch.arange(LEAST_BYTES // 8)

    def scale(sample: dict[str, Any]) -> dict[str, Any]:
        table[0] += 1
        return {**sample, "scale": table[int(weights[1])] + table[0]}

    small = arrays(x=np.ones((ROWS, 4), np.float32), label=np.arange(ROWS))
    run = RunDir.create(tmp_path, declare(Pipeline(small).map(scale)))
    (file,) = run.data.iterdir()  # both have the same content
    before = file.read_bytes()
    for _ in range(2):
        stage = run.load_ensemble().train.stages[0].call
        assert stage({})["scale"] == 2 and file.read_bytes() == before
    assert run.ensemble_file.stat().st_size < 20_000


def test_the_files_of_arrays_are_known_whatever_the_columns_are_called(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"a" * n: make_array(LEAST_BYTES) * n for n in range(1, 46)}
    declared = declare(Pipeline(arrays(**columns)))
    of_user = [tmp_path / name for name in ("data/mine.npy", f"data/x-{'0' * 32}.npy", "code/mine.py")]
    files = list[set[Path]]()
    for increase in (0, 0, 1):
        for array in columns.values():
            array += increase
        run = RunDir.create(tmp_path, declared)
        for file in of_user:
            file.touch()
        files.append({*run.data.iterdir()} - {*of_user})
        assert list_arrays(run) == files[-1] and len(files[-1]) == 45, "those of no declaration are removed"
    assert files[0] == files[1] != files[2] and all(file.exists() for file in of_user)
    loaded = run.load_ensemble().train.source
    assert all(loaded.columns[name].array[0, 0] == len(name) + 1 for name in columns)


def test_a_damaged_array_is_said_and_written_again_by_its_spec(tmp_path: Path) -> None:
    declared = declare(Pipeline(arrays(x=make_array(LEAST_BYTES), label=np.arange(ROWS))))
    ensemble.submit(declared, tmp_path / "run", executor="inline").wait()
    run = RunDir(tmp_path / "run")
    (file,) = run.data.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"\0")
    assert [(each.kind, each.condition) for each in verify(run) if not each.is_sound] == [("data", "damaged")]
    with pytest.raises(DamagedError, match=r"x-.*is damaged.*`ensemble run SPEC` on this directory"):
        ensemble.resume(run.path, "inline")
    ensemble.submit(declared, run.path, executor="inline").wait()
    assert file.read_bytes() == whole and all(each.is_sound for each in verify(run))
    file.write_bytes(whole[:100])
    with pytest.raises(DamagedError, match="is damaged: it has 100 bytes"):
        run.load_ensemble()


EDITED_SPEC = """
import numpy as np, torch
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources
ADDED = 1.0
def add(sample):
    return {**sample, "x": sample["x"] + np.float32(ADDED)}
class Add:
    __call__ = lambda self, sample: add(sample)
def spec():
    train = Pipeline(sources.arrays(x=np.zeros((64, 4), np.float32))).map(add).map(Add())
    recipe = Recipe(model=lambda params: torch.nn.Linear(4, 2), loss=len, task="classification")
    return Ensemble(name="edited", recipe=recipe, train=train, members=[{"lr": 0.1}], batch_size=8)
"""


def test_feeders_have_the_stages_that_were_submitted_whatever_the_spec_file_says_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = tmp_path / "spec_that_is_edited.py"
    spec.write_text(EDITED_SPEC)
    declared = pickle_ensemble(load_spec(spec), spec).load(tmp_path)
    sys.modules.pop(spec.stem, None)
    spec.write_text(EDITED_SPEC.replace("= 1.0", "= 5.0"))
    fd = memory_pickle.dump(declared.train)
    code = (
        "from pipelines.ipc.memory_pickle import load; from pipelines.prepare.sample_maker import SampleMaker; "
        f"print(SampleMaker(load({fd})).make(0, 0)['x'].mean())"
    )
    path, command = {**os.environ, "PYTHONPATH": str(tmp_path)}, [sys.executable, "-c", code]
    assert subprocess.check_output(command, env=path, pass_fds=[fd], text=True, timeout=300) == "2.0\n"


class Unloadable:
    def __setstate__(self, state: dict[str, Any]) -> None:
        raise TypeError("there is no key 'a'")

    def __getstate__(self) -> dict[str, Any]:
        return {"b": 1}

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


def test_what_cannot_be_unpickled_is_said_before_anything_starts(tmp_path: Path) -> None:
    declared = declare(Pipeline(arrays(x=np.ones((8, 4), np.float32))).map(Unloadable()))
    with pytest.raises(StoreError, match=r"'frozen' can be pickled, but not unpickled.*no key 'a'"):
        ensemble.submit(declared, tmp_path / "run", executor="local")


def test_tensors_keep_the_order_of_their_axes_and_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    pictures = torch.arange(LEAST_BYTES // 4).float().view(4, 4, 128, 128)
    last, part, given = pictures.to(memory_format=torch.channels_last), pictures[:, :, ::2], pictures + 1

    def look(sample: dict[str, Any]) -> dict[str, Any]:
        return {"last": last, "part": part, "given": given}

    small = arrays(x=np.ones((ROWS, 4), np.float32), label=np.arange(ROWS))
    run = RunDir.create(tmp_path, declare(Pipeline(small).map(look)))
    seen = run.load_ensemble().train.stages[0].call({})
    for name, tensor in look({}).items():
        assert torch.equal(seen[name], tensor) and seen[name].stride() == tensor.stride()
    (file,) = run.data.iterdir()
    os.truncate(file, 1000)
    with pytest.raises(DamagedError, match=rf"^{file} is damaged: it has 1000 bytes.*; `ensemble run SPEC`"):
        run.load_ensemble()
    file.unlink()
    with pytest.raises(DamagedError, match=rf"^{file} cannot be read: No such file.*; `ensemble run SPEC`"):
        run.load_ensemble()
