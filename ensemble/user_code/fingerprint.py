"""Fingerprints the user's code that a run trains with, so that another process or a later day can compare it.

From the functions of a declaration on (recipe or train function, pipelines' stages), all code that they use is
described (`pipelines.fingerprint.describer`). Each function, class and global is a *part* with name and digest, so
that a difference can be named. How a user's module is called is no part of its code.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ensemble.user_code.imports import digest_syntax, find_late_imports
from pipelines.description import PipelineDescription
from pipelines.environment.library_settings import find_settings
from pipelines.fingerprint import SCHEME, digest, is_ours
from pipelines.fingerprint.describer import Describer
from pipelines.fingerprint.modules import is_foreign_class
from pipelines.fingerprint.values import find_torch
from pipelines.sources._base import Source

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

#: The minor version of this Python: instructions of another one cannot be compared, nor run.
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
#: Version of the descriptions that are digested; it changes with those that pipelines compare, too.
_SCHEME = 10 * SCHEME + 1
#: Fields of a Recipe that rank members and do not affect training.
_RANKING = ("objective", "mode")
#: Fields of a Recipe that say what a trained member predicts.
_PREDICTING = ("predict", "task")

#: Modules of Python, and numpy, whose objects are data: others stand for a process, a file or a module's name.
# fmt: off
_OF_DATA = (
    "argparse", "array", "builtins", "collections", "datetime", "decimal", "fractions", "functools", "ipaddress",
    "numpy", "operator", "re", "statistics", "string", "types", "uuid", "zoneinfo",
)
# fmt: on


@dataclass(frozen=True)
class Code:
    """The fingerprint of a declaration's code.

    Attributes:
        python: the minor version that compiled it, such as "3.12".
        parts: key -> digest; the key of a user's function, class or global lacks the name of its module.
        sources: name of a user's module -> the file that it was read from, for those that have one.
        scheme: version of the descriptions that are digested.
        names: key of a part -> its name in messages, such as "spec.loss", where that is another one.
        predicts: digest of what says what a trained member predicts, and of all that it uses; None: not known.
    """

    python: str
    parts: Mapping[str, str]
    sources: Mapping[str, Path] = dataclasses.field(default_factory=dict, compare=False)
    scheme: int = _SCHEME
    names: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    predicts: str | None = dataclasses.field(default=None, compare=False)

    @property
    def fingerprint(self) -> str:
        """A digest of all parts."""
        return _digest([self.scheme, self.python, dict(self.parts)])

    def changed(self, since: Code) -> list[str]:
        """Names of the parts that differ, are new, or are missing compared with an earlier code, in order of use.

        Empty if the schemes differ: nothing can be compared then.
        """
        if self.scheme != since.scheme:
            return []
        changed = [self.names.get(key, key) for key, part in self.parts.items() if since.parts.get(key) != part]
        gone = [since.names.get(key, key) for key in since.parts if key not in self.parts]
        return list(dict.fromkeys([*changed, *gone]))


def code_of(ensemble: Ensemble) -> Code:
    """The code that the members of an ensemble train with."""
    members = _describe_ensemble(ensemble, ())
    if members.written:
        members = _describe_ensemble(ensemble, members.written)
    predicting = _MembersCode(written=members.written)
    _describe_recipe(predicting, ensemble.recipe, _PREDICTING)
    parts = {key: _digest(part) for key, part in members.parts.items()}
    sources = dict(members.files)
    for name, path in find_late_imports(members.late).items():
        parts[f"module {name}"] = digest_syntax(path)
        sources.setdefault(name, path)
    parts |= {f"{name}: {value}": _digest(value) for name, value in find_settings(only_of_user=True).items()}
    predicts = _digest({key: _digest(part) for key, part in predicting.parts.items()})
    return Code(PYTHON, parts, dict(sorted(sources.items())), names=members.names, predicts=predicts)


def fingerprint_function(function: Callable[..., Any]) -> str:
    """A digest of the user's function and of the code that it uses, which is no part of the code of members."""
    nothing = dict.fromkeys(("train", "valid", "test"))
    return code_of(cast("Ensemble", SimpleNamespace(recipe=partial(function), **nothing))).fingerprint


def _describe_ensemble(ensemble: Ensemble, written: Collection[str]) -> _MembersCode:
    members = _MembersCode(written=written)
    _describe_recipe(members, ensemble.recipe)
    for split in ("train", "valid", "test"):
        pipeline = getattr(ensemble, split)
        if callable(pipeline):
            members.add_root(split, pipeline)
        for number, stage in enumerate(getattr(pipeline, "stages", ())):
            members.add_root(f"{split} stage {number}", stage.call)
    declared = (ensemble, *(getattr(ensemble, "members", None) or ()))
    callbacks = itertools.chain(*(getattr(one, "callbacks", None) or () for one in declared))
    determining = [callback for callback in callbacks if callback.identity() is not None]  # others only observe
    for number, callback in enumerate(determining):
        members.add_root(f"callback {number}", callback)
    return members


def _describe_recipe(members: _MembersCode, recipe: Any, only: Collection[str] = ()) -> None:
    if dataclasses.is_dataclass(recipe):
        for field in dataclasses.fields(recipe):
            is_described = field.name in only if only else field.name not in _RANKING
            value = getattr(recipe, "known_task" if field.name == "task" else field.name, None)
            if is_described and value not in (None, ()):
                members.add_root(f"Recipe.{field.name}", value)
    elif not only:
        members.add_root("recipe", recipe)


def _digest(description: Any) -> str:
    return digest(description)[:16]


class _MembersCode(Describer):
    """Describes the code of members. What cannot be described is left out.

    What a run changes is no change of code: globals that the code writes, the state of other packages' objects.
    """

    is_of_members = True

    def add_root(self, name: str, value: Any) -> None:
        """Describe a function of the declaration, and what it uses."""
        self.parts[name] = None  # its place: before what it uses
        self.parts[name] = self.describe(value)

    def _describe_object(self, value: Any) -> Any:
        # Of a pipeline and a source that a function reads, as of those that are declared: the stages are code, the
        # data are compared by themselves. What both keep of their use, and ids, are another in each process.
        if isinstance(value, PipelineDescription):
            return ["pipeline", *(self.walk(stage.call) for stage in value.stages)]
        if isinstance(value, Source):
            return ["source", self.walk(type(value))]
        kind, torch = type(value), find_torch()
        is_module = torch is not None and isinstance(value, torch.nn.Module)
        is_plain = kind.__module__.partition(".")[0] in _OF_DATA or isinstance(value, enum.Enum)
        if is_plain or is_module or is_ours(kind) or dataclasses.is_dataclass(value) or not is_foreign_class(kind):
            return super()._describe_object(value)
        return ["object", self.walk(kind)]
