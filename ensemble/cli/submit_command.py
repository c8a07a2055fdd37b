"""`ensemble submit`: a run as a job of a Ray cluster."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ensemble.cli.arguments import (
    Command,
    add_shared,
    path,
)
from ensemble.cli.console import write_json
from ensemble.executors.ray.jobs import JobClient
from pipelines.providers import import_object


def submit(options: argparse.Namespace) -> int:
    """Run a spec file as a job on a cluster, unless a job of that name is running."""
    from ensemble.store.mirror_status import NO_MIRROR

    spec = Path(options.spec).expanduser()
    name = options.name or spec.stem
    run_dir = Path(options.run_dir or Path("runs") / name).expanduser().absolute()
    names = ("accept_code", "accept_data", "fresh", "no_rehearsal", "allow_failed", "dashboard")
    flags = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    values = {name: getattr(options, name) for name in ("dashboard_port", "max_gpus", "max_cpus", "mirror")}
    values["trust_folder"] = options.trust_folder and os.path.abspath(options.trust_folder)
    flags += [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
    if options.mirror not in (None, NO_MIRROR):
        # Before anybody can read it in the list of jobs.
        import_object("ensemble.store.mirror_objects:check_url")(options.mirror)
    jobs = JobClient(options.address)
    id, fresh = jobs.submit(
        spec,
        name=name,
        run_dir=run_dir,
        settings=options.set,
        working_dir=Path(options.working_dir).expanduser() if options.working_dir else None,
        flags=flags,
    )
    if not fresh:
        print(f"ensemble: the job {id} is running already", file=sys.stderr)
    if options.json != "-":
        print(id, flush=True)
    write_json(options, [{"id": id, "fresh": fresh, "name": name, "run_dir": str(run_dir)}])
    return jobs.follow_log(id, lambda text: print(text, end="", flush=True)) if options.follow else 0


def _add_submit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC.py", type=path)
    text = "address of the cluster's job server, such as http://HEAD:8265"
    parser.add_argument("--address", required=True, metavar="URL", help=text)
    text = "run directory, with the same path on every node (default: runs/NAME in this directory)"
    parser.add_argument("--run-dir", help=text)
    text = "name of the job, of which one runs at a time (default: the file's name without .py)"
    parser.add_argument("--name", help=text)
    text = "directory with the spec and its imports, copied to the cluster (default: the spec's)"
    parser.add_argument("--working-dir", help=text)
    add_shared(
        parser, "--accept-code", "--accept-data", "--trust-folder", "--allow-failed", "--fresh", "--no-rehearsal",
        "--max-gpus",
        "--max-cpus", "--mirror", "--dashboard", "--dashboard-port",
    )  # fmt: skip
    text = "print the job's output until it ends, and exit with its status"
    parser.add_argument("--follow", action="store_true", help=text)
    add_shared(parser, "--set")


SUBMIT = Command(submit, "Run a spec file as a job on a Ray cluster.", _add_submit_options)
