"""The tests of RabbitMQ and of the store on the newest servers of Debian sid: make test-newest.

Each server is installed into a folder of its own below .run/newest, a small Debian that is made once and brought up to
date by every run; nothing of it is installed on the machine. What is installed and what runs there sees its folder by
chroot, and mounts nothing but a /proc of its own, in a mount namespace that ends with it: the machine's /dev is never
mounted there, so that nobody can remove it with the folder.

At the end it compares with what was recorded in tests/newest.md.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

from services import packages

TOP = Path(__file__).resolve().parent.parent
FOLDER = TOP / ".run" / "newest"
RECORD = TOP / "tests" / "newest.md"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
#: What servers need in /dev, by its numbers.
_DEVICES = {"null": (1, 3), "zero": (1, 5), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_RABBITMQ_TESTS = ("test_rabbitmq*.py", "test_topology_operator.py")
_STORE_TESTS = ("test_store*.py", "test_dispatch*.py", "test_send_store.py")


@dataclass(frozen=True)
class Server:
    """A server of Debian sid, and the tests that are pointed at it."""

    #: The module of .ci/services that starts it.
    service: str
    title: str
    package: str
    files: tuple[str, ...]
    #: As which server the tests know it, and the variable by which they are pointed at it.
    known_as: str
    variable: str


SERVERS = (
    Server("rabbitmq", "RabbitMQ", "rabbitmq-server", _RABBITMQ_TESTS, "rabbitmq", "RABBITMQ_URL"),
    Server("postgres", "PostgreSQL", "postgresql", _STORE_TESTS, "postgres", "POSTGRES_URL"),
    Server("mysql", "MySQL", "mysql-server-core", _STORE_TESTS, "mariadb", "MARIADB_URL"),
    Server("mariadb", "MariaDB", "mariadb-server", _STORE_TESTS, "mariadb", "MARIADB_URL"),
)


@dataclass
class Result:
    """What the tests of one server showed; ``version`` is what the server says of itself."""

    version: str
    passed: int = 0
    failed: int = 0
    day: str = ""
    seconds: float = 0
    failures: tuple[str, ...] = ()


class Problem(Exception):
    """Why a server could not be tested."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [server.service for server in SERVERS]
    arguments.add_argument("servers", nargs="*", metavar="SERVER", help=f"some of {', '.join(names)}; by default all")
    arguments.add_argument("--record", action="store_true", help=f"write the results to {RECORD.relative_to(TOP)}")
    arguments.add_argument("--args", default="", help="more arguments of pytest, such as -k; nothing is compared then")
    asked = arguments.parse_args()
    if asked.args and asked.record:
        arguments.error("what only some of the tests show is not recorded")
    if unknown := set(asked.servers) - set(names):
        arguments.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    recorded = read(RECORD.read_text())
    results: dict[str, Result | Problem] = {}
    with _prepared() as base:
        for server in SERVERS:
            if not asked.servers or server.service in asked.servers:
                try:
                    result = results[server.title] = _test(server, base, shlex.split(asked.args))
                except Problem as problem:
                    results[server.title] = problem
                    print(f"{server.title}: {problem}", flush=True)
                else:
                    if asked.record:
                        RECORD.write_text(write({**read(RECORD.read_text()), server.title: result}))
    # what is recorded again is compared with nothing
    lines, good = compare(results, {} if asked.args or asked.record else recorded)
    print("\nThe newest servers of Debian sid:", *lines, sep="\n  ")
    if asked.record:
        print(f"Recorded in {RECORD.relative_to(TOP)}.")
    sys.exit(0 if good else 1)


@contextlib.contextmanager
def _prepared() -> Iterator[Path]:
    """Yield the folder of a small Debian sid, made if it is not there, while no other run of this is under way."""
    if os.geteuid() != 0:
        raise SystemExit(
            "make test-newest installs a Debian sid into a folder, which only root may: sudo make test-newest"
        )
    mirror = _mirror()
    packages.require("/usr/sbin/debootstrap", "debootstrap")
    if not _KEYRING.exists():
        raise SystemExit(f"{_KEYRING} is missing. Please run: apt-get install debian-archive-keyring")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit("make test-newest is under way already") from None
        yield _base(mirror)


def _mirror() -> str:
    """Return the mirror of Debian that apt uses on this machine."""
    if not shutil.which("apt-get"):
        raise SystemExit("make test-newest installs servers with apt, which is missing. Please run it on a Debian.")
    listing = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(LABEL)", "Created-By: Packages"]
    for attempt in range(2):
        found = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
        lines = [line.split() for line in found if line.startswith("http")]
        mirrors = [uri for uri, *whose in lines if whose == ["Debian", "Debian"]]
        if mirrors:
            return mirrors[0]
        if not attempt:
            # apt knows whose a mirror is when it has asked once
            subprocess.run(["apt-get", "update", "-qq"], check=False)
    raise SystemExit(
        "apt on this machine has no mirror of Debian that answers, from which sid could be installed. "
        "Please add one to /etc/apt/sources.list"
    )


def _base(mirror: str) -> Path:
    base = FOLDER / "base"
    if not base.exists():
        print(f"making a Debian sid in {base.relative_to(TOP)} from {mirror} (about two minutes) ...", flush=True)
        new = FOLDER / "base.new"
        remove(new)
        command = ["debootstrap", "--variant=minbase", f"--keyring={_KEYRING}", "sid", str(new), mirror]
        # whatever it mounts is seen by itself alone, and gone when it ends
        done = _run(["unshare", "--mount", "--propagation=private", *command], {**_apts_proxies(), **os.environ})
        if done.returncode:
            raise SystemExit(
                f"{' '.join(command)} failed (in a container it needs the right to mount):\n{done.stdout[-2000:]}"
            )
        for name, (major, minor) in _DEVICES.items():
            if not (new / "dev" / name).exists():
                os.mknod(new / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
                (new / "dev" / name).chmod(0o666)
        # Debian asks it before it starts a service; 101 means no
        (new / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
        (new / "usr/sbin/policy-rc.d").chmod(0o755)
        (new / "etc/apt/sources.list").write_text(f"deb {mirror} sid main\n")
        new.rename(base)
    return base


def _apts_proxies() -> dict[str, str]:
    """Return the proxies that apt uses, as debootstrap understands them."""
    proxies = {}
    for kind in ("http", "https"):
        command = ["apt-config", "shell", "proxy", f"Acquire::{kind}::Proxy"]
        said = shlex.split(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        if said and said != ["proxy=DIRECT"]:
            proxies[f"{kind}_proxy"] = said[0].partition("=")[2]
    return proxies


def _test(server: Server, base: Path, arguments: Sequence[str]) -> Result:
    """Bring a server up to date, start it and run its tests."""
    root = _installed(server, base)
    with _running(root, server.service) as url:
        environment = {**os.environ, server.variable: url}
        if server.service == "rabbitmq":
            parts = urlsplit(url)
            environment["RABBITMQ_MANAGEMENT_URL"] = f"http://{parts.hostname}:{(parts.port or 0) + 10_000}"
        version = _version(url, environment)
        print(f"\n{server.title} {version}", flush=True)
        begun = time.monotonic()
        report = FOLDER / f"{server.service}.xml"
        report.unlink(missing_ok=True)
        files = sorted(
            str(file.relative_to(TOP)) for name in server.files for file in TOP.glob(f"tests/integration/**/{name}")
        )
        command = [sys.executable, "-m", "pytest", "-q", "-p", "support.needing", f"--needing={server.known_as}"]
        subprocess.run(
            [*command, f"--junitxml={report}", *files, *arguments],
            cwd=TOP,
            env={**environment, "PYTHONPATH": str(TOP / "tests")},
            check=False,
        )
        if not report.exists():
            raise Problem(f"{version}: its tests could not be run, see above")
        return _result(version, report, time.monotonic() - begun)


def _installed(server: Server, base: Path) -> Path:
    """Return the folder of a server, in which its newest package is installed."""
    root = FOLDER / server.service
    if not root.exists():
        new = FOLDER / f"{server.service}.new"
        remove(new)
        subprocess.run(["cp", "--archive", "--one-file-system", base, new], check=True)
        new.rename(root)
    for name in ("/etc/hosts", "/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt"):
        if Path(name).exists():
            (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, root / name[1:])
    # how the machine's apt gets at its mirror: proxies, and what it overlooks
    options = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=True).stdout
    (root / "etc/apt/apt.conf.d/90machine").write_text(options)
    print(f"{server.title}: looking for the newest {server.package} ...", flush=True)
    apt = ["apt-get", "-qq", "-y", "-o", "Dpkg::Options::=--force-confold", "-o", "DPkg::Options::=--force-unsafe-io"]
    _in(root, [*apt, "update"])
    if not _in(root, ["apt-cache", "--no-all-versions", "show", server.package], check=False):
        raise Problem(
            f"Debian sid has no package {server.package} any more. Please look what it is called now, and name it in "
            f"{Path(__file__).relative_to(TOP)}"
        )
    _in(root, [*apt, "dist-upgrade"])
    _in(root, [*apt, "install", "--no-install-recommends", "python3", server.package])
    _in(root, ["apt-get", "clean"])
    shutil.copytree(TOP / ".ci/services", root / "opt/services", dirs_exist_ok=True)
    return root


def _inside(root: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs in a folder as if it were all there is, with a /proc that ends with it."""
    script = 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", script, str(root), *command]


def _environment() -> dict[str, str]:
    proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    return {
        **proxies,
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
        "PYTHONPATH": "/opt",
    }


def _in(root: Path, command: Sequence[str], *, check: bool = True) -> str:
    """Run a command in a folder and return what it prints, or nothing if it fails and need not be checked."""
    done = _run(_inside(root, command), _environment())
    if done.returncode and check:
        raise Problem(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")
    return "" if done.returncode else done.stdout


def _run(command: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


@contextlib.contextmanager
def _running(root: Path, service: str) -> Iterator[str]:
    """Run a server in its folder until the block ends, and yield its URL."""
    child = subprocess.Popen(
        _inside(root, ["python3", "-m", "services", service]),
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C is for the tests; the server ends when its input does, also when this process is killed
        start_new_session=True,
    )
    with child:
        assert child.stdin
        assert child.stdout
        try:
            if not (url := child.stdout.readline().strip()):
                raise Problem("it could not be started, see above")
            yield url
        finally:
            child.stdin.close()


def _version(url: str, environment: dict[str, str]) -> str:
    """Return what a server says of its version, in numbers."""
    if url.startswith("amqp"):
        import httpx

        parts = urlsplit(url)
        login = (parts.username or "", parts.password or "")
        answer = httpx.get(f"{environment['RABBITMQ_MANAGEMENT_URL']}/api/overview", auth=login, timeout=60)
        said = str(answer.raise_for_status().json()["rabbitmq_version"])
    else:
        from sqlalchemy import create_engine, text

        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        with engine.connect() as connection:
            said = str(connection.execute(text("SELECT version()")).scalar())
        engine.dispose()
    found = re.search(r"\d+(\.\d+)+", said)
    return found[0] if found else said


def _result(version: str, report: Path, seconds: float) -> Result:
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failures = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return Result(
        version,
        passed=len(cases) - len(failures) - len(skipped),
        failed=len(failures),
        day=date.today().isoformat(),
        seconds=seconds,
        failures=tuple(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in failures),
    )


def remove(folder: Path) -> None:
    """Remove a folder and all that is in it; but not what is mounted in it."""
    if mounted := mounted_below(folder):
        raise SystemExit(f"{', '.join(mounted)} is mounted, so {folder} is not removed. Please unmount it first.")
    subprocess.run(["rm", "-rf", "--one-file-system", folder], check=True)


def mounted_below(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> list[str]:
    """Return where something is mounted in a folder, or on it."""
    lines = mounts.read_text().splitlines()
    # a space is written as \040 there
    places = [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in lines]
    return [place for place in places if Path(place).is_relative_to(folder)]


def read(text: str) -> dict[str, Result]:
    """Return what was recorded, by the server's title."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: Result(row[1], int(row[2]), int(row[3]), row[4]) for row in rows[2:]}


def write(results: dict[str, Result]) -> str:
    """Return the record of results."""
    each = [(server.title, results[server.title]) for server in SERVERS if server.title in results]
    rows = [f"| {title} | {one.version} | {one.passed} | {one.failed} | {one.day} |" for title, one in each]
    return "\n".join(
        [
            "# On the newest servers",
            "",
            "What `make test-newest` showed: tests of RabbitMQ and of the store on the newest servers of Debian sid.",
            "It compares with this table, and `make test-newest RECORD=yes` writes it again.",
            "",
            "| server | version | passed | failed | day |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def compare(results: dict[str, Result | Problem], recorded: dict[str, Result]) -> tuple[list[str], bool]:
    """Return a line for each server, with those of its failed tests, and whether nothing is worse than recorded."""
    lines, good = [], True
    for title, result in results.items():
        if isinstance(result, Problem):
            lines.append(f"{title}: {result}")
            good = False
            continue
        line = f"{title} {result.version}: {result.passed} passed, {result.failed} failed in {result.seconds:.0f} s"
        if (before := recorded.get(title)) is None:
            lines.append(line)
            good = good and not result.failed
        else:
            worse = result.failed > before.failed or result.passed < before.passed
            same = (result.version, result.passed, result.failed) == (before.version, before.passed, before.failed)
            was = f"{before.version}: {before.passed} passed, {before.failed} failed on {before.day}"
            lines.append(f"{line}; {'as' if same else 'WORSE than' if worse else 'other than'} recorded ({was})")
            good = good and not worse
        lines += [f"  failed: {name}" for name in result.failures]
    return lines, good


if __name__ == "__main__":
    main()
