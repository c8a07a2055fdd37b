"""What is checked before a run starts: one ordered list of steps, which `submit`, `resume` and `dry_run` share.

A step raises where the run cannot start. All steps of a part run, so that all refusals are shown at once: those of
`DECLARED` before anything is written or started, those of `OPENED` when the nodes are known.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ensemble.controller.changes import check_code, check_data, check_edits, check_same
from ensemble.controller.feeders import SharedStream
from ensemble.controller.starts import check_fit, check_starts, refuse_without_locks
from ensemble.schedule.needs import Node
from ensemble.spec import Ensemble, Recipe, SpecError, check_installed
from ensemble.spec.losses import NO_INPUTS, NamedLoss
from ensemble.spec.recipe import has_own_loop
from ensemble.store import RunDir, RunState, StoreError, is_locked
from ensemble.store.declaration import Declaration
from ensemble.store.folding import FoldedLog
from ensemble.store.member import ENDED
from ensemble.store.mirror_status import NO_MIRROR
from ensemble.store.versions import list_missing
from ensemble.train.data_identity import training_data
from ensemble.user_code.fingerprint import Code, code_of
from pipelines import Pipeline
from pipelines.errors import PipelineError
from pipelines.providers import import_object


@dataclass(frozen=True)
class DeclaredStart:
    """A declaration that is to start, and the run that is known in its directory.

    Attributes:
        state, log: of that run; empty where there is none.
        is_resumed: whether the declaration is the one that is kept with the run.
    """

    ensemble: Ensemble
    run_dir: RunDir
    state: RunState
    code: Code
    executor: str
    log: FoldedLog
    spec_file: str | os.PathLike[str] | None = None
    accept_code: bool = False
    accept_data: bool = False
    is_resumed: bool = False
    mirror: str | None = None

    @cached_property
    def declaration(self) -> Declaration:
        from ensemble.store.kept_code import pickle_ensemble

        return pickle_ensemble(self.ensemble, None if self.spec_file is None else Path(self.spec_file))

    def create(self) -> RunDir:
        """Make the run directory, with a copy of the declaration."""
        return RunDir.create(
            self.run_dir.path,
            self.ensemble,
            self.spec_file,
            self.code,
            executor=self.executor,
            declaration=self.declaration,
        )


@dataclass(frozen=True)
class OpenedStart:
    """A declaration whose nodes are known, with all that they could ever offer the run.

    Attributes:
        is_cluster: whether these are the nodes of the run, or stand for those of a cluster.
        has_locks: whether files of the run directory can be locked.
    """

    ensemble: Ensemble
    run_dir: RunDir
    state: RunState
    code: str
    stream: SharedStream
    nodes: Sequence[Node]
    is_cluster: bool = True
    has_locks: bool = True


def find_start(
    ensemble: Ensemble,
    run_dir: str | os.PathLike[str] | None,
    executor: str,
    spec_file: str | os.PathLike[str] | None = None,
    code: Code | None = None,
    *,
    accept_code: bool = False,
    accept_data: bool = False,
    fresh: bool = False,
    mirror: str | None = None,
) -> DeclaredStart:
    """Find the run that a declaration would start or continue, and its code; arguments as of `submit`.

    Raises:
        StoreError: the directory cannot be read.
    """
    path = Path(run_dir) if run_dir is not None else Path("runs") / ensemble.name
    if os.path.isdir(path) and not fresh and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise StoreError(f"{path} is not yours to read and write: give another run directory, or ask its owner")
    found_dir = RunDir(choose_free_path(path) if fresh else path)
    begun, state = FoldedLog(found_dir.events), RunState()
    code = code or code_of(ensemble)  # before the calls below, which may run the user's code
    training_data(ensemble)  # computes the digests of arrays once, and not in each member's process
    if found_dir.find_info().get("name") == ensemble.name and found_dir.events.exists():
        state = begun.update()
    how = {"accept_code": accept_code, "accept_data": accept_data}
    return DeclaredStart(ensemble, found_dir, state, code, executor, begun, spec_file, **how, mirror=mirror)


def choose_free_path(path: str | os.PathLike[str]) -> Path:
    """The first path of `path`, `path-2`, `path-3` ... that is free for a new run."""
    first = Path(path).absolute()
    number, free = 1, first
    while free.exists() and not (free.is_dir() and not any(free.iterdir())):
        number += 1
        free = first.with_name(f"{first.name}-{number}")
    return free


def list_entries(path: Path) -> list[Path] | None:
    """Return what is in a folder; None where there is none."""
    return list(path.iterdir()) if path.is_dir() else None


def withdraw(run_dir: RunDir, *, keeps_folder: bool) -> None:
    """Remove what a refused start has written to an empty folder, unless another process has begun there."""
    if is_locked(run_dir.events) or FoldedLog(run_dir.events).update().starts:
        return
    written = {path.name for path in vars(run_dir).values() if isinstance(path, Path)} - {run_dir.path.name}
    written |= {"code", "members", "feeders"}
    for entry in list_entries(run_dir.path) or ():
        if entry.name not in written and not entry.name.startswith(".events.jsonl"):
            continue  # it is not ours
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if not keeps_folder:
        with contextlib.suppress(OSError):  # something is left in it
            run_dir.path.rmdir()


def check_loggers(start: DeclaredStart) -> None:
    """The packages of the loggers are installed."""
    try:
        check_installed(start.ensemble.loggers)
    except SpecError as error:
        missing = list_missing(start.run_dir.find_info().get("versions", {}))
        if not missing:
            raise
        ways = f"pip install {' '.join(missing)}, or start the spec again without that logger"
        raise SpecError(f"{error}; the run used an extension that is not installed here: {ways}") from None


def check_executor(start: DeclaredStart) -> None:
    """The executor can run such members."""
    if start.executor == "inline":
        from ensemble.executors.inline import check_widths

        check_widths(start.ensemble)


def check_calibrator(start: DeclaredStart) -> None:
    """The calibrator that is asked for by name can be loaded, and is of the task, where that is declared."""
    if isinstance(name := start.ensemble.calibrate, str):
        from ensemble.combine.calibrators import load_calibrator
        from ensemble.combine.metrics import CombineError

        try:
            load_calibrator(name, getattr(start.ensemble.recipe, "known_task", None))
        except CombineError as error:
            raise SpecError(f"Ensemble.calibrate: {error}") from error


def check_members(start: DeclaredStart) -> None:
    """Members that have trained are declared as they were, and train on the same data."""
    run, path = start.state, start.run_dir.path
    if start.is_resumed:
        check_data(run, start.ensemble, path, accepts=start.accept_data)
    elif run.starts:
        accepted = {"accepts_data": start.accept_data, "accepts_code": start.accept_code}
        check_same(run, start.ensemble, path, **accepted)


def check_members_code(start: DeclaredStart) -> None:
    """Members that have trained go on with the same code and libraries."""
    if start.state.starts:
        check_code(start.state, start.code, start.run_dir, accept=start.accept_code)
    if start.is_resumed:
        check_edits(start.code, start.run_dir, accept=start.accept_code)


def _is_copy_of_ray(path: Path) -> bool:
    """Whether a path lies in Ray's copy of the working directory of a job, or of any other process."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    has_copy = bool((job.get("runtime_env") or {}).get("working_dir"))
    where = path.resolve()
    return "working_dir_files" in where.parts or (has_copy and where.is_relative_to(Path.cwd().resolve()))


def check_folder(start: DeclaredStart) -> None:
    """The run directory can be written, has nothing of others, and is not in a folder that Ray removes."""
    if _is_copy_of_ray(start.run_dir.path):
        raise StoreError(
            f"{start.run_dir.path} lies in Ray's copy of the job's working directory, which Ray removes: give "
            "--run-dir /abs/path (submit(..., run_dir='/abs/path')), a folder that all nodes see"
        )
    if start.is_resumed:
        return
    path = start.run_dir.path
    start.run_dir.check_is_free(start.ensemble)
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        raise StoreError(f"cannot write {path}: choose a run directory that you may write to")


def check_mirror(start: DeclaredStart) -> None:
    """The address to which the run is copied is one, and has nothing of others."""
    if start.mirror not in (None, NO_MIRROR):
        run_id = start.run_dir.find_info().get("run_id")
        import_object("ensemble.store.mirror:find_mirror")(start.mirror, run_id)


def check_pickling(start: DeclaredStart) -> None:
    """The declaration can be kept."""
    if not start.is_resumed:
        _ = start.declaration


def check_first_weights(start: DeclaredStart) -> None:
    """There are the weights that members are declared to start with."""
    check_starts(start.ensemble, start.state)


def check_locks(opened: OpenedStart) -> None:
    """Workers of one member can meet."""
    if not opened.has_locks:
        refuse_without_locks(opened.ensemble, opened.run_dir)


def check_stream(opened: OpenedStart) -> None:
    """A sample of the shared pipeline can be prepared, where members still train."""
    try:
        opened.stream.check()
    except PipelineError:
        if not _is_over(opened):
            raise


def check_fields(opened: OpenedStart) -> None:
    """Samples to train on, and those for `valid`, have the fields that the recipe names."""
    for split in ("train", "valid"):
        _find_fields(opened.ensemble, split)


def _find_fields(ensemble: Ensemble, split: str) -> None:
    recipe, pipeline = ensemble.recipe, getattr(ensemble, split)
    if not isinstance(recipe, Recipe) or not isinstance(pipeline, Pipeline):
        return
    if split == "valid" and recipe.predict is not None:  # it may do with others
        return
    if has_own_loop(recipe) or not isinstance(recipe.loss, NamedLoss) or recipe.collate is not None:
        return
    try:
        fields, structure = pipeline.fields, pipeline.structure
    except PipelineError:
        return  # `check_stream` says it, where members still train
    if structure is None:
        try:
            recipe.loss.find_inputs((*NO_INPUTS, *fields))
        except SpecError as error:
            raise SpecError(f"Ensemble.{split}: {error}") from None


def check_places(opened: OpenedStart) -> None:
    """Each member fits on some node."""
    check_fit(opened.ensemble, opened.nodes, has_gpus=opened.state.has_gpus, is_cluster=opened.is_cluster)


DECLARED: tuple[Callable[[DeclaredStart], None], ...] = (
    check_loggers,
    check_executor,
    check_calibrator,
    check_folder,
    check_members,
    check_members_code,
    check_first_weights,
    check_mirror,
    check_pickling,
)
OPENED: tuple[Callable[[OpenedStart], None], ...] = (check_locks, check_stream, check_fields, check_places)


def check_start(start: DeclaredStart | OpenedStart) -> None:
    """Run the steps that a start of a run has before its nodes are known, or once they are.

    Raises:
        SpecError, StoreError, PipelineError: the run cannot start; the message has all reasons.
    """
    refusals: list[Exception] = []
    for step in DECLARED if isinstance(start, DeclaredStart) else OPENED:
        try:
            step(start)  # type: ignore[arg-type]
        except (SpecError, StoreError, PipelineError) as error:
            if str(error) not in map(str, refusals):
                refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        kinds = (SpecError, StoreError, PipelineError)
        kind = next(kind for kind in kinds if isinstance(refusals[0], kind))
        raise kind("; ".join(map(str, refusals))) from refusals[0]


def _is_over(opened: OpenedStart) -> bool:
    """Whether no member is trained or evaluated in this start."""
    search, members = opened.ensemble.search, opened.state.members.values()
    declared = search.trials if search is not None else len(opened.ensemble.members or ())
    over = all(member.state in ENDED and not member.is_resumable(opened.code) for member in members)
    return over and len(members) >= declared
