"""Checks what has changed since a run began (members, data, code, libraries), and refuses or names it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.controller.more_epochs import find_more_epochs
from ensemble.events import NOT_COMBINED
from ensemble.spec.population import identify_trial
from ensemble.store import RunDir, RunState, StoreError, load_code, versions
from ensemble.store.member import ENDED
from ensemble.store.reopening import evaluate_again
from ensemble.train.data_identity import (
    describe_changed_splits,
    describe_difference,
    list_unsure_splits,
    training_data,
    why_unsure,
)
from ensemble.user_code.fingerprint import Code, fingerprint_function
from ensemble.user_code.imports import digest_syntax
from pipelines.environment.library_settings import find_settings

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store import MemberState

log = logging.getLogger(__name__)

#: Libraries whose version may change results, and what of them.
_LIBRARIES = {
    "torch": "kernels, initial weights and random numbers",
    "numpy": "random numbers and the arithmetic of samples",
    "pillow": "decoded and resized images",
    "opencv": "decoded and resized images",
    "simplejpeg": "decoded images",
    "optuna": "what the sampler proposes",
}
_USED_BY_ALL = {"torch", "numpy"}
_ANEW = "--fresh starts a new run beside this one (fresh=True in Python)"


@dataclass(frozen=True)
class Change:
    """A difference between the present code and that of the run's last start.

    Attributes:
        before, now: fingerprints.
        names: the functions and classes that differ; empty where they cannot be named.
        trained: members that were trained with other code.
        unsure: whether another version of Python compiled the code before, so that it may be the same.
        predicts: whether it is a change of how members predict.
    """

    before: str
    now: str
    names: list[str]
    trained: list[str]
    unsure: bool
    predicts: bool = False

    def __str__(self) -> str:
        return f"the code has changed ({abbreviate(self.names, 5)})" if self.names else "the code has changed"

    def as_event(self) -> dict[str, Any]:
        """The fields of the `code_changed` event."""
        return {"before": self.before, "code": self.now, "changed": self.names, "trained": self.trained}


def find_code_change(state: RunState, code: Code, run_dir: RunDir) -> Change | None:
    """Compare the present code with that of the run's last start; None where no difference can be detected.

    The code of the last start counts as accepted for members that were trained with earlier code.
    """
    fingerprint = code.fingerprint
    if state.header.code == fingerprint:
        return None
    trained = [one for one in state.members.values() if one.has_weights_of_other_code(fingerprint)]
    before = trained[0].code if trained else state.header.code
    if before is None or before == fingerprint:
        return None
    kept = load_code(run_dir.code(before))
    other = kept is not None and kept.python != code.python
    names = code.changed(kept) if kept is not None and not other else []
    if kept is not None and kept.scheme != code.scheme:
        return None
    predicts = bool(names) and kept is not None and kept.predicts not in (None, code.predicts)
    return Change(before, fingerprint, names, [one.id for one in trained], other, predicts)


def check_code(state: RunState, code: Code, run_dir: RunDir, *, accept: bool) -> None:
    """Refuse to train members with other code than before, unless that is accepted; log what differs."""
    check_versions(state, run_dir.path, accept=accept)
    kept = load_code(run_dir.code(state.header.code)) if state.header.code else None
    if kept is not None and kept.scheme != code.scheme:
        log.warning(
            "%s: whether the code changed is not known: another version of ray-ensemble recorded it",
            run_dir.path,
        )
    change = find_code_change(state, code, run_dir)
    if change is None:
        return
    if change.unsure:
        log.warning(
            "%s: whether the code changed is not known: another version of Python recorded it", run_dir.path
        )
    elif change.trained and not accept:
        raise StoreError(
            f"{run_dir.path}: {change} since {abbreviate(change.trained)} trained with it; --accept-code goes on "
            f"with the new code (accept_code=True in Python), {_ANEW}"
        )
    elif change.trained:
        log.warning("%s: %s, and is accepted for %s", run_dir.path, change, abbreviate(change.trained))
    else:
        log.warning("%s: %s: no member has a checkpoint, all train with the new code", run_dir.path, change)


def check_versions(state: RunState, path: Path, *, accept: bool) -> None:
    """Say which libraries have changed since the last start; refuse another major version of torch or NumPy,
    unless accepted.
    """
    before, present = state.header.versions or {}, versions()
    unused = {"optuna"} if state.header.mode != "search" else set[str]()
    compared = [
        name for name in _LIBRARIES if name not in unused and None not in (before.get(name), present[name])
    ]
    changed = [name for name in compared if before[name] != present[name]]
    trained = [member.id for member in state.members.values() if member.checkpoint]
    if not changed or not trained:
        return
    text = ", ".join(
        f"{name} was {before[name]}, is {present[name]} ({_LIBRARIES[name]} may differ)" for name in changed
    )
    if not accept and any(
        _find_major(before[name]) != _find_major(present[name]) for name in {*changed} & _USED_BY_ALL
    ):
        raise StoreError(
            f"{path}: {text} since {abbreviate(trained)} trained with it; install the earlier major version, "
            f"--accept-code goes on with this one (accept_code=True in Python), {_ANEW}"
        )
    log.warning("%s goes on with other libraries than %s trained with: %s", path, abbreviate(trained), text)


def _find_major(version: str | None) -> str:
    return (version or "").partition(".")[0]


def check_edits(code: Code, run_dir: RunDir, *, accept: bool) -> None:
    """Warn that a resumed run uses its kept code where the sources have been edited since.

    Raises:
        StoreError: the user has asked for the edited code, which a resume cannot take.
    """
    kept = run_dir.code(code.fingerprint)
    edited = [
        str(source)
        for module, source in code.sources.items()
        for copy in [
            kept.joinpath(*module.split("."), "__init__.py"),
            kept.joinpath(f"{module.replace('.', '/')}.py"),
        ]
        if copy.is_file() and digest_syntax(copy) != digest_syntax(source)
    ]
    if not edited:
        return
    files = ", ".join(edited)
    if accept:
        raise StoreError(
            f"{run_dir.path}: a resume uses the code that is kept with the run, but {files} changed since; "
            "`ensemble run SPEC.py --accept-code` goes on with the new code, `ensemble resume` without "
            "--accept-code with the kept code"
        )
    log.warning(
        "%s goes on with the code that is kept with it, but %s changed since; `ensemble run` uses the new code",
        run_dir.path,
        files,
    )


def explain_evaluation(changed: Mapping[str, str]) -> str:
    """What follows from data that members are evaluated on and that have changed (`describe_changed_splits`)."""
    consequence = "members are evaluated on it from now on, and those that have finished again, without training"
    return f"{'; '.join(changed.values())}; {consequence}"


def explain_changed_splits(state: RunState, ensemble: Ensemble) -> str | None:
    """Why the members of a run that has finished are evaluated again with these data; None where they are not."""
    changed = describe_changed_splits(state.header.data, training_data(ensemble))
    return explain_evaluation(changed) if changed else None


def list_evaluated_again(
    state: RunState, changed: Mapping[str, str], change: Change | None, keep_gb: float | None = None
) -> list[str]:
    """The finished members that are evaluated again.

    All of them with changed data, where the code by which members predict has changed, or less or more of
    predictions is kept; after another change those without usable predictions; always those whose last evaluation
    failed.
    """
    finished = [member for member in state.members.values() if member.state == "finished" and member.checkpoint]
    is_kept_otherwise = keep_gb is not None and keep_gb != state.header.keep_predictions_gb
    if changed or is_kept_otherwise or (change is not None and change.predicts):
        return [member.id for member in finished]
    unused = (state.combined or NOT_COMBINED).left_out if change is not None else {}
    return [member.id for member in finished if member.id in unused or member.outdated is not None]


def explain_evaluated_again(state: RunState, change: Change | None, keep_gb: float | None = None) -> str | None:
    """Which finished members predict again with the same data; None where none does."""
    members = list_evaluated_again(state, {}, change, keep_gb)
    return f"{abbreviate(members)} will predict again, without training" if members else None


def find_evaluated_again(
    state: RunState, ensemble: Ensemble, change: Change | None, path: Path, t: float
) -> tuple[dict[str, str], list[str]]:
    """The changed splits, and the finished members that are evaluated again, which is logged and applied to the
    state.
    """
    if not any(member.checkpoint for member in state.members.values()):
        return {}, []
    changed = describe_changed_splits(state.header.data, training_data(ensemble))
    keep_gb = ensemble.keep_predictions_gb
    members = list_evaluated_again(state, changed, change, keep_gb)
    predicted = explain_evaluated_again(state, change, keep_gb)
    for why in filter(None, (changed and explain_evaluation(changed), predicted)):
        log.warning("%s: %s", path, why)
    if changed or members:
        evaluate_again(state, members, t)
    return changed, members


def check_same(
    state: RunState, ensemble: Ensemble, path: Path, *, accepts_data: bool = False, accepts_code: bool = False
) -> None:
    """Refuse to go on with another search, or members declared otherwise, unless they have no checkpoint."""
    if state.mode == "search" or ensemble.search is not None:
        from ensemble.schedule.declared_search import check_same_search

        check_same_search(state, ensemble, path, accepts_code=accepts_code)
    extended = find_more_epochs(state)
    for member in state.members.values():
        listed = ensemble.search is None and member.number < len(ensemble.members or ())
        if member.identity.get("added") and not listed:
            continue  # it was added by a request: nothing declares it
        if member.reason == "impossible":
            continue  # the searcher proposed it, and no pipeline could be made for it
        if ensemble.search is None and not listed:
            raise StoreError(f"{path} has {member.id}, which this ensemble does not declare; {_ANEW}")
        returns = member.state not in ("finished", "pruned", "cancelled")
        begins = member.checkpoint is None and returns and not member.identity.get("added")
        if begins:
            continue
        for name, before, declared in _list_differences(member, ensemble, extended)[:1]:
            if name == "epochs" and member.identity.get("epochs_before"):
                hint = (
                    f"`ensemble resume --epochs` gave it {before}; declare epochs={before}, or `ensemble resume`"
                )
                raise StoreError(f"{path}: {member.id} has epochs={before!r}, now {declared!r}: {hint}; {_ANEW}")
            raise StoreError(f"{path}: {member.id} has {name}={before!r}, now {declared!r}; {_ANEW}")
    check_data(state, ensemble, path, accepts=accepts_data)


def has_corrected_member(state: RunState, ensemble: Ensemble) -> bool:
    """Whether a member that failed without a checkpoint is declared otherwise now, so that it is tried again."""
    declared = len(state.members) if ensemble.search is not None else len(ensemble.members or ())
    extended = find_more_epochs(state)
    return any(
        member.is_diverged_without_checkpoint
        and member.number < declared
        and bool(_list_differences(member, ensemble, extended))
        for member in state.members.values()
    )


def is_combined_otherwise(state: RunState, ensemble: Ensemble) -> bool:
    """Whether the run was combined by another method, coverage or calibration than declared now, or in vain."""
    from ensemble.combine.combination import FUNCTION

    combined = state.combined
    if combined is None:
        return False
    if has_failed_combination(state) or _is_calibrated_otherwise(combined.calibration, ensemble):
        return True
    if (combined.decision or {}).get("by") != ensemble.thresholds:
        return True
    if any(interval["level"] != ensemble.coverage for interval in (combined.conformal or {}).values()):
        return True
    if callable(ensemble.combine):
        return (combined.declared, combined.code) != (FUNCTION, fingerprint_function(ensemble.combine))
    return bool(combined.declared != ensemble.combine)


def has_failed_combination(state: RunState) -> bool:
    """Whether an error hindered the last combination of the members."""
    return bool((state.combined or NOT_COMBINED).failed)


def _is_calibrated_otherwise(calibration: dict[str, Any] | None, ensemble: Ensemble) -> bool:
    from ensemble.combine.run import NOT_ASKED

    if calibration is None:
        return False
    if isinstance(ensemble.calibrate, str):
        return calibration["method"] not in (ensemble.calibrate, None) or calibration["reason"] == NOT_ASKED
    return calibration["reason"] == NOT_ASKED if ensemble.calibrate else calibration["method"] is not None


def _list_differences(member: MemberState, ensemble: Ensemble, extended: int) -> list[tuple[str, Any, Any]]:
    """(field, before, now) of the fields that decide a member's weights; `extended` is of `find_more_epochs`."""
    if ensemble.search is None:
        fresh = ensemble.identify(member.number)
    else:
        fresh = identify_trial(ensemble, member.number, member.identity)
    declared = dict(member.identity)
    if member.state in ENDED and fresh.epochs == extended and declared["epochs"] < extended:
        declared["epochs"] = extended  # others were given so many: this one has ended without them
    if ensemble.elastic and declared.get("widened_from"):  # it keeps its present width
        declared["workers"] = declared["widened_from"]
    return fresh.list_differences(declared)


def check_data(state: RunState, ensemble: Ensemble, path: Path, *, accepts: bool = False) -> None:
    """Refuse to go on with other training data, unless accepted; warn where a change cannot be detected."""
    before = state.header.data or None  # where the log has lost its start
    trained = any(member.checkpoint for member in state.members.values())
    if before is None or not trained:
        return
    present = training_data(ensemble)
    changed = describe_difference(before, present)
    if changed:
        text = f"{path}: {changed}{_describe_settings(state)}"
        if not accepts:
            raise StoreError(f"{text}; --accept-data goes on with them (accept_data=True in Python), {_ANEW}")
        log.warning("%s, and is accepted: members that have not ended go on with other data than they began", text)
    why = why_unsure(before, present)
    if why is not None:
        log.warning(
            "%s: only the number of the training samples is compared with the earlier start (%s)",
            path,
            getattr(ensemble.train, "why_unsure", None) or why,
        )
    if unsure := list_unsure_splits(before, present):
        log.warning(
            "%s: only the number of the samples of %s is compared with the earlier start", path, ", ".join(unsure)
        )


def _describe_settings(state: RunState) -> str:
    """Which global settings of libraries are others than at the last start; empty where none is known to be."""
    present, unset = find_settings(only_of_user=True), "not set"
    before = state.header.settings
    names = [name for name in {**before, **present} if before.get(name) != present.get(name)]
    return "".join(f"; {name} was {before.get(name, unset)}, is {present.get(name, unset)}" for name in names)


def abbreviate(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
