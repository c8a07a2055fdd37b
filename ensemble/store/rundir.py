"""Creates a run's directory, and loads the declaration from it.

Loading `ensemble.pkl` runs code, so it is loaded only when the directory and the file belong to the user, and
nobody else may write them (`ensemble.store.trust`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pickle
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.spec.user_imports import find_import_folder, without_bytecode
from ensemble.store.declaration import DeclarationUnpickler
from ensemble.store.digests import digest_bytes, flush_and_digest, open_checked
from ensemble.store.errors import DamagedError, explain_format
from ensemble.store.event_log import EventLog, read_files
from ensemble.store.files import (
    OtherPythonError,
    StoreError,
    encode_json,
    has_begun,
    make_directory,
    make_write_error,
    write_bytes,
)
from ensemble.store.frozen_arrays import name_to_digest, remove_unused_arrays, save_array
from ensemble.store.kept_code import (
    list_code,
    modules_folder,
    pickle_ensemble,
    remove_unused_code,
    save_code,
)
from ensemble.store.run_paths import RunPaths
from ensemble.store.trust import check_ownership, explain_distrust
from ensemble.store.versions import list_missing, revision, versions
from ensemble.user_code.fingerprint import Code, code_of

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store.declaration import Declaration

#: Of run.json and of the declaration, which is unpickled only where run.json has this number: unpickling keeps
#: options that are no more, in silence. So it is raised where a declaration loses one, or one changes its meaning.
VERSION = 5

#: What to do about a declaration that is damaged and that nothing else has.
ANEW = "`ensemble run SPEC` on this directory writes it again"

log = logging.getLogger(__name__)

#: Room that must be there before anything starts: a log, a report and a checkpoint of a small model.
PROBE_BYTES = 16 * 2**20


class RunDir(RunPaths):
    """The directory of one run; the constructor does not access the disk.

    Args:
        files: what the declaration and the code are, see `RunState.files`; None: the log is read for it.
    """

    def __init__(self, path: str | os.PathLike[str], files: Mapping[str, list[str]] | None = None) -> None:
        super().__init__(path)
        self._files = files

    @property
    def info(self) -> dict[str, Any]:
        """What run.json says; where that is damaged or gone, what the log says that was written there.

        Raises:
            StoreError: this is no run directory, or one of another format.
        """
        if not (info := self.find_info()):
            raise StoreError(f"no run here: {self.info_file} does not exist; give a run directory")
        return info

    def find_info(self) -> dict[str, Any]:
        """`info`, or nothing where this is no run directory.

        Raises:
            StoreError: it is of another format.
        """
        info = self._read_info() or read_files(self.events).info
        if info and (version := info.get("v")) != VERSION:
            raise StoreError(explain_format(self.path, version, VERSION, "train it again in another directory"))
        return info

    def _read_info(self) -> dict[str, Any] | None:
        """What run.json says; None where it is damaged or gone."""
        try:
            with self._open_kept(self.info_file, ANEW) as name, open(name, "rb") as file:
                info = dict(json.load(file))
            _ = info["v"]
        except (OSError, ValueError, KeyError, TypeError, DamagedError) as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                _warn_once(f"{self.info_file} is not used: {error}")
            return None
        return info

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        ensemble: Ensemble,
        spec_file: str | os.PathLike[str] | None = None,
        code: Code | None = None,
        *,
        executor: str | None = None,
        declaration: Declaration | None = None,
    ) -> RunDir:
        """Creates the directory of a run, or opens the one that this ensemble already has there.

        In an existing directory, `run.json` stays and the declaration is replaced by the present one. The log has
        the digests of the files before they are written.

        Code and arrays are removed that neither this declaration nor a member with a checkpoint has.

        Args:
            code: the ensemble's, where it is known.
            executor: with which it is started first; a resume uses it where the log has lost the last start.
            declaration: the pickled ensemble, where it was pickled already.

        Raises:
            StoreError: it holds another run or what is none, cannot be written, has no room, or the ensemble
                cannot be pickled.
        """
        run_dir = cls(path)
        run_dir.check_is_free(ensemble)
        spec = Path(spec_file) if spec_file is not None else None
        code, declaration = code or code_of(ensemble), declaration or pickle_ensemble(ensemble, spec)
        content = declaration.content
        arrays = {run_dir.data / name: array for name, array in declaration.arrays.items()}
        new = [path for path in arrays if not path.exists()]
        needed = len(content) + sum(arrays[path].nbytes for path in new)
        try:
            run_dir._make_directory(needed)
            run_dir.requests.mkdir(mode=0o700, exist_ok=True)
            make_directory(run_dir.path / "members")
            code_files = list_code(run_dir.code(code.fingerprint), code, content)
            files, info = {run_dir.ensemble_file: content}, None
            if spec is not None and spec.absolute() != run_dir.spec_file:
                files[run_dir.spec_file] = spec.read_bytes()
            if run_dir._read_info() is None:
                folder = modules_folder(spec)
                info = read_files(run_dir.events).info or {
                    "v": VERSION,
                    "name": ensemble.name,
                    "run_id": uuid.uuid4().hex,
                    "created": time.time(),
                    "versions": versions(),
                    "revision": revision(folder),
                    "code": str(folder),
                    "path": _list_import_folders(code, folder),
                    "spec": None if spec is None else str(spec.absolute()),
                    "command": " ".join(_name_words(sys.argv)),
                    "executor": executor,
                }
                files[run_dir.info_file] = encode_json(info)
            with EventLog(run_dir.events) as events:
                run_dir.log_files(events, {**code_files, **files}, info, declaration.arrays)
                for path, array in arrays.items():
                    save_array(path, array)
                save_code(code_files, run_dir.ensemble_file)
                for path in set(files) - {run_dir.ensemble_file}:
                    write_bytes(path, files[path], mode=0o600 if path == run_dir.spec_file else 0o644)
                remove_unused_code(run_dir, code.fingerprint)
                remove_unused_arrays(run_dir)
        except OSError as error:
            raise make_write_error(run_dir.path, error, PROBE_BYTES + needed) from None
        return run_dir

    def digest_files(self, id: str) -> dict[str, str]:
        """Flush what a member has saved itself, and return the digests by paths in its folder."""
        digests, folder = {}, self.files(id)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            with open(path, "rb") as file:
                digests[str(path.relative_to(folder))] = flush_and_digest(path, file.fileno())
        return digests

    def log_files(
        self,
        events: EventLog,
        files: Mapping[Path, bytes],
        info: Mapping[str, Any] | None,
        arrays: Iterable[str] | None = None,
    ) -> None:
        """Log what is about to be written of the declaration and the code.

        Args:
            info: what run.json is to say; None where it stays.
            arrays: the files in `data` of the declaration, which have their digests in their names; None where
                it is not among the files.
        """
        named = {str(path.relative_to(self.path)): digest_bytes(content) for path, content in files.items()}
        named |= {f"{self.data.name}/{name}": name_to_digest(name) for name in arrays or ()}
        of_declaration = {} if arrays is None else {"arrays": sorted(arrays)}
        events.append("code_saved", files=named, info=info, **of_declaration)

    def check_is_free(self, ensemble: Ensemble) -> None:
        """Check that the directory can have a run of this ensemble: it is empty, is not there, or has one already.

        Raises:
            StoreError: it holds another run, or what is none, or a run whose log is gone.
        """
        self.check_log()
        if not (info := self.find_info()):
            self._refuse_foreign()
        elif (other := info["name"]) != ensemble.name:
            raise StoreError(
                f"{self.path} holds the run of another ensemble ({other!r}, not {ensemble.name!r}); "
                "choose another run directory, or remove it"
            )

    def check_log(self) -> None:
        """Raise StoreError where members of a run are there without its log."""
        if self.info_file.is_file() and not has_begun(self.path) and any(self.path.glob("members/*/*")):
            raise StoreError(
                f"{self.events} is gone, and without it the members beside it cannot go on: bring back a copy of "
                "it (`ensemble fetch` has one where there is a mirror), or choose another run directory (--fresh)"
            )

    def _refuse_foreign(self) -> None:
        """Raises for a directory with files that are no run's; empty remains of a failed start are accepted."""
        if not self.path.is_dir():
            return
        empty = {entry.name for entry in self.path.iterdir() if entry.is_dir() and not any(entry.iterdir())}
        empty |= set() if has_begun(self.path) else {self.events.name}
        ours = {"lost+found", *(empty & {"members", "requests", self.events.name})}
        names = sorted(entry.name for entry in self.path.iterdir())
        foreign = [name for name in names if name not in ours and not name.startswith(".")]
        if foreign:
            more = ", ..." if len(foreign) > 3 else ""
            raise StoreError(
                f"{self.path} is not a run directory and not empty ({', '.join(foreign[:3])}{more}): choose "
                "another one for the run, such as a new one below it"
            )

    def _make_directory(self, needed_bytes: int) -> None:
        """Make the directory, or refuse one from which each worker would refuse to load the declaration."""
        is_new = not self.path.is_dir()
        if is_new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
        probe = self.path / f".probe-{uuid.uuid4().hex}"
        try:
            descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                check_ownership(self.path, os.fstat(descriptor))
                os.posix_fallocate(descriptor, 0, PROBE_BYTES + needed_bytes)
            finally:
                os.close(descriptor)
                probe.unlink(missing_ok=True)
            check_ownership(self.path, self.path.stat())
        except StoreError:
            if is_new:
                self.path.rmdir()
            raise

    def load_ensemble(
        self, code: str | None = None, *, takes_settings: bool = False, takes_modules: bool = False
    ) -> Ensemble:
        """The declaration of the run, as it was pickled.

        Args:
            takes_settings: this process gets the library settings of the one that submitted it, before anything is
                unpickled; a caller that is no process of the run has them within `keep_settings` only.
            takes_modules: this process is a member's: it finds the user's classes by their modules' names.
            code: a fingerprint: as it was when it had that code, where that is kept. The latest one where
                another Python compiled the earlier one, which is said.

        Raises:
            StoreError: the directory or the file is not the user's own, or others may write it, or it is of
                another format, or its code cannot be imported here, or another Python compiled it.
        """
        path = self.code(code) / "ensemble.pkl" if code is not None else self.ensemble_file
        path = path if path.exists() else self.ensemble_file
        try:
            return self._unpickle(path, takes_settings=takes_settings, takes_modules=takes_modules)
        except OtherPythonError:
            if path == self.ensemble_file:
                raise
            ensemble = self._unpickle(self.ensemble_file, takes_settings=takes_settings)
            log.warning(
                "%s: another Python compiled the code of members; they are built by the code that was submitted "
                "last, and whether it has changed is not known",
                self.path,
            )
            return ensemble

    def _unpickle(self, path: Path, **takes: bool) -> Ensemble:
        distrusted = None
        try:
            self._check_folders(path)
            distrusted = self._add_code_to_path()  # refuses another format
            with self._open_kept(path, ANEW) as name, open(name, "rb") as file:
                check_ownership(path, os.fstat(file.fileno()))
                with without_bytecode():
                    unpickler = DeclarationUnpickler(file.read(), self.data, None, **takes)
                    ensemble: Ensemble = unpickler.load()
        except OtherPythonError as error:
            raise OtherPythonError(f"{path}: {error}") from None
        except FileNotFoundError as error:
            raise StoreError(f"no run here: {error.filename} does not exist; give a run directory") from None
        except (ImportError, AttributeError) as error:
            advice = "start from the directory it was submitted from, or put that on PYTHONPATH"
            if missing := list_missing(self.find_info().get("versions", {})):
                advice = f"it uses an extension that is not installed here: pip install {' '.join(missing)}"
            raise StoreError(
                f"{path} needs code that is not found here ({error}); {distrusted or advice}"
            ) from error
        except (OSError, pickle.UnpicklingError, EOFError) as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        return ensemble

    def _check_folders(self, path: Path) -> None:
        for folder in (self.path, *(parent for parent in path.parents if self.path in parent.parents)):
            check_ownership(folder, os.stat(folder))

    def check_owners(self, file: Path) -> None:
        """Check that nobody else could have written a file of the run, or replaced it, before its code runs.

        Raises:
            StoreError: another user could.
            OSError: it is not there.
        """
        self._check_folders(file)
        check_ownership(file, os.stat(file))

    @contextlib.contextmanager
    def _open_kept(self, path: Path, remedy: str) -> Iterator[str]:
        """Yields a name of a kept file that is what was written; else raises DamagedError with the remedy."""
        files = read_files(self.events).files if self._files is None else self._files
        digests = files.get(str(path.relative_to(self.path)), [])
        try:
            with open_checked(path, digests[-1] if digests else None, digests) as name:
                yield name
        except DamagedError as error:
            raise DamagedError(f"{error}; {remedy}") from None

    def _add_code_to_path(self) -> str | None:
        """Puts the folder of the declaration's modules on `sys.path`, or returns who else may write them."""
        source = self.info_file if self.info_file.exists() else self.events
        check_ownership(source, os.stat(source))
        code = self.info.get("code")
        if code is None or not os.path.isdir(code):
            return None
        for folder in (Path(code), find_import_folder(Path(code)), *map(Path, self.info.get("path", []))):
            if str(folder) in sys.path:
                continue
            if (why := explain_distrust(folder, os.stat(folder))) is not None:
                return why
            sys.path.append(str(folder))
        return None


def _list_import_folders(code: Code, folder: Path) -> list[str]:
    """The folders that the declaration added to `sys.path`, outside `folder`, and imported its code from."""
    files = [file.resolve() for file in code.sources.values()]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [
        entry
        for entry in sys.path
        if entry not in given
        and not (path := Path(entry).resolve()).is_relative_to(find_import_folder(folder))
        and any(file.is_relative_to(path) for file in files)
    ]


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _name_words(words: list[str]) -> Iterator[str]:
    """The program and the names of its options: values may be secrets."""
    yield from (Path(word).name for word in words[:1])
    for word in words[1:]:
        if word.startswith("-"):
            yield word.partition("=")[0] if word.startswith("--") else word[:2]
