"""Hooks of MkDocs: the navigation, links to files of the repository, and the tables that are made from the code.

*Navigation.* The page `index.md` of a section is its table of contents: its links to pages, in their order, are
the section's entries, and its second-level headings the groups. A page that it does not link yet comes last.

*Links to files.* A page may link any file of the repository by its relative path, as on a disk. A Markdown file
outside `docs/` becomes a page of the site, other text files a page that shows them.

*Tables.* A line `{{ commands }}` or `{{ api MODULE }}` is replaced by what `_site/tables.py` makes.

*For language models.* `llms.txt` lists the pages, `llms-full.txt` has the text of all.
"""

from __future__ import annotations

import inspect
import posixpath
import pydoc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import tables

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

#: The tabs of the site: folders of docs/, and the title of each.
SECTIONS = {
    "tutorials": "Tutorials",
    "how-to": "How-to",
    "concepts": "Concepts",
    "reference": "Reference",
    "studies": "Studies",
    "decisions": "Decisions",
}

#: Markdown outside docs/ -> its page of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "deploy/README.md": "project/deploy.md",
    "tests/faults/README.md": "project/faults.md",
}

#: The last tab.
PROJECT = {
    "Contributing": "CONTRIBUTING.md",
    "Changelog": "CHANGELOG.md",
    "Faults that are tested": "tests/faults/README.md",
}

LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash", ".json": "json", ".toml": "toml"}

FENCE = re.compile(r"^(?P<mark> *(?:```+|~~~+))[^\n]*\n.*?^(?P=mark) *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<before>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()(?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")


def find_links(markdown: str) -> Iterator[re.Match[str]]:
    """The links of a page that lie outside of its code."""
    code = [match.span() for match in FENCE.finditer(markdown)]
    for match in LINK.finditer(markdown):
        if not any(start <= match.start() < end for start, end in code):
            yield match


def resolve(target: str, page: str) -> tuple[str, str] | None:
    """The path from the repository's root, and the anchor, of a relative link of a file; None for other links."""
    if re.match(r"[a-z][a-z+.-]*:|#|/", target):
        return None
    path, _, anchor = target.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)), anchor


def site_path(path: str) -> str | None:
    """Where the site has a file of the repository; None for a folder, or where there is no such file."""
    if path in PAGES:
        return PAGES[path]
    if not (ROOT / path).is_file():
        return None
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}.md"


def show_file(path: str) -> str:
    """A page that shows a text file of the repository."""
    text = (ROOT / path).read_text(encoding="utf-8")
    language = LANGUAGES.get(Path(path).suffix, "text")
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    return f"{head}A file of the repository, as it is.\n\n~~~~{language}\n{text}\n~~~~\n"


def find_entries(folder: str) -> Iterator[tuple[str, str, str]]:
    """The pages that the index of a section links, as (heading above the link, title, path in the site)."""
    index = (DOCS / folder / "index.md").read_text(encoding="utf-8")
    heading, linked = "", {"index.md"}
    for match in re.finditer(rf"^## (?P<heading>.+)$|{LINK.pattern}", index, re.MULTILINE):
        if match["heading"]:
            heading = match["heading"]
            continue
        found = resolve(match["target"], f"docs/{folder}/index.md")
        path = found and site_path(found[0])
        if found and path and path.startswith((f"{folder}/", "project/")) and not found[1] and path not in linked:
            linked.add(path)
            yield heading, match["before"][1:-2].strip("`"), path


def find_unlisted(folder: str) -> list[str]:
    """The pages of a section that its index does not link yet."""
    linked = {path for _, _, path in find_entries(folder)} | {f"{folder}/index.md"}
    return sorted(path for page in (DOCS / folder).glob("*.md") if (path := f"{folder}/{page.name}") not in linked)


def make_nav(folder: str) -> list[Any]:
    """The entries of a section: what its index page links, then its other pages."""
    entries: list[Any] = [f"{folder}/index.md"]
    groups: dict[str, list[Any]] = {"": entries}
    for heading, title, path in find_entries(folder):
        if heading not in groups:
            groups[heading] = []
            entries.append({heading: groups[heading]})
        groups[heading].append({title: path})
    return [*entries, *find_unlisted(folder)]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = [{"Home": "index.md"}, {"Quick start": "quick-start.md"}]
    config.nav += [{title: make_nav(folder)} for folder, title in SECTIONS.items()]
    config.nav += [{"Project": [{title: PAGES[path]} for title, path in PROJECT.items()]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages for files outside docs/ that are linked, from these pages, too."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting += PROJECT.values()
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        text = (ROOT / page).read_text(encoding="utf-8") if page.endswith(".md") else ""
        for match in find_links(text):
            found = resolve(match["target"], page)
            if found and found[0] not in seen and site_path(found[0]):
                seen.add(found[0])
                waiting.append(found[0])
    for path in sorted(seen):
        target = site_path(path)
        if target is None or files.get_file_from_path(target):
            continue
        content = (ROOT / path).read_text(encoding="utf-8") if path in PAGES else show_file(path)
        in_nav = target.startswith("project/")
        level = InclusionLevel.INCLUDED if in_nav else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, target, content=content, inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mends the links to files of the repository and fills in the tables."""
    own = page.file.src_uri
    source = next((path for path, made in PAGES.items() if made == own and own != "index.md"), f"docs/{own}")
    if own.startswith("files/"):
        return markdown
    folder, _, name = own.rpartition("/")
    if folder in SECTIONS and name == "index.md" and (unlisted := find_unlisted(folder)):
        titles = [(DOCS / path).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in unlisted]
        links = [f"- [{title}]({Path(path).name})" for title, path in zip(titles, unlisted, strict=True)]
        markdown += "\n\n## More\n\n" + "\n".join(links) + "\n"
    parts, end = [], 0
    for match in find_links(markdown):
        found = resolve(match["target"], source)
        target = found and site_path(found[0])
        if found and target and not (found[0].startswith("docs/") and source.startswith("docs/")):
            relative = posixpath.relpath(target, posixpath.dirname(own) or ".")
            parts += [markdown[end : match.start("target")], relative + ("#" + found[1] if found[1] else "")]
            end = match.end("target")
    markdown = "".join([*parts, markdown[end:]])

    def fill(match: re.Match[str]) -> str:
        return tables.TABLES[match[1]](*match[2].split())

    return re.sub(r"^\{\{ (\w+)(.*) \}\}$", fill, markdown, flags=re.MULTILINE)


IN_NAV: list[Page] = []


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    IN_NAV[:] = nav.pages
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Writes the index and the text of all pages, in the order of the navigation."""
    lines, texts, heading = [f"# {config.site_name}", "", f"> {config.site_description}"], [], ""
    for page in IN_NAV:
        folder = page.url.partition("/")[0]
        if heading != (heading := SECTIONS.get(folder, "Project" if folder == "project" else "Start")):
            lines += ["", f"## {heading}", ""]
        text = re.sub(r"^::: (\S+)(?:\n    .*)*$", _show_name, page.markdown or "", flags=re.MULTILINE)
        first = next((part for part in text.split("\n\n") if re.match(r"[\w`*\[]", part)), "")
        sentence = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", " ".join(first.split())).partition(". ")[0].rstrip(".")
        lines.append(f"- [{page.title}]({page.url}): {sentence}")
        texts.append(f"<!-- {page.url} -->\n\n{text.strip()}\n")
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (Path(config.site_dir) / "llms-full.txt").write_text("\n\n".join(texts), encoding="utf-8")


def _show_name(match: re.Match[str]) -> str:
    """A name of the reference with its docstring."""
    return f"## {match[1]}\n\n~~~~text\n{inspect.getdoc(pydoc.locate(match[1])) or ''}\n~~~~"
