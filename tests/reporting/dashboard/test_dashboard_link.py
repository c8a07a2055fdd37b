"""The linker: several modules become one script that does the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ensemble.reporting.dashboard import link
from ensemble.reporting.dashboard.link import LinkError, link_modules, read_modules

MODULES = {
    "app.js": 'import { double, Box } from "./lib/box.js";\nimport { log } from "./log.js";\n'
    "const secret = 1; // the same name as in another module\n"
    "log(double(new Box(20).value) + LIMIT_OF(secret));\n"
    "function LIMIT_OF(x) { return x; }\nconsole.log(log());\n",
    "lib/box.js": 'import { log } from "../log.js";\nconst secret = 2;\n'
    "export function double(x) { return secret * x; }\n"
    'export class Box { constructor(value) { log("box"); this.value = value; } }\n',
    "log.js": "const lines = [];\n"
    'export const log = (line) => line === undefined ? lines.join(" ") : lines.push(line);\n'
    'log("once");\nexport async function later() { await null; }\n',
    "other.js": 'export const unused = "nobody imports it";',
}


def test_each_module_runs_once_before_those_that_import_it(node: str) -> None:
    script = link_modules(MODULES, "app.js")
    command = [node, "--input-type=module", "-e", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "once box 41\n"
    assert "unused" not in script


NOT_LINKED = """\
import log from "./log.js";|import * as log from "./log.js";|import "./log.js";|import { log } from "log";
const log = await import("./log.js");|const here = import.meta.url;|export default 3;|export { log };
export let count = 0;|  export const indented = "x";|const end = "</script>";"""
SAYS = {
    'import { a as b } from "./log.js";': ": this form is not linked: import { a as b }",
    'import { log, nothing } from "./log.js";': ": log.js exports no nothing",
    'import { log } from "./gone.js";': ": there is no module gone.js",
}


@pytest.mark.parametrize("line", [*NOT_LINKED.replace("\n", "|").split("|"), *SAYS])
def test_a_form_that_is_not_linked_is_an_error_with_file_and_line(line: str) -> None:
    with pytest.raises(LinkError) as error:
        link_modules({**MODULES, "app.js": f"// first\n{line}\n"}, "app.js")
    assert f"app.js:2{SAYS.get(line, '')}" in str(error.value)


def test_modules_that_import_each_other_are_named() -> None:
    circle = {f"{name}.js": f'import {{ a }} from "./{to}.js";' for name, to in ("ab", "bc", "cb")}
    with pytest.raises(LinkError, match=r"c.js:1: .* b.js -> c.js -> b.js"):
        link_modules(circle, "a.js")


def test_every_module_of_the_page_is_linked() -> None:
    modules = read_modules(Path(link.__file__).parent / "static")
    script = link_modules(modules, "app.js")
    assert [path for path in modules if f"// {path}\n" not in script] == [], "nobody imports it"
