"""Begins to mirror a run: checks that an address is free or has this run, and chooses the number of the start."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from ensemble.store.errors import StoreError
from ensemble.store.files import format_command
from ensemble.store.mirror.bucket import Bucket, MirrorError
from ensemble.store.mirror.layout import (
    HEAD,
    NO_MIRROR,
    STARTS,
    VERSION,
    MirrorClaim,
    MirrorHead,
    Stored,
    check_url,
    claim_of,
    digest_code,
    is_of_run,
    prefix_of,
    read_numbers,
)
from ensemble.store.mirror.status import MirrorStatus, is_fetched, load_status, save_status
from ensemble.store.rundir import RunDir

log = logging.getLogger(__name__)

_BLOCK_BYTES = 2**20


class FencedError(StoreError):
    """The run went on elsewhere, and another start of it writes the mirror."""


@dataclass(frozen=True, kw_only=True)
class MirrorOptions:
    """What the process that mirrors a run is given.

    Attributes:
        url: of the mirror.
        start: the number with which it writes.
        token: of this start of the run.
        code: the digest that `--trust` takes.
    """

    name: ClassVar[str] = "mirror"
    url: str
    start: int
    token: str
    code: str = ""


def claim_mirror(run_dir: RunDir, url: str | None) -> MirrorOptions | None:
    """Check that a run can be mirrored to an address, before anything trains, and choose the number of the start.

    Nothing is claimed yet: `MirrorWriter` does, once the run has started.

    Args:
        run_dir: of the run, with its declaration; its log may be empty.
        url: None: the one of before, if it had one; "none": the run is not mirrored any more.

    Returns:
        None where the run is not mirrored.

    Raises:
        SpecError: the address is none.
        FencedError: it holds what this directory does not go on from.
        StoreError: it holds another run, or cannot be written to.
    """
    known = load_status(run_dir)
    if url == NO_MIRROR:
        if known is not None:
            save_status(run_dir, MirrorStatus(url=known.url, code=known.code, is_fetched=known.is_fetched))
        return None
    if url is None and (known is None or not known.start):
        return None
    url = check_url(url or (known.url if known is not None else ""))
    bucket = Bucket(url)
    numbers = read_numbers(bucket.list(STARTS))
    if not numbers and (foreign := bucket.list()):
        raise StoreError(f"{url} is not empty and holds no mirror ({foreign[0]} ...): give an address below it")
    _check_owner(bucket, numbers, run_dir)
    if (head := read_head(bucket, numbers)) is not None and not continues(run_dir, head):
        again = format_command("resume", url, "--into", "DIRECTORY")
        if known is not None and known.url == url and known.start:
            save_status(run_dir, msgspec.structs.replace(known, is_fenced=True))
        raise FencedError(
            f"{url} holds what {run_dir.path} does not go on from: the run went on elsewhere (start "
            f"{numbers[-1]}). {again} goes on from there; or give another address, or --mirror {NO_MIRROR}"
        )
    token = uuid.uuid4().hex
    probe = f"{STARTS}/.probe-{token}"
    bucket.put(probe, b"")  # who may not write is told before anything trains
    with contextlib.suppress(MirrorError):  # or not remove
        bucket.remove(probe)
    code = digest_code(hash_code(run_dir))
    options = MirrorOptions(url=url, start=(numbers or [0])[-1] + 1, token=token, code=code)
    status = MirrorStatus(url=url, code=code, start=options.start, token=token, is_fetched=is_fetched(run_dir))
    save_status(run_dir, status)
    log.warning("mirror: %s (start %d); to load its code from there: --trust %s", url, options.start, code)
    return options


def _check_owner(bucket: Bucket, numbers: list[int], run_dir: RunDir) -> None:
    for number in numbers[-1:]:
        claim = read_claim(bucket, number)
        own = run_dir.info["run_id"]
        if claim is not None and claim.run_id != own:
            again = format_command("resume", bucket.url)
            raise StoreError(
                f"{bucket.url} mirrors another run ({claim.name!r}, run id {claim.run_id}, start {number}, begun "
                f"on {claim.host} by process {claim.pid}), not {own}: give another address, or go on with that "
                f"run: {again}"
            )


def read_claim(bucket: Bucket, number: int) -> MirrorClaim | None:
    """Who writes a start; None where there is none, or its claim is unreadable."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(bucket.read(claim_of(number)) or b"", type=MirrorClaim)
    return None


def read_head(bucket: Bucket, numbers: list[int]) -> MirrorHead | None:
    """What is at the address: the head of the highest start that has one.

    Raises:
        StoreError: it is damaged, or of another version.
    """
    for number in reversed(numbers):
        content = bucket.read(f"{prefix_of(number)}/{HEAD}")
        if content is None:
            continue
        try:
            version = msgspec.json.decode(content)["v"]
            if version == VERSION:
                head = msgspec.json.decode(content, type=MirrorHead)
                head.check(bucket.url)
                if head.start == number:
                    return head
        except (msgspec.MsgspecError, LookupError, TypeError):
            version = "none"
        raise StoreError(
            f"{bucket.url} is damaged, or was written by another version of ray-ensemble (format {version}, this "
            f"one reads {VERSION})"
        )
    return None


def continues(run_dir: RunDir, head: MirrorHead) -> bool:
    """Whether the log in a directory begins with the one in a mirror."""
    try:
        return hash_log(run_dir.events, head.log_bytes).hexdigest() == head.log_digest
    except EOFError:
        return False


def hash_log(path: Path, size: int) -> hashlib._Hash:
    """SHA-256 of the first bytes of a log.

    Raises:
        EOFError: it has fewer.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while size:
            block = file.read(min(_BLOCK_BYTES, size))
            if not block:
                raise EOFError
            digest.update(block)
            size -= len(block)
    return digest


def hash_file(descriptor: int) -> Stored:
    """What an open file holds."""
    digest, at = hashlib.sha256(), 0
    while block := os.pread(descriptor, _BLOCK_BYTES, at):
        digest.update(block)
        at += len(block)
    return Stored(digest.hexdigest(), at)


def list_code(run_dir: RunDir) -> list[str]:
    """The files of a run's declaration and code that are there, by their paths in its directory."""
    own = [run_dir.info_file, run_dir.ensemble_file, run_dir.spec_file, *(run_dir.path / "code").rglob("*")]
    names = (path.relative_to(run_dir.path).as_posix() for path in own if path.is_file())
    return sorted(name for name in names if is_of_run(name))


def hash_code(run_dir: RunDir) -> dict[str, Stored]:
    """The files of a run's declaration and code, with what they hold."""
    found = {}
    for name in list_code(run_dir):
        with open(run_dir.path / name, "rb") as file:
            found[name] = hash_file(file.fileno())
    return found
