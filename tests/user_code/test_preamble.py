"""The imports with which a file of the user's begins are executed as far as nothing else happens before them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ensemble.user_code.preamble import Preamble

#: The file `spec.py` -> which of the installed packages `a`, `b`, `c` are imported, in this order.
FILES = {
    "import a, b\nfrom c import part": "abc",
    "'''A text.'''\nfrom __future__ import annotations\nimport a\nimport os.path\nimport b": "ab",
    "import a\nSIZE, RATES = 3, [0.1, -0.2]\nNAMES: dict[str, int] = {'x': 2**3}\nimport b": "ab",
    "import a\ndef f(x: int, y: list[int] = (), *, z=None) -> None:\n    return x.y()\nimport b": "ab",
    "import a\nif __name__ == '__main__':\n    import c\nimport b": "ab",
    "import a\nif __name__ == 'spec':\n    import c\nimport b": "a",
    "import a\n__path__ = ['x']\nimport b": "a",
    "import a\nfrom own import *\nimport b": "a",
    "import a\nimport unknown_owner\nimport b": "a",
    "import a\nimport folder.module\nimport b": "acb",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import c\nimport b": "b",
    "import a\nimport os\nos.environ['X'] = '1'\nimport b": "a",
    "import a\nx = a.thing\nimport b": "a",
    "import a\nx = f'{a}'\nimport b": "a",
    "import a\ndef f(x=a.thing()):\n    pass\nimport b": "a",
    "import a\n@a.thing\ndef f():\n    pass\nimport b": "a",
    "import a\nclass K:\n    import c\nimport b": "a",
    "import a\ntry:\n    import c\nexcept ImportError:\n    pass\nimport b": "a",
    "import a\nif a:\n    import c\nimport b": "a",
    "import a\nif __name__ == '__main__':\n    pass\nelse:\n    import c\nimport b": "a",
    "import a\nfor c in 'x': pass\nimport b": "a",
    "import a\nimport missing\nimport b": "a",
    "import a\nimport ends\nimport b": "a",
    "from own import x\nimport b": "ab",
    "import own, b": "ab",
    "import acts\nimport b": "a",
    "import package.inner\nimport b": "acb",
    "from package.inner import x\nimport b": "acb",
    "from package import inner\nimport b": "",
    "from plain import inner\nimport b": "cb",
    "from package.acts import x\nimport b": "a",
    "import round\nimport b": "ab",
    "from . import sibling\nimport b": "",
    "import a\nimport broken\nimport b": "a",
    "def f(:\n": "",
}
OWN = {
    "own.py": "import a\nx = 1",
    "acts.py": "import a\nprint()",
    "package/__init__.py": "import a",
    "package/inner.py": "from .sibling import y\nx = 1",
    "plain/__init__.py": "",
    "plain/inner.py": "import c",
    "folder/module.py": "import c",
    "package/sibling.py": "import c\ny = 2",
    "package/acts.py": "x = print()\nimport c",
    "round.py": "import a\nimport round\nimport other",
    "other.py": "import round",
    "broken.py": "this is no Python",
}


@pytest.mark.parametrize(("text", "imported"), FILES.items(), ids=range(len(FILES)))
def test_a_preamble_ends_at_the_first_statement_that_does_something(
    text: str, imported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, folder = tmp_path / "site-packages", tmp_path / "own"
    files = {
        f"site-packages/{name}.py": f"import builtins\nbuiltins.SEEN.append({name!r})\npart = 1" for name in "abc"
    }
    files |= {
        "site-packages/ends.py": "raise SystemExit(3)",
        "site-packages/unknown_owner.py": "",
        "own/spec.py": text,
    }
    for file, body in {**files, **{f"own/{file}": body for file, body in OWN.items()}}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(body)
    seen: list[str] = []
    monkeypatch.setattr("builtins.SEEN", seen, raising=False)
    monkeypatch.setattr(sys, "path", [str(folder), str(site), *sys.path])
    before = {*sys.modules}
    Preamble(lambda name: name in {"a", "b", "c", "missing", "ends"} | sys.stdlib_module_names).execute(
        folder / "spec.py"
    )
    loaded = sys.modules.keys() - before
    for name in loaded:
        del sys.modules[name]
    assert "".join(seen) == imported
    assert not loaded & {"spec", "own", "acts", "package", "plain", "round", "other"}, (
        "the user's modules are not loaded"
    )
