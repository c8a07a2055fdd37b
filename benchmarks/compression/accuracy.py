"""What the part `accuracy` measures: the accuracy of members whose gradients travel in few bits."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import models
from benchmarks.members import Accuracy, MemberResult, compare, declare_variants, train_members
from benchmarks.models import Net
from benchmarks.results import Report
from ensemble.spec import Ensemble
from ensemble.spec.options import COMPRESSIONS, resolve

PLAIN = "none"
WORKERS = 2  # of each member
Schemes = Mapping[str, dict[str, Any]]
_VARIANTS = {
    "onebit-zero": {"name": "onebit", "threshold": "zero"},
    "onebit-tensor": {"name": "onebit", "column": "tensor"},
}


@dataclass(frozen=True, kw_only=True)
class AccuracyRow(Accuracy):
    """One scheme's accuracy on the test split.

    Attributes:
        model, data: what was trained.  scheme: their compression.
        bits: of a gradient's value on the wire, on the average over the model; small parameters travel as fp32.
    """

    model: str
    data: str
    scheme: str
    bits: float


def measure_accuracies(
    options: Namespace, declared: Sequence[tuple[Net, Ensemble]], schemes: Schemes, report: Report
) -> Iterator[AccuracyRow]:
    """Train what `declare_members` has declared of each network."""
    for net, ensemble in declared:
        results = train_members(ensemble, options.run_dir, report)
        yield from accuracy_rows(net, options.data, schemes, results)


def declare_members(net: Net, schemes: Schemes, options: Namespace) -> Ensemble:
    """The run: seeds draw weights and the codecs' random numbers.

    Raises:
        SpecError: there is too little data.
        PipelineError: the data cannot be read.
    """
    variants = [{"workers": WORKERS, "compression": compression} for compression in schemes.values()]
    return declare_variants(f"compression-{net.name}", net, options, variants, WORKERS)


def accuracy_rows(
    net: Net, data: str | None, schemes: Schemes, results: Sequence[MemberResult]
) -> list[AccuracyRow]:
    """The rows of one network, of its members' results as `declare_members` numbers them."""
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in models.model(net.params(data)).parameters()]
    compared = compare(results, list(schemes), PLAIN)
    same: dict[str, Any] = {"model": net.name, "data": net.data(data)}
    return [
        AccuracyRow(**same, scheme=label, bits=mean_bits(compression, shapes), **vars(compared[label]))
        for label, compression in schemes.items()
    ]


# --- schemes, by name ----------------------------------------------------------------------------------------


def parse_schemes(option: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The options of schemes, each once, by their names in tables; the plain exchange, the baseline, comes first.

    `qsgd4+ef` is with error feedback, `onebit-ef` without; without an ending it is the compression's default.
    `onebit-zero` has its threshold at zero, `onebit-tensor` columns of each tensor's own, as in the original.

    Raises:
        SpecError: there is no such compression, or it has no error feedback.
    """
    schemes = {}
    for name in (PLAIN, *names):
        base, ending = (name[:-3], name[-3:]) if name.endswith(("+ef", "-ef")) else (name, "")
        feedback = {"error_feedback": ending == "+ef"} if ending else {}
        options = resolve(option, {"name": base, **_VARIANTS.get(base, {}), **feedback}, COMPRESSIONS)
        schemes[base + ("+ef" if options.get("error_feedback") else "")] = options
    return schemes


def mean_bits(options: Mapping[str, Any], shapes: Iterable[Sequence[int]]) -> float:
    """Mean bits of a value of parameters of these shapes on the wire; small parameters are sent as fp32."""
    sent = values = 0.0
    for shape in shapes:
        n = math.prod(shape)
        values += n
        sent += _bits(options, n, shape) if n >= options.get("min_size", n + 1) else 32 * n
    return sent / values


def _bits(options: Mapping[str, Any], n: int, shape: Sequence[int]) -> float:
    from ensemble.comm.codecs import make_codec, options_for
    from ensemble.comm.powersgd import is_worth_compressing, matrix_shape

    if options["name"] != "powersgd":
        return 8 * make_codec(options_for(options, shape)).wire_bytes(n)
    rank = options["rank"]
    return 32 * rank * sum(matrix_shape(shape)) if is_worth_compressing(shape, rank) else 32 * n
