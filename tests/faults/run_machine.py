"""A run in histories that hypothesis draws: killed at its n-th change of a file, its members managed.

`python tests/faults/run_machine.py SEED EXAMPLES` runs it in a process of its own, which forks a driver for each
life of a run; faults that are named after these, such as "killed", must have happened in some history.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

sys.path.append(str(Path(__file__).parents[1] / "support"))  # as this is run by its path, too
from faults_members import declared, lost_and_doubled
from kit.finished_runs import read_state

import ensemble
from ensemble import Member
from ensemble.store import RunDir, RunStatus
from ensemble.store.verification import verify

EPOCHS, WIDTHS, ADDED = 3, (1, 1), 2
#: What changes files; a driver dies before, within or after one of these calls.
CHANGES = ("write", "replace", "rename", "link", "unlink", "mkdir", "fsync")
LATEST = 260  # such changes, about as many as a run of these members makes


class Wish(NamedTuple):
    """A request that a driver gets when it logs its `at`-th event."""

    verb: str
    at: int
    member: int


class Death(NamedTuple):
    """The end of a driver, as a power cut does it: at its `at`-th change of a file."""

    at: int
    when: str  # before, within or after


DEATHS = st.builds(Death, st.integers(1, LATEST), st.sampled_from(["before", "within", "after"]))
VERBS = st.sampled_from(["pause", "resume", "add", "cancel", "stop"])
WISHES = st.lists(st.builds(Wish, VERBS, st.integers(1, 30), st.integers(0, 1)), max_size=3)


def die_at(death: Death) -> None:
    """Let this process be killed at a change of a file by the packages; half of what it writes then is written."""
    count = 0

    def wrap(name: str) -> Callable[..., Any]:
        change = getattr(os, name)

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count != death.at:
                return change(*args, **options)
            if death.when == "within" and name == "write":
                change(args[0], bytes(args[1])[: len(args[1]) // 2])
            elif death.when == "after":
                change(*args, **options)
            return os.kill(os.getpid(), signal.SIGKILL)

        return counted

    # The members' code has the real functions: it would be other code than before.
    dying = types.SimpleNamespace(**{**vars(os), **{name: wrap(name) for name in CHANGES}})
    for name, module in sys.modules.items():
        if name.startswith(("ensemble.", "pipelines.")) and getattr(module, "os", None) is os:
            module.os = dying  # type: ignore[attr-defined]


def declare(directory: Path) -> ensemble.Ensemble:
    return declared(directory / "account", WIDTHS, step_s=0.0, epochs=EPOCHS, sharing="independent")


def extra_member(directory: Path, number: int) -> Member:
    """A member that is added; its seed is declared, so that its weights do not depend on when that is."""
    params = {"lr": 0.1 + number / 100, "step_s": 0.0, "account": str(directory / "account")}
    return Member(params, seed=100 + number)


def drive(directory: Path, wishes: Sequence[Wish], death: Death | None) -> None:
    """One life of the run's driver; a paused run is let go on, since nobody else would."""
    due, logged = sorted(wishes, key=lambda wish: wish.at), 0
    run_dir = directory / "run"

    def on_event(event: dict[str, Any]) -> None:
        nonlocal logged
        logged += 1
        if event["type"] == "run_started":
            for member in [m.id for m in read_state(run_dir).members.values() if m.state == "paused"]:
                ensemble.attach(run_dir).resume(member)
        if event["type"] == "paused":
            ensemble.attach(run_dir).resume(event["member"])
        while due and due[0].at <= logged and event["type"] not in ("run_finished", "run_stopped"):
            ask(directory, due.pop(0))

    if death is not None:
        die_at(death)
    ensemble.submit(declare(directory), run_dir, "inline", on_event=on_event).wait()


def name_member(wish: Wish) -> str:
    return f"member-{wish.member % len(WIDTHS)}"


def ask(directory: Path, wish: Wish) -> None:
    run = ensemble.attach(directory / "run")
    if wish.verb == "stop":
        run.stop()
    elif wish.verb == "add":
        run.add(extra_member(directory, wish.member % ADDED))
    elif (name := name_member(wish)) in run.state.members:
        getattr(run, wish.verb)(name)


def in_child(life: Callable[[], object], output: Path) -> int:
    """Run that in a forked process, which prints into a file; its exit code, or minus the number of a signal."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            life()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class RunMachine(RuleBasedStateMachine):
    """Lives of a run's drivers, one after the other; the end checks that nothing was lost."""

    expected: ClassVar[dict[int, str | None]] = {}  # by seed: the weights of members of a run that nothing befell
    done: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="run-machine-"))
        self.run_dir, self.log = self.directory / "run", b""
        self.finished: dict[str, tuple[int, str | None]] = {}
        self.may_be_cancelled: set[str] = set()
        self.story: list[Any] = []

    @initialize(death=DEATHS)
    def begin(self, death: Death) -> None:
        self.live([], death)

    @rule(wishes=WISHES, death=st.none() | DEATHS)
    def go_on(self, wishes: list[Wish], death: Death | None) -> None:
        self.live(wishes, death)

    def live(self, wishes: list[Wish], death: Death | None) -> None:
        self.story.append((wishes, death))
        self.may_be_cancelled |= {name_member(wish) for wish in wishes if wish.verb == "cancel"}
        code = in_child(lambda: drive(self.directory, wishes, death), self.directory / "output")
        expected = (0, -signal.SIGKILL) if death is not None else (0,)
        assert code in expected, self.tell(f"a driver ended with {code}")
        self.done.update([*(wish.verb for wish in wishes), "killed" if code else "came to its end"])

    @invariant()
    def what_was_logged_stays(self) -> None:
        """Whole lines are never lost, and a member that has finished is never trained again."""
        path = self.run_dir / "events.jsonl"
        if not path.exists() or not (content := path.read_bytes()):
            assert not self.log, self.tell("the log is gone")
            return
        whole = content[: content.rfind(b"\n") + 1]
        assert whole.startswith(self.log), self.tell("lines of the log have changed")
        self.log, state = whole, read_state(self.run_dir)
        counts = {m.id: (m.state, m.epoch, m.attempts) for m in state.members.values()}
        status = RunStatus.load(RunDir(self.run_dir)).state
        assert counts == {m.id: (m.state, m.epoch, m.attempts) for m in status.members.values()}
        finished = {m.id: (m.attempts, m.weights_sha256) for m in state.members.values() if m.state == "finished"}
        assert finished.items() >= self.finished.items(), self.tell("a finished member was trained again")
        self.finished = finished

    def teardown(self) -> None:
        try:
            if self.story:
                self.end()
        finally:
            shutil.rmtree(self.directory)

    def end(self) -> None:
        """Drive the run to its end: all members have the weights and samples of a run that nothing befell."""
        self.live([], None)
        self.what_was_logged_stays()
        state = read_state(self.run_dir)
        assert state.ended is not None and state.ended.type == "run_finished", self.tell(str(state.ended))
        for member in state.members.values():
            if member.state == "cancelled":
                assert member.id in self.may_be_cancelled, self.tell(f"nobody cancelled {member.id}")
                continue
            assert member.state == "finished", self.tell(f"{member.id} is {member.state}: {member.error}")
            assert member.weights_sha256 == self.expected[member.identity["seed"]], self.tell(
                f"{member.id} has other weights"
            )
            account = lost_and_doubled(self.directory / "account", member.id, 1, EPOCHS)
            assert account == (0, 0), self.tell(f"{member.id} missed, and trained twice on: {account}")
        damaged = [check for check in verify(RunDir(self.run_dir)) if not check.is_sound]
        assert not damaged, self.tell(str(damaged))
        remains = [p.name for p in self.run_dir.glob("*/**/*") if ".tmp" in p.name or p.parent.name == "requests"]
        assert not remains, self.tell(f"left: {remains}")

    def tell(self, what: str) -> str:
        """What is wrong, after which lives; of a fault that is seldom there, hypothesis only says that it is."""
        output = (self.directory / "output").read_text()[-3000:]
        text = "\n".join([what, *map(str, self.story), output])
        print(text, file=sys.stderr, flush=True)
        return text


def undisturbed(directory: Path) -> dict[int, str | None]:
    """The weights of all members of a run that nothing befell."""

    def add_all(event: dict[str, Any]) -> None:
        if event["type"] == "run_started":
            for number in range(ADDED):
                ensemble.attach(directory / "run").add(extra_member(directory, number))

    def life() -> None:
        ensemble.submit(declare(directory), directory / "run", "inline", on_event=add_all).wait()

    assert in_child(life, directory / "output") == 0, (directory / "output").read_text()
    members = read_state(directory / "run").members.values()
    assert len(members) == len(WIDTHS) + ADDED
    return {member.identity["seed"]: member.weights_sha256 for member in members}


def main(number: int, examples: int, *faults: str) -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # no thread is there that a fork would lose
    with tempfile.TemporaryDirectory(prefix="run-machine-") as directory:
        RunMachine.expected = undisturbed(Path(directory))
    options = settings(max_examples=examples, stateful_step_count=4, deadline=None, database=None)
    options = settings(options, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(seed(number)(RunMachine), settings=options)
    assert set(faults) <= RunMachine.done, f"no {set(faults) - RunMachine.done}"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*map(int, sys.argv[1:3]), *sys.argv[3:])
