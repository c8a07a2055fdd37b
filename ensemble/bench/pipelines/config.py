"""One configuration of the pipelines study, which its processes pass to their children."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import Any

from pipelines import Pipeline, sources, stages
from pipelines.sources import Source

BARE = "bare ring"
LOADER, DATALOADER = "loader", "dataloader"
# Every member prepares for itself, which takes many times as long: fewer samples, and one run beside others.
ALONE = ("independent", LOADER, DATALOADER)
DESIGNS = (BARE, "node", "independent")
ON_ONE_NODE = (*DESIGNS, LOADER, DATALOADER)
# Designs with one stream for all nodes (`pipelines.multinode.designs`).
ACROSS = ("single", "multi", "all", "auto")
# Of these, those in which some of the nodes may prepare.
WITH_PREPARERS = ("single", "multi")

LOOPBACK = "loopback"
EMULATED, MODEL = "emulated", "model"
RING_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Config:
    """One configuration of the study, and the node that a process of it is on.

    Attributes:
        data: a tar archive of JPEG photographs, or a Parquet file with the column image.
        design: which processes prepare and send.
        members: reading processes, on all nodes; node i has the members i, i + nodes, i + 2 nodes ...
        prep_workers: preparation processes, of each node or of each independent member.
        cores: to which everything is pinned together; None pins nothing.
        batch_size, samples: of each member; samples at least, after its first batch, in whole epochs.
        samples_alone: the same where members prepare for themselves; None: 1,000, but no more than `samples`.
        step: what a member does with a batch: "emulated", a timed wait of `step_ms` that uses no CPU, for an
            accelerator; or "model", the forward and backward pass of a small net.
        size: pixels of a side after decoding.  crop: whether a random part is resized, as in training.
        nodes: how many.  link: the rate of their links, None for no limit, or "loopback".
        preparers: how many of the nodes prepare in the designs "single" and "multi"; None for one and all.
        mtu: bytes of an Ethernet frame's payload on the links.
        node: this process's number.  address: of the node's feeder, in designs that share one.
        meeting: the directory in which feeders find each other, in designs across nodes.
    """

    data: str
    design: str
    members: int
    prep_workers: int = 1
    cores: int | None = None
    samples: int = 5000
    samples_alone: int | None = None
    step: str = EMULATED
    step_ms: float = 0.0
    batch_size: int = 32
    size: int = 224
    crop: bool = False
    nodes: int = 1
    preparers: int | None = None
    link: str | None = None
    mtu: int = 1500
    node: int = 0
    address: str | None = None
    meeting: str | None = None

    @property
    def local_members(self) -> range:
        """The members of this node."""
        return range(self.node, self.members, self.nodes)

    @property
    def capacity(self) -> int:
        """Slots of every ring: eight batches."""
        return RING_BATCHES * self.batch_size

    def pipeline(self) -> Pipeline:
        """The images, decoded; epochs of all of them, in an order of their own each."""
        return read_images(self.data, self.size, crop=self.crop)

    def epochs(self, pipeline: Pipeline) -> range:
        """The epochs that hold the samples after the first batch, at which the clock starts."""
        alone = self.samples_alone or min(self.samples, 1000)
        samples = alone if self.design in ALONE else self.samples
        return range(-(-(samples + self.batch_size) // len(pipeline)))


def read_images(data: str, size: int, *, crop: bool = False) -> Pipeline:
    """Images of `size` pixels a side; see `Config`."""
    is_table = data.endswith(".parquet")
    renamed = {"jpeg": "image", "jpg": "image"}
    source: Source = sources.parquet(data, columns=("image",)) if is_table else sources.tar(data, rename=renamed)
    resize = stages.random_resized_crop("image", size) if crop else stages.resize("image", size)
    return Pipeline(source, seed=0).map(stages.decode_jpeg("image")).map(resize).map(stages.select("image"))


def send_message(kind: str, value: Any) -> None:
    """Send a line to the study: all processes of a node share its node process's standard output.

    Kinds and values: "producer", the id of a process that prepares samples; "parent", of one whose descendants do;
    "ready", the number of a member that can begin to read; "first", the milliseconds from the start of its reader
    to its first batch; "taken", times (`time.perf_counter`) and sizes of some of its batches; "last", after its
    last one, the mean milliseconds of its step and its device; "died", the process and the reason; "feeder",
    the final report of a feeder's group (`node.group_report`); "levels", a feeder's name and a `queues.Sample`
    of it.
    """
    with contextlib.suppress(BrokenPipeError):  # the study has ended
        os.write(1, json.dumps([kind, value]).encode() + b"\n")  # one write: atomic below PIPE_BUF
