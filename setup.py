"""Builds the one library in C, `pipelines/prepare/jpeg_part.c`; all else is in pyproject.toml.

It is left out where there is no C compiler or no libjpeg-turbo (Debian: libjpeg-dev): what it makes faster goes on
as without it, and the wheel is one for all platforms. It has nothing of Python's, so a wheel fits every version.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NAME = "pipelines.prepare._jpeg_part"


class BuildLibrary(build_ext):
    """A plain library: its name has no version of Python, it exports no function that makes a module."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols


class BuildWheel(bdist_wheel):
    """Named after what is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        is_built = Path(self.bdist_dir, NAME.replace(".", "/") + ".so").exists()
        return "py3", "none", super().get_tag()[2] if is_built else "any"


setup(
    ext_modules=[Extension(NAME, ["pipelines/prepare/jpeg_part.c"], libraries=["jpeg"], optional=True)],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": BuildWheel},
)
