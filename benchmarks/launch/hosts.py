"""Emulates several hosts on one machine: network namespaces joined to a bridge by veth pairs, shaped by `tbf`.

Files, Unix sockets, processor and memory are common to all hosts. A small process removes the namespaces and their
processes when its parent has ended; if it is killed too, the next `Hosts` does, by the owner's id in their names.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from ensemble.spec import SpecError

INTERFACE = "eth0"
_ADDRESS = "10.0.0.{}"
MOST = 250
_NETNS = Path("/run/netns")
_NAME = re.compile(r"bench-(\d+)-(\d+)-\d+-(?:switch|host\d+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)bit", re.IGNORECASE)
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
# The least bytes of a bucket, and its seconds at the rate: a larger one lets longer transfers through at the
# speed of memory; in a shorter time than this a timer is not exact, and what a full bucket does not take is
# lost.
_BUCKET_BYTES, _BUCKET_S = 65536, 2e-4
# IPv6 and multicast snooping send messages of their own: without them only what is measured is on the wire.
_NO_IPV6 = "for each in /proc/sys/net/ipv6/conf/*/disable_ipv6; do test ! -e $each || echo 1 >$each; done"
# Waits for a line or the end of its input; namespaces that have gone already are no error.
_REMOVE_SCRIPT = """trap '' INT TERM HUP; read _
for name in "$@"; do for pid in $(ip netns pids "$name"); do kill -9 "$pid"; done; ip netns delete "$name"; done"""

_numbers = itertools.count()

Command = tuple[str, ...]


class HostsError(OSError):
    """Hosts cannot be made on this machine; the message is one line with the reason."""


def rate_bps(rate: str) -> float:
    """Bits per second of a rate as `tc` writes it: ``100mbit``, ``1gbit``, ``2.5gbit``.

    Raises:
        SpecError: it is not such a rate.
    """
    match = _RATE.fullmatch(rate)
    if match is None or float(match[1]) == 0:
        raise SpecError(f"a link's rate is a number and kbit, mbit or gbit, as in 1gbit; got {rate!r}")
    return float(match[1]) * _SCALE[match[2].lower()]


def setup_commands(switch: str, hosts: Sequence[str], rate: str | None) -> list[Command]:
    """The commands that create and join the namespaces, in order.

    Args:
        switch, hosts: names of the namespaces.
        rate: see `Hosts`.
    """
    commands: list[Command] = [("ip", "netns", "add", name) for name in (switch, *hosts)]
    commands += [("ip", "netns", "exec", name, "sh", "-c", _NO_IPV6) for name in (switch, *hosts)]
    commands += [
        ("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0"),
        ("ip", "-n", switch, "link", "set", "bridge", "up"),
    ]
    for number, host in enumerate(hosts):
        port = f"port{number}"
        peer = ("peer", "name", INTERFACE, "netns", host)
        commands.append(("ip", "-n", switch, "link", "add", port, "type", "veth", *peer))
        for namespace, end in ((switch, port), (host, INTERFACE)):
            commands.append(("ip", "-n", namespace, "link", "set", end, "addrgenmode", "none"))
            commands += _shape_commands(namespace, end, rate)
        commands += [
            ("ip", "-n", switch, "link", "set", port, "master", "bridge", "up"),
            ("ip", "-n", host, "address", "add", f"{_ADDRESS.format(number + 1)}/24", "dev", INTERFACE),
            ("ip", "-n", host, "link", "set", INTERFACE, "up"),
            ("ip", "-n", host, "link", "set", "lo", "up"),
        ]
    return commands


def _shape_commands(namespace: str, interface: str, rate: str | None) -> list[Command]:
    """Let an interface send no faster than a rate; None for no limit.

    The kernel hands on TCP in packets of up to 64 KiB (generic segmentation offload). tbf cuts a packet that is
    larger than its bucket into frames; those overtake each other between processors, TCP takes that for loss, and
    both directions together carry half the rate. So a packet is a quarter of the bucket at most.
    """
    if rate is None:
        return []
    bucket = max(_BUCKET_BYTES, int(rate_bps(rate) / 8 * _BUCKET_S))
    packet = str(min(_BUCKET_BYTES, bucket // 4))
    place = ("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root")
    return [
        ("ip", "-n", namespace, "link", "set", interface, "gso_max_size", packet),
        (*place, "tbf", "rate", rate, "burst", str(bucket), "latency", "50ms"),
    ]


class Hosts:
    """Emulated hosts, which exist while the context lasts.

    Args:
        number: of hosts.
        rate: of each direction of each link, as `tc` writes it (``1gbit``); None leaves links unshaped.

    Attributes:
        names: of the hosts' namespaces.
        addresses: of their `eth0`.

    Raises:
        SpecError: there is no such rate, or too many hosts.
        HostsError: on entering, where this machine cannot have them, with the reason.
    """

    def __init__(self, number: int, rate: str | None = None) -> None:
        if not 1 <= number <= MOST:
            raise SpecError(f"from 1 to {MOST} hosts can be made, got {number}")
        if rate is not None:
            rate_bps(rate)
        prefix = f"bench-{os.getpid()}-{_start_ticks(os.getpid())}-{next(_numbers)}"
        self._switch = f"{prefix}-switch"
        self.names = tuple(f"{prefix}-host{i}" for i in range(number))
        self.addresses = tuple(_ADDRESS.format(i + 1) for i in range(number))
        self._commands = setup_commands(self._switch, self.names, rate)
        self._remover: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Hosts:
        missing = _missing_requirement()
        if missing is not None:
            raise HostsError(missing)
        remove_stale()
        self._remover = _start_remover([self._switch, *self.names])
        try:
            for command in self._commands:
                _run_command(command)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._remover is not None:
            # A line, not the end of the pipe, which a forked child may hold open.
            self._remover.communicate(b"\n")
            self._remover = None

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on a host; `ip` replaces itself by that program."""
        return [tool("ip"), "netns", "exec", self.names[host], *arguments]


@contextlib.contextmanager
def make_hosts(count: int, rate: str | None) -> Iterator[Hosts | None]:
    """`Hosts`; None for 0 of them: processes are then on this machine and its loopback."""
    if not count:
        yield None
        return
    with Hosts(count, rate) as made:
        yield made


def unavailable() -> str | None:
    """Why hosts cannot be made on this machine, in one line; None where one could be made."""
    try:
        with Hosts(1, "1gbit"):
            return None
    except HostsError as error:
        return str(error)


def namespaces() -> list[str]:
    """The machine's named network namespaces."""
    return sorted(path.name for path in _NETNS.iterdir()) if _NETNS.is_dir() else []


def remove_stale() -> list[str]:
    """Remove the namespaces of owners that have ended; returns their names."""
    stale = [
        name
        for name in namespaces()
        if (match := _NAME.fullmatch(name)) and match[2] != _start_ticks(int(match[1]))
    ]
    if stale:
        _start_remover(stale).communicate(b"\n")
    return stale


def _missing_requirement() -> str | None:
    if sys.platform != "linux":
        return f"hosts in network namespaces need Linux, this is {sys.platform}"
    absent = [name for name in ("ip", "tc") if not os.path.isabs(tool(name))]
    if absent:
        return f"hosts in network namespaces need {' and '.join(absent)} (package iproute2)"
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    return None


def _start_remover(names: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sh", "-c", _REMOVE_SCRIPT, "sh", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,  # a signal from the terminal must not end it
    )


def _run_command(command: Command) -> None:
    """Raises HostsError: the command failed."""
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise HostsError(f"no hosts in network namespaces here: {' '.join(command)}: {reason}")


def tool(name: str) -> str:
    """A program's path; its name where it is not found."""
    return shutil.which(name, path=_environment()["PATH"]) or name


def _environment() -> dict[str, str]:
    """With the directories of `ip` and `tc`, which a user's path often lacks."""
    return {**os.environ, "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"}


def _start_ticks(pid: int) -> str | None:
    """A process's start, in clock ticks since boot (proc_pid_stat(5)); None where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None
