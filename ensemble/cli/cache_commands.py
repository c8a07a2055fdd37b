"""`ensemble cache`: lists the caches of prepared samples in a directory (`cache_dir=`), and removes old ones."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from ensemble.cli.arguments import add_json_option, days, path, size
from ensemble.cli.console import find_width, print_lines, write_json

if TYPE_CHECKING:
    from pipelines.cache.folder import CacheFolder, DiskCache

_FOLDER = "directory of the caches, the cache_dir= of runs (default: %(default)s)"


def add_cache_commands(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands `list` and `prune`."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "List the caches in a directory, the least recently used first: size, last use, data and stages."
    listed = commands.add_parser("list", help=text, description=text)
    listed.set_defaults(do=list_caches)
    text = (
        "Remove what killed processes have left, old caches, and then the least recently used ones, until "
        "all are within a limit. A cache that a living process of this machine has open is never removed."
    )
    pruned = commands.add_parser("prune", help=text, description=text)
    pruned.set_defaults(do=prune)
    for added in (listed, pruned):
        added.add_argument("directory", nargs="?", default="cache", type=path, metavar="DIR", help=_FOLDER)
        add_json_option(added)
    text = (
        "remove the least recently used caches until all take no more than this, such as 50G (default, without "
        "--older-than: ENSEMBLE_CACHE_DIR_BYTES, or half of what is free or taken by caches)"
    )
    pruned.add_argument("--limit", type=size, metavar="SIZE", help=text)
    text = "remove caches that were not used for so many days; 12h and 8w are hours and weeks"
    pruned.add_argument("--older-than", type=days, metavar="DAYS", help=text)
    pruned.add_argument("--dry-run", action="store_true", help="remove nothing, show what would be removed")


def list_caches(options: argparse.Namespace) -> int:
    """Show the caches in a directory."""
    from ensemble.reporting.text import memory

    folder = _open_folder(options)
    found = folder.list_caches()
    _print_table(options, "in use", [(each, "yes" if each.in_use else "no") for each in found])
    total = sum(each.size_bytes for each in found)
    print_lines(
        options, f"{memory(total)} in {len(found)} caches; the limit of a new run is {memory(folder.limit)}"
    )
    write_json(options, [_as_row(each) for each in found])
    return 0


def prune(options: argparse.Namespace) -> int:
    """Remove old caches from a directory."""
    from ensemble.reporting.text import memory

    folder = _open_folder(options, options.limit)
    limit = None if options.limit is None and options.older_than is not None else folder.limit
    found = folder.prune(limit, options.older_than, dry_run=options.dry_run)
    verb = "would be removed" if options.dry_run else "removed"
    done = [verb if gone else "kept: in use" if each.in_use else "kept" for each, gone in found]
    _print_table(options, "what happens", list(zip((each for each, _ in found), done, strict=True)))
    kept, freed = (sum(each.size_bytes for each, gone in found if gone is wanted) for wanted in (False, True))
    print_lines(
        options, f"{memory(freed)} {'would be freed' if options.dry_run else 'freed'}, {memory(kept)} kept"
    )
    if limit is not None and kept > limit:
        print_lines(options, f"that is more than {memory(limit)}: what is kept is in use")
    write_json(
        options, [{**_as_row(each), "removed": gone and not options.dry_run, "due": gone} for each, gone in found]
    )
    return 0


def _open_folder(options: argparse.Namespace, limit: int | None = None) -> CacheFolder:
    from ensemble.store import StoreError
    from pipelines.cache.folder import CacheFolder

    if not os.path.isdir(options.directory):
        raise StoreError(f"there is no directory {options.directory}; give the cache_dir= of runs")
    return CacheFolder(options.directory, limit)


def _print_table(options: argparse.Namespace, last: str, rows: list[tuple[DiskCache, str]]) -> None:
    from ensemble.reporting.tables import format_table
    from ensemble.reporting.text import ABSENT, memory

    if not rows:
        print_lines(options, f"no caches in {options.directory}")
        return
    heads = ["cache", "size", "last use", "samples of", "stages", last]
    cells = []
    for each, said in rows:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.last_use))
        source = f"{each.header.get('source', ABSENT)}: {each.header.get('first', ABSENT)}"
        what = source if each.is_whole else "left by a process that was killed"
        row = [os.path.basename(each.path), memory(each.size_bytes), used, what]
        cells.append([*row, each.header.get("stages", ABSENT), said])
    print_lines(options, *format_table(heads, cells, find_width()).splitlines())


def _as_row(cache: DiskCache) -> dict[str, Any]:
    return {
        "path": cache.path,
        "bytes": cache.size_bytes,
        "last_use": cache.last_use,
        "in_use": cache.in_use,
        "whole": cache.is_whole,
        **{name: cache.header.get(name) for name in ("source", "first", "stages", "n")},
    }
