"""Artifacts on CUDA: programs predict there what they predict on the CPU. Skipped where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "artifact"))

import pyarrow.parquet as pq  # noqa: E402
from artifact_runs import declare, make_images, train  # noqa: E402

import ensemble  # noqa: E402
from ensemble.artifact import predict  # noqa: E402
from ensemble.artifact.program import load_program  # noqa: E402

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # a GPU multiplies and sums in another order


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "images", declare())


@pytest.fixture(scope="module")
def artifact(run: Path) -> Path:
    return ensemble.export(run, run.parent / "artifact")


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.more
@pytest.mark.parametrize("name", ["model.pt2", "uncertainty.pt2"])
@pytest.mark.parametrize("size", [(8, 8), (31, 17)])
def test_a_program_on_a_gpu_predicts_as_on_the_cpu(artifact: Path, name: str, size: tuple[int, int]) -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 3, *size), np.uint8))
    wanted, program = load_program(artifact / name)({"image": images}), load_program(artifact / name, "cuda")
    for count in (0, 1, 5):
        found = program({"image": images[:count].cuda()})
        pairs = [(found, wanted)] if name == "model.pt2" else [(found[key], wanted[key]) for key in wanted]
        for one, other in pairs:
            assert one.device.type == "cuda"
            torch.testing.assert_close(one.cpu(), other[:count], **CLOSE)


@pytest.mark.more
def test_the_lines_of_the_card_for_a_gpu_run(artifact: Path) -> None:
    lines = (artifact / "README.md").read_text().split("```python\n")[2].split("```")[0]
    code = (
        f"import torch\n{lines}\n"
        'values = model({"image": torch.zeros(3, 3, 9, 10, dtype=torch.uint8, device="cuda")})\n'
        'assert values.device.type == "cuda" and values.shape == (3, 4)\n'
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=artifact, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.more
@pytest.mark.parametrize("uncertainty", [False, True])
def test_predictions_are_made_on_the_gpu_unless_told_otherwise(
    run: Path, artifact: Path, tmp_path: Path, uncertainty: bool
) -> None:
    np.savez(tmp_path / "x.npz", image=make_images(7, 33)["image"])
    found = {}
    for name, model, device in (("gpu", artifact, None), ("run", run, None), ("cpu", artifact, "cpu")):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        predict(model, tmp_path / "x.npz", tmp_path / name, uncertainty=uncertainty, batch_size=8, device=device)
        assert (torch.cuda.max_memory_allocated() > before) == (device is None)
        found[name] = pq.read_table(tmp_path / name)
    for name in ("gpu", "run"):
        assert found[name].column_names == found["cpu"].column_names
        for column in ("probabilities", *(("total", "epistemic") if uncertainty else ())):
            one, other = (np.array(found[key].column(column).to_pylist()) for key in (name, "cpu"))
            np.testing.assert_allclose(one, other, **CLOSE)
