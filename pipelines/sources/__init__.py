"""Sources of records.

`arrays`, `dataset`, `image_folder`, `parquet` and `tar` each make a `Source`: records by index, each a dict of raw
values (bytes of an image, a text, a number), which `split` and `take` divide.
"""

from pipelines.sources._arrays import arrays
from pipelines.sources._base import Source, Subset
from pipelines.sources._dataset import dataset
from pipelines.sources._images import image_folder
from pipelines.sources._parquet import parquet
from pipelines.sources._tar import tar

__all__ = ["Source", "Subset", "arrays", "dataset", "image_folder", "parquet", "tar"]
