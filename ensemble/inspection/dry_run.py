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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.inspection.batches import describe_first_batch, describe_pipelines, find_bad_records
from ensemble.inspection.dry_run_result import UNMEASURED, DryRun, Table
from ensemble.inspection.estimates import estimate_members, estimate_run
from ensemble.spec import PREDICTED_SPLITS, Ensemble, Identity, SpecError, check_ensemble
from ensemble.spec.identity import compute_cost_key
from ensemble.spec.out_of_fold import is_out_of_fold
from ensemble.spec.sample_weights import list_held_out
from ensemble.store import RunDir, RunState
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.controller.start_steps import DeclaredStart
    from ensemble.schedule.needs import Node

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
    from ensemble.controller.start_steps import check_start, find_start
    from ensemble.executors import make_executor
    from ensemble.executors.host import describe_host
    from ensemble.train.data_identity import training_data

    check_ensemble("dry_run", ensemble)
    make_executor(executor)
    start = find_start(ensemble, run_dir, executor, spec_file, accept_code=accept_code, accept_data=accept_data)
    check_start(start)
    data, is_inline = training_data(ensemble), executor == "inline"
    node = describe_host("local", places=1 if is_inline else None, feeds=not is_inline)
    unshared, repeats = _check_opened(start, node)
    identities = _list_members(ensemble)
    if executor == "ray":  # which nodes they select is checked in the cluster
        identities = [dataclasses.replace(identity, nodes=None) for identity in identities]
    fields = [] if ensemble.train is None else describe_first_batch(ensemble, identities[0])
    pipeline = {} if ensemble.train is None else describe_pipelines(ensemble, identities, unshared)
    notes = [*_list_notes(ensemble, executor, start.state), *ensemble.list_tables()]
    base_gb = 0.0
    with _make_folder() as folder:
        if (base := getattr(ensemble.recipe, "base", None)) is not None:
            made = import_object("ensemble.base.making:make_base")(base, RunDir(folder), start.code.fingerprint)
            notes.append(f"{made.describe_share()}: that of members and of their checkpoints is their own")
            base_gb = made.bytes / 2**30
        _check_start_weights(ensemble, identities, folder)
        notes += _rehearse(ensemble, identities[0], folder)
        notes += _read_data(ensemble, identities[0]) if full else []
        groups, prepare_s, power = _measure(ensemble, _group_members(identities), folder, notes)
    estimate_members(groups, power)
    of_run = {"is_inline": is_inline, "shares": unshared is None, "repeats": repeats}
    run = estimate_run(ensemble, groups, node, prepare_s, power, base_gb=base_gb, **of_run)
    return DryRun(
        name=ensemble.name,
        mode="search" if ensemble.search else "list",
        executor=executor,
        run_dir=str(start.run_dir.path),
        run_state=_describe_state(start.state),
        node={name: getattr(node, name) for name in ("cpus", "memory_gb")}
        | {"gpus": list(node.gpus), "power": power["source"]},
        splits=_count_splits(ensemble),
        fields=fields,
        pipeline=pipeline | {"data": data, "prepare_s": prepare_s},
        members=[{name: value for name, value in row.items() if not name.startswith("_")} for row in groups],
        run=run,
        notes=notes,
    )


def _rehearse(ensemble: Ensemble, member: Identity, folder: str) -> list[str]:
    """Rehearse a member in this process, and return what a run would say.

    Raises:
        SpecError: a run would not start.
    """
    if ensemble.rehearsal is None or ensemble.train is None:
        return ["not rehearsed: whether a resume would go on as a member did is not known"]
    from ensemble.controller.rehearser import describe_refusal
    from ensemble.train.rehearsal import rehearse_here

    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints
        found = rehearse_here(ensemble, member, folder)
    if found.refused and ensemble.rehearsal == "refuse":
        raise SpecError(describe_refusal(member.member, found.refused))
    notes = [*found.refused, *found.remarks, *([f"not to its end: {found.failed}"] if found.failed else [])]
    alright = "a resume goes on to the same weights, and each sample is predicted alike"
    return [f"rehearsal of {member.member}: {note}" for note in notes or [alright]]


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
    train = {} if ensemble.train is None else {"train": ensemble.pipeline(identity.params)}
    for split, pipeline in (pipelines | train).items():
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


def _check_opened(start: DeclaredStart, node: Node) -> tuple[str | None, bool]:
    """What a controller checks when it starts, on this node.

    Returns:
        Why nothing is shared, None where it is; whether what is shared is prepared once for all epochs.
    """
    from ensemble.controller.feeders import SharedStream
    from ensemble.controller.start_steps import OpenedStart, check_start
    from ensemble.controller.starts import make_trials

    ensemble, executor, stream = start.ensemble, start.executor, SharedStream(start.ensemble)
    code, is_cluster = start.code.fingerprint, executor != "ray"
    check_start(OpenedStart(ensemble, start.run_dir, start.state, code, stream, [node], is_cluster=is_cluster))
    search = ensemble.search
    if search is None or search.storage is None:
        with _make_folder() as folder:
            state = RunState(objective=str(ensemble.objective))
            make_trials(ensemble, RunDir(folder), state, sharing=stream.sharing)
    else:  # a storage of the user's would get a study
        import_object("ensemble.search.storage:check_storage")(search.storage)
    if executor == "inline":
        return "the inline executor trains members one after the other, each prepares its own batches", False
    if stream.sharing:
        return None, stream.repeated > 0
    return stream.unshared or "sharing='independent' is declared", False


def _check_start_weights(ensemble: Ensemble, identities: Sequence[Identity], folder: str) -> None:
    """Check that the weights with which members start are those of their models; each source is read once.

    Args:
        folder: has the base of the models, if they stand on one.
    """
    from ensemble.controller.starts import find_start
    from ensemble.store import read_weights

    started = [(one, one.lineage["from"]) for one in identities if one.lineage is not None]
    sources = {source: read_weights(find_start(source).file) for _, source in started}
    for member, source in started:
        from ensemble.train.model_signature import check_start
        from ensemble.train.own_tensors import use_base

        with use_base(folder, ensemble.recipe):
            check_start(ensemble, member, sources[source])


def _list_members(ensemble: Ensemble) -> list[Identity]:
    """The declared members; of a search, members with a few random points of its space."""
    if ensemble.search is None:
        return [ensemble.identify(number) for number in range(len(ensemble.members or ()))]
    points = list(ensemble.search.sample(ensemble.search.seed))[: ensemble.search.trials]
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


def _measure(
    ensemble: Ensemble, groups: Sequence[Sequence[Identity]], folder: str, notes: list[str]
) -> tuple[Table, float | None, dict[str, Any]]:
    """Train a few steps of one member of each group.

    Returns:
        A row for each group, CPU-seconds of preparing a sample, and the power in the meantime. What members remark
        is added to the notes.
    """
    from ensemble.meter import PowerMeter

    steps_s = min(STEPS_S[0], STEPS_S[1] / len(groups))
    with contextlib.closing(PowerMeter("local", energy=ensemble.energy)) as meter:
        meter.start()
        rows = [_measure_group(ensemble, members, folder, steps_s, notes) for members in groups]
        power = _read_power(meter)
    largest = max((row["predictions_bytes"] or 0 for row in rows), default=0) / 1e9
    if largest > ensemble.keep_predictions_gb:
        notes.append(
            f"a member's predictions take {largest:.3g} GB, more than "
            f"Ensemble.keep_predictions_gb={ensemble.keep_predictions_gb:g}: only a part of each sample's "
            "positions is kept, or nothing if samples have none or combine= is a function"
        )
    return rows, max((row["_prepare_s"] for row in rows if row["error"] is None), default=None), power


def _measure_group(
    ensemble: Ensemble, members: Sequence[Identity], folder: str, steps_s: float, notes: list[str]
) -> dict[str, Any]:
    """The row of members that cost the same, by a few steps of the first one."""
    from ensemble.train.profile import measure_here

    first = members[0]
    row = _describe_group(ensemble, members) | dict.fromkeys((*FIGURES, *SIZES, "evaluate_s", "error"))
    row["_members"] = list(members)
    if ensemble.train is None:  # its function is a whole program, which knows no single step
        return row | {"error": UNMEASURED}
    part = dataclasses.replace(first, batch_size=-(-first.batch_size // first.workers))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints
            measured = measure_here(ensemble, part, folder, steps_s)
    except (Exception, SystemExit) as error:
        log.debug("a step of %s failed", first.member, exc_info=True)
        return row | {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    notes += [f"{first.member}: {remark}" for remark in measured.remarks]
    row |= {name: measured.figures.get(name) for name in FIGURES} | {n: getattr(measured, n) for n in SIZES}
    row |= {"_evaluation": measured.evaluation, "evaluate_s": (measured.evaluation or {}).get("evaluate_s")}
    return row | {"_prepare_s": measured.figures["prepare_s"]}


def _describe_group(ensemble: Ensemble, members: Sequence[Identity]) -> dict[str, Any]:
    first = members[0]
    names = dict.fromkeys(name for member in members for name in member.params)
    varied = [name for name in names if any(one.params.get(name) != first.params.get(name) for one in members)]
    samples = ensemble.samples
    steps = samples // first.batch_size if ensemble.drop_last else -(-samples // first.batch_size)
    counts = _count_splits(ensemble)
    if is_out_of_fold(first.weights):
        counts["valid"] = int(list_held_out(first.weights, ensemble.pipeline(first.params).source).sum())
    held_out = {name: -(-many // first.batch_size) for name, many in counts.items()}
    within = steps // first.validate_every if first.validate_every else 0
    # The validation split after each epoch, and within it; at the end each split is predicted once.
    evaluations = (
        first.epochs * (1 + within) * held_out.get("valid", 0) + sum(held_out.values()) - held_out.get("train", 0)
    )
    return {
        "members": [member.member for member in members],
        "params": first.params,
        "varied": varied,
        "workers": "auto" if "workers" in first.auto else first.workers,
        "batch_size": first.batch_size,
        "steps": steps,
        "epochs": first.epochs,
        "evaluations": evaluations,
    }


def _read_power(meter: Any) -> dict[str, Any]:
    """Joules, the idle ones apart, CPU-seconds and seconds of the time in which steps were trained; its source."""
    power = meter.sample()
    idle = [part["idle_j"] for part in power["parts"]]
    return {
        "source": meter.source,
        "energy_j": power["energy_j"],
        "idle_j": None if None in idle else sum(idle),
        "busy_s": power["busy_s"],
        "interval_s": power["interval_s"],
        "origin": meter.origin,
    }


def _list_notes(ensemble: Ensemble, executor: str, state: RunState) -> list[str]:
    from ensemble.controller.starts import list_declared
    from ensemble.schedule.needs import compute_need
    from ensemble.spec.nodes import describe_selection
    from ensemble.spec.out_of_fold import list_fold_notices

    notes = [*ensemble.list_notices(), *list_fold_notices(ensemble)]
    if executor == "ray":
        notes.append("measured and estimated for this machine; a Ray cluster may offer more nodes, or other ones")
        selected = {compute_need(one).selection for one in list_declared(ensemble)} - {()}
        if selected:
            labels = "; ".join(sorted(map(describe_selection, selected))[:MOST_SELECTIONS])
            notes.append(f"whether the cluster has nodes with {labels} is checked when the run starts")
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
    return ", ".join(f"{states.count(word)} {word}" for word in dict.fromkeys(states)) or "no member has begun"


def _count_splits(ensemble: Ensemble) -> dict[str, int]:
    splits = {name: getattr(ensemble, name) for name in PREDICTED_SPLITS}
    train = {} if ensemble.train is None else {"train": ensemble.samples}
    return {**train, **{name: len(pipe) for name, pipe in splits.items() if pipe is not None}}
