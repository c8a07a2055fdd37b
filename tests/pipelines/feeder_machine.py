"""A feeder in histories that hypothesis draws: who comes, reads, stalls, leaves or dies changes nobody's batches.

`python tests/pipelines/feeder_machine.py SEED EXAMPLES` runs it in a process of its own, which forks the others;
faults that are named after these, such as "worker killed", must have happened in some history.
As in a run, a member of which a rank dies goes on as a whole, from what all of its ranks have read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from core_pipes import LIMIT_S, Feeder, descriptors, record, spoil, wait_until
from forked_children import BAD, Child, Record, Say, pipeline
from hypothesis import HealthCheck, Phase, seed, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

sys.path.append(str(Path(__file__).parents[1] / "support"))  # as this is run by its path, too
from kit.leftovers import named_memory, new_named_memory

from pipelines import attach, resident
from pipelines.order.stream import min_capacity

N, SLOW_S = 48, 0.0005
BASE = tempfile.gettempdir()
_SUBREAPER = 36  # linux/prctl.h: PR_SET_CHILD_SUBREAPER
READ, VALIDATE, VANISH = b"r", b"v", b"x"  # orders; the end of them: leave with a word


@dataclasses.dataclass(kw_only=True)
class Member:
    """A consumer of one process a rank, and what each rank has read along its lineage."""

    name: str
    batch_size: int
    world: int
    first_epoch: int | None  # None: from the next boundary on
    epochs: int
    drop_last: bool
    spoils: bool
    reading: range | None = None  # the epochs that the feeder or the member itself has chosen
    ranks: list[Child] = dataclasses.field(default_factory=list)
    records: list[list[Record]] = dataclasses.field(default_factory=list)
    ordered: int = 0
    ended: set[int] = dataclasses.field(default_factory=set)
    has_left: bool = False

    @property
    def steps(self) -> int:
        return N // self.batch_size if self.drop_last else -(-N // self.batch_size)

    @property
    def asked(self) -> range:
        assert self.first_epoch is not None
        return range(self.first_epoch, self.first_epoch + self.epochs)

    @property
    def is_done(self) -> bool:
        return self.has_left or len(self.ended) == self.world


@functools.cache
def read_alone(kind: str, batch_size: int, rank: int, world: int, drop_last: bool, epoch: int) -> list[Record]:
    """An epoch that is prepared privately, without sharing, faults or haste."""
    loader = pipeline(kind, N).loader(batch_size, range(epoch, epoch + 1), rank, world, drop_last)
    return [record(batch) for batch in loader]


def consume(kind: str, address: str, member: Member, rank: int, say: Say, listening: int) -> None:
    """A rank: reads a batch for each order, which has to stay what it is until the next order."""
    done, step, epochs = member.records[rank], 0, member.reading
    if epochs is None and member.first_epoch is not None:
        epochs = member.asked
    if done and epochs is not None:
        passed, step = divmod(done[-1][1] + 1, member.steps)
        if not (epochs := range(done[-1][0] + passed, epochs.stop)):
            say(stats={"shared_batches": 0})
            return
    options: dict[str, Any] = {"world": member.world, "drop_last": member.drop_last, "start_step": step}
    asked, made = member.epochs if epochs is None else epochs, pipeline(kind, N, SLOW_S)
    loader = attach(address, made, member.batch_size, asked, name=member.name, rank=rank, **options)
    if not done:
        say(epochs=[loader.reading.epochs.start, loader.reading.epochs.stop])
    batches = iter(loader)
    in_hand, content = None, None
    while order := os.read(listening, 1):
        assert in_hand is None or record(in_hand) == content, "a batch changed while it was in use"
        if order == VANISH:
            os._exit(0)
        if order == VALIDATE:
            still = pipeline("plain", N).without_randomness()
            held, alone = resident(address, "still", still), [record(batch) for batch in still.loader(7, 1)]
            for _ in range(2):
                for batch, expected in zip(held.loader(7), alone, strict=True):
                    assert record(batch) == expected, "the resident set is another"
                    spoil(batch)
            continue
        in_hand = next(batches, None)
        if in_hand is None:
            break
        say(batch=record(in_hand))
        if member.spoils:
            spoil(in_hand)
        content = record(in_hand)
    loader.close()
    say(stats=loader.stats())


def feed(kind: str, address: str, options: dict[str, Any], say: Say, listening: int) -> None:
    still = pipeline("plain", N).without_randomness()
    with Feeder(pipeline(kind, N, SLOW_S), address=address, resident={"still": still}, **options) as feeder:
        say(ready=True)
        os.read(listening, 1)
    say(stats=feeder.stats())


class FeederMachine(RuleBasedStateMachine):
    """Histories of one stream: rules change who is there while batches are read; the end checks everything."""

    shared_batches = 0
    done: ClassVar[set[str]] = set()  # what has happened to whom, in any history

    def __init__(self) -> None:
        super().__init__()
        self.members: list[Member] = []
        self.feeder: Child | None = None
        self.directory = Path(tempfile.mkdtemp(prefix="feeder-", dir=BASE))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.directory)  # what anyone forgets is found there
        self.address = str(self.directory / "socket")
        self.before = set(descriptors().items()), named_memory()

    @initialize(
        kind=st.sampled_from(["noise", "skip", "plain"]),
        extra=st.sampled_from([0, 1, 7, 40]),
        whole_pages=st.booleans(),
        workers=st.integers(1, 2),
        cache=st.sampled_from([None, "memory", "disk"]),
        policy=st.sampled_from(["wait", "detach"]),
        stall_limit_s=st.sampled_from([0.05, 9 * LIMIT_S]),
        overwrites=st.booleans(),
        expect=st.integers(0, 2),
        late=st.booleans(),
    )
    def begin(
        self, *, kind: str, extra: int, whole_pages: bool, cache: str | None, late: bool, **options: Any
    ) -> None:
        self.kind, capacity = kind, min_capacity(N) + extra
        # In one of a multiple of 16 the images' column has whole pages, and is mapped twice in a row.
        options["capacity"] = (capacity + 15) // 16 * 16 if whole_pages else capacity
        options["cache_dir"] = str(self.directory / "cache") if cache == "disk" else None
        options["overwrite_released"] = options.pop("overwrites")
        self.options = {**options, "cache": cache, "gate_timeout_s": 0.5}
        self.stalls_are_short = options["policy"] == "detach" or options["stall_limit_s"] < 1
        if not late:
            self.start_feeder()
        common = {"first_epoch": 0, "epochs": 3, "drop_last": False, "spoils": True, "count": 9}
        self.join(batch_size=8, world=1, **common)
        self.join(batch_size=13, world=2, **common)

    @precondition(lambda self: self.feeder is None)
    @rule()
    def start_feeder(self) -> None:
        self.feeder = Child(functools.partial(feed, self.kind, self.address, self.options))
        fail_if(self.hear(self.feeder)[0].get("error"), "a feeder")
        self.options = {**self.options, "expect": 0}

    @precondition(lambda self: len(self.members) < 6)
    @rule(
        batch_size=st.sampled_from([1, 5, 8, 13, 16, 25, N, N + 3]),
        world=st.sampled_from([1, 1, 2, 3]),
        first_epoch=st.sampled_from([0, 0, 1, 2, None]),
        epochs=st.integers(1, 3),
        drop_last=st.booleans(),
        spoils=st.booleans(),
        count=st.integers(0, 20),
    )
    def join(self, world: int, count: int, **options: Any) -> None:
        if options["first_epoch"] is None:
            world = 1
        member = Member(name=f"member-{len(self.members)}", world=world, **options)
        member.records = [[] for _ in range(world)]
        self.members.append(member)
        self.start(member)
        self.order(member, count)

    def start(self, member: Member) -> None:
        complete = min(map(len, member.records))
        for records in member.records:
            del records[complete:]
        member.ended.clear()
        lives = [functools.partial(consume, self.kind, self.address, member, r) for r in range(member.world)]
        member.ranks = [Child(life) for life in lives]
        for child in member.ranks:
            child.order(READ * (member.ordered - complete))

    def order(self, member: Member, count: int) -> None:
        member.ordered += count
        for child in member.ranks:
            child.order(READ * count)

    def pick(self, which: int) -> Member | None:
        members = [member for member in self.members if not member.is_done]
        return members[which % len(members)] if members else None

    @rule(which=st.integers(0, 9), count=st.integers(1, 40), waits=st.booleans())
    def read(self, which: int, count: int, waits: bool) -> None:
        """Read beside others; where those who stand still are not waited for long, it comes to its end."""
        if member := self.pick(which):
            self.order(member, count)
            target = member.ordered
            if waits and self.stalls_are_short:
                self.listen_until(lambda: member.is_done or min(map(len, member.records)) >= target)

    @rule(which=st.integers(0, 9))
    def read_resident_set(self, which: int) -> None:
        if self.feeder and (member := self.pick(which)):
            member.ranks[0].order(VALIDATE)

    @rule(which=st.integers(0, 9), with_a_word=st.booleans())
    def leave(self, which: int, with_a_word: bool) -> None:
        if member := self.pick(which):
            member.has_left = True
            self.done.add("left")
            for child in member.ranks:
                child.ask_to_end() if with_a_word else child.order(VANISH)

    @rule(
        whom=st.sampled_from(["reader", "reader", "worker", "worker", "feeder"]),
        which=st.integers(0, 9),
        rank=st.integers(0, 2),
        seconds=st.sampled_from([None, None, 0.0, 0.02, 0.1]),
    )
    def kill_or_stop(self, whom: str, which: int, rank: int, seconds: float | None) -> None:
        pid = self.feeder.pid if self.feeder else 0
        if whom == "worker" and pid:
            workers = sorted(child.pid for child in psutil.Process(pid).children())
            pid = workers[which % len(workers)] if workers else 0
        if whom == "reader":
            member = self.pick(which)
            child = member.ranks[rank % member.world] if member else None
            pid = child.pid if child and not child.is_closed else 0
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            if pid:
                os.kill(pid, signal.SIGKILL if seconds is None else signal.SIGSTOP)
                self.done.add(f"{whom} {'killed' if seconds is None else 'stopped'}")
            if pid and seconds is not None:
                time.sleep(seconds)
                os.kill(pid, signal.SIGCONT)
        if self.feeder and whom == "feeder" and seconds is None:
            self.feeder.close()
            self.feeder = None

    @invariant()
    def batches_are_those_of_a_private_loader(self) -> None:
        self.listen()

    def listen(self) -> None:
        for member in self.members:
            for rank, child in enumerate(member.ranks):
                if child.is_closed:
                    continue
                for message in child.lines():
                    fail_if(message.get("error"), f"{member.name}, rank {rank}")
                    if "epochs" in message and member.reading is None:
                        member.reading = range(*message["epochs"])
                    if "batch" in message:
                        self.check(member, rank, message["batch"])
                    if "stats" in message:
                        member.ended.add(rank)
                        FeederMachine.shared_batches += message["stats"]["shared_batches"]
                if child.ended:
                    child.close()
            dead = [r for r, child in enumerate(member.ranks) if child.is_closed and r not in member.ended]
            if dead and not member.has_left:
                for child in member.ranks:
                    child.close()
                self.start(member)

    def listen_until(self, happens: Callable[[], bool]) -> None:
        wait_until(lambda: (self.listen(), happens())[1])

    def hear(self, feeder: Child) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        wait_until(lambda: messages.extend(feeder.lines()) or messages or feeder.ended)
        return messages

    def check(self, member: Member, rank: int, batch: Record) -> None:
        records, epochs = member.records[rank], member.reading
        assert epochs is not None
        assert member.first_epoch is None or epochs == member.asked
        key = self.kind, member.batch_size, rank, member.world, member.drop_last
        alone = [other for epoch in epochs for other in read_alone(*key, epoch)]
        fail_if(batch != alone[len(records)], f"{member.name}, rank {rank}, batch {len(records)}")
        records.append(batch)

    def teardown(self) -> None:
        try:
            if hasattr(self, "kind"):
                self.read_to_the_end()
        finally:
            for child in [*(child for member in self.members for child in member.ranks), self.feeder]:
                if child is not None:
                    child.close()
            end_of_processes = time.monotonic() + LIMIT_S
            while psutil.Process().children(recursive=True) and time.monotonic() < end_of_processes:
                with contextlib.suppress(ChildProcessError):  # a subreaper inherits those whose parent died
                    os.waitpid(-1, os.WNOHANG)
                time.sleep(0.002)
            files = [p for p in self.directory.rglob("*") if "cache" not in p.parts]
            shutil.rmtree(self.directory)
            os.environ["TMPDIR"] = tempfile.tempdir = BASE
        assert psutil.Process().children(recursive=True) == [], "processes are left"
        assert files == [], "files are left"
        assert set(descriptors().items()) <= self.before[0], "descriptors are left"
        assert new_named_memory(self.before[1]) == set(), "named memory is left"

    def read_to_the_end(self) -> None:
        """All who are still there read on: nobody waits for one who is gone, misses or repeats a sample."""
        for member in self.members:
            if not member.is_done:
                self.order(member, member.steps * member.epochs + 1)
        self.listen_until(lambda: all(member.is_done for member in self.members))
        for member in self.members:
            for epoch in () if member.has_left else member.reading or ():
                listed = [index for records in member.records for e, _, _, index, _ in records if e == epoch]
                seen = [i for index in listed for i in index]
                good = set(range(N)) - (BAD if self.kind == "skip" else set())
                dropped = N % member.batch_size if member.drop_last else 0
                assert len(seen) == len(set(seen)) and set(seen) <= good and len(good) - len(seen) <= dropped
        if self.feeder is None:  # the next one clears up after the one that was killed
            self.start_feeder()
        assert self.feeder is not None
        self.feeder.ask_to_end()
        stats = self.hear(self.feeder)[-1]["stats"]
        assert stats["failure"] is None
        assert set(stats["bad"]) <= (set(map(str, BAD)) if self.kind == "skip" else set())


def fail_if(wrong: Any, whose: str) -> None:
    """Print what is wrong at once: of one that is seldom so, hypothesis only reports that it is."""
    if wrong:
        print(whose, wrong, file=sys.stderr, flush=True)
    assert not wrong, whose


def main(number: int, examples: int, *faults: str) -> None:
    import ctypes

    warnings.filterwarnings("ignore", message="left out")
    torch.set_num_threads(1)  # no thread is there that a fork would lose
    torch.zeros(1)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    # Time is part of a history: a shorter one seldom fails again.
    options = settings(max_examples=examples, stateful_step_count=25, deadline=None, database=None)
    options = settings(options, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    stateful.run_state_machine_as_test(seed(number)(FeederMachine), settings=options)
    assert FeederMachine.shared_batches > 0
    assert set(faults) <= FeederMachine.done, f"no {set(faults) - FeederMachine.done}"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])
