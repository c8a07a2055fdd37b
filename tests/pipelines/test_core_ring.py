"""The ring: whose pages its columns are, and batches that wrap round its end."""

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.ipc.child_processes import child_environment
from pipelines.order.stream import default_capacity
from pipelines.samples.fields import OK, Columns, Field
from pipelines.shm import ring
from pipelines.shm.private_mapping import PrivatePages

# Rows that share pages with their neighbours, rows of whole pages, rows of more than a page.
# Whole pages at 32 slots: `pages` by the row, `shared` only as a column. `odd` never; it is large, `tiny` small.
FIELDS = {
    "pages": Field((1024,), "float32"),
    "shared": Field((3, 1152), "uint8"),
    "odd": Field((1001,), "uint8"),
    "tiny": Field((), "int16"),
    "empty": Field((0, 4), "int32"),
}
CAPACITY, MIRRORED, ROWS = 32, ["pages", "shared"], (27, 37)


@pytest.fixture(params=["PAGEMAP_SCAN", "pagemap", "none"])
def columns(request: pytest.FixtureRequest) -> Iterator[tuple[Columns, ring.RingView, ring.RingView]]:
    """A writer's columns and two readers', who find the pages they wrote in each of the three ways."""
    layout = ring.Layout(FIELDS, CAPACITY)
    fd = ring.create(layout, "test")
    writer = ring.map_writable(fd, layout)
    readers = ring.RingView(fd, layout, wraps=True), ring.RingView(fd, layout, wraps=True)
    os.close(fd)
    for reader in readers:
        if request.param == "none":
            reader.close()
            reader._pages = PrivatePages("/proc/self/no-such-file")
        elif request.param == "pagemap":
            reader._pages._can_scan = False
    yield writer, *readers
    for reader in readers:
        reader.close()


def fill(columns: Columns, lap: int) -> None:
    for number, column in enumerate(columns.values()):
        column[...] = (np.arange(column.size).reshape(column.shape) + lap + number) % 200


def test_a_page_written_to_before_the_next_batch_was_prepared_does_not_hide_it(columns: Any) -> None:
    writer, reader, _ = columns
    fill(writer, 0)
    reader.columns["odd"][0:3] = 201  # makes the page, with rows 3.. as they are now, the reader's own
    writer["odd"][3:6] = 99
    reader.restore(0, 3)
    assert (reader.columns["odd"][3:6] == 99).all()


def test_the_layout_does_not_depend_on_the_order_in_which_fields_were_declared() -> None:
    layout, turned = (ring.Layout(dict(fields), CAPACITY) for fields in (FIELDS.items(), reversed(FIELDS.items())))
    assert turned.offsets == layout.offsets
    ends = sorted((offset, offset + layout.row_bytes[name] * CAPACITY) for name, offset in layout.offsets.items())
    assert all(start % 4096 == 0 for start, _ in ends) and ends[-1][1] <= layout.nbytes
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def wrapped(columns: Columns, first: int, last: int) -> dict[str, Any]:
    slots = np.arange(first, last) % CAPACITY
    return {name: column[slots] for name, column in columns.items() if name != OK}


def same(tensors: dict[str, Any], expected: dict[str, Any]) -> bool:
    return set(tensors) == set(expected) and all(np.array_equal(t, expected[n]) for n, t in tensors.items())


def test_a_wrapped_batch_of_whole_pages_is_one_view(columns: Any) -> None:
    writer, reader, _ = columns
    fill(writer, 0)
    tensors, views = reader.read_batch(*ROWS)
    assert [name for name in views if name != "empty"] == MIRRORED
    assert same(tensors, wrapped(writer, *ROWS))
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 64 == 0 for tensor in tensors.values())
    writer["pages"][:] = 7
    assert (tensors["pages"] == 7).all(), "a view shows what is there"
    writer[OK][:] = 1
    writer[OK][[29, 2]] = 0
    assert reader.read_status(*ROWS) == bytes([1, 1, 0, 1, 1, 1, 1, 0, 1, 1])
    assert reader.read_status(0, 4) == bytes([1, 1, 0, 1])


def test_what_is_written_into_both_halves_stays_private_and_is_gone_in_the_next_laps(columns: Any) -> None:
    writer, reader, other = columns
    for lap in range(4):
        fill(writer, lap)
        expected = {name: column.copy() for name, column in writer.items()}
        for first, last in (ROWS, (5, 15), (15, 27), (CAPACITY - 1, CAPACITY + 1), ROWS):
            tensors, views = reader.read_batch(first, last)
            assert same(tensors, wrapped(expected, first, last)), "an earlier batch has left its traces"
            for tensor in tensors.values():
                tensor.fill_(201)
            assert same(other.read_batch(first, last)[0], wrapped(expected, first, last))
            assert all(np.array_equal(writer[name], column) for name, column in expected.items())
            reader.restore(first, last, views)
    assert same(reader.read_batch(0, CAPACITY)[0], wrapped(writer, 0, CAPACITY))


def test_only_the_written_pages_of_a_wrapped_batch_are_dropped(columns: Any) -> None:
    writer, reader, _ = columns
    fill(writer, 0)
    tensors, views = reader.read_batch(*ROWS)
    tensors["pages"].sum()
    every = reader.restore(*ROWS, views)
    tensors["pages"][[0, 4, 5, 9]] = 1
    written = reader.restore(*ROWS, views)
    if reader._pages._pagemap < 0:  # nobody knows which were written: all pages of the batch are dropped
        assert every == written == 10 + 10
    else:
        assert (every, written) == (0, 4)
        assert reader.restore(*ROWS, views) == 0


def test_the_mapping_lives_as_long_as_a_tensor_of_it() -> None:
    layout = ring.Layout({"pages": FIELDS["pages"]}, CAPACITY)
    fd = ring.create(layout, "test")
    inode, column = f" {os.fstat(fd).st_ino} ", ring.map_writable(fd, layout)
    fill(column, 0)
    expected = column["pages"][[30, 31, 0, 1]].copy()
    reader = ring.RingView(fd, layout, wraps=True)
    os.close(fd)
    tensors, _ = reader.read_batch(30, 34)
    reader.close()
    del reader, column
    gc.collect()
    assert np.array_equal(tensors["pages"], expected) and inode in Path("/proc/self/maps").read_text()
    del tensors
    gc.collect()
    assert inode not in Path("/proc/self/maps").read_text()


# In a process of its own, for whom there are addresses for the ring, but not twice.
SCARCE = """
import os, resource, torch
from pathlib import Path
from pipelines.shm import ring
from pipelines.samples.fields import Field
layout = ring.Layout({"pages": Field((1 << 20,), "uint8")}, 4096)
fd = os.memfd_create("test")
os.ftruncate(fd, layout.nbytes)
used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + layout.nbytes * 3 // 2,) * 2)
reader = ring.RingView(fd, layout, wraps=True)
os.pwrite(fd, b"z", layout.offsets["pages"])
tensors, views = reader.read_batch(4095, 4097)
print(len(reader.columns["pages"]), views, tensors["pages"][:, 0].tolist())
"""


def test_without_addresses_enough_a_column_is_mapped_once_and_a_wrapped_batch_copied() -> None:
    command, environment = [sys.executable, "-c", SCARCE], child_environment()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout == "4096 [] [0, 122]\n", done.stderr


def test_a_ring_larger_than_memory_is_refused_with_both_sizes() -> None:
    with pytest.raises(MemoryError, match=r"needs \d+ MiB .* 1000000000000 samples, \d+ MiB are free"):
        ring.create(ring.Layout(FIELDS, 10**12), "ring")


@given(sample_bytes=st.integers(0, 1 << 30))
def test_the_usual_ring_has_columns_of_whole_pages_for_most_shapes(sample_bytes: int) -> None:
    capacity = default_capacity(sample_bytes)
    assert 64 <= capacity <= 4096
    assert capacity % (8 if capacity < 128 else 64 if capacity >= 512 else 16) == 0
    most = min(4096, max(64, 64 * 2**20 // max(1, sample_bytes), min(512, 256 * 2**20 // max(1, sample_bytes))))
    assert 7 / 8 * most <= capacity <= most
    assert default_capacity(3 * 224 * 224, 128) == 416, "64 MiB, where the readers' batches are known to be small"
