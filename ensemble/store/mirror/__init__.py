"""Mirrors a run to an object store while it goes on, and fetches it from there."""

from ensemble.store.mirror.bucket import MirrorError
from ensemble.store.mirror.claim import FencedError, MirrorOptions, claim_mirror
from ensemble.store.mirror.fetch import fetch_log, fetch_run, open_run
from ensemble.store.mirror.layout import NO_MIRROR, check_url, is_url
from ensemble.store.mirror.log_check import check_fetched
from ensemble.store.mirror.status import MirrorStatus, describe_status, explain_rest, is_fetched, load_status
from ensemble.store.mirror.writer import MirrorWriter, complete_mirror

__all__ = [
    "NO_MIRROR",
    "FencedError",
    "MirrorError",
    "MirrorOptions",
    "MirrorStatus",
    "MirrorWriter",
    "check_fetched",
    "check_url",
    "claim_mirror",
    "complete_mirror",
    "describe_status",
    "explain_rest",
    "fetch_log",
    "fetch_run",
    "is_fetched",
    "is_url",
    "load_status",
    "open_run",
]
