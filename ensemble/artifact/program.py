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

Batch = dict[str, Tensor]
Outputs = Tensor | Mapping[str, Tensor]

#: What cannot be exported, by a part of its name, of its message or of its error's class, and what to do instead.
ALTERNATIVES = (
    (
        ("pack_padded_sequence", "pad_packed_sequence", "pack_sequence"),
        "keep the padding and read the outputs at lengths - 1, as in out[torch.arange(out.shape[0]), lengths - 1]",
    ),
    (
        ("DataDependent", "data-dependent", ".item()", "aten._local_scalar_dense", "aten.nonzero"),
        "a shape or a branch that depends on values cannot be: use torch.where, a mask, or torch.cond",
    ),
    (("numpy",), "compute with torch instead of numpy"),
    (
        ("Constraints violated", "specialized"),
        "a model must take any batch size: use x.shape[0], no number or len(x)",
    ),
)
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
_TALKATIVE = ("torch", "onnxscript", "onnx_ir")


class Program(nn.Module):
    """A model behind stages: maps a batch (field -> tensor [b, ...]) to what the model gives for it."""

    def __init__(self, stages: Iterable[nn.Module], model: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.model = model
        self.requires_grad_(False)
        self.eval()

    def forward(self, batch: Batch) -> Outputs:
        """What the model gives."""
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
    dims = {name: {0: batch, **_name_varying_axes(name, found)} for name, found in inputs.items()}

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
    known = [
        *_TALKATIVE,
        *(name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _TALKATIVE),
    ]
    loggers = [logging.getLogger(name) for name in known]
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


def _name_varying_axes(field: str, found: Input) -> dict[int, Any]:
    varying = [axis for axis, size in enumerate(found.shape, 1) if size is None]
    names = [f"{field}_{name}" for name in ("height", "width")]
    return {axis: Dim(names[i], min=found.least[i]) for i, axis in enumerate(varying)}


def explain(error: Exception) -> str:
    """Why a model could not be exported, in one line: where in the user's code, what, and what to do instead."""
    chain = list(_follow_causes(error))
    frames = [frame for each in chain for frame, _ in traceback.walk_tb(each.__traceback__)]
    own = [frame for frame in frames if not _is_library(frame.f_code.co_filename)]
    lines = [frame for each in chain for frame in traceback.extract_tb(each.__traceback__)]
    line = next((line for line in reversed(lines) if not _is_library(line.filename)), None)
    where = "" if line is None else f" at {Path(line.filename).name}:{line.lineno}: {line.line}"
    texts = [text for each in chain for text in (type(each).__name__, str(each))]
    texts += [name for frame in own for name in frame.f_code.co_names]  # a packed sequence fails where it is used
    advice = next(
        (advice for parts, advice in ALTERNATIVES if any(part in text for part in parts for text in texts)),
        "`ensemble predict RUN_DIR` needs no export",
    )
    reason = " ".join(str(error).split())
    return f"the model cannot be exported{where}: {type(error).__name__}: {reason[:200]}; {advice}"


def _follow_causes(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
    """Write a .pt2 file."""
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
            reason = " ".join(str(error).split())
            raise ArtifactError(
                f"{path} cannot be read: {type(error).__name__}: {reason[:120]}; it is damaged, or was written by "
                "another version of torch: export it again"
            ) from error
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
            if not any(fnmatch.fnmatchcase(inner, known) for known in _PARTS):
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
    for given, prepared in batches:
        with torch.no_grad():
            found, wanted = as_outputs(program(given)), as_outputs(reference(prepared))
        for name, value in wanted.items():
            if not _has_same_bits(found[name], value):
                apart = (found[name].double() - value.double()).abs().max().item()
                raise ArtifactError(
                    f"the exported program gives other {name} than load(): by {apart:.3g} at most, for a batch of "
                    f"{len(value)}; a part of the model computes otherwise when it is exported"
                )


def as_outputs(outputs: Outputs) -> dict[str, Tensor]:
    """What a program returns, by name: one tensor is `values`."""
    return {"values": outputs} if isinstance(outputs, Tensor) else dict(outputs)


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))  # NaN is not itself
    return first.equal(second)


def save_weights(path: Path, model: nn.Module) -> None:
    """Write the weights and buffers of a model as safetensors, each in memory of its own."""
    from safetensors.torch import save_file

    state = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    save_file(state, path)
