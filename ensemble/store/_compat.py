"""The private API of cloudpickle that this package uses; no other module uses any.

Checked with the versions in `CHECKED_WITH`. With any other, `tests/test_compat.py` fails and lists the names to
look at; `tests/store/test_store_frozen_arrays.py` shows what they do.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

CHECKED_WITH = ("3.1.2",)


@contextlib.contextmanager
def make_classes_anew() -> Iterator[None]:
    """Within the context, unpickling makes classes also where this process has pickled them by value.

    cloudpickle takes its own ones else, which are found in their modules, and are pickled by reference again.

    Unnecessary with: an option of cloudpickle for it.
    """
    from cloudpickle import cloudpickle

    tracker = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
    cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID = weakref.WeakValueDictionary()
    try:
        yield
    finally:
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID = tracker


def find_class_by_value(module: str, name: str) -> type | None:
    """Return the class of this qualified name that this process has pickled, or unpickled, by value last.

    Unnecessary with: pickles in which such a class is named, as one of an installed module is.
    """
    from cloudpickle import cloudpickle

    classes = reversed(list(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values()))
    return next((one for one in classes if (one.__module__, one.__qualname__) == (module, name)), None)
