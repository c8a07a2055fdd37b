"""`python -m ensemble`: the command `ensemble`."""

from __future__ import annotations

import sys
from pathlib import Path

if not sys.flags.safe_path:  # the present folder, which is first, may have files named as what we import
    here = sys.path.pop(0)
    sys.path += [here] * Path(__file__).parents[1].samefile(here or ".")

from ensemble.cli import main

if __name__ == "__main__":
    sys.exit(main())
