"""Which sample a rank is preparing by itself: noted in its member's directory, for who asks after its death."""

from __future__ import annotations

from pathlib import Path

from ensemble.store import RunDir

SPLITS = ("train", "valid", "test")


def note_file(run_dir: RunDir, member: str, rank: int, attempt: int) -> Path:
    """Where a rank notes which sample it is preparing; an attempt that has not ended yet has a file of its own."""
    return run_dir.member(member) / f"preparing-{rank}-{attempt}"


def interrupted(path: Path) -> dict[str, tuple[int, int]]:
    """split -> (index, epoch) of the samples that were being prepared when the process that noted them ended.

    None where nothing was noted, or that cannot be read: it explains a failure, and is not to be another.
    """
    from pipelines.prepare.deadly_records import read_note

    try:
        file = path.read_bytes()
    except OSError:
        return {}
    noted = {split: read_note(file, place) for place, split in enumerate(SPLITS)}
    return {split: at for split, at in noted.items() if at is not None}
