"""Tables from a name to what it stands for: sources, executors, loggers and all else that plugs in by name.

A **provider** is written `module:object` and imported when its name is first used. Another distribution adds one
by an entry point of the group `ray_ensemble.KIND`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.errors import PipelineError, unknown_name

_loaded: set[str] = set()


def loaded_distributions() -> dict[str, str]:
    """The other distributions of which this process has loaded a provider: name -> version."""
    return dict(sorted(distribution.rsplit(" ", 1) for distribution in _loaded))


@dataclass(frozen=True)
class Provider:
    """A name of a table and what it stands for.

    Attributes:
        kind: of the table: `sources`, `executors` and so on.
        name: what users write.
        value: where the object is, `module:object`.
        distribution: that provides it, `name version`; empty for ours.
    """

    kind: str
    name: str
    value: str
    distribution: str = ""

    def load(self) -> Any:
        """Import the object.

        Raises:
            PipelineError: it cannot be imported; the message names the distribution.
        """
        try:
            value = import_object(self.value)
        except Exception as error:  # whatever the code of a stranger raises
            origin = f" of {self.distribution}" if self.distribution else ""
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise PipelineError(
                f"{self.kind} has {self.name!r}{origin}, but {self.value} cannot be imported: {reason}"
            ) from error
        if self.distribution:
            _loaded.add(self.distribution)
        return value


class Providers:
    """A table of providers of one kind: ours, and those of other distributions.

    Args:
        kind: a plural noun; entry points of the group `ray_ensemble.KIND` are of this table.
        built_in: name -> `module:object` of ours. A foreign provider cannot take one of these names.

    Examples:
        >>> codecs = Providers("doctest_codecs", {"zip": "zipfile:ZipFile"})
        >>> codecs.load("zip").__name__
        'ZipFile'
    """

    def __init__(self, kind: str, built_in: Mapping[str, str]) -> None:
        self.kind = kind
        self._built_in = {name: Provider(kind, name, value) for name, value in built_in.items()}

    def names(self) -> list[str]:
        """All names: ours, then those of other distributions."""
        return [provider.name for provider in self.list_providers()]

    def find(self, name: str) -> Provider | None:
        """The provider of a name; None if there is none. Distributions are read for names that are not ours."""
        return self._built_in.get(name) or self._foreign[0].get(name)

    def load(self, name: str, what: str = "") -> Any:
        """Import the object of a name.

        Args:
            what: the beginning of the message for an unknown name, such as "there is no executor".

        Raises:
            PipelineError: the name is unknown (the message lists the valid ones), or cannot be imported.
        """
        provider = self.find(name)
        if provider is None:
            raise PipelineError(unknown_name(what or f"{self.kind} has no", name, self.names()))
        return provider.load()

    def load_attribute(self, module: str, name: str) -> Any:
        """Import the object of a name for `__getattr__` of a module.

        Raises:
            AttributeError: there is none; the message lists the valid names.
        """
        if self.find(name) is None:
            raise AttributeError(unknown_name(f"module {module!r} has no attribute", name, self.names()))
        return self.load(name)

    def list_providers(self) -> list[Provider]:
        """All providers: ours, then those of other distributions."""
        return [*self._built_in.values(), *self._foreign[0].values()]

    def find_conflicts(self) -> list[str]:
        """One line for each name of another distribution that is not used, because it is taken."""
        return self._foreign[1]

    @functools.cached_property
    def _foreign(self) -> tuple[dict[str, Provider], list[str]]:
        """The providers of other distributions by name, and the conflicts."""
        import importlib.metadata  # 11 ms, which most processes need not spend

        rivals: dict[str, list[Provider]] = {}
        for point in importlib.metadata.entry_points(group=f"ray_ensemble.{self.kind}"):
            origin = f"{point.dist.name} {point.dist.version}" if point.dist else "an unnamed distribution"
            rivals.setdefault(point.name, []).append(Provider(self.kind, point.name, point.value, origin))
        foreign, conflicts = {}, []
        for name, providers in rivals.items():
            owners = " and ".join(sorted({provider.distribution for provider in providers}))
            if name in self._built_in:
                conflicts.append(
                    f"{self.kind} {name!r} of {owners} is not used: the name is one of ray-ensemble's"
                )
            elif len(providers) > 1:
                conflicts.append(f"{self.kind} {name!r} is not used: {owners} provide it; uninstall one")
            else:
                foreign[name] = providers[0]
        return foreign, conflicts


def import_object(place: str) -> Any:
    """The object at `module:object`, or `module:Class.method`; extras in brackets are left out."""
    module, _, names = place.partition("[")[0].strip().partition(":")
    return functools.reduce(getattr, names.split("."), importlib.import_module(module))


def find_attribute(package: str, homes: Mapping[str, str], name: str) -> Any:
    """For the `__getattr__` of a package whose names are imported when they are first used.

    Args:
        package: its name.
        homes: name -> the module that has it.

    Raises:
        AttributeError: the package has no such name.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r} (it has: {', '.join(sorted(homes))})")
    return getattr(importlib.import_module(homes[name]), name)
