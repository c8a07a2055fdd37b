"""Saves the code that members train with, in `code/<fingerprint>/`: code.json, ensemble.pkl, the user's modules.

`ensemble.pkl` holds by value what the user's modules define, so that no process imports what was edited since.
Where that cannot be (a module that holds a lock), processes import them, and the fingerprint tells whether they
are what they were.
"""

from __future__ import annotations

import contextlib
import errno
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
from ensemble.store.errors import StoreError
from ensemble.store.event_log import read_files
from ensemble.store.files import encode_json, make_directory, write_bytes
from ensemble.store.unpicklable import describe_unpicklable
from ensemble.user_code.fingerprint import Code
from ensemble.user_code.imports import users_modules

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store.run_paths import RunPaths

log = logging.getLogger(__name__)

_CODE, _DECLARATION = "code.json", "ensemble.pkl"
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES)


def list_code(folder: Path, code: Code, declaration: bytes) -> dict[Path, bytes]:
    """The files of the code of a declaration, and what is in them.

    Args:
        folder: `code/<fingerprint>`.
    """
    files: dict[Path, bytes] = {}
    for module, file in code.sources.items():
        target = folder.joinpath(*module.split("."))
        is_package = file.name == "__init__.py"
        target = target / file.name if is_package else target.with_name(f"{target.name}.py")
        files[target] = file.read_bytes()
    return {**files, folder / _DECLARATION: declaration, folder / _CODE: describe_code(code)}


def describe_code(code: Code) -> bytes:
    """What code.json holds."""
    stored = {"scheme": code.scheme, "python": code.python, "parts": dict(code.parts), "names": dict(code.names)}
    return encode_json({"v": 1, **stored, "predicts": code.predicts})


def save_code(files: Mapping[Path, bytes], current: Path) -> None:
    """Saves the code of a declaration (`list_code`), and replaces the file `current` by that declaration."""
    for path, content in files.items():
        make_directory(path.parent, 0o700)
        write_bytes(path, content, mode=0o600)
    kept = next(path for path in files if path.name == _DECLARATION)
    link = current.with_name(f".{current.name}.{uuid.uuid4().hex}.tmp")
    try:
        os.link(kept, link)
        os.replace(link, current)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        write_bytes(current, files[kept], mode=0o600)


def load_code(folder: Path) -> Code | None:
    """Returns the names and digests of the code in a folder; None where it is missing or unreadable."""
    try:
        stored = json.loads((folder / _CODE).read_text(encoding="utf-8"))
        names = dict(stored.get("names", {}))  # none of an earlier scheme
        parts, scheme, predicts = dict(stored["parts"]), stored["scheme"], stored.get("predicts")
        return Code(stored["python"], parts, scheme=scheme, names=names, predicts=predicts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
    unused = {
        version.name
        for version in kept
        if is_fingerprint(version.name) and version.is_dir() and not version.is_symlink()
    }
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
    for modules in (_find_user_modules(spec, of_spec), of_spec):
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


def pickle_by_value(code: Code) -> contextlib.AbstractContextManager[None]:
    """Within the context, what the user's modules define is pickled by value, as in `ensemble.pkl`."""
    return _by_value([sys.modules[name] for name in code.sources if name in sys.modules])


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
    by_name = {name: module for folder in folders for name, module in users_modules(folder).items()}
    return [*by_name.values(), *(module for module in of_spec if module.__name__ not in by_name)]


def _find_spec_modules(spec: Path | None) -> list[Any]:
    """The module of the spec file. Only files of its name are resolved: thousands of modules may be loaded."""
    if spec is None:
        return []
    file = spec.resolve()
    names, spec_modules = {spec.name, file.name}, []
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or os.path.basename(path) not in names or module.__name__ == "__main__":
            continue
        if os.path.realpath(path) == str(file):
            spec_modules.append(module)
    return spec_modules
