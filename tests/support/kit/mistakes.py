"""Mistakes of users, a row each: what is done wrong, the exception, words of its message, and when it comes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import ensemble

When = Literal["call", "submit", "command", "train"]


@dataclass(frozen=True)
class Mistake:
    """A row of the table in `tests/support/mistakes`.

    Args:
        what: The mistake in a few words; the test's name.
        do: What the user writes; a function without parameters (but for defaults), or of a folder that it may
            write to.
        error: The exact type of the exception; of a command the exit code, of a training the attempts.
        words: What the message must contain: names and values that lead the user to the place.
        when: `call`: `do` raises. `submit`: `do` returns an `Ensemble`, and `submit` refuses it before it makes
            the run directory. `command`: `do` returns arguments of the command `ensemble`, which writes nothing to
            standard output. `train`: `do` returns an `Ensemble` whose only member fails.
    """

    what: str
    do: Callable[..., Any]
    error: type[BaseException] | int
    words: tuple[str, ...]
    when: When = "call"

    def check(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Make the mistake; assert that it is refused in the right way, at the right time."""
        message = getattr(self, f"_{self.when}")(folder, capsys)
        missing = [word for word in self.words if word not in message]
        assert not missing, f"{missing} not in: {message}"

    def _do(self, folder: Path) -> Any:
        parameters = inspect.signature(self.do).parameters.values()
        required = [
            p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        return self.do(folder) if required else self.do()

    def _call(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
        return self._raised(lambda: self._do(folder))

    def _submit(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
        declared, run_dir = self._do(folder), folder / "run"
        message = self._raised(lambda: ensemble.submit(declared, run_dir, "inline"))
        assert not run_dir.exists(), "refused after something was written"
        return message

    def _command(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
        from ensemble.cli.parser import main

        arguments = self._do(folder)
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        assert (code, printed.out) == (self.error, "")
        return printed.err

    def _train(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
        (member,) = ensemble.submit(self._do(folder), folder / "run", "inline").wait().members
        assert (member["state"], member["attempts"]) == ("failed", self.error), member["error"]
        return str(member["error"])

    def _raised(self, call: Callable[[], Any]) -> str:
        assert isinstance(self.error, type)
        with pytest.raises(self.error) as raised:
            call()
        assert raised.type is self.error, f"a subclass, {raised.type.__name__}"
        message = str(raised.value)
        assert self.error is not ensemble.SpecError or "\n" not in message, "an answer in one line"
        return message
