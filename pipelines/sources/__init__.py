"""Sources of records.

Each function here makes a `Source`: records by index, each a dict of raw values (bytes of an image, a text, a
number), which `split` and `take` divide.
"""

from pipelines.sources._arrays import arrays
from pipelines.sources._base import Source, Subset
from pipelines.sources._csv import csv
from pipelines.sources._dataset import dataset
from pipelines.sources._hdf5 import hdf5
from pipelines.sources._huggingface import huggingface
from pipelines.sources._images import image_folder
from pipelines.sources._iterable import iterable
from pipelines.sources._jsonl import jsonl
from pipelines.sources._memmap import memmap
from pipelines.sources._parquet import parquet
from pipelines.sources._tar import tar
from pipelines.sources._windows import windows

__all__ = [
    "Source",
    "Subset",
    "arrays",
    "csv",
    "dataset",
    "hdf5",
    "huggingface",
    "image_folder",
    "iterable",
    "jsonl",
    "memmap",
    "parquet",
    "tar",
    "windows",
]
