"""A private PostgreSQL from Debian: own data folder, own port on loopback, durable as in earnest (fsync on)."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from services import packages, process

#: Where Debian 12 keeps the programs; other versions are found by their number.
_DEBIAN_12 = "/usr/lib/postgresql/15/bin/postgres"
_DATABASE = "delayed"
_USER = "postgres"


_LOOPBACK = "127.0.0.1"


class Postgres:
    """A running server; ``stop``, ``kill`` and ``start`` keep its port and its data.

    :param within: the beginning of a command that runs where the host's address is, such as a network namespace.
    """

    def __init__(
        self, programs: Path, folder: Path, password: str, *, host: str = _LOOPBACK, within: Sequence[str] = ()
    ) -> None:
        self._programs = programs
        self._folder = folder
        self._within = within
        self._child = contextlib.ExitStack()
        self._server: subprocess.Popen[bytes] | None = None
        self.host = host
        self.port = process.free_port()
        self.password = password
        self.url = f"postgresql://postgres:{password}@{host}:{self.port}/{_DATABASE}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        log = self._folder / "postgres.log"
        options = [f"port={self.port}", f"listen_addresses={self.host}", "unix_socket_directories=", "fsync=on"]
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data")]
        for option in options:
            command += ["-c", option]
        # INT is PostgreSQL's fast shutdown; TERM would wait for its clients
        running = process.running(command, log=log, cwd=self._folder, user=_USER, within=self._within, farewell="INT")
        self._server = self._child.enter_context(running)
        probe = [str(self._programs / "pg_isready"), "-q", "-h", self.host, "-p", str(self.port)]
        process.wait_for(
            "PostgreSQL", lambda: subprocess.run(probe, check=False, timeout=10).returncode == 0, seconds=60, log=log
        )

    def stop(self) -> None:
        """Stop the server: its clients are cut off, its data stay."""
        if self._server is not None and not process.ended(self._server):
            os.kill(self._server.pid, signal.SIGINT)
            process.wait(self._server, seconds=30)
        self._server = None
        self._child.close()

    def kill(self) -> None:
        """Kill all its processes at once, as a loss of power does."""
        if self._server is not None:
            # each has a process group of its own
            number = self._server.pid
            children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
            process.signal_group(self._server, signal.SIGKILL)
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        self._server = None
        self._child.close()

    def promote(self) -> None:
        """Make a standby a primary, and wait until it is."""
        _call([str(self._programs / "pg_ctl"), "promote", "-D", str(self._folder / "data")], self._folder)


@contextlib.contextmanager
def standby(primary: Postgres, *, port: int | None = None) -> Iterator[Postgres]:
    """Run a standby on loopback that follows a primary until the block ends; asynchronous unless the primary waits.

    :param port: where it reaches the primary; by default the primary's own.
    """
    folder = Path(tempfile.mkdtemp(prefix="delayed-standby-"))
    try:
        _own(folder)
        programs = _programs()
        source = f"host={primary.host} port={port or primary.port} user=postgres password={primary.password}"
        copy = [str(programs / "pg_basebackup"), "-R", "-c", "fast", "-D", str(folder / "data"), "-d", source]
        _call(copy, folder)
        server = Postgres(programs, folder, primary.password)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(*, host: str = _LOOPBACK, within: Sequence[str] = ()) -> Iterator[Postgres]:
    """Run a server with one empty database until the block ends; the system's own cluster is never touched.

    :param host: its address, which others of the same network may use too.
    :param within: see :class:`Postgres`.
    """
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="delayed-postgres-"))
    try:
        password = secrets.token_hex(8)
        (folder / "password").write_text(password)
        _own(folder)
        _own(folder / "password")
        initdb = [
            str(programs / "initdb"),
            "-D",
            str(folder / "data"),
            "-U",
            "postgres",
            "-E",
            "UTF8",
            "--locale=C.UTF-8",
        ]
        _call([*initdb, "--auth=scram-sha-256", f"--pwfile={folder / 'password'}"], folder)
        with (folder / "data" / "pg_hba.conf").open("a") as file:
            file.writelines(f"host {name} all samenet scram-sha-256\n" for name in ("all", "replication"))
        server = Postgres(programs, folder, password, host=host, within=within)
        try:
            server.start()
            environment = {"PGPASSWORD": password}
            where = ["-h", host, "-p", str(server.port), "-U", "postgres"]
            _call([str(programs / "createdb"), *where, _DATABASE], folder, environment)
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    if not found:
        packages.require(_DEBIAN_12, "postgresql")
        found = [Path(_DEBIAN_12)]
    return found[-1].parent


def _own(path: Path) -> None:
    if os.geteuid() == 0:
        shutil.chown(path, _USER, _USER)


def _call(command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [*process.as_user(_USER), *command],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed:\n{done.stdout[-2000:]}")
