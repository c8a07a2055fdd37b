"""Predicts a split with the weights that count for a member, and checks that the rows are what the task says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ensemble.spec.split_metrics import list_asked
from ensemble.store import PredictedRows, UnlikeRows
from ensemble.store.member import UNCOMBINED
from ensemble.train.call import Observation, find_target, take_fields
from ensemble.train.data import as_stored_target
from ensemble.train.evaluator import Evaluator
from ensemble.train.gather import find_first
from ensemble.train.outputs import OutputError, compute_outputs, compute_values, explain_shape_mismatch, observe
from ensemble.train.state import TrainState

if TYPE_CHECKING:
    from pipelines import Batch

#: `predict(model, batch) -> values`, laid out by the task (`ensemble.spec.task`).
Predict = Callable[[nn.Module, "Batch"], Tensor]


def predict(evaluator: Evaluator, state: TrainState, split: str, function: Predict) -> None:
    """Save the member's predictions for a split; where there are none, log why.

    Args:
        function: what predicts.
    """
    with contextlib.closing(evaluator.make_rows()) as rows:
        fields = [] if state.is_own_loop else list_asked(state.recipe.split_metrics)
        rows.fields = {name: [] for name in fields}
        was_known = state.seen is not None
        why = find_first(state.comm, _predict_rows(evaluator, state, split, function, rows))
        state.agree()
        if state.seen is not None and not was_known:
            state.saved_at = None  # whoever loads the checkpoint needs it
        if why is None:
            evaluator.save_rows(split, None, rows)
            return
        line = f"no predictions on {split!r} are saved: {why}"
        is_known = split != "valid" or any(text.startswith(UNCOMBINED) for text in state.remarked)
        state.reporter.log(line) if is_known else state.remark(f"{UNCOMBINED}: {line}")


def _predict_rows(
    evaluator: Evaluator, state: TrainState, split: str, function: Predict, rows: PredictedRows
) -> str | None:
    """Add the predictions of this rank; returns why there are none."""
    task, why = state.recipe.find_task(), None
    try:
        with evaluator.evaluating() as model:
            for batch in evaluator.batches(split):
                with state.precision.autocast():
                    values = function(model, batch)
                target = as_stored_target(task, find_target(batch, state.target))
                why = explain_shape_mismatch(task, values, target)
                if why is None and not len(rows):
                    why = evaluator.bound(rows, task, values) or None
                if why is not None:
                    break
                rows.add_fields(take_fields(batch, [name for name in rows.fields if name in batch]))
                rows.add(values.float().cpu(), batch["index"].cpu(), None if target is None else target.cpu())
                if (why := evaluator.explain_excess(rows)) is not None:
                    break
    except (OutputError, UnlikeRows) as error:
        why = str(error)
    return why


def predict_batch(state: TrainState, model: nn.Module, batch: Batch) -> Tensor:
    """Predict a batch, [b, ...], as a loaded model does; the first batch shows how the outputs are laid out.

    Raises:
        OutputError: the outputs are not what the task needs, or nothing says how the model is called.
    """
    recipe = state.recipe
    if recipe.predict is None and state.seen is None:
        outputs = compute_outputs(recipe, model, batch, Observation(call=state.call))
        state.seen = observe(recipe, model, batch, outputs, state.call)
    return compute_values(recipe, model, batch, state.seen)
