"""Taking over another store's table: a part of DelayedStoreHook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from airflow_delayed.delivery import DelayStore
from airflow_delayed.store.adopt import Adopter, AdoptReport
from airflow_delayed.store.conflicts import OnConflict
from airflow_delayed.store.engine import database_errors
from airflow_delayed.store.foreign import HeaderFormat, Reader, foreign_table, queue_of

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from airflow_delayed.store.schema import Tables


class StoreAdoption(DelayStore):
    """What the hook of a store does with the table of another one."""

    on_conflict: OnConflict
    tables: Tables

    @property
    def engine(self) -> Engine:
        """The connection's engine."""
        raise NotImplementedError

    def adopt(
        self,
        *,
        table: str,
        schema: str | None = None,
        columns: Mapping[str, str] | None = None,
        headers: HeaderFormat = "xml",
        destination_of: Callable[[str], str] = queue_of,
        batch_size: int = 500,
        dry_run: bool = False,
    ) -> AdoptReport:
        """Move what waits in another store's table of this database into this store, for its ``deliver_conn_id``.

        The table has the shape of NServiceBus's SqlServerDelayedMessageStore, or other names. Its ids, due times (read
        as UTC) and counts of failures are kept. The other store may go on at the same time: what it holds is passed
        over. Nothing is lost if this is killed: run it again. Run it again too for ``remaining`` rows.

        :param table: its name, as the database writes it; NServiceBus's default is ``<endpoint>.timeouts``.
        :param schema: its schema, such as ``dbo``; by default the connection's own.
        :param columns: names that are not NServiceBus's, by those that are: ``{"Id": "message_id", "State": "body"}``.
        :param headers: ``xml``, as NServiceBus's MSMQ transport writes them, or ``json``, one object.
        :param destination_of: makes the destination of what the row has. By default the machine of an MSMQ address is
            left out: ``Sales@SERVER1`` is ``Sales``.
        :param batch_size: rows that are locked and copied at a time, 1 to 1000.
        :param dry_run: change nothing, and report what would be.
        :raises ValueError: the hook's ``on_conflict`` is not ``error``, or another of these cannot be.
        :raises SourceError: the table is not there, is one of this package, or its ids need not be unique.
        :raises UnsupportedColumns: the table lacks a column; the text names it.
        :raises TopologyError: this store's own tables are missing.
        :raises TransportUnavailable: the database cannot be reached; what was taken over before is so.
        """
        if self.on_conflict != "error":
            raise ValueError(
                f"on_conflict={self.on_conflict!r}: a row of an id that is here with other content is left where it is;"
                " take over with a hook of on_conflict='error'"
            )
        reader = Reader(headers, destination_of)
        with database_errors(self.conn_id, self.engine, self.tables):
            source = foreign_table(self.engine, table, schema=schema, columns=columns)
            adopter = Adopter(self.engine, source, self.tables.messages, self, reader, batch_size)
            return adopter.plan() if dry_run else adopter.run()
