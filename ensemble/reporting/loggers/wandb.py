"""Writes a run of Weights & Biases for each member, in one group, and one for the whole run.

wandb can only append to a run, not in offline mode to one of an earlier process. Runs are therefore written whole
when the ensemble's run has ended or is stopped; a resume writes those that have changed once more, with the same
ids.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ensemble.reporting.loggers.base import Logger, importing
from ensemble.reporting.loggers.points import OPTIONS, MemberEnd, Point, RunEnd, epoch_values
from ensemble.store import MemberState, RunState
from ensemble.store.files import make_directory

RUN = ""  # stands for the run of the whole ensemble
FOLDERS = {"WANDB_CONFIG_DIR": "config", "WANDB_CACHE_DIR": "cache", "WANDB_DATA_DIR": "data"}  # offline


class WandBLogger(Logger):
    """Writes runs one after the other."""

    def open(self, state: RunState, ids: dict[str, Any]) -> None:
        """Prepare the folder. wandb is imported only when the run ends."""
        self._folder = self.run_dir.path / "wandb"
        make_directory(self._folder)
        self._offline = self.options["mode"] == "offline"
        self._digests: dict[str, str] = dict(ids.get("digests", {}))  # of what each run has
        self._wandb: Any = None

    def write(self, points: Sequence[Point]) -> dict[str, Any]:
        """Write nothing yet."""
        return {"digests": self._digests}

    def end(self, end: RunEnd, state: RunState) -> dict[str, Any]:
        """Write the runs of members that have changed since they were written, then the one of the whole run."""
        contents = {
            member: dict(_describe(state.members[member], member_end))
            for member, member_end in end.members.items()
        }
        for member, content in contents.items():
            self._write(state, member, content)
        whole = {"config": {"executor": state.executor, "mode": state.mode}, "epochs": [], "failed": False}
        self._write(state, RUN, {**whole, "summary": end.values | {"energy_origin": end.origin}})
        return {"digests": self._digests}

    def close(self) -> None:
        """End wandb's process."""
        if self._wandb is not None:
            self._wandb.teardown()

    def _write(self, state: RunState, member: str, content: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        run_id = f"{state.run_id[:16]}-{member or 'ensemble'}"
        folders = list((self._folder / "wandb").glob(f"offline-run-*-{run_id}"))
        if self._digests.get(member) == digest and (folders or not self._offline):
            return
        for folder in folders:  # an earlier state of it, or half of one
            shutil.rmtree(folder)
        wandb = self._import()
        run = wandb.init(
            project=self.options.get("project") or state.name,
            id=run_id,
            name=member or state.name,
            group=f"{state.name}-{state.run_id[:8]}",
            job_type="member" if member else "ensemble",
            config=content["config"],
            resume=None if self._offline else "allow",
            settings=self._make_settings(),
        )
        with _finishing(run, failed=content["failed"]):
            for epoch, t, values in content["epochs"]:
                run.log({**values, "_timestamp": t}, step=epoch)
            run.summary.update(content["summary"])
        self._digests[member] = digest

    def _import(self) -> Any:
        if self._wandb is None:
            if self._offline:
                os.environ.update({name: str(self._folder / folder) for name, folder in FOLDERS.items()})
                os.environ["WANDB_ERROR_REPORTING"] = "false"
            with importing():
                import wandb

            self._wandb = wandb
        return self._wandb

    def _make_settings(self) -> Any:
        return self._wandb.Settings(
            mode=self.options["mode"],
            root_dir=str(self._folder),
            reinit="create_new",
            console="off",
            silent=True,
            symlink=False,
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )


def _describe(member: MemberState, end: MemberEnd) -> Iterator[tuple[str, Any]]:
    options = {name: member.identity[name] for name in OPTIONS if name in member.identity}
    yield "config", options | member.params
    yield "epochs", [[epoch.epoch, epoch.t, epoch_values(epoch)] for epoch in member.history]
    summary = {"state": end.state, "attempts": end.attempts, "energy_origin": end.origin, "error": end.error}
    yield "summary", end.values | {name: value for name, value in summary.items() if value is not None}
    yield "failed", end.state == "failed"


@contextlib.contextmanager
def _finishing(run: Any, *, failed: bool) -> Iterator[None]:
    try:
        yield
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish(exit_code=int(failed))
