"""A Ray head for tests: on loopback, its files in a directory that goes with it."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from kit.free_ports import find_free_ports


@contextlib.contextmanager
def start_head(
    environment: dict[str, str], options: Sequence[str] = (), *, token: bool = True, dashboard: bool = False
) -> Iterator[dict[str, str]]:
    """Start one; yields what its clients' environment needs. `token`: it asks its clients for one.

    Args:
        dashboard: whether it takes jobs.
    """
    short = Path("/tmp") / f"t{secrets.token_hex(4)}"  # Ray's sockets lie below
    short.mkdir(mode=0o700)
    port, client_port, agent_port = find_free_ports(3)
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if token else {}
    mode = {"RAY_AUTH_MODE": "token" if token else "disabled"}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)]
    command += ["--node-ip-address", "127.0.0.1", "--disable-usage-stats"]
    command += ["--include-dashboard", str(dashboard).lower()]
    # Else all heads of a machine want the same ports.
    command += ["--min-worker-port", "0", "--max-worker-port", "0"]
    command += ["--dashboard-agent-listen-port", str(agent_port)]
    command += ["--ray-client-server-port", str(client_port)]
    command += ["--object-store-memory", str(80 * 2**20), "--temp-dir", str(short / "ray"), *options]
    with open(short / "head.log", "wb") as log:
        head = subprocess.Popen(command, env={**environment, **own, **mode}, stdout=log, stderr=subprocess.STDOUT)
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert head.poll() is None, (short / "head.log").read_text()
            time.sleep(0.1)
        yield {**own, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    except BaseException as error:
        error.add_note(f"the head's exit status is {head.poll()}; it wrote:\n{(short / 'head.log').read_text()}")
        raise
    finally:
        mine = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        for each in [*mine, head]:
            if isinstance(each, subprocess.Popen) or each.is_running():
                each.kill()
        head.wait()
        psutil.wait_procs(mine, timeout=60)
        shutil.rmtree(short)
