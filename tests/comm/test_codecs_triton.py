"""The Triton kernels in Triton's interpreter, which needs no GPU: `tests/gpu` compares bits on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

CHILD = Path(__file__).with_name("codec_child.py")
ROOT = Path(__file__).resolve().parents[2]


def test_interpreted_kernels_write_the_bits_of_the_reference() -> None:
    sizes = ["1", "3", "127", "512", "1000", "5003"]
    command = [sys.executable, str(CHILD), "cpu", "triton", *sizes]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
