"""The artifact of a run: a folder that predicts with torch alone, and what reads one.

Importing this loads neither torch nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.providers import find_attribute

if TYPE_CHECKING:
    from ensemble.artifact.exporter import export as export
    from ensemble.artifact.layout import ArtifactError as ArtifactError
    from ensemble.artifact.layout import is_artifact as is_artifact
    from ensemble.artifact.layout import read_record as read_record
    from ensemble.artifact.predictor import predict as predict

_HOMES = {
    "ArtifactError": "ensemble.artifact.layout",
    "export": "ensemble.artifact.exporter",
    "is_artifact": "ensemble.artifact.layout",
    "predict": "ensemble.artifact.predictor",
    "read_record": "ensemble.artifact.layout",
}


def __getattr__(name: str) -> Any:
    return find_attribute(__name__, _HOMES, name)
