"""What is known of declared members before a run starts: whether they fit the nodes, and their first weights.

`Member(start=...)` names a file of weights, or a member of another run. The run takes a copy when it declares the
member, which is then all that counts; the digest of the weights is part of the member's identity.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.controller.more_epochs import find_more_epochs
from ensemble.events import Checkpoint, MoreEpochs, Report
from ensemble.schedule.explain import explain_beyond_limits, explain_unplaceable
from ensemble.schedule.needs import Need, Node, compute_need, resolve_devices
from ensemble.schedule.trials import ListedTrials, Trials
from ensemble.spec import Ensemble, Identity, SpecError, unknown_name
from ensemble.spec.identity import is_same_start, select_warm
from ensemble.spec.member import as_member
from ensemble.store import (
    MemberState,
    RunDir,
    RunState,
    StoreError,
    keep_checkpoint,
    keep_weights,
    read_state,
    revision,
    versions,
)
from ensemble.store.file_checks import list_digests
from ensemble.store.initial_weights import KeptCheckpoint, digest_weights
from ensemble.store.member import ENDED
from ensemble.store.regular_files import measure
from ensemble.train.data_identity import describe_difference, training_data
from pipelines.environment.library_settings import find_settings
from pipelines.providers import import_object

log = logging.getLogger(__name__)


def _describe_search(ensemble: Ensemble) -> dict[str, str] | None:
    from ensemble.schedule.declared_search import describe_search

    return describe_search(ensemble)


def make_trials(ensemble: Ensemble, run_dir: RunDir, state: RunState, *, sharing: bool) -> Trials:
    """Where the members come from, restored from the state of the run; a search is imported where there is one."""
    if ensemble.search is None:
        return ListedTrials(ensemble, state, sharing=sharing)
    trials: Trials = import_object("ensemble.search.trials:SearchTrials")(
        ensemble, run_dir, state, sharing=sharing
    )
    return trials


def list_declared(ensemble: Ensemble) -> Iterator[Identity]:
    """The members as they are declared; of a search, a trial."""
    listed = ensemble.members
    for number in range(1 if listed is None else len(listed)):
        yield ensemble.identify(number, {} if listed is None else None)


def check_fit(
    ensemble: Ensemble, nodes: Sequence[Node], *, has_gpus: bool = False, is_cluster: bool = True
) -> None:
    """Check that each declared member can be placed; say that shares of GPUs do not count where there is none.

    Args:
        nodes: with all that they could ever offer the run.
        has_gpus: whether the run has known any GPU before: its members wait for one.
        is_cluster: whether these are the nodes of the run; else members are taken to select none.
    """
    fitting = set[Need]()
    nodes = [node.without_others() for node in nodes]
    devices = resolve_devices(ensemble.devices, has_gpus=any(node.gpus for node in nodes))
    ignores_shares = devices == "cpu" and ensemble.devices == "auto" and not has_gpus
    for declared in list_declared(ensemble):
        identity = declared if is_cluster else dataclasses.replace(declared, nodes=None)
        if (need := compute_need(identity)) not in fitting:
            reason = explain_beyond_limits(identity, ensemble.limits, devices)
            reason = reason or explain_unplaceable(identity, nodes, devices)
            if reason is not None:
                raise SpecError(reason)
            fitting.add(need)
            if ignores_shares and need.requires_gpu:
                ignores_shares = False  # once is enough
                log.warning("no GPU found: members train on the CPU")


def refuse_without_locks(ensemble: Ensemble, run_dir: RunDir) -> None:
    """Refuse members of several workers where files cannot be locked: they meet by a file that torch locks."""
    if ensemble.elastic or any(
        member.workers > 1 or "workers" in member.auto for member in list_declared(ensemble)
    ):
        raise SpecError(
            f"{run_dir.path} is on a file system without locks (flock), by which the workers of a member "
            "find each other: mount it with them (Lustre: -o flock; NFS: a version with locks), choose a run "
            "directory elsewhere, or declare workers=1 and elastic=False"
        )


def describe_start(
    ensemble: Ensemble,
    run_dir: RunDir,
    state: RunState,
    *,
    executor: str,
    members: int,
    code: str,
    more_epochs: MoreEpochs | None,
    changed_splits: Mapping[str, str],
    evaluated_again: Sequence[str],
    accepts_data: bool,
    constraints: Mapping[str, Mapping[str, float]],
) -> Report:
    """The `run_started` event; `members` are those that are known or will be proposed."""
    return {
        "type": "run_started",
        "name": ensemble.name,
        "run_id": state.run_id,
        "executor": executor,
        "mode": "search" if ensemble.search else "list",
        "objective": ensemble.objective,
        "direction": ensemble.mode,
        "further_objectives": list(ensemble.search.objectives) if ensemble.search else [],
        "search": _describe_search(ensemble) if ensemble.search else None,
        "constraints": dict(constraints),
        "budget": ensemble.search.budget if ensemble.search else None,
        "epochs": ensemble.epochs,
        "limits": dict(ensemble.limits),
        "keep_predictions_gb": ensemble.keep_predictions_gb,
        "members": members,
        "data": training_data(ensemble),
        "overlap": ensemble.list_overlaps(),
        "tables": ensemble.list_tables(),
        "code": code,
        "files": list_digests(run_dir, state),
        "energy": ensemble.energy.as_event(),
        "versions": versions(),
        "settings": find_settings(only_of_user=True),
        "revision": run_dir.info.get("revision") or revision(run_dir.path),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "resumed": state.started is not None,
        "changed_splits": dict(changed_splits),
        "evaluated_again": list(evaluated_again),
        "accepts_data": accepts_data or state.header.accepts_data,
        **({} if more_epochs is None else {"more_epochs": more_epochs}),
    }


@dataclass(frozen=True)
class StartPlan:
    """The weights that a declaration names; of a run's member with its `checkpoint` event and the data of that
    run.
    """

    file: Path
    logged: Checkpoint | None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def keep(self, run_dir: RunDir) -> KeptCheckpoint:
        if self.logged is None:
            return keep_weights(run_dir, self.file)
        return keep_checkpoint(run_dir, self.file, self.logged)

    def digest(self) -> str:
        logged: str | None = None if self.logged is None else self.logged.weights_sha256
        return logged or digest_weights(self.file)


def find_start(start: str) -> StartPlan:
    """The weights of `start`: a safetensors file, or RUN_DIR/MEMBER.

    Raises:
        StoreError: it is neither, or the member has no checkpoint.
    """
    path = Path(start).expanduser()
    if not path.is_dir() and measure(path) is not None:
        return StartPlan(path, None)
    folder = path.parent.parent if path.parent.name == "members" else path.parent
    if RunDir(path).events.exists():
        raise StoreError(f"start={start!r} is a whole run: name one of its members, such as {start}/member-0")
    if not RunDir(folder).events.exists():
        raise StoreError(f"start={start!r} is neither a file of weights nor RUN_DIR/MEMBER")
    state = read_state(RunDir(folder).events)
    members = state.members
    if path.name not in members:
        raise StoreError(unknown_name(f"start={start!r}: {folder} has no member", path.name, list(members)))
    member = members[path.name]
    if member.checkpoint is None:
        raise StoreError(f"start={start!r}: {path.name}: {member.explain_no_checkpoint()}")
    return StartPlan(RunDir(folder).valid_checkpoint(member), member.checkpoint, state.header.data)


def describe_kept(lineage: Mapping[str, Any], kept: KeptCheckpoint) -> dict[str, Any]:
    """A lineage with what is known of the weights that were copied."""
    names = ("epoch", "step", "weights_sha256", *(("digest",) if lineage.get("whole") else ()))
    return {**lineage, **{name: getattr(kept, name) for name in names}}


def _find_own_start(run_dir: RunDir, state: RunState, source: str) -> StartPlan:
    """The whole state of a member of this run."""
    member = state.members[source]
    if member.checkpoint is None or member.has_weights_only:
        why = member.explain_no_checkpoint() if member.checkpoint is None else "it has weights alone"
        raise StoreError(f"no member can go on from {source}: {why}")
    return StartPlan(run_dir.valid_checkpoint(member), member.checkpoint)


def keep_start(run_dir: RunDir, identity: Identity, state: RunState) -> Identity:
    """The identity with the digest of the weights that it is declared to start with, of which the run has a copy.

    A copy that the run has already of the member's weights stays.
    """
    lineage = select_warm(identity.lineage)
    if lineage is None or lineage["weights_sha256"] is not None:
        return identity
    recorded = _find_kept(state.members.get(identity.member))
    if recorded is not None and is_same_start(lineage, recorded):
        return dataclasses.replace(identity, lineage=recorded)
    source = lineage["from"]
    plan = _find_own_start(run_dir, state, source) if lineage.get("whole") else find_start(source)
    kept = plan.keep(run_dir)
    try:
        kept.give_to(run_dir, identity.member)
    except StoreError:
        kept.remove()
        raise
    return dataclasses.replace(identity, lineage=describe_kept(lineage, kept))


def _find_kept(member: MemberState | None) -> dict[str, Any] | None:
    """The lineage of a member with whose weights the run has a copy; None where it has none."""
    lineage = None if member is None else select_warm(member.identity.get("lineage"))
    return lineage if lineage is not None and lineage["weights_sha256"] is not None else None


def _lacks_weights(member: MemberState) -> bool:
    """Whether a member was declared to start with weights that could not be read then."""
    return select_warm(member.identity.get("lineage")) is not None and _find_kept(member) is None


def _restore_start(run_dir: RunDir, state: RunState, member: MemberState) -> str | None:
    """Make the copy again from which a member of a population went on, where it was removed; returns why that
    cannot be.
    """
    lineage = member.identity.get("lineage") or {}
    is_kept = lineage.get("weights_sha256") is not None
    if not lineage.get("whole") or not is_kept or measure(run_dir.initial_weights(member.id)) is not None:
        return None
    try:
        kept = _find_own_start(run_dir, state, lineage["from"]).keep(run_dir)
        if kept.weights_sha256 == lineage["weights_sha256"]:
            kept.give_to(run_dir, member.id)
            return None
        kept.remove()
    except StoreError as error:
        return str(error)
    return f"{lineage['from']} has other weights now than those from which {member.id} went on"


def find_redeclared(
    run_dir: RunDir, state: RunState, listed: Callable[[int], Identity | None]
) -> tuple[dict[str, Identity], dict[str, str]]:
    """Members that begin anew: with a changed declaration, or with weights that could not be read before.

    Args:
        listed: the identity of a member by the present declaration; None for one that was added.

    Returns:
        The members of which the declaration is another one, and those that cannot start, and why.
    """
    redeclared, unstartable = dict[str, Identity](), dict[str, str]()
    extended = find_more_epochs(state)
    for member in state.members.values():
        begins = member.checkpoint is None and not member.identity.get("added")
        if not begins or not (member.state == "waiting" or member.is_diverged_without_checkpoint):
            continue
        if (why := _restore_start(run_dir, state, member)) is not None:
            unstartable[member.id] = why
            continue
        declared = listed(member.number)
        if declared is not None and member.state == "failed" and declared.epochs == extended:
            declared = dataclasses.replace(
                declared, epochs=member.identity["epochs"]
            )  # it was given no more epochs
        if declared is None or not (declared.list_differences(member.identity) or _lacks_weights(member)):
            continue
        try:
            redeclared[member.id] = keep_start(run_dir, declared, state)
        except StoreError as error:
            if not _lacks_weights(member):
                raise
            unstartable[member.id] = str(error)
    return redeclared, unstartable


def check_starts(ensemble: Ensemble, state: RunState) -> None:
    """Check that there are the weights that members are declared to start with.

    Warn where they have changed, and where they were trained on other data, which may have samples of `valid`.
    """
    for number, listed in enumerate(ensemble.members or ()):
        if as_member(number, listed).start is None:
            continue
        lineage = select_warm(ensemble.identify(number).lineage)
        member = state.members.get(f"member-{number}")
        recorded, has_ended = _find_kept(member), member is not None and member.state in ENDED
        if lineage is None or (has_ended and not (member and member.is_resumable(None))):
            continue
        try:
            plan = find_start(lineage["from"])
            changed = recorded is not None and plan.digest() != recorded["weights_sha256"]
        except StoreError as error:
            if recorded is None and not (member is not None and _lacks_weights(member)):
                raise StoreError(f"members[{number}]: {error}") from None
            continue  # the run has its copy, or the member fails again, alone
        if plan.data and (difference := describe_difference(plan.data, training_data(ensemble))):
            log.warning(
                "member-%d starts with the weights of %s, which were trained on other data (%s): where these have "
                "samples of valid or test, its figures are too good",
                number,
                lineage["from"],
                difference,
            )
        if changed:
            log.warning(
                "%s has other weights now than member-%d started with; the member goes on with the run's copy",
                lineage["from"],
                number,
            )
