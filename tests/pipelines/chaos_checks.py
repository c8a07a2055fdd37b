"""What has to hold after a chaos run: the ledger is whole, and nothing is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from pathlib import Path

import psutil
from chaos_plan import BAD, Kind, Member, Plan, pipeline
from chaos_processes import CACHE, Child, Record, record


class Failed(Exception):
    """A check that does not hold."""


@dataclasses.dataclass
class Lineage:
    """What has become of a member: its living ranks, and what each has read along the lineage."""

    member: Member
    ledger: list[list[Record]]
    epochs: range | None = None
    ranks: list[Child] = dataclasses.field(default_factory=list)
    complete: set[int] = dataclasses.field(default_factory=set)
    joined: bool = False
    lives: int = 0
    shared: int = 0

    @property
    def done(self) -> bool:
        return len(self.complete) == self.member.world


@functools.cache
def alone(kind: Kind, n: int, batch_size: int, rank: int, world: int, drop_last: bool, epoch: int) -> list[Record]:
    """The records of an epoch that is prepared privately, without sharing, faults or haste."""
    loader = pipeline(kind, n).loader(batch_size, range(epoch, epoch + 1), rank, world, drop_last)
    return [record(batch) for batch in loader]


def check_ledger(plan: Plan, lineage: Lineage) -> None:
    """Every sample exactly once an epoch, and bytes equal to those of an undisturbed, private run."""
    member, epochs = lineage.member, lineage.epochs
    if epochs is None or (not member.boundary and epochs != range(*member.epochs)):
        raise Failed(f"{member.name} read the epochs {epochs}")
    for rank, got in enumerate(lineage.ledger):
        key = (plan.kind, plan.n, member.batch_size, rank, member.world, member.drop_last)
        expected = [each for epoch in epochs for each in alone(*key, epoch)][: member.leave_after]
        if got != expected:
            at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
            raise Failed(
                f"{member.name}, rank {rank}, has {len(got)} batches, alone it has {len(expected)}; they differ "
                f"from number {at} on: {got[at : at + 1]}, not {expected[at : at + 1]}"
            )
    if member.leave_after is not None:
        return
    left_out = plan.n % member.batch_size if member.drop_last else 0
    bad = BAD if plan.kind == "skip" else frozenset()
    for epoch in epochs:
        seen = sorted(i for rank in lineage.ledger for e, _, _, index, _ in rank if e == epoch for i in index)
        good = set(range(plan.n)) - bad
        if len(seen) != len(set(seen)) or not set(seen) <= good or len(good) - len(seen) > left_out:
            raise Failed(f"{member.name} read in epoch {epoch}: {seen}")


def children(pid: int) -> set[int]:
    """The child processes of a process, whichever of its threads has started them; none of one that is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {child.pid for child in psutil.Process(pid).children()}
    return set()


def descendants() -> set[int]:
    """Every process that comes from this one; as a subreaper it inherits those whose parent died."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def named_memory() -> set[str]:
    """Entries of /dev/shm that no living process has mapped: what somebody left behind."""
    here = set(os.listdir("/dev/shm"))
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text() if here else ""
    return {name for name in here if f"/dev/shm/{name}" not in mapped}


def check_nothing_left(directory: Path, before: tuple[set[str], set[str]]) -> None:
    """No process, socket, directory, descriptor or named memory of the run is there any more."""
    end = time.monotonic() + 120.0
    while left := descendants():
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.002)
        if time.monotonic() > end:
            said = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left]
            raise Failed(f"processes are left: {said}")
    files = [str(p) for p in directory.rglob("*") if not p.is_dir() and CACHE not in p.parts]
    strangers = [str(p) for p in directory.iterdir() if p.name not in ("tmp", "stream-0", "stream-1")]
    strangers += [str(p) for p in (directory / "tmp").iterdir()]
    if files or strangers:
        raise Failed(f"files are left: {files + strangers}")
    descriptors, memory = before
    if new := open_descriptors() - descriptors:
        raise Failed(f"descriptors are left: {sorted(new)}")
    if new := named_memory() - memory:
        raise Failed(f"named memory is left: {sorted(new)}")


def open_descriptors() -> set[str]:
    """number -> what it is, of this process."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return {each for each in found if "/proc/" not in each}
