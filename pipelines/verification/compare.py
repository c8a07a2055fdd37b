"""Compares a sample that was served with the same sample, prepared by its reader: a pure function of arrays.

Bytes are equal where both were prepared on one model of processor by the same versions of the libraries. Elsewhere
libraries round otherwise: integers that differ by at most 1, and floats by at most `TOLERANCE` of the field's
range, are *rounding*, no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipelines.samples.nested import iterate_leaves, join_path

TOLERANCE = 1e-5  # of a field's range
INTEGERS = 1
MOST_DETAIL = 4000  # a result is one message, of 64 KiB at most

#: Field to array. A name that the other sample lacks is a difference.
Arrays = Mapping[str, npt.NDArray[Any]]
Kind = Literal["equal", "rounding", "different", "unstable", "left_out"]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What a comparison of one sample has found.

    Attributes:
        kind: "equal"; "rounding", within the tolerance; "different"; "unstable": the reader's own pipeline makes
            another sample each time; "left_out": it was not compared.
        field: the first field that differs, `""` where none does or where the whole sample does.
        position: of the largest difference, an index into the field.
        size: the largest absolute difference; None where it is none of numbers, such as of shapes.
        detail: what differs, in words; the first `MOST_DETAIL` characters.
    """

    kind: Kind
    field: str = ""
    position: tuple[int, ...] = ()
    size: float | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", self.detail[:MOST_DETAIL])

    def as_record(self) -> dict[str, Any]:
        """As JSON values; see `from_record`."""
        known = asdict(self)
        return {"result": known.pop("kind"), **known, "position": list(self.position)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> CheckResult:
        """The result that `as_record` has written."""
        known = {name: record[name] for name in ("field", "size", "detail")}
        return cls(kind=record["result"], **known, position=tuple(record["position"]))


EQUAL = CheckResult(kind="equal")


def compare_arrays(served: Arrays, own: Arrays, *, is_exact: bool) -> CheckResult:
    """Compares two samples field by field.

    Args:
        served: what the reader was given.
        own: what it has prepared.
        is_exact: whether bytes must be equal.

    Returns:
        The difference of the first field that differs, else the rounding of the first that was rounded.
    """
    rounded = EQUAL
    for name in sorted({*served, *own}):
        if name not in served or name not in own:
            where = "here" if name in own else "where it was prepared"
            return CheckResult(kind="different", field=name, detail=f"there is a field {name!r} only {where}")
        found = _compare_field(name, served[name], own[name], is_exact=is_exact)
        if found.kind == "different":
            return found
        rounded = rounded if rounded is not EQUAL else found
    return rounded


def _compare_field(name: str, served: npt.NDArray[Any], own: npt.NDArray[Any], *, is_exact: bool) -> CheckResult:
    if (served.shape, served.dtype) != (own.shape, own.dtype):
        given, made = (f"{each.dtype}{list(each.shape)}" for each in (served, own))
        return CheckResult(
            kind="different", field=name, detail=f"{name!r} is {given} where it was prepared, {made} here"
        )
    if served.tobytes() == own.tobytes():
        return EQUAL
    numbers = served.dtype.kind in "biufc"
    sizes = _measure(served, own) if numbers else (served != own).astype(np.float64)
    flat = int(np.argmax(sizes)) if sizes.any() else _find_first_bit(served, own)
    position = tuple(int(each) for each in np.unravel_index(flat, served.shape)) if served.ndim else ()
    size = float(sizes.reshape(-1)[flat]) if numbers else None
    kind: Kind = "rounding" if numbers and not is_exact and _is_rounding(served, own, sizes) else "different"
    there, here = served.reshape(-1)[flat], own.reshape(-1)[flat]
    where = f" at {list(position)}" if position else ""
    by = "" if size is None else f", a difference of {size:.6g}"
    detail = f"{name!r}{where} is {there} where it was prepared, {here} here{by}"
    return CheckResult(kind=kind, field=name, position=position, size=size, detail=detail)


def _measure(served: npt.NDArray[Any], own: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The absolute differences; infinite where only one is a number."""
    one: npt.NDArray[Any]
    other: npt.NDArray[Any]
    wide = np.complex128 if served.dtype.kind == "c" else np.longdouble
    one, other = served.astype(wide), own.astype(wide)
    with np.errstate(all="ignore"):
        sizes = np.asarray(np.abs(one - other), np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return np.where(same, 0.0, np.where(np.isnan(sizes), np.inf, sizes))


def _find_first_bit(served: npt.NDArray[Any], own: npt.NDArray[Any]) -> int:
    """The first element whose bytes differ: of two zeros with other signs, or two kinds of NaN."""
    pair = (np.frombuffer(each.tobytes(), np.uint8).reshape(each.size, -1) for each in (served, own))
    return int(np.argmax((next(pair) != next(pair)).any(axis=1)))


def _is_rounding(served: npt.NDArray[Any], own: npt.NDArray[Any], sizes: npt.NDArray[np.float64]) -> bool:
    kind = served.dtype.kind
    if kind in "iu":
        return bool((sizes <= INTEGERS).all())
    if kind == "b":
        return False
    # With zero: a field of one number has a range, too.
    values = np.abs(np.concatenate([served.reshape(-1), own.reshape(-1)]).astype(np.complex128))
    finite = values[np.isfinite(values)]
    if kind == "f":
        signed = np.concatenate([served.reshape(-1), own.reshape(-1)]).astype(np.float64)
        signed = signed[np.isfinite(signed)]
        span = float(max(signed.max(initial=0.0), 0.0) - min(signed.min(initial=0.0), 0.0))
    else:
        span = float(finite.max(initial=0.0))
    return bool((sizes <= TOLERANCE * span).all())


def flatten_sample(sample: Any) -> dict[str, npt.NDArray[Any]]:
    """The values of a sample as arrays, by their paths: texts and bytes as uint8, others as numpy sees them."""
    made = {}
    for path, value in iterate_leaves(sample):
        if isinstance(value, str | bytes):
            raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            value = np.frombuffer(raw, np.uint8)
        elif hasattr(value, "detach"):
            value = value.detach().cpu().numpy()
        made[join_path(path)] = np.asarray(value)
    return made
