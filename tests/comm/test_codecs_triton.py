"""The Triton kernels in Triton's interpreter, which needs no GPU. Skipped where Triton is absent."""

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


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_kernels_compile_for_a_gpu_without_fused_or_approximate_arithmetic(norm: str) -> None:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ensemble.comm.codecs import qsgd_triton
    from ensemble.comm.codecs.qsgd import HUGE, TINY

    constants = {"LEVELS": 7, "BITS": 4, "BUCKET": 512, "BYTES": 256, "ROWS": 8, "L2": norm == "l2", "ERROR": True}
    constants |= {"TINY": TINY, "HUGE": HUGE}
    signature = {"values": "*fp32", "wire": "*u8", "error": "*fp32"}
    signature |= dict.fromkeys(("buckets", "m", "k", "start", "k0", "k1"), "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(qsgd_triton._encode, signature, constants)
    code = compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False}).asm["ptx"]
    assert "div.rn.f32" in code and [bad for bad in ("fma", "div.full", "approx", "ftz") if bad in code] == []
