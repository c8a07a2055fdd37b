"""Options that a command gives to a spec: `--set NAME=VALUE`, or `--set NAME=@FILE` for what is not to be seen.

What stands on a command line is seen by everybody: in the list of processes, in a job's entrypoint. So a password
is named by the file that holds it, which is read where the run starts, and no error says what was in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ensemble.spec.validation import SpecError

_SHORTEST = 4  # characters of a value that is looked for in an error: a shorter one stands there by chance


@dataclass(frozen=True)
class Setting:
    """One option of a spec.

    Attributes:
        text: its value, as it was given or read.
        file: that it was read from; None where it stood on the command line.
    """

    name: str
    text: str = field(repr=False)
    file: Path | None = None

    def hidden_in(self, said: str) -> str:
        """A text without the value, where that was read from a file."""
        if self.file is None or len(self.text.strip()) < _SHORTEST:
            return said
        for secret in (self.text, self.text.strip()):
            said = said.replace(secret, "***")
        return said


def parse(given: str) -> tuple[str, str]:
    """The name and what follows `=`.

    Raises:
        SpecError: it is no setting.
    """
    name, equals, text = given.partition("=")
    if not equals or not name:
        raise SpecError(f"--set takes name=value or name=@file, got {name + ('=...' if equals else '')!r}")
    return name, text


def read(given: str) -> Setting:
    """The setting of `NAME=VALUE`, `NAME=@FILE` (without its last newline), or `NAME=@@...` for a value with @.

    Raises:
        SpecError: it is no setting, or its file cannot be read.
    """
    name, text = parse(given)
    if text.startswith("@@") or not text.startswith("@"):
        return Setting(name, text.removeprefix("@") if text.startswith("@@") else text)
    file = Path(text[1:]).expanduser()
    try:
        return Setting(name, file.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r"), file)
    except UnicodeDecodeError:
        raise SpecError(f"--set {name}: {file} is not text (UTF-8)") from None
    except OSError as error:
        raise SpecError(f"--set {name}: {file} cannot be read: {error.strerror}") from None


def portable(given: str, folder: Path) -> str:
    """The setting as another process may be told it: its file by a path from the root.

    Args:
        folder: what a relative path is relative to.
    """
    name, text = parse(given)
    if not text.startswith("@") or text.startswith("@@"):
        return given
    return f"{name}=@{(folder / Path(text[1:]).expanduser()).absolute()}"


def without_values(words: Sequence[str]) -> list[str]:
    """The words of a command with dots for the value of each `--set`."""
    after = ["", *words]
    return [
        f"{word.partition('=')[0]}=..." if before == "--set" else word
        for before, word in zip(after, words, strict=False)
    ]
