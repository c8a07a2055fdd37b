"""CRC-32C (Castagnoli; RFC 3720, section 12.1) by tables in numpy, and the masked form of TFRecord files.

A block's checksum is the exclusive or of one table entry for each of its bytes, which depends on the byte and on
its distance from the block's end; the checksum so far enters through the block's first four bytes. This reads some
hundred MB a second, less than decoding what records usually hold takes, and spares a dependency for one format.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78  # reversed
_BLOCK = 1024
_BATCH = 64  # blocks that are looked up together
_MASK_DELTA = 0xA282EAD8


@functools.cache
def _load_tables() -> tuple[Any, Any, list[list[int]]]:
    """For each place in a block and each byte: flat uint32 [BLOCK * 256], offsets of places, the first four
    places."""
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = np.where(last & 1, (last >> 1) ^ np.uint32(_POLYNOMIAL), last >> 1).astype(np.uint32)
    tables = np.empty((_BLOCK, 256), np.uint32)
    tables[-1] = last
    for place in range(_BLOCK - 2, -1, -1):
        tables[place] = last[tables[place + 1] & 0xFF] ^ (tables[place + 1] >> 8)
    return tables.ravel(), np.arange(_BLOCK, dtype=np.intp) * 256, tables[:4].tolist()


def crc32c(data: bytes | memoryview) -> int:
    """Returns the CRC-32C of some bytes."""
    flat, offsets, (first, second, third, fourth) = _load_tables()
    found = np.frombuffer(data, np.uint8)
    # A short block is the first one, so that all others end where the tables do.
    size = len(found) % _BLOCK or min(len(found), _BLOCK)
    crc = int(_fold_first(found[None, :size])[0])
    if size < 4:  # a part of the start is not yet shifted out
        crc ^= 0xFFFFFFFF >> 8 * size
    blocks = found[size:].reshape(-1, _BLOCK)
    for start in range(0, len(blocks), _BATCH):
        looked_up = flat.take(blocks[start : start + _BATCH] + offsets, mode="clip")
        for own in np.bitwise_xor.reduce(looked_up, axis=1).tolist():
            crc = own ^ first[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ fourth[crc >> 24]
    return crc ^ 0xFFFFFFFF


def crc32c_of_rows(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Returns the CRC-32C of each row of 4 bytes or more: uint64 [n] of uint8 [n, bytes]."""
    return _fold_first(rows).astype(np.uint64) ^ np.uint64(0xFFFFFFFF)


def _fold_first(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Folds first blocks, each a row: the start, all ones, enters through their first four bytes."""
    flat, offsets, _ = _load_tables()
    begun = rows.copy()
    begun[:, :4] ^= 0xFF
    looked_up = flat.take(begun + offsets[_BLOCK - rows.shape[1] :], mode="clip")
    folded: npt.NDArray[np.uint32] = np.bitwise_xor.reduce(looked_up, axis=1)
    return folded


def mask(crc: Any) -> Any:
    """The form in which TFRecord files store a checksum, of an integer or an array of uint64."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF
