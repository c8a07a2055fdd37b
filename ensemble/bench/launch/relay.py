"""Passes Ethernet frames on between interfaces after a delay, where the kernel has no netem.

A program: `python relay.py DELAY_S INTERFACE...`, in the namespace that has these interfaces; it writes a line
when it is ready, and runs until its input ends. For each line of input it writes how many frames it has lost so
far, since one that loses makes TCP slow: those for which the kernel had no room, on their way in or out.

It does what a switch does, with packet sockets (packet(7)): it learns behind which interface an address is, and
sends a frame to an unknown one, or to all, through all other interfaces. With each frame it takes over the
kernel's description of it (struct virtio_net_hdr), so that what TCP hands on in 64 KiB passes in one piece, and
checksums are left to the receiver as on any virtual link.

It has the priority of a device (sched(7), SCHED_RR) where that is permitted. Its rate is limited by one core; see
`docs/studies/fabric.md`. It imports nothing of this project, and starts in 30 ms.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence

_SOL_PACKET, _STATISTICS, _VNET_HDR, _IGNORE_OUTGOING = 263, 6, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ETH_P_ALL = 3
_BUFFER_BYTES = 64 * 2**20
_DESCRIPTION = 10  # bytes of a virtio_net_hdr
_LARGEST = _DESCRIPTION + 14 + 65536
_AT_ONCE = 32  # frames that are read from an interface before others are looked at


def open_port(interface: str) -> socket.socket:
    """A socket that gets all frames that arrive at an interface."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    port.setblocking(False)
    port.bind((interface, _ETH_P_ALL))
    return port


def relay(ports: Sequence[socket.socket], delay_s: float) -> None:
    """Pass frames on until the input ends."""
    lost = 0
    behind: dict[bytes, socket.socket] = {}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable = select.select([*ports, sys.stdin], [], [], left)[0]
        if sys.stdin in readable:
            if not sys.stdin.readline():
                return
            lost += sum(count_drops(port) for port in ports)
            print(lost, flush=True)
        for port in (port for port in ports if port in readable):
            with contextlib.suppress(OSError):  # there are no more, or the interface is down
                for _ in range(_AT_ONCE):
                    frame = port.recv(_LARGEST)
                    behind[frame[_DESCRIPTION + 6 : _DESCRIPTION + 12]] = port
                    waiting.append((time.monotonic() + delay_s, port, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, origin, frame = waiting.popleft()
            known = behind.get(frame[_DESCRIPTION : _DESCRIPTION + 6])
            for port in (known,) if known is not None else ports:
                if port is not origin:
                    try:
                        port.send(frame)
                    except OSError:  # no room: lost, as in a switch
                        lost += 1


def count_drops(port: socket.socket) -> int:
    """Frames that a socket had no room for, since it was asked before."""
    _, dropped = struct.unpack("II", port.getsockopt(_SOL_PACKET, _STATISTICS, 8))
    return int(dropped)


def main() -> None:
    """Relay between the interfaces of the command line."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    ports = [open_port(interface) for interface in sys.argv[2:]]
    print("ready", flush=True)
    relay(ports, float(sys.argv[1]))


if __name__ == "__main__":
    main()
