"""Tables of providers: ours and those of other distributions, which entry points name."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from ensemble.cli.parser import COMMANDS, main
from pipelines.errors import PipelineError
from pipelines.providers import Provider, Providers

OURS = {"zip": "zipfile:ZipFile", "tar": "tarfile:TarFile"}


@pytest.fixture
def archives() -> Providers:
    return Providers("archives", OURS)


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, distribution: str, entry_points: str, code: str = ""
) -> None:
    """Make a distribution with a module of its name, as an installer leaves it in a folder of `sys.path`."""
    metadata = folder / f"{distribution}-2.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.0\n")
    (metadata / "entry_points.txt").write_text(f"[ray_ensemble.{entry_points}")
    (folder / f"{distribution}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, distribution, raising=False)


def test_an_entry_point_adds_a_name(archives: Providers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = "archives]\nrar = theirs_a:Rar\n[ray_ensemble.other]\nlha = theirs_a:Lha\n"
    install(tmp_path, monkeypatch, "theirs_a", points, "class Rar: pass\n")
    assert archives.names() == ["zip", "tar", "rar"]
    assert archives.load("zip") is zipfile.ZipFile and archives.load("rar").__name__ == "Rar"
    assert archives.list_providers()[-1] == Provider("archives", "rar", "theirs_a:Rar", "theirs_a 2.0")
    assert not archives.find_conflicts()
    with pytest.raises(PipelineError, match=r"archives has no 'zop'.*did you mean 'zip'"):
        archives.load("zop")


def test_a_name_of_ours_cannot_be_taken_and_of_two_with_one_name_none_is_used(
    archives: Providers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "bcd":
        points = f"archives]\n{'zip' if name == 'b' else 'rar'} = theirs_{name}:Zip\n"
        install(tmp_path / name, monkeypatch, f"theirs_{name}", points, "class Zip: pass\n")
    assert archives.load("zip") is zipfile.ZipFile and archives.names() == ["zip", "tar"]
    assert sorted(archives.find_conflicts()) == [
        "archives 'rar' is not used: theirs_c 2.0 and theirs_d 2.0 provide it; uninstall one",
        "archives 'zip' of theirs_b 2.0 is not used: the name is one of ray-ensemble's",
    ]
    with pytest.raises(PipelineError, match=r"archives has no 'rar'"):
        archives.load("rar")


@pytest.mark.parametrize("code", ["", "import a_module_that_is_not_installed\n"])
def test_one_that_cannot_be_imported_is_named(
    archives: Providers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    install(tmp_path, monkeypatch, "theirs_e", "archives]\nrar = theirs_e:Rar\n", code)
    with pytest.raises(PipelineError, match=r"archives has 'rar' of theirs_e 2\.0, but theirs_e:Rar cannot"):
        archives.load("rar")


def test_a_command_that_cannot_be_imported_is_a_line_of_the_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = "commands]\nboom = theirs_f:BOOM\n"
    install(tmp_path, monkeypatch, "theirs_f", points, "raise ValueError('99 %')\n")
    monkeypatch.delitem(COMMANDS.__dict__, "_foreign", raising=False)
    try:
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        assert "cannot be used" in capsys.readouterr().out
        assert main(["boom"]) == 2
        assert "theirs_f:BOOM cannot be imported: ValueError: 99 %" in capsys.readouterr().err
    finally:
        COMMANDS.__dict__.pop("_foreign", None)
