"""The files of a run's base: `base/<digest>.pt`, and `base/base.json`, which says what it is. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ensemble.store import DamagedError, RunDir
from ensemble.store.digests import open_checked
from ensemble.store.files import make_directory, write_bytes

BASE = "base"


class BaseFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the base of a run is; see `ensemble.events.BaseMade`."""

    digest: str
    file: str
    bytes: int
    source: str
    code: str

    def path(self, run: RunDir) -> Path:
        return run.path / BASE / f"{self.digest}.pt"

    def write(self, run: RunDir) -> None:
        """Let members find it."""
        make_directory(run.path / BASE)
        write_bytes(run.path / BASE / "base.json", msgspec.json.encode(self))

    @classmethod
    def read(cls, run: RunDir) -> BaseFile:
        """What `write` wrote.

        Raises:
            DamagedError: it is gone or damaged.
        """
        path = run.path / BASE / "base.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise DamagedError(f"{path}, which names the base of the run, cannot be read: {error}") from None

    def check(self, run: RunDir) -> None:
        """Raise DamagedError where its file is gone or damaged."""
        try:
            with open_checked(self.path(run), self.file):
                pass
        except (FileNotFoundError, DamagedError) as error:
            raise DamagedError(
                f"the base {self.digest} of the run (from {self.source}) has changed: {error}; restore its file, "
                "or begin another run"
            ) from None

    def describe_share(self) -> str:
        """Whose memory it is, for people."""
        return f"the base of {self.source} takes {self.bytes / 2**20:,.1f} MiB of memory once on each node"

    def describe(self) -> dict[str, Any]:
        """The fields of its event."""
        return msgspec.structs.asdict(self)
