"""Finds members that have trained to equal weights, though they were declared to differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ensemble.spec import Identity
from ensemble.spec.identity import select_warm

_NONE = hashlib.sha256().hexdigest()  # of a model without weights
_SEEDED = "remove torch.manual_seed or seed_everything from your code (each member has its own seed already)"


class EqualWeights:
    """The first member that had some weights."""

    def __init__(self) -> None:
        self._first: dict[str, Identity] = {}
        self._told: set[str] = set()

    def explain(self, identity: Identity, event: Mapping[str, Any]) -> str | None:
        """Say, once a member, that its weights after some training are those of another one; else None.

        Members that start with weights of others are not compared.
        """
        digest, position = event.get("weights_sha256"), (event.get("epoch") or 0, event.get("step") or 0)
        if digest in (None, _NONE) or position == (0, 0) or select_warm(identity.lineage):
            return None
        first = self._first.setdefault(str(digest), identity)
        options = sorted(
            name
            for name in {*identity.params, *first.params}
            if identity.params.get(name) != first.params.get(name)
        )
        if identity.member in {first.member, *self._told} or (identity.seed == first.seed and not options):
            return None
        self._told.add(identity.member)
        causes = [f"seed differs: {_SEEDED}"] if identity.seed != first.seed else []
        causes += [f"params differ: does your code read {', '.join(options)}?"] if options else []
        return f"its weights equal those of {first.member}, whose {'; and whose '.join(causes)}"
