"""`dry_run`: what a run would do, need and cost, without starting it. Nothing is written, no process remains.

What would be refused at the start of a run is refused here, by the same checks. One batch is really prepared, and
a few steps of each different architecture are really trained, alone, on this machine, by the members' own code
(`ensemble.train.profile`). All else is computed from that and labelled `estimated`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.inspection.batches import describe_first_batch, describe_pipelines, find_bad_records
from ensemble.inspection.dry_run_result import DryRun, Table
from ensemble.inspection.estimates import estimate_members, estimate_run
from ensemble.spec import PREDICTED_SPLITS, Ensemble, Identity, check_ensemble, check_installed
from ensemble.spec.identity import compute_cost_key
from ensemble.spec.out_of_fold import is_out_of_fold
from ensemble.spec.sample_weights import list_held_out
from ensemble.spec.search_space import sample_space
from ensemble.store import RunDir, RunState, StoreError, is_locked, read_state

if TYPE_CHECKING:
    from ensemble.schedule import Node
    from ensemble.user_code.fingerprint import Code

log = logging.getLogger(__name__)

FIGURES = ("step_s", "memory_gb", "gpu_memory_gb", "cpus")
SIZES = ("parameters", "trainable", "checkpoint_bytes", "predictions_bytes")
MOST_SELECTIONS = 3
REMEDY = 'Replace the files; or leave such records out: Pipeline(on_error="skip"), at most max_skipped= of them'
STEPS_S = (0.5, 6.0)
"""Seconds of steps to measure, at most: of each architecture, and of all together."""


def dry_run(
    ensemble: Ensemble,
    run_dir: str | os.PathLike[str] | None = None,
    executor: str = "ray",
    spec_file: str | os.PathLike[str] | None = None,
    *,
    accept_code: bool = False,
    accept_data: bool = False,
    full: bool = False,
) -> DryRun:
    """Find out what a run would do, need and cost on this machine. It takes seconds and leaves nothing behind.

    Args:
        ensemble: what would be trained.
        run_dir: `runs/<name>` unless given; a run that is there would be continued.
        executor: "ray", "local" or "inline". Steps are measured in this process, whatever it is.
        spec_file: the file that declares the ensemble.
        accept_code, accept_data: as in `submit`.
        full: also prepare all records of all splits, in this process, however long that takes.

    Returns:
        What was found; `str()` of it is a text. Durations are in seconds, memory in GiB.

    Raises:
        SpecError, StoreError, PipelineError: as `submit` would, with the same message.
    """
    from ensemble.executors import make_executor
    from ensemble.executors.host import describe_host
    from ensemble.train.data_identity import training_data
    from ensemble.user_code.fingerprint import code_of

    check_ensemble("dry_run", ensemble)
    check_installed(ensemble.loggers)
    make_executor(executor)
    path = Path(run_dir) if run_dir is not None else Path("runs") / ensemble.name
    known, code = RunDir(path), code_of(ensemble)
    data = training_data(ensemble)
    state = _check_run_dir(known, ensemble, code, spec_file, accept=accept_code, accepts_data=accept_data)
    node = describe_host("local", places=1 if executor == "inline" else None, feeds=executor != "inline")
    stream = _check_start(ensemble, state, executor, node)
    identities = _list_members(ensemble)
    if executor == "ray":  # which nodes they select is checked in the cluster
        identities = [dataclasses.replace(each, nodes=None) for each in identities]
    fields, labels = describe_first_batch(ensemble, identities[0])
    notes = _list_notes(ensemble, executor, state, code)
    notes += [*_check_start_weights(ensemble, identities), *(_read_data(ensemble, identities[0]) if full else [])]
    with _make_folder() as folder, _open_meter(ensemble, notes) as meter:
        imports = 1 if executor == "inline" else 2
        groups, prepare_s, power = _measure(ensemble, _group_members(identities), folder, meter, notes)
        largest = max((row["predictions_bytes"] or 0 for row in groups), default=0) / 1e9
        if largest > ensemble.keep_predictions_gb:
            notes.append(
                f"a member's predictions take {largest:.3g} GB, more than Ensemble.keep_predictions_gb="
                f"{ensemble.keep_predictions_gb:g}: of each sample a part of its positions is kept, or nothing "
                "where it has none or combine is a function"
            )
        estimate_members(groups, power)
        run = estimate_run(
            ensemble,
            groups,
            node,
            prepare_s,
            power,
            startup=_measure_startup(Path(folder), ensemble, groups[0], code),
            imports=imports,
            executor=executor,
            shares=stream is None,
        )
    return DryRun(
        name=ensemble.name,
        mode="search" if ensemble.search else "list",
        executor=executor,
        run_dir=str(known.path),
        run_state=_describe_state(state),
        node=_describe_node(node, power),
        splits=_count_splits(ensemble),
        fields=fields,
        labels=labels,
        pipeline=describe_pipelines(ensemble, identities, stream) | {"data": data, "prepare_s": prepare_s},
        members=[{name: value for name, value in row.items() if not name.startswith("_")} for row in groups],
        run=run,
        notes=notes,
    )


def _check_run_dir(
    known: RunDir,
    ensemble: Ensemble,
    code: Code,
    spec_file: str | os.PathLike[str] | None,
    *,
    accept: bool,
    accepts_data: bool,
) -> RunState:
    """What `submit` checks of the run directory; returns the state of the run that is there."""
    from ensemble.controller.changes import check_code, check_same
    from ensemble.store.kept_code import pickle_ensemble

    known.check_is_free(ensemble)
    state = RunState()
    if known.info_file.exists() and known.events.exists():
        state = read_state(known.events)
        in_progress = bool(is_locked(known.events))
        check_same(state, ensemble, known.path, in_progress=in_progress, accepts_data=accepts_data)
        check_code(state, code, known, accept=accept)
    parent = next(each for each in (known.path, *known.path.parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise StoreError(f"cannot write {known.path}: choose a run directory that you may write to")
    pickle_ensemble(ensemble, None if spec_file is None else Path(spec_file))
    return state


def _read_data(ensemble: Ensemble, identity: Identity) -> list[str]:
    """Prepare all records, and say how many are left out.

    Raises:
        PipelineError: some cannot be prepared, or more than may be left out.
    """
    from pipelines.errors import PipelineError
    from pipelines.loader.resident import explain_failures

    splits = {split: getattr(ensemble, split) for split in PREDICTED_SPLITS}
    pipelines = {split: pipe.without_randomness() for split, pipe in splits.items() if pipe is not None}
    notes, bad = [], []
    for split, pipeline in (pipelines | {"train": ensemble.pipeline(identity.params)}).items():
        errors = find_bad_records(pipeline)
        if errors and pipeline.on_error == "skip":
            notes.append(
                f"{len(errors):,} of {len(pipeline):,} records of {split} cannot be prepared and are left out"
            )
        if (why := explain_failures(pipeline, errors)) is not None:
            bad.append(f"{split}: {why}")
    if bad:
        raise PipelineError(f"records cannot be prepared: {'; '.join(bad)}. {REMEDY}")
    return notes


def _check_start(ensemble: Ensemble, state: RunState, executor: str, node: Node) -> str | None:
    """What a controller checks when it starts; returns why nothing is shared, None where it is."""
    from ensemble.controller.feeders import SharedStream
    from ensemble.controller.starts import check_fit, check_starts
    from ensemble.executors.inline import check_widths
    from ensemble.search.storage import check_storage
    from ensemble.search.trials import make_trials

    if executor == "inline":
        check_widths(ensemble)
    stream = SharedStream(ensemble)
    stream.check()
    check_fit(ensemble, [node], is_cluster=executor != "ray")
    check_starts(ensemble, state)
    search = ensemble.search
    if search is None or search.storage is None:  # a storage of the user's would get a study
        with _make_folder() as folder:
            make_trials(
                ensemble, RunDir(folder), RunState(objective=str(ensemble.objective)), sharing=stream.sharing
            )
    elif search is not None and search.storage is not None:
        check_storage(search.storage)
    if executor == "inline":
        return "the inline executor trains members one after the other, each prepares its own batches"
    return stream.unshared if stream.sharing else stream.unshared or "sharing='independent' is declared"


def _check_start_weights(ensemble: Ensemble, identities: Sequence[Identity]) -> list[str]:
    """What members take of the weights that they start with, where it is a part; each source is read once."""
    from ensemble.controller.starts import find_start
    from ensemble.store import read_weights

    notes, started = [], [(each, each.lineage["from"]) for each in identities if each.lineage is not None]
    sources = {source: read_weights(find_start(source).file)["model"] for _, source in started}
    for member, source in started:
        from ensemble.train.trial_steps import check_start

        if line := check_start(ensemble, member, sources[source]):
            notes.append(f"{member.member}: {line}")
    return notes


def _list_members(ensemble: Ensemble) -> list[Identity]:
    """The declared members; of a search, members with a few random points of its space."""
    if ensemble.search is None:
        return [ensemble.identify(number) for number in range(len(ensemble.members or ()))]
    points = list(sample_space(ensemble.search.space, ensemble.search.seed))[: ensemble.search.trials]
    return [ensemble.identify(number, params) for number, params in enumerate(points)]


def _group_members(identities: Sequence[Identity]) -> list[list[Identity]]:
    """Members that certainly cost the same are one group, whatever their learning rates and seeds are."""
    groups: dict[tuple[str, int], list[Identity]] = {}
    for identity in identities:
        groups.setdefault((compute_cost_key(identity), identity.epochs), []).append(identity)
    return list(groups.values())


@contextlib.contextmanager
def _make_folder() -> Iterator[str]:
    """A folder for temporary files; the next run removes that of a process that was killed."""
    from ensemble.executors.private_directory import PrivateDirectory

    with contextlib.closing(PrivateDirectory("ensemble-dry-run-", None)) as private:
        yield str(private.path)


@contextlib.contextmanager
def _open_meter(ensemble: Ensemble, notes: list[str]) -> Iterator[Any]:
    """The power meter of this machine, started; None where there is none."""
    from ensemble.meter import PowerMeter

    meter = PowerMeter("local", energy=ensemble.energy)
    try:
        meter.start()
        yield meter
    finally:
        meter.close()


def _measure(
    ensemble: Ensemble, groups: Sequence[Sequence[Identity]], folder: str, meter: Any, notes: list[str]
) -> tuple[Table, float | None, dict[str, Any]]:
    """A row for each group of members, CPU-seconds of preparing a sample, and the power in the meantime; what
    members remark is added to the notes.
    """
    from ensemble.train.trial_steps import measure_here

    steps_s = min(STEPS_S[0], STEPS_S[1] / len(groups))
    rows: Table = []
    prepared: list[float] = []
    for members in groups:
        first = members[0]
        row: dict[str, Any] = _describe_group(ensemble, members) | {"error": None, "_members": list(members)}
        batch = -(-first.batch_size // first.workers)
        began, used = time.monotonic(), time.process_time()
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints
                measured = measure_here(ensemble, [dataclasses.replace(first, batch_size=batch)], folder, steps_s)[
                    0
                ]
            row |= _read_figures(measured.figures) | {"_figures": measured.figures}
            row |= {name: getattr(measured, name) for name in SIZES}
            row |= {"measuring_s": time.monotonic() - began, "_measuring_cpu_s": time.process_time() - used}
            row |= {
                "_evaluation": measured.evaluation,
                "evaluate_s": (measured.evaluation or {}).get("evaluate_s"),
            }
            prepared.append(measured.figures["prepare_s"])
            notes += [f"{first.member}: {remark}" for remark in measured.remarks]
        except (Exception, SystemExit) as error:
            log.debug("a step of %s failed", first.member, exc_info=True)
            missing = ("evaluate_s", *SIZES, "measuring_s")
            row |= dict.fromkeys((*FIGURES, *missing))
            row |= {"error": " ".join(f"{type(error).__name__}: {error}".split()), "_figures": None}
        rows.append(row)
    return rows, max(prepared, default=None), _read_power(meter)


def _measure_startup(folder: Path, ensemble: Ensemble, row: dict[str, Any], code: Code) -> dict[str, float]:
    """See `measure_beginning`, of the first group; and `seconds` until a process has imported what all need."""
    from ensemble.executors.forkserver import PRELOADED
    from ensemble.executors.spawn import make_node_environment
    from ensemble.store.kept_code import pickle_by_value
    from ensemble.train.beginning import measure_beginning
    from pipelines.ipc.child_processes import child_environment

    environment = {**child_environment(), **make_node_environment(folder)}
    began = time.monotonic()
    with pickle_by_value(code, ensemble):
        found = measure_beginning(ensemble, row["_members"][0], str(folder), environment, PRELOADED)
    share = found["preload"] / (sum(found.values()) + found["measure"] or 1.0)
    if row["error"] is None:  # its steps may have imported here what others need as well
        row["_measuring_cpu_s"] = min(row["_measuring_cpu_s"], found["measure"] + STEPS_S[0] * row["cpus"])
    return {"seconds": share * (time.monotonic() - began), **found}


def _describe_group(ensemble: Ensemble, members: Sequence[Identity]) -> dict[str, Any]:
    first = members[0]
    names = dict.fromkeys(name for each in members for name in each.params)
    varied = [name for name in names if any(each.params.get(name) != first.params.get(name) for each in members)]
    samples = ensemble.samples
    steps = samples // first.batch_size if ensemble.drop_last else -(-samples // first.batch_size)
    counts = _count_splits(ensemble)
    if is_out_of_fold(first.weights):
        counts["valid"] = int(list_held_out(first.weights, ensemble.pipeline(first.params).source).sum())
    held_out = {name: -(-many // first.batch_size) for name, many in counts.items()}
    within = steps // first.validate_every if first.validate_every else 0
    # The validation split after each epoch, and within it; at the end each split is predicted once.
    evaluations = (
        first.epochs * (1 + within) * held_out.get("valid", 0) + sum(held_out.values()) - held_out["train"]
    )
    return {
        "members": [each.member for each in members],
        "params": first.params,
        "varied": varied,
        "workers": "auto" if "workers" in first.auto else first.workers,
        "batch_size": first.batch_size,
        "steps": steps,
        "epochs": first.epochs,
        "evaluations": evaluations,
    }


def _read_figures(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figures.get(name) for name in FIGURES}


def _read_power(meter: Any) -> dict[str, Any]:
    """Joules, the idle ones apart, CPU-seconds and seconds of the time in which steps were trained; its source."""
    events = meter.finish()
    known = [event for event in events if event["energy_j"] is not None]
    if not known or len(known) < len(events):
        return {"source": meter.source, "energy_j": None}
    idle = [part["idle_j"] for event in known for part in event["parts"]]
    busy = [event["busy_s"] for event in known]
    return {
        "source": meter.source,
        "energy_j": sum(event["energy_j"] for event in known),
        "idle_j": None if None in idle else sum(idle),
        "busy_s": None if None in busy else sum(busy),
        "interval_s": sum(event["interval_s"] for event in known),
        "origin": meter.origin,
    }


def _list_notes(ensemble: Ensemble, executor: str, state: RunState, code: Code) -> list[str]:
    from ensemble.controller.starts import list_declared
    from ensemble.schedule.needs import compute_need
    from ensemble.spec.nodes import describe_selection

    notes = ensemble.list_notices()
    if executor == "ray":
        notes.append("measured and estimated for this machine; a Ray cluster may offer more nodes, or other ones")
        selected = {compute_need(each).selection for each in list_declared(ensemble)} - {()}
        if selected:
            asked = "; ".join(sorted(map(describe_selection, selected))[:MOST_SELECTIONS])
            notes.append(f"whether the cluster has nodes with {asked} is checked when the run starts")
    if ensemble.search is not None:
        some = "" if ensemble.search.has_trials else " (as many as the budget allows; estimated for these)"
        count = ensemble.search.trials if ensemble.search.has_trials else ensemble.search.expected_trials
        trials = f"{count} trials will be proposed by the search{some}"
        if (size := ensemble.search.population) is not None:
            trials += f", which share the epochs of {size}"
        notes.append(f"{trials}; random points of its space are used in their place, and pruning is ignored")
    if state.members:
        notes.append("the run would be continued; the figures are of a run from its beginning")
    return notes


def _describe_state(state: RunState) -> str | None:
    if not state.starts:
        return None
    states = [member.state for member in state.members.values()]
    return ", ".join(f"{states.count(each)} {each}" for each in dict.fromkeys(states)) or "no member has begun"


def _describe_node(node: Node, power: dict[str, Any]) -> dict[str, Any]:
    return {
        "cpus": node.cpus,
        "memory_gb": node.memory_gb,
        "gpus": list(node.gpus),
        "power": power["source"],
    }


def _count_splits(ensemble: Ensemble) -> dict[str, int]:
    splits = {name: getattr(ensemble, name) for name in PREDICTED_SPLITS}
    return {"train": ensemble.samples, **{name: len(each) for name, each in splits.items() if each is not None}}
