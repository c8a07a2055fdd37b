"""One configuration of the pipelines study, as the study's own process and all its children know it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass

from ensemble.bench.launch.hosts import INTERFACE
from pipelines import Pipeline, sources, stages

BARE = "bare ring"
DATALOADER = "dataloader"
# Every member prepares for itself: that takes many times as long, so it is done once and with fewer samples.
ALONE = ("independent", DATALOADER)
DESIGNS = (BARE, "node", "independent")
# One stream for all nodes (`pipelines.multinode.designs`).
ACROSS = ("single", "multi", "all", "auto")

LOOPBACK = "loopback"
EMULATED, MODEL = "emulated", "model"
RING_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Config:
    """One configuration of the study, and the node that a process of it is on.

    Attributes:
        design: who prepares and who sends.
        members: processes that read, on all nodes; node i has the members i, i + nodes, i + 2 nodes ...
        prep_workers: preparation processes, of each node or of each independent member.
        cores: to which everything is pinned together; None pins nothing.
        batch_size, samples: of each member; samples at least, after its first batch, in whole epochs.
        step: what a member does with a batch: "emulated", a timed wait of `step_ms` that uses no CPU, for an
            accelerator; or "model", the forward and backward pass of a small net.
        data: the tar archive of JPEG photographs.  size: pixels of a side after decoding.
        nodes: how many.  link: the rate of their links, None for no limit, or "loopback".
        mtu: bytes of an Ethernet frame's payload on the links.
        preparers: of `nodes`, in designs that say how many; None leaves it to the design.
        node: this process's.  address: of its feeder, for designs that share.
        meeting: the directory where feeders meet, for designs across nodes.
    """

    design: str
    members: int
    prep_workers: int
    cores: int | None
    batch_size: int
    samples: int
    step: str
    step_ms: float
    data: str
    size: int
    nodes: int = 1
    link: str | None = None
    mtu: int = 1500
    preparers: int | None = None
    node: int = 0
    address: str | None = None
    meeting: str | None = None

    @property
    def shares(self) -> bool:
        """Whether members read a feeder that is not their own."""
        return self.design != BARE and self.design not in ALONE

    @property
    def interface(self) -> str:
        """Through which this node reaches the others."""
        return "lo" if self.link == LOOPBACK else INTERFACE

    @property
    def here(self) -> range:
        """The members of this node."""
        return range(self.node, self.members, self.nodes)

    def pipeline(self) -> Pipeline:
        """Photographs to `size` pixels a side; epochs of all photographs, in an order of their own each."""
        renamed = {"jpeg": "image", "jpg": "image"}
        return (
            Pipeline(sources.tar(self.data, rename=renamed), seed=0)
            .map(stages.decode_jpeg("image"))
            .map(stages.resize("image", size=(self.size, self.size)))
            .map(stages.select("image"))
        )

    def epochs(self, pipeline: Pipeline) -> range:
        """As many epochs as hold `samples` after the first batch, with which the clock starts."""
        return range(-(-(self.samples + self.batch_size) // len(pipeline)))

    def capacity(self) -> int:
        """Ring slots, of the bare ring too: eight batches."""
        return RING_BATCHES * self.batch_size

    def to_json(self) -> str:
        """For a child's command line."""
        return json.dumps(dataclasses.asdict(self))


def say(word: str, number: int, text: str = "") -> None:
    """A line to the study: all processes of a node share its host process's standard output.

    "producer PID", "first MEMBER" when it holds its first batch, "last MEMBER STEP_MS WHERE" after its last one,
    "died -1 WHO: WHY", "feeder NODE JSON" with what it said of its group.
    """
    with contextlib.suppress(BrokenPipeError):  # the study has ended: nobody listens any more
        os.write(1, f"{word} {number} {text}\n".encode())  # at once, and whole: less than a pipe takes in one go
