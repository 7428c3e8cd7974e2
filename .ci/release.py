"""What a release has to show: make release-check.

Each step prints one line with its seconds; what it printed itself is in .run/release. All steps run, whatever the
others showed, and the last line says whether this version is ready. The steps, in their order:

tests: make test-long, with the linters.
docs: make docs.
build: the sdist, and the wheel made of it, into dist/.
twine: what a package index would refuse.
urls: the addresses that a package index shows, which the publisher writes into pyproject.toml.
wheel: the wheel alone, in a new environment without constraints, runs dags/quickstart.py from an empty Airflow home; an
    extra that is not installed is named.
units: the tests in tests/unit of the unpacked sdist, on each Python of PYTHONS that is on this machine; the oldest has
    to be there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.parser import Parser
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
FOLDER = TOP / ".run" / "release"
DIST = TOP / "dist"
UV = TOP / ".venv" / "bin" / "uv"
#: From the oldest that the package is made for to the newest that Airflow 3.3 runs on.
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: What the metadata promise. Without it a release is not ready.
OLDEST = PYTHONS[0]


#: The addresses that a package index shows beside a package, as it names them itself.
ADDRESSES = ("Documentation", "Source", "Issues", "Changelog")


#: Connections whose extras the step wheel does not install.
_ABSENT = {"rabbitmq": "rabbitmq://localhost", "sqs": "aws://", "postgres": "postgres://localhost"}
_VERIFY = """
from airflow_delayed.delivery import delivery_for
try:
    delivery_for("absent").verify([])
except ImportError as error:
    print(error)
"""


class Problem(Exception):
    """Why a step did not show what it should."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("steps", nargs="*", metavar="STEP", help=f"some of {', '.join(STEPS)}; by default all")
    asked = arguments.parse_args().steps
    if unknown := set(asked) - set(STEPS):
        arguments.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(STEPS)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    missing = []
    for name, step in STEPS.items():
        if asked and name not in asked:
            continue
        begun = time.monotonic()
        try:
            shown = step()
        except Problem as problem:
            missing.append(name)
            shown = f"FAILED: {problem}"
        print(f"{name:8}{time.monotonic() - begun:6.0f} s  {shown}", flush=True)
    if missing:
        raise SystemExit(f"not ready to release {_version()}: {', '.join(missing)}")
    done = "ready to release" if not asked else f"{', '.join(asked)}: as it should be for"
    print(f"{done} {_version()}")


def _version() -> str:
    found = re.search(r'__version__ = "(.*)"', (TOP / "airflow_delayed" / "__init__.py").read_text())
    assert found
    return found[1]


def _run(log: str, *command: str | Path, cwd: Path = TOP, env: Mapping[str, str] | None = None) -> str:
    """Run a command, keep its output in a log, and return it."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    file = FOLDER / f"{log}.log"
    with file.open("a") as kept:
        kept.write(f"$ {' '.join(map(str, command))}\n{done.stdout}\n")
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["it printed nothing"])[-1][:200]
        raise Problem(f"{Path(command[0]).name} ended with {done.returncode}: {last}; see {file.relative_to(TOP)}")
    return done.stdout


def _summary(output: str) -> str:
    """Return pytest's last line, without its decoration."""
    found = re.findall(r"^=* ?(\d+ (?:passed|failed).*?) ?=*$", output, re.MULTILINE)
    return found[-1] if found else "no test ran"


def tests() -> str:
    _fresh("tests.log")
    return _summary(_run("tests", "make", "--no-print-directory", "test-long"))


def docs() -> str:
    _fresh("docs.log")
    lines = _run("docs", "make", "--no-print-directory", "docs").strip().splitlines()
    return lines[-1] if lines else ""


def build() -> str:
    _fresh("build.log", "sdist")
    for old in DIST.glob("*"):
        old.unlink()
    _hatchling("sdist", TOP)
    with tarfile.open(_built("*.tar.gz")) as archive:
        archive.extractall(FOLDER / "sdist", filter="data")
    _hatchling("wheel", _unpacked())
    return ", ".join(f"dist/{file.name} ({file.stat().st_size // 1000} kB)" for file in sorted(DIST.iterdir()))


def _hatchling(target: str, folder: Path) -> None:
    _run("build", sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", DIST, cwd=folder)


def _built(pattern: str) -> Path:
    found = list(DIST.glob(pattern))
    if len(found) != 1:
        raise Problem(f"dist/ has {len(found)} files {pattern}; run the step build first")
    return found[0]


def _unpacked() -> Path:
    found = list((FOLDER / "sdist").glob("*"))
    if len(found) != 1:
        raise Problem("no unpacked sdist; run the step build first")
    return found[0]


def twine() -> str:
    _fresh("twine.log")
    said = _run("twine", sys.executable, "-m", "twine", "check", "--strict", _built("*.whl"), _built("*.tar.gz"))
    return f"{said.count('PASSED')} files pass"


def urls() -> str:
    with zipfile.ZipFile(_built("*.whl")) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = Parser().parsestr(archive.read(name).decode(), headersonly=True)
    return check_addresses(found.get_all("Project-URL", []))


def check_addresses(urls: Sequence[str]) -> str:
    """Return the addresses of a package's metadata, each with its label."""
    pairs = [(label, url) for label, _, url in (line.partition(", ") for line in urls)]
    labels = [label for label, _ in pairs]
    problems = [f"{label} is there twice" for label in ADDRESSES if labels.count(label) > 1]
    problems += [
        f"{label} is not https: {url}" for label, url in pairs if not re.match(r"https://[^/\s]+\.[^/\s]+", url)
    ]
    if missing := [label for label in ADDRESSES if label not in labels]:
        problems.append(f"there is no {', '.join(missing)}")
    if problems:
        example = ", ".join(f'{label} = "https://..."' for label in ADDRESSES)
        raise Problem(f"{'; '.join(problems)}. Fill the line urls = {{}} of pyproject.toml: {example}")
    return ", ".join(f"{label} {url}" for label, url in pairs)


def wheel() -> str:
    """Install the wheel, and nothing that this repository names, and run the quickstart with it."""
    _fresh("wheel.log", "wheel", "home")
    environment, home = FOLDER / "wheel", FOLDER / "home"
    _run("wheel", UV, "venv", "--quiet", "--clear", "--python", sys.executable, environment)
    _install("wheel", environment, f"{_built('*.whl')}[sqlite]", cwd=FOLDER)
    _run("wheel", UV, "pip", "check", "--python", environment / "bin" / "python")
    dags = home / "dags"
    dags.mkdir(parents=True)
    shutil.copy(TOP / "dags" / "quickstart.py", dags)
    env = {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW_CONN_DELAYED_STORE": json.dumps({"conn_type": "sqlite", "host": str(home / "delayed.db")}),
    }
    _run("wheel", "airflow", "db", "migrate", cwd=home, env=env)
    printed = _run("wheel", "airflow", "dags", "test", "quickstart", cwd=home, env=env)
    arrived = re.findall("^arrived: .*", printed, re.MULTILINE)
    if arrived != ["arrived: [('Hello!',)]"]:
        raise Problem(f"the quickstart's consumer prints {arrived}")
    for extra, uri in _ABSENT.items():
        text = _run("wheel", environment / "bin" / "python", "-c", _VERIFY, env={**env, "AIRFLOW_CONN_ABSENT": uri})
        if f"pip install 'airflow-provider-delayed[{extra}]'" not in text:
            raise Problem(f"without the extra {extra} the error is {text.strip()[-200:]!r}")
    airflow = _run("wheel", "airflow", "version", cwd=home, env=env).strip().splitlines()[-1]
    return f"the quickstart's message arrived on Airflow {airflow}, from the wheel alone"


def units() -> str:
    """Run the unit tests of the sdist on each Python, with the newest releases of what they need."""
    shown, failed = [], []
    for version in PYTHONS:
        log = f"units-{version}"
        _fresh(f"{log}.log")
        if (python := next(interpreters(version), None)) is None:
            (failed if version == OLDEST else shown).append(f"{version}: not on this machine")
            continue
        try:
            shown.append(f"{version}: {unit_tests(log, python, _unpacked())}")
        except Problem as problem:
            failed.append(f"{version}: {problem}")
    if failed:
        raise Problem("; ".join(failed + shown))
    return "; ".join(shown)


def unit_tests(log: str, python: Path, folder: Path) -> str:
    """Run the unit tests of a folder in an environment of their own, and return how many passed.

    :raises Problem: they cannot be run, or fail.
    """
    environment = FOLDER / log
    _run(log, UV, "venv", "--quiet", "--clear", "--python", python, environment)
    _install(log, environment, ".[all]", "--group", "dev", cwd=folder)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    # one process: several would start the servers that they share, and unit tests need none
    command = (environment / "bin" / "python", "-m", "pytest", "--quiet", "tests/unit")
    return _summary(_run(log, *command, cwd=folder, env=env))


def _install(log: str, environment: Path, *what: str | Path, cwd: Path) -> None:
    """Install with uv, which .ci/uv-settings tells where this user's packages come from."""
    script = f'. {TOP}/.ci/uv-settings; cd {TOP}; use_pip_settings; cd "$0"; twice "$@"'
    python = environment / "bin" / "python"
    _run(log, "bash", "-c", script, cwd, UV, "pip", "install", "--python", python, *what)


def interpreters(version: str) -> Iterator[Path]:
    """Yield the interpreters of a version that run: by PATH, as Debian has them, and of pyenv."""
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for python in ([Path(on_path)] if on_path else []) + sorted(pyenv.glob(f"{version}.*/bin/python")):
        asked = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == version:
            yield python


def _fresh(*names: str) -> None:
    """Remove what an earlier run left."""
    for name in names:
        subprocess.run(["rm", "-rf", "--one-file-system", FOLDER / name], check=True)


STEPS: dict[str, Callable[[], str]] = {
    "tests": tests,
    "docs": docs,
    "build": build,
    "twine": twine,
    "urls": urls,
    "wheel": wheel,
    "units": units,
}


if __name__ == "__main__":
    main()
