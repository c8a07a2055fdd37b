"""Keeps a run on disk: its directory, its event log, which is authoritative, and what is derived from the log.

Importing this loads neither torch nor Optuna.
"""

from ensemble.store.checkpoint import load_checkpoint, rehearse_checkpoint, save_checkpoint, weights_sha256
from ensemble.store.errors import DamagedError, OtherPythonError, StoreError, UnlikeRows, WriteError
from ensemble.store.event_handlers import apply_event
from ensemble.store.event_log import EventLog, is_locked
from ensemble.store.files import format_command
from ensemble.store.folding import fold, read_state
from ensemble.store.initial_weights import (
    keep_checkpoint,
    keep_weights,
    load_initial_state,
    read_weights,
)
from ensemble.store.kept_code import load_code, pickle_by_value
from ensemble.store.log_lines import end_of_events, read_events, read_events_from
from ensemble.store.member import MemberState, NodeState, Span
from ensemble.store.member_files import has_predictions, read_checkpoint, read_predictions
from ensemble.store.predicted_rows import PredictedRows, save_predictions
from ensemble.store.predictions import Predictions, load_predictions
from ensemble.store.requests import receive_requests, withdraw_request, write_request
from ensemble.store.rundir import RunDir
from ensemble.store.snapshot import RunStatus
from ensemble.store.state import RunState
from ensemble.store.trust import trust_folder, trust_group
from ensemble.store.versions import revision, versions

__all__ = [
    "DamagedError",
    "EventLog",
    "MemberState",
    "NodeState",
    "OtherPythonError",
    "PredictedRows",
    "Predictions",
    "RunDir",
    "RunState",
    "Span",
    "RunStatus",
    "StoreError",
    "UnlikeRows",
    "WriteError",
    "apply_event",
    "end_of_events",
    "fold",
    "has_predictions",
    "format_command",
    "is_locked",
    "keep_checkpoint",
    "keep_weights",
    "load_code",
    "load_initial_state",
    "read_weights",
    "load_checkpoint",
    "load_predictions",
    "pickle_by_value",
    "read_checkpoint",
    "read_events",
    "read_state",
    "read_events_from",
    "read_predictions",
    "rehearse_checkpoint",
    "revision",
    "save_checkpoint",
    "save_predictions",
    "receive_requests",
    "trust_folder",
    "trust_group",
    "versions",
    "weights_sha256",
    "withdraw_request",
    "write_request",
]
