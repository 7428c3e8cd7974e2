"""Many rows for the store's table at once, as this package would have written them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

import psycopg2

#: Messages that fall due together.
BLOCK = 100_000

#: What each column holds; the ids are hashes, so that no two neighbours in the table are neighbours in the index.
_COLUMNS = {
    "Id": "md5(number::text)",
    "Destination": "'orders'",
    "State": "decode(repeat('78', 200), 'hex')",
    "Time": "now() + make_interval(days => (place / {block})::int, secs => {ahead} + (place % {block}) / 1000.0)",
    "Headers": "convert_to('{{}}', 'UTF8')",
    "RetryCount": "0",
    "DeliverConnId": "'{broker}'",
    "Digest": "decode(md5('digest' || number), 'hex')",
    "StoredAt": "now()",
}
_ROWS = (
    "SELECT {values} FROM (SELECT number, {place} AS place FROM generate_series(0, {rows} - 1) AS number) AS numbered"
)


def fill(
    url: str,
    table: str,
    broker: str,
    rows: int,
    *,
    scattered: bool = False,
    ahead: float = 0,
    columns: Mapping[str, str] | None = None,
) -> None:
    """Fill an empty table with blocks of 100,000 messages; block number n falls due n days from now, within 100 s.

    :param ahead: seconds that all are due later.
    :param columns: SQL for further columns, or instead of what these have otherwise; ``number`` counts from 0.
    :param scattered: the rows of a block lie all over the table, each in another page; else as if stored in turn.
    """
    # a number that has no divisor in common with any number of rows that is round
    place = f"(number::bigint * 7_368_787) % {rows}".replace("_", "") if scattered else "number"
    values = {
        name: value.format(block=BLOCK, broker=broker, ahead=ahead)
        for name, value in {**_COLUMNS, **(columns or {})}.items()
    }
    source = _ROWS.format(values=", ".join(values.values()), place=place, rows=rows)
    names = ", ".join(f'"{name}"' for name in values)
    with closing(psycopg2.connect(url)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s", [table])
            indexes = dict(cursor.fetchall())
            others = {name: text for name, text in indexes.items() if "UNIQUE" not in text}
            key = next(name for name in indexes if name not in others)
            # one by one into an index would take many times as long
            cursor.execute(f'ALTER TABLE "{table}" DROP CONSTRAINT "{key}"')
            for name in others:
                cursor.execute(f'DROP INDEX "{name}"')
            cursor.execute(f'INSERT INTO "{table}" ({names}) {source}')
            cursor.execute(f'ALTER TABLE "{table}" ADD CONSTRAINT "{key}" PRIMARY KEY ("Id")')
            for text in others.values():
                cursor.execute(text)
