"""Who is told when a run has ended: addresses of webhooks.

They are a parameter of `submit` and `resume`, and no part of the declaration: an address may hold a token, and
what is declared is kept in the run directory.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from ensemble.spec.validation import SpecError


def resolve_notify(addresses: Any) -> tuple[str, ...]:
    """Returns the addresses that are told.

    Args:
        addresses: None, an address, or a list of them.

    Raises:
        SpecError: one is no address; the message does not hold it, as it may have a token.
    """
    several = () if addresses is None else [addresses] if isinstance(addresses, str) else addresses
    if not isinstance(several, (list, tuple)) or not all(map(_is_web_address, several)):
        raise SpecError("notify= must be an address that begins with http:// or https://, or a list of them")
    return tuple(several)


def _is_web_address(url: object) -> bool:
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        return parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False
