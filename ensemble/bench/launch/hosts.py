"""Emulates several hosts on one machine: network namespaces joined by links of a chosen rate.

A **network namespace** is a machine's network by itself: its own interfaces, addresses, loopback and counters.
A **veth pair** is a cable, an interface at either end; a **bridge** is a switch. `tbf`, the token bucket filter,
lets an interface send no faster than a rate. Each host here is a namespace whose `eth0` is the one end of a veth
pair; the other ends are ports of a bridge in a namespace of its own: the machine's own network sees none of it.
Both ends of each pair are shaped, as a network card and a switch port are. A delay is the kernel's (`netem`)
where it has it; else a process takes the bridge's place (`relay`). A host's loopback is neither shaped nor
delayed. Files, Unix sockets, processor and memory are the machine's, and common to all hosts.

A small process holds the read end of a pipe and removes the namespaces, with all their processes, when it reads a
line or its parent has ended, killed or not. If that process is killed too, the next `Hosts` removes the namespaces
of owners that have ended: their names hold the owner's process id.

Linux, root and `ip` and `tc` of iproute2 are needed; `unavailable` returns what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Traffic:
    """Bytes at a host's interface since it was made: whole Ethernet frames, acknowledgements included."""

    sent: int
    received: int


def rate_bps(rate: str) -> float:
    """Bits per second of a rate as `tc` writes it: ``100mbit``, ``1gbit``, ``2.5gbit``.

    Raises:
        SpecError: it is not such a rate.
    """
    found = _RATE.fullmatch(rate)
    if found is None or float(found[1]) == 0:
        raise SpecError(f"a link's rate is a number and kbit, mbit or gbit, as in 1gbit; got {rate!r}")
    return float(found[1]) * _SCALE[found[2].lower()]


def setup_commands(
    switch: str,
    hosts: Sequence[str],
    rate: str | None,
    mtu: int,
    delay_s: float | None = None,
    delayed_by: str = "netem",
) -> list[Command]:
    """The commands that create and join the namespaces, in order.

    Args:
        switch, hosts: names of the namespaces.
        rate, mtu, delay_s: see `Hosts`.
        delayed_by: "netem" or "relay", which passes frames on between ports that are in no bridge.
    """
    is_relayed = delay_s is not None and delayed_by == "relay"
    commands: list[Command] = [("ip", "netns", "add", name) for name in (switch, *hosts)]
    commands += [("ip", "netns", "exec", name, "sh", "-c", _NO_IPV6) for name in (switch, *hosts)]
    commands += [
        ("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0"),
        ("ip", "-n", switch, "link", "set", "bridge", "up"),
    ]
    for number, host in enumerate(hosts):
        port = f"port{number}"
        ends = ((switch, port), (host, INTERFACE))
        delays = (None, None if is_relayed else delay_s)  # a host's, on its way out
        peer = ("peer", "name", INTERFACE, "netns", host)
        commands.append(("ip", "-n", switch, "link", "add", port, "type", "veth", *peer))
        commands += [
            ("ip", "-n", ns, "link", "set", end, "mtu", str(mtu), "addrgenmode", "none") for ns, end in ends
        ]
        for (ns, end), delay in zip(ends, delays, strict=True):
            commands += _shape_commands(ns, end, rate, delay)
        commands += [
            ("ip", "-n", switch, "link", "set", port, *(() if is_relayed else ("master", "bridge")), "up"),
            ("ip", "-n", host, "address", "add", f"{_ADDRESS.format(number + 1)}/24", "dev", INTERFACE),
            ("ip", "-n", host, "link", "set", INTERFACE, "up"),
            ("ip", "-n", host, "link", "set", "lo", "up"),
        ]
    return commands


def _shape_commands(namespace: str, interface: str, rate: str | None, delay_s: float | None) -> list[Command]:
    """Let an interface send no faster than a rate, and what it sends arrive after a delay; None for neither.

    The kernel hands on TCP in packets of up to 64 KiB (generic segmentation offload). tbf cuts a packet that is
    larger than its bucket into frames; those overtake each other between processors, TCP takes that for loss, and
    both directions together carry half the rate. So a packet is a quarter of the bucket at most.
    """
    commands: list[Command] = []
    add = ("tc", "-n", namespace, "qdisc", "add", "dev", interface)
    place: Command = ("root", "handle", "1:")
    if delay_s is not None:
        commands.append((*add, *place, "netem", "delay", f"{delay_s * 1e6:.0f}us", "limit", "1000000"))
        place = ("parent", "1:1", "handle", "2:")
    if rate is not None:
        bucket = max(_BUCKET_BYTES, int(rate_bps(rate) / 8 * _BUCKET_S))
        packet = str(min(_BUCKET_BYTES, bucket // 4))
        commands.append(("ip", "-n", namespace, "link", "set", interface, "gso_max_size", packet))
        commands.append((*add, *place, "tbf", "rate", rate, "burst", str(bucket), "latency", "50ms"))
    return commands


@functools.cache
def delayed_by() -> str:
    """What delays frames on this machine: "netem" where the kernel has it, else "relay"."""
    probe = [tool("unshare"), "--net", tool("tc"), "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    with contextlib.suppress(OSError):
        return "relay" if subprocess.run(probe, capture_output=True, check=False).returncode else "netem"
    return "relay"


class Hosts:
    """Emulated hosts, which exist while the context lasts.

    Examples:
        >>> with Hosts(2, "1gbit") as hosts:  # doctest: +SKIP
        ...     subprocess.run(hosts.command(0, ["ping", "-c", "1", hosts.addresses[1]]), check=True)

    Args:
        number: of hosts.
        rate: of each direction of each link, as `tc` writes it (``1gbit``); None leaves links unshaped.
        mtu: bytes of an Ethernet frame's payload.
        delay_s: of each frame from host to host, besides its time at the rate; None for no delay.

    Attributes:
        names: of the hosts' namespaces.
        addresses: of their `eth0`.

    Raises:
        SpecError: there is no such rate, or too many hosts.
        HostsError: on entering, where this machine cannot have them, with the reason.
    """

    def __init__(
        self, number: int, rate: str | None = None, *, mtu: int = 1500, delay_s: float | None = None
    ) -> None:
        if not 1 <= number <= MOST:
            raise SpecError(f"from 1 to {MOST} hosts can be made, got {number}")
        if rate is not None:
            rate_bps(rate)
        prefix = f"bench-{os.getpid()}-{_start_ticks(os.getpid())}-{next(_numbers)}"
        self._switch = f"{prefix}-switch"
        self.names = tuple(f"{prefix}-host{i}" for i in range(number))
        self.addresses = tuple(_ADDRESS.format(i + 1) for i in range(number))
        how = "netem" if delay_s is None else delayed_by()
        self._commands = setup_commands(self._switch, self.names, rate, mtu, delay_s, how)
        self._relay_s = delay_s if how == "relay" else None
        self._relay: subprocess.Popen[bytes] | None = None
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
            if self._relay_s is not None:
                self._relay = _start_relay(self._switch, self._relay_s, len(self.names))
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
        if self._relay is not None:  # it has ended with its namespace, unless the remover had been killed
            self._relay.kill()
            self._relay.communicate()
            self._relay = None

    def lost_frames(self) -> int | None:
        """Frames that the relay has lost; None where there is no relay."""
        if self._relay is None:
            return None
        assert self._relay.stdin is not None and self._relay.stdout is not None
        self._relay.stdin.write(b"\n")
        self._relay.stdin.flush()
        return int(self._relay.stdout.readline())

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on a host; `ip` replaces itself by that program."""
        return [tool("ip"), "netns", "exec", self.names[host], *arguments]

    def traffic(self, host: int) -> Traffic:
        """The counters of a host's `eth0`."""
        (shown,) = json.loads(
            _run_command(("ip", "-json", "-stats", "-n", self.names[host], "link", "show", INTERFACE))
        )
        counted = shown["stats64"]
        return Traffic(counted["tx"]["bytes"], counted["rx"]["bytes"])


@contextlib.contextmanager
def make_hosts(
    count: int, rate: str | None, mtu: int = 1500, delay_s: float | None = None
) -> Iterator[Hosts | None]:
    """`Hosts`; None for 0 of them: processes are then on this machine and its loopback."""
    if not count:
        yield None
        return
    with Hosts(count, rate, mtu=mtu, delay_s=delay_s) as made:
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
        if (found := _NAME.fullmatch(name)) and found[2] != _start_ticks(int(found[1]))
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


def _start_relay(switch: str, delay_s: float, ports: int) -> subprocess.Popen[bytes]:
    """Start the relay in the switch's namespace, with which it is ended."""
    interfaces = [f"port{number}" for number in range(ports)]
    program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("relay.py")), str(delay_s), *interfaces]
    process = subprocess.Popen(
        [tool("ip"), "netns", "exec", switch, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = process.stdout.readline().decode(errors="replace").strip()
    if said != "ready":
        process.communicate()
        raise HostsError(f"no relay between hosts: {said}")
    return process


def _run_command(command: Command) -> str:
    """Raises HostsError: the command failed."""
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise HostsError(f"no hosts in network namespaces here: {' '.join(command)}: {reason}")
    return done.stdout


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
