"""What is uploaded: a source distribution, and the wheel made of it, both built without a network."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import release

from airflow_delayed import __version__

TOP = Path(__file__).resolve().parents[2]
#: What .gitignore names, wherever it is.
_IGNORED = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
_BUILT = {"dist", "build", "spark-warehouse", "metastore_db"}


@dataclass(frozen=True)
class Distribution:
    sdist: Path
    wheel: Path

    def packed(self) -> set[str]:
        """The files of the sdist, by their paths in the repository."""
        with tarfile.open(self.sdist) as archive:
            return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}

    def installed(self) -> set[str]:
        """The files of the wheel, without its metadata."""
        with zipfile.ZipFile(self.wheel) as archive:
            return {name for name in archive.namelist() if ".dist-info/" not in name}

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return Parser().parsestr(archive.read(name).decode())


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", name="built")
def built_fixture(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    folder = tmp_path_factory.mktemp("distribution")
    run("hatchling", "build", "--target", "sdist", "--directory", str(folder), cwd=TOP)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    run("hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    return Distribution(sdist, wheel)


def files(*folders: str) -> set[str]:
    """The files of the repository below some folders."""
    return {
        str(file.relative_to(TOP))
        for folder in folders
        for file in (TOP / folder).rglob("*")
        if file.is_file() and not _IGNORED & set(file.parts) and file.suffix != ".pyc"
    }


def test_the_wheel_has_the_package_and_nothing_else(built):
    assert built.installed() == files("airflow_delayed") | {"pyspark_delayed.py"}
    assert {"airflow_delayed/py.typed", "airflow_delayed/ui/static/index.html"} <= built.installed()


def test_the_sdist_has_what_its_tests_need(built):
    folders = {folder.name for folder in TOP.iterdir() if folder.is_dir() and not folder.name.startswith(".")}
    # what is built in docs is not in the repository
    wanted = files(".ci", *folders - _BUILT - {"docs"}) | {
        str(page.relative_to(TOP)) for page in TOP.glob("docs/*/*.md")
    }
    wanted |= {"Makefile", "NOTICE", "LICENSE", "README.md", "constraints.txt", "pyproject.toml"}
    assert wanted - built.packed() == set()


def test_the_sdist_has_nothing_that_was_built_or_installed(built):
    tops = {name.partition("/")[0] for name in built.packed()}
    assert tops & (_BUILT | _IGNORED | {".venv", ".run", ".git"}) == set()


def test_a_package_index_would_take_both(built):
    said = run("twine", "check", "--strict", str(built.sdist), str(built.wheel), cwd=TOP)
    assert said.count("PASSED") == 2


def test_the_metadata(built):
    data = built.metadata()
    assert (data["Name"], data["Version"]) == ("airflow-provider-delayed", __version__)
    assert data["Author"] == "airflow_delayed contributors"
    assert data["License-Expression"] == "Apache-2.0"
    assert data.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert not {"Home-page", "Author-email", "Maintainer-email"} & set(data)


def test_the_addresses_are_those_of_one_line(built):
    """Nobody has published it yet, and no address is invented."""
    (line,) = re.findall(r"^urls = (\{.*\})$", (TOP / "pyproject.toml").read_text(), re.MULTILINE)
    wanted = re.findall(r'"?(\w+)"? = "([^"]+)"', line)
    assert [f"{label}, {url}" for label, url in wanted] == built.metadata().get_all("Project-URL", [])


FILLED = [f"{label}, https://git.example.org/delayed/{label}" for label in release.ADDRESSES]


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        ([], "no Documentation, Source, Issues, Changelog"),
        (FILLED[:2], "no Issues, Changelog"),
        (
            [*FILLED[1:], "Documentation, http://docs.example.org"],
            "Documentation is not https: http://docs.example.org",
        ),
        ([*FILLED, "Issues, https://other.example.org"], "Issues is there twice"),
    ],
)
def test_a_release_has_all_addresses(urls, says):
    with pytest.raises(release.Problem, match=says) as found:
        release.check_addresses(urls)
    assert "line urls = {} of pyproject.toml" in str(found.value)
    assert release.check_addresses(FILLED).startswith("Documentation https://git.example.org/delayed/Documentation, So")


def test_the_text_for_a_package_index_leads_nowhere(built):
    """Relative links and pictures are broken there."""
    text = str(built.metadata().get_payload())
    assert "airflow-provider-delayed" in text
    assert re.findall(r"\]\(|<img|<a |https?:", text) == []


def test_the_changelog_begins_with_this_version():
    heading = re.search(r"^## (.*)$", (TOP / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert heading[1] == __version__


def test_each_python_that_is_named_is_one_that_release_check_runs(built):
    """A classifier says what ran; docs/development/release.md has the day and what it showed."""
    classifiers = built.metadata().get_all("Classifier", [])
    named = {one.rpartition(" ")[2] for one in classifiers if re.search(r"Python :: 3\.\d+$", one)}
    page = (TOP / "docs/development/release.md").read_text()
    assert named == set(re.findall(r"^\| (3\.\d+)\.\d+ \|.* [\d,]+ passed \|", page, re.MULTILINE))
    assert named
