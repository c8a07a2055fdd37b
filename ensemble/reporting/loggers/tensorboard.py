"""Writes event files for TensorBoard, a folder for each member, with what its HParams view needs.

A file holds records of protocol buffers, which have the times of the log's events: those that are written again
are the same bytes. A record `SessionLog.START` with a step makes TensorBoard drop what it has from that step on.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemble.reporting.loggers.base import Logger, LostRecordsError, as_text, importing
from ensemble.reporting.loggers.points import DeclaredMember, EpochEnded, MemberEnd, Point, RunEnd, WentBack
from ensemble.store import RunState
from ensemble.store.files import make_directory

RUN = ""  # the run's own file, beside the members' folders

#: How the HParams view shows the state of a member that has ended. It keeps the first status that it reads, and
#: shows a member without one as running: a member that a resume continues has none yet.
STATUS = {"finished": "STATUS_SUCCESS", "pruned": "STATUS_SUCCESS", "cancelled": "STATUS_FAILURE"}
STATUS_OF_FAILED = "STATUS_FAILURE"  # when the run has finished; where it is stopped, a resume tries them again


class TensorBoardLogger(Logger):
    """Appends to one file of each member, which is open only while something is written."""

    def open(self, state: RunState, ids: dict[str, Any]) -> None:
        """Cut off what was written beyond `ids` by a process that was killed."""
        self._root = self._find_root(state)
        self._file_name = f"events.out.tfevents.{int(state.started or 0)}.{state.run_id or 'run'}"
        self._sizes: dict[str, int] = dict(ids.get("sizes", {}))
        self._ends: dict[str, int] = dict(ids.get("ends", {}))
        with importing():
            self._encoder = _Encoder()
        #: TensorBoard shows the runs of a folder together, and takes trials of one id for one.
        self._trial_prefix = f"{state.name}-{state.run_id[:8] or 'run'}/"
        for member, size in self._sizes.items():
            path = self._path(member)
            if not path.is_file() or path.stat().st_size < size:
                raise LostRecordsError(f"{path} is gone or has lost its end")
            if path.stat().st_size > size:
                os.truncate(path, size)

    def write(self, points: Sequence[Point]) -> dict[str, Any]:
        """Append the points of each member to its file."""
        records: dict[str, list[bytes]] = {}
        for point in points:
            if isinstance(
                point, DeclaredMember
            ):  # of a member that is declared otherwise, TensorBoard keeps the first
                self._sizes.pop(point.member, None)
                self._ends.pop(point.member, None)
                records[point.member] = []
            written = records.setdefault(point.member, [])
            first = self._ends.pop(point.member, None)
            if first is not None and not isinstance(point, WentBack):
                written.append(self._encoder.restart(point.t, first))
            match point:
                case DeclaredMember(_, t, params, options):
                    written.append(
                        self._encoder.hyperparameters(t, f"{self._trial_prefix}{point.member}", options | params)
                    )
                case WentBack(_, t, epoch):
                    written.append(self._encoder.restart(t, epoch))
                case EpochEnded(_, t, epoch, values):
                    written.append(self._encoder.scalars(t, epoch, values))
        return self._append(records)

    def end(self, end: RunEnd, state: RunState) -> dict[str, Any]:
        """Append how each member ended and what it has used, and the run's own figures."""
        records = {
            name: self._encode_end(name, member_end, end.finished) for name, member_end in end.members.items()
        }
        records[RUN] = [] if RUN not in self._ends else [self._encoder.restart(end.t, 0)]
        records[RUN].append(self._encoder.scalars(end.t, 0, end.values))
        self._ends |= {member: member_end.epochs for member, member_end in end.members.items()} | {RUN: 0}
        return self._append(records)

    def _encode_end(self, member: str, end: MemberEnd, finished: bool) -> list[bytes]:
        before = self._ends.get(member)
        status = STATUS_OF_FAILED if finished and end.state == "failed" else STATUS.get(end.state)
        return [
            *([] if before is None else [self._encoder.restart(end.t, before)]),
            self._encoder.scalars(end.t, end.epochs, end.values | {"final/attempts": end.attempts}),
            *([] if status is None else [self._encoder.session_end(end.t, status)]),
        ]

    def _append(self, records: Mapping[str, Sequence[bytes]]) -> dict[str, Any]:
        for member, written in records.items():
            path, size = self._path(member), self._sizes.get(member)
            if size is None:
                make_directory(path.parent)
                # TensorBoard takes the first START for no restart.
                written = [self._encoder.version(), self._encoder.restart(0.0, 0), *written]
            with open(path, "wb" if size is None else "r+b") as file:
                file.truncate(size or 0)  # of what a write that failed may have left
                file.seek(size or 0)
                file.write(b"".join(written))
                self._sizes[member] = file.tell()
        return {"sizes": self._sizes, "ends": self._ends}

    def _find_root(self, state: RunState) -> Path:
        folder = self.options.get("dir")
        if folder is None:
            return (self.run_dir.path / "tensorboard").absolute()
        return Path(folder).expanduser().absolute() / f"{state.name}-{state.run_id[:8] or 'run'}"

    def _path(self, member: str) -> Path:
        return self._root / member / self._file_name


class _Encoder:
    """Makes the records of an event file. Imports TensorBoard's protocol buffers, not TensorFlow."""

    def __init__(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._plugin_data = event_pb2, summary_pb2, plugin_data_pb2
        self._status, self._metadata, self._hparams_pb = api_pb2.Status, metadata, summary_v2.hparams_pb
        self._record_writer = RecordWriter

    def version(self) -> bytes:
        return self._encode(self._event.Event(wall_time=0.0, file_version="brain.Event:2"))

    def restart(self, t: float, step: int) -> bytes:
        """What was logged of this step and of later ones is replaced by what follows."""
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        return self._encode(self._event.Event(wall_time=t, step=step, session_log=log))

    def scalars(self, t: float, step: int, values: Mapping[str, float]) -> bytes:
        made = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        return self._encode(self._event.Event(wall_time=t, step=step, summary=self._summary.Summary(value=made)))

    def hyperparameters(self, t: float, member: str, values: Mapping[str, Any]) -> bytes:
        """A member's hyperparameters for the HParams view; what is no number, text or bool is shown as JSON."""
        shown = {
            name: value if isinstance(value, bool | int | float) else as_text(value)
            for name, value in values.items()
        }
        made = self._hparams_pb(shown, trial_id=member, start_time_secs=t)
        plugin, data = made.value[0].metadata.plugin_data, self._plugin_data.HParamsPluginData()
        data.ParseFromString(plugin.content)
        plugin.content = data.SerializeToString(deterministic=True)  # else the same values may give other bytes
        return self._encode(self._event.Event(wall_time=t, summary=made))

    def session_end(self, t: float, status: str) -> bytes:
        """How a member ended, for the HParams view."""
        ended = self._plugin_data.SessionEndInfo(status=self._status.Value(status), end_time_secs=t)
        data = self._plugin_data.HParamsPluginData(session_end_info=ended)
        value = self._summary.Summary.Value(
            tag=self._metadata.SESSION_END_INFO_TAG,
            metadata=self._metadata.create_summary_metadata(data),
            tensor=self._metadata.NULL_TENSOR,
        )
        return self._encode(self._event.Event(wall_time=t, summary=self._summary.Summary(value=[value])))

    def _encode(self, event: Any) -> bytes:
        record = io.BytesIO()
        self._record_writer(record).write(event.SerializeToString(deterministic=True))
        return record.getvalue()
