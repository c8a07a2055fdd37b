"""Saves the code that members train with in the run directory, in `code/<fingerprint>/` for each version.

    code.json       what it is made of: names and digests (`ensemble.user_code.fingerprint.Code`)
    ensemble.pkl    the declaration with that code in it, as it was last submitted
    *.py            the user's modules, to be read, compared or taken up again by people

The declaration holds by value what the user's modules define, so that none of them is imported again: neither what
was edited since, nor from where they are no longer. Only where that cannot be (a module that holds a lock, say) do
other processes import them; the fingerprint tells then whether they are what they were.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import io
import json
import logging
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.spec.user_imports import find_import_folder
from ensemble.store.declaration import Declaration
from ensemble.store.errors import OtherPythonError, StoreError
from ensemble.store.files import encode_json, fsync_directory, write_bytes
from ensemble.store.log_lines import read_files
from ensemble.store.unpicklable import describe_unpicklable
from ensemble.user_code.fingerprint import PYTHON, Code
from ensemble.user_code.imports import users_modules

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store.run_paths import RunPaths

log = logging.getLogger(__name__)

_CODE, _DECLARATION = "code.json", "ensemble.pkl"
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES)


def list_code(folder: Path, code: Code, declaration: bytes, ensemble: Ensemble) -> dict[Path, bytes]:
    """The files of the code of a declaration, and what is in them, without the modules that are private.

    Args:
        folder: `code/<fingerprint>`.
    """
    files: dict[Path, bytes] = {}
    for module, file in code.sources.items():
        if is_private_module(module, ensemble):
            continue
        target = folder.joinpath(*module.split("."))
        is_package = file.name == "__init__.py"
        target = target / file.name if is_package else target.with_name(f"{target.name}.py")
        files[target] = file.read_bytes()
    return {**files, folder / _DECLARATION: declaration, folder / _CODE: describe_code(code)}


def is_private_module(name: str, ensemble: Ensemble) -> bool:
    """Whether a run does not keep a module: it, or its package, is one of `Ensemble.private_modules`."""
    return any(name == each or name.startswith(f"{each}.") for each in ensemble.private_modules)


def describe_code(code: Code) -> bytes:
    """What code.json holds."""
    stored = {"scheme": code.scheme, "python": code.python, "parts": dict(code.parts), "names": dict(code.names)}
    return encode_json({"v": 1, **stored, "predicts": code.predicts})


def save_code(files: Mapping[Path, bytes], current: Path) -> None:
    """Saves the code of a declaration (`list_code`), and replaces the file `current` by that declaration."""
    for path, content in files.items():
        _make_private_directory(path.parent)
        write_bytes(path, content)
    kept = next(path for path in files if path.name == _DECLARATION)
    link = current.with_name(f".{current.name}.{uuid.uuid4().hex}.tmp")
    try:
        os.link(kept, link)
        os.replace(link, current)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        write_bytes(current, files[kept])


def _make_private_directory(path: Path) -> None:
    """Make a directory and those above it for nobody else; `mkdir(parents=True)` leaves parents to the umask."""
    if not path.is_dir():
        _make_private_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        fsync_directory(path.parent)


def load_code(folder: Path) -> Code | None:
    """Returns the names and digests of the code in a folder; None where it is missing or unreadable."""
    try:
        stored = json.loads((folder / _CODE).read_text(encoding="utf-8"))
        names = dict(stored.get("names", {}))  # none of an earlier scheme
        parts, scheme, predicts = dict(stored["parts"]), stored["scheme"], stored.get("predicts")
        return Code(stored["python"], parts, scheme=scheme, names=names, predicts=predicts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_python(declaration: Path, folders: Path) -> None:
    """Check that this Python can run the functions that a declaration holds by value.

    Instructions of another minor version end the process, or compute something else.

    Args:
        declaration: `ensemble.pkl`, in a folder of code or a copy of it or a link to it.
        folders: `code`, with a folder for each version of the code.

    Raises:
        OtherPythonError: another Python compiled them.
    """
    kept = folders.glob("*/ensemble.pkl")
    copies = [k for k in kept if os.path.samefile(k, declaration) or filecmp.cmp(k, declaration, shallow=False)]
    codes = [code for each in copies or [declaration] if (code := load_code(each.parent)) is not None]
    others = [code.python for code in codes if code.python != PYTHON]
    if len(others) < len(codes) or not others or b"CodeType" not in declaration.read_bytes():
        return
    raise OtherPythonError(
        f"{declaration} holds functions as Python {others[0]} compiled them, which Python {PYTHON} cannot run: "
        f"use Python {others[0]}, or submit the declaration again (ensemble run SPEC), which compiles them anew"
    )


def is_fingerprint(folder: str) -> bool:
    """Whether a folder in `code` has the name of one that a run has made."""
    return _FINGERPRINT.fullmatch(folder) is not None


def remove_unused_code(run_dir: RunPaths, but: str) -> None:
    """Removes the code that a run has saved, by its log, and that no member trained with, nor the last start has.

    This process has the lock of the run's log.

    Args:
        but: fingerprint of the present code.
    """
    from ensemble.store.folding import read_state

    folder = run_dir.code(but).parent
    saved = (run_dir.path / file for file in read_files(run_dir.events).files)
    kept = (path.parent for path in saved if path.name == _DECLARATION and path.parent.parent == folder)
    unused = {each.name for each in kept if is_fingerprint(each.name) and each.is_dir() and not each.is_symlink()}
    unused -= {but}
    if unused:
        state = read_state(run_dir.events)
        unused -= {one.code for one in state.members.values() if one.checkpoint}
        unused -= {state.header.code}
    for name in unused:
        shutil.rmtree(folder / name)


def pickle_ensemble(ensemble: Ensemble, spec: Path | None) -> Declaration:
    """Returns the pickled declaration, with what the user's modules define in it by value.

    Before it stand the global settings of libraries in this process.

    Args:
        spec: the spec file with the declaration; None where there is none.

    Raises:
        StoreError: it cannot be pickled.
    """
    from pipelines.ipc.memory_pickle import REMEDY, Pickler

    of_spec = _find_spec_modules(spec)
    for found in (_find_user_modules(spec, of_spec), of_spec):
        modules = [module for module in found if not is_private_module(module.__name__, ensemble)]
        try:
            with _by_value(modules):
                return Declaration(ensemble)
        except Exception as error:  # objects raise whatever they like from __reduce__
            # What another module holds is not in the way where that module is imported instead.
            log.info("the declaration cannot be pickled with %d modules by value: %s", len(modules), error)
            failure = error
    with _by_value(modules):
        where = describe_unpicklable(ensemble, lambda part: Pickler(io.BytesIO()).dump(part))
    raise StoreError(
        f"ensemble {ensemble.name!r} cannot be sent to other processes: {f'{where}: ' if where else ''}{failure}; "
        f"{REMEDY}"
    ) from failure


def pickle_by_value(code: Code, ensemble: Ensemble) -> contextlib.AbstractContextManager[None]:
    """Within the context, what the user's modules define is pickled by value, as in `ensemble.pkl`."""
    names = [name for name in code.sources if name in sys.modules and not is_private_module(name, ensemble)]
    return _by_value([sys.modules[name] for name in names])


@contextlib.contextmanager
def _by_value(modules: Iterable[Any]) -> Iterator[None]:
    """Within the context, what these modules define is pickled by value: unpickling does not import them."""
    import cloudpickle

    new = [m for m in modules if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def modules_folder(spec: Path | None) -> Path:
    """Returns the folder from which the declaration imports modules that are not installed."""
    return spec.resolve().parent if spec is not None else Path.cwd()


def _find_user_modules(spec: Path | None, of_spec: list[Any]) -> list[Any]:
    """The user's own modules: beside the spec file, or else where this process and its script were started."""
    folders = [find_import_folder(modules_folder(spec))]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if spec is None and isinstance(script, str):
        folders.append(Path(script).resolve().parent)
    found = {name: module for folder in folders for name, module in users_modules(folder).items()}
    return [*found.values(), *(module for module in of_spec if module.__name__ not in found)]


def _find_spec_modules(spec: Path | None) -> list[Any]:
    """The module of the spec file. Only files of its name are resolved: thousands of modules may be loaded."""
    if spec is None:
        return []
    file = spec.resolve()
    names, found = {spec.name, file.name}, []
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or os.path.basename(path) not in names or module.__name__ == "__main__":
            continue
        if os.path.realpath(path) == str(file):
            found.append(module)
    return found
