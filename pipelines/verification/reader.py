"""Verifies the samples that one reader is served: which are compared, and what follows from a difference.

Before the first step a difference costs nothing: the reader prepares its samples itself. Later it has learned from
samples that its pipeline does not make, which only its owner can mend: `SamplesDiffer` is raised.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipelines.description import PipelineDescription
from pipelines.environment.processor import describe_machine
from pipelines.errors import SampleError, SamplesDiffer
from pipelines.verification.checker import SampleChecker, ServedSample
from pipelines.verification.compare import CheckResult

log = logging.getLogger(__name__)

# Two samples lie in the first batch that is read. Then there is one in an epoch, and at most one in `SAMPLES`: a
# short epoch has none until so many were read. Readers with other names compare other positions.
SAMPLES = 2000
AT_START = 2


@dataclass(frozen=True)
class Finding:
    """A comparison that was not equal, or was not possible.

    Attributes:
        result: of the comparison.
        epoch, place, index: of the sample.
        is_late: whether the reader has read other samples before.
    """

    result: CheckResult
    epoch: int
    place: int
    index: int
    is_late: bool

    def as_record(self) -> dict[str, Any]:
        """As JSON values: where the sample is, and what was found."""
        where = {name: getattr(self, name) for name in ("epoch", "place", "index")}
        return {**where, **self.result.as_record()}

    def describe(self) -> str:
        """What was found, in words."""
        where = f"epoch {self.epoch}, position {self.place} (sample {self.index})"
        return f"{where}: {self.result.detail}"


class Verification:
    """The comparisons of one reader.

    Args:
        check: compares a sample that was served with what the reader's pipeline prepares.
        name: of the reader, which determines the positions.
        pipeline: of the reader.
        report: called with each difference, and with the first sample that was rounded or left out.

    Attributes:
        compared: how many samples were compared.
        has_begun: whether the first ones were.
    """

    def __init__(
        self,
        check: Callable[[ServedSample], CheckResult],
        name: str,
        pipeline: PipelineDescription,
        report: Callable[[Finding], None] | None = None,
    ) -> None:
        self.compared, self.has_begun = 0, False
        self._check, self._name, self._pipeline = check, name, pipeline
        # A batch stage takes as long for one sample as for a batch: all readers compare what one checker keeps.
        self._places_of = "" if pipeline.batched else name
        self._report = report or (lambda finding: None)
        self._later: tuple[int, int | None] = (-1, None)  # the place to compare in an epoch
        self._said: set[str] = set()  # kinds of results that were reported, once each

    def admit_first(self, read: Callable[[int], ServedSample], epoch: int, start: int, stop: int) -> bool:
        """Compares samples of the first batch that is read of a stream.

        Args:
            read: the sample at a place of the epoch.
            start, stop: places of the batch.

        Returns:
            False if one differs: the stream is not to be read.

        Raises:
            SampleError: the reader's pipeline makes another sample each time.
        """
        self.has_begun = True
        places = choose_first(self._places_of, epoch, start, stop)
        return not any(self._compare(read(place), is_late=False) for place in places)

    def check_batch(self, read: Callable[[int], ServedSample], epoch: int, start: int, stop: int) -> None:
        """Compares the sample that is due in a later batch, if there is one.

        Raises:
            SamplesDiffer: it differs.
            SampleError: the reader's pipeline makes another sample each time.
        """
        if self._later[0] != epoch:
            self._later = epoch, choose_later(self._places_of, epoch, len(self._pipeline))
        place = self._later[1]
        if place is None or not start <= place < stop:
            return
        self._later = epoch, None
        if (finding := self._compare(read(place), is_late=True)) is not None:
            raise SamplesDiffer(
                f"what {self._name} has read differs from what its own pipeline prepares, in "
                f"{finding.describe()}; begin again without sharing (pipeline.loader), and find what differs: the "
                "environment, files, versions",
                finding,
            )

    def _compare(self, served: ServedSample, *, is_late: bool) -> Finding | None:
        """The finding, if the sample differs."""
        result = self._check(served)
        self.compared += result.kind != "left_out"
        if result.kind == "equal":
            return None
        if result.kind == "unstable":
            raise SampleError(served.index, self._pipeline.source.where(served.index), result.detail)
        finding = Finding(result, served.epoch, served.place, served.index, is_late)
        if result.kind == "different":
            self._report(finding)
            return finding
        if result.kind not in self._said:
            self._said.add(result.kind)
            self._report(finding)
        return None


@dataclass(frozen=True, kw_only=True)
class StreamOrigin:
    """Where the samples of a stream come from, as its feeder says.

    Attributes:
        machine: where it runs (`describe_machine`).
        is_same_object: whether it prepares with a copy of the reader's own pipeline object.
        is_in_process: whether it was started by the reader's own process.
        has_peers: whether feeders of other nodes prepare for it.
    """

    machine: str
    is_same_object: bool
    is_in_process: bool
    has_peers: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether bytes must be equal: all that is served was prepared on such a machine as this."""
        return self.machine == describe_machine() and not self.has_peers


#: Makes the verification of a stream when it is read first; None where it needs none.
MakeVerification = Callable[[StreamOrigin], Verification | None]


def verify_here(pipeline: PipelineDescription, name: str, what: str = "the feeder's stream") -> MakeVerification:
    """Lets a reader that attaches by itself compare in its own process, and warn of what it finds.

    Args:
        pipeline, name: of the reader.
        what: it reads.
    """

    def warn(finding: Finding) -> None:
        kind, where = finding.result.kind, finding.describe()
        if kind == "left_out":
            log.info("%s is not compared, %s", what, where)
        elif kind == "rounding":
            warnings.warn(f"{what} is used; it differs by rounding only, {where}", stacklevel=2)
        elif not finding.is_late:  # else an error is raised
            warnings.warn(f"{what} differs from what {name} prepares, so it works alone: {where}", stacklevel=2)

    def make(stream: StreamOrigin) -> Verification | None:
        if stream.is_same_object and stream.is_in_process and not stream.has_peers:
            return None
        return Verification(SampleChecker(pipeline, is_exact=stream.is_exact).check, name, pipeline, warn)

    return make


def choose_first(name: str, epoch: int, start: int, stop: int) -> list[int]:
    """The places of an epoch, out of [start, stop), that are compared before the first step, in order.

    Args:
        name: of the reader.
        epoch: of the stream.
        start, stop: of its first batch.
    """
    generator = random.Random(f"{name}/first/{epoch}")
    return sorted(generator.sample(range(start, stop), min(AT_START, stop - start)))


def choose_later(name: str, epoch: int, n: int) -> int | None:
    """The place of an epoch that is compared, out of its n; None if the epoch has none."""
    if (epoch + 1) * n // SAMPLES == epoch * n // SAMPLES:
        return None
    return random.Random(f"{name}/{epoch}").randrange(n)
