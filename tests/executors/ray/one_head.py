"""A Ray head alone, for clients in an environment of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from started_cluster import make_cluster


@contextlib.contextmanager
def start_head(environment: Mapping[str, str], options: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Start one with pairs of options; yields what its clients' environment needs."""
    with make_cluster() as cluster:
        pairs = zip(options[::2], options[1::2], strict=True)
        cluster.start(variables=environment, **{name.removeprefix("--"): value for name, value in pairs})
        yield cluster.find_variables()
