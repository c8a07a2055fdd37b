"""Generators of random numbers: seeded for stages that declare them, watched for all others.

A sample is a function of pipeline, epoch and index. A draw from a global generator, or from one that a stage holds
itself, depends on earlier draws: each process would make other samples of the same record. Such a draw is found by
the states of the generators before and after it. A group of generators is a dict, name -> generator.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from typing import Any

import numpy as np

from pipelines.description import PipelineDescription

TORCH = "torch's global generator"
PYTHON, NUMPY = "Python's random", "numpy's global generator"
#: What a stage declares, `Stage.random` -> the global generators that are seeded before each of its calls.
SEEDED: dict[str | None, frozenset[str]] = {
    "torch": frozenset((TORCH,)),
    "python": frozenset((PYTHON, NUMPY)),
    "global": frozenset((PYTHON, NUMPY, TORCH)),
}
_MT19937_BYTES = 4 * 624 + 4  # of numpy and Python: its 624 words, and the place in them
_DEEPEST = 6  # a generator of a transform in a list of a transform in a list of a stage
_MOST = 2000  # objects to look at, per function
_LONGEST = 64  # items of a list or dict to look at: more are data

# Held while states are set, drawn from or compared: draws of another thread would change a sample, or be noticed.
_lock = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock in a forked child: a thread that held it does not exist there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def lock_generators() -> threading.RLock:
    """The lock to be held by a thread that uses the global generators."""
    return _lock


def seed_for_sample(kind: str, generator: np.random.Generator) -> None:
    """Seed the global generators that a stage declares, from the generator of its sample.

    Args:
        kind: `Stage.random`, a key of `SEEDED`.
        generator: of the sample and stage.
    """
    seeded = SEEDED[kind]
    if PYTHON in seeded:
        random.seed(int(generator.integers(1 << 63)))
        np.random.seed(generator.integers(1 << 32, size=4, dtype=np.uint32))
    if TORCH in seeded:
        import torch

        # The default CPU generator alone: torch.manual_seed would reseed the devices of a training process too.
        torch.default_generator.manual_seed(int(generator.integers(1 << 63)))


def find_global(names: Collection[str] = SEEDED["global"]) -> dict[str, Any]:
    """The global generators of these names; torch's only if torch has been imported."""
    # Where another thread is importing torch, this waits for it: its generator read too early ends the process.
    module = importlib.import_module("torch") if sys.modules.get("torch") is not None else None
    torch = getattr(module, "default_generator", None)
    python, numpy = (getattr(draw, "__self__", None) for draw in (random.random, np.random.random))
    generators = {PYTHON: python, NUMPY: numpy, TORCH: torch}
    return {name: generators[name] for name in generators if name in names and generators[name] is not None}


def read_states(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each generator."""
    return {name: _read_state(generator) for name, generator in generators.items()}


def _read_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


@contextlib.contextmanager
def preserve_states(generators: Mapping[str, Any]) -> Iterator[None]:
    """Lock the global generators, and restore the states of these on exit; with none, nothing is locked."""
    if not generators:
        yield
        return
    with lock_generators():
        before = read_states(generators)
        try:
            yield
        finally:
            for name, state in before.items():
                generator = generators[name]
                if isinstance(generator, np.random.Generator):
                    generator.bit_generator.state = state
                elif isinstance(generator, random.Random):
                    generator.setstate(state)
                else:
                    generator.set_state(state)


def preserve_seeded(names: Collection[str]) -> contextlib.AbstractContextManager[None]:
    """`preserve_states` of the global generators of these names, which are seeded within."""
    if TORCH in names:
        import torch  # noqa: F401  # so that it is among them
    return preserve_states(find_global(names) if names else {})


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """The names of the generators whose states (or marks) differ, or that are new."""
    return {name for name, state in after.items() if name not in before or not _is_equal(before[name], state)}


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in one.items())
    if hasattr(one, "numpy"):
        one, other = one.numpy(), other.numpy()
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def advance(generators: Mapping[str, Any]) -> None:
    """Advance each generator to another state."""
    for generator in generators.values():
        if isinstance(generator, np.random.Generator | np.random.RandomState | random.Random):
            generator.random()
        else:
            sys.modules["torch"].rand((), generator=generator)


def find_draws(
    call: Callable[[], Any], find_own: Callable[[], dict[str, Any]], names: Collection[str] = SEEDED["global"]
) -> set[str]:
    """The names of the generators that a call draws from without seeding them first; their states are restored.

    Args:
        find_own: returns the generators to look at beside the global ones; a call may make new ones.
        names: of the global ones.
    """
    ends = []
    with preserve_states(find_global(names) | find_own()):
        for _ in range(2):
            advance(find_global(names) | find_own())
            before = read_states(find_global(names) | find_own())
            call()
            ends.append((before, read_states(find_global(names) | find_own())))
    touched = set().union(*(find_changes(*end) for end in ends))
    return touched & find_changes(ends[0][1], ends[1][1])


def find_own_generators(pipeline: PipelineDescription) -> dict[str, Any]:
    """The generators that source and stages hold, without those that are seeded for each sample."""
    generators = find_generators(pipeline.source)
    for stage in pipeline.stages:
        if stage.random != "own":
            generators |= find_generators(stage.call)
    return generators


def find_generators(call: Any) -> dict[str, Any]:
    """The generators that a function or object holds, at most a few levels down, without the global ones."""
    generators: dict[str, Any] = {}
    seen = {id(generator) for generator in find_global().values()}
    level = [(_name(call), call)]
    for _ in range(_DEEPEST):
        deeper: list[tuple[str, Any]] = []
        for name, value in level:
            if id(value) in seen or len(seen) >= _MOST:
                continue
            seen.add(id(value))
            if _is_generator(value):
                generators[f"{name}, a {type(value).__module__}.{type(value).__name__} of its own"] = value
            else:
                deeper += _list_parts(name, value)
        level = deeper
    return generators


def _is_generator(value: Any) -> bool:
    if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
        return not isinstance(value, random.SystemRandom)
    torch_generator = getattr(sys.modules.get("torch"), "Generator", None)
    return torch_generator is not None and isinstance(value, torch_generator) and value.device.type == "cpu"


def _list_parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """What a value holds, each with a name for error messages."""
    if isinstance(value, functools.partial):
        return [(name, part) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, types.MethodType):
        return [(_name(value.__self__), value.__self__), (name, value.__func__)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        closure = {free: cell.cell_contents for free, cell in cells if cell != types.CellType()}
        named = {**closure, **(value.__kwdefaults__ or {})}
        read = [(key, value.__globals__[key]) for key in value.__code__.co_names if key in value.__globals__]
        defaults = [(name, part) for part in value.__defaults__ or ()]
        return [*((f"{name}'s {key}", part) for key, part in named.items()), *defaults, *read]
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        parts = value.values() if isinstance(value, Mapping) else value
        return [(name, part) for part in parts] if len(value) <= _LONGEST else []
    if isinstance(value, types.ModuleType | type) or not isinstance(getattr(value, "__dict__", None), dict):
        return []
    return [(f"{_name(value)}.{key}", part) for key, part in vars(value).items()]


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


class DrawWatch:
    """Compares generators before and after many samples, which costs little per sample.

    The first sample of a pipeline shows most undeclared draws; this shows those for some samples only.
    Only the main thread watches: beside other threads that draw, a change says nothing.

    Args:
        pipeline: whose source and stages are watched.
        seeded: names of global generators that are seeded for a stage, and are not watched.
    """

    def __init__(self, pipeline: PipelineDescription, seeded: Set[str]) -> None:
        self._names = SEEDED["global"] - seeded
        self._own = find_own_generators(pipeline)
        self._is_alone = False
        self._watched: dict[str, Any] = {}
        self._before: dict[str, Any] = {}

    def start(self) -> None:
        """Note the states."""
        self._is_alone = threading.current_thread() is threading.main_thread()
        if self._is_alone:
            if not self._names <= self._watched.keys():  # torch may be imported later
                self._watched = find_global(self._names) | self._own
            self._before = read_marks(self._watched)

    def find_changes(self) -> set[str]:
        """The names of the generators that differ from those at the last `start`."""
        return find_changes(self._before, read_marks(self._watched)) if self._is_alone else set()

    def ignore(self, names: set[str]) -> None:
        """Leave generators out from now on: they change, but no sample depends on them."""
        self._names -= names
        self._own, self._watched = (
            {name: held[name] for name in held if name not in names} for held in (self._own, self._watched)
        )


def read_marks(generators: Mapping[str, Any]) -> dict[str, Any]:
    """As `read_states`, in a fraction of the time: what differs if a state does, and cannot be set.

    A draw of numpy that only uses up the second of a pair of Gaussian numbers does not show.
    """
    return {name: _read_mark(generator) for name, generator in generators.items()}


def _read_mark(generator: Any) -> Any:
    if type(generator) is random.Random and _is_known(random.Random):
        return _read_memory(generator), vars(generator).get("gauss_next")
    if isinstance(generator, np.random.RandomState) and generator is np.random.random.__self__:  # type: ignore[attr-defined]
        bits = np.random.mtrand.get_bit_generator()
        if type(bits) is np.random.MT19937 and _is_known(np.random.MT19937):
            return _read_memory(bits)
    state = _read_state(generator)
    return state.numpy().tobytes() if hasattr(state, "numpy") else state


def _read_memory(generator: Any) -> bytes:
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return ctypes.string_at(id(generator) + object.__basicsize__, _MT19937_BYTES)  # CPython: _randommodule.c


@functools.cache
def _is_known(kind: Any) -> bool:
    """Whether every draw of such a generator shows in the memory that is read, and nothing else does."""
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
        return False
    generator, seen = kind(1), set[bytes]()
    for _ in range(700):  # more than there are words
        seen.update((_read_memory(generator), _read_memory(generator)))
        (generator.random_raw if kind is np.random.MT19937 else generator.random)()
    return len(seen) == 700
