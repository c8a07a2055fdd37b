import dataclasses
import grp
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import say_what_fails

from ensemble.spec import Ensemble, Recipe
from ensemble.store import RunDir, StoreError, revision, versions, write_request
from ensemble.store.rundir import VERSION
from ensemble.user_code.fingerprint import PYTHON, code_of
from pipelines import Pipeline, sources

SPEC = """
from ensemble.spec import Ensemble, Recipe
HIDDEN = 7
class Data:
    def loader(self): ...
    def __len__(self): return 8
def model(params): return HIDDEN * params["width"]
RECIPE = Recipe(model=model, loss=len, task="free")
def spec(): return Ensemble(name="digits", recipe=RECIPE, members=[{}], train=Data())
"""


def ensemble(name: str = "digits", **options: Any) -> Ensemble:
    recipe = Recipe(model=lambda params: params["width"], loss=lambda model, batch: model, task="classification")
    train = Pipeline(sources.arrays(x=np.zeros(8)))
    return Ensemble(name=name, recipe=recipe, members=[{"width": 3}], train=train, **options)


def test_a_run_directory_holds_what_a_resume_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv",
        ["of/train.py", "--notify", "https://hooks.example.org/secret", "--key=secret", "-psecret", "RUN"],
    )
    before = os.umask(0o002)
    try:
        run = RunDir.create(tmp_path / "runs" / "digits", ensemble())
    finally:
        os.umask(before)
    folders = [run.path, run.path / "code", *(run.path / "code").rglob("*")]
    assert {folder.stat().st_mode & 0o777 for folder in folders if folder.is_dir()} == {0o700}
    assert run.info["name"] == "digits" and run.info["versions"] == versions() and run.info["run_id"]
    assert run.info["command"] == "train.py --notify --key -p", "values may be secrets"
    loaded = RunDir(run.path).load_ensemble()
    assert loaded.name == "digits" and isinstance(loaded.recipe, Recipe) and loaded.recipe.model({"width": 3}) == 3
    names = "code ensemble.pkl events.jsonl members requests run.json"
    assert sorted(p.name for p in run.path.iterdir()) == names.split()
    assert run.checkpoint("member-1", 2, 5, 0) == run.path / "members/member-1/checkpoint-2-5-0.safetensors"
    assert run.predictions("member-1").name == "predictions.safetensors"


def test_what_a_failed_start_has_left_is_no_other_file_and_its_code_is_removed(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, ensemble())
    run_id, mine = run.info["run_id"], tmp_path / "code" / "0123456789abcdef"
    mine.mkdir()
    recipe = Recipe(model=len, loss=lambda model, batch: model, task="classification")
    declared = dataclasses.replace(ensemble(), recipe=recipe)
    assert RunDir.create(tmp_path, declared).info["run_id"] == run_id
    assert {*mine.parent.iterdir()} == {mine, run.code(code_of(declared).fingerprint)}
    for file in (run.info_file, run.ensemble_file):  # before the first event, nothing else is written
        file.unlink()
    run.events.write_bytes(b"")
    shutil.rmtree(run.path / "code")
    assert RunDir.create(tmp_path, ensemble()).load_ensemble().name == "digits"


def test_a_directory_of_no_run_another_run_or_another_format_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for look in (lambda: run.info, run.load_ensemble, lambda: write_request(tmp_path, "stop")):
        with pytest.raises(StoreError, match="no run here"):
            look()
    RunDir.create(tmp_path, ensemble("digits"))
    with pytest.raises(StoreError, match=r"another ensemble \('digits', not 'letters'\); choose another"):
        RunDir.create(tmp_path, ensemble("letters"))
    info = run.info
    run.events.unlink()  # with the digests
    run.ensemble_file.write_bytes(b"cno_such_module\nthing\n.")
    with pytest.raises(StoreError, match=r"no_such_module.*PYTHONPATH"):
        run.load_ensemble()
    for format in (VERSION - 1, VERSION + 1):
        run.info_file.write_text(json.dumps(info | {"v": format}))
        for use in (run.load_ensemble, lambda: RunDir.create(tmp_path, ensemble())):
            with pytest.raises(StoreError, match=rf"\(format {format}, this one reads {VERSION}\); train it"):
                use()


def test_a_spec_file_is_copied_and_its_code_needs_no_import_later(tmp_path: Path) -> None:
    spec = tmp_path / "user" / "spec_of_user.py"
    spec.parent.mkdir()
    spec.write_text(SPEC)
    imports = f"import sys; sys.path.insert(0, {str(spec.parent)!r}); import spec_of_user, ensemble.store"
    make = f"ensemble.store.RunDir.create({str(tmp_path / 'run')!r}, spec_of_user.spec(), spec_file={str(spec)!r})"
    subprocess.run([sys.executable, "-c", f"{imports}\n{make}"], check=True)
    run = RunDir(tmp_path / "run")
    assert run.spec_file.read_text() == SPEC and run.spec_file.stat().st_mode & 0o777 == 0o600
    assert run.load_ensemble().recipe.model({"width": 2}) == 14  # type: ignore[union-attr]


def test_what_cannot_be_pickled_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    lock = threading.Lock()
    recipe = Recipe(model=lambda params: lock, loss=len, task="classification")
    words = r".*<lambda> \(test_store_rundir.py, line \d+\), in recipe=, holds 'lock', a lock: cannot pickle"
    with pytest.raises(StoreError, match=words):
        RunDir.create(tmp_path / "run", dataclasses.replace(ensemble(), recipe=recipe))
    assert not (tmp_path / "run").exists()


def test_code_that_belongs_to_root_is_run_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path / "run", ensemble())
    stat = os.stat
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    def belongs_to(uid: int) -> None:
        def own(found: os.stat_result) -> os.stat_result:
            return os.stat_result((*found[:4], uid, *found[5:]))

        monkeypatch.setattr(os, "stat", lambda path, **how: own(stat(path, **how)))
        monkeypatch.setattr(os, "fstat", lambda descriptor: own(stat(descriptor)))

    belongs_to(0)
    run.load_ensemble()
    belongs_to(12345)
    with pytest.raises(StoreError, match="belongs to another user"):
        run.load_ensemble()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_code_that_belongs_to_someone_else_is_not_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", ensemble())
    for path in (run.ensemble_file, run.path):
        os.chown(path, 12345, -1)
        with pytest.raises(StoreError, match="belongs to another user"):
            run.load_ensemble()
        os.chown(path, os.geteuid(), -1)
    run.load_ensemble()


def test_what_everyone_can_write_is_refused_before_anything_starts_and_its_code_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(StoreError, match=r"by everyone.*`chmod o-w"):
        RunDir.create(path, ensemble())
    assert list(path.iterdir()) == []
    run = RunDir.create(tmp_path / "run", ensemble())
    run.ensemble_file.chmod(0o666)
    with pytest.raises(StoreError, match="can be written by everyone"):
        run.load_ensemble()


def test_code_that_a_group_can_write_is_run_only_where_the_group_is_the_owners_own_or_the_folder_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENSEMBLE_TRUST_FOLDER", raising=False)
    run = RunDir.create(tmp_path / "run", ensemble())
    shared = next((group.gr_gid for group in grp.getgrall() if group.gr_gid != os.getegid()), None)
    if shared is None or os.geteuid() != 0:
        pytest.skip("only root can give a file to any group")
    for path in (run.ensemble_file, run.info_file, run.path):
        mode = path.stat().st_mode
        path.chmod(0o770)
        run.load_ensemble()  # root's own group, with nobody else in it
        os.chown(path, -1, shared)
        with pytest.raises(StoreError, match=f"by the group .*`chmod g-w {path}`, or --trust-folder FOLDER"):
            run.load_ensemble()
        with monkeypatch.context() as trusting:
            trusting.setenv("ENSEMBLE_TRUST_FOLDER", str(tmp_path))
            run.load_ensemble()
        path.chmod(0o777)
        with pytest.raises(StoreError, match=f"by everyone.*`chmod o-w {path}`"):
            run.load_ensemble()
        path.chmod(mode)


def test_code_is_not_imported_from_where_everyone_can_write(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", ensemble())
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "planted_by_anyone.py").write_text("thing = 7\n")
    run.events.unlink()  # with the digests
    run.info_file.write_text(json.dumps(run.info | {"code": str(beside)}))
    run.ensemble_file.write_bytes(pickle.dumps((PYTHON, {})) + b"cplanted_by_anyone\nthing\n.")
    beside.chmod(0o777)
    with pytest.raises(StoreError, match=f"by everyone; its code is not run: `chmod o-w {beside}`"):
        run.load_ensemble()
    assert "planted_by_anyone" not in sys.modules
    beside.chmod(0o755)
    try:
        assert run.load_ensemble() == 7
    finally:
        sys.path.remove(str(beside))
        sys.modules.pop("planted_by_anyone", None)


def test_a_directory_with_other_files_in_it_is_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "code/mine").mkdir(parents=True)
    (tmp_path / "code/mine/a.py").touch()
    with pytest.raises(StoreError, match=r"is not a run directory and not empty \(code\)"):
        RunDir.create(tmp_path, ensemble())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.py"]
    (tmp_path / "volume" / "lost+found").mkdir(parents=True)
    RunDir.create(tmp_path / "volume", ensemble())


def test_a_folder_without_modes_is_refused_before_anything_is_made_there_or_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below, mounted = tmp_path / "below", tmp_path / "mounted"
    below.mkdir()
    mounted.mkdir()
    mount = ["bindfs", "--perms=a+rwX", "--chmod-ignore", "--chown-ignore", str(below), str(mounted)]
    if shutil.which("bindfs") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("bindfs, which mounts a folder without modes, is not installed or may not mount")
    try:
        with pytest.raises(StoreError, match=f"{mounted}/run can be written by everyone.*--trust-folder"):
            RunDir.create(mounted / "run", ensemble())
        assert not any(below.iterdir())
        with monkeypatch.context() as trusting:
            trusting.setenv("ENSEMBLE_TRUST_FOLDER", f"{tmp_path / 'elsewhere'}:{mounted}")
            assert RunDir.create(mounted / "run", ensemble()).load_ensemble().name == ensemble().name
        with pytest.raises(StoreError, match=r"can be written by everyone.*--trust-folder"):
            RunDir(mounted / "run").load_ensemble()
    finally:
        subprocess.run(["fusermount", "-u", str(mounted)], check=True)


def test_a_place_that_cannot_be_written_and_a_full_disk_are_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot write"):
        RunDir.create(tmp_path / "file" / "run", ensemble())
    declared = ensemble()
    said = say_what_fails(lambda: RunDir.create(tmp_path / "run", declared), 1_000_000)
    assert said.startswith("cannot write") and os.listdir(tmp_path / "run") == []


def test_the_revision_names_the_commit_and_whether_files_differ(tmp_path: Path) -> None:
    assert revision(tmp_path) is None

    def git(words: str) -> str:
        who = "-c user.name=a -c user.email=a@b -c commit.gpgsign=false"
        return subprocess.check_output(["git", "-C", str(tmp_path), *f"{who} {words}".split()], text=True).strip()

    git("init")
    (tmp_path / "a").write_text("1")
    git("add a")
    git("commit -m a")
    assert revision(tmp_path) == git("rev-parse HEAD")
    (tmp_path / "a").write_text("2")
    assert revision(tmp_path) == git("rev-parse HEAD") + "-dirty"
