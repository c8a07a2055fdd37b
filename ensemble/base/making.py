"""Makes the base of a run once: in a process of its own, as the one that drives a run has no room for it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

from ensemble.base.files import BASE, BaseFile
from ensemble.base.frozen import refuse_extra_state
from ensemble.meter.cpu import make_usage, read_start
from ensemble.spec import SpecError
from ensemble.store import RunDir, RunState, StoreError, weights_sha256
from ensemble.store.files import make_directory, write_atomically
from ensemble.train.forward_errors import describe_error
from ensemble.train.loose_tensors import find_loose
from ensemble.train.pickled import split_tensors
from ensemble.train.seeding import seed_everything
from pipelines.ipc.child_processes import child_environment, reap

log = logging.getLogger(__name__)


def provide_base(run: RunDir, state: RunState, code: str, node: str) -> list[dict[str, Any]]:
    """Make the base of a run, unless it has one, which is never made again once a member has trained on it.

    Args:
        code: fingerprint of the declaration's code.
        node: on which it is made.

    Returns:
        The events to log.

    Raises:
        SpecError: the declared function is none that gives a network.
        StoreError: the run has one, whose file is gone or damaged; or it cannot be written.
    """
    has_trained = any(member.checkpoint is not None for member in state.members.values())
    if (made := state.base) is not None and (has_trained or made.code == code):
        record = BaseFile(**{name: getattr(made, name) for name in BaseFile.__struct_fields__})
        record.check(run)
        record.write(run)
        if made.code != code:
            log.warning(
                "the code has changed; the base stays that of %s, on which members have trained", made.source
            )
        return []
    return _make_in_child(run, code, node)


def _make_in_child(run: RunDir, code: str, node: str) -> list[dict[str, Any]]:
    make_directory(run.path / BASE)
    began_s = time.monotonic()
    command = [sys.executable, "-m", "ensemble.base.making", str(run.path), code]
    with open(run.path / BASE / "log.txt", "ab") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        child = subprocess.Popen(command, env=child_environment(), **pipes)  # type: ignore[call-overload]
    began = read_start(child.pid)
    try:
        answer = child.stdout.read()
    finally:
        child.stdin.close()  # a child that still runs ends
        child.stdout.close()
        cpu_s = reap(child)
    try:
        answered = json.loads(answer)
    except ValueError:
        log_file = run.path / BASE / "log.txt"
        raise StoreError(
            f"the base of the run was not made: its process ended with {child.returncode}; see {log_file}"
        ) from None
    if "error" in answered:
        raise SpecError(answered["error"])
    made = {"type": "base_made", **answered, "wall_s": time.monotonic() - began_s, "node": node}
    usage = make_usage(node, "base", child.pid, cpu_s or 0.0, began=began)
    return [made, usage]


def make_base(declared: Any, run: RunDir, code: str) -> BaseFile:
    """Make a declared base in this process, and write its files.

    Args:
        declared: `Recipe.base`.

    Raises:
        SpecError: it gives no network, or one that cannot be written.
    """
    name = getattr(declared, "__qualname__", type(declared).__qualname__)
    source = declared if isinstance(declared, str) else f"{declared.__module__}.{name}"
    seed_everything(0, torch.device("cpu"))  # initial weights that it draws are the same in each run
    module = _read_transformers(declared) if isinstance(declared, str) else declared()
    if not isinstance(module, nn.Module):
        raise SpecError(f"Recipe.base must return a torch.nn.Module, and {source} returned {module!r:.60}")
    module.cpu().requires_grad_(False).eval()
    refuse_extra_state(module, source)
    digest = weights_sha256({**module.state_dict(), **find_loose(module)})
    try:
        content, tensors = split_tensors(module)
    except Exception as error:  # whatever a module holds that no other process can have
        raise SpecError(
            f"Recipe.base: what {source} returned cannot be pickled: {describe_error(error)}"
        ) from None
    size = sum(tensor.nbytes for tensor in tensors)
    saved = {"module": torch.frombuffer(bytearray(content), dtype=torch.uint8), "tensors": tensors}
    make_directory(run.path / BASE)
    file = write_atomically(run.path / BASE / f"{digest}.pt", lambda path: torch.save(saved, path), size)
    record = BaseFile(digest=digest, file=file, bytes=size, source=source, code=code)
    record.write(run)
    return record


def _read_transformers(folder: str) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, local_files_only=True)


def main(path: str, code: str) -> None:
    """Make the base of a run, and print its record as JSON."""
    from pipelines.ipc.child_processes import end_with_parent

    end_with_parent()
    answer = os.dup(1)
    os.dup2(2, 1)  # what the user's code prints goes to the log
    run = RunDir(path)
    try:
        recipe: Any = run.load_ensemble(takes_settings=True).recipe
        answered = make_base(recipe.base, run, code).describe()
    except Exception as error:
        import traceback

        traceback.print_exc()
        is_ours = isinstance(error, SpecError | StoreError)
        answered = {"error": str(error) if is_ours else f"Recipe.base failed: {describe_error(error)}"}
    with contextlib.suppress(BrokenPipeError), open(answer, "w", encoding="utf-8") as file:
        json.dump(answered, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
