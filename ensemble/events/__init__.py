"""The events of a run's log: their types, their fields, and their form as JSON.

An event is one line of `events.jsonl`, which `ensemble.store.event_log` writes. Its class is its schema: fields
are read and checked by it, and the tables of docs/reference/events.md are made from it (`SECTIONS`, docstrings).

A field that has its default is not written. Objects inside events whose keys users choose (hyperparameters,
metrics, options) are plain dicts. Unknown fields of a known type are left out; an event of an unknown type is an
`Unknown`.
"""

from ensemble.events.base import *  # noqa: F403
from ensemble.events.codec import *  # noqa: F403
from ensemble.events.members import *  # noqa: F403
from ensemble.events.nodes import *  # noqa: F403
from ensemble.events.run import *  # noqa: F403
from ensemble.events.streams import *  # noqa: F403
from ensemble.events.usage import *  # noqa: F403
