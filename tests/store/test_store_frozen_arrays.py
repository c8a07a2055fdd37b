"""A run trains with arrays of its own: copies in its declaration, or files that all of its processes map."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from event_dicts import fold, read_events
from forked import FORK

import ensemble
from ensemble.cli.parser import main
from ensemble.spec import Ensemble, Recipe
from ensemble.spec.spec_file import load_spec
from ensemble.store import DamagedError, RunDir, StoreError
from ensemble.store.frozen_arrays import LEAST_BYTES, check_arrays, hold_array, list_arrays, release_arrays
from ensemble.store.kept_code import pickle_ensemble
from ensemble.store.verification import verify
from pipelines import Pipeline
from pipelines.ipc import memory_pickle
from pipelines.sources import arrays, iterable
from pipelines.sources._mapped import MappedArray, is_memmap

ROWS = 64


def loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    print(f"mean {float(batch['x'].mean()):g}")
    return model(batch["x"][:, :4]).mean(1)


def declare(train: Any, members: int = 1, **options: Any) -> Ensemble:
    recipe = Recipe(model=lambda params: torch.nn.Linear(4, 2), loss=loss)
    rates = [{"lr": 0.1 * (n + 1)} for n in range(members)]
    return Ensemble(name="frozen", recipe=recipe, train=train, members=rates, batch_size=32, **options)


def drop_note(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "note"}


def make_array(nbytes: int) -> Any:
    return np.ones((ROWS, nbytes // ROWS // 4), np.float32)


def check_run_keeps_its_data(
    path: Path,
    capfd: pytest.CaptureFixture[str],
    nbytes: int,
    executor: str,
    *,
    by_function: bool = False,
    keep_data: bool = True,
) -> None:
    given = make_array(nbytes)
    pipeline = Pipeline(arrays(x=given, label=np.arange(ROWS) % 2))
    declared = declare((lambda params: pipeline) if by_function else pipeline, members=2, keep_data=keep_data)
    seen, fingerprints = [], []
    for name in ("first", "second"):
        run = ensemble.submit(declared, path / name, executor=executor)
        given -= 5
        run.wait()
        assert {member.state for member in run.state.members.values()} == {"finished"}
        lines = [*capfd.readouterr().out.splitlines(), *run.logs("member-1").splitlines()]
        seen.append({line for line in lines if line.startswith("mean ")})
        fingerprints.append(str(fold(read_events(path / name / "events.jsonl")).header.data))
    assert seen == [{"mean 1"}, {"mean -4"}]
    assert fingerprints[0] != fingerprints[1]


@pytest.mark.parametrize(
    ("nbytes", "by_function"),
    [
        (ROWS * 16, False),
        (LEAST_BYTES, True),
        pytest.param(ROWS * 16, True, marks=pytest.mark.more),
        pytest.param(LEAST_BYTES, False, marks=pytest.mark.more),
    ],
)
def test_an_array_that_is_changed_in_place_is_other_data_of_the_next_run_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], nbytes: int, by_function: bool
) -> None:
    check_run_keeps_its_data(tmp_path, capfd, nbytes, "inline", by_function=by_function)


@pytest.mark.more
@pytest.mark.parametrize(("nbytes", "keep_data"), [(ROWS * 16, True), (LEAST_BYTES, True), (LEAST_BYTES, False)])
def test_local_members_and_feeders_read_what_was_submitted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], nbytes: int, keep_data: bool
) -> None:
    check_run_keeps_its_data(tmp_path, capfd, nbytes, "local", keep_data=keep_data)


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
    assert is_memmap(loaded.indices) and is_memmap(loaded.source._starts)
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


def test_arrays_that_no_declaration_has_any_more_are_removed_and_no_others(tmp_path: Path) -> None:
    given = make_array(LEAST_BYTES)
    declared = declare(Pipeline(arrays(x=given, label=np.arange(ROWS))))
    of_user = [
        tmp_path / "data" / "mine.npy",
        tmp_path / "data" / f"x-{'0' * 32}.npy",
        tmp_path / "code" / "mine.py",
    ]
    files = []
    for _ in range(2):
        run = RunDir.create(tmp_path, declared)
        for file in of_user:
            file.touch()
        files.append({file.name for file in run.data.iterdir()} - {file.name for file in of_user})
        given += 1
    assert [len(each) for each in files] == [1, 1] and files[0] != files[1]
    assert all(file.exists() for file in of_user)


@pytest.mark.parametrize("file", ["data/mine.npy", "code/mine/a.py"])
def test_a_folder_of_the_user_is_no_run_directory_whatever_its_folders_are_called(
    tmp_path: Path, file: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    declared = declare(Pipeline(arrays(x=make_array(ROWS * 16), label=np.arange(ROWS))))
    with pytest.raises(StoreError, match=r"is no run directory and not empty"):
        RunDir.create(tmp_path, declared)
    assert (tmp_path / file).exists()


@pytest.mark.parametrize("keep_data", [True, False])
def test_the_files_of_arrays_are_known_whatever_the_columns_are_called(tmp_path: Path, keep_data: bool) -> None:
    columns: dict[str, Any] = {"a" * n: make_array(LEAST_BYTES) * n for n in range(1, 46)}
    declared = declare(Pipeline(arrays(**columns)), keep_data=keep_data)
    for _ in range(2):
        run = RunDir.create(tmp_path, declared)
        check_arrays(run)
        assert len(list(run.data.iterdir())) == 45
        assert list_arrays(run) == ({*run.data.iterdir()} if keep_data else set())
    loaded = run.load_ensemble().train.source
    assert all(loaded.columns[name].array[0, 0] == len(name) for name in columns)
    release_arrays(run.data)
    if keep_data:
        assert list_arrays(run) == {*run.data.iterdir()}
    else:
        with pytest.raises(StoreError, match=r"does not keep its data \(a, aa, .*a{40};"):
            check_arrays(run)


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


def test_a_run_that_keeps_no_data_holds_them_in_memory_and_goes_on_by_its_spec_only(tmp_path: Path) -> None:
    secret = "the name of a person"
    records = arrays(x=make_array(ROWS * 16), label=np.arange(ROWS) % 2, note=[secret] * ROWS)
    declared = declare(Pipeline(records).map(drop_note), keep_data=False, private_modules=[__name__], epochs=2)
    run = RunDir(tmp_path / "run")

    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "epoch":
            assert len(list(run.data.iterdir())) == 4
            handle.stop()

    handle = ensemble.submit(declared, run.path, executor="inline", on_event=stop)
    with open(next(run.data.iterdir()), "rb") as file:
        assert file.read(6) == b"\x93NUMPY"
    handle.wait()
    assert not list(run.data.iterdir())
    kept = [file for file in run.path.rglob("*") if file.is_file()]
    assert not [file for file in kept if secret.encode() in file.read_bytes()]
    with pytest.raises(StoreError, match=r"does not keep its data \(label, note, x; .*`ensemble run SPEC.py"):
        ensemble.resume(run.path, "inline")
    ensemble.submit(declared, run.path, executor="inline").wait()
    assert fold(read_events(run.events)).members["member-0"].state == "finished"
    assert all(each.is_sound for each in verify(run)) and ensemble.load(run.path, combine="average").members


def test_what_is_kept_of_a_run_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = arrays(x=make_array(LEAST_BYTES), label=np.arange(ROWS) % 2)
    ensemble.submit(declare(Pipeline(records)), tmp_path / "run", executor="inline").wait()
    (tmp_path / "run" / "data" / "mine.npy").touch()
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "run"), "--contents", "--json", "-"]) == 0
    rows = {row["file"]: row for row in json.loads(capsys.readouterr().out)}
    there = {str(file.relative_to(tmp_path / "run")) for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert set(rows) == there
    assert [name for name, row in rows.items() if row["holds"] == "not known"] == ["data/mine.npy"]
    (array,) = [row for name, row in rows.items() if name.startswith("data/x-")]
    assert array["holds"] == "'x', float32 [64, 4096]" and array["bytes"] > LEAST_BYTES
    assert "train 'label' (64 records)" in rows["ensemble.pkl"]["holds"]
    assert rows["members/member-0/log.txt"]["of"] == "member-0"


EDITED_SPEC = """
import numpy as np, time, torch
from pathlib import Path
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources

ADDED, WAITING = 1.0, ""

class Add:
    def __call__(self, sample):
        return add(sample)

def add(sample):
    return {**sample, "x": sample["x"] + np.float32(ADDED)}

def loss(model, batch):
    print(f"mean {float(batch['x'].mean()):g}", flush=True)
    while Path(WAITING).exists():  # for another feeder
        time.sleep(0.05)
    return model(batch["x"]).mean(1)

def spec():
    train = Pipeline(sources.arrays(x=np.zeros((64, 4), np.float32))).map(add).map(Add())
    members = [{"lr": 0.1}, {"lr": 0.2}]
    recipe = Recipe(model=lambda params: torch.nn.Linear(4, 2), loss=loss)
    return Ensemble(name="edited", recipe=recipe, train=train, members=members, epochs=6, batch_size=8)
"""


@pytest.fixture
def edited_spec(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "spec_that_is_edited.py"
    path.write_text(EDITED_SPEC.replace('""', f'"{tmp_path / "waiting"}"', 1))
    yield path
    sys.modules.pop(path.stem, None)
    sys.path[:] = [each for each in sys.path if each != str(tmp_path)]


def edit(spec: Path) -> None:
    spec.write_text(EDITED_SPEC.replace("= 1.0", "= 5.0"))


def test_feeders_have_the_stages_that_were_submitted_whatever_the_spec_file_says_then(edited_spec: Path) -> None:
    declared = pickle_ensemble(load_spec(edited_spec), edited_spec).load(edited_spec.parent)
    edit(edited_spec)
    fd = memory_pickle.dump(declared.train)
    code = (
        "from pipelines.ipc.memory_pickle import load; from pipelines.prepare.sample_maker import SampleMaker; "
        f"print(SampleMaker(load({fd})).make(0, 0)['x'].mean())"
    )
    path = {**os.environ, "PYTHONPATH": str(edited_spec.parent)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=path, pass_fds=[fd], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "2.0\n"


@pytest.mark.more
def test_a_feeder_that_starts_later_has_the_stages_that_were_submitted(edited_spec: Path, tmp_path: Path) -> None:
    feeders: set[int] = set()
    killed: set[int] = set()
    waiting = tmp_path / "waiting"

    def edit_and_kill(event: dict[str, Any]) -> None:
        if event["type"] == "feeder" and event.get("pid"):
            feeders.add(event["pid"])
        if event["type"] == "epoch" and feeders and not killed:
            waiting.touch()
            edit(edited_spec)
            killed.update(feeders)
            os.kill(min(feeders), signal.SIGKILL)
        elif feeders - killed:
            waiting.unlink(missing_ok=True)

    declared = load_spec(edited_spec)
    run = ensemble.submit(declared, tmp_path / "run", "local", edit_and_kill, edited_spec)
    run.wait()
    means = [line for line in run.logs("member-0").splitlines() if line.startswith("mean ")]
    # its 48 steps, and the looks at the first batch
    assert len(feeders) == 2 and set(means) == {"mean 2"} and 48 <= len(means) < 54


class Unloadable:
    def __setstate__(self, state: dict[str, Any]) -> None:
        raise TypeError("there is no key 'a'")

    def __getstate__(self) -> dict[str, Any]:
        return {"b": 1}

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


def test_what_cannot_be_unpickled_is_said_before_anything_starts(tmp_path: Path) -> None:
    records = arrays(x=make_array(ROWS * 16), label=np.arange(ROWS) % 2)
    declared = declare(Pipeline(records).map(Unloadable()))
    with pytest.raises(StoreError, match=r"'frozen' can be pickled, but not unpickled.*no key 'a'"):
        ensemble.submit(declared, tmp_path / "run", executor="local")


def test_private_modules_are_in_no_file_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "my_keys.py").write_text("KEY = 'a pass' + 'word'\ndef ask():\n    return KEY\n")
    spec = tmp_path / "spec_with_keys.py"
    text = EDITED_SPEC.replace("import numpy", "import my_keys, numpy").replace(
        '{**sample, "x"', '{"key": my_keys.ask(), "x"'
    )
    for private in ((), ("my_keys",)):
        spec.write_text(text.replace("epochs=6", f"private_modules={private!r}"))
        try:
            run = RunDir.create(tmp_path / f"run-{len(private)}", load_spec(spec), spec)
            kept = [file for file in run.path.rglob("*") if file.is_file()]
            with_key = {file.name for file in kept if b"a pass" in file.read_bytes()}
            assert with_key == (set() if private else {"ensemble.pkl", "my_keys.py"})
            assert run.load_ensemble().train.stages[0].call({"x": 1})["key"] == "a password"
        finally:
            for name in (spec.stem, "my_keys"):
                sys.modules.pop(name, None)
            sys.path[:] = [each for each in sys.path if each != str(tmp_path)]
            sys.path_importer_cache.clear()


def test_a_killed_process_leaves_nothing_of_data_that_are_not_kept(tmp_path: Path, edited_spec: Path) -> None:
    edited_spec.write_text(edited_spec.read_text().replace("epochs=6", "keep_data=False"))
    run = RunDir(tmp_path / "run")

    def create_and_die() -> None:
        RunDir.create(run.path, load_spec(edited_spec), edited_spec)
        (tmp_path / "seen").write_text(str(len(list(run.data.iterdir()))))
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=create_and_die)
    process.start()
    process.join(300)
    assert (process.exitcode, (tmp_path / "seen").read_text()) == (-signal.SIGKILL, "1")
    (link,) = run.data.iterdir()
    assert link.is_symlink() and not link.exists()
    with open(tmp_path / "another", "w+b") as another:  # of a process that has got the number of the killed one
        for target in (os.readlink(link), f"/proc/{os.getpid()}/fd/{another.fileno()}"):
            link.unlink()
            link.symlink_to(target)
            with pytest.raises(StoreError, match=r"does not keep its data \(x; .*`ensemble run SPEC.py"):
                check_arrays(run)
    RunDir.create(run.path, dataclasses.replace(load_spec(edited_spec), keep_data=True))
    assert not link.is_symlink()


def test_arrays_in_memory_are_there_again_when_the_folder_of_the_run_was_removed(tmp_path: Path) -> None:
    declared = declare(Pipeline(arrays(x=make_array(ROWS * 16), label=np.arange(ROWS))), keep_data=False)
    for _ in range(2):
        run = RunDir.create(tmp_path / "run", declared)
        check_arrays(run)
        assert run.load_ensemble().train.source.columns["x"].array.all()
        shutil.rmtree(run.path)
    release_arrays(run.data)


def test_the_memory_of_another_process_is_left_to_it_until_that_has_ended(tmp_path: Path) -> None:
    link = tmp_path / "data" / f"x-{'0' * 32}.memory"
    code = (
        "import sys, numpy; from pathlib import Path; from ensemble.store.frozen_arrays import hold_array; "
        f"hold_array(Path({str(link)!r}), numpy.zeros(3)); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        theirs = os.readlink(link)
        with pytest.raises(StoreError, match=rf"^{tmp_path} is being started by another process"):
            hold_array(link, np.zeros(3))
        release_arrays(link.parent)
        assert os.readlink(link) == theirs
        process.communicate(timeout=300)
    hold_array(link, np.zeros(3))
    assert os.readlink(link) != theirs and np.load(link).shape == (3,)
    release_arrays(link.parent)
    assert not link.is_symlink()


def test_tensors_keep_the_order_of_their_axes_and_what_a_function_holds_says_when_it_is_cut_off(
    tmp_path: Path,
) -> None:
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
