"""Members of one architecture on one GPU: a process each, with and without the Multi-Process Service, against one
process whose weights are stacked (`torch.vmap`, as HFTA fuses them), plain and compiled.

All take steps of SGD on the same batch, which lies on the device, in bf16; samples/s are of all members together.
What is compared is computing: a process of its own has its own CPU thread to launch kernels with, one process has
one for all. Decision 56 says what would follow from the figures.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing as mp
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad

from benchmarks import models
from ensemble.executors.mps import ABSENT, BINARY, Mps, make_client_environment
from gpu_cases.common import NO_GPU, Row, Setting, attempt, check, row, time_calls
from gpu_cases.networks import MADE_UP
from pipelines.ipc.child_processes import end_with_parent

_LR = 1e-3
#: Compiling takes its time, so what decides comes first; the LSTM's graph would be as long as its texts.
_COMPILED = ("cnn", "resnet", "mlp")
#: With torch 2.11 convolutions under autocast fail in an eager vmap of a gradient: "Expected grad_output to have
#: type BFloat16 but got Float".
_EAGER = ("mlp", "lstm")
_START_S = 60.0  # for a process to have its network on the device
_SAME = "stacked members learn as they do alone"
_NO_TIME = "the time of the case was over"
Batch = Mapping[str, torch.Tensor]


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    until = time.monotonic() + setting.budget_s
    counts, names = setting.choose((1, 8, 32), (1, 2)), ("mlp", "cnn", "lstm", "resnet")
    seconds = setting.choose(0.6, 0.0)
    for name in names:
        yield attempt(f"{name}: {_SAME}", functools.partial(_compare, setting, name))
    ways: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {"processes": contextlib.nullcontext}
    if setting.on_gpu and shutil.which(BINARY) is not None:
        ways["processes, MPS"] = _mps
    else:
        reason = ABSENT if setting.on_gpu else NO_GPU
        yield row("processes, MPS", samples_per_s=None, reasons={"samples_per_s": reason})
    for way, service in ways.items():
        with service(), _Workers(setting, max(counts)) as workers:
            for name in names:
                for count in counts:
                    yield attempt(
                        f"{name}, {count} members: {way}",
                        functools.partial(_measure_processes, way, workers, name, count, seconds),
                    )
    for way, chosen in (("vmap", _EAGER), ("compiled vmap", setting.choose(_COMPILED, names[:1]))):
        for count in setting.choose((8, 32, 1), (2,)):
            for name in chosen:
                what = f"{name}, {count} members: {way}"
                if setting.on_gpu and time.monotonic() > until:
                    yield row(what, samples_per_s=None, reasons={"samples_per_s": _NO_TIME})
                else:
                    yield attempt(what, functools.partial(_measure_stacked, setting, what, name, count, seconds))


# -- what is trained ----------------------------------------------------------------------------------------------


def _make_net(setting: Setting, name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if name == "mlp":
        width = setting.choose(256, 8)
        net: nn.Module = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        net.append(nn.Linear(width, 10))  # type: ignore[operator]
    elif name == "lstm":
        small = models.net_of("lstm", words=50, embed=8, hidden=8, length=8)
        net = models.model(setting.choose(models.NETS["lstm"], small).params(MADE_UP))
    else:  # the ResNet has 9 layers
        small = models.net_of(name, width=2, pixels=8)
        net = models.model(setting.choose(models.NETS[name], small).params(MADE_UP))
    return net.to(setting.device)


def _make_batch(setting: Setting, name: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    size, label = setting.choose(128, 4), "label"
    if name == "mlp":
        values = torch.randn(size, 64, generator=generator)
    elif name == "lstm":
        values = torch.randint(1, 50, (size, setting.choose(128, 8)), generator=generator)
    else:
        values = torch.randn(size, 3, *[setting.choose(32, 8)] * 2, generator=generator)
    classes = 2 if name == "lstm" else 10
    batch = {"values": values, label: torch.arange(size) % classes}
    return {key: value.to(setting.device) for key, value in batch.items()}


def _compute_loss(
    setting: Setting, call: Callable[[torch.Tensor], torch.Tensor], batch: Batch, exact: bool
) -> torch.Tensor:
    with torch.autocast(setting.device, torch.bfloat16, enabled=setting.on_gpu and not exact):
        outputs = call(batch["values"])
    return nn.functional.cross_entropy(outputs.float(), batch["label"])


def _make_step(
    setting: Setting, name: str, seed: int, *, exact: bool = False
) -> tuple[nn.Module, Callable[[], object]]:
    """A network of a member by itself, and what takes one step with it, in fp32 if it is to be exact."""
    net, batch = _make_net(setting, name, seed), _make_batch(setting, name)
    params = list(net.parameters())

    def step() -> None:
        for each in params:
            each.grad = None
        _compute_loss(setting, net, batch, exact).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            torch._foreach_add_(params, [each.grad for each in params], alpha=-_LR)  # type: ignore[misc]

    return net, step


class _Stacked:
    """Members with stacked weights, each tensor [members, ...]."""

    def __init__(
        self, setting: Setting, name: str, count: int, *, compiled: bool = False, exact: bool = False
    ) -> None:
        nets, self._batch = [_make_net(setting, name, n) for n in range(count)], _make_batch(setting, name)
        parts = ([dict(net.named_parameters()) for net in nets], [dict(net.named_buffers()) for net in nets])
        self.params, self._buffers = (
            {key: torch.stack([each[key].detach() for each in own]) for key in own[0]} for own in parts
        )
        self._has_cudnn = name != "lstm"  # vmap knows no cell of it
        skeleton = nets[0].to("meta")

        def loss(params: Any, buffers: Any) -> torch.Tensor:
            def call(values: torch.Tensor) -> torch.Tensor:
                return functional_call(skeleton, (params, buffers), (values,))  # type: ignore[no-any-return]

            return _compute_loss(setting, call, self._batch, exact)

        grads: Any = torch.vmap(grad(loss))
        self._grads = torch.compile(grads) if compiled else grads

    def step(self) -> None:
        """One step of all members."""
        off = torch.backends.cudnn.flags(enabled=False), torch.backends.mkldnn.flags(enabled=False)
        with contextlib.ExitStack() as stack:
            for each in () if self._has_cudnn else off:
                stack.enter_context(each)
            found = self._grads(self.params, self._buffers)
        with torch.no_grad():
            names = list(self.params)
            torch._foreach_add_([self.params[n] for n in names], [found[n] for n in names], alpha=-_LR)


# -- what is measured ---------------------------------------------------------------------------------------------


def _compare(setting: Setting, name: str) -> Row:
    torch.backends.cudnn.allow_tf32 = False
    stacked, errors = _Stacked(setting, name, 2, exact=True), list[float]()
    for _ in range(3):
        stacked.step()
    for member in range(2):
        start = dict(_make_net(setting, name, member).named_parameters())
        net, step = _make_step(setting, name, member, exact=True)
        for _ in range(3):
            step()
        with torch.no_grad():
            pairs = [(value, start[key], stacked.params[key][member]) for key, value in net.named_parameters()]
            moved = sum(float((value - before).square().sum()) for value, before, _ in pairs)
            apart = sum(float((value - other).square().sum()) for value, _, other in pairs)
        errors.append((apart / moved) ** 0.5)
    return check(f"{name}: {_SAME}", max(errors) < 1e-2, relative_error=max(errors))


def _measure_stacked(setting: Setting, what: str, name: str, count: int, seconds: float) -> Row:
    torch.backends.cudnn.allow_tf32 = True
    torch.compiler.reset()
    begun = time.perf_counter()
    stacked = _Stacked(setting, name, count, compiled="compiled" in what)
    stacked.step()
    setting.synchronize()
    ready = time.perf_counter()
    timed = time_calls(setting, stacked.step, seconds)
    size = len(_make_batch(setting, name)["label"])
    return row(what, samples_per_s=count * size / timed.each_s, step_ms=1e3 * timed.each_s, first_s=ready - begun)


def _measure_processes(way: str, workers: _Workers, name: str, count: int, seconds: float) -> Row:
    rates = workers.measure(name, count, seconds)
    return row(f"{name}, {count} members: {way}", samples_per_s=sum(rates), slowest_samples_per_s=min(rates))


@contextlib.contextmanager
def _mps() -> Iterator[None]:
    """The service; processes that are started within have it."""
    with tempfile.TemporaryDirectory() as folder:
        service = Mps(Path(folder))
        added = make_client_environment(Path(folder), 0.0)
        os.environ.update(added)
        try:
            yield
        finally:
            for key in added:
                del os.environ[key]
            service.close()


class _Workers:
    """Processes that train at the same time, each one member of what is asked for."""

    def __init__(self, setting: Setting, count: int) -> None:
        self._count, self._setting = count, setting
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def __enter__(self) -> _Workers:
        context = mp.get_context("spawn")
        for number in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._setting, number), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends them
        for process in self._processes:
            process.join(10)
            process.kill()

    def measure(self, name: str, count: int, seconds: float) -> list[float]:
        """Samples/s of each of so many members that train at once."""
        chosen = self._pipes[:count]
        for request in ((name, seconds), "go"):
            for pipe in chosen:
                pipe.send(request)
            answers = [self._receive(pipe) for pipe in chosen]
        return answers

    def _receive(self, pipe: Any) -> Any:
        if not pipe.poll(_START_S):
            raise TimeoutError(f"a process has not answered for {_START_S:g} s")
        answer = pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def _serve(pipe: Any, setting: Setting, number: int) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            try:
                name, seconds = pipe.recv()
                _, step = _make_step(setting, name, number)
                for _ in range(3):
                    step()
                setting.synchronize()
                pipe.send(None)
                pipe.recv()
                timed = time_calls(setting, step, seconds, warm=0)
                pipe.send(len(_make_batch(setting, name)["label"]) / timed.each_s)
            except RuntimeError as error:
                pipe.send(f"{type(error).__name__}: {error}")
