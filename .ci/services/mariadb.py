"""A private MariaDB from Debian: own data folder, own port on loopback, durable as in earnest."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from services import packages, process
from services.rabbitmq import CertificateFiles

_PROGRAM = "/usr/sbin/mariadbd"
_ADMIN = "/usr/bin/mariadb-admin"
_INSTALL = "/usr/bin/mariadb-install-db"
_SYSTEM_USER = "mysql"
_USER = "delayed"
_DATABASE = "delayed"


class MariaDB:
    """A running server; ``stop`` and ``start`` keep its port and its data."""

    def __init__(self, folder: Path, password: str, options: Sequence[str]) -> None:
        self._folder = folder
        self._options = options
        self._port = process.free_port()
        self._child = contextlib.ExitStack()
        self.url = f"mysql://{_USER}:{password}@127.0.0.1:{self._port}/{_DATABASE}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        log = self._folder / "mariadb.log"
        command = [
            *(_PROGRAM, "--no-defaults", f"--datadir={self._folder / 'data'}", f"--socket={self._folder / 'socket'}"),
            *(f"--pid-file={self._folder / 'pid'}", f"--port={self._port}", "--bind-address=127.0.0.1"),
            *("--innodb-flush-log-at-trx-commit=1", "--skip-log-bin", "--skip-name-resolve"),
            # many tests at once: with the default of 128 MiB statements failed with error 1206, no room for locks
            "--innodb-buffer-pool-size=512M",
            # run on the first start only, and on the later ones without effect
            f"--init-file={self._folder / 'first.sql'}",
            *self._options,
        ]
        self._child.enter_context(process.running(command, log=log, cwd=self._folder, user=_SYSTEM_USER))
        probe = [_ADMIN, "--no-defaults", "--silent", "--protocol=tcp", "--host=127.0.0.1", f"--port={self._port}"]
        # it answers also who may not enter
        process.wait_for(
            "MariaDB",
            lambda: subprocess.run([*probe, "ping"], check=False, capture_output=True, timeout=10).returncode == 0,
            seconds=60,
            log=log,
        )

    def stop(self) -> None:
        """Stop the server: its clients are cut off, its data stay."""
        self._child.close()


@contextlib.contextmanager
def running(*options: str, tls: CertificateFiles | None = None) -> Iterator[MariaDB]:
    """Run a server with one empty database until the block ends; the system's own is never touched.

    :param options: further ones of the server.
    :param tls: have it offer TLS with this certificate.
    """
    packages.require(_PROGRAM, "mariadb-server")
    folder = Path(tempfile.mkdtemp(prefix="delayed-mariadb-"))
    try:
        password = secrets.token_hex(8)
        (folder / "first.sql").write_text(
            f"CREATE DATABASE IF NOT EXISTS `{_DATABASE}`;\n"
            f"CREATE USER IF NOT EXISTS '{_USER}'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
            f"GRANT ALL ON *.* TO '{_USER}'@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        for path in (folder, folder / "first.sql"):
            _own(path)
        install = [
            _INSTALL,
            "--no-defaults",
            f"--datadir={folder / 'data'}",
            "--auth-root-authentication-method=normal",
        ]
        _call([*install, "--skip-test-db", "--skip-name-resolve"], folder)
        server = MariaDB(folder, password, [*options, *(_tls_options(tls, folder) if tls else ())])
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tls_options(tls: CertificateFiles, folder: Path) -> Iterator[str]:
    """Copy the files to where the server may read them."""
    for option, file in (("ca", tls.cacertfile), ("cert", tls.certfile), ("key", tls.keyfile)):
        path = Path(shutil.copy(file, folder / f"{option}.pem"))
        _own(path)
        yield f"--ssl-{option}={path}"


def _own(path: Path) -> None:
    if os.geteuid() == 0:
        shutil.chown(path, _SYSTEM_USER, _SYSTEM_USER)


def _call(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(
        [*process.as_user(_SYSTEM_USER), *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed:\n{done.stdout[-2000:]}")
