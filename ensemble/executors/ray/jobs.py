"""Submits runs as jobs of a Ray cluster, for `ensemble submit`: idempotent by name.

A job runs `ensemble run` on the cluster's head, in a copy of a working directory that is uploaded with it, and
controls the run from there. A name has at most one active job: a second submission returns that one. Otherwise a
new job is submitted (`ensemble-NAME`, then `ensemble-NAME.2` ...), which resumes the run directory, shared by all
nodes, where the last job ended. Ray keeps the log of each job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.spec import SpecError
from ensemble.spec.settings import make_portable, redact_values

#: What Ray takes as a working directory, zipped; what .gitignore names, .git and virtual environments stay behind.
MOST_MIB = 100
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
_EXCLUDED = ["runs"]
_SETTLE_S = 30.0  # from the end of a job's log to its status
_LOST_LOGS = 5  # connections to a job's log that may break one after another


@dataclass(frozen=True)
class SubmittedJob:
    """A job on a cluster.

    Attributes:
        id: its submission id.
        fresh: whether it was submitted by this call; else it was under way before.
    """

    id: str
    fresh: bool


class JobClient:
    """The jobs of the cluster at an address, such as `http://HEAD:8265`.

    Raises:
        SpecError: nobody answers there, or asks for a token that is not found.
    """

    def __init__(self, address: str) -> None:
        if find_token() is not None:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        logging.getLogger("ray").setLevel(logging.ERROR)
        from ray.job_submission import JobSubmissionClient

        self.address = address
        with _translate_errors(address):
            self._client: Any = JobSubmissionClient(address)

    def submit(
        self,
        spec: Path,
        *,
        name: str,
        run_dir: Path,
        settings: Sequence[str] = (),
        working_dir: Path | None = None,
        more: Sequence[str] = (),
    ) -> SubmittedJob:
        """Submit a run, or find the job of that name that is under way.

        Args:
            spec: the spec file; it and all that it imports travel in the working directory.
            run_dir: which every node must see.
            settings: `name=value` or `name=@file` each, for the spec; a file is read by the job, on the head, and
                everything else is seen by whoever may ask the cluster for its jobs.
            working_dir: the spec file's own unless given.
            more: further options of `ensemble run`.

        Raises:
            SpecError: the file is not in the working directory, that is too large, another command runs under this
                name, or the cluster refuses.
        """
        folder = (working_dir or spec.absolute().parent).resolve()
        command = build_entrypoint(spec, folder, run_dir, settings, more)
        with _translate_errors(self.address):
            known = self._list_jobs(name)
            running = next((each for each in known if str(each.status) not in ENDED), None)
            if running is None:
                id = choose_submission_id(name, [each.submission_id for each in known])
                try:
                    self._client.submit_job(
                        entrypoint=command,
                        submission_id=id,
                        metadata={"ensemble": name, "run_dir": str(run_dir)},
                        runtime_env={"working_dir": str(folder), "excludes": _EXCLUDED},
                    )
                    return SubmittedJob(id, True)
                except RuntimeError:  # somebody may have submitted the same at the same moment
                    running = next((each for each in self._list_jobs(name) if each.submission_id == id), None)
                    if running is None:
                        raise
        if running.entrypoint != command:
            theirs, ours = (shlex.join(redact_values(shlex.split(each))) for each in (running.entrypoint, command))
            differ = f"{theirs!r}, not {ours!r}" if theirs != ours else "with other values of --set"
            raise SpecError(
                f"the job {running.submission_id} runs under this name, but another command ({differ}): "
                "give another --name, or wait for its end"
            )
        return SubmittedJob(running.submission_id, False)

    def _list_jobs(self, name: str) -> list[Any]:
        return [each for each in self._client.list_jobs() if (each.metadata or {}).get("ensemble") == name]

    def follow_log(self, id: str, write: Callable[[str], object]) -> int:
        """Hand on what a job says until it ends.

        Returns:
            0 where it succeeded, else its exit status, 1 where it has none.

        Raises:
            SpecError: the cluster does not answer any more.
        """
        with _translate_errors(self.address):
            asyncio.run(self._tail(id, write))
            until = time.monotonic() + _SETTLE_S
            while str((details := self._client.get_job_info(id)).status) not in ENDED:
                if time.monotonic() > until:
                    raise SpecError(f"the log of the job {id} has ended, and the job has not ({details.status})")
                time.sleep(0.2)
        return 0 if str(details.status) == "SUCCEEDED" else details.driver_exit_code or 1

    async def _tail(self, id: str, write: Callable[[str], object]) -> None:
        """All of a job's log; where the connection breaks, another goes on after what was handed on."""
        done = 0
        for broken in range(_LOST_LOGS):
            at = 0
            try:
                async for text in self._client.tail_job_logs(id):
                    if at + len(text) > done:
                        write(text[max(0, done - at) :])
                    at += len(text)
                    done = max(done, at)
                return
            except RuntimeError:
                if broken == _LOST_LOGS - 1:
                    raise
                await asyncio.sleep(1.0)


def find_token() -> str | None:
    """Where Ray will find the token that a cluster asks for; None where there is none."""
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if os.environ.get(variable):
            return variable
    usual = Path.home() / ".ray" / "auth_token"
    return str(usual) if usual.is_file() else None


def choose_submission_id(name: str, known: Iterable[str | None]) -> str:
    """The submission id of a name's next job: `ensemble-NAME`, and with a number where that is taken.

    >>> next_id("my run", ["ensemble-my-run"])
    'ensemble-my-run.2'
    """
    first = "ensemble-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    taken = set(known)
    number = 1
    while (id := first if number == 1 else f"{first}.{number}") in taken:
        number += 1
    return id


def build_entrypoint(
    spec: Path, folder: Path, run_dir: Path, settings: Sequence[str], more: Sequence[str] = ()
) -> str:
    """The command that a job runs in its copy of `folder`.

    Raises:
        SpecError: there is no such file, or it is elsewhere.
    """
    if not spec.is_file():
        raise SpecError(f"there is no spec file {str(spec)!r}")
    if not spec.resolve().is_relative_to(folder):
        raise SpecError(f"{spec} is not in {folder}, which travels with the job; give --working-dir")
    words = ["python", "-m", "ensemble.cli", "run", str(spec.resolve().relative_to(folder)), "--run-dir"]
    told = [make_portable(setting, Path.cwd()) for setting in settings]
    return shlex.join([*words, str(run_dir), *(word for setting in told for word in ("--set", setting)), *more])


@contextlib.contextmanager
def _translate_errors(address: str) -> Iterator[None]:
    """Within, what goes wrong between here and the cluster becomes a SpecError of one line."""
    import ray
    import requests

    try:
        yield
    except SpecError:  # said already
        raise
    except ray.exceptions.AuthenticationError as error:
        found = find_token()
        hint = f"the one in {found} is not its own" if found else "it is looked for in ~/.ray/auth_token"
        first = str(error).strip().splitlines()[0]
        raise SpecError(
            f"the cluster at {address} asks for a token ({first}); {hint}, or where RAY_AUTH_TOKEN_PATH says"
        ) from None
    except (ConnectionError, requests.exceptions.RequestException) as error:
        raise SpecError(f"no Ray answers at {address}: {_to_one_line(error)}") from None
    except (RuntimeError, ValueError) as error:
        too_large = any(sign in str(error) for sign in ("413", "exceeds", "Maximum request body size"))
        more = f"; at most {MOST_MIB} MiB travel: give a smaller --working-dir" if too_large else ""
        raise SpecError(f"the cluster at {address} refuses: {_to_one_line(error)}{more}") from None


def _to_one_line(error: Exception, most: int = 300) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= most else text[:most] + " ..."
