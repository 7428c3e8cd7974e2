"""A private PgBouncer from Debian before a PostgreSQL: each transaction gets any connection of its pool."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from services import packages, process

_PROGRAM = "/usr/sbin/pgbouncer"
#: Its package brings this user along.
_USER = "postgres"


@contextlib.contextmanager
def running(url: str) -> Iterator[str]:
    """Run a pooler before the server of a URL until the block ends, and yield the URL of the same database by it."""
    import psycopg2

    packages.require(_PROGRAM, "pgbouncer")
    parts = urlsplit(url)
    folder = Path(tempfile.mkdtemp(prefix="delayed-pgbouncer-"))
    port = process.free_port()
    server = f"host={parts.hostname} port={parts.port} user={unquote(parts.username or '')}"
    file = folder / "pgbouncer.ini"
    file.write_text(
        f"""[databases]
* = {server} password={unquote(parts.password or "")}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 3
"""
    )
    try:
        if os.geteuid() == 0:
            # it refuses to be root's
            for path in (folder, file):
                shutil.chown(path, _USER, _USER)
        with process.running([_PROGRAM, str(file)], log=(log := folder / "pgbouncer.log"), user=_USER):
            by_it = parts._replace(netloc=f"{parts.username}:none@127.0.0.1:{port}").geturl()
            process.wait_for("PgBouncer", lambda: psycopg2.connect(by_it).close() is None, log=log)
            yield by_it
    finally:
        shutil.rmtree(folder, ignore_errors=True)
