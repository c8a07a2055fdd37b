"""The command `ensemble dashboard`, and the page that `ensemble run --dashboard` serves beside a run.

Beside a run the page has a process of its own, which is not charged to the run. Its standard input tells it how
the run stands: a line when the run has ended, and the end of file when its process is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.cli.arguments import PORT, Command, add_run_dir, port
from ensemble.cli.console import print_lines, write_json
from ensemble.cli.page_address import announced, say
from ensemble.cli.run_commands import EXIT_FAILED
from ensemble.interrupts import ENDING
from ensemble.spec import SpecError
from ensemble.store.files import format_command

if TYPE_CHECKING:
    from ensemble.reporting.dashboard.security import Guard
    from ensemble.reporting.dashboard.server import Page

END_S, POLL_S = 10.0, 0.5
URL = "http://"


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "run directory, or folder in which runs are found up to two levels deep (default: runs)"
    parser.add_argument("path", nargs="?", default="runs", metavar="RUN_DIR", help=text)
    text = f"port (default: {PORT}, another one if it is taken)"
    parser.add_argument("--port", type=port, help=text)
    text = "address to listen on (default: 127.0.0.1, which only this machine reaches)"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    text = "a further name by which browsers reach the page, such as that of a proxy; with a port if that differs"
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME[:PORT]", help=text)
    text = (
        "path at which a proxy serves the page, such as /team/run; the proxy removes it from requests that it "
        "passes on"
    )
    parser.add_argument("--prefix", type=prefix, default="", metavar="PATH", help=text)
    text = "file with the bearer token for /metrics, which only its owner may read"
    parser.add_argument("--metrics-token-file", metavar="FILE", help=text)
    parser.add_argument("--beside-run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--on-terminal", action="store_true", help=argparse.SUPPRESS)


def prefix(text: str) -> str:
    """A path without the slash at its end."""
    path = text.rstrip("/")
    if path and not re.fullmatch(r"(/[\w.~-]+)+", path, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a path such as /team/run, got {text!r}")
    return path


def dashboard(options: argparse.Namespace) -> int:
    """Serve the live page until Ctrl-C or SIGTERM."""
    from ensemble.reporting.dashboard.security import Guard, allowed_hosts, is_loopback, read_token_file

    path = Path(options.path).expanduser().absolute()
    if not options.beside_run and not path.is_dir():
        raise SpecError(f"there is no directory {options.path}; give a run directory, or a folder of runs")
    address = _resolve(options.host)
    token_file = options.metrics_token_file
    token = None if token_file is None else read_token_file(token_file)
    is_shown = options.on_terminal if options.beside_run else sys.stdout.isatty()
    with _listen(address, options.port) as listening, contextlib.ExitStack() as stack:
        number = listening.getsockname()[1]
        own = () if is_loopback(address) else _own_names()
        hosts = allowed_hosts(address, number, own, options.allow_host)
        shown = "127.0.0.1" if ip_address(address).is_unspecified else address
        for line in _explain(address, number, hosts):
            say(line)
        url = f"http://[{shown}]:{number}/" if ":" in shown else f"http://{shown}:{number}/"
        if options.prefix:
            url = _name_proxy(options.allow_host, number) + options.prefix + "/"

        guard = Guard(hosts, number, url, token, options.prefix)

        def announce() -> None:
            stack.enter_context(announced(guard.url, is_shown=is_shown))

        asyncio.run(_serve(path, guard, listening, announce, beside_run=options.beside_run))
    if options.beside_run:
        say(f"the live page used {time.process_time():.1f} s of CPU time, which the run's cost does not include")
    return 0


def _name_proxy(names: Sequence[str], number: int) -> str:
    """The address of the proxy that browsers ask, without a path."""
    if not names:
        raise SpecError("--prefix needs --allow-host NAME:PORT, by which browsers reach the proxy")
    name = names[0] if re.search(r":\d+$", names[0]) else f"{names[0]}:{number}"
    return f"https://{name.removesuffix(':443')}" if name.endswith(":443") else f"http://{name}"


def _resolve(host: str) -> str:
    """The IP address of a host name.

    Raises:
        SpecError: it has none.
    """
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SpecError(f"--host {host}: {error}") from None
    return str(min(addresses, key=lambda address: address[0] != socket.AF_INET)[4][0]).partition("%")[0]


def _own_names() -> set[str]:
    """Names and IP addresses of this machine."""
    import psutil

    names = {socket.gethostname(), socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        names |= {
            entry.address.partition("%")[0]
            for entry in addresses
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        }
    return names


def _listen(address: str, wanted: int | None) -> socket.socket:
    """A listening socket; on a free port where the default one is taken.

    Raises:
        SpecError: it cannot be had.
    """
    from ensemble.reporting.dashboard.server import listen

    try:
        return listen(address, PORT if wanted is None else wanted)
    except OSError as error:
        if wanted is None:
            with contextlib.suppress(OSError):
                free = listen(address, 0)
                say(f"port {PORT} is taken; the page has {free.getsockname()[1]}")
                return free
        raise SpecError(f"cannot listen on {address}, port {wanted or PORT}: {error.strerror}") from None


def _explain(address: str, number: int, hosts: set[str]) -> Iterator[str]:
    """Who can reach the page, where that is not only this machine, or where the user is on another."""
    from ensemble.reporting.dashboard.security import is_loopback

    tunnel = f"ssh -L {number}:127.0.0.1:{number} {socket.gethostname()}"
    if not is_loopback(address):
        names = ", ".join(sorted(hosts))
        yield (
            f"plain HTTP on {address}: others can reach port {number}, and whoever sees the traffic can act as "
            f"you; `{tunnel}` needs no open port. Names: {names} (--allow-host adds one)"
        )
    elif os.environ.get("SSH_CONNECTION"):
        yield f"from your own machine: `{tunnel}`, then open the address there"


async def _serve(
    path: Path,
    guard: Guard,
    listening: socket.socket,
    announce: Callable[[], None],
    *,
    beside_run: bool,
) -> None:
    """Serve until a signal comes, or, beside a run, it is over and nobody looks.

    Args:
        announce: prints the address; called when a signal would end this in order.
    """
    from ensemble.reporting.dashboard.feed import Runs
    from ensemble.reporting.dashboard.server import serve

    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    def stop(*_: object) -> None:
        if not loop.is_closed():  # a further signal while this ends changes nothing
            loop.call_soon_threadsafe(stopped.set)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    runs = Runs(path, is_one=True if beside_run else None)
    announce()
    async with serve(runs, guard, listening) as page:
        following = asyncio.create_task(_follow_run(page, stopped)) if beside_run else None
        await stopped.wait()
        if following is not None:
            following.cancel()


async def _follow_run(page: Page, stopped: asyncio.Event) -> None:
    """Wait until the run beside which this serves has ended and nobody looks, or its process is gone."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    if await reader.readline():  # it has ended
        gone = asyncio.create_task(reader.read())
        while page.is_looked_at() and not gone.done():
            await asyncio.wait((gone,), timeout=POLL_S)
        gone.cancel()
    stopped.set()


class PageProcess:
    """The live page of a run, served by a process of its own while the context lasts.

    Args:
        run_dir: which need not be there yet.
        wanted: the port; None: the default one, or another if it is taken.

    Raises:
        SpecError: it cannot be served.
    """

    def __init__(self, run_dir: Path, wanted: int | None) -> None:
        self._run_dir = run_dir
        command = [sys.executable, "-P", "-m", "ensemble.cli", "dashboard", str(run_dir), "--beside-run"]
        command += [] if wanted is None else ["--port", str(wanted)]
        command += ["--on-terminal"] if sys.stderr.isatty() else []
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C is meant for the run, whose end the page still shows.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._lines: list[str] = []
        self._is_known = threading.Event()
        self._printer = threading.Thread(target=self._print, name="live page", daemon=True)
        self._printer.start()
        try:
            self._is_known.wait()  # however busy the machine is: its page, or its end
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        if self._process.poll() is not None:
            why = (self._lines or [f"its process ended with exit status {self._process.returncode}"])[-1]
            raise SpecError(f"the live page cannot be served: {why.removeprefix('ensemble: ')}")

    def _print(self) -> None:
        """Pass on what it prints, from the first address on, which says that it serves."""
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._lines.append(line.rstrip("\n"))
                if self._is_known.is_set() or URL in line:
                    say("\n".join(self._lines), sys.stderr)
                    self._lines.clear()
                    self._is_known.set()
            self._process.wait()
        finally:  # whatever happens here, nobody waits for it without end
            self._is_known.set()

    def __enter__(self) -> PageProcess:
        return self

    def __exit__(self, *error: object) -> None:
        """End it: on a terminal when nobody looks any more, else, and after an error, at once."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            if error[0] is None and sys.stderr.isatty():
                self._process.stdin.write("ended\n")
                self._process.stdin.flush()
                self._wait_for_viewers()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._printer.join(END_S)
        say(f"{format_command('dashboard', self._run_dir)} serves it again", sys.stderr)

    def _wait_for_viewers(self) -> None:
        """Wait until nobody looks, or Ctrl-C."""
        try:
            self._process.wait(2 * POLL_S)
        except subprocess.TimeoutExpired:
            say("the live page is served until it is closed, or Ctrl-C", sys.stderr)
            with contextlib.suppress(KeyboardInterrupt):
                self._process.wait()


def report(options: argparse.Namespace) -> int:
    """Write the report, and what else is missing of the results, and print its path."""
    from ensemble.controller.unfinished import complete_results
    from ensemble.reporting.report import write_report
    from ensemble.store import RunDir, StoreError, WriteError, read_state

    run_dir = RunDir(options.run_dir)
    path, state = run_dir.report, read_state(run_dir.events)
    before = path.stat().st_mtime_ns if path.exists() else None
    try:
        written = complete_results(run_dir, state, [path.name])
        if path.name not in written:  # it has not ended
            write_report(run_dir)
    except WriteError as error:
        print(f"ensemble: {error}", file=sys.stderr)
        return EXIT_FAILED
    except StoreError as error:
        if not run_dir.report.exists():
            raise
        print(f"ensemble: {error}", file=sys.stderr)
        if path.stat().st_mtime_ns == before:
            return EXIT_FAILED
    print_lines(options, str(path))
    write_json(options, [{"report": str(path)}])
    return 0


DASHBOARD = Command(
    dashboard,
    "Serve the live page of a run, or of all runs in a folder, whichever process runs them.",
    add_options,
    has_json=False,
)
REPORT = Command(report, "Write the report of a run and print its path.", add_run_dir)
