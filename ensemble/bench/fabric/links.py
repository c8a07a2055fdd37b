"""The links of the study: this machine's loopback, or hosts in network namespaces joined at a rate."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any

from ensemble.bench.launch.hosts import INTERFACE, MOST, Hosts, make_hosts, rate_bps
from ensemble.bench.launch.ranks import LOOPBACK, contiguous, interleaved
from ensemble.spec import SpecError, unknown_name
from ensemble.spec.validation import check_choice

_PLACEMENTS = {"contiguous": contiguous, "interleaved": interleaved}
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms)")
_MS = {"us": 1e-3, "ms": 1.0}
# Bytes of an Ethernet header, and of those of IPv4 and TCP with timestamps in each frame's payload.
_HEADER, _IN_FRAME = 14, 52


@dataclass(frozen=True, kw_only=True)
class Link:
    """How ranks are joined.

    Attributes:
        hosts: in namespaces of their own; 1 is this machine and its loopback.
        ranks: of each host.
        rate: of each direction of each host's link, as `tc` writes it; None for no limit.
        delay_ms: of each frame from host to host, where hosts are emulated; None for no delay.
        mtu: bytes of a frame's payload.
        place: how ranks lie on emulated hosts: "contiguous" or "interleaved".
        through: the interface between existing machines; None where hosts are emulated, or there is one.
        given: the host of each rank on existing machines.
    """

    hosts: int = 1
    ranks: int = 4
    rate: str | None = None
    delay_ms: float | None = None
    mtu: int = 1500
    place: str = "contiguous"
    through: str | None = None
    given: tuple[int, ...] = ()

    @property
    def is_emulated(self) -> bool:
        """Whether its hosts are network namespaces."""
        return self.hosts > 1 and self.through is None

    @property
    def interface(self) -> str:
        """Through which ranks reach each other."""
        return self.through or (INTERFACE if self.is_emulated else LOOPBACK)

    @property
    def placement(self) -> list[int]:
        """The host of each rank."""
        if self.given:
            return list(self.given)
        return _PLACEMENTS[self.place](self.hosts * self.ranks, self.hosts)

    @property
    def name(self) -> str:
        """Such as "loopback, 4 ranks", "1gbit + 5 ms, 2 x 2 ranks interleaved"."""
        if self.through is not None:
            return f"{self.through}, {len(self.given)} ranks on {self.hosts} host{'s' * (self.hosts > 1)}"
        if not self.is_emulated:
            return f"loopback, {self.ranks} ranks"
        late = f" + {self.delay_ms:g} ms" if self.delay_ms is not None else ""
        name = f"{self.rate or 'unlimited'}{late}, {self.hosts} x {self.ranks} ranks"
        name += " interleaved" if self.place == "interleaved" and self.ranks > 1 else ""
        return name + (f", mtu {self.mtu}" if self.mtu != 1500 else "")

    @property
    def payload_bps(self) -> float | None:
        """Bytes of messages that one direction takes in a second: the rate without the frames' headers."""
        if self.rate is None:
            return None
        return rate_bps(self.rate) / 8 * (self.mtu - _IN_FRAME) / (self.mtu + _HEADER)

    @property
    def delay_s(self) -> float:
        """Of each message from host to host."""
        return (self.delay_ms or 0.0) / 1e3

    def make_hosts(self) -> contextlib.AbstractContextManager[Hosts | None]:
        """The emulated hosts, while the context lasts; None where there are none to make."""
        delay_s = self.delay_ms / 1e3 if self.delay_ms is not None else None
        return make_hosts(self.hosts if self.is_emulated else 0, self.rate, self.mtu, delay_s)


def existing_link(interface: str, placement: tuple[int, ...], rate: str | None) -> Link:
    """The link between existing machines.

    Args:
        placement: the machine of each rank, by number.
        rate: of each machine's link, where it is known.

    Raises:
        SpecError: there is no such rate.
    """
    if rate is not None:
        rate_bps(rate)
    return Link(hosts=max(placement) + 1, rate=rate, through=interface, given=placement)


def parse_link(text: str) -> Link:
    """A link from its description: ``hosts=2,ranks=2,rate=1gbit``, perhaps with ``delay=5ms``,
    ``mtu=9000``, ``place=interleaved``.

    Raises:
        SpecError: it is not such a description.
    """
    bounds = {"hosts": (2, MOST), "ranks": (1, 65535), "mtu": (1, 65535)}
    known = (*bounds, "rate", "delay", "place")
    values: dict[str, Any] = {"hosts": 2, "ranks": 2}
    for name, equals, value in (map(str.strip, part.partition("=")) for part in text.split(",")):
        if name not in known:
            raise SpecError(unknown_name("an emulated link has no", name, known))
        if not equals or not value:
            raise SpecError(f"an emulated link's {name} needs a value, as in hosts=2,ranks=2,rate=1gbit")
        if name == "delay":
            if (found := _DELAY.fullmatch(value)) is None:
                raise SpecError(f"an emulated link's delay is a number and us or ms, as in 5ms; got {value!r}")
            values["delay_ms"] = float(found[1]) * _MS[found[2]]
            continue
        values[name] = value
        if name == "rate":
            rate_bps(value)
        elif name == "place":
            check_choice("place=", value, list(_PLACEMENTS))
        else:
            least, most = bounds[name]
            if not value.isdigit() or not least <= int(value) <= most:
                raise SpecError(f"an emulated link's {name} is an integer from {least} to {most}, got {value!r}")
            values[name] = int(value)
    return Link(**values)
