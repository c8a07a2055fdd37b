"""Members of a run whose node agents break: an agent meets this model, too, as it loads the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Model:
    """A model for a recipe; where it is unpickled, what a node's agent does each second fails once, on request."""

    def __call__(self, params: dict[str, Any]) -> Any:
        from execute_members import faulty_model

        return faulty_model(params)

    def __reduce__(self) -> Any:
        return restore, ()


def restore() -> Model:
    from ensemble.executors.node_services import NodeServices

    sample = NodeServices.sample

    def sample_or_break(services: NodeServices) -> None:
        breaks = Path(os.environ["BREAKS_AGENTS"])
        if breaks.exists():
            breaks.unlink()
            raise OSError("no power to be had")
        sample(services)

    if sample.__name__ != "sample_or_break":
        NodeServices.sample = sample_or_break  # type: ignore[method-assign]
    return Model()
