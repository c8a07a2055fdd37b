"""Let this environment's torchvision be imported beside a torch without CUDA, or remove it, before tests run.

Package indexes have torchvision built against CUDA alone, which a torch for CPUs cannot load. Its transforms need
no compiled operator, nor do Lightning and timm: those that it expects are declared when it is imported.
"""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK = Path(__file__).resolve().parent / "torchvision_on_cpu" / "sitecustomize.py"


def can_import() -> bool:
    """Whether a new process can import torchvision."""
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode == 0


def main() -> None:
    """Mend torchvision where it is broken, and say so in one line."""
    if importlib.util.find_spec("torchvision") is None or can_import():
        return
    packages = Path(sysconfig.get_path("purelib"))
    shutil.copyfile(HOOK, packages / "torchvision_on_cpu.py")
    (packages / "torchvision_on_cpu.pth").write_text("import torchvision_on_cpu\n")
    if can_import():
        print(
            "torchvision was built for CUDA, this torch was not: its transforms work, its operators (nms) do not"
        )
        return
    for name in ("torchvision_on_cpu.py", "torchvision_on_cpu.pth"):
        (packages / name).unlink()
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "-qq", "-y", "torchvision"], check=True)
    print(
        "torchvision cannot be imported beside this torch: it was removed; install the build that fits your torch"
    )


if __name__ == "__main__":
    main()
