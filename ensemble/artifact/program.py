"""Exports a model with what comes before it as a `torch.export` program. Imports torch."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import json
import logging
import pickle
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ensemble.artifact.layout import ArtifactError
from ensemble.artifact.preprocessing import Input
from ensemble.combine import CombineError
from ensemble.train.compilation import remove_empty

Batch = dict[str, Tensor]
Outputs = Tensor | Mapping[str, Tensor]

#: What is in a .pt2 file of tensors and a graph, below its first folder.
_PARTS = (
    "data/weights/weight_*",
    "data/weights/*_config.json",
    "data/constants/tensor_*",
    "data/constants/*_config.json",
    "data/sample_inputs/*.pt",
    "models/*.json",
    "archive_format",
    "archive_version",
    "byteorder",
    ".data/*",
)


class Program(nn.Module):
    """A model behind stages: maps a batch (field -> tensor [b, ...]) to what the model gives for it."""

    def __init__(self, stages: Iterable[nn.Module], model: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.model = model
        self.requires_grad_(False)
        self.eval()

    def forward(self, batch: Batch) -> Outputs:
        for stage in self.stages:
            batch = stage(batch)
        outputs: Outputs = self.model(batch)
        return outputs


def find_fields(model: nn.Module, example: Mapping[str, Tensor]) -> list[str]:
    """The fields of a batch that a model reads, in the order of the batch.

    Args:
        model: maps a batch to tensors.
        example: a batch with all fields that there are.

    Raises:
        ArtifactError: the model cannot be exported, or reads none.
    """
    inputs = {name: Input(tuple(value.shape[1:]), "") for name, value in example.items()}
    program = trace(model, example, inputs)
    names = dict(zip(program.graph_signature.user_inputs, example, strict=True))
    read = [names[node.name] for node in program.graph.nodes if node.name in names and node.users]
    if not read:
        raise ArtifactError("the model reads no field of the batch, so there is nothing to export")
    return read


def trace(program: nn.Module, example: Mapping[str, Tensor], inputs: Mapping[str, Input]) -> ExportedProgram:
    """Export a program for batches of any size.

    Args:
        program: maps a batch to tensors.
        example: a batch of two samples or more: a size of one would be taken for a constant.
        inputs: of each field of the batch.

    Raises:
        ArtifactError: it cannot be exported; the message names the line of the user's code and an alternative.
    """
    batch = Dim("batch")
    dims = {name: {0: batch, **_name_varying_axes(name, tensor)} for name, tensor in inputs.items()}

    def export(*, strict: bool) -> ExportedProgram:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), silence():
            traced = torch.export.export(program, (dict(example),), dynamic_shapes=(dims,), strict=strict)
        _remove_traces(traced, example)
        return traced

    try:
        return export(strict=False)
    except CombineError:
        raise
    except Exception as error:
        if "Constraints violated" in str(error):  # len(x) is a number here, and a size to what reads the bytecode
            with contextlib.suppress(Exception):
                return export(strict=True)
        raise ArtifactError(explain(error)) from error


def _remove_traces(traced: ExportedProgram, example: Mapping[str, Tensor]) -> None:
    """Remove what would go to others with a program: the samples of its example, and lines of the user's code."""
    empty = {name: torch.zeros_like(value) for name, value in example.items()}
    traced.example_inputs = ((empty,), {})
    for node in traced.graph.nodes:
        node.meta.pop("stack_trace", None)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep back what torch prints, warns and logs about a program: what of it matters is in the error."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    loggers = [logging.getLogger(name) for name in ("torch", *names)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        out, err = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with warnings.catch_warnings(), out, err:
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
        remove_empty()


def _name_varying_axes(field: str, tensor: Input) -> dict[int, Any]:
    varying = [axis for axis, size in enumerate(tensor.shape, 1) if size is None]
    names = [f"{field}_{name}" for name in ("height", "width")]
    return {axis: Dim(names[i], min=tensor.least[i]) for i, axis in enumerate(varying)}


def explain(error: BaseException) -> str:
    """Why a model could not be exported, in one line: where in the user's code, and what to do instead."""
    lines, cause = list[traceback.FrameSummary](), [error]
    while (before := cause[-1].__cause__ or cause[-1].__context__) is not None:
        cause.append(before)
    for failure in cause:
        lines += [line for line in traceback.extract_tb(failure.__traceback__) if not _is_library(line.filename)]
    where = f" at {Path(lines[-1].filename).name}:{lines[-1].lineno}: {lines[-1].line}" if lines else ""
    reason = " ".join(str(error).split())
    return (
        f"the model cannot be exported{where}: {type(error).__name__}: {reason[:200]}; its shapes and branches "
        "must depend neither on values nor on the batch size, and torch must compute all of it; `ensemble predict "
        "RUN_DIR` needs no export"
    )


def _is_library(file: str) -> bool:
    """Whether a file is of an installed package, of Python, or of this project."""
    ours = Path(__file__).parents[2]
    parts = Path(file).parts
    inside = [ours / "ensemble", ours / "pipelines"]
    return (
        "site-packages" in parts
        or not file.endswith(".py")
        or any(folder in Path(file).parents for folder in inside)
        or Path(traceback.__file__).parent in Path(file).parents
    )


def save_program(path: Path, program: ExportedProgram) -> None:
    with silence(), path.open("wb") as file:  # torch takes no path that is not UTF-8
        torch.export.save(program, file)


def load_program(path: Path, device: str | torch.device = "cpu") -> nn.Module:
    """A saved program, as a module on a device.

    Raises:
        ArtifactError: it cannot be read, or holds pickles, which run code.
    """
    with silence():
        try:
            check_no_pickles(path)
            with path.open("rb") as file:
                program = torch.export.load(file)
        except ArtifactError:
            raise
        except Exception as error:  # of zipfile, json or torch, whose errors share no class
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            advice = "it is damaged, or was written by another version of torch: export it again"
            raise ArtifactError(f"{path} cannot be read: {reason}; {advice}") from error
    if torch.device(device).type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    return program.module()


def check_no_pickles(path: Path) -> None:
    """Raise for a .pt2 file of which torch would unpickle more than plain tensors.

    Raises:
        ArtifactError: see above.
    """
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            inner = name.partition("/")[2]
            if not any(fnmatch.fnmatchcase(inner, part) for part in _PARTS):
                raise ArtifactError(f"{path} is not loaded: {name!r} in it may be a pickle, which runs code")
            if inner.endswith("_config.json"):
                config = json.loads(archive.read(name))["config"]
                pickled = [key for key, payload in config.items() if payload.get("use_pickle") is not False]
                if pickled:
                    raise ArtifactError(f"{path} is not loaded: {pickled[0]!r} in it is a pickle, which runs code")
            elif inner.startswith("data/sample_inputs/"):
                try:
                    torch.load(io.BytesIO(archive.read(name)), weights_only=True)
                except pickle.UnpicklingError:
                    raise ArtifactError(f"{path} is not loaded: {name!r} is a pickle, which runs code") from None


def check_equal(path: Path, reference: Callable[[Batch], Outputs], batches: Sequence[tuple[Batch, Batch]]) -> None:
    """Check that a saved program gives what a model gives, bit for bit.

    Args:
        path: of the program.
        reference: the model.
        batches: pairs (for the program, for the model) of the same samples.

    Raises:
        ArtifactError: it does not; the message has the largest difference.
    """
    program = load_program(path)
    for raw, prepared in batches:
        with torch.no_grad():
            exported, wanted = as_outputs(program(raw)), as_outputs(reference(prepared))
        for name, value in wanted.items():
            if not _has_same_bits(exported[name], value):
                apart = (exported[name].double() - value.double()).abs().max().item()
                raise ArtifactError(
                    f"the exported program and load() give different {name} (by {apart:.3g} at most, for a batch "
                    f"of {len(value)}): a part of the model computes differently when it is exported"
                )


def as_outputs(outputs: Outputs) -> dict[str, Tensor]:
    """What a program returns, by name: one tensor is `values`."""
    return {"values": outputs} if isinstance(outputs, Tensor) else dict(outputs)


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (
        tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)
    )  # NaN is not itself
    return first.equal(second)


def save_weights(path: Path, model: nn.Module) -> None:
    """Write the weights and buffers of a model as safetensors, each in memory of its own; those that members share
    once, by their first name: the file's metadata has the further names.
    """
    from safetensors.torch import save_file

    first: dict[int, str] = {}  # by tensor
    further = {}
    for name, value in model.state_dict(keep_vars=True).items():
        kept = first.setdefault(id(value), name)
        if kept.split(".")[:2] != name.split(".")[:2]:  # of another member: members.NAME...
            further[name] = kept
    state = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    save_file({name: value for name, value in state.items() if name not in further}, path, further or None)
