"""What lies at the address of a mirrored run, and what of it may reach a disk again; pure.

    starts/000002.json      who writes start 2 of the mirror: made once, never replaced
    000002/<sha256>         a file of the run, or a segment of its log, by what it holds: never replaced
    000002/head.json        which of these are the run, by path and digest: replaced when they are all there

A start writes below its own number alone, and a reader takes the highest number that has a head. So a driver that
is believed dead and comes back changes nothing of what its successor wrote.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from msgspec import Struct

from ensemble.spec import SpecError
from ensemble.store.errors import StoreError
from ensemble.store.frozen_arrays import KEPT, is_name
from ensemble.store.kept_code import is_fingerprint
from ensemble.store.pack_index import is_pack
from pipelines.sources._remote import is_url as is_url

VERSION = 1
#: Given as an address: the run is not mirrored any more.
NO_MIRROR = "none"
STARTS, HEAD = "starts", "head.json"
#: More segments than this are merged, and none into one of more bytes.
MOST_SEGMENTS, SEGMENT_BYTES = 32, 64 * 2**20

_DIGEST = re.compile(r"[0-9a-f]{64}")
_OF_CODE = ("run.json", "ensemble.pkl", "spec.py")
#: Results that are fetched. The report has scripts and can be made again, and a study may hold pickles.
_OF_RESULTS = "ledger.json ledger.csv results.json summary.json metrics.csv uncertainty.csv digests.json"
_OF_RUN = ("notes.json", "prior-trials.json", *_OF_RESULTS.split())
_OF_MEMBER = re.compile(r"(?:checkpoint|predictions|initial-weights)[\w.-]*\.safetensors|log\.txt", re.ASCII)


class MirrorClaim(Struct, kw_only=True):
    """Who writes a start of a mirror.

    Attributes:
        token: made anew for each start of the run.
        t: when it began, in Unix seconds.
    """

    v: int = VERSION
    run_id: str
    name: str
    token: str
    host: str
    pid: int
    t: float


class Stored(Struct, frozen=True, array_like=True):
    """An object: the SHA-256 of what it holds, which is its name, and its bytes."""

    digest: str
    size: int


class MirrorHead(Struct, kw_only=True):
    """A state of a run from which it can be resumed.

    Attributes:
        t: when it was written, in Unix seconds.
        log: the segments of the event log, in order.
        log_digest: SHA-256 of all of it.
        files: by path in the run directory.
    """

    v: int = VERSION
    run_id: str
    name: str
    start: int
    t: float
    log: list[Stored]
    log_digest: str
    files: dict[str, Stored]

    @property
    def log_bytes(self) -> int:
        """The bytes of the log."""
        return sum(segment.size for segment in self.log)

    def check(self, url: str) -> None:
        """Raise StoreError where it names what no run has: an address may have been written by anybody."""
        stored = [*self.log, *self.files.values()]
        names = [name for name in self.files if not is_of_run(name)]
        if names or not all(_DIGEST.fullmatch(each.digest) and each.size >= 0 for each in stored):
            what = f"a file {names[0][:100]!r}" if names else "a digest that is none"
            raise StoreError(f"{url} is damaged, or no mirror of a run: its head names {what}")


def check_url(url: str) -> str:
    """The address of a mirror, without a slash at its end.

    Raises:
        SpecError: it is none, or holds a user's name, a password or a token.
    """
    parts = urlsplit(url)
    if (
        not is_url(url)
        or parts.scheme in ("http", "https", "memory")
        or not (parts.netloc + parts.path).strip("/")
    ):
        raise SpecError(f"{_hide(url)!r} is no address for a mirror: give s3://BUCKET/PATH, gs://..., file:///...")
    if "@" in parts.netloc or parts.query or parts.fragment or re.search(r"[*?\[\]]", url):
        raise SpecError(
            f"{_hide(url)!r}: an address of a mirror holds no credentials, queries or patterns; fsspec takes "
            "credentials from the environment and its configuration"
        )
    return url.rstrip("/")


def _hide(url: str) -> str:
    """An address without what may be secret in it."""
    return re.sub(r"//[^/]*@", "//...@", url).partition("?")[0]


def prefix_of(start: int) -> str:
    """The folder of a start."""
    return f"{start:06d}"


def claim_of(start: int) -> str:
    """The name of the claim of a start."""
    return f"{STARTS}/{prefix_of(start)}.json"


def read_numbers(names: Iterable[str]) -> list[int]:
    """The starts that have claims, in order, by the names in their folder."""
    return sorted(int(name[:6]) for name in names if re.fullmatch(r"\d{6}\.json", name))


def is_code(path: str) -> bool:
    """Whether a file is part of the declaration or the code: of what runs when the run is loaded."""
    return path in _OF_CODE or path.startswith("code/")


def is_of_run(path: str) -> bool:
    """Whether a path may be made in a run directory from a mirror.

    Nothing else is, and of files that can be unpickled or imported those alone that `digest_code` counts.
    """
    parts = path.split("/")
    if any(not part or part[0] == "." or "\0" in part or "\\" in part for part in parts):
        return False
    match parts:
        case [_]:
            return path in _OF_CODE or path in _OF_RUN
        case ["code", fingerprint, _, *_]:
            return is_fingerprint(fingerprint)
        case ["data", name]:
            return is_name(name) and name.endswith(KEPT)
        case ["members", _, name]:
            return _OF_MEMBER.fullmatch(name) is not None
        case ["packs", name]:
            return is_pack(name)
    return False


def is_declared(path: str) -> bool:
    """Whether a log may name a file as one of the declaration and the code: it is, or it is an array of these."""
    return is_of_run(path) and (is_code(path) or path.startswith("data/"))


def digest_code(files: Mapping[str, Stored]) -> str:
    """The digest that a user trusts: of the names and contents of all files of the declaration and the code."""
    lines = (f"{path}\0{stored.digest}\n" for path, stored in sorted(files.items()) if is_code(path))
    return f"sha256:{hashlib.sha256(''.join(lines).encode(errors='surrogateescape')).hexdigest()}"


def find_merge(sizes: Sequence[int]) -> int:
    """From which segment on all are to be merged into one; the number of segments where none are.

    Those that are larger than all behind them stay, so that a byte is merged a few times at most.
    """
    behind = sum(sizes)
    for at, size in enumerate(sizes if len(sizes) > MOST_SEGMENTS else ()):
        behind -= size
        if size <= behind and size + behind <= SEGMENT_BYTES:
            return at
    return len(sizes)
