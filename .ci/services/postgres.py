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


class Postgres:
    """A running server; ``stop`` and ``start`` keep its port and its data."""

    def __init__(self, programs: Path, folder: Path, password: str) -> None:
        self._programs = programs
        self._folder = folder
        self._port = process.free_port()
        self._child = contextlib.ExitStack()
        self._server: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql://postgres:{password}@127.0.0.1:{self._port}/{_DATABASE}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        log = self._folder / "postgres.log"
        options = [f"port={self._port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=on"]
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data")]
        for option in options:
            command += ["-c", option]
        # INT is PostgreSQL's fast shutdown; TERM would wait for its clients
        running = process.running(command, log=log, cwd=self._folder, user=_USER, farewell="INT")
        self._server = self._child.enter_context(running)
        probe = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self._port)]
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


@contextlib.contextmanager
def running() -> Iterator[Postgres]:
    """Run a server with one empty database until the block ends; the system's own cluster is never touched."""
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
        server = Postgres(programs, folder, password)
        try:
            server.start()
            environment = {"PGPASSWORD": password}
            where = ["-h", "127.0.0.1", "-p", str(server._port), "-U", "postgres"]
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
