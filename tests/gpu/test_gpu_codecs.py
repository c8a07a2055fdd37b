"""Codecs on CUDA write the bits that they write on a CPU. Skipped where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comm"))

import codec_child  # noqa: E402

from ensemble.comm.codecs import make_codec  # noqa: E402


@pytest.mark.parametrize("form", ["torch", "triton"])
def test_bits_of_a_gpu_are_those_of_a_cpu(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    if form == "triton":
        pytest.importorskip("triton")
    codec_child.main("cuda", form, [1, 3, 127, 512, 1000, 5003, 1_000_001])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["onebit", "fp16", "bf16"])
def test_other_codecs_agree_with_the_cpu(name: str) -> None:
    codec, values = make_codec({"name": name}), codec_child.values_of(5003)
    wires = []
    for device in ("cpu", "cuda"):
        error = values.to(device, copy=True)
        wire = torch.zeros(codec.wire_bytes(5003), dtype=torch.uint8, device=device)
        codec.encode(error, wire, key=0, error=error)
        wires.append((wire.cpu().tolist(), error.cpu().tolist()))
    assert wires[0] == wires[1]


@pytest.mark.slow  # it compares times
def test_triton_packs_faster_than_torch() -> None:
    pytest.importorskip("triton")
    values = torch.randn(2**24, device="cuda")
    took = {}
    for form in ("torch", "triton"):
        codec = make_codec({"name": "qsgd4"}, form)
        wire = torch.zeros(codec.wire_bytes(2**24), dtype=torch.uint8, device="cuda")
        codec.encode(values, wire, key=0)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for key in range(10):
            codec.encode(values, wire, key=key)
        end.record()
        torch.cuda.synchronize()
        took[form] = start.elapsed_time(end) / 10
    print(", ".join(f"{form}: {2**26 / ms / 1e6:.1f} GB/s" for form, ms in took.items()))
    assert took["triton"] < took["torch"]
