"""Compares a sample that was served with the same sample, prepared by its reader: a pure function of arrays.

Bytes are equal where both were prepared on one model of processor by the same versions of the libraries. Elsewhere
integers that differ by at most 1, and floats by at most `TOLERANCE` of the field's range, count as *rounding*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipelines.samples.nested import iterate_leaves, join_path

TOLERANCE = 1e-5  # of a field's range
MOST_DETAIL = 4000  # a result is one message, of 64 KiB at most

#: Field to array. A name that the other sample lacks is a difference.
Arrays = Mapping[str, npt.NDArray[Any]]
Kind = Literal["equal", "rounding", "different", "unstable", "left_out"]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of comparing one sample.

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
        values = asdict(self)
        return {"result": values.pop("kind"), **values, "position": list(self.position)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> CheckResult:
        """The result that `as_record` has written."""
        values = {name: record[name] for name in ("field", "size", "detail")}
        return cls(kind=record["result"], **values, position=tuple(record["position"]))


EQUAL = CheckResult(kind="equal")


def compare_arrays(served: Arrays, own: Arrays, *, is_exact: bool) -> CheckResult:
    """Compare two samples field by field.

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
        result = _compare_field(name, served[name], own[name], is_exact=is_exact)
        if result.kind == "different":
            return result
        rounded = rounded if rounded is not EQUAL else result
    return rounded


def _compare_field(name: str, served: npt.NDArray[Any], own: npt.NDArray[Any], *, is_exact: bool) -> CheckResult:
    if (served.shape, served.dtype) != (own.shape, own.dtype):
        theirs, ours = (f"{value.dtype}{list(value.shape)}" for value in (served, own))
        detail = f"{name!r} is {theirs} where it was prepared, {ours} here"
        return CheckResult(kind="different", field=name, detail=detail)
    if served.tobytes() == own.tobytes():
        return EQUAL
    if served.dtype.kind == "c":
        served, own = (np.stack([value.real, value.imag], axis=-1) for value in (served, own))
    if served.dtype.kind in "biuf":
        with np.errstate(all="ignore"):
            sizes = np.abs(served.astype(np.longdouble) - own.astype(np.longdouble)).astype(np.float64)
        is_same = (served == own) | (np.isnan(served) & np.isnan(own))
        sizes = np.where(is_same, 0.0, np.where(np.isnan(sizes), np.inf, sizes))
    else:  # texts and times: 1 where they differ
        sizes = np.asarray(served != own, np.float64)
    tolerance = 0.0
    if served.dtype.kind == "f":
        values = np.append(served, own).astype(np.float64)
        # With zero: a field of one number has a range, too.
        tolerance = TOLERANCE * float(np.ptp(np.append(values[np.isfinite(values)], 0.0)))
    elif served.dtype.kind in "iu":
        tolerance = 1.0
    is_rounding = not is_exact and served.dtype.kind in "iuf" and bool((sizes <= tolerance).all())
    position = tuple(int(i) for i in np.unravel_index(np.argmax(sizes), sizes.shape))
    size, where = float(sizes[position]), f"{name!r} at {list(position)}" if position else repr(name)
    values_text = f"{served[position]} where it was prepared, {own[position]} here"
    detail = f"{where} is {values_text}, a difference of {size:.6g}"
    if not size:
        detail = f"{name!r} has zeros of another sign, or other NaNs, where it was prepared"
    kind: Kind = "rounding" if is_rounding else "different"
    return CheckResult(kind=kind, field=name, position=position, size=size, detail=detail)


def flatten_sample(sample: Any) -> dict[str, npt.NDArray[Any]]:
    """The values of a sample as arrays, by their paths: texts as single bytes, others as numpy sees them."""
    made = {}
    for path, value in iterate_leaves(sample):
        if isinstance(value, str | bytes):
            raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            value = np.frombuffer(raw, "S1")
        elif hasattr(value, "detach"):
            value = value.detach().cpu().numpy()
        made[join_path(path)] = np.asarray(value)
    return made
