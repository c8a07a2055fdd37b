"""A mirrored run: what is at its address can be fetched and resumed at any moment, and damage there is said."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from kit.event_dicts import fold, read_events
from kit.execute_members import an_ensemble, model, momentum
from kit.execute_members import loss as plain_loss

import ensemble
from ensemble import Recipe, Search, SpecError, loguniform
from ensemble.cli.parser import main
from ensemble.store import DamagedError, EventLog, RunDir, StoreError
from ensemble.store.mirror import Copier, TakenOverError, begin_mirror, is_of_run
from ensemble.store.mirror_objects import MANIFEST, Manifest, MirrorError, ObjectStore, check_url
from ensemble.store.mirror_status import explain_incomplete, load_status
from ensemble.store.verification import verify


def make(epochs: int = 2, **options: Any) -> ensemble.Ensemble:
    recipe = Recipe(model=model, loss=plain_loss, task="classification", optimizer=momentum)
    members = [{"lr": 0.05, "width": 8}, {"lr": 0.1, "width": 4}]
    return an_ensemble(members, recipe=recipe, epochs=epochs, sharing="independent", seed=3, **options)


def begin(run_dir: RunDir, url: str) -> Copier:
    options = begin_mirror(run_dir, url)
    assert options is not None
    return Copier(run_dir, options)


def read_files(folder: Path, is_read: Callable[[str], bool] = bool) -> dict[str, bytes]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if is_read(name)}


def read_own(folder: Path) -> dict[str, bytes]:
    return read_files(folder, is_of_run)


def read_fetched(folder: str | Path) -> dict[str, bytes]:
    return read_files(Path(folder), lambda name: name != "mirror.json")


def read_manifest(mirror: Path) -> Manifest:
    return msgspec.json.decode((mirror / MANIFEST).read_bytes(), type=Manifest)


def find_object(mirror: Path, path: str) -> Path:
    """The object that has a file."""
    return mirror / read_manifest(mirror).files[path][0]


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has ended, `run`, and its mirror, `mirror`."""
    folder = tmp_path_factory.mktemp("mirrored")
    ensemble.submit(make(), folder / "run", "inline").wait()
    begin(RunDir(folder / "run"), f"file://{folder}/mirror").copy(is_last=True)
    return folder


@pytest.fixture
def copied(mirrored: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    shutil.copytree(mirrored, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_run_is_fetched_as_it_was_and_commands_work_on_it(mirrored: Path, tmp_path: Path, capsys: Any) -> None:
    url, run, fetched = f"file://{mirrored}/mirror", mirrored / "run", tmp_path / "new/fetched"
    assert main(["fetch", url, str(fetched)]) == 0
    assert f"ensemble resume {fetched}" in capsys.readouterr().out
    own = read_own(run)
    assert {"run.json", "ensemble.pkl", "events.jsonl", "report.html", "members/member-0/log.txt"} <= own.keys()
    assert read_fetched(fetched) == own
    private = [fetched.joinpath(name) for name in ("", "ensemble.pkl", "members")]
    assert not any(path.stat().st_mode & 0o077 for path in private)
    assert [check for check in verify(RunDir(fetched)) if not check.is_sound] == []
    batch = {"x": torch.ones(3, 4)}
    assert torch.equal(ensemble.load(fetched)(batch), ensemble.load(run)(batch))
    assert main(["status", str(run)]) == 0 and f"mirror: {url}: complete" in capsys.readouterr().out
    assert main(["status", url]) == 2 and "`ensemble fetch URL RUN_DIR`" in capsys.readouterr().err
    assert main(["resume", str(fetched)]) == 0 and explain_incomplete(RunDir(fetched)) is None
    with pytest.raises(TypeError, match="trust"):
        ensemble.load(fetched, trust="sha256:0")  # type: ignore[call-arg]


def test_a_run_is_fetched_into_a_new_or_empty_directory_only(mirrored: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    ensemble.fetch(f"file://{mirrored}/mirror", tmp_path / "work")
    before = read_files(tmp_path)
    with pytest.raises(StoreError, match="is not empty"):
        ensemble.fetch(f"file://{mirrored}/mirror", tmp_path / "work")
    assert read_files(tmp_path) == before and os.listdir(tmp_path) == ["work"]
    with pytest.raises(StoreError, match="no run here"):
        ensemble.fetch(f"file://{tmp_path}/nothing", tmp_path / "other")
    assert os.listdir(tmp_path) == ["work"]


@pytest.mark.parametrize("kind", ["members", "search"])
def test_a_run_goes_on_from_its_mirror_with_the_weights_of_an_undisturbed_one(kind: str, tmp_path: Path) -> None:
    url, events = f"file://{tmp_path}/mirror", list[str]()

    def follow(event: dict[str, Any]) -> None:
        events.append(event["type"])
        if events.count("checkpoint") == 3 and event["type"] == "checkpoint":
            begin(RunDir(tmp_path / "run"), url).copy()

    search = Search({"lr": loguniform(0.01, 0.2), "width": 4}, trials=5, pruner="none")
    options = {"search": search} if kind == "search" else {}
    ensemble.submit(make(4, **options), tmp_path / "run", "inline", follow).wait()
    undisturbed = fold(read_events(tmp_path / "run/events.jsonl"))
    shutil.rmtree(tmp_path / "run")
    result = ensemble.resume(ensemble.fetch(url, tmp_path / "elsewhere")).wait()
    again = fold(read_events(RunDir(tmp_path / "elsewhere").events))
    assert again.starts == 2 and result.mirror_rest is None
    for name, member in undisturbed.members.items():
        assert again.members[name].weights_sha256 == member.weights_sha256
        assert again.members[name].metrics == member.metrics
    status = load_status(RunDir(tmp_path / "elsewhere"))
    assert status is not None and status.is_whole and status.url == url
    ended = fold(read_events(ensemble.fetch(url, tmp_path / "third") / "events.jsonl"))
    assert ended.ended is not None and ended.combined == again.combined


def test_damage_at_the_address_is_named_and_not_used(copied: Path) -> None:
    url, mirror = f"file://{copied}/mirror", copied / "mirror"
    predictions = "members/member-0/predictions.safetensors"
    for name in (predictions, "ledger.csv"):
        content = (damaged_object := find_object(mirror, name)).read_bytes()
        damaged_object.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    find_object(mirror, "report.html").unlink()
    with pytest.raises(DamagedError) as damaged:
        ensemble.fetch(url, copied / "new")
    for name in (predictions, "ledger.csv", "report.html", f"all other files are in {copied}/new"):
        assert name in str(damaged.value)
    assert not (copied / "new/report.html").exists() and not (copied / "new/ledger.csv").exists()
    ensemble.resume(copied / "new").wait()
    runs = [fold(read_events(copied / name / "events.jsonl")).members.values() for name in ("run", "new")]
    first, second = ([(member.id, member.weights_sha256) for member in members] for members in runs)
    assert first == second
    find_object(mirror, "events.jsonl").write_bytes(b"")
    with pytest.raises(DamagedError, match=r"events\.jsonl.* nothing was fetched"):
        ensemble.fetch(url, copied / "other")
    assert not (copied / "other").exists() and not list(copied.glob(".other*"))


@pytest.mark.parametrize(
    "path", ["../escaped", "/escaped", "code/../../escaped", "members/member-0/evil.py", "mirror.json", "a", ""]
)
def test_a_manifest_writes_nothing_but_files_of_a_run(copied: Path, path: str) -> None:
    manifest = read_manifest(copied / "mirror")
    manifest.files[path] = (f"{path}@0", *manifest.files["run.json"][1:])
    (copied / "mirror" / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(StoreError, match="it has a file"):
        ensemble.fetch(f"file://{copied}/mirror", copied / "into/new")
    assert not list((copied / "into").iterdir()) and not (copied / "escaped").exists()


def test_an_address_has_one_run_and_no_files_of_others(mirrored: Path, tmp_path: Path) -> None:
    own, before = RunDir(mirrored / "run").info["run_id"], read_files(mirrored / "mirror")
    with pytest.raises(StoreError, match=rf"mirrors another run \('executed', run id {own}\)"):
        ensemble.submit(make(), tmp_path / "other", "inline", mirror=f"file://{mirrored}/mirror")
    assert read_files(mirrored / "mirror") == before
    assert not (tmp_path / "other").exists(), "it is refused before anything is written"


def test_a_driver_that_comes_back_does_not_disturb_another(copied: Path, capsys: Any) -> None:
    url, run_dir = f"file://{copied}/mirror", RunDir(copied / "run")
    first = begin(run_dir, url)
    first.copy(is_last=True)
    ensemble.resume(ensemble.fetch(url, copied / "elsewhere"), epochs=3).wait()
    before = read_files(copied / "mirror")
    with pytest.raises(TakenOverError, match="the run went on elsewhere"):
        first.copy(is_last=True)
    with pytest.raises(TakenOverError, match=rf"{run_dir.path} cannot continue it.*ensemble fetch {url}"):
        ensemble.resume(run_dir, epochs=3)
    assert main(["resume", str(run_dir.path)]) == 75, "it has finished, and its result is shown"
    assert "went on elsewhere" in capsys.readouterr().err
    assert read_files(copied / "mirror") == before
    assert main(["resume", str(run_dir.path), "--mirror", "none"]) == 0 and explain_incomplete(run_dir) is None


def test_a_write_whose_answer_is_lost_is_no_other_driver(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, mirror, write = RunDir(copied / "run"), copied / "mirror", ObjectStore.write
    copier = begin(run_dir, f"file://{mirror}")

    def write_and_fail(store: ObjectStore, name: str, content: Iterable[bytes], size: int = 0) -> None:
        write(store, name, content, size)
        if name == MANIFEST:
            raise MirrorError("no answer")

    for content in (b"1", b"22"):
        (run_dir.path / "results.json").write_bytes(content)
        monkeypatch.setattr(ObjectStore, "write", write_and_fail)
        with pytest.raises(MirrorError, match="no answer"):
            copier.copy(is_last=True)
        monkeypatch.setattr(ObjectStore, "write", write)
        copier.copy(is_last=True)
        assert find_object(mirror, "results.json").read_bytes() == content and copier.behind.since is None
        assert len(list(mirror.glob("results.json*"))) == 1


@pytest.mark.parametrize("how", ["killed", "taken over"])
def test_what_a_manifest_names_is_whole_whatever_a_copy_that_was_cut_off_has_sent(
    how: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, url, write = RunDir(copied / "run"), f"file://{copied}/mirror", ObjectStore.write
    before = read_own(run_dir.path)
    copier, other = begin(run_dir, url), None
    for path in before.keys() - {"events.jsonl"}:
        (run_dir.path / path).write_bytes(b"changed" + before[path])
    with EventLog(run_dir.events) as events:
        events.append("code_saved", files={}, info=None)

    def write_until_cut_off(store: ObjectStore, name: str, content: Iterable[bytes], size: int = 0) -> None:
        nonlocal other
        if name == MANIFEST:
            raise KeyboardInterrupt  # killed
        if how == "taken over" and other is None:  # by one that has the run as it was, and sends all of it
            monkeypatch.setattr(ObjectStore, "write", write)
            other = begin(RunDir(ensemble.fetch(url, copied / "elsewhere")), url)
            other.copy(is_last=True)
            monkeypatch.setattr(ObjectStore, "write", write_until_cut_off)
        write(store, name, content, size)

    monkeypatch.setattr(ObjectStore, "write", write_until_cut_off)
    with pytest.raises(KeyboardInterrupt if how == "killed" else TakenOverError):
        copier.copy(is_last=True)
    assert read_fetched(ensemble.fetch(url, copied / "new")) == before


@pytest.mark.parametrize("stale", ["scandir", "walk"])
def test_a_listing_that_fails_removes_nothing(copied: Path, monkeypatch: Any, stale: str) -> None:
    """As on NFS, for a moment; a folder whose kind cannot be found is taken for a file by `os.walk`."""
    run_dir, before = RunDir(copied / "run"), read_manifest(copied / "mirror").files
    copier = begin(run_dir, f"file://{copied}/mirror")
    scan, walk = os.scandir, os.walk

    def scan_stale(path: Any) -> Any:
        if os.fspath(path).endswith("/members"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.fspath(path))
        return scan(path)

    def walk_stale(top: Any, **options: Any) -> Any:
        for folder, folders, names in walk(top, **options):
            names += [folders.pop(folders.index("members"))] if "members" in folders else []
            yield folder, folders, names

    monkeypatch.setattr(os, stale, {"walk": walk_stale, "scandir": scan_stale}[stale])
    with pytest.raises((OSError, MirrorError), match=r"Stale|was not listed"):
        copier.copy(is_now=True)
    assert copier.behind.since is not None
    monkeypatch.undo()
    copier.copy(is_last=True)
    after = read_manifest(copied / "mirror").files
    assert after.keys() == before.keys()
    assert all((copied / "mirror" / name).exists() for name, _, _ in after.values())


def test_a_mirror_of_another_format_is_not_called_damaged(copied: Path, tmp_path: Path) -> None:
    path = copied / "mirror" / MANIFEST
    manifest = read_manifest(copied / "mirror")
    manifest.v, manifest.files["digests.json"] = 3, ("digests.json@0", 0, "")  # as the version before had them
    path.write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(StoreError, match=r"written by another version of ray-ensemble \(format 3, this one reads"):
        ensemble.fetch(f"file://{copied}/mirror", tmp_path / "fetched")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StoreError, match="is damaged, or was written by another version"):
        ensemble.fetch(f"file://{copied}/mirror", tmp_path / "fetched")
    (copied / "first/manifests").mkdir(parents=True)
    (copied / "first/manifests/00000001-0123").touch()
    with pytest.raises(StoreError, match="earlier version of ray-ensemble: fetch it with that version"):
        ensemble.fetch(f"file://{copied}/first", tmp_path / "fetched")


def test_what_the_run_removes_while_it_is_copied_is_there(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, write = RunDir(copied / "run"), ObjectStore.write
    contents = {f"members/member-0/checkpoint-9-{n}-0.safetensors": bytes([n]) * 1000 for n in range(3)}

    def write_slowly(store: ObjectStore, name: str, content: Iterable[bytes], size: int = 0) -> None:
        for path in contents:
            (run_dir.path / path).unlink(missing_ok=True)
        write(store, name, content, size)

    for path, content in contents.items():
        (run_dir.path / path).write_bytes(content)
    copier = begin(run_dir, f"file://{copied}/mirror")
    monkeypatch.setattr(ObjectStore, "write", write_slowly)
    copier.copy()
    assert {path: find_object(copied / "mirror", path).read_bytes() for path in contents} == contents
    copier.copy(is_last=True)
    objects = [file.name for file in (copied / "mirror/members/member-0").iterdir()]
    assert not [name for name in objects if "checkpoint-9-" in name], "the next copy has what is there then"


def test_what_is_copied_while_it_is_fetched_is_not_mixed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, call, changes = RunDir(copied / "run"), ObjectStore.call, list[str]()
    copier = begin(run_dir, f"file://{copied}/mirror")

    def change_meanwhile(store: ObjectStore, method: str, name: str = "", *arguments: Any, **options: Any) -> Any:
        if method == "get_file" and not changes:
            changes.append(name)
            (run_dir.path / "results.json").write_bytes(b"changed")
            (run_dir.path / "ledger.csv").unlink()
            copier.copy(is_last=True)
        return call(store, method, name, *arguments, **options)

    monkeypatch.setattr(ObjectStore, "call", change_meanwhile)
    monkeypatch.setattr("ensemble.store.mirror_fetch.READERS", 1)  # else it may have all of the state before
    fetched, own = ensemble.fetch(f"file://{copied}/mirror", copied / "new"), read_own(run_dir.path)
    assert read_fetched(fetched) == own
    assert own["results.json"] == b"changed" and "ledger.csv" not in own and changes


OTHER_FILES = """requests/stop-1.json loggers/mlflow-1.json usage/1.json mirror.json feeders/cohort-1/address
    members/a/rendezvous-1 members/a/.checkpoint-1-1-1.safetensors.0.tmp members/a/predictions-2.safetensors
    thesis.tex .env data/x.memory code/x wandb/run/config.yaml"""
SECRET_URLS = "s3://key:secret@bucket/run s3://bucket/run?token=secret gs://bucket/* https://host/run memory://run"


def test_what_is_secret_or_not_of_the_run_is_not_copied() -> None:
    assert not any(map(is_of_run, OTHER_FILES.split()))
    assert is_of_run("members/m/files/.cache/x") and not is_of_run("members/m/files/.cache/../x")
    for url in SECRET_URLS.split():
        with pytest.raises(SpecError) as refused:
            check_url(url)
        assert "secret" not in str(refused.value)
    for url in ("runs/x", "s3://", "file:///"):
        with pytest.raises(SpecError, match="not an address for a mirror"):
            check_url(url)
    assert check_url("s3://bucket/run/") == "s3://bucket/run"


def test_a_mirror_that_is_not_complete_is_said(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("ensemble.controller.ending.MIRROR_END_S", 0.0)
    run, url = str(tmp_path / "run"), f"file://{tmp_path}/full/mirror"
    (tmp_path / "full").mkdir()

    def shut(event: dict[str, Any]) -> None:
        if event["type"] == "run_started":
            shutil.rmtree(tmp_path / "full")
            (tmp_path / "full").touch()

    result = ensemble.submit(make(), run, "inline", shut, mirror=url).wait()
    assert result.combined is not None and result.mirror_rest is not None
    assert "is not complete" in result.mirror_rest and f"ensemble resume {run}" in result.mirror_rest
    assert main(["resume", run]) == 75
    assert "cannot cat_file manifest.json" in capsys.readouterr().err
    (tmp_path / "full").unlink()
    assert main(["resume", run]) == 0 and f"mirror: {url}: complete" in str(load_status(RunDir(run)))
    assert fold(read_events(ensemble.fetch(url, tmp_path / "new") / "events.jsonl")).ended is not None


@pytest.mark.more
def test_a_copy_that_is_cut_off_at_any_request_leaves_a_whole_mirror(copied: Path, monkeypatch: Any) -> None:
    run, url, answers = copied / "run", f"file://{copied}/mirror", [None] * 10**4
    copier, kept = begin(RunDir(run), url), read_own(run)
    monkeypatch.setattr(ObjectStore, "_naming", lambda store, what: answers.pop() or contextlib.nullcontext())
    for allowed in range(12):
        (run / "results.json").write_text(str(allowed))
        answers[:] = [None] * allowed
        with contextlib.suppress(IndexError):  # its store is asked once more, and is away
            copier.copy(is_last=True)
        answers[:] = [None] * 10**4
        before, kept = kept, read_fetched(ensemble.fetch(url, copied / str(allowed)))
        assert kept in (before, read_own(run)), allowed
    assert kept == read_own(run)


def test_files_of_somebody_else_at_the_address_stay(copied: Path) -> None:
    names = ("spec.py", "data/labels.npy", "code/0123456789abcdef/x", "members/member-0/a.txt")
    others = [copied / "mirror" / name for name in names]
    for file in others:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    (copied / "run/results.json").write_text("changed")  # so that an object is removed
    begin(RunDir(copied / "run"), f"file://{copied}/mirror").copy(is_last=True)
    assert [file.read_text() for file in others] == ["mine"] * 4
