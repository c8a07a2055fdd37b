"""A mirrored run: what is at its address can be resumed at any moment, and only trusted code of it runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from event_dicts import fold, read_events
from execute_members import an_ensemble, model, momentum
from execute_members import loss as plain_loss

import ensemble
from ensemble import Recipe, SpecError
from ensemble.cli.parser import main
from ensemble.controller import session_state
from ensemble.store import EventLog, RunDir, StoreError
from ensemble.store.mirror import (
    FencedError,
    MirrorError,
    MirrorOptions,
    MirrorWriter,
    check_url,
    claim_mirror,
    explain_rest,
    fetch_log,
    fetch_run,
    load_status,
)
from ensemble.store.mirror.bucket import Bucket, GoneError
from ensemble.store.mirror.layout import MOST_SEGMENTS, MirrorHead, Stored, find_merge, is_of_run
from ensemble.store.verification import verify


def make(epochs: int = 2, **options: Any) -> ensemble.Ensemble:
    recipe = Recipe(model=model, loss=plain_loss, optimizer=momentum)
    members = [{"lr": 0.05, "width": 8}, {"lr": 0.1, "width": 4}]
    return an_ensemble(members, recipe=recipe, epochs=epochs, **{"sharing": "independent", "seed": 3, **options})


def train(path: Path, on_event: Any = None, made: ensemble.Ensemble | None = None) -> RunDir:
    ensemble.submit(made or make(), path, "inline", on_event).wait()
    return RunDir(path)


def begin(run_dir: RunDir, url: str) -> MirrorWriter:
    options = claim_mirror(run_dir, url)
    assert options is not None
    return MirrorWriter(run_dir, options)


def code_of(run_dir: RunDir) -> str:
    known = load_status(run_dir)
    assert known is not None
    return known.code


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has ended, `run`, and its mirror, `mirror`."""
    folder = tmp_path_factory.mktemp("mirrored")
    run_dir = train(folder / "run")
    begin(run_dir, f"file://{folder}/mirror").sync(is_last=True)
    return folder


@pytest.fixture
def copied(mirrored: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    shutil.copytree(mirrored, tmp_path / "copy")
    return tmp_path / "copy"


def url_of(folder: Path) -> str:
    return f"file://{folder}/mirror"


def head_of(folder: Path, path: Path | None = None) -> tuple[Path, MirrorHead]:
    path = path or folder / "mirror/000001/head.json"
    return path, msgspec.json.decode(path.read_bytes(), type=MirrorHead)


def edit_head(folder: Path, edit: Callable[[MirrorHead], object]) -> None:
    path, head = head_of(folder)
    edit(head)
    path.write_bytes(msgspec.json.encode(head))


def put(folder: Path, content: bytes) -> Stored:
    import hashlib

    digest = hashlib.sha256(content).hexdigest()
    (folder / "mirror/000001" / digest).write_bytes(content)
    return Stored(digest, len(content))


class Failing(Bucket):
    """A file system that fails at its n-th request from here on, as one that is killed there."""

    left = 10**9

    def _count(self) -> None:
        type(self).left -= 1
        if type(self).left < 0:
            raise MirrorError("it is away")

    def list(self, *arguments: Any) -> Any:
        self._count()
        return super().list(*arguments)

    def put(self, *arguments: Any) -> None:
        self._count()
        super().put(*arguments)

    def put_file(self, *arguments: Any) -> None:
        self._count()
        super().put_file(*arguments)

    def remove(self, *arguments: Any, **options: Any) -> None:
        self._count()
        super().remove(*arguments, **options)


@pytest.mark.more
def test_each_state_of_a_mirror_is_one_that_a_resume_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror is brought up to date at events of a run, and fails at each of its requests in turn."""
    url, seen, writers, failures = f"file://{tmp_path}/mirror", [], list[MirrorWriter](), 0
    monkeypatch.setattr("ensemble.store.mirror.writer.Bucket", Failing)

    def follow(event: dict[str, Any]) -> None:
        nonlocal failures
        if event["type"] not in ("checkpoint", "finished", "combined"):
            return
        run_dir = RunDir(tmp_path / "run")
        writers[:] = writers or [begin(run_dir, url)]
        for allowed in range(60):
            Failing.left = allowed
            try:
                writers[0].sync()
            except MirrorError:
                failures += 1
                if allowed % 2:  # its process was killed: another one goes on
                    writers[:] = [MirrorWriter(run_dir, writers[0]._options)]
            finally:
                Failing.left = 10**9
            if (tmp_path / "mirror/000001/head.json").exists() and allowed % 6 == 0:
                look(event)
            if not writers[0]._status.files and writers[0]._status.since is None and not writers[0]._status.error:
                break
        else:
            raise AssertionError("the mirror did not catch up")
        look(event)

    def look(event: dict[str, Any]) -> None:
        """What is there is whole, and no older than what was there before."""
        into = tmp_path / "fetched"
        shutil.rmtree(into, ignore_errors=True)
        fetched = fetch_run(url, into, code_of(RunDir(tmp_path / "run")))
        assert [each for each in verify(fetched) if not each.is_sound] == []
        size = fetched.events.stat().st_size
        assert (tmp_path / "run/events.jsonl").read_bytes()[:size] == fetched.events.read_bytes()
        assert not seen or size >= seen[-1]
        seen.append(size)

    train(tmp_path / "run", follow)
    assert len(set(seen)) >= 5 and failures > 20
    names = {each.name for each in (tmp_path / "mirror/000001").iterdir()}
    _, head = head_of(tmp_path)
    assert names == {"head.json", *(each.digest for each in (*head.log, *head.files.values()))}, (
        "retired files are gone"
    )


def test_a_run_goes_on_from_its_mirror_with_the_weights_of_one_that_was_not_disturbed(tmp_path: Path) -> None:
    url, events = f"file://{tmp_path}/mirror", list[str]()

    def follow(event: dict[str, Any]) -> None:
        events.append(event["type"])
        if events.count("checkpoint") == 3 and event["type"] == "checkpoint":
            begin(RunDir(tmp_path / "run"), url).sync()

    whole = fold(read_events(train(tmp_path / "run", follow, make(4)).events))
    code = code_of(RunDir(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    result = ensemble.resume(url, into=tmp_path / "elsewhere", trust=code).wait()
    again = fold(read_events(RunDir(tmp_path / "elsewhere").events))
    assert again.starts == 2 and result.mirror_rest is None
    for name, member in whole.members.items():
        assert again.members[name].weights_sha256 == member.weights_sha256
        assert again.members[name].metrics == member.metrics
    known = load_status(RunDir(tmp_path / "elsewhere"))
    assert known is not None and known.is_whole and known.url == url and known.start == 2
    assert not (tmp_path / "mirror/000001").exists(), "its successor has all that it had"
    run_dir, head = fetch_log(url)
    assert head.start == 2 and fold(read_events(run_dir.events)).ended is not None
    assert sorted(each.name for each in run_dir.path.iterdir()) == ["events.jsonl"]


def test_code_of_an_address_runs_with_its_digest_alone(mirrored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, code = url_of(mirrored), code_of(RunDir(mirrored / "run"))
    with pytest.raises(StoreError, match=rf"{code}: compare it with .*'mirror:'.* give --trust {code}"):
        ensemble.load(url)
    with pytest.raises(StoreError, match=f"the digest of the code there is {code}, and sha256:0 is trusted"):
        ensemble.load(url, trust="sha256:0")
    with pytest.raises(SpecError, match="no address"):
        ensemble.load(mirrored / "run", trust=code)
    assert main(["status", url]) == 0
    out = capsys.readouterr().out
    assert "member-1" in out and "as mirrored at" in out and "(start 1)" in out
    assert main(["resume", url]) == 2 and code in capsys.readouterr().err
    assert main(["report", url]) == 2 and "is an address" in capsys.readouterr().err
    assert main(["status", str(mirrored / "run")]) == 0
    assert f"mirror: {url}: complete; --trust {code}" in capsys.readouterr().out


def test_a_model_is_loaded_and_predicts_from_an_address(mirrored: Path, tmp_path: Path) -> None:
    import torch

    url, code = url_of(mirrored), code_of(RunDir(mirrored / "run"))
    batch = {"x": torch.ones(3, 4)}
    assert torch.equal(ensemble.load(url, trust=code)(batch), ensemble.load(mirrored / "run")(batch))
    out = tmp_path / "p.parquet"
    assert main(["predict", url, "--trust", code, "--split", "valid", "--out", str(out)]) == 0 and out.exists()


@pytest.mark.parametrize("packed_when", ["before", "after"])
def test_what_is_packed_is_mirrored_and_goes_on_from_there(
    packed_when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether files were packed before the mirror saw them, or after: its head has each once."""
    folder = tmp_path
    if packed_when == "before":
        monkeypatch.setattr(session_state, "MANY", 2)
    run_dir = train(folder / "run")
    begin(run_dir, url_of(folder)).sync(is_last=packed_when == "before")
    if packed_when == "after":
        assert not fold(read_events(run_dir.events)).packs
        monkeypatch.setattr(session_state, "MANY", 2)
        ensemble.resume(run_dir, "inline", mirror=url_of(folder)).wait()
        begin(run_dir, url_of(folder)).sync(is_last=True)
    assert fold(read_events(run_dir.events)).packs
    _, head = head_of(folder, max((folder / "mirror").glob("0*/head.json")))
    assert any(name.startswith("packs/") for name in head.files)
    assert not any(name.startswith("members/") for name in head.files)
    batch = {"x": torch.linspace(-1, 1, 12).reshape(3, 4)}
    loaded = ensemble.load(url_of(folder), trust=code_of(run_dir))(batch)
    assert torch.equal(loaded, ensemble.load(run_dir.path)(batch))
    ensemble.resume(url_of(folder), "inline", epochs=3, into=folder / "on", trust=code_of(run_dir)).wait()
    assert {each.epoch for each in fold(read_events(folder / "on/events.jsonl")).members.values()} == {3}
    assert all(each.is_sound for each in verify(RunDir(folder / "on")))


def test_an_object_that_was_exchanged_is_refused(copied: Path) -> None:
    """Whichever it is: a pickle, a checkpoint, a segment of the log."""
    code = code_of(RunDir(copied / "run"))
    _, head = head_of(copied)
    for stored in [head.files["ensemble.pkl"], head.files["run.json"], head.log[0]]:
        path = copied / "mirror/000001" / stored.digest
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(StoreError, match="does not hold what its name says"):
            ensemble.resume(url_of(copied), into=copied / "new", trust=code)
        path.write_bytes(content)
    name = next(name for name in head.files if "checkpoint" in name)
    other = (copied / "mirror/000001" / head.files[name].digest).read_bytes()[:-1] + b"\0"
    (copied / "mirror/000001" / head.files[name].digest).write_bytes(other)
    with pytest.raises(StoreError, match="does not hold what its name says"):
        ensemble.load(url_of(copied), trust=code)
    edit_head(copied, lambda head: head.files.update({name: put(copied, other)}))
    with pytest.raises(StoreError, match="is damaged: its digest is"):  # the log names another one
        ensemble.load(url_of(copied), members=[name.split("/")[1]], trust=code)
    assert not (copied / "new").exists() and not list(copied.glob(".new*"))


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_in_a_rewritten_mirror_is_not_run(copied: Path) -> None:
    """Somebody may write all of the bucket; what runs is bound to the digest."""
    code, mark = code_of(RunDir(copied / "run")), copied / "mark"
    bomb = pickle.dumps(Bomb(mark))
    _, head = head_of(copied)
    of_code = next(name for name in head.files if name.startswith("code/") and name.endswith("ensemble.pkl"))
    for name in ("ensemble.pkl", of_code, "code/0123456789abcdef/ensemble.pkl", "code/0123456789abcdef/json.py"):
        edit_head(copied, lambda head, name=name: head.files.update({name: put(copied, bomb)}))
        with pytest.raises(StoreError, match="is not loaded: the digest"):
            ensemble.load(url_of(copied), trust=code)
        head_of(copied)[0].write_bytes(msgspec.json.encode(head))
    names = (
        "members/member-0/ensemble.pkl",
        "../ensemble.pkl",
        "code/../members/x/ensemble.pkl",
        "data/x.npy",
        "/a",
    )
    for name in (*names, "optuna.journal", "snapshot.msgpack", "report.html", "members/../../a/log.txt", "code/x"):
        edit_head(copied, lambda head, name=name: head.files.update({name: put(copied, bomb)}))
        with pytest.raises(StoreError, match="its head names a file"):
            ensemble.load(url_of(copied), trust=code)
        head_of(copied)[0].write_bytes(msgspec.json.encode(head))
    edit_head(copied, lambda head: head.log.append(Stored("../../x", 1)))
    with pytest.raises(StoreError, match="a digest that is none"):
        ensemble.load(url_of(copied), trust=code)
    assert not mark.exists()


def test_a_network_in_a_fetched_checkpoint_is_not_unpickled(mirrored: Path, tmp_path: Path) -> None:
    from ensemble.train.kept_network import NotKept, unpack_network

    run_dir = fetch_run(url_of(mirrored), tmp_path / "run", code_of(RunDir(mirrored / "run")))
    file = next(run_dir.path.glob("members/*/checkpoint-*"))
    with pytest.raises(NotKept, match="was fetched from a mirror"):
        unpack_network(run_dir, file, {"network": {}, "model": {}})


def test_an_address_has_one_run(mirrored: Path, tmp_path: Path) -> None:
    own = RunDir(mirrored / "run").info["run_id"]
    with pytest.raises(StoreError, match=rf"mirrors another run \('executed', run id {own}, start 1, begun on .*"):
        ensemble.submit(make(), tmp_path / "other", "inline", mirror=url_of(mirrored))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    with pytest.raises(StoreError, match="is not empty and holds no mirror"):
        ensemble.submit(make(), tmp_path / "other", "inline", mirror=f"file://{tmp_path}/full")
    assert os.listdir(tmp_path / "full") == ["thesis.tex"]


def test_a_driver_that_comes_back_writes_nothing_over_its_successor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, first, files = f"file://{tmp_path}/mirror", list[MirrorWriter](), dict[Path, bytes]()

    def follow(event: dict[str, Any]) -> None:
        run_dir = RunDir(tmp_path / "run")
        if event["type"] == "checkpoint" and not first:
            first.append(begin(run_dir, url))
            first[0].sync()
            successor = fetch_run(url, tmp_path / "elsewhere", code_of(run_dir))
            ensemble.resume(successor, mirror=url).wait()
            files.update({path: path.read_bytes() for path in (tmp_path / "mirror").rglob("*") if path.is_file()})
        elif event["type"] in ("checkpoint", "finished") and first:
            with pytest.raises(FencedError, match=r"is written by start 2 of the run by process \d+ on"):
                first[0].sync()

    run_dir = train(tmp_path / "run", follow)
    assert files and files == {p: p.read_bytes() for p in (tmp_path / "mirror").rglob("*") if p.is_file()}
    known = load_status(run_dir)
    assert known is not None and "is written by start 2" in known.error and not known.is_whole
    with pytest.raises(StoreError, match="the run went on elsewhere"):  # nor does a resume of the first directory
        ensemble.resume(run_dir, epochs=3)
    capsys.readouterr()
    assert main(["resume", str(run_dir.path)]) == 75, "it has finished, and its result is shown"
    out, err = capsys.readouterr()
    assert "member-1" in out and "the run went on elsewhere" in err
    rest = explain_rest(run_dir)
    assert rest is not None and f"ensemble resume {run_dir.path} --mirror none" in rest and "completes" not in rest
    assert main(["resume", str(run_dir.path), "--mirror", "none"]) == 0 and explain_rest(run_dir) is None


@pytest.mark.parametrize("of", ["pack", "lost"])
def test_a_log_that_grows_does_not_hold_a_head_back(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a packed run that is given more epochs, or one whose checkpoint is lost: its file is not in its place."""
    if of == "pack":
        monkeypatch.setattr(session_state, "MANY", 2)
    run_dir, rounds, copy = train(tmp_path / "run"), 0, MirrorWriter._copy_files
    member = fold(read_events(run_dir.events)).members["member-0"]
    if of == "pack":
        assert member.is_packed
        with EventLog(run_dir.events) as events:
            events.append("placed", member="member-0", attempt=member.attempts, node="here")
    else:
        run_dir.valid_checkpoint(member).unlink()

    def grow(writer: MirrorWriter, *arguments: Any, **options: Any) -> Any:
        nonlocal rounds
        rounds += 1
        assert rounds < 4
        found = copy(writer, *arguments, **options)
        with EventLog(run_dir.events) as events:
            events.append("measuring", members=[])
        return found

    monkeypatch.setattr(MirrorWriter, "_copy_files", grow)
    begin(run_dir, url_of(tmp_path)).sync()
    _, head = head_of(tmp_path)
    assert any(name.startswith("packs/" if of == "pack" else "members/member-1/check") for name in head.files)
    assert rounds == (1 if of == "pack" else 2)


def test_of_a_member_that_has_printed_much_the_log_is_copied_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its middle was freed while it ran; and once, while nothing is printed."""
    run_dir, copied, copy = train(tmp_path / "run"), list[str](), MirrorWriter._copy_file
    with open(run_dir.log("member-0"), "wb") as file:
        file.write(b"first\n")
        file.seek(2**40)
        file.write(b"last\n")

    def note(writer: MirrorWriter, name: str, file: Any) -> Stored:
        copied.append(name)
        return copy(writer, name, file)

    monkeypatch.setattr(MirrorWriter, "_copy_file", note)
    writer = begin(run_dir, url_of(tmp_path))
    writer.sync(is_last=True)
    _, head = head_of(tmp_path)
    stored = head.files["members/member-0/log.txt"]
    content = (tmp_path / "mirror/000001" / stored.digest).read_bytes()
    assert content.startswith(b"first\n") and content.endswith(b"last\n") and len(content) < 1000
    assert b"bytes of output are left out here" in content
    assert "members/member-0/log.txt" in copied
    copied.clear()
    writer.sync(is_last=True)
    assert copied == []


def test_a_mirror_of_before_says_nothing_of_the_one_that_follows_it(tmp_path: Path) -> None:
    """A driver was killed, and its mirror goes on for some seconds, while the next start has begun."""
    run_dir = train(tmp_path / "run")
    first = begin(run_dir, url_of(tmp_path))
    first.sync()
    options = claim_mirror(run_dir, url_of(tmp_path))
    assert options is not None and options.start == 2
    claimed = load_status(run_dir)
    first.sync(is_last=True)
    assert load_status(run_dir) == claimed
    MirrorWriter(run_dir, options).sync(is_last=True)
    known = load_status(run_dir)
    assert known is not None and (known.start, known.code, known.is_whole) == (2, options.code, True)


def test_what_was_fetched_is_not_fetched_again_when_the_rest_was_replaced(
    mirrored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run wrote another head meanwhile, and removed what that does not name."""
    names, pauses, get = list[str](), list[float](), Bucket.fetch

    def fetch(bucket: Bucket, name: str, path: Path) -> None:
        _, head = head_of(mirrored)
        is_last = name.endswith(head.log[0].digest)
        names.append(name)
        if is_last and names.count(name) == 1:
            raise GoneError(name)
        get(bucket, name, path)

    monkeypatch.setattr(Bucket, "fetch", fetch)
    monkeypatch.setattr("ensemble.store.mirror.fetch.time.sleep", pauses.append)
    run_dir = fetch_run(url_of(mirrored), tmp_path / "run", code_of(RunDir(mirrored / "run")))
    assert all(each.is_sound for each in verify(run_dir) if each.kind != "result")
    _, head = head_of(mirrored)
    assert len(names) == len(head.files) + len(head.log) + 1 and len(pauses) == 1


def test_two_that_claim_the_same_start_are_told_apart(tmp_path: Path) -> None:
    run_dir = train(tmp_path / "run")
    options = claim_mirror(run_dir, f"file://{tmp_path}/mirror")
    assert options is not None
    MirrorWriter(run_dir, options).sync()
    MirrorWriter(run_dir, options).sync()  # its process was started again
    with pytest.raises(FencedError, match="is written by start 1"):
        MirrorWriter(run_dir, MirrorOptions(url=options.url, start=1, token="another")).sync()


def test_addresses_hold_no_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for url in (
        "s3://key:secret@bucket/run",
        "s3://bucket/run?token=secret",
        "gs://bucket/*",
        "https://host/run",
        "memory://run",
    ):
        with pytest.raises(SpecError) as refused:
            check_url(url)
        assert "secret" not in str(refused.value)
    for url in ("runs/x", "s3://", "file:///"):
        with pytest.raises(SpecError, match="no address for a mirror"):
            check_url(url)
    assert check_url("s3://bucket/run/") == "s3://bucket/run"


def test_what_may_reach_a_disk(mirrored: Path) -> None:
    _, head = head_of(mirrored)
    assert all(map(is_of_run, head.files)) and {"run.json", "ensemble.pkl", "results.json"} <= set(head.files)
    for path in (
        "",
        ".",
        "a",
        "members/a",
        "members//log.txt",
        "members/a/b/log.txt",
        "members/a/evil.py",
        "code",
    ):
        assert not is_of_run(path)


def test_segments_stay_few_and_are_merged_seldom() -> None:
    sizes, moved, most = list[int](), 0, 0
    for number in range(20_000):
        sizes.append(1_000 + 37 * number % 900)
        first = find_merge(sizes)
        moved += sum(sizes[first:]) if first < len(sizes) else 0
        sizes[first:] = [sum(sizes[first:])] if first < len(sizes) else []
        most = max(most, len(sizes))
    assert most <= MOST_SEGMENTS + 1 and moved < 15 * sum(sizes)


def test_a_mirror_that_is_not_complete_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store takes nothing any more: the run ends well, says what is missing, and a later command copies it."""
    monkeypatch.setattr("ensemble.controller.controller.MIRROR_END_S", 0.0)
    spec = tmp_path / "spec.py"
    spec.write_text("from test_store_mirror import make\ndef spec():\n    return make()\n")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
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
    assert "cannot be" in capsys.readouterr().err
    (tmp_path / "full").unlink()
    assert main(["resume", run]) == 0
    assert json.loads(Path(run, "mirror.json").read_text())["is_whole"]
    assert fold(read_events(fetch_log(url)[0].events)).ended is not None
