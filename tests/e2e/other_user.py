"""What another user of the machine gets at, while a run of somebody else's goes on: it tries."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 -- which the other user may not read
import http.client
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

PLACES = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/run"), Path("/dev/mqueue"))
PROCESS_FILES = ("environ", "cmdline", "maps", "fd", "mem", "cwd")


def find_paths(user: int, *more: Path) -> Iterator[Path]:
    """What belongs to the user where everybody may write, and below `more`."""
    for place in (*PLACES, *more):
        for top in [place, *place.iterdir()] if place.is_dir() else []:
            if top in more or (not top.is_symlink() and top.lstat().st_uid == user):
                yield top
                yield from top.rglob("*") if top.is_dir() and not (top in PLACES or top in more) else ()


def find_processes(user: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if process.uids().real == user]


def find_sockets(processes: Iterable[psutil.Process]) -> tuple[set[str], dict[tuple[str, int], str]]:
    """Names of Unix sockets, `@` for an abstract one, and of TCP addresses the command that listens there."""
    names, addresses = set[str](), dict[tuple[str, int], str]()
    for process in processes:
        try:
            connections, command = process.net_connections("all"), " ".join(process.cmdline())
        except (psutil.Error, FileNotFoundError):  # it has ended
            continue
        names |= {each.laddr for each in connections if each.family == socket.AF_UNIX and each.laddr}
        addresses |= {tuple(each.laddr): command for each in connections if each.status == psutil.CONN_LISTEN}
    return names, addresses


def try_all(user: int, targets: dict[str, Any]) -> dict[str, Any]:
    """What a process of the user gets at, of `paths`, `sockets`, `addresses` and `processes`."""
    command = [sys.executable, __file__, str(user)]
    done = subprocess.run(command, input=json.dumps(targets), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _opens(path: str) -> str:
    done = []
    for name, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY)):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW))
            done.append(name)
        except OSError as error:
            if name == "write" and isinstance(error, IsADirectoryError) and os.access(path, os.W_OK):
                done.append(name)
    return " ".join(done)


def _connects(name: str) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as probe, contextlib.suppress(OSError):
            probe.connect("\0" + name[1:] if name.startswith("@") else name)
            return True
    return False


def _asks(host: str, port: int) -> str:
    """The status with which it answers a page's request, "" for none; "refused"."""
    statuses = []
    for path in ("/", "/metrics", "/api/jobs/", "/api/v0/logs", "/logs/"):
        connection = http.client.HTTPConnection(host, port, timeout=5)
        try:
            connection.request("GET", path)
            statuses.append(str(connection.getresponse().status))
        except ConnectionRefusedError:
            return "refused"
        except (OSError, http.client.HTTPException):
            return ""
        finally:
            connection.close()
    return " ".join(statuses)


def _main(user: int) -> None:
    targets = json.load(sys.stdin)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    assert stat.S_ISDIR(os.stat("/").st_mode)
    found = {
        "paths": {path: how for path in targets["paths"] if (how := _opens(path))},
        "sockets": [name for name in targets["sockets"] if _connects(name)],
        "addresses": {f"{host}:{port}": _asks(host, port) for host, port in targets["addresses"]},
        "processes": {},
    }
    for path in (f"/proc/{number}/{name}" for number in targets["processes"] for name in PROCESS_FILES):
        with contextlib.suppress(OSError):
            read = os.listdir(path) if path.endswith("fd") else os.readlink(path) if path.endswith("cwd") else ""
            found["processes"][path] = read or Path(path).read_bytes().decode(errors="replace")[:4000]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
