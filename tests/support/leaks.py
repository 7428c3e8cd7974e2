"""Where a live Airflow keeps a text that it should not have: in a row of its database, or in a file of its home."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from cryptography.fernet import Fernet


def leaks(database: str, fernet_key: str, folder: Path, *texts: str) -> list[str]:
    """Return each place that has one of the texts, as it is or in base64: a table and its column, or a file.

    :param database: the postgresql:// URL of Airflow's own database. The arguments of triggers are decrypted; of
        connections the passwords are not, for there they are by their nature.
    :param fernet_key: for that.
    :param folder: Airflow's home, with its logs.
    """
    wanted = {form for text in texts for form in _forms(text.encode())}
    found = {
        where for where, content in _everything(database, fernet_key, folder) if any(form in content for form in wanted)
    }
    return sorted(found)


def _forms(text: bytes) -> Iterator[bytes]:
    yield text
    yield text.hex().encode()
    for before in range(3):
        # what stands before it shifts it; the characters at both ends hold bits of its neighbours
        encoded = base64.b64encode(b"\0" * before + text).rstrip(b"=")
        yield encoded[4 if before else 0 : -2]


def _everything(database: str, fernet_key: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield str(file.relative_to(folder)), file.read_bytes()
    yield from _rows(database, Fernet(fernet_key))


def _rows(database: str, fernet: Fernet) -> Iterator[tuple[str, bytes]]:
    import psycopg2
    from psycopg2 import sql

    with closing(psycopg2.connect(database)) as connection, connection.cursor() as cursor:
        cursor.execute(
            "select table_name, column_name, data_type from information_schema.columns where table_schema = 'public'"
        )
        for table, column, kind in cursor.fetchall():
            # bytes as they are, and all else as text
            value = sql.SQL("{}" if kind == "bytea" else "{}::text").format(sql.Identifier(column))
            cursor.execute(sql.SQL("select {} from {}").format(value, sql.Identifier(table)))
            for (content,) in cursor.fetchall():
                if content is None:
                    continue
                raw = bytes(content) if kind == "bytea" else content.encode()
                yield f"{table}.{column}", raw
                with suppress(zlib.error):
                    yield f"{table}.{column}, unpacked", zlib.decompress(raw)
                # encryption would hide them
                if (table, column) == ("trigger", "kwargs") and not raw.startswith(b"{"):
                    yield f"{table}.{column}, decrypted", fernet.decrypt(raw)
