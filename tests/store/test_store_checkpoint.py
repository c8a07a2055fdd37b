import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import FORK, say_what_fails
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ensemble.store import StoreError, load_checkpoint, save_checkpoint, weights_sha256
from ensemble.store.checkpoint import VERSION
from ensemble.store.files import LEFTOVER_AGE_S

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    return torch.randint(0, 2, shape, generator=seed).to(draw(st.sampled_from(DTYPES)))


KEYS = (
    st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | tensors()


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    return lists | lists.map(tuple) | st.dictionaries(KEYS, inner, max_size=3)


STATES = st.recursive(PLAIN, nest, max_leaves=12)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        kept = [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return kept and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(state=st.dictionaries(KEYS, STATES, max_size=4))
def test_any_nesting_comes_back_exactly(tmp_path_factory: pytest.TempPathFactory, state: dict[Any, Any]) -> None:
    path = tmp_path_factory.mktemp("c") / "checkpoint.safetensors"
    save_checkpoint(path, state)
    assert same(load_checkpoint(path), state)


def test_memory_layout_and_alignment_are_kept_and_tied_weights_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    save_checkpoint(tmp_path / "i", {"a": torch.ones(1, dtype=torch.uint8), "image": image, "b": torch.ones(7)})
    state = load_checkpoint(tmp_path / "i")
    assert state["image"].is_contiguous(memory_format=torch.channels_last) and torch.equal(state["image"], image)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in state.values())
    save_checkpoint(tmp_path / "c", {"in": weight, "out": weight, "part": weight[:2], "row": weight[3]})
    state = load_checkpoint(tmp_path / "c")
    assert state["in"] is state["out"] and torch.equal(state["part"], weight[:2])
    assert (tmp_path / "c").stat().st_size < 2 * weight.nbytes
    save_checkpoint(tmp_path / "turned", turned := {"in": weight, "turned": weight.T})
    assert same(load_checkpoint(tmp_path / "turned"), turned)


def test_a_missing_foreign_or_damaged_checkpoint_is_said_in_one_line(tmp_path: Path) -> None:
    for state, place in (({"a": {"b": object()}}, "a.b"), ({"a": [0, torch.eye(2).to_sparse()]}, "a.1")):
        with pytest.raises(TypeError, match=f"a checkpoint cannot hold {place}"):
            save_checkpoint(tmp_path / "absent", state)
    with pytest.raises(StoreError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "absent")
    save_file({"w": torch.ones(2)}, tmp_path / "foreign")
    with pytest.raises(StoreError, match="not a checkpoint of this project"):
        load_checkpoint(tmp_path / "foreign")
    save_checkpoint(tmp_path / "half", {"w": torch.ones(100)})
    content = (tmp_path / "half").read_bytes()
    (tmp_path / "half").write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match="is damaged"):
        load_checkpoint(tmp_path / "half")
    digest = save_checkpoint(tmp_path / "flipped", {"w": torch.ones(100)})
    assert load_checkpoint(tmp_path / "flipped", digest=digest)["w"].sum() == 100
    flipped = bytearray((tmp_path / "flipped").read_bytes())
    flipped[-5] ^= 0x10  # of a weight: the format does not see it, the digest of the log does
    (tmp_path / "flipped").write_bytes(flipped)
    with pytest.raises(StoreError, match="flipped is damaged") as said:
        load_checkpoint(tmp_path / "flipped", digest=digest)
    assert "\n" not in str(said.value)
    for format in (VERSION - 1, VERSION + 1):
        written = content.replace(b'\\"v\\":%d' % VERSION, b'\\"v\\":%d' % format)
        (tmp_path / "other").write_bytes(written)
        with pytest.raises(StoreError, match=rf"\(format {format}, this one reads {VERSION}\); train it"):
            load_checkpoint(tmp_path / "other")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))  # for one more file: pinned, it is opened again
    try:
        with pytest.raises(StoreError, match="Too many open files"):
            load_checkpoint(tmp_path / "flipped")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_disk_that_fills_up_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", {"w": torch.ones(10)})
    large = {"w": torch.ones(100_000)}
    assert say_what_fails(lambda: save_checkpoint(tmp_path / "c", large), 10_000).startswith("cannot write")
    assert len(load_checkpoint(tmp_path / "c")["w"]) == 10
    assert os.listdir(tmp_path) == ["c"]


def write_on(path: Path, writer: Callable[[], bool] = lambda: True) -> None:
    """Replace a checkpoint by the next, of which each number is its own, as long as the writer likes."""
    number = 0
    while writer():
        save_checkpoint(path, {"number": number, "w": torch.full((200_000,), number)})
        number += 1


def test_a_process_killed_while_writing_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    for attempt in range(3):
        save_checkpoint(path, {"number": -1})
        writer = FORK.Process(target=write_on, args=(path,))
        writer.start()
        try:
            while load_checkpoint(path)["number"] < 10 + attempt:
                assert writer.is_alive()
                time.sleep(0.003)
        finally:
            writer.kill()
            writer.join()
        state = load_checkpoint(path)
        assert state["w"].shape == (200_000,) and (state["w"] == state["number"]).all()
        assert state["number"] >= 10 + attempt
    leftovers = [p for p in tmp_path.iterdir() if p != path]
    for leftover in leftovers:
        os.utime(leftover, (time.time() - LEFTOVER_AGE_S - 1,) * 2)
    save_checkpoint(path, {})
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_one_checkpoint_while_another_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    stop = threading.Event()
    save_checkpoint(path, {"number": -1, "w": torch.full((200_000,), -1)})
    writer = threading.Thread(target=write_on, args=(path, lambda: not stop.is_set()))
    writer.start()
    try:
        for _ in range(200):  # the library opens the file twice: some of so many readings fall in between
            state = load_checkpoint(path)
            assert (state["w"] == state["number"]).all()
    finally:
        stop.set()
        writer.join()


def test_the_digest_of_weights_sees_names_types_shapes_and_every_bit() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    assert weights_sha256(base) == weights_sha256({"b": torch.ones(1), "a": torch.zeros(3, 2).t()})
    tensors = (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32), -torch.zeros(2, 3))
    others = [{"a": torch.zeros(2, 3), "c": torch.ones(1)}, *({**base, "a": tensor} for tensor in tensors)]
    assert len({weights_sha256(state) for state in (base, *others)}) == 5
