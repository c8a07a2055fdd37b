"""The private API of Hugging Face `datasets` that this package uses; no other module uses any.

Checked with the versions in `CHECKED_WITH`. With any other, `tests/test_compat.py` fails and lists the names to
look at; `tests/pipelines/test_sources_huggingface.py` fails when they have changed.
"""

from __future__ import annotations

from typing import Any

CHECKED_WITH = ("5.2.0",)


def get_indices(dataset: Any) -> Any:
    """The rows of `dataset.data` that a Dataset consists of, as a chunked Arrow array; None if it has all, in
    order.

    `select`, `shuffle`, `filter`, `sort` make such a mapping.

    Unnecessary with: a public property for `Dataset._indices`.
    """
    indices = dataset._indices
    return None if indices is None else indices.column(0)
