"""The set-up leaves a torchvision that can be imported, whatever torch stands beside it."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "mend_torchvision.py"


@pytest.mark.more
def test_torchvision_can_be_imported_after_the_set_up(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    paths = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_path("purelib")]
    (packages / "shared.pth").write_text("\n".join(paths) + "\n")
    for _ in range(2):  # a second set-up changes nothing
        done = subprocess.run([python, SCRIPT], capture_output=True, text=True)
        assert done.returncode == 0 and len(done.stdout.splitlines()) <= 1, done
    use = "import torchvision.transforms.v2 as v2, torch; print(v2.Resize(2)(torch.zeros(3, 4, 4)).shape)"
    shown = subprocess.run([python, "-c", use], capture_output=True, text=True)
    assert "[3, 2, 2]" in shown.stdout, shown.stderr
