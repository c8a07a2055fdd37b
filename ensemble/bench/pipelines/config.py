"""One configuration of the pipelines study, which its processes pass to their children."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass

from ensemble.bench.launch.hosts import INTERFACE
from pipelines import Pipeline, sources, stages
from pipelines.sources import Source

BARE = "bare ring"
LOADER, DATALOADER = "loader", "dataloader"
# Every member prepares for itself, which takes many times as long: fewer samples, and one run beside others.
ALONE = ("independent", LOADER, DATALOADER)
DESIGNS = (BARE, "node", "independent")
# Designs with one stream for all nodes (`pipelines.multinode.designs`).
ACROSS = ("single", "multi", "all", "auto")

LOOPBACK = "loopback"
EMULATED, MODEL = "emulated", "model"
RING_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Config:
    """One configuration of the study, and the node that a process of it is on.

    Attributes:
        design: which processes prepare and send.
        members: reading processes, on all nodes; node i has the members i, i + nodes, i + 2 nodes ...
        prep_workers: preparation processes, of each node or of each independent member.
        cores: to which everything is pinned together; None pins nothing.
        batch_size, samples: of each member; samples at least, after its first batch, in whole epochs.
        step: what a member does with a batch: "emulated", a timed wait of `step_ms` that uses no CPU, for an
            accelerator; or "model", the forward and backward pass of a small net.
        data: a tar archive of JPEG photographs, or a Parquet file with the column image.
        size: pixels of a side after decoding.  crop: whether a random part is resized, as in training.
        nodes: how many.  link: the rate of their links, None for no limit, or "loopback".
        mtu: bytes of an Ethernet frame's payload on the links.
        node: this process's number.  address: of the node's feeder, in designs that share one.
        meeting: the directory in which feeders find each other, in designs across nodes.
    """

    design: str
    members: int
    prep_workers: int
    cores: int | None
    samples: int
    step: str
    step_ms: float
    data: str
    batch_size: int = 32
    size: int = 224
    crop: bool = False
    nodes: int = 1
    link: str | None = None
    mtu: int = 1500
    node: int = 0
    address: str | None = None
    meeting: str | None = None

    @property
    def has_shared_feeder(self) -> bool:
        """Whether the members of a node read one feeder."""
        return self.design != BARE and self.design not in ALONE

    @property
    def interface(self) -> str:
        """The network interface to the other nodes."""
        return "lo" if self.link == LOOPBACK else INTERFACE

    @property
    def local_members(self) -> range:
        """The members of this node."""
        return range(self.node, self.members, self.nodes)

    def pipeline(self) -> Pipeline:
        """The images, decoded; epochs of all of them, in an order of their own each."""
        return read_images(self.data, self.size, crop=self.crop)

    def epochs(self, pipeline: Pipeline) -> range:
        """The epochs that hold `samples` after the first batch, at which the clock starts."""
        return range(-(-(self.samples + self.batch_size) // len(pipeline)))

    def capacity(self) -> int:
        """Slots of every ring: eight batches."""
        return RING_BATCHES * self.batch_size

    def to_json(self) -> str:
        """The configuration for a child's command line."""
        return json.dumps(dataclasses.asdict(self))


def read_images(data: str, size: int, *, crop: bool = False) -> Pipeline:
    """Images of `size` pixels a side; see `Config`."""
    is_table = data.endswith(".parquet")
    renamed = {"jpeg": "image", "jpg": "image"}
    source: Source = sources.parquet(data, columns=("image",)) if is_table else sources.tar(data, rename=renamed)
    resize = stages.random_resized_crop("image", size) if crop else stages.resize("image", size)
    return Pipeline(source, seed=0).map(stages.decode_jpeg("image")).map(resize).map(stages.select("image"))


def send_message(kind: str, number: int, text: str = "") -> None:
    """Send a line to the study: all processes of a node share its node process's standard output.

    "producer PID" of a process that prepares samples, "parent PID" of one whose descendants do; "first MEMBER MS"
    with its first batch, and the milliseconds from the start of its reader; "last MEMBER STEP_MS DEVICE" after its
    last one; "died -1 PROCESS: REASON"; "feeder NODE JSON" with its group's final report (`node.group_report`).
    """
    with contextlib.suppress(BrokenPipeError):  # the study has ended
        os.write(1, f"{kind} {number} {text}\n".encode())  # one write: atomic below PIPE_BUF
