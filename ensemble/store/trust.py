"""Checks who could have written a file whose code is about to run: unpickling and importing execute it.

What root owns is accepted. A group may write if it is its owner's private one. Elsewhere (Kubernetes' fsGroup,
file systems without modes such as WSL's /mnt/c, exFAT and SMB) the user names the folders to trust.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from ensemble.store.files import StoreError

#: Folders, separated as in PATH, also for the processes that are started here: what anybody may write there is
#: trusted.
TRUST_FOLDER = "ENSEMBLE_TRUST_FOLDER"


def trust_folder(path: Path) -> None:
    """Trusts files below a folder, whoever may write them: from now on, in processes started here, too."""
    trusted = os.environ.get(TRUST_FOLDER)
    os.environ[TRUST_FOLDER] = os.pathsep.join([*([trusted] if trusted else []), os.path.realpath(path)])


def check_ownership(path: Path, status: os.stat_result) -> None:
    """Raises for a file or a directory with code that another user may have written.

    Raises:
        StoreError: it is another user's who is not root, or `explain_distrust` says why.
    """
    if status.st_uid not in (os.geteuid(), 0) and not _is_in_trusted_folder(path):
        raise StoreError(
            f"{path} belongs to another user (uid {status.st_uid}); its code is not run: copy the run"
        )
    why = explain_distrust(path, status)
    if why is not None:
        raise StoreError(why)


def explain_distrust(path: Path, status: os.stat_result) -> str | None:
    """Returns which other users may write a path, so that its code must not run; None where none may."""
    if _is_in_trusted_folder(path):
        return None
    if status.st_mode & stat.S_IWOTH:
        return (
            f"{path} can be written by everyone; its code is not run: `chmod o-w {path}` if you trust it, or, on "
            f"a file system without modes, --trust-folder FOLDER (in Python, {TRUST_FOLDER} in the environment)"
        )
    if status.st_mode & stat.S_IWGRP and not _is_private(status):
        return (
            f"{path} can be written by the group {_group_name(status.st_gid)}; its code is not run: "
            f"`chmod g-w {path}`, or --trust-folder FOLDER if you trust all who are in it (in Python, "
            f"{TRUST_FOLDER} in the environment)"
        )
    return None


def _is_in_trusted_folder(path: Path) -> bool:
    folders = [folder for folder in os.environ.get(TRUST_FOLDER, "").split(os.pathsep) if folder]
    return any(Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)) for folder in folders)


def _is_private(status: os.stat_result) -> bool:
    """Whether a file's group is its owner's private one: primary, of their name, without other members."""
    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:  # no such user or group here: nobody knows who is in it
        return False
    alone = set(group.gr_mem) <= {owner.pw_name}
    return owner.pw_gid == status.st_gid and group.gr_name == owner.pw_name and alone


def _group_name(number: int) -> str:
    try:
        return repr(grp.getgrgid(number).gr_name)
    except KeyError:
        return str(number)
