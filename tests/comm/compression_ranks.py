"""What the ranks of `test_compression` do; in a module of its own, so that they can import it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ensemble.comm import Communicator
from ensemble.comm.codecs import make_codec
from ensemble.comm.compressed_all_reduce import CompressedAllReduce
from ensemble.comm.error_feedback import remaining_error
from ensemble.comm.gradients import GradientExchange
from ensemble.comm.powersgd import PowerSGD
from ensemble.spec.options import COMPRESSIONS, resolve
from ensemble.store import load_checkpoint, save_checkpoint

SHAPES = {"matrix": (300, 200), "bias": (300,), "kernel": (64, 32, 3, 3), "unused": (120, 100)}
FEEDBACK = {"fp16": {"error_feedback": True}, "qsgd4": {"error_feedback": True}, "qsgd8": {}, "onebit": {}}
FEEDBACK["powersgd"] = {}
STEPS = 3


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}


def gradient(step: int, rank: int, name: str) -> torch.Tensor | None:
    """Of two ranks that have one each; nobody has one for "unused", and rank 2 has only the bias's."""
    if name == "unused" or (rank == 2 and name != "bias"):
        return None
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + len(name))
    return torch.randn(SHAPES[name], generator=generator)


def exchange_of(comm: Communicator, given: dict[str, nn.Parameter], name: str, **more: Any) -> GradientExchange:
    compression = resolve("compression", {"name": name, **more}, COMPRESSIONS)
    options: dict[str, Any] = {"seed": 5, "revertible": True, "bucket_bytes": 250_000}
    return GradientExchange(list(given.values()), comm, compression=compression, **options)


def step(exchange: Any, own: dict[str, nn.Parameter], number: int, rank: int, unit: float = 1.0) -> None:
    for name, parameter in own.items():
        grad = gradient(number, rank, name)
        parameter.grad = None if grad is None else grad * unit
    exchange.loss_scale = unit
    exchange.finish()


def digest(own: dict[str, nn.Parameter]) -> str:
    grads = [p.grad.numpy().tobytes() for p in own.values() if p.grad is not None]
    return hashlib.sha256(b"".join(grads)).hexdigest()


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def add(total: dict[str, torch.Tensor], own: dict[str, nn.Parameter], unit: float = 1.0) -> None:
    for key, parameter in own.items():
        if parameter.grad is not None:
            total[key] += parameter.grad.double() / unit


def scheme(comm: Communicator, folder: Path, name: str, options: dict[str, Any]) -> dict[str, Any]:
    own, saved = parameters(), dict[str, Any]()
    exchange = exchange_of(comm, own, name, **options)
    total, unused, digests, sent, error = zeros(), True, list[str](), 0.0, 0.0
    for number in range(STEPS):
        # A loss scale that changes, and a step that comes to nothing.
        before = comm.sent_bytes
        step(exchange, own, 77, comm.rank, unit=64.0)
        exchange.end_step(False)
        sent = comm.sent_bytes - before
        unit = 2.0**number
        step(exchange, own, number, comm.rank, unit=unit)
        exchange.end_step(True)
        unused &= own["unused"].grad is None
        add(total, own, unit)
        digests.append(digest(own))
        if number == 0:
            wanted = sum(grad for r in range(3) if (grad := gradient(0, r, "matrix")) is not None)
            assert own["matrix"].grad is not None and isinstance(wanted, torch.Tensor)
            error = float((own["matrix"].grad - wanted).norm() / wanted.norm())
        if number == STEPS - 2:
            saved = told(comm, folder, exchange.state_dict(), name)
    applied = [(number, rank) for number in range(STEPS) for rank in range(3)]
    left = lost(total, told(comm, folder, exchange.state_dict(), name), own, exchange, applied)
    exchange.close()

    resumed = parameters()
    exchange = exchange_of(comm, resumed, name, **options)
    exchange.load_state_dict(saved)
    step(exchange, resumed, 77, comm.rank, unit=64.0)
    exchange.end_step(False)
    step(exchange, resumed, STEPS - 1, comm.rank, unit=2.0 ** (STEPS - 1))
    again = digest(resumed)
    exchange.close()
    exchange = exchange_of(comm, parameters(), name, **options)
    exchange.load_state_dict({**saved, "world": 2})  # as if fewer ranks had saved the same sum
    states = saved, told(comm, folder, exchange.state_dict(), f"{name}-shared")
    sizes = {number: parameter.numel() for number, parameter in enumerate(own.values())}
    before, after = (remaining_error(state["own"], state["parameters"], sizes) for state in states)
    kept = all(torch.allclose(before[number], after[number], atol=1e-5) for number in before)
    exchange.close()
    left["kept"] = kept
    return {"unused": unused, "digests": digests, "again": again, "error": error, "sent_bytes": sent, "lost": left}


def told(comm: Communicator, folder: Path, state: dict[str, Any], name: str) -> dict[str, Any]:
    path = folder / f"{name}-{state['steps']}"
    if comm.rank == 0:
        save_checkpoint(path, state)
    comm.barrier(300.0)
    return load_checkpoint(path)


def lost(total: Any, state: Any, own: Any, exchange: Any, applied: list[tuple[int, int]]) -> dict[str, float]:
    """The largest difference of all gradients from what came out and is remembered, and without the latter.

    Of the steps and ranks in `applied` gradients went in.
    """
    gap = without = 0.0
    names = {id(parameter): name for name, parameter in own.items()}
    for bucket, memory in zip(exchange._buckets, state["own"], strict=True):
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            name = names[id(parameter)]
            kept = torch.zeros(bucket.reduction.values.numel(), dtype=torch.float64)
            if isinstance(bucket.reduction, CompressedAllReduce) and memory:
                kept = sum(memory[0]).double()[: kept.numel()] + torch.cat(memory[1]).double()[: kept.numel()]
            elif isinstance(bucket.reduction, PowerSGD):
                kept = sum(memory[0]).double()
            start = view.storage_offset()
            here = kept[start : start + view.numel()].view(view.shape)
            grads = [g.double() for s, r in applied if (g := gradient(s, r, name)) is not None]
            left = sum(grads, torch.zeros(SHAPES[name], dtype=torch.float64)) - total[name]
            gap, without = max(gap, float((left - here).abs().max())), max(without, float(left.abs().max()))
    return {"gap": gap, "without_memory": without}


def train(comm: Communicator, name: str, steps: range, total: Any, saved: Any) -> tuple[GradientExchange, Any]:
    """Some steps, from a saved state on: what comes out is added to `total`."""
    own = parameters()
    exchange = exchange_of(comm, own, name, **FEEDBACK[name])
    if saved is not None:
        exchange.load_state_dict(saved)
    for number in steps:
        step(exchange, own, number, comm.rank)
        exchange.end_step(True)
        add(total, own)
    return exchange, own


GROWN = ("qsgd4", "onebit", "powersgd")


def narrow(comm: Communicator, options: dict[str, Any]) -> None:
    for name in GROWN:
        total = zeros()
        exchange, _ = train(comm, name, range(2), total, None)
        state = exchange.state_dict()
        if comm.rank == 0:
            save_checkpoint(Path(options["folder"]) / f"narrow-{name}", {"state": state, "total": total})
        exchange.close()


def grown(comm: Communicator, folder: Path, name: str) -> dict[str, Any]:
    before = load_checkpoint(folder / f"narrow-{name}")
    saved, total = before["state"], before["total"]
    exchange, _ = train(comm, name, range(0), total, saved)
    states = [bucket.reduction.rank_state() for bucket in exchange._buckets]
    shares = [float(state[0].abs().max()) for state in states if state]
    exchange.close()
    exchange, own = train(comm, name, range(2, STEPS), total, saved)
    applied = [(number, rank) for number in range(STEPS) for rank in range(2 if number < 2 else 3)]
    left = lost(total, told(comm, folder, exchange.state_dict(), f"grown-{name}"), own, exchange, applied)
    exchange.close()
    return {"lost": left, "share": shares}


def wider(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    return {name: grown(comm, Path(options["folder"]), name) for name in GROWN}


def overflow(comm: Communicator, name: str) -> list[bool]:
    own = parameters()
    exchange = exchange_of(comm, own, name)
    step(exchange, own, 0, comm.rank)
    exchange.end_step(True)
    saved = [tensor.clone() for bucket in exchange._buckets for tensor in bucket.reduction.rank_state()]
    grads: Any = {key: gradient(1, comm.rank, key) for key in own}
    if comm.rank == 1:
        grads["matrix"][17, 3] = float("inf")
    for key, parameter in own.items():
        parameter.grad = grads[key]
    exchange.finish()
    found = [not bool(torch.isfinite(own["matrix"].grad).all())]  # type: ignore[arg-type]
    exchange.end_step(False)
    now = [tensor for bucket in exchange._buckets for tensor in bucket.reduction.rank_state()]
    found.append(all(torch.equal(a, b) for a, b in zip(saved, now, strict=True)))
    step(exchange, own, 2, comm.rank)
    found.append(all(bool(torch.isfinite(p.grad).all()) for p in own.values() if p.grad is not None))
    exchange.close()
    return found


def together(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    folder = Path(options["folder"])
    return {
        "schemes": {name: scheme(comm, folder, name, options) for name, options in FEEDBACK.items()},
        "overflow": {name: overflow(comm, name) for name in ("fp16", "bf16", "qsgd2", "onebit", "powersgd")},
    }


def use_kernels() -> None:
    """Compile what is compiled, or load it, once for all ranks, which are forked from this process."""
    for name in ("qsgd2", "qsgd4", "qsgd8", "onebit"):
        codec, values = make_codec({"name": name}), torch.ones(700)
        wire = torch.zeros(codec.wire_bytes(700), dtype=torch.uint8)
        codec.encode(values, wire, key=0)
        codec.encode(values, wire, key=0, error=torch.zeros(700))
        codec.decode(wire, values)


use_kernels()
