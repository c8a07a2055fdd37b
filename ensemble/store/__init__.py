"""Keeps a run on disk: its directory, its event log, which is authoritative, and what is derived from the log.

Importing this loads neither torch nor Optuna.
"""

from ensemble.store._compat import find_class_by_value as find_class_by_value
from ensemble.store._compat import make_classes_anew as make_classes_anew
from ensemble.store.checkpoint import load_checkpoint as load_checkpoint
from ensemble.store.checkpoint import rehearse_checkpoint as rehearse_checkpoint
from ensemble.store.checkpoint import save_checkpoint as save_checkpoint
from ensemble.store.checkpoint import weights_sha256 as weights_sha256
from ensemble.store.errors import DamagedError as DamagedError
from ensemble.store.errors import OtherPythonError as OtherPythonError
from ensemble.store.errors import StoreError as StoreError
from ensemble.store.errors import UnlikeRows as UnlikeRows
from ensemble.store.errors import WriteError as WriteError
from ensemble.store.event_handlers import apply_event as apply_event
from ensemble.store.event_log import EventLog as EventLog
from ensemble.store.event_log import end_of_events as end_of_events
from ensemble.store.event_log import is_locked as is_locked
from ensemble.store.event_log import read_events as read_events
from ensemble.store.files import format_command as format_command
from ensemble.store.folding import fold as fold
from ensemble.store.folding import read_state as read_state
from ensemble.store.initial_weights import keep_checkpoint as keep_checkpoint
from ensemble.store.initial_weights import keep_weights as keep_weights
from ensemble.store.initial_weights import load_initial_state as load_initial_state
from ensemble.store.initial_weights import read_weights as read_weights
from ensemble.store.kept_code import load_code as load_code
from ensemble.store.kept_code import pickle_by_value as pickle_by_value
from ensemble.store.member import MemberState as MemberState
from ensemble.store.member import NodeState as NodeState
from ensemble.store.member import Span as Span
from ensemble.store.member_files import has_predictions as has_predictions
from ensemble.store.member_files import read_checkpoint as read_checkpoint
from ensemble.store.member_files import read_predictions as read_predictions
from ensemble.store.predicted_rows import PredictedRows as PredictedRows
from ensemble.store.predictions import Predictions as Predictions
from ensemble.store.predictions import load_predictions as load_predictions
from ensemble.store.requests import receive_requests as receive_requests
from ensemble.store.requests import withdraw_request as withdraw_request
from ensemble.store.requests import write_request as write_request
from ensemble.store.rundir import RunDir as RunDir
from ensemble.store.snapshot import RunStatus as RunStatus
from ensemble.store.state import RunState as RunState
from ensemble.store.trust import trust_folder as trust_folder
from ensemble.store.versions import revision as revision
from ensemble.store.versions import versions as versions
