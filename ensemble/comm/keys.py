"""Numbers that look random and are a function of what they are asked for."""

from __future__ import annotations

_MASK = 2**64 - 1


def mixed(*parts: int) -> int:
    """63 bits of some integers: neighbouring arguments give unrelated values.

    The finalizer of SplitMix64 (Steele, Lea, Flood 2014), applied to one argument after the other.
    """
    value = 0
    for part in parts:
        value = (value + part + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> 1
