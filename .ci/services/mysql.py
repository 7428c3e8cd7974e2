"""A private MySQL: own data folder, own port on loopback, durable as in earnest. Debian has it in sid only."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from services import packages, process

_PROGRAM = "/usr/sbin/mysqld"
#: MySQL refuses to be root's, and the package of its programs alone makes no user for it.
_SYSTEM_USER = "daemon"
_USER = "delayed"
_DATABASE = "delayed"


class MySQL:
    """A running server; ``stop`` and ``start`` keep its port and its data."""

    def __init__(self, folder: Path, password: str) -> None:
        self._folder = folder
        self._port = process.free_port()
        self._child = contextlib.ExitStack()
        self.url = f"mysql://{_USER}:{password}@127.0.0.1:{self._port}/{_DATABASE}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        log = self._folder / "mysql.log"
        command = [
            *(_PROGRAM, "--no-defaults", f"--datadir={self._folder / 'data'}", f"--socket={self._folder / 'socket'}"),
            *(f"--pid-file={self._folder / 'pid'}", f"--port={self._port}", "--bind-address=127.0.0.1"),
            *("--innodb-flush-log-at-trx-commit=1", "--skip-log-bin", "--skip-name-resolve", "--mysqlx=OFF"),
            # by default a folder that only the package of a system's server makes
            "--secure-file-priv=NULL",
            # run on the first start only, and on the later ones without effect
            f"--init-file={self._folder / 'first.sql'}",
        ]
        self._child.enter_context(process.running(command, log=log, cwd=self._folder, user=_SYSTEM_USER))
        process.wait_for("MySQL", lambda: _greets(self._port), seconds=60, log=log)

    def stop(self) -> None:
        """Stop the server: its clients are cut off, its data stay."""
        self._child.close()


@contextlib.contextmanager
def running() -> Iterator[MySQL]:
    """Run a server with one empty database until the block ends; the system's own is never touched."""
    packages.require(_PROGRAM, "mysql-server-core")
    folder = Path(tempfile.mkdtemp(prefix="delayed-mysql-"))
    try:
        password = secrets.token_hex(8)
        (folder / "first.sql").write_text(
            f"CREATE DATABASE IF NOT EXISTS `{_DATABASE}`;\n"
            f"CREATE USER IF NOT EXISTS '{_USER}'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
            f"GRANT ALL ON *.* TO '{_USER}'@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        if os.geteuid() == 0:
            for path in (folder, folder / "first.sql"):
                shutil.chown(path, _SYSTEM_USER, _SYSTEM_USER)
        _make_data(folder)
        server = MySQL(folder, password)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_data(folder: Path) -> None:
    # its root has no password, and comes by the socket only, which lies in a folder of ours
    command = [_PROGRAM, "--no-defaults", "--initialize-insecure", f"--datadir={folder / 'data'}"]
    done = subprocess.run(
        [*process.as_user(_SYSTEM_USER), *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"mysqld --initialize-insecure failed:\n{done.stdout[-2000:]}")


def _greets(port: int) -> bool:
    """Whether the server greets a client: it speaks first, with the number of its protocol."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        return client.recv(5)[4:] == b"\x0a"
