"""Source of rows of equal length, packed from the tokens of documents."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_any_integer, check_integer
from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.order.epoch_order import permute
from pipelines.sources._arrays import arrays
from pipelines.sources._base import Source
from pipelines.sources._origin import Origin, digest_indices
from pipelines.sources._subset import call_on_record

Tokens = str | Callable[[dict[str, Any]], Any]
Piece = tuple[int, int, int]  # document, its first token in the piece, number of tokens


def pack_pieces(counts: Iterable[tuple[int, int]], length: int, buffer: int) -> Iterator[list[Piece]]:
    """Packs documents into rows by best fit; yields the pieces of each row, in their order.

    Args:
        counts: document and its number of tokens, in the order of the stream.
        length, buffer: see `pack`.
    """
    stream = (
        (document, start, min(length, count - start))
        for document, count in counts
        for start in range(0, count, length)
    )
    waiting: dict[int, deque[Piece]] = {}  # by length
    lengths = held = 0  # one bit for each length that is waiting; pieces that are
    while True:
        row, room = list[Piece](), length
        while True:
            while held < buffer and (piece := next(stream, None)) is not None:
                waiting.setdefault(piece[2], deque()).append(piece)
                lengths, held = lengths | 1 << piece[2], held + 1
            longest = (lengths & ((2 << room) - 1)).bit_length() - 1
            if longest < 0:
                break
            row.append(waiting[longest].popleft())
            room, held = room - longest, held - 1
            if not waiting[longest]:
                lengths ^= 1 << longest
        if not row:
            return
        yield row


@known_as("pipelines.sources.pack")
class Pack(Source):
    """See `pack`. The arguments are the tokens of all rows, one after the other, and the pieces of each row."""

    kind = "pack"
    is_fork_safe = True

    def __init__(
        self, tokens: npt.NDArray[Any], rows: Sequence[list[Piece]], length: int, pad: int, documents: Origin
    ) -> None:
        self._tokens, self._length, self._pad = arrays(tokens=tokens), length, pad
        self._bounds = np.cumsum([0, *map(len, rows)])  # of the pieces of each row
        self._pieces = np.array([piece for row in rows for piece in row], np.int64)
        self._ends = np.cumsum(self._pieces[:, 2])  # of the tokens of each piece
        self._documents: Origin | None = documents  # while the process lives that packed the rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_documents": None}

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _read(self, index: int) -> dict[str, Any]:
        own = slice(int(self._bounds[index]), int(self._bounds[index + 1]))
        counts, stop = self._pieces[own, 2], int(self._ends[own.stop - 1])
        used = int(counts.sum())
        values: Any = self._tokens.columns["tokens"]
        record = {"tokens": np.full(self._length, self._pad, np.int64)}
        record |= {name: np.zeros(self._length, np.int64) for name in ("position", "segment")}
        record["tokens"][:used] = values[stop - used : stop]
        record["position"][:used] = np.arange(used) - np.repeat(np.cumsum(counts) - counts, counts)
        record["segment"][:used] = np.repeat(np.arange(1, len(counts) + 1), counts)
        return record

    def where(self, index: int) -> str:
        documents = self._pieces[self._bounds[index] : self._bounds[index + 1], 0].tolist()
        return f"pack: row {index}, of the documents {str(documents)[1:-1]}"

    def find_origin(self) -> Origin:
        own = super().find_origin()
        if self._documents is None:
            return own
        steps = self._documents.select(self._pieces[:, 0])
        return replace(own, indices=self._bounds[:-1], steps=steps, width=np.diff(self._bounds))

    def identity(self) -> Any:
        how = [self._length, self._pad, digest_indices(self._pieces[:, 2]), digest_indices(self._bounds)]
        return {"source": self._describe_class(), "of": self._tokens.identity(), "rows": how}


def pack(
    source: Source, tokens: Tokens, length: int, *, buffer: int = 1000, pad: int = 0, seed: int | None = None
) -> Pack:
    """Makes a source of rows of `length` tokens, packed from documents by best fit.

    The rows are made once, now, from the documents in their order: a row takes the longest of the next pieces that
    fits, until none fits. Each token is in one row. A longer document is cut into pieces of `length`, and one for
    the rest. All processes share one copy of the tokens, in the smallest dtype that has them.

    Args:
        source: the documents.
        tokens: the field with the tokens of a document, integers [n], or a function of a record that returns them.
        length: tokens of a row.
        buffer: pieces among which a row finds the longest that fits. With more there is less padding.
        pad: the token at the end of a row that no piece fills.
        seed: packs the documents in a random order instead of the source's.

    Returns:
        A source of records of three fields, int64 [length]: `tokens`; `position`, from 0 in each piece; `segment`,
        the number of the piece in its row, from 1, and 0 where there is padding.

    Raises:
        PipelineError: an argument is invalid, or no document has a token.
        SampleError: a document cannot be read, or its tokens are no integers.

    Examples:
        >>> rows = pack(sources.parquet("texts.parquet"), lambda record: list(record["text"].encode()), 512)
        >>> rows[0]["tokens"].shape
        (512,)
    """
    if not isinstance(tokens, str) and not callable(tokens):
        raise PipelineError(f"pack(): tokens must be the name of a field or a function, got {tokens!r:.60}")
    if isinstance(tokens, str) and tokens not in source[0]:
        raise source._missing_field(tokens, source[0])
    length, buffer = check_integer("pack(): length", length, 1), check_integer("pack(): buffer", buffer, 1)
    pad, order = check_any_integer("pack(): pad", pad), np.arange(len(source), dtype=np.uint64)
    if seed is not None:
        order = permute(order, len(source), "pack", check_any_integer("pack(): seed", seed))
    documents = [_read_tokens(source, tokens, index) for index in range(len(source))]
    counts = ((index, len(documents[index])) for index in order.tolist())
    rows = list(pack_pieces(counts, length, buffer))
    if not rows:
        raise PipelineError(f"pack(): no document of {source!r} has a token")
    flat = np.concatenate([documents[index][first : first + count] for row in rows for index, first, count in row])
    return Pack(flat, rows, length, pad, source.find_origin())


def _read_tokens(source: Source, tokens: Tokens, index: int) -> npt.NDArray[Any]:
    """Returns the tokens of a document, [n], of the smallest dtype of integers that has them."""
    values = np.asarray(call_on_record(source, index, tokens if callable(tokens) else itemgetter(tokens)))
    if values.shape == (0,):
        return values.astype(np.uint8)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        found = f"{values.dtype} {list(values.shape)}"
        raise SampleError(index, source.where(index), f"tokens must be integers [n], got {found}")
    least = np.result_type(*(np.min_scalar_type(bound) for bound in (values.min(), values.max())))
    return values.astype(least if least.itemsize < 8 else np.int64)  # else signed and unsigned ones make floats
