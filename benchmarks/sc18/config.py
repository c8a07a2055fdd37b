"""One configuration of the study, which its processes pass to their children, and its photographs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet.workload import make_photographs
from pipelines import Pipeline, sources, stages

BARE, NODE, INDEPENDENT, DATALOADER = "bare ring", "node", "independent", "dataloader"
# Every member prepares for itself, which takes many times as long: fewer samples.
ALONE = (INDEPENDENT, DATALOADER)
# Designs with one stream for all nodes (`pipelines.multinode.designs`).
ACROSS = ("single", "multi", "all", "auto")
LOOPBACK = "loopback"
RING_BATCHES = 8
_PIXELS = 432  # of a side


@dataclass(frozen=True, kw_only=True)
class Config:
    """One configuration of the study, and the node that a process of it is on.

    Attributes:
        data: a tar archive of JPEG photographs.
        design: which processes prepare and send.
        members: reading processes, on all nodes; node i has the members i, i + nodes, i + 2 nodes ...
        prep_workers: preparation processes, of each node or of each independent member.
        cores: to which everything is pinned together; None pins nothing.
        batch_size, samples: of each member; samples at least, after its first batch, in whole epochs.
        samples_alone: the same where members prepare for themselves.
        step_ms: a member's timed wait for a batch, for an accelerator.
        size: pixels of a side after decoding.
        nodes: how many.  link: the rate of their links, None for no limit, or "loopback".
        node: this process's number.  address: of the node's feeder, in designs that share one.
        meeting: the directory in which feeders find each other, in designs across nodes.
    """

    data: str
    design: str = NODE
    members: int = 1
    prep_workers: int = 1
    cores: int | None = None
    samples: int = 5000
    samples_alone: int = 1000
    step_ms: float = 0.0
    batch_size: int = 32
    size: int = 224
    nodes: int = 1
    link: str | None = None
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
        source = sources.tar(self.data, rename={"jpeg": "image", "jpg": "image"})
        decoded = Pipeline(source, seed=0).map(stages.decode_jpeg("image"))
        return decoded.map(stages.resize("image", self.size)).map(stages.select("image"))

    def epochs(self, pipeline: Pipeline) -> range:
        """The epochs that hold the samples after the first batch, at which the clock starts."""
        samples = min(self.samples, self.samples_alone) if self.design in ALONE else self.samples
        return range(-(-(samples + self.batch_size) // len(pipeline)))


def send_message(kind: str, value: Any) -> None:
    """Send a line to the study: all processes of a node share its node process's standard output.

    Kinds and values: "producer", the id of a process that prepares samples; "parent", of one whose descendants do;
    "ready", the number of a member that can begin to read; "first", the milliseconds from the start of its reader
    to its first batch; "taken", times (`time.perf_counter`) and sizes of some of its batches; "last", after its
    last one, its number; "died", the process and the reason.
    """
    with contextlib.suppress(BrokenPipeError):  # the study has ended
        os.write(1, json.dumps([kind, value]).encode() + b"\n")  # one write: atomic below PIPE_BUF


def write_photographs(path: Path, count: int = 250) -> str:
    """Write a tar archive of generated JPEG photographs; returns what they are, in a few words."""
    with tarfile.open(path, "w") as archive:
        for number, content in enumerate(make_photographs(count, _PIXELS)):
            entry = tarfile.TarInfo(f"{number:04d}.jpeg")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return f"{count} generated photographs, {_PIXELS} px a side"
