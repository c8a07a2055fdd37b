"""What a loop that is not ours, such as a framework's, needs of its member beside what `TrainContext` has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ensemble.spec import Identity
from ensemble.store import RunDir
from ensemble.store.files import make_directory
from ensemble.train.call import Call
from ensemble.train.evaluator import Evaluator
from ensemble.train.job import TrainingError
from ensemble.train.lifecycle import Lifecycle
from ensemble.train.state import TrainState
from pipelines.providers import import_object

if TYPE_CHECKING:
    from pipelines.loader.collate import Collate

#: Loaded where a member reads `dataloader`.
FOREIGN_LOOP = "ensemble.train.foreign_loop:ForeignLoop"


class FrameworkMember:
    """The base of `TrainContext` with what loops of frameworks call."""

    identity: Identity
    _state: TrainState
    _life: Lifecycle
    _evaluator: Evaluator
    _foreign: Any = None  # its passes, where it reads `dataloader`

    @property
    def has_other_weights(self) -> bool:
        """Whether other weights than those in training may be evaluated: `averaging=`, or those of a callback."""
        return self._state.callbacks.may_have_weights

    def state(self, name: str, value: Any) -> None:
        """Let checkpoints hold the state of another object: a scheduler, averaged weights, a framework's trainer.

        Where the member resumes, the object gets its state: here, or in `prepare` if that is called later. What in
        it refers to the member's own optimizer, modules or parameters refers to those again.

        Args:
            name: under which it is saved; the same in each attempt.
            value: has `state_dict()` and `load_state_dict(state)`.

        Raises:
            TrainingError: the name is taken, the object has no state, or the checkpoint has none of it.
        """
        self._state.own.add(name, value)

    def dataloader(
        self,
        split: str = "train",
        *,
        fields: Sequence[str] | Mapping[str, str] | None = None,
        collate: Collate | None = None,
        counts_from_0: bool = True,
    ) -> Any:
        """This rank's batches of a split, for a loop that calls backward and its optimizer itself.

        Each pass over "train" is an epoch: `for epoch in range(epochs): for batch in loader:` stays as it is, and
        `member.step()` is not called. What is reported until the next pass is of this epoch; checkpoints and
        commands are between epochs. After a resume, passes that were trained before are empty, other splits have
        one batch in them, and all that `prepare` and `state` were given has its state again when the first pass
        begins that is not.

        Args:
            split: "train", for which `prepare` comes before the first pass; or one of `splits`.
            fields: names of fields: a batch is a tuple of them. A dict, names -> fields: a dict of those. None: it
                is the batch. Tensors stay valid.
            collate: see `batches`.
            counts_from_0: of "train": False for a loop that begins at the epoch of the checkpoint by itself.
        """
        if self._foreign is None:
            self._foreign = import_object(FOREIGN_LOOP)(self._state, self._life)
        if split == "train":
            self._foreign.counts_from_0 = counts_from_0
        self._state.collate = collate or self._state.collate
        return self._foreign.make_loader(self._evaluator, split, fields)

    def end_epoch(self) -> None:
        """End the epoch of `dataloader("train")` here, not where the next pass begins: report and save it, and
        execute the pruner's decision. A framework's hook calls it."""
        if self._foreign is not None:
            self._foreign.end_epoch()

    @property
    def target(self) -> str:
        """The field of what is predicted."""
        return self._state.target

    def predict_by(self, call: Call) -> None:
        """Let predictions follow from what the model returns when it is called so; before `prepare`."""
        self._state.call = call

    def evaluate_later(self) -> None:
        """Let epochs before the first report be unranked: a framework's loop evaluates in some epochs only, and
        its adapter at the end if in none (`report_end`)."""
        self._state.reports_later = True

    def report_end(self, metrics: Mapping[str, float]) -> None:
        """Report the metrics of the weights that are kept, of a member that trains no more."""
        self._life.report_end(metrics)

    def use_weights(
        self, weights: nn.Module | Mapping[str, Tensor] | None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Let weights of the function's own count, such as those that a framework kept as its best.

        It comes after the end of `epochs()`, before predictions are made; all ranks call it. They are what is
        saved, combined and loaded, whatever `keep=` and `averaging=` say, also after a resume.

        Args:
            weights: the state_dict of the model that was prepared, or a module that has such a one, as that of
                averaged weights (`averaged.module`). Those of rank 0 count; other ranks may give None.
            metrics: of these weights, the objective among them, which ranks the member; without them, those that
                were reported last count.

        Raises:
            TrainingError: the member is still in training, or the weights are not of its model.
        """
        if self._is_idle and isinstance(weights, Mapping):
            raise TrainingError(
                "member.use_weights() needs the module itself here, such as averaged.module: the weights that it "
                "had before the resume, or before the member ended, are loaded first"
            )
        self._end_loop()
        self._life.use_weights(weights.state_dict() if isinstance(weights, nn.Module) else weights, metrics)

    def _end_loop(self) -> None:
        """End the epoch in progress of a loop that the train function has left."""
        if self._foreign is not None:
            self._foreign.end()
        self._life.end_left_epoch()

    @property
    def _is_idle(self) -> bool:
        """Whether a loop over `dataloader` makes a pass that was trained before."""
        return self._foreign is not None and bool(self._foreign.is_idle)

    def remark(self, text: str) -> None:
        """Let the run's status and page show a sentence about the member (rank 0 does), once."""
        self._state.remark(text)

    def describe_sample(self, split: str, index: int) -> str:
        """A sample by its number in a split, and where its record lies: the file, and the row."""
        return self._state.data.describe_sample(split, index)

    @property
    def folder(self) -> Path:
        """For files of its own, such as a model of scikit-learn: they are kept with the run, and get digests when
        the member finishes; `Result.file` finds them. What an earlier attempt has left is still there.
        """
        folder = RunDir(self._state.job.run_dir).files(self.identity.member)
        make_directory(folder)
        return folder

    @property
    def directory(self) -> Path:
        """Of the member's files, in the run directory; it is kept with the run."""
        return RunDir(self._state.job.run_dir).member(self.identity.member)
