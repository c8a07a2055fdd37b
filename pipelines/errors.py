"""Errors of pipelines: `PipelineError`, `SampleError` for an error of one sample; messages on unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any


def as_utf8(text: str) -> str:
    """The text as it can be printed and written: names of files that are no UTF-8 have escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


class PipelineError(Exception):
    """A pipeline cannot be made or used as requested; the message is one line for the user."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(as_utf8(arg) if isinstance(arg, str) else arg for arg in args))


class FieldError(KeyError, PipelineError):
    """A batch has no such field."""

    def __str__(self) -> str:
        return str(self.args[0])


class ForeignRandomness(PipelineError):
    """A source or stage draws random numbers that do not depend on pipeline, epoch and index alone."""


class SampleError(PipelineError):
    """One sample cannot be read or prepared.

    Attributes:
        index: the sample's index in its source.
        where: the file, and the row or archive member, that has the sample.
        reason: what is wrong with it.
    """

    def __init__(self, index: int, where: str, reason: str) -> None:
        super().__init__(f"sample {index} ({where}): {reason}")
        self.index = index
        self.where = as_utf8(where)
        self.reason = as_utf8(reason)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own pickling would call the class with the finished message as its only argument.
        return type(self), (self.index, self.where, self.reason)


class BadRecords(SampleError):
    """Several records of a set cannot be read or prepared.

    Args:
        errors: of the first of them, which are named.
        count: of all.
    """

    def __init__(self, errors: Sequence[SampleError], count: int) -> None:
        first = errors[0]
        super().__init__(first.index, first.where, first.reason)
        self._made_of = list(errors), count
        more = f"; and {count - len(errors):,} more" if count > len(errors) else ""
        self.args = (f"{count:,} records: {'; '.join(map(str, errors))}{more}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of


class DataOutOfReach(PipelineError):
    """A record was out of reach for longer than it is read again; no `SampleError`, as nothing is wrong with it.

    Such a record is never left out: whoever reads it later, in another attempt for instance, gets it.
    """


class TooManySkipped(PipelineError):
    """More records of an epoch cannot be prepared than `Pipeline(max_skipped=)` lets be left out."""

    @classmethod
    def of(cls, skipped: int, limit: int, n: int, named: Sequence[str]) -> TooManySkipped:
        """The error, which names records.

        Args:
            skipped: records of the epoch that were left out so far.
            limit: as many may be.
            n: samples of the epoch.
            named: records among them, as `Source.where` names them.
        """
        which = "; ".join(named[:MOST_NAMES])
        return cls(
            f"{skipped} of the {n} records of an epoch cannot be prepared; at most {limit} may be left out, "
            "because the epoch would be biased. Repair them, or allow more with Pipeline(max_skipped=)"
            + (f". Among them: {which}" if which else "")
        )


class SamplesDiffer(PipelineError):
    """What a reader was served is not what its own pipeline prepares, and it has read some of it already.

    Attributes:
        finding: `pipelines.verification.reader.Finding`.
    """

    def __init__(self, message: str, finding: Any = None) -> None:
        super().__init__(message)
        self.finding = finding


SYNONYMS = {
    "gpu": "cuda", "gpus": "cuda", "bayes": "tpe", "bayesian": "tpe", "bo": "tpe", "tree": "tpe",
    "hyperopt": "tpe", "gaussian_process": "gp", "cma": "cmaes", "cma-es": "cmaes", "evolution": "cmaes",
    "genetic": "nsga2", "halving": "asha", "sha": "asha", "successive_halving": "asha", "patient": "patience",
    "early_stopping": "patience", "float16": "fp16", "half": "fp16", "amp": "fp16", "16": "fp16",
    "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "32": "fp32", "full": "fp32", "mean": "average",
    "avg": "average", "uniform": "average", "vote": "average", "soup": "greedy", "weights": "weighted",
    "stacking": "stack", "mixed": "fp16", "ram": "memory", "file": "disk", "minimize": "min", "minimise": "min",
    "maximize": "max", "maximise": "max", "learning_rate": "lr", "learningrate": "lr", "n_trials": "trials",
    "num_epochs": "epochs", "max_epochs": "epochs", "n_epochs": "epochs", "metric": "objective",
    "direction": "mode", "num_workers": "prep_workers", "callback": "callbacks", "logger": "loggers",
    "val": "valid", "validation": "valid", "train_data": "train", "start": "run", "train": "run",
    "launch": "run", "ls": "list", "kill": "cancel", "continue": "resume", "show": "status",
    "dash": "dashboard", "ui": "dashboard",
}  # fmt: skip
"""What others call it: looked up before a spelling, among the valid names only."""

MOST_RECORDS = 10
"""Bad records that an error names."""

MOST_NAMES = 12
"""Valid names that an error lists; of more, the nearest and where all of them are found."""


def unknown_name(what: str, name: str, valid: Sequence[str], listed: str = "") -> str:
    """One line about an unknown name: the closest valid name and all valid names, or, of many, the closest three.

    Args:
        what: what precedes the name in the message, such as "Ensemble has no option".
        listed: where all valid names are found, such as "help(ensemble.Ensemble)".
    """
    is_long = len(valid) > MOST_NAMES
    of_lower = {word.lower(): word for word in valid}
    meant = SYNONYMS.get(name.lower())
    close = difflib.get_close_matches(name.lower(), of_lower, n=3 if is_long else 1)
    close = [meant] if meant in of_lower else close
    hint = f"; did you mean {' or '.join(repr(of_lower[word]) for word in close)}?" if close else ""
    if is_long and listed:
        return f"{what} {name!r}{hint} ({listed} lists all {len(valid)})"
    more = f" and {len(valid) - MOST_NAMES} more" if is_long else ""
    return f"{what} {name!r}{hint} (valid: {', '.join(valid[:MOST_NAMES])}{more})"
