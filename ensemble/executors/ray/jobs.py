"""Submits runs as jobs of a Ray cluster, for `ensemble submit`: a name has at most one active job.

A job runs `ensemble run` on the cluster's head, in a copy of a working directory that is uploaded with it. A new
job of the name (`ensemble-NAME.2` ...) resumes the run directory, shared by all nodes, where the last one ended.
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
from pathlib import Path
from typing import Any

from ensemble.spec import SpecError
from ensemble.spec.settings import make_portable, redact_values

_MOST_MIB = 100  # Ray's limit for a zipped working directory, without .git and what .gitignore names
_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
_SETTLE_S = 30.0  # from the end of a job's log to its status
_CONNECTIONS = 5  # to a job's log, if they break


class JobClient:
    """The jobs of the cluster at an address, such as `http://HEAD:8265`.

    Raises:
        SpecError: no job server answers there, or it requires a token that is not found.
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
        flags: Sequence[str] = (),
    ) -> tuple[str, bool]:
        """Submit a run, unless a job of that name is active.

        Args:
            spec: the spec file.
            name: of the job.
            run_dir: run directory, which every node must see.
            settings: for the spec, each `name=value` or `name=@file`. The job reads the file on the head; a value
                is visible to everyone who can list the cluster's jobs.
            working_dir: directory with the spec file and all that it imports, copied to the cluster; the spec
                file's directory unless given.
            flags: further options of `ensemble run`.

        Returns:
            The submission id of the active job, and whether this call submitted it.

        Raises:
            SpecError: the file is not in the working directory, that is too large, the active job of this name
                runs another command, or the cluster refuses.
        """
        folder = (working_dir or spec.absolute().parent).resolve()
        command = build_entrypoint(spec, folder, run_dir, settings, flags)
        with _translate_errors(self.address):
            jobs = self._list_jobs(name)
            running = next((job for job in jobs if str(job.status) not in _ENDED), None)
            if running is None:
                id = choose_submission_id(name, [job.submission_id for job in jobs])
                try:
                    self._client.submit_job(
                        entrypoint=command,
                        submission_id=id,
                        metadata=describe_run(name, run_dir),
                        runtime_env={"working_dir": str(folder), "excludes": ["runs"]},
                    )
                    return id, True
                except RuntimeError:  # perhaps another process submitted the same id at the same moment
                    running = next((job for job in self._list_jobs(name) if job.submission_id == id), None)
                    if running is None:
                        raise
        if running.entrypoint != command:
            theirs, ours = (shlex.join(redact_values(shlex.split(job))) for job in (running.entrypoint, command))
            differ = f"{theirs!r}, not {ours!r}" if theirs != ours else "with other values of --set"
            raise SpecError(
                f"the job {running.submission_id} runs under this name, but another command ({differ}): "
                "give another --name, or wait for its end"
            )
        return running.submission_id, False

    def _list_jobs(self, name: str) -> list[Any]:
        return [job for job in self._client.list_jobs() if (job.metadata or {}).get("ensemble") == name]

    def follow_log(self, id: str, write: Callable[[str], object]) -> int:
        """Write the log of a job until the job ends.

        Returns:
            0 if it succeeded, else its exit status, or 1 if it has none.

        Raises:
            SpecError: the cluster does not answer any more.
        """
        with _translate_errors(self.address):
            asyncio.run(self._tail(id, write))
            until = time.monotonic() + _SETTLE_S
            while str((details := self._client.get_job_info(id)).status) not in _ENDED:
                if time.monotonic() > until:
                    raise SpecError(f"the log of the job {id} has ended, and the job has not ({details.status})")
                time.sleep(0.2)
        return 0 if str(details.status) == "SUCCEEDED" else details.driver_exit_code or 1

    async def _tail(self, id: str, write: Callable[[str], object]) -> None:
        """Write all of a job's log; after a broken connection, another continues behind what was written."""
        done = 0
        for broken in range(_CONNECTIONS):
            at = 0
            try:
                async for text in self._client.tail_job_logs(id):
                    if at + len(text) > done:
                        write(text[max(0, done - at) :])
                    at += len(text)
                    done = max(done, at)
                return
            except RuntimeError:
                if broken == _CONNECTIONS - 1:
                    raise
                await asyncio.sleep(1.0)


def describe_run(name: str, run_dir: Path) -> dict[str, str]:
    """The metadata of a job, which Ray shows with it, and which nobody can change once it is submitted."""
    progress, page = (shlex.join(["ensemble", command, str(run_dir)]) for command in ("status", "dashboard"))
    return {"ensemble": name, "run_dir": str(run_dir), "progress": progress, "live_page": page}


def find_token() -> str | None:
    """Where Ray finds the token for a cluster: a variable's name, or a path; None if there is no token."""
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if os.environ.get(variable):
            return variable
    usual = Path.home() / ".ray" / "auth_token"
    return str(usual) if usual.is_file() else None


def choose_submission_id(name: str, taken: Iterable[str | None]) -> str:
    """The submission id of a name's next job: `ensemble-NAME`, with a number if that is in use.

    >>> choose_submission_id("my run", ["ensemble-my-run"])
    'ensemble-my-run.2'
    """
    first = "ensemble-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    used, id, number = set(taken), first, 1
    while id in used:
        number += 1
        id = f"{first}.{number}"
    return id


def build_entrypoint(
    spec: Path, folder: Path, run_dir: Path, settings: Sequence[str], flags: Sequence[str] = ()
) -> str:
    """The command that a job runs in its copy of `folder`.

    Raises:
        SpecError: there is no spec file, or it is not in `folder`.
    """
    if not spec.is_file():
        raise SpecError(f"there is no spec file {str(spec)!r}")
    if not spec.resolve().is_relative_to(folder):
        raise SpecError(f"{spec} is not in {folder}, which is copied to the cluster; give --working-dir")
    words = ["python", "-m", "ensemble.cli", "run", str(spec.resolve().relative_to(folder))]
    words += ["--run-dir", str(run_dir)]
    for setting in settings:
        words += ["--set", make_portable(setting, Path.cwd())]
    return shlex.join([*words, *flags])


@contextlib.contextmanager
def _translate_errors(address: str) -> Iterator[None]:
    """Within, errors of the cluster and of the connection to it become a SpecError of one line."""
    import ray
    import requests

    try:
        yield
    except SpecError:  # is a ValueError as well
        raise
    except ray.exceptions.AuthenticationError as error:
        token = find_token()
        hint = f"the one in {token} is another cluster's" if token else "there is none in ~/.ray/auth_token"
        first = str(error).strip().splitlines()[0]
        raise SpecError(
            f"the cluster at {address} requires a token ({first}); {hint}: name its file in RAY_AUTH_TOKEN_PATH"
        ) from None
    except (ConnectionError, requests.exceptions.RequestException) as error:
        raise SpecError(f"no Ray answers at {address}: {_to_one_line(error)}") from None
    except (RuntimeError, ValueError) as error:
        too_large = any(sign in str(error) for sign in ("413", "exceeds", "Maximum request body size"))
        more = f"; Ray copies at most {_MOST_MIB} MiB: give a smaller --working-dir" if too_large else ""
        raise SpecError(f"the cluster at {address} refuses: {_to_one_line(error)}{more}") from None


def _to_one_line(error: Exception, most: int = 300) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= most else text[:most] + " ..."
