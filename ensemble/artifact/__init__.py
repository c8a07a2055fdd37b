"""The artifact of a run: a folder that predicts with torch alone, and what reads one.

Importing this loads neither torch nor pyarrow.
"""

from __future__ import annotations

from ensemble.artifact.exporter import export
from ensemble.artifact.layout import ArtifactError, is_artifact, read_record
from ensemble.artifact.predictor import predict

__all__ = ["ArtifactError", "export", "is_artifact", "predict", "read_record"]
