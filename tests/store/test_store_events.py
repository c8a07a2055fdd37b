import json
import math
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import FORK, say_what_fails
from hypothesis import given
from hypothesis import strategies as st
from kit.edited_log import sign, without_crc
from kit.event_dicts import apply_event, fold, read_events
from kit.property_examples import examples

from ensemble import store
from ensemble.events import Finished, make_event, to_dict
from ensemble.store import DamagedError, EventLog, RunState, StoreError, end_of_events, is_locked
from ensemble.store.event_log import encode_line, read_batches
from ensemble.store.files import write_bytes

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def filled(path: Path, count: int = 3) -> bytes:
    with EventLog(path) as log:
        for number in range(count):
            log.append("epoch", member="member-0", epoch=number, metrics={"loss": 0.5, "ä\n": 1.0})
    return path.read_bytes()


@given(fields=st.dictionaries(st.from_regex(r"[a-su-z]{2,6}", fullmatch=True), PLAIN, max_size=4))
def test_any_plain_fields_survive(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object]) -> None:
    fields.pop("type", None)
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with EventLog(path) as log:
        written = log.append("anything", **fields)
    assert store.read_events(path) == [written]


def test_a_last_line_cut_at_any_byte_is_dropped_on_reading_and_cut_on_opening(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    content = filled(path)
    start = content.rstrip(b"\n").rfind(b"\n") + 1
    kept = read_events(path)[:-1]
    for end in range(start, len(content)):
        path.write_bytes(content[:end])
        assert read_events(path) == kept
        with EventLog(path) as log:
            new = log.append("run_stopped", reason="asked to")
        assert read_events(path) == [*kept, to_dict(new)]


def test_an_end_whose_blocks_never_reached_the_disk_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    content, written = filled(path), read_events(path)
    for end in (b"", b"\n", b"1}\n", b"\n\0\0", b"\n\0\n{broken\n"):
        path.write_bytes(content + b"\0" * 40 + end)
        assert read_events(path) == written
        with EventLog(path) as log:
            added = log.append("progress", member="member-0", epoch=0, step=0)
        assert read_events(path) == [*written, to_dict(added)] and path.read_bytes().startswith(content)


@pytest.mark.parametrize("batch_bytes", [2**20, 64])
def test_damage_inside_the_log_is_an_error_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr("ensemble.store.event_log.BATCH_BYTES", batch_bytes)
    path = tmp_path / "events.jsonl"
    lines = filled(path, 40).splitlines(keepends=True)
    written = read_events(path)
    assert len(written) == 40
    legible = lines[12].replace(b'"loss":0.5', b'"loss":0.4')
    unlike = sign(without_crc(lines[30]).replace(b'"epoch":30', b'"epoch":"x"'))
    for damage in ([b"{broken\n"], [b'{"v":2,"a":[1\n', b"2]}\n"], [legible], [bytes(70) + b"\n"], [unlike]):
        path.write_bytes(b"".join([*lines[:30], *damage, *lines[30:]]))
        with pytest.raises(DamagedError, match=f"{path}, line 31 is damaged: .*truncate") as caught:
            read_events(path)
        if batch_bytes > 64:
            with pytest.raises(DamagedError, match="line 31"):
                EventLog(path)
        advice = re.search(r"`(truncate .*)`", str(caught.value))
        assert advice is not None
        subprocess.run(shlex.split(advice[1]), check=True)
        assert read_events(path) == written[:30]


@examples(100)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_changed_bit_never_changes_what_an_event_says(where: float, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        content = bytearray(filled(path))
        written = read_events(path)
        at = int(where * len(content))
        torn = 2 if content[at : at + 1] == b"\n" else 1  # two lines are one then
        content[at] ^= 1 << bit
        path.write_bytes(content)
        try:
            known = read_events(path)
        except StoreError:
            return
        assert known in (written, written[:-1], written[:-torn]), "only the end may be taken for a torn line"


def test_a_log_of_another_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for version in (1, 3):
        path.write_text(json.dumps({"v": version, "t": 0.0, "type": "run_started"}) + "\n")
        for open_log in (read_events, EventLog):
            with pytest.raises(StoreError, match=rf"another version .* \(format {version}, this one reads 2\)"):
                open_log(path)
            assert json.loads(path.read_text())["v"] == version


def test_a_log_is_free_again_when_its_writer_was_killed(tmp_path: Path) -> None:
    begun, told = FORK.Pipe(duplex=False)

    def hold() -> None:
        log = EventLog(tmp_path / "e")
        told.send(log.append("x").type)
        signal.pause()

    writer = FORK.Process(target=hold, daemon=True)
    writer.start()
    assert begun.poll(60)
    with pytest.raises(StoreError, match="another controller"):
        EventLog(tmp_path / "e")
    writer.kill()
    writer.join()
    EventLog(tmp_path / "e").close()
    assert [event["type"] for event in read_events(tmp_path / "e")] == ["x"]


def test_values_that_json_lacks_are_translated_or_refused(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e") as log:
        values = {"all": [np.float32(0.5), math.inf], "a": np.arange(2), "tag": "caf\udce9"}
        metrics = {"loss": math.nan, "n": np.int64(3)}
        for fields in ({"data": {"model": object()}}, {"epochs": "many"}):
            with pytest.raises(TypeError, match=r"an event cannot hold|no valid event"):
                log.append("run_started", **fields)
        written = log.append("finished", member="member-0", metrics=metrics, kept=values)
    (event,) = store.read_events(tmp_path / "e")
    assert isinstance(event, Finished) and event == written
    (tmp_path / "e").read_text(encoding="utf-8")
    assert event.metrics == {"loss": None, "n": 3}
    assert event.kept == {"all": [0.5, None], "a": [0, 1], "tag": "caf\udce9"}


def test_a_full_disk_is_said_and_the_log_stays_whole(tmp_path: Path) -> None:
    def fill() -> None:
        with EventLog(tmp_path / "e") as log:
            while True:
                log.append("run_stopped", reason="x" * 50)

    assert say_what_fails(fill, 1000).startswith("cannot write")
    assert (tmp_path / "e").read_bytes().endswith(b"\n")
    assert len(read_events(tmp_path / "e")) >= 5


def test_events_gathered_reach_the_disk_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes: list[int] = []
    monkeypatch.setattr(os, "fsync", flushes.append)
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        flushes.clear()
        kinds = ("pruned", "measuring", "finished")
        events = [make_event(kind, **{"member": "m"} if kind != "measuring" else {}) for kind in kinds]
        log.write([encode_line(event, log.read_clock()) for event in events])
        assert tuple(event["type"] for event in read_events(path)) == kinds
        assert len(flushes) == 1
        log.write([encode_line(make_event("measuring"), log.read_clock())])
        assert len(flushes) == 1, "nothing of it must survive a power failure"
        kept = make_event("checkpoint", member="m", attempt=0, epoch=1, step=0, path="p", digest="d")
        log.write([encode_line(kept, log.read_clock())])
        assert len(flushes) == 2, "the checkpoint before may be removed once the log names this one"


def test_a_file_and_then_its_name_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, replace = list[str](), os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("replace"), replace(old, new)))
    write_bytes(tmp_path / "a", b"1")
    assert len(done) == 3 and done[0].startswith(f"{tmp_path}/.a.") and done[1:] == ["replace", str(tmp_path)]


def test_events_that_the_disk_does_not_hold_leave_the_log_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.append("combining", members=0)
        before = path.read_bytes()
        write = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: len(data) // 2]))
        events = [encode_line(make_event("combining", members=n), log.read_clock()) for n in range(1, 5)]
        with pytest.raises(StoreError, match="full"):
            log.write(events)
        monkeypatch.undo()
        assert path.read_bytes() == before
        log.append("combining", members=1)
    assert [event["members"] for event in read_events(path)] == [0, 1]


def test_readers_that_ask_who_holds_a_log_refuse_no_start(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).close()
    begun, told = FORK.Pipe(duplex=False)

    def ask() -> None:
        told.send(None)
        while True:
            is_locked(path)

    readers = [FORK.Process(target=ask) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in readers:
            begun.recv()
        for _ in range(300):
            with EventLog(path):
                assert is_locked(path), "and they are told the truth"
        with EventLog(path), pytest.raises(StoreError, match="another controller"):
            EventLog(path)
    finally:
        for reader in readers:
            reader.kill()
            reader.join()


def test_following_begins_with_a_line_also_while_one_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    content = filled(path)
    line = content.splitlines(keepends=True)[0]
    for cut in (0, 1, len(line) // 2, len(line) - 1):
        path.write_bytes(content + line[:cut])
        begin = end_of_events(path)
        with open(path, "ab") as file:
            file.write(line[cut:])
        assert sum(len(batch) for batch, _ in read_batches(path, begin)) == 1
    assert end_of_events(tmp_path / "none") == 0
    path.write_bytes(b"torn")
    assert end_of_events(path) == 0


@pytest.mark.parametrize("set_by_s", [-3600.0, 3600.0])
def test_times_follow_no_clock_that_is_set(tmp_path: Path, monkeypatch: Any, set_by_s: float) -> None:
    path, clock = tmp_path / "events.jsonl", time.time
    state = RunState()
    with EventLog(path) as log:
        apply_event(state, log.append("run_started"))
        monkeypatch.setattr(time, "time", lambda: clock() + set_by_s)
        apply_event(state, log.append("run_stopped"))
    assert 0.0 <= state.wall_s < 1800.0
    with EventLog(path) as log:
        apply_event(state, log.append("run_started"))
        apply_event(state, log.append("run_finished"))
    assert 0.0 <= state.wall_s < 1800.0
    times = [event["t"] for event in read_events(path)]
    assert times == sorted(times)


def test_a_start_counts_by_itself_where_an_older_log_has_the_clock_set_back() -> None:
    times = (5000.0, "started"), (5030.0, "stopped"), (1400.0, "started"), (1410.0, "finished")
    assert fold([{"v": 2, "t": t, "type": f"run_{what}"} for t, what in times]).wall_s == 40.0
