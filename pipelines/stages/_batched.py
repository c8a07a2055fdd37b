"""A stage that computes on batches (`Pipeline.map_batches`).

The last bits of a sum depend on the shape of what is summed up. So the function gets batches of one size, however
many samples are prepared: where there are fewer, one is repeated, and what is computed of the copies is dropped.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.environment.torch_threads import limit_torch_threads
from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.stages._sample import Transform

if TYPE_CHECKING:
    import torch

#: What "auto" is in all processes of a run, whatever GPUs they see: the one that loads the declaration decides.
#: Others are given it as a setting (`library_settings`).
auto_device: str | None = None
_computed_ns = 0  # of CPU time, in batch stages of this process, until `take_computed_ns`


def take_computed_ns() -> int:
    """CPU nanoseconds of this process in batch stages since the last call."""
    global _computed_ns
    taken, _computed_ns = _computed_ns, 0
    return taken


@known_as("pipelines.Batched")
@dataclass(frozen=True)
class Batched(Transform):
    """What a stage of `Pipeline.map_batches` calls: for one sample, or with `compute` for several.

    Attributes:
        transform: a function of a batch, or a network in evaluation mode.
        batch_size: samples in each batch that it is given.
        device: where it computes, "cpu", "cuda" or "cuda:1".
    """

    transform: Callable[..., Any]
    batch_size: int
    device: str

    def __call__(self, value: Any, rng: np.random.Generator | None = None) -> Any:
        return self.compute([value], [] if rng is None else [draw_seed(rng)])[0]

    def compute(self, values: Sequence[Any], seeds: Sequence[int]) -> list[Any]:
        """The results for at most `batch_size` samples.

        Args:
            values: of the samples, or of one field of theirs; `describe_shapes` is equal for all.
            seeds: of each sample's generator; empty for a function that draws nothing.
        """
        import torch

        rows = [*range(len(values)), *[0] * (self.batch_size - len(values))]
        function = self._function
        with limit_torch_threads(), torch.inference_mode(), self._set_up():
            generators = [torch.Generator(self.device).manual_seed(seeds[row]) for row in rows] if seeds else []
            if isinstance(values[0], dict):
                columns = {name: self._stack([value[name] for value in values], rows) for name in values[0]}
                result = function(columns, *([generators] if seeds else []))
            else:
                result = function(self._stack(values, rows), *([generators] if seeds else []))
            if not isinstance(result, Mapping):
                return self._split(result)[: len(values)]
            split = {str(name): self._split(column) for name, column in result.items()}
        return [{name: column[row] for name, column in split.items()} for row in range(len(values))]

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        import torch

        if self.device != "cpu" and not torch.cuda.device_count():
            raise PipelineError(f"No CUDA GPUs for device={self.device!r} in this process")
        if isinstance(self.transform, torch.nn.Module) and self.device != "cpu":
            return copy.deepcopy(self.transform).to(self.device)
        return self.transform

    @contextlib.contextmanager
    def _set_up(self) -> Iterator[None]:
        """Keep away what a training loop may have set for its own thread, and would change the results; count."""
        import torch

        global _computed_ns
        began_ns = time.thread_time_ns()
        with contextlib.ExitStack() as settings:
            settings.enter_context(torch.autocast(torch.device(self.device).type, enabled=False))
            if self.device != "cpu":
                settings.enter_context(
                    torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
                )
            yield
        _computed_ns += time.thread_time_ns() - began_ns

    def _stack(self, values: Sequence[Any], rows: Sequence[int]) -> torch.Tensor | list[Any]:
        """A tensor [batch_size, ...] on the device, in C order; a list of what no tensor can hold."""
        import torch

        if not all(map(_is_numeric, values)):
            return [values[row] for row in rows]
        tensors = [value if hasattr(value, "detach") else torch.from_numpy(np.asarray(value)) for value in values]
        batch = torch.empty((self.batch_size, *tensors[0].shape), dtype=tensors[0].dtype, device="cpu")
        for at, row in enumerate(rows):
            batch[at] = tensors[row]
        return batch.to(self.device)

    def _split(self, column: Any) -> list[Any]:
        """The rows of a result, as arrays and numbers of numpy in memory of their own."""
        import torch

        is_list = isinstance(column, list)
        shape = [len(column)] if is_list else list(getattr(column, "shape", []))
        if shape[:1] != [self.batch_size]:
            what = f"{type(column).__name__} {shape}" if shape else repr(column)[:80]
            raise PipelineError(
                f"it returned {what} for a batch of {self.batch_size}; return a row for each sample"
            )
        if is_list:
            return column  # type: ignore[no-any-return]
        column = torch.as_tensor(column)
        try:
            return list(column.clone(memory_format=torch.contiguous_format).cpu().numpy())
        except TypeError:
            raise PipelineError(f"it returned {column.dtype}, which numpy lacks: return .float()") from None


def make_batched(call: Callable[..., Any], batch_size: int, device: str) -> Batched:
    """What the stage of `Pipeline.map_batches` calls; see there.

    Raises:
        PipelineError: the device is none.
    """
    import torch

    global auto_device
    if isinstance(call, torch.nn.Module):
        call = copy.deepcopy(call).eval().requires_grad_(False)  # training the network must not change the samples
    if device == "auto":
        auto_device = auto_device or ("cuda" if torch.cuda.device_count() else "cpu")  # this does not begin CUDA
        device = auto_device
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
        raise PipelineError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:1', got {device!r}")
    return Batched(call, batch_size, str(device))


def draw_seed(rng: np.random.Generator) -> int:
    """The seed of a sample's `torch.Generator`, from the generator of sample and stage."""
    return int(rng.integers(1 << 63))


def describe_shapes(value: Any) -> Any:
    """Equal for what can be stacked: names, shapes and dtypes of a sample or of one value."""
    if isinstance(value, dict):
        return tuple((name, describe_shapes(part)) for name, part in value.items())
    if not _is_numeric(value):
        return None
    return (value.shape, str(value.dtype)) if hasattr(value, "dtype") else type(value)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biufc"
    return isinstance(value, bool | int | float | complex) or hasattr(value, "detach")
