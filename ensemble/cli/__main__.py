"""`python -m ensemble.cli`: the command `ensemble`."""

from __future__ import annotations

import sys

from ensemble.cli import main

if __name__ == "__main__":
    sys.exit(main())
