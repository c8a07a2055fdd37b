"""Writes a run as result files of MLPerf HPC's throughput ("weak scaling") metric, for MLCommons' own tools.

Each model is an *instance* with a log of its own, lines `:::MLLOG {...}`. The instances that reached the quality
target count; the rules allow others to be *pruned*: they lie in `pruned_results/`, which the summarizer does not
read. A package is a folder `submitter/` with `results/SYSTEM/weak/BENCHMARK/result_N.txt` and
`systems/SYSTEM.json`. Sources: MLPerf HPC Training Rules 3.0, "Throughput" and "Benchmark Results"; MLCommons'
submission rules, "HPC"; the rule set `hpc_3.0.0` of the package `mlperf-logging`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.ranking import finite_or_none
from ensemble.reporting.sections.time_to_solution import TimeToSolution, find_instance, measure_instances
from ensemble.spec import SpecError
from ensemble.store.files import write_bytes

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunState


@dataclass(frozen=True)
class Benchmark:
    """What the rules ask of one of the suite's benchmarks.

    Attributes:
        key: under which the quality is logged; an accuracy is to be maximized, an error minimized.
        target: the quality that an instance must reach.
        models: the fewest instances that make a result.
    """

    key: str
    target: float
    models: int

    @property
    def direction(self) -> str:
        """The direction of an objective that can be logged as its quality."""
        return "max" if self.key == "eval_accuracy" else "min"

    def is_reached(self, value: float) -> bool:
        """Whether the checker takes this quality: an accuracy is at most 1, an error above 0."""
        return self.target <= value <= 1 if self.direction == "max" else 0 < value <= self.target


BENCHMARKS = {
    "deepcam": Benchmark("eval_accuracy", 0.82, 5),
    "cosmoflow": Benchmark("eval_error", 0.124, 10),
    "oc20": Benchmark("eval_error", 0.036, 5),
    "openfold": Benchmark("eval_accuracy", 0.8, 10),
}
#: What a file of a system must have; what the log does not say of it stays empty, as in files that were submitted.
SYSTEM_FIELDS = """submitter division status system_name number_of_nodes host_processors_per_node
host_processor_model_name host_processor_core_count host_processor_vcpu_count host_processor_frequency
host_processor_caches host_processor_interconnect host_memory_capacity host_storage_type host_storage_capacity
host_networking host_networking_topology host_memory_configuration accelerators_per_node accelerator_model_name
accelerator_host_interconnect accelerator_frequency accelerator_on-chip_memories accelerator_memory_configuration
accelerator_memory_capacity accelerator_interconnect accelerator_interconnect_topology cooling hw_notes framework
other_software_stack operating_system sw_notes"""
NOT_A_SUBMISSION = (
    "Made by ray-ensemble from the event log of a run, for MLCommons' tools; not a submission to MLPerf."
)


@dataclass(frozen=True)
class ResultFiles:
    """A run in the form of MLPerf HPC.

    Attributes:
        system: names the run in the package.
        benchmark: as which it is written.
        files: content by path in the package.
        figures: of the instances that count; None where none does.
        pruned: why members do not count, and how many; those that were never placed have no file.
        idle_s: of the time of all, seconds in which nothing ran, as the run was resumed later.
    """

    system: str
    benchmark: str
    files: dict[str, str]
    figures: TimeToSolution | None
    pruned: Counter[str]
    idle_s: float

    def describe(self) -> Iterator[str]:
        """What was written, in lines."""
        rules, found = BENCHMARKS[self.benchmark], self.figures
        models = found.models if found else 0
        line = f"{models} of {text.count(models + self.pruned.total(), 'model')} count as {self.benchmark}"
        if found:
            line += f", all in {text.duration(found.ttta_s)}: {found.per_minute:.1f} a minute"
        if self.idle_s:
            line += f", of which {text.duration(self.idle_s)} passed before it was resumed"
        yield "; ".join([line, *(f"{count} pruned: {why}" for why, count in self.pruned.items())])
        if models < rules.models:
            yield f"a result of {self.benchmark} has at least {rules.models} models: the summarizer gives none"


def compose_result_files(state: RunState, submitter: str, benchmark: str | None = None) -> ResultFiles:
    """The files of a run; a pure function of its events.

    Args:
        submitter: the organization, which names the package.
        benchmark: of `BENCHMARKS`, as which it is written; None: deepcam or cosmoflow, by the direction of the
            objective.

    Raises:
        SpecError: no member has finished, there is no such benchmark, or the objective has the other direction.
    """
    benchmark = benchmark or ("deepcam" if state.direction == "max" else "cosmoflow")
    if benchmark not in BENCHMARKS:
        raise SpecError(f"MLPerf HPC has no benchmark {benchmark!r}, but {', '.join(BENCHMARKS)}")
    rules = BENCHMARKS[benchmark]
    if rules.direction != state.direction:
        known = " or ".join(name for name, each in BENCHMARKS.items() if each.direction == state.direction)
        raise SpecError(
            f"{benchmark} has an {rules.key.removeprefix('eval_')}, and {state.objective!r}, the objective of the "
            f"run, is to be {state.direction}imized: take {known}"
        )
    if not any(member.state == "finished" for member in state.members.values()):
        raise SpecError(f"no member of {state.name!r} has finished: there is nothing for MLPerf to score")
    system = f"{state.name}-{state.run_id[:8]}"
    pruned, begun = _prune(state, rules), [member for member in state.members.values() if member.spans]
    kept = [member for member in begun if member.id not in pruned]
    head = {
        "submission_benchmark": benchmark,
        "submission_org": submitter,
        "submission_division": "open",
        "submission_status": "research",
        "submission_platform": system,
    }
    weak, files = f"results/{system}/weak/{benchmark}", {}
    for member in begun:
        folder = f"{weak}/pruned_results" if member.id in pruned else weak
        lines = _log_instance(state, member, head, rules, pruned.get(member.id))
        files[f"{folder}/result_{member.number}.txt"] = "".join(f":::MLLOG {json.dumps(line)}\n" for line in lines)
    files[f"systems/{system}.json"] = json.dumps(_describe_system(state, head), indent=2) + "\n"
    instances = [find_instance(member) for member in kept]
    idle_s = state.idle_s if any(stop > state.header.t for _, stop in instances) else 0.0
    return ResultFiles(system, benchmark, files, measure_instances(instances), Counter(pruned.values()), idle_s)


def write_result_files(found: ResultFiles, package: Path) -> None:
    """Write the files into a package; what it has of other runs stays, and of this one no other result.

    Raises:
        SpecError: they cannot be written.
        StoreError: likewise.
    """
    weak = package / "results" / found.system / "weak"
    try:
        for old in [*weak.glob("*/result_*.txt"), *weak.glob("*/pruned_results/result_*.txt")]:
            old.unlink()  # of the same run, when less of it was known, or as another benchmark
        for name, content in found.files.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content.encode())
    except OSError as error:
        raise SpecError(f"cannot write {error.filename or package}: {error.strerror}") from None


def _prune(state: RunState, rules: Benchmark) -> dict[str, str]:
    """Why members do not count, by their names."""
    members = state.members.values()
    why: dict[str, str] = {member.id: member.state for member in members if member.state != "finished"}
    sign = "≥" if rules.direction == "max" else "≤"
    for member in members:
        if not member.spans:
            why.setdefault(member.id, "its start is not known")
        elif not _has_converged(state, member, rules):
            why.setdefault(member.id, f"no epoch with {state.objective} {sign} {rules.target}")
    kept = [member for member in members if member.id not in why]
    scales = Counter(math.prod(_find_scale(member)) for member in kept)
    usual, seeds = max(scales, key=scales.__getitem__, default=0), set()
    for member in kept:
        seed = member.identity.get("seed")
        if math.prod(_find_scale(member)) != usual:
            why[member.id] = "on another scale than most"
        elif seed in seeds:
            why[member.id] = "seed of another one"
        else:
            seeds.add(seed)
    return why


def _has_converged(state: RunState, member: MemberState, rules: Benchmark) -> bool:
    """Whether it has finished, and reached the target after some epoch."""
    return member.state == "finished" and any(map(rules.is_reached, _list_qualities(state, member).values()))


def _list_qualities(state: RunState, member: MemberState) -> dict[int, float]:
    """The objective after each epoch that has a number of it, by the epoch."""
    values = {each.epoch: finite_or_none(each.metrics.get(state.objective)) for each in member.history}
    return {epoch: value for epoch, value in values.items() if value is not None}


def _find_scale(member: MemberState) -> tuple[int, int]:
    """Nodes of an instance, and accelerators that it has on each, at least 1, as the summarizer counts."""
    nodes = len(set(member.nodes)) or 1
    gpus = sum(device is not None for device in member.spans[-1].devices)
    return nodes, max(1, -(-gpus // nodes))


def _log_instance(
    state: RunState, member: MemberState, head: dict[str, str], rules: Benchmark, pruned: str | None
) -> Iterator[dict[str, Any]]:
    """The lines of an instance, in the order that the checker asks for."""
    begun, ended = find_instance(member, state.updated)
    splits = state.header.data.get("splits") or {}
    has_gpus = any(device is not None for device in member.spans[-1].devices)
    nodes, accelerators = _find_scale(member)
    yield from (_log(begun, key, value) for key, value in head.items())
    # Nothing is left out of the time: what a process needs to start comes after `run_start`.
    yield _log(begun, "init_start")
    yield _log(begun, "cache_clear", False)
    facts = {
        "seed": member.identity.get("seed"),
        "global_batch_size": member.identity.get("batch_size"),
        "gradient_accumulation_steps": member.identity.get("accumulate", 1),
        "number_of_ranks": len(member.spans[-1].devices),
        "number_of_nodes": nodes,
        "accelerators_per_node": accelerators if has_gpus else 0,
        "train_samples": state.header.data.get("samples", 0),
        "eval_samples": (splits.get("valid") or [0])[0],
    }
    yield from (_log(begun, key, value) for key, value in facts.items())
    yield _log(begun, "init_stop")
    yield _log(begun, "run_start", member=member.id)
    before, qualities = begun, _list_qualities(state, member)
    for epoch in member.history:
        number, stop = epoch.epoch + 1, max(before, epoch.t)
        start = max(before, stop - (epoch.wall_s or stop - before))
        trained = min(stop, start + (epoch.train_s or stop - start))
        yield _log(start, "epoch_start", epoch_num=number)
        yield _log(trained, "eval_start", epoch_num=number)
        if epoch.epoch in qualities:
            yield _log(stop, rules.key, qualities[epoch.epoch], epoch_num=number)
        yield _log(stop, "eval_stop", epoch_num=number)
        yield _log(stop, "epoch_stop", epoch_num=number)
        before = stop
    status = "success" if _has_converged(state, member, rules) else "aborted"
    yield _log(ended, "run_stop", status=status, **({"pruned": pruned} if pruned else {}))


def _log(t: float, key: str, value: Any = None, **metadata: Any) -> dict[str, Any]:
    """A line of a log, of a time in Unix seconds."""
    kind = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(key.rpartition("_")[2], "POINT_IN_TIME")
    line = {"namespace": "", "time_ms": round(1000 * t), "event_type": kind, "key": key, "value": value}
    return line | {"metadata": metadata}


def _describe_system(state: RunState, head: dict[str, str]) -> dict[str, Any]:
    """What the log says of the nodes and the software."""
    nodes = [node.info for node in state.nodes.values() if node.info is not None]
    spans = [span for member in state.members.values() for span in member.spans]
    cards = sorted({span.device for span in spans if span.device not in (None, "cpu")})
    kinds = Counter(
        f"{node.cpus:g} cores, {text.count(len(node.gpus), 'GPU')}, {node.memory_gb or 0:.0f} GB" for node in nodes
    )
    versions = state.header.versions
    return dict.fromkeys(SYSTEM_FIELDS.split(), "") | {
        "submitter": head["submission_org"],
        "division": head["submission_division"],
        "status": head["submission_status"],
        "system_name": head["submission_platform"],
        "number_of_nodes": str(len(nodes) or 1),
        "host_processors_per_node": "1",
        "host_processor_core_count": str(max((round(node.cpus) for node in nodes), default="")),
        "host_memory_capacity": f"{max((node.memory_gb or 0 for node in nodes), default=0):.0f} GB",
        "accelerators_per_node": str(max((len(node.gpus) for node in nodes), default=0)),
        "accelerator_model_name": ", ".join(map(str, cards)),
        "hw_notes": "; ".join(
            [*(f"{count} x {kind}" for kind, count in kinds.items()), "how many processors is not known"]
        ),
        "framework": f"PyTorch {versions.get('torch')}, ray-ensemble {versions.get('ray_ensemble')}",
        "other_software_stack": {name: version for name, version in versions.items() if version is not None},
        "sw_notes": NOT_A_SUBMISSION,
    }
