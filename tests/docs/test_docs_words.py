"""No page and no public docstring has a construction at which readers stumbled."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest
from code_blocks import FENCE, PAGES, ROOT
from test_docs_reference import get, public_names

#: What to write instead: a pattern of what readers had to read twice, and an example of it.
CONSTRUCTIONS = {
    "name who says it": (r"\b(?:is|are|was|were) (?:said|told|asked)\b(?! from)", "That is said in a line."),
    "this is printed": (r"\ba line (?:says|tells)", "It goes on, and a line says so."),
    "is ignored, is used only for": (r"\b(?:takes?|took) no part\b", "It takes no part in anything."),
    "except, only": (r"\bbut for\b|\b(?:nothing|all|alike) but (?!one\b)", "All are alike but for the first."),
    "the subject first": (
        r"(?:^|[.!?:;|] )(?:Nor|Not \w+) (?:is|are|do|does|has|have)\b",
        "Not found is a stage.",
    ),
    "for a ..., ...": (r"(?:^|[.!?|] )Of (?:an?|the|those|these|each|its) ", "Of a search, random points stand."),
    "seed: the seed of the sampler": (r"^ +\w+(?:, \w+)*: of ", "    seed: of the sampler."),
    "stream group, replacement, again": (
        r"\b(?:cohorts?|heirs?|abreast|befalls?|befell|anew)\b",
        "It begins anew.",
    ),
    "bit-for-bit the same": (r"\bno bit\b|\bis nothing to\b", "Sharing changes no bit of any result."),
}


def read_texts() -> Iterator[tuple[str, str]]:
    """(place, text) of each page that is not a decision, and of each public name with its methods."""
    for page in PAGES:
        if page.parent.name != "decisions":
            text = re.sub(r"<!-- .*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
            yield page.relative_to(ROOT).as_posix(), FENCE.sub("", text)
    for name in public_names():
        methods = inspect.getmembers(get(name), inspect.isroutine) if inspect.isclass(get(name)) else []
        public = [get(name), *(method for key, method in methods if not key.startswith("_"))]
        yield name, "\n".join(inspect.getdoc(each) or "" for each in public)


@pytest.mark.parametrize("plain", CONSTRUCTIONS)
def test_readers_do_not_stumble(plain: str) -> None:
    pattern, example = CONSTRUCTIONS[plain]
    assert re.search(pattern, example)
    found = {place: re.findall(pattern, re.sub(r"`[^`\n]*`", "`", text), re.M) for place, text in read_texts()}
    assert {place: matches for place, matches in found.items() if matches} == {}, f"write: {plain}"
