"""Tables that were there before the store was installed, and are not its own: somebody else owns them, or listens.

Whoever may create tables can make the store's table first. Its owner may read and change each message, and so can a
trigger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sqlalchemy import Connection, Table, text

from airflow_delayed.store.schema import MYSQL

# a superuser is a member of each role, and yet not the owner of what others made
_POSTGRES = text("""
SELECT CASE WHEN c.relowner <> me.oid AND (me.rolsuper OR NOT pg_has_role(c.relowner, 'MEMBER'))
            THEN pg_get_userbyid(c.relowner) END AS owner,
       ARRAY(SELECT CAST(tgname AS text) FROM pg_trigger WHERE tgrelid = c.oid AND NOT tgisinternal ORDER BY 1)
FROM pg_class c, pg_roles me WHERE c.oid = to_regclass(:name) AND me.rolname = current_user
""")
_MYSQL = text("""
SELECT CONCAT(TRIGGER_NAME, ' (of ', DEFINER, ')') FROM information_schema.TRIGGERS
WHERE EVENT_OBJECT_SCHEMA = COALESCE(:schema, DATABASE()) AND EVENT_OBJECT_TABLE = :name ORDER BY 1
""")


def warnings(connection: Connection, tables: Iterable[Table]) -> Iterator[str]:
    """Yield warnings of existing tables: owner and triggers on PostgreSQL, triggers on MariaDB and MySQL."""
    for table in tables:
        owner, triggers = _of(connection, table)
        if owner is not None:
            yield (
                f"table {table.fullname} belongs to the database user {owner!r}, who can read and change each message;"
                " if you do not know why, drop the table and install again"
            )
        if triggers:
            yield (
                f"table {table.fullname} has triggers, which can read and change each message: {', '.join(triggers)};"
                " if you do not know why, drop them"
            )


def _of(connection: Connection, table: Table) -> tuple[str | None, list[str]]:
    """Return the owner, if that is somebody else, and the triggers of a table."""
    name = connection.dialect.name
    if name == "postgresql":
        full = connection.dialect.identifier_preparer.format_table(table)
        row = connection.execute(_POSTGRES, {"name": full}).one_or_none()
        return (None, []) if row is None else (row[0], list(row[1]))
    if name in MYSQL:
        found = connection.execute(_MYSQL, {"schema": table.schema, "name": table.name})
        return None, list(found.scalars())
    return None, []
