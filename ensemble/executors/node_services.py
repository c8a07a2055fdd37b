"""What runs on a node under any executor: ranks of members, feeders, MPS; its GPUs, power and CPU time.

It starts feeder processes (`pipelines.feeder.process`), converts their reports to `feeder` and `usage` events, and
samples the node's power once a second.
"""

from __future__ import annotations

import dataclasses
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.events import Report
from ensemble.executors.base import LAST_S
from ensemble.executors.host import describe_host
from ensemble.executors.limits import raise_descriptor_limit
from ensemble.executors.memory_offers import MemoryOffers
from ensemble.executors.mps import Mps, stop_stale_daemon
from ensemble.executors.node_health import HealthWatch
from ensemble.executors.private_directory import PrivateDirectory, is_in_use
from ensemble.executors.process_pool import ProcessPool
from ensemble.executors.spawn import ForkServer, end_processes
from ensemble.meter.cpu import ReportPace, cpu_seconds, make_usage, read_start
from ensemble.schedule.needs import Node
from ensemble.spec import PREDICTED_SPLITS, Ensemble
from pipelines.environment.library_settings import find_settings
from pipelines.ipc.child_processes import START_S

if TYPE_CHECKING:
    from ensemble.executors.gpu_offers import GpuOffers
    from pipelines import Peers
    from pipelines.feeder.process import FeederProcess

POWER_EVERY_S = 1.0
_REPORTED = (
    "prepared",
    "consumed",
    "skipped",
    "restarts",
    "detached",
    "members",
    "fullness",
    "recorded_s",
    "capacity",
    "group",
    "cache",
)
_LONGEST_NAME = 24  # below the node's directory: "/feeder-12", "/forks", "/mps/control"
_PREDECESSOR_S = 30.0  # how long is waited for the end of an agent that was killed
_RETURN_S = 5.0  # how long the start gate of a feeder that replaces another waits for members that work alone


@dataclass(eq=False)
class _Feeder:
    cohort: int
    process: FeederProcess
    sample_bytes: int
    since: float = field(default_factory=time.monotonic)
    usage: dict[str, float] = field(default_factory=dict)
    has_renewed: bool = False  # its cache, which was said
    pace: ReportPace = field(default_factory=ReportPace)
    unreported: Report | None = None
    alarms: tuple[int, ...] = ()  # counts that are reported at once when they change
    poison: int = 0  # poison records that it has reported

    def __post_init__(self) -> None:
        self.began = read_start(self.process.pid)
        self.live = {"feed": [self.process.pid]}  # processes by role

    def count(self, role: str) -> float:
        """CPU-seconds of a role: of its processes that live, at least what has been reported."""
        return max(sum(cpu_seconds(pid) or 0.0 for pid in self.live[role]), self.usage.get(role, 0.0))


class NodeServices:
    """Ranks, feeders and power of one node.

    Args:
        node: its name in the events.
        ensemble: whose pipelines are prepared.
        selector: where descriptors are registered, each with the function to call when it is ready.
        emit: called with each event.
        run_dir: whose free space is looked at, too.

    Attributes:
        directory: mode 0700, for sockets; removed by `close`.
        ranks: of members on the node.
        gpus: what the node offers of its GPUs; None where members train on the CPU.
    """

    def __init__(
        self,
        node: str,
        ensemble: Ensemble,
        selector: selectors.BaseSelector,
        emit: Callable[[Report], None],
        run_dir: Path | None = None,
    ) -> None:
        from ensemble.meter import PowerMeter
        from ensemble.meter.devices import open_activity
        from ensemble.meter.power import PowerReports

        self.node = node
        raise_descriptor_limit(ensemble)
        self._private = PrivateDirectory("ensemble-", _LONGEST_NAME, _clear_stale)
        self.directory = self._private.path
        self.ranks = ProcessPool(node, selector, emit, lambda: ForkServer(self.directory, run_dir), self.directory)
        search = ensemble.search
        if search is not None and any(objective.is_cost for objective in search.objectives):
            self.ranks.note_end = self._hurry
        self._ensemble = ensemble
        self._settings = find_settings()  # of the run: those of the user's own process may change
        self._selector = selector
        self._emit_now = emit
        self._feeders: dict[int, _Feeder] = {}
        self._known: set[int] = set()
        self._poison: dict[str, dict[int, int]] = {}  # of each set: not in the pipelines, which outlive the run
        self._meter, self._power = PowerMeter(node, energy=ensemble.energy), PowerReports(ReportPace())
        try:
            self._meter.start()
        except BaseException:  # a signal, while idle power is measured
            self._meter.close()
            self._private.close()
            raise
        self._sampled_at = time.monotonic()
        self.next_sample = self._sampled_at + POWER_EVERY_S
        self.gpus: GpuOffers | None = None
        if ensemble.devices != "cpu":
            from ensemble.executors import gpu_offers

            self.gpus = gpu_offers.GpuOffers(node, self.directory, self._emit, self.ranks)
            self.ranks.find_gpu_fault = self.gpus.find_fault
        self._memory = MemoryOffers(self.ranks.list_pids)
        self._host: Node | None = None
        self._mps: Mps | None = None
        self._activity = open_activity(())
        if ensemble.mps and ensemble.devices != "cpu" and self.describe().gpus:
            self._mps = Mps(self.directory)
            if self.gpus is not None:
                self.gpus.with_mps = self._mps.running
        else:
            stop_stale_daemon(self.directory)
        if self.gpus is not None:
            self._activity = open_activity(self.gpus.known, with_mps=self._mps is not None and self._mps.running)
        self._described = self._describe_power()
        self._health = HealthWatch(run_dir)

    def describe(self) -> Node:
        feeds = self._ensemble.sharing != "independent"
        host = describe_host(self.node, power=self._describe_power(), feeds=feeds)
        self._host = dataclasses.replace(host, memory_left_gb=self._memory.offer(host))
        return self._host if self.gpus is None else self.gpus.offer(self._host)

    def _describe_power(self) -> dict[str, Any]:
        activity = self._activity.describe()
        return {**self._meter.describe(), **({"gpu_activity": activity} if activity else {})}

    def sample(self) -> None:
        """From `next_sample` on: report power, look after GPUs, kill feeders that do not start in time."""
        now_s = time.monotonic()
        if now_s >= self.next_sample:
            for feeder in self._feeders.values():
                if not feeder.process.ready and now_s - feeder.since > START_S:
                    feeder.process.failure = f"it had not started after {START_S:g} s"
                    feeder.process.kill()  # its end is reported like any other
            self.ranks.report_servers()
            self.ranks.raise_memory_limits()
            self._sample_power()
            # From its end: after a stall a shorter interval follows, but never one in which counters hardly step.
            self.next_sample = max(self._sampled_at + POWER_EVERY_S / 2, self.next_sample + POWER_EVERY_S)
            if self.gpus is not None:
                self.gpus.sample()
            self._report_changes()
            self._report_health()

    def _report_health(self) -> None:
        """Report what has been found of the node, after the first `describe`."""
        if self._host is not None and (free_gb := self._health.take()) is not None:
            host = self._host
            has = {"cpus": host.cpus, "memory_gb": round(host.memory_gb, 3), "gpus": len(host.gpus)}
            self._emit({"type": "node_health", "node": self.node, "free_gb": free_gb, **has})

    def _sample_power(self) -> None:
        power = self._meter.sample()
        self._sampled_at = time.monotonic()
        if power["parts"]:
            self._activity.add_to(power, {} if self.gpus is None else self.ranks.list_processes())
        self._emit_power(self._power.add(power))

    def _emit_power(self, reported: Sequence[Mapping[str, Any]]) -> None:
        for power in reported:
            self._emit_now({"type": "power", **power})

    def _emit(self, event: Report) -> None:
        if event["type"] == "node":  # behind it a node's power begins anew
            self._emit_power(self._power.take())
        self._emit_now(event)

    def _hurry(self) -> None:
        """Report soon what is known: a process has ended, and the search waits for what its trial has cost."""
        for pace in (self._power.pace, *(feeder.pace for feeder in self._feeders.values())):
            pace.hurry()

    def _report_changes(self) -> None:
        """Report what others leave of the memory, and how the GPUs' energy and activity are known, on a change."""
        changed: dict[str, Any] = {}
        if self.gpus is not None:
            before, self._described = self._described, self._describe_power()
            if before.get("gpu_activity") != self._described.get("gpu_activity"):
                changed["power"] = self._described
        if (change := self._memory.find_change()) is not None:
            (changed["memory_left_gb"],) = change
        if changed and self._host is not None:
            self._host = dataclasses.replace(self._host, **changed)
            self.report()

    def report(self) -> None:
        """Report what the node offers now, after the first `describe`."""
        if self._host is None:
            return
        if self.gpus is not None:
            self.gpus.update_host(self._host)
        else:
            named = {"gpu_names": [(gpu,) for gpu in self._host.gpu_ids], "gpu_reasons": []}
            self._emit({"type": "node", **self._host.as_event(), **named})

    def start_feeder(
        self, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str:
        """Start a cohort's feeder without waiting for it, and return its address; see `Executor`.

        Raises:
            PipelineError: no process can listen at the address.
        """
        from pipelines.feeder.process import spawn
        from pipelines.shm.ring import sample_bytes

        ensemble = self._ensemble
        size = sample_bytes(ensemble.stream.fields)  # before the process is started, because this may fail
        splits = {split: getattr(ensemble, split) for split in PREDICTED_SPLITS}
        again = cohort in self._known
        self._known.add(cohort)
        process = spawn(
            ensemble.stream,
            start_timeout_s=None,
            poison_records=self._poison,
            settings=self._settings,
            resident={key: pipe for key, pipe in splits.items() if pipe is not None},
            replacement=again or late,
            expect=expect,
            capacity=capacity,
            workers=ensemble.prep_workers,
            gate_timeout_s=min(ensemble.gate_timeout_s, _RETURN_S) if again else ensemble.gate_timeout_s,
            policy=ensemble.stall_policy,
            stall_limit_s=ensemble.stall_limit_s,
            prepare_timeout_s=ensemble.prepare_timeout_s,
            cache=ensemble.cache,
            cache_bytes=ensemble.cache_bytes,
            cache_dir=ensemble.cache_dir,
            cache_dir_bytes=ensemble.cache_dir_bytes,
            peers=peers,
            design="auto" if peers is None else ensemble.sharing,
            address=make_feeder_address(self.directory, cohort),
        )
        feeder = self._feeders[cohort] = _Feeder(cohort, process, size)
        self._selector.register(process.stdout, selectors.EVENT_READ, lambda: self._read_feeder(feeder))
        return process.address

    def expect_readers(self, cohort: int, members: int) -> None:
        if cohort in self._feeders:
            self._feeders[cohort].process.expect_readers(members)

    def stop_feeder(self, cohort: int) -> None:
        """End a cohort's feeder, if there is one."""
        feeder = self._feeders.pop(cohort, None)
        if feeder is not None:
            self._selector.unregister(feeder.process.stdout)
            self._stop_process(feeder)

    def close(self) -> None:
        """End all ranks and feeders, report the power up to now, and remove the directory."""
        self.ranks.close()
        for cohort in list(self._feeders):
            self.stop_feeder(cohort)
        self._health.close()
        self._report_health()
        time.sleep(max(0.0, self._sampled_at + LAST_S - time.monotonic()))
        self._sample_power()
        self._emit_power(self._power.take())
        self._meter.close()
        self._activity.close()
        if self.gpus is not None:
            self.gpus.close()
        if self._mps is not None:
            self._mps.close()
        self._private.close()

    def _read_feeder(self, feeder: _Feeder) -> None:
        reports = feeder.process.read()
        for report in reports or []:
            self._note_report(feeder, report)
        if reports is None:
            self._selector.unregister(feeder.process.stdout)
            del self._feeders[feeder.cohort]
            self._stop_process(feeder)
            fields = {"started": feeder.process.ready, "detail": feeder.process.failure or "it died"}
            self._emit({"type": "feeder_exited", "node": self.node, "cohort": feeder.cohort, **fields})

    def _stop_process(self, feeder: _Feeder) -> None:
        """End a feeder; report its last events, and the CPU time after its last report."""
        for report in feeder.process.stop():
            self._note_report(feeder, report)
        self._report_feeder(feeder)
        rest_s = (feeder.process.cpu_s or 0.0) - sum(feeder.usage.values())
        if rest_s > 0:
            self._emit(self._make_usage(feeder, "feed", feeder.usage.get("feed", 0.0) + rest_s))

    def _note_report(self, feeder: _Feeder, report: dict[str, Any]) -> None:
        """Note what a feeder reports, and emit it when that is due."""
        if report["type"] != "feeder":
            return
        for record in report["poison"][feeder.poison :]:
            self._emit_bad_record(feeder.cohort, record)
        feeder.poison = len(report["poison"])
        if report["cache_renewed"] is not None and not feeder.has_renewed:
            feeder.has_renewed = True
            renewed = {"cohort": feeder.cohort, "member": None, "split": "train", "action": "renewed"}
            self._emit({"type": "sample_difference", "node": self.node, **renewed, **report["cache_renewed"]})
        pids = report["pids"]
        group = report["group"] or {}
        feeder.live["feed"] = [pids["feed"], *([group["pid"]] if group.get("pid") else [])]
        feeder.live["prepare"] = pids["prepare"]
        cpu = report["cpu"]
        for role, reported_s in cpu.items():  # how much batch stages have used is not known of live processes
            is_known = role == "feed" or "batch" not in cpu
            feeder.usage[role] = max(reported_s, feeder.count(role)) if is_known else reported_s
        fields = {"cohort": feeder.cohort, "pid": pids["feed"], "workers": self._ensemble.prep_workers}
        fields |= {key: report[key] for key in _REPORTED} | {
            "ring_bytes": report["capacity"] * feeder.sample_bytes
        }
        fields["sent_bytes"] = group.get("sent_bytes", 0)
        feeder.unreported = {"type": "feeder", "node": self.node, **fields}
        alarms = (report["skipped"], report["restarts"], report["detached"])
        if feeder.pace.is_due() or alarms != feeder.alarms:
            feeder.alarms = alarms
            self._report_feeder(feeder)

    def _report_feeder(self, feeder: _Feeder) -> None:
        """Emit a `feeder` event, and `usage` events of its processes from their start on."""
        if feeder.unreported is None:
            return
        self._emit(feeder.unreported)
        feeder.unreported = None
        for role, cpu_s in feeder.usage.items():
            self._emit(self._make_usage(feeder, role, cpu_s))

    def _emit_bad_record(self, cohort: int, record: dict[str, Any]) -> None:
        """Report a record that kills or hangs the process that prepares it; later feeders leave it out."""
        split = "train" if record["set"] == "ring" else record["set"]
        self._poison.setdefault(record["set"], {})[record["index"]] = record["code"]
        fields = {key: record[key] for key in ("index", "where", "reason", "code")}
        self._emit({"type": "bad_record", "node": self.node, "cohort": cohort, "split": split, **fields})

    def _make_usage(self, feeder: _Feeder, role: str, cpu_s: float) -> Report:
        used = make_usage(self.node, role, feeder.process.pid, cpu_s, began=feeder.began)
        return {**used, "cohort": feeder.cohort}


def _clear_stale(directory: Path) -> None:
    """End what is left of a node whose executor was killed; ranks end by themselves unless they are stopped."""
    end_processes(directory)
    stop_stale_daemon(directory)


def end_predecessor(directory: Path) -> None:
    """End what an earlier agent of this node, which is being killed, has started; wait until it is gone.

    Otherwise its ranks would use cores and GPUs beside the ranks that are placed there next.
    """
    until = time.monotonic() + _PREDECESSOR_S
    end_processes(directory)
    while is_in_use(directory) and time.monotonic() < until:
        time.sleep(0.05)
    end_processes(directory)  # what it started meanwhile


def make_feeder_address(directory: Path, cohort: int) -> Path:
    """Where the feeder of a cohort listens, in its node's directory."""
    return directory / f"feeder-{cohort}"
