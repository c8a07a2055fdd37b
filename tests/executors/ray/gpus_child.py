"""Drivers on nodes with GPUs that are none: NVML is a stand-in, and who runs on a GPU says which it was given.

`gpus_child.py MODE RUN_DIR` runs on the cluster that RAY_ADDRESS names, else on a Ray of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.execute_members import an_ensemble

import ensemble
from ensemble import Member, Resources

#: A `sitecustomize` for which workers do not train: a rank says in its log which GPU it was given, waits for the
#: others of its member, and is done.
WORKER = """
import os, sys, time, types

def run(job, ensemble, send, inbox, clock):
    from ensemble.store import RunDir

    log = RunDir(job.run_dir).log(job.identity.member)
    print("GPU", os.environ["CUDA_VISIBLE_DEVICES"] or None, os.environ["CUDA_DEVICE_ORDER"], flush=True)
    while log.read_text().count("GPU") < job.identity.workers:
        time.sleep(0.01)
    together = log.parents[2] / "together"  # so many members run at the same time
    while together.exists() and len(list(log.parents[1].glob("*/log.txt"))) < int(together.read_text()):
        time.sleep(0.01)
    if job.rank == 0:
        who = {"member": job.identity.member, "attempt": job.attempt}
        send({"type": "started", **who, "first_epoch": 0})
        send({"type": "finished", **who, "epoch": 1, "metrics": {}, "weights_sha256": "0" * 64})
    return "finished"

if "ensemble.executors.forkserver" in sys.orig_argv:
    sys.modules["ensemble.train.worker"] = types.SimpleNamespace(run=run)
"""

SOMEBODY_ELSE = """
import sys, ray
ray.init(log_to_driver=False, logging_level="ERROR")

@ray.remote(num_gpus=1, num_cpus=0)
class Taken:
    def holds(self): pass

taken = Taken.remote()
ray.get(taken.holds.remote())
print("holds", flush=True)
sys.stdin.read()
"""


#: Of twelve members, which together take four GPUs.
SHARES = (0.0, 0.25, 0.5, 1.0, 0.0, 0.25, 0.5, 1.0, 0.0, 0.25, 0.0, 0.25)


def submit(
    members: list[Any], share: float, run_dir: Path, devices: Literal["auto", "cuda"] = "cuda", **options: Any
) -> list[str]:
    declared = an_ensemble(
        members,
        resources=Resources(cpus_per_worker=0.1, gpus_per_worker=share, memory_gb=0.5),
        devices=devices,
        sharing="independent",
        valid=None,
        retries=0,
    )
    result = ensemble.submit(declared, run_dir, executor="ray", **options).wait()
    return [row["state"] for row in result.members]


class SomebodyElse:
    """Holds a GPU of the cluster from `take` to `release`; its process is another driver."""

    process: subprocess.Popen[str] | None = None

    def take(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SOMEBODY_ELSE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "holds\n"

    def release(self) -> None:
        if self.process is not None:
            self.process.communicate()
            self.process = None


def main(mode: str, run_dir: Path) -> None:
    whole = [{"lr": lr} for lr in (0.1, 0.2, 0.3, 0.4)]
    if mode in ("own", "whole"):
        wide = Member({"lr": 0.5}, workers=2)
        print("whole", submit([*whole, wide], 1.0, run_dir / "whole"))
    elif mode == "fractions":
        shares = [Member({"lr": share}, gpus_per_worker=share) for share in (0.4, 0.4, 0.6, 0.6)]

        def meet(event: dict[str, Any]) -> None:
            if event["type"] == "run_started":  # however the four are packed, three of them fit at once
                (run_dir / "fractions" / "together").write_text("3")

        print("fractions", submit(shares, 1.0, run_dir / "fractions", on_event=meet))
    elif mode == "mixed":
        mixed = [Member({"lr": 0.01 * (n + 1)}, gpus_per_worker=share) for n, share in enumerate(SHARES)]

        def hold(event: dict[str, Any]) -> None:
            if event["type"] == "run_started":
                (run_dir / "mixed" / "together").write_text(str(len(SHARES)))

        print("mixed", submit(mixed, 1.0, run_dir / "mixed", devices="auto", on_event=hold))
    elif mode == "waits":
        other = SomebodyElse()

        def give_back(event: dict[str, Any]) -> None:
            if event["type"] == "run_started":
                (run_dir / "waits" / "together").write_text("2")
            if event["type"] == "resources" and event["missing"].startswith("1 x"):  # one was lent
                other.release()

        other.take()
        try:
            print("waits", submit(whole[:2], 1.0, run_dir / "waits", on_event=give_back))
        finally:
            other.release()
    elif mode.startswith("each"):  # so many members, all at the same time
        count = int(mode.removeprefix("each"))
        members = [{"lr": 0.01 * (n + 1)} for n in range(count)]

        def begin(event: dict[str, Any]) -> None:
            if event["type"] == "run_started":
                (run_dir / "each" / "together").write_text(str(count))

        print("each", submit(members, 1.0, run_dir / "each", on_event=begin))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
