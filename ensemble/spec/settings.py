"""Options of a spec on the command line: `--set NAME=VALUE`, or `--set NAME=@FILE` for secrets.

A command line is visible to everybody, in the list of processes and in a job's entrypoint. A password is therefore
given by the name of the file that holds it. The file is read where the run starts; no error message quotes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ensemble.spec.validation import SpecError

_SHORTEST_REDACTED = 4  # characters; a shorter value occurs in messages by chance


@dataclass(frozen=True)
class Setting:
    """One option of a spec.

    Attributes:
        name: of the option.
        text: its value.
        file: the file that the value was read from; None where it was given on the command line.
    """

    name: str
    text: str = field(repr=False)
    file: Path | None = None

    def redact(self, message: str) -> str:
        """The message with `***` in place of the value, if that was read from a file."""
        if self.file is None or len(self.text.strip()) < _SHORTEST_REDACTED:
            return message
        for secret in (self.text, self.text.strip()):
            message = message.replace(secret, "***")
        return message


def split_setting(argument: str) -> tuple[str, str]:
    """The name and the text after `=`.

    Raises:
        SpecError: it is not of the form `NAME=VALUE`.
    """
    name, equals, text = argument.partition("=")
    if not equals or not name:
        raise SpecError(f"--set takes name=value or name=@file, got {name + ('=...' if equals else '')!r}")
    return name, text


def read_setting(argument: str) -> Setting:
    """The setting of `NAME=VALUE`, `NAME=@FILE` (without its last newline), or `NAME=@@VALUE` for a value
    `@VALUE`.

    Raises:
        SpecError: it is not of that form, or its file cannot be read.
    """
    name, text = split_setting(argument)
    return Setting(name, *read_value(f"--set {name}", text))


def read_value(option: str, text: str) -> tuple[str, Path | None]:
    """The value that a command line gives as `VALUE`, `@FILE` or `@@VALUE`, and the file that it was read from.

    Args:
        option: as messages name it.

    Raises:
        SpecError: the file cannot be read.
    """
    if text.startswith("@@") or not text.startswith("@"):
        return text.removeprefix("@") if text.startswith("@@") else text, None
    file = Path(text[1:]).expanduser()
    try:
        return file.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r"), file
    except UnicodeDecodeError:
        raise SpecError(f"{option}: {file} is not text (UTF-8)") from None
    except OSError as error:
        raise SpecError(f"{option}: {file} cannot be read: {error.strerror}") from None


def make_portable(argument: str, folder: Path) -> str:
    """The setting with an absolute path of its file, for a process in another directory.

    Args:
        folder: the directory that a relative path starts from.
    """
    name, text = split_setting(argument)
    if not text.startswith("@") or text.startswith("@@"):
        return argument
    return f"{name}=@{(folder / Path(text[1:]).expanduser()).absolute()}"


def redact_values(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with `...` in place of the value of each `--set`."""
    previous = ["", *arguments]
    return [
        f"{argument.partition('=')[0]}=..." if before == "--set" else argument
        for before, argument in zip(previous, arguments, strict=False)
    ]
