"""The links of the study: this machine's loopback, or hosts in network namespaces joined at a rate."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

from benchmarks.launch.hosts import MOST, Hosts, make_hosts, rate_bps
from benchmarks.launch.ranks import contiguous
from ensemble.spec import SpecError

_TEXT = re.compile(r"(\d+)x(\d+)@(\w[\w.]*)")
_MTU = 1500
# Bytes of an Ethernet header, and of those of IPv4 and TCP with timestamps in each frame's payload.
_HEADER, _IN_FRAME = 14, 52


@dataclass(frozen=True, kw_only=True)
class Link:
    """How ranks are joined.

    Attributes:
        hosts: in namespaces of their own; 1 is this machine and its loopback.
        ranks: of each host.
        rate: of each direction of each host's link, as `tc` writes it; None for no limit.
    """

    hosts: int = 1
    ranks: int = 4
    rate: str | None = None

    @property
    def is_emulated(self) -> bool:
        """Whether its hosts are network namespaces."""
        return self.hosts > 1

    @property
    def placement(self) -> list[int]:
        """The host of each rank: neighbouring ranks are on one host."""
        return contiguous(self.hosts * self.ranks, self.hosts)

    @property
    def name(self) -> str:
        """Such as "loopback, 4 ranks", "1gbit, 2 x 2 ranks"."""
        if not self.is_emulated:
            return f"loopback, {self.ranks} ranks"
        return f"{self.rate or 'unlimited'}, {self.hosts} x {self.ranks} ranks"

    @property
    def payload_bps(self) -> float | None:
        """Bytes of messages that one direction takes in a second: the rate without the frames' headers."""
        if self.rate is None:
            return None
        return rate_bps(self.rate) / 8 * (_MTU - _IN_FRAME) / (_MTU + _HEADER)

    def make_hosts(self) -> contextlib.AbstractContextManager[Hosts | None]:
        """The emulated hosts, while the context lasts; None where there are none to make."""
        return make_hosts(self.hosts if self.is_emulated else 0, self.rate)


def parse_link(text: str) -> Link:
    """A link from its description: ``2x2@1gbit``, two hosts of two ranks; or ``loopback``.

    Raises:
        SpecError: it is not such a description.
    """
    if text == "loopback":
        return Link()
    match = _TEXT.fullmatch(text)
    if match is None or not 2 <= int(match[1]) <= MOST or int(match[2]) < 1:
        raise SpecError(
            f"a link is loopback, or HOSTSxRANKS@RATE with at least two hosts, as in 2x2@1gbit; got {text!r}"
        )
    rate = None if match[3] == "unlimited" else match[3]
    if rate is not None:
        rate_bps(rate)
    return Link(hosts=int(match[1]), ranks=int(match[2]), rate=rate)
