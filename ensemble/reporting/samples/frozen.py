"""The samples of a report: some of each order with their records, in the form in which the live page gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ensemble.reporting.samples.document import EMPTY, Query, list_samples
from ensemble.reporting.samples.ranking import ORDERS, rank_samples
from ensemble.reporting.samples.reader import MOST_SAMPLES, RecordReader

if TYPE_CHECKING:
    from ensemble.store import RunDir, RunState

#: Of each order; and characters of all pictures: those for which there is no room are left out.
MOST, MOST_CHARACTERS = 100, 8 * 2**20
NO_ROOM = "left out, as the pictures of the report take 8 MiB already"


def read_samples(run_dir: RunDir, state: RunState, count: int) -> dict[str, Any]:
    """Returns the document `samples`: order -> a list of `count` samples with their `records`.

    Raises:
        DamagedError, CombineError: the saved predictions cannot be read.
    """
    ranking = rank_samples(run_dir, state)
    if ranking is None:
        return {order: list_samples(None, state, Query()) | {"records": {}} for order in ORDERS}
    found: dict[str, Any] = {}
    room, reader = MOST_CHARACTERS, RecordReader()
    try:
        for order in ORDERS:
            listed = EMPTY | list_samples(ranking, state, Query(order), count)
            # There is nobody who could list others.
            listed |= {"models": [], "classes": [], "pages": 1}
            indices = [row["index"] for row in listed["rows"]]
            records: dict[str, Any] = {"records": {}, "note": "", "missing": None}
            for start in range(0, len(indices), MOST_SAMPLES):
                some = reader.read(run_dir, state, ranking, indices[start : start + MOST_SAMPLES])
                records |= {"note": some.note, "missing": some.missing or records["missing"]}
                records["records"] |= some.records
            room = _make_room(records["records"], room)
            found[order] = listed | {"records": records}
    finally:
        reader.close()
    return found


def _make_room(records: dict[str, Any], room: int) -> int:
    """Leaves out the pictures for which there is no room any more; returns how much is left."""
    for record in records.values():
        for field in record.get("fields", []):
            size = len(field.get("picture", ""))
            if size > room:
                field["text"] += f" ({NO_ROOM})"
                del field["picture"]
            elif size:
                room -= size
    return room
