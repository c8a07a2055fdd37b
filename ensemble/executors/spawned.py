"""The main module of processes that a member spawns: they find the spec's classes and functions as it does."""

from __future__ import annotations

import os
import sys

_RUN_DIR = "ENSEMBLE_MEMBER_OF"  # in the environment of members


def enter_modules(run_dir: str) -> None:
    """Let what this process spawns find the modules of a declaration by their names."""
    os.environ[_RUN_DIR] = run_dir


if __name__ == "__mp_main__":
    from ensemble.store import RunDir

    RunDir(os.environ[_RUN_DIR]).load_ensemble(takes_modules=True)
    globals().update({k: v for k, v in vars(sys.modules["__main__"]).items() if not k.startswith("__")})
