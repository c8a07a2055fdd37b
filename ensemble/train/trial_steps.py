"""Measures a few steps of members in this process, before there is a run: for a dry run."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ensemble.comm import SingleRank
from ensemble.schedule.needs import uses_gpus
from ensemble.spec import Ensemble, Identity, Recipe, SpecError
from ensemble.spec.recipe import has_own_loop
from ensemble.train.checkpoint import fit_weights
from ensemble.train.job import Job, ProfileRequest, ShapeMismatchError
from ensemble.train.model_signature import build_without_memory
from ensemble.train.profile import TrialSession
from ensemble.train.seeding import process_settings
from ensemble.train.stopwatch import GpuTimer

EVALUATIONS = 4  # of a batch; the first takes longer


@dataclass(frozen=True)
class MeasuredSteps:
    """What a few steps of one architecture have shown.

    Attributes:
        members: names of the members that have it.
        figures: of a `Profile`, for one worker.
        parameters: of the model; trainable: how many of them are trained; checkpoint_bytes: tensors of a
            checkpoint; predictions_bytes: of all splits, None where that is not known.
        evaluation: `evaluate_s` and `evaluate_cpu_s` of a batch of a split; None where none was evaluated.
        remarks: what the first of the members has remarked.
    """

    members: list[str]
    figures: dict[str, Any]
    parameters: int
    trainable: int
    checkpoint_bytes: int
    predictions_bytes: int | None
    evaluation: dict[str, float] | None
    remarks: list[str]


def check_start(ensemble: Ensemble, member: Identity, weights: Mapping[str, Any]) -> str:
    """Check that weights are those of a Recipe's model; returns a line where a part of them is.

    Raises:
        SpecError: they are not.
    """
    lineage, recipe = member.lineage or {}, ensemble.recipe
    if not isinstance(recipe, Recipe) or has_own_loop(recipe):
        return ""
    try:
        model = build_without_memory(recipe, member.params)
    except Exception:  # its steps will show it
        return ""
    try:
        return fit_weights(model, weights, lineage["from"], lineage.get("parts"))[1]
    except ShapeMismatchError as error:
        raise SpecError(f"{member.member}: {error}") from None


def measure_here(
    ensemble: Ensemble, members: list[Identity], directory: str, steps_s: float
) -> list[MeasuredSteps]:
    """Measure members in this process, as one worker each; of those with equal signatures, one.

    Nothing is left behind but a log in `directory`; seeds and the number of threads are restored.

    Args:
        steps_s: seconds of steps to measure of each, approximately.

    Raises:
        Exception: whatever the user's code raises.
    """
    on_gpu = uses_gpus(members[0], ensemble.devices) and torch.cuda.is_available()
    device = torch.device("cuda:0" if on_gpu else "cpu")
    alone = [dataclasses.replace(one, workers=1) for one in members]
    job = Job(
        run_dir=directory,
        identity=alone[0],
        attempt=0,
        rank=0,
        rendezvous=None,
        interface=None,
        device=str(device),
        feeder=None,
        profile=ProfileRequest(members=alone, known=[], steps_s=steps_s, evaluations=EVALUATIONS),
    )
    events: list[dict[str, Any]] = []
    gpu = GpuTimer(device) if device.type == "cuda" else None
    with process_settings(alone[0].threads, device), contextlib.closing(SingleRank()) as communicator:
        session = TrialSession(job, ensemble, communicator, gpu, events.append)
        try:
            session.measure()
        finally:
            gc.unfreeze()
    measured = (event for event in events if event["type"] == "profiled")
    return [MeasuredSteps(event["of"], event["measured"], *session.shown[event["of"][0]]) for event in measured]
