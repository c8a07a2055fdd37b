"""Checks who could have written a file whose code is about to run: unpickling and importing execute it.

Refused is what another user owns, what everyone may write, and what a group may write: unless it is its owner's
private group (of their name, with nobody else in it, as many systems give each user), or the user trusts the
group, as on volumes whose files belong to a group (Kubernetes' fsGroup). What root owns is accepted: root writes
the interpreter, too, and the files of a container's image are root's where its processes are another user's.

File systems without modes (WSL's /mnt/c, exFAT, many SMB mounts) show every file as everyone's to write, and chmod
changes nothing: there the user says that the folder is trusted, or chooses another one.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from ensemble.store.files import StoreError

#: Set to 1, also for the processes that are started here: what a group may write is trusted.
TRUST_GROUP = "ENSEMBLE_TRUST_GROUP"
#: Folders, separated as in PATH, also for the processes that are started here: what anybody may write there is
#: trusted.
TRUST_FOLDER = "ENSEMBLE_TRUST_FOLDER"


def trust_group() -> None:
    """Trusts files that their group may write, from now on, in this process and in those that it starts."""
    os.environ[TRUST_GROUP] = "1"


def trust_folder(path: Path) -> None:
    """Trusts files below a folder, whoever may write them: from now on, in processes started here, too."""
    known = os.environ.get(TRUST_FOLDER)
    os.environ[TRUST_FOLDER] = os.pathsep.join([*([known] if known else []), os.path.realpath(path)])


def check_ownership(path: Path, found: os.stat_result) -> None:
    """Raises for a file or a directory with code that another user may have written.

    Raises:
        StoreError: it is another user's who is not root, or `explain_distrust` says why.
    """
    if found.st_uid not in (os.geteuid(), 0) and not _is_in_trusted_folder(path):
        raise StoreError(f"{path} belongs to another user (uid {found.st_uid}); its code is not run: copy the run")
    why = explain_distrust(path, found)
    if why is not None:
        raise StoreError(why)


def explain_distrust(path: Path, found: os.stat_result) -> str | None:
    """Returns which other users may write a path, so that its code must not run; None where none may."""
    if _is_in_trusted_folder(path):
        return None
    if found.st_mode & stat.S_IWOTH:
        return (
            f"{path} can be written by everyone; its code is not run: `chmod o-w {path}` if you trust it, or, on "
            f"a file system without modes, --trust-folder FOLDER (in Python, {TRUST_FOLDER} in the environment)"
        )
    if found.st_mode & stat.S_IWGRP and os.environ.get(TRUST_GROUP) != "1" and not _is_private(found):
        return (
            f"{path} can be written by the group {_group_name(found.st_gid)}; its code is not run: "
            f"`chmod g-w {path}`, or --trust-group if you trust all who are in it"
        )
    return None


def check_modes(path: Path, descriptor: int) -> None:
    """Raises where a file that was made with mode 0600 is everyone's to write: nothing can be private there.

    Args:
        path: of its directory.
        descriptor: of the file.

    Raises:
        StoreError: its file system has no modes, and the user has not said that the folder is trusted.
    """
    if os.fstat(descriptor).st_mode & stat.S_IWOTH and not _is_in_trusted_folder(path):
        raise StoreError(
            f"{path} is on a file system without modes, such as WSL's /mnt/c, exFAT or SMB: everyone may write "
            "there what workers then run; choose a run directory elsewhere, or --trust-folder FOLDER if you trust "
            f"all who can write it (in Python, {TRUST_FOLDER} in the environment)"
        )


def _is_in_trusted_folder(path: Path) -> bool:
    folders = [each for each in os.environ.get(TRUST_FOLDER, "").split(os.pathsep) if each]
    return any(Path(os.path.realpath(path)).is_relative_to(os.path.realpath(each)) for each in folders)


def _is_private(found: os.stat_result) -> bool:
    """Whether a file's group is its owner's private one: primary, of their name, without other members."""
    try:
        owner, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:  # no such user or group here: nobody knows who is in it
        return False
    alone = set(group.gr_mem) <= {owner.pw_name}
    return owner.pw_gid == found.st_gid and group.gr_name == owner.pw_name and alone


def _group_name(number: int) -> str:
    try:
        return repr(grp.getgrgid(number).gr_name)
    except KeyError:
        return str(number)
