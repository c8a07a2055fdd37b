"""Fingerprints the user's code that a run trains with, so that another process or a later day can compare it.

From the functions of a declaration (the recipe or the train function, and the pipelines' stages) on, all code that
they use is visited: functions, classes, closures, defaults, the globals that they read, the modules that they
import. Each is a *part* with a name and a digest, so that a difference can be named. How a user's module is called
is no part of its code: parts are told apart, and refer to each other, without it.

- A function is digested as its instructions with their constants: without paths, line numbers, comments,
  docstrings and layout of the source.
- A global that these functions write (a cache, a counter, a value loaded at first use) is state, not code: only
  the fact that it is written is included.
- Installed packages and the standard library are assumed to stay the same: their functions and classes are
  included by name, their objects (except torch modules and arrays) by type. A user's function that one of their
  functions wraps, such as a decorator's result, is visited.
- Global settings of libraries that differ from their defaults, such as torch's default dtype, are parts of it
  (`pipelines.environment.library_settings`).
- ray-ensemble's own code is included by public name, version and bound values (`pipelines.fingerprint`), so that
  it can be reworded and moved.

Instructions depend on the minor version of Python, which `Code.python` records; `Code.scheme` is the version of
the descriptions. Between two Pythons, or two schemes, a change cannot be detected.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.user_code.imports import Imports, syntax_of
from pipelines.description import PipelineDescription
from pipelines.environment.library_settings import find_settings
from pipelines.fingerprint import SCHEME, digest
from pipelines.fingerprint.bytecode import Use
from pipelines.fingerprint.describer import Describer
from pipelines.fingerprint.modules import file_of, is_foreign_class, module_name, name_of
from pipelines.fingerprint.ours import is_ours
from pipelines.fingerprint.values import Place
from pipelines.sources._base import Source

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

#: The minor version of this Python: instructions of another one cannot be compared, nor run.
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
#: Version of the descriptions that are digested; it changes with those that pipelines compare, too.
_SCHEME = 10 * SCHEME + 1
#: Fields of a Recipe that rank members and do not affect training.
_RANKING = frozenset(("objective", "mode"))
#: Fields of a Recipe that say what a trained member predicts.
_PREDICTING = frozenset(("predict", "task"))


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
        now = [self.names.get(key, key) for key, digest in self.parts.items() if since.parts.get(key) != digest]
        before = [since.names.get(key, key) for key in since.parts if key not in self.parts]
        return list(dict.fromkeys([*now, *before]))


def code_of(ensemble: Ensemble) -> Code:
    """The code that the members of an ensemble train with."""
    visitor = _visit_ensemble(ensemble, frozenset())
    if visitor.written:
        visitor = _visit_ensemble(ensemble, frozenset(visitor.written))
    predicting = _visit_recipe(ensemble.recipe, frozenset(visitor.written), _PREDICTING)
    settings = {f"{name}: {value}": _digest(value) for name, value in find_settings().items()}
    sources = dict(sorted(visitor.imports.files.items()))
    parts, predicts = {**visitor.parts, **settings}, _digest(predicting.parts)
    return Code(PYTHON, parts, sources, names=visitor.names, predicts=predicts)


def _visit_recipe(recipe: Any, written: frozenset[str], only: frozenset[str] = frozenset()) -> _MembersCode:
    visitor = _MembersCode(written=written)
    if dataclasses.is_dataclass(recipe):
        for field in dataclasses.fields(recipe):
            is_visited = field.name in only if only else field.name not in _RANKING
            if is_visited and getattr(recipe, field.name) not in (None, ()):
                visitor.add_root(f"Recipe.{field.name}", getattr(recipe, field.name))
    elif not only:
        visitor.add_root("recipe", recipe)
    return visitor


def _visit_ensemble(ensemble: Ensemble, written: frozenset[str]) -> _MembersCode:
    visitor = _visit_recipe(ensemble.recipe, written)
    for split in ("train", "valid", "test", "shifted"):
        pipeline = getattr(ensemble, split)
        if callable(pipeline):
            visitor.add_root(split, pipeline)
        for number, stage in enumerate(getattr(pipeline, "stages", ())):
            visitor.add_root(f"{split} stage {number}", stage.call)
    visitor.finish()
    return visitor


def _digest(description: Any) -> str:
    return digest(description)[:16]


def _number(name: str, taken: Collection[str]) -> str:
    """A name that is not taken: itself, or with a number."""
    numbers = (f" ({number})" if number > 1 else "" for number in itertools.count(1))
    return next(name + number for number in numbers if name + number not in taken)


class _MembersCode(Describer):
    """Describes the code of members: its parts have the names that users know, and digests of their own.

    What a run changes is no change of code: globals that the code writes, the state of other packages' objects.
    What cannot be described is left out. Paths are relative to the module in which they stand.

    Attributes:
        imports: files of the user's modules.
        names: of parts, as in `Code`.
    """

    def __init__(self, *, written: frozenset[str]) -> None:
        super().__init__(written=written)
        self.imports = Imports()
        self.names: dict[str, str] = {}
        self._globals: dict[str, str] = {}  # module.name -> key

    def add_root(self, name: str, value: Any) -> None:
        """Describe a function of the declaration, and what it uses."""
        self._add_part(name, None)  # its place: before what it uses
        self._add_part(name, self.describe(value))

    def finish(self) -> None:
        """Describe the modules that are imported while a function runs, by their files."""
        for name, path in self.imports.late.items():
            self.parts[f"module {name}"] = syntax_of(path)

    def _name_part(self, value: Any) -> str:
        if isinstance(value, types.ModuleType):
            return self._make_key("module", name_of(value))
        file = value.__globals__.get("__file__") if isinstance(value, types.FunctionType) else file_of(value)
        name = f"{module_name(value.__module__, file)}.{value.__qualname__}"
        return self._make_key(value.__qualname__, _number(name, self.names.values()))  # such as a second lambda

    def _make_key(self, what: str, name: str) -> str:
        key = _number(what, self.parts)
        self.names[key] = name
        return key

    def _describe_name(self, at: Place) -> str:
        return "module"

    def _add_part(self, name: str, description: Any) -> None:
        self.parts[name] = _digest(description)

    def _note(self, what: str, why: str, at: Place) -> None:
        """Nothing is unsure here: a difference that shows is named, and no other is looked for."""

    def _keep_file(self, module: str, file: object) -> None:
        self.imports.keep(module, file)

    def _describe_text(self, text: str, at: Place) -> str:
        if at.folder and (text == at.folder or text.startswith(at.folder + "/")):
            return "<folder>" + text[len(at.folder) :]
        return text

    def _describe_items(self, items: Iterable[tuple[Any, Any]], at: Place) -> list[Any]:
        # `functools.update_wrapper` puts the module of what is wrapped among the attributes of what wraps it
        keyed = [(self._describe(key, at), value) for key, value in items if key != "__module__"]
        keyed.sort(key=lambda pair: json.dumps(pair[0]))
        return [[key, self._describe(value, at)] for key, value in keyed]

    def _describe_imports(self, use: Use, package: str, at: Place) -> dict[str, Any]:
        self.imports.late_in(use, package)
        return {}

    def _describe_global(self, value: Any, name: str, at: Place) -> Any:
        """Describe a global; a value becomes a part with the global's name."""
        described = self._describe(value, at)
        if isinstance(value, types.FunctionType | type | types.ModuleType):
            return described
        if name not in self._globals:
            self._globals[name] = self._make_key(name.rpartition(".")[2], name)
        self._add_part(self._globals[name], described)
        return ["part", self._globals[name]]

    def _describe_lacking(self, value: Any, state: Any, at: Place) -> dict[str, Any]:
        """Nothing: the declaration that is kept with a run lacks it, too."""
        return {}

    def _describe_object(self, value: Any, at: Place) -> Any:
        # Of a pipeline and a source that a function reads, as of those that are declared: the stages are code, the
        # data are compared by themselves. What both keep of their use, and ids, are another in each process.
        if isinstance(value, PipelineDescription):
            return ["pipeline", *(self._describe(stage.call, at) for stage in value.stages)]
        if isinstance(value, Source):
            return ["source", self._describe(type(value), at)]
        kind, torch = type(value), sys.modules.get("torch")
        is_module = torch is not None and isinstance(value, torch.nn.Module)
        if is_ours(kind) or dataclasses.is_dataclass(value) or is_module or not is_foreign_class(kind):
            return super()._describe_object(value, at)
        return ["object", self._describe(kind, at)]
