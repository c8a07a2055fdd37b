"""Sources of records.

Each function here makes a `Source`: records by index, each a dict of raw values (bytes of an image, a text, a
number), which `split` and `take` divide. It is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.providers import Providers
from pipelines.sources._base import Source
from pipelines.sources._subset import Subset

if TYPE_CHECKING:
    from pipelines.sources._arrays import arrays
    from pipelines.sources._concat import concat
    from pipelines.sources._csv import csv
    from pipelines.sources._dataset import dataset
    from pipelines.sources._flat_map import flat_map
    from pipelines.sources._hdf5 import hdf5
    from pipelines.sources._huggingface import huggingface
    from pipelines.sources._images import image_folder
    from pipelines.sources._iterable import iterable
    from pipelines.sources._jsonl import jsonl
    from pipelines.sources._memmap import memmap
    from pipelines.sources._pack import pack
    from pipelines.sources._parquet import parquet
    from pipelines.sources._tar import tar
    from pipelines.sources._windows import windows
    from pipelines.sources._with_fields import with_fields

#: name -> function that makes a source; those of other distributions are attributes of this package as well.
SOURCES = Providers(
    "sources",
    {
        "arrays": "pipelines.sources._arrays:arrays",
        "concat": "pipelines.sources._concat:concat",
        "csv": "pipelines.sources._csv:csv",
        "dataset": "pipelines.sources._dataset:dataset",
        "flat_map": "pipelines.sources._flat_map:flat_map",
        "hdf5": "pipelines.sources._hdf5:hdf5",
        "huggingface": "pipelines.sources._huggingface:huggingface",
        "image_folder": "pipelines.sources._images:image_folder",
        "iterable": "pipelines.sources._iterable:iterable",
        "jsonl": "pipelines.sources._jsonl:jsonl",
        "memmap": "pipelines.sources._memmap:memmap",
        "pack": "pipelines.sources._pack:pack",
        "parquet": "pipelines.sources._parquet:parquet",
        "tar": "pipelines.sources._tar:tar",
        "windows": "pipelines.sources._windows:windows",
        "with_fields": "pipelines.sources._with_fields:with_fields",
    },
)

__all__ = [
    "Source", "Subset", "arrays", "concat", "csv", "dataset", "flat_map", "hdf5", "huggingface", "image_folder",
    "iterable", "jsonl", "memmap", "pack", "parquet", "tar", "windows", "with_fields",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    value = globals()[name] = SOURCES.load_attribute(__name__, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *SOURCES.names()})
