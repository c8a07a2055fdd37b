"""The code blocks of the documentation, and what the comment before one says of it.

A Python block runs, in the order of its page, unless the comment `<!-- not run: REASON -->` stands before it. A
block whose fence has a file's name for a title, such as `title="first.py"`, is written to that file instead, from
which the others import it; those of the quick start are there for every page. A `text` block of the title "prints"
is what the Python block before it prints; `...` in it stands for anything. A shell block is parsed; with the
comment `<!-- run -->` it runs, in its place.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deploy/README.md"]

QUICK_START = ROOT / "docs" / "quick-start.md"

FENCE = re.compile(
    r"(?:^ *<!-- (?P<comment>[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)(?P<mark>```+|~~~+) *(?P<language>[\w+-]*)(?P<options>[^\n]*)\n"
    r"(?P<text>.*?)^(?P=indent)(?P=mark) *$",
    re.MULTILINE | re.DOTALL,
)

SHELLS = ("sh", "bash", "shell", "console", "")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is that of its first line of text, from 1."""

    page: Path
    line: int
    language: str
    title: str
    comment: str
    text: str

    @property
    def is_snippet(self) -> bool:
        """Whether the site puts a file of the repository in its place."""
        return "--8<--" in self.text

    @property
    def is_file(self) -> bool:
        """Whether the reader writes it to a file."""
        return "." in self.title and "/" not in self.title

    @property
    def reason(self) -> str:
        return self.comment.removeprefix("not run:").strip() if self.comment.startswith("not run:") else ""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]*)"', match["options"])
        found.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start("text")) + 1,
                language=match["language"],
                title=title[1] if title else "",
                comment=match["comment"] or "",
                text=textwrap.dedent(match["text"]),
            )
        )
    return found


def read_commands(block: Block) -> list[list[str]]:
    """The commands of a shell block, as words; assignments, redirections and prompts are left out."""
    commands: list[list[str]] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        skips = False
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                if words:
                    commands.append(words)
                words = []
            elif set(word) <= set("<>"):
                skips = True  # the file that follows
            elif skips:
                skips = False
            elif words or not re.match(r"\w+=", word):
                words.append(word.removeprefix(".venv/bin/") if not words else word)
    return commands


def inline_codes(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [match[1] for match in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", text)]
