"""The machine as torch, NVML and the project see it, and whether NVML counts energy and activity under load."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator

import torch

from gpu_cases.common import NO_GPU, GpuEnergy, Row, Setting, attempt, check, row, time_calls

_PACKAGES = ("numpy", "triton", "numba", "nvidia-ml-py", "safetensors", "cloudpickle", "torchvision", "ray")
_PACKAGES += ("optuna",)


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    from ensemble.executors.mps import ABSENT, BINARY

    yield attempt("software", functools.partial(_list_software, setting))
    yield row("packages", **{name: _find_version(name) for name in _PACKAGES})
    found = shutil.which(BINARY)
    yield row("Multi-Process Service", binary=found, reasons={"binary": ABSENT})
    yield attempt("host", functools.partial(_describe_host, setting))
    yield attempt("load", functools.partial(_measure_load, setting))
    yield attempt("activity", functools.partial(_measure_activity, setting))
    yield from _check_gpus(setting)


def _list_software(setting: Setting) -> Row:
    return row(
        "software",
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if setting.on_gpu else None,
        driver=_find_driver(),
        kernel=platform.release(),
        reasons=dict.fromkeys(
            ("cuda", "cudnn", "nccl", "driver"), "there is no GPU, or torch was built without it"
        ),
    )


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _describe_host(setting: Setting) -> Row:
    from pipelines.environment.machine_limits import usable_cpus

    cores = usable_cpus()
    if not setting.on_gpu:
        return row("host", cores=cores, gpu=None, reasons={"gpu": NO_GPU})
    properties = torch.cuda.get_device_properties(0)
    return row(
        "host",
        cores=cores,
        gpu=properties.name,
        uuid="GPU-" + str(properties.uuid).removeprefix("GPU-"),
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory_gb=properties.total_memory / 2**30,
        bf16=torch.cuda.is_bf16_supported(),
    )


def _check_gpus(setting: Setting) -> Iterator[Row]:
    """The GPUs that NVML lists are those of torch, and the executor's node offers them by id."""
    from ensemble.executors.host import describe_host
    from ensemble.meter.devices import list_gpus

    gpus, node = list_gpus(), describe_host("local")
    for gpu in gpus:
        yield row("NVML's GPU", id=gpu.id, model=gpu.model, memory_gb=gpu.memory_gb)
    yield check(
        "the node's GPUs are NVML's", node.gpu_ids == tuple(gpu.id for gpu in gpus), gpu_ids=list(node.gpu_ids)
    )
    if setting.on_gpu:
        seen = torch.cuda.device_count()
        yield check("NVML lists the GPUs that torch sees", len(gpus) == seen, nvml=len(gpus), torch=seen)
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        yield check("the first GPU's id is torch's", bool(gpus) and uuid in gpus[0].id, torch=uuid)


def _measure_load(setting: Setting) -> Row:
    """NVML's energy goes up while the GPU multiplies matrices, and its load and memory can be read."""
    from ensemble.meter.gpu import GpuUse

    energy, use = GpuEnergy(setting), GpuUse(0)
    size = setting.choose(8192, 64)
    factor = torch.randn(size, size, device=setting.device, dtype=torch.bfloat16)
    use.mark()
    timed = time_calls(setting, lambda: factor @ factor, setting.choose(3.0, 0.0), energy)
    what, used = f"matrix product of {size}, bf16: NVML counts its energy", use.used_bytes()
    figures = row(
        what,
        tflops=2 * size**3 / timed.each_s / 1e12,
        watts=timed.watts,
        joules=timed.energy_j,
        busy=use.busy() if setting.on_gpu else None,
        memory_used_mb=used / 1e6 if used is not None and setting.on_gpu else None,
        reasons=dict.fromkeys(
            ("watts", "joules", "busy", "memory_used_mb"), energy.reason or "NVML gave no value"
        ),
    )
    return {**check(what, not setting.on_gpu or (timed.energy_j or 0) > 0), **figures}


def _measure_activity(setting: Setting) -> Row:
    """This process's SM-seconds by NVML, beside its GPU time by CUDA events, while it multiplies matrices."""
    from ensemble.meter.devices import RunProcess, list_gpus
    from ensemble.meter.gpu_activity import GpuActivity
    from ensemble.train.gpu_busy import open_gpu_busy

    gpus = list_gpus()[:1] if setting.on_gpu else []
    busy = open_gpu_busy(torch.device(setting.device, 0) if setting.on_gpu else torch.device("cpu"))
    factor = torch.randn(*[setting.choose(4096, 64)] * 2, device=setting.device)

    def multiply() -> None:
        if busy is not None:
            busy.begin()
        factor @ factor
        if busy is not None:
            busy.end()

    multiply()
    setting.synchronize()
    activity, before_s = GpuActivity(gpus), 0.0 if busy is None else busy.read()
    timed = time_calls(setting, multiply, setting.choose(3.0, 0.0), warm=1)
    me = {os.getpid(): RunProcess("train", "this", gpu.id) for gpu in gpus}
    found = [entry for entries in activity.sample(me, timed.seconds).values() for entry in entries]
    known = activity.describe()
    activity.close()
    own_s = sum(used_s for _, member, used_s in found if member == "this")
    event_s = None if busy is None else busy.read() - before_s
    what = "matrix products: CUDA events and NVML see this process at work"
    unseen = "NVML named no process of this one" if gpus else NO_GPU
    figures = row(
        what,
        seconds=timed.seconds,
        event_s=event_s,
        sm_s=own_s or None,
        gpu_activity=known or None,
        reasons={"event_s": NO_GPU, "gpu_activity": NO_GPU, "sm_s": unseen},
    )
    return {**check(what, event_s is None or 0.5 * timed.seconds < event_s < 1.1 * timed.seconds), **figures}
