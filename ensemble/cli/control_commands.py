"""Commands that follow a run in progress or send requests to it, from any shell that sees its directory."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ensemble.cli.arguments import Command, add_member, add_run_dir, count
from ensemble.cli.console import print_lines, write_json
from ensemble.spec import Member, SpecError, unknown_name
from ensemble.store.files import format_command

#: The options of `ensemble add`: the fields of a Member that a request can contain.
MEMBER_FIELDS = [field.name for field in dataclasses.fields(Member) if field.name not in ("params", "weights")]
POLL_S = 0.2  # between reads of a log that is followed


def send_request(options: argparse.Namespace) -> int:
    """Ask the run to cancel, pause or resume a member or all members, and print its answer."""
    from ensemble.run import attach

    request = getattr(attach(options.run_dir), options.command)(options.member)
    answer = request.wait()
    print_lines(options, answer["message"])
    write_json(options, [{"run_dir": options.run_dir, "member": options.member, "message": answer["message"]}])
    return 0


def add(options: argparse.Namespace) -> int:
    """Add a member to the run, or a clone of one of its members with changes, and print its name."""
    from ensemble.run import attach

    params = parse_params(options.params)
    fields = {
        name: _parse_value(getattr(options, name)) for name in MEMBER_FIELDS if getattr(options, name) is not None
    }
    run = attach(options.run_dir)
    _check_numbers(params, [member.params for member in run.state.members.values()])
    if options.source is not None:
        request = run.clone(options.source, Member(params, **fields), warm=options.warm)
    elif options.warm:
        raise SpecError("--warm starts a clone with the weights of a member: name it with --from MEMBER")
    else:
        request = run.add(Member(params, **fields))
    answer = request.wait()
    print_lines(options, answer["message"])
    write_json(options, [{"run_dir": options.run_dir, "member": answer["member"], "message": answer["message"]}])
    return 0


def parse_params(settings: Sequence[str]) -> dict[str, Any]:
    """The hyperparameters of `NAME=VALUE` each; a value is JSON, a number, or text.

    Raises:
        SpecError: one is of another form.
    """
    params: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise SpecError(f"a hyperparameter must be NAME=VALUE, got {setting!r}")
        if any("\ud800" <= letter <= "\udfff" for letter in setting):
            raise SpecError(f"a hyperparameter must be text in UTF-8, got {setting!r}")
        params[name] = _parse_value(text)
    return params


def _check_numbers(params: dict[str, Any], members: list[dict[str, Any]]) -> None:
    """Check that text is not given for a hyperparameter that is a number in each of the run's members.

    Raises:
        SpecError: it is.
    """
    for name, value in params.items():
        numbers = [member[name] for member in members if name in member]
        if isinstance(value, str) and numbers and all(type(number) in (int, float) for number in numbers):
            raise SpecError(f"{name}={value} is not a number; all members have numbers: {name}={numbers[0]!r} ...")


def _parse_value(text: str) -> Any:
    """Parse a value: as JSON, else as a number (`.5`), else as text."""
    for read in (json.loads, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def stop(options: argparse.Namespace) -> int:
    """Ask the run to stop."""
    from ensemble.run import attach, find_loss
    from ensemble.store import RunDir, is_locked

    run = attach(options.run_dir)
    state = run.state
    run_dir = RunDir(options.run_dir)
    gone = find_loss(run_dir, state)
    # A log that is locked has a controller, which may have logged nothing yet: it starts, or goes on with a run.
    is_starting = (not state.starts or state.ended is not None) and is_locked(run_dir.events) is True
    is_requested = is_starting or (state.ended is None and gone is None)
    if not is_requested:
        print_lines(options, gone or f"{options.run_dir} has ended already")
    else:
        run.stop()
        on = f"process {state.header.pid} on {state.header.host}"
        print_lines(
            options,
            "asked the run, which is starting, to stop as soon as it has started"
            if is_starting
            else f"asked {on} to stop: members write a checkpoint and end within a minute",
            f"{format_command('resume', options.run_dir)} continues the run",
        )
    write_json(options, [{"run_dir": str(run.run_dir), "requested": is_requested}])
    return 0


def logs(options: argparse.Namespace) -> int:
    """Print the output of one member, or of all; with `--follow` until the run ends."""
    from ensemble.store import RunDir, RunStatus

    run_dir = RunDir(options.run_dir)
    members = list(RunStatus.load(run_dir).state.members)
    if options.member is not None and options.member not in members:
        raise SpecError(unknown_name(f"{options.run_dir} has no member", options.member, members))
    rows = []
    for row in _read_lines(run_dir, options.member, follow=options.follow, last=options.lines):
        if options.json:
            rows.append(row)
        print_lines(options, row["line"] if options.member else f"{row['member']}  {row['line']}")
    write_json(options, rows)
    return 0


def _read_lines(
    run_dir: Any, member: str | None, *, follow: bool, last: int | None = None
) -> Iterator[dict[str, str]]:
    """The lines of the members' logs, member by member; with `follow` also new lines until the run ends.

    Args:
        last: of each member only so many of the lines that are there already.
    """
    from ensemble.run import StateFollower
    from ensemble.store.member_log import CHUNK_BYTES, find_last_lines, read_pieces
    from ensemble.store.regular_files import open_regular

    follower, begun = StateFollower(run_dir), dict[str, bytes]()
    read_to = dict[str, tuple[int, int]]()  # of each member's log, its inode and the position
    over = False
    while not over:
        gone = follower.find_loss()  # before the logs are read, so that the last lines are included
        follower.read()
        over = not follow or follower.state.ended is not None or gone is not None
        for name in [member] if member is not None else list(follower.state.members):
            try:
                with open_regular(run_dir.log(name), follows_link=True) as file:
                    inode = os.fstat(file.fileno()).st_ino
                    if name in read_to:
                        begin = read_to[name][1] if read_to[name][0] == inode else 0  # another log
                    else:
                        begin = 0 if last is None else find_last_lines(file, last)
                    read_to[name] = inode, begin
                    for read, offset in read_pieces(file, begin):
                        piece, read_to[name] = begun.pop(name, b"") + read, (inode, offset)
                        whole = piece.rfind(b"\n") + 1 or (len(piece) if len(piece) > CHUNK_BYTES else 0)
                        if whole < len(piece):
                            begun[name] = piece[whole:]
                        lines = piece[:whole].decode(errors="replace").splitlines()
                        yield from ({"member": name, "line": line} for line in lines)
            except FileNotFoundError:
                continue
            if over and name in begun:
                yield {"member": name, "line": begun[name].decode(errors="replace")}
        if not over:
            time.sleep(POLL_S)


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    add_member(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="continue until the run ends")
    text = "begin with the last N lines of each member"
    parser.add_argument("--lines", "-n", type=count, metavar="N", help=text)


def _add_add_options(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--from", dest="source", metavar="MEMBER", help="the member that is cloned")
    text = "start with the weights of that member's last checkpoint, with a new optimizer, from epoch 1"
    parser.add_argument("--warm", action="store_true", help=text)
    text = "hyperparameters; a value is JSON or text"
    parser.add_argument("params", nargs="*", metavar="NAME=VALUE", help=text)
    for field in MEMBER_FIELDS:
        parser.add_argument(f"--{field.replace('_', '-')}", dest=field, metavar="VALUE", help=f"Member.{field}")


LOGS = Command(logs, "Print the output of a member, or of all members.", _add_log_options)
STOP = Command(
    stop, "Stop a run: all members write a checkpoint and end. `ensemble resume` continues it.", add_run_dir
)
CANCEL = Command(send_request, "End a member, or all members, permanently.", add_member)
PAUSE = Command(
    send_request, "Pause a member, or all members: it writes a checkpoint and frees its resources.", add_member
)
ADD = Command(
    add,
    "Add a member to a run in progress, or with --from a clone of one of its members: its declaration with the "
    "hyperparameters and options given here. It joins the stream at the start of the stream's next epoch.",
    _add_add_options,
)
