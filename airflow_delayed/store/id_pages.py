"""The ids of all messages that a filter means, a page at a time, one table after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from sqlalchemy import Connection, Engine, Table, func, select

from airflow_delayed.store.criteria import Criteria
from airflow_delayed.store.drivers import LAST
from airflow_delayed.store.ordered import BOTH, Conditions, Place, Where, behind, first, of_table, only_run
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.stored import place_of, token_of

#: Ids a page.
PAGE = 1000
#: What is left is counted up to this.
MOST = 1_000_000


class IdPages:
    """Yields lists of ids, each read when it is asked for. To be gone through once.

    :param where: the tables to look into, messages before failed.
    :param more: further conditions.
    :param limit: end after so many; ``next`` says where to go on.
    :param after: the ``next`` of those before.
    :param database_time: reads the database's clock.
    :raises ValueError: ``after`` is no such token.
    """

    def __init__(
        self,
        engine: Engine,
        tables: Tables,
        criteria: Criteria,
        *,
        where: Sequence[Where],
        more: Callable[[Table], Conditions],
        limit: int | None = None,
        after: str | None = None,
        database_time: Callable[[Connection], datetime],
    ) -> None:
        self._engine = engine
        self._tables = tables
        self._criteria = criteria
        self._more = more
        self._limit = limit
        self._database_time = database_time
        self._todo = _todo(where, after)
        #: Where those begin that the limit left out; None: there may be none.
        self.next: str | None = None

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the ids, up to a thousand at a time."""
        left = self._limit
        while self._todo:
            where, place = self._todo[0]
            size = PAGE if left is None else min(PAGE, left)
            found = self._page(where, place, size)
            if len(found) < size:
                del self._todo[0]
            else:
                self._todo[0] = (where, found[-1])
            if found:
                yield [message_id for _, message_id in found]
            if left is not None:
                left -= len(found)
                if not left:
                    self.next = _token(*self._todo[0]) if self._todo else None
                    return

    def _page(self, where: Where, place: Place | None, size: int) -> list[Place]:
        table: Table = getattr(self._tables, where)
        with self._engine.connect().execution_options(read_only=True) as connection:
            statement = first(
                connection.dialect.name,
                self._tables,
                where,
                self._criteria,
                self._database_time(connection),
                [table.c.Time, table.c.Id],
                run=only_run(connection, self._tables, self._criteria)[0],
                after=place,
                size=size,
                more=self._more(table),
            )
            if statement is None:
                return []
            found = [(row.Time, row.Id) for row in connection.execute(statement)]
        # the database finds a time beyond the last one behind each place, so these would come again and again
        return found if place is None or place[0] < LAST else [one for one in found if one > place]

    def left(self) -> int:
        """Count what the limit left out, up to a million."""
        counted = 0
        for where, place in self._todo:
            table: Table = getattr(self._tables, where)
            with self._engine.connect().execution_options(read_only=True) as connection:
                meant = of_table(self._tables, where, self._criteria, self._database_time(connection))
                if meant is not None:
                    conditions = [*meant, *self._more(table), *behind(table, place, connection.dialect.name)]
                    some = select(table.c.Id).where(*conditions).limit(MOST - counted).subquery()
                    counted += int(connection.execute(select(func.count()).select_from(some)).scalar_one())
            if counted >= MOST:
                break
        return counted


def _token(where: Where, place: Place | None) -> str:
    return where if place is None else f"{where}.{token_of(*place)}"


def check_token(after: str, where: Sequence[Where] = BOTH) -> None:
    """Check a token of ids in these tables.

    :raises ValueError: it is none.
    """
    _todo(where, after)


def _todo(where: Sequence[Where], after: str | None) -> list[tuple[Where, Place | None]]:
    if after is None:
        return [(one, None) for one in where]
    name, _, place = after.partition(".")
    if name not in where:
        raise ValueError("after= is no token of a change by filter; give what the last one said")
    begin = where[list(where).index(name) :]  # type: ignore[arg-type]
    return [(one, place_of(place) if one == name and place else None) for one in begin]
