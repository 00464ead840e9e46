"""The wheel holds both packages, asks for no version, and changes nothing that is installed."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from sglang_dsv4.cli.doctor_installation import OLDEST_PYTHON

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sglang_dsv4", "triton_ops")
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "test", *PACKAGES)
# As `python -m build` does it: the wheel is made of what is in the source archive.
BUILD = """
import os, sys, tarfile
from setuptools import build_meta
out = sys.argv[1]
archive = build_meta.build_sdist(out)
tarfile.open(os.path.join(out, archive)).extractall(out, filter="data")
os.chdir(os.path.join(out, archive.removesuffix(".tar.gz")))
build_meta.build_wheel(out)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, by way of the source archive."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, check=True, capture_output=True, timeout=120)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_it_holds_both_packages_with_their_data_and_nothing_else(wheel):
    wanted = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "sglang_dsv4" / "examples").glob("*.json")}
    wanted |= {"sglang_dsv4/py.typed"}
    with zipfile.ZipFile(wheel) as file:
        found = {name for name in file.namelist() if ".dist-info/" not in name}
    assert found == wanted


def test_the_engine_finds_the_plugin_and_the_shell_the_command(wheel):
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith("entry_points.txt"))
        found = file.read(name).decode()
    assert "[sglang.srt.plugins]\nsglang_dsv4 = sglang_dsv4.plugin:install" in found
    assert "[console_scripts]\nsglang-dsv4 = sglang_dsv4.cli.main:main" in found


def test_no_requirement_names_a_version(metadata):
    """Neither of the engine nor of anything that the engine pins: what is installed is never moved."""
    asked = metadata.get_all("Requires-Dist")
    assert {"cpu", "dev", "store"} == set(metadata.get_all("Provides-Extra"))
    assert not [text for text in asked if re.search("[<>=~!]", text.partition(";")[0])]
    always = {name_of(text) for text in asked if "extra ==" not in text}
    assert not always & {"sglang", "torch", "triton", "transformers"}


def test_it_says_its_licence_and_its_python(metadata):
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == f">={'.'.join(map(str, OLDEST_PYTHON))}"
