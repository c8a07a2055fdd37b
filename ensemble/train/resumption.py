"""The state with which a member starts: its checkpoint's, another member's, or that of its first weights."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from ensemble.comm.exchange_plan import ExchangePlan
from ensemble.train.call import Observation
from ensemble.train.callbacks import EARLY_STOPPING
from ensemble.train.checkpoint import Position, Selection, check_fit
from ensemble.train.gather import find_first, gather_json
from ensemble.train.job import TrainingError
from ensemble.train.loose_tensors import find_loose, set_loose
from ensemble.train.own_tensors import call_model
from ensemble.train.same_model import Answers
from ensemble.train.seeding import seeded
from ensemble.train.state import TrainState

_STOP_EARLY = EARLY_STOPPING.replace(":", ".")


class Resumption:
    """Gives a member on one rank the state with which it starts."""

    def __init__(self, state: TrainState, answers: Answers) -> None:
        self._state, self._answers = state, answers
        self._identity, self._comm, self._data = state.identity, state.comm, state.data
        self._reporter, self._checkpointer = state.reporter, state.checkpointer

    def resume(self) -> None:
        """Start from the member's checkpoint, if it has one, else from the beginning."""
        state, optimization, checkpointer = self._state, self._state.optimization, self._checkpointer
        saved = checkpointer.load(lambda file, error: self._reporter.event("damaged", file=file, error=error))
        inherited = checkpointer.load_inherited() if saved is None else None
        if inherited is not None:
            saved = self._check_inherited(inherited)
        # Before the first collective whose order depends on it.
        position = None if saved is None else [saved["position"][name] for name in ("epoch", "step")]
        if any(peer != position for peer in gather_json(self._comm, position)):
            raise RuntimeError(
                f"the workers of {self._identity.member} do not see the same checkpoint: the run directory "
                f"{state.job.run_dir} must be shared by all nodes"
            )
        initial, weights = checkpointer.load_initial_weights() if saved is None else None, None
        if initial is not None:
            lineage = self._identity.lineage or {}
            source = lineage["from"]
            weights = dict(initial["model"])
            check_fit(optimization.model, initial, source)
            at = "" if lineage["epoch"] is None else f" at epoch {lineage['epoch']}, step {lineage['step']}"
            self._reporter.log(f"starts with the weights of {source}{at}")
            self._take_drawn(initial.get("loose", {}))
        steps = None if inherited is None else inherited["position"]["epoch"] * state.steps_per_epoch
        optimization.start(saved, state.job.exchange_plan, weights, inherited_steps=steps)
        if saved is not None:
            state.own.load(saved.get("own", {}), checkpointer.check_code)
        if optimization.plan != ExchangePlan():
            compressions = sorted(optimization.bucket_compressions.items())
            self._reporter.event("plan", **asdict(optimization.plan), auto=compressions)
        if saved is not None:
            if inherited is None:
                set_loose(optimization.model, saved.get("loose", {}))
            else:
                self._take_drawn(saved.get("loose", {}))
            state.seen = Observation.from_checkpoint(saved)
            if inherited is None and (
                why := find_first(self._comm, self._answers.explain_other(saved.get("answers")))
            ):
                raise TrainingError(f"{self._identity.member} cannot go on from its checkpoint: {why}")
            self._continue(saved)
        if inherited is not None:
            self._state.saved_at = None
            state.at = replace(
                state.at, last_epoch_event=None, stop_asked=None, stop_reason=None, handed_over=None
            )
            state.selection = Selection()  # what its part of the training has made best counts
            state.optimization.kept.drop_best()
        elif saved is not None:
            self._data.first_epoch = saved["first_epoch"]

    def _take_drawn(self, loose: dict[str, Any]) -> None:
        """Take the loose tensors of another member that are drawn at random, to which its weights belong.

        Those that follow from hyperparameters are this member's own.
        """
        recipe, state = self._state.recipe, self._state
        if not loose or recipe.model is None:
            return
        with seeded(self._identity.seed + 1, state.device):
            others = find_loose(call_model(recipe, state.ensemble.as_declared(self._identity.params)))
        own = find_loose(state.optimization.model)
        drawn = [
            name for name in own.keys() & others.keys() if not torch.equal(own[name].cpu(), others[name].cpu())
        ]
        set_loose(state.optimization.model, {name: loose[name] for name in drawn if name in loose})

    def _check_inherited(self, inherited: dict[str, Any]) -> dict[str, Any]:
        """The state of another member that this one goes on from, where it can."""
        source = (self._identity.lineage or {})["from"]
        check_fit(self._state.optimization.model, inherited, source)
        if own := inherited.get("own"):
            raise TrainingError(
                f"{self._identity.member} cannot go on from {source} with hyperparameters of its own: what the "
                f"train function keeps by member.state() may hold those of {source}: {', '.join(own)}"
            )
        self._reporter.log(f"goes on from {source} after {inherited['position']['epoch']} epochs")
        own_states = [pair for pair in inherited["callbacks"] if pair[0] != _STOP_EARLY]
        return {**inherited, "callbacks": own_states}  # early stopping counts this member's own epochs

    def _continue(self, saved: dict[str, Any]) -> None:
        """Take the position and what is known from a checkpoint."""
        state = self._state
        at = state.at = Position(**saved["position"])
        state.selection = Selection(**at.selection)
        state.saved_at = (at.epoch, at.step)
        if "optimizer" not in saved and not state.is_over:
            raise TrainingError(
                f"{self._identity.member} cannot be trained further: the state of its optimizer was not kept"
            )
        if at.handed_over is not None and not state.is_over:  # it was given more epochs
            at.handed_over, state.selection = None, Selection()
            state.optimization.kept.drop_best()

    def reload(self) -> None:
        """Give the model and all else the states of the checkpoint once more, by which the position is."""
        saved = self._checkpointer.load(lambda file, error: None)
        if saved is None:
            raise TrainingError("the checkpoint from which the member has resumed is missing")
        self._state.optimization.load(saved)
        set_loose(self._state.optimization.model, saved.get("loose", {}))
        self._state.own.load(saved.get("own", {}), self._checkpointer.check_code)
