"""The ring's memory: what a reader writes is seen by nobody, and is gone when it is given back."""

import itertools
import os
from collections.abc import Iterator

import numpy as np
import pytest

from pipelines.samples.fields import INDEX, OK, Columns, Field
from pipelines.shm import ring
from pipelines.shm.private_mapping import PrivatePages

# Rows that share pages with their neighbours, rows of whole pages, rows of more than a page.
FIELDS = {
    "small": Field((5,), "uint8"),
    "page": Field((1024,), "float32"),
    "large": Field((3, 1000), "float64"),
    "scalar": Field((), "int64"),
    "empty": Field((0, 4), "int32"),
}
CAPACITY = 64


@pytest.fixture(params=["PAGEMAP_SCAN", "pagemap", "none"])
def memory(request: pytest.FixtureRequest) -> Iterator[tuple[Columns, ring.RingView, ring.RingView]]:
    yield from memory_of(ring.Layout(FIELDS, CAPACITY), request.param, wraps=False)


def memory_of(
    layout: ring.Layout, scan: str, *, wraps: bool
) -> Iterator[tuple[Columns, ring.RingView, ring.RingView]]:
    """A writer's columns and two readers', who find the pages they wrote in each of the three ways."""
    fd = ring.create(layout, "test")
    writer = ring.map_writable(fd, layout)
    readers = ring.RingView(fd, layout, wraps=wraps), ring.RingView(fd, layout, wraps=wraps)
    os.close(fd)
    for reader in readers:
        if scan == "none":
            reader.close()
            reader._pages = PrivatePages("/proc/self/no-such-file")
        elif scan == "pagemap":
            reader._pages._can_scan = False
    yield writer, *readers
    for reader in readers:
        reader.close()


def fill(columns: Columns, lap: int) -> None:
    for number, column in enumerate(columns.values()):
        column[...] = (np.arange(column.size).reshape(column.shape) + lap + number) % 200


def equal(columns: Columns, expected: Columns, rows: slice = slice(None)) -> bool:
    return all(np.array_equal(column[rows], expected[name][rows]) for name, column in columns.items())


def spoil(columns: Columns, rows: slice) -> None:
    for name, column in columns.items():
        if name != OK:  # which no batch has
            column[rows] = 201


def test_what_a_reader_wrote_is_gone_at_the_next_lap_neighbours_on_its_pages_included(
    memory: tuple[Columns, ring.RingView, ring.RingView],
) -> None:
    writer, reader, other = memory
    for lap in range(3):
        fill(writer, lap)
        expected = {name: column.copy() for name, column in writer.items()}
        for start in range(0, CAPACITY, 13):
            rows = slice(start, min(CAPACITY, start + 13))
            assert equal(reader.columns, expected, rows), "an earlier batch has left its traces"
            spoil(reader.columns, rows)
            assert equal(writer, expected) and equal(other.columns, expected), "another one sees it"
            reader.restore(rows.start, rows.stop)
        assert equal(reader.columns, expected)


def test_a_page_written_to_before_the_next_batch_was_prepared_does_not_hide_it(
    memory: tuple[Columns, ring.RingView, ring.RingView],
) -> None:
    writer, reader, _ = memory
    fill(writer, 0)
    spoil(reader.columns, slice(0, 3))  # makes the page, with rows 3.. as they are now, the reader's own
    writer["small"][3:6] = 99
    reader.restore(0, 3)
    assert (reader.columns["small"][3:6] == 99).all()


def test_only_written_pages_are_dropped() -> None:
    layout = ring.Layout(FIELDS, CAPACITY)
    fd = ring.create(layout, "test")
    fill(ring.map_writable(fd, layout), 0)
    reader = ring.RingView(fd, layout)
    os.close(fd)
    for can_scan in (reader._pages._can_scan, False):
        reader._pages._can_scan = can_scan
        reader.columns["large"].sum()
        assert reader.restore(0, CAPACITY) == 0
        for row in range(0, CAPACITY, 2):  # more separate ranges than one answer of the kernel holds
            reader.columns["page"][row, 0] = 1
        reader.columns["large"][7] = 1
        reader.columns[INDEX][0] = 1
        assert CAPACITY // 2 + 6 + 1 <= reader.restore(0, CAPACITY) <= CAPACITY // 2 + 7 + 1
        assert reader.restore(0, CAPACITY) == 0
    reader.close()


def test_the_layout_does_not_depend_on_the_order_in_which_fields_were_declared() -> None:
    turned = ring.Layout(dict(reversed(FIELDS.items())), CAPACITY)
    assert turned.offsets == ring.Layout(FIELDS, CAPACITY).offsets
    assert list(turned.columns(bytearray(turned.nbytes)))[:2] == ["empty", "scalar"]


def test_columns_start_on_pages_and_do_not_overlap() -> None:
    layout = ring.Layout(FIELDS, CAPACITY)
    ends = sorted((offset, offset + layout.row_bytes[name] * CAPACITY) for name, offset in layout.offsets.items())
    assert all(start % 4096 == 0 for start, _ in ends)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert ends[-1][1] <= layout.nbytes


def test_a_ring_larger_than_memory_is_refused_with_both_sizes() -> None:
    with pytest.raises(MemoryError, match=r"needs \d+ MiB .* 1000000000000 samples, \d+ MiB are free"):
        ring.create(ring.Layout(FIELDS, 10**12), "ring")
