"""Operators that pause messages of a store, and end a pause."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_delayed.compat import AirflowFailException
from airflow_delayed.criteria import UNSET, Unset
from airflow_delayed.errors import InputError, UnsupportedConnection
from airflow_delayed.identity import SentBy
from airflow_delayed.links import DeliveriesLink
from airflow_delayed.operators.change import SelectsMessages, rendered_reason
from airflow_delayed.sources.templated import rendered_flag

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.hooks.store import DelayedStoreHook
    from airflow_delayed.store.api import OnUnpause, PauseReport, UnpauseReport


class _PauseBase(SelectsMessages, BaseOperator):
    """What both operators have in common."""

    template_fields: Sequence[str] = (
        *("store_conn_id", "destination", "deliver_conn_id", "tag", "sent_by", "duration", "spread"),
        *("only_plan", "because", "table", "schema"),
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"sent_by": "json"}
    operator_extra_links = (DeliveriesLink(),)
    ui_color = "#e8f1fb"

    def __init__(
        self,
        *,
        store_conn_id: str,
        destination: str | Unset = UNSET,
        deliver_conn_id: str | Unset = UNSET,
        tag: str | Unset = UNSET,
        sent_by: SentBy | Mapping[str, Any] | Unset = UNSET,
        duration: timedelta | float | str | None = None,
        on_unpause: OnUnpause | None = None,
        spread: timedelta | float | str | None = None,
        dry_run: bool | str = False,
        because: str | None = None,
        table: str = "delayed_messages",
        schema: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.store_conn_id = store_conn_id
        self.select(destination=destination, deliver_conn_id=deliver_conn_id, tag=tag, sent_by=sent_by)
        if not self.selected:
            raise ValueError("give at least one of destination=, deliver_conn_id=, tag=, sent_by=")
        self.duration = duration
        self.on_unpause = on_unpause
        self.spread = spread
        # BaseOperator has a method of the parameter's name
        self.only_plan = dry_run
        self.because = because
        self.table = table
        self.schema = schema

    def execute(self, context: Context) -> dict[str, Any]:
        """Pause, or end the pause, and return what the report says.

        :raises AirflowFailException: a parameter, as it was rendered, cannot be; nothing was changed.
        :raises TransportUnavailable: the database cannot be reached.
        """
        from airflow_delayed.hooks.store import DelayedStoreHook

        try:
            options: dict[str, Any] = {
                **self.selection(),
                "dry_run": rendered_flag("dry_run", self.only_plan),
                "because": rendered_reason(self.because),
            }
            given = {"duration": self.duration, "on_unpause": self.on_unpause, "spread": self.spread}
            options |= {name: value for name, value in given.items() if value is not None}
            with closing(DelayedStoreHook(self.store_conn_id, table=self.table, schema=self.schema)) as store:
                report = self.change(store, **options)
        except (InputError, UnsupportedConnection, ValueError) as error:
            raise AirflowFailException(str(error)) from error
        self.log.info("%s", report)
        return report.summary()

    @abstractmethod
    def change(self, store: DelayedStoreHook, **arguments: Any) -> PauseReport | UnpauseReport:
        """Begin or end the pause."""


class DelayedPauseOperator(_PauseBase):
    """Lets no dispatcher of a store take messages for a time, by destination, connection, tag, DAG or run.

    Each dispatcher obeys within 2 s. The result has ``waiting``, the messages in the store that are paused;
    ``with_broker``, the messages that nobody can stop any more; and ``arrive_until``, when their last is due. To pause
    the same messages again, as a retry does, begins the pause again.

    What to pause: messages that meet all of these, at least one. A parameter that is passed and is None fails the task.

    :param destination: messages to this queue.
    :param deliver_conn_id: messages that this connection delivers; the store's own for its queue tables.
    :param tag: messages with this tag.
    :param sent_by: messages that these tasks stored: a SentBy, or a dictionary with ``dag_id`` and, if wanted,
        ``run_id``, ``task_id`` and ``map_index``.

    How long, and what then:

    :param duration: the pause ends by itself after so long: a timedelta, seconds, or an ISO 8601 duration; None:
        when :class:`DelayedUnpauseOperator` ends it.
    :param on_unpause: what becomes of messages that fell due meanwhile: "spread" (the default) sends them within
        ``spread``, "at_once" sends them at once, "drop" cancels them, which can be taken back for a while.
    :param spread: a timedelta, seconds, or an ISO 8601 duration; 10 minutes by default.

    Else:

    :param store_conn_id: the store, a SQL connection.
    :param dry_run: pause nothing, and return what would be paused; may be a template, ``only_plan`` among them.
    :param because: the reason, for the audit; may be a template.
    :param table: the store's table.
    :param schema: the table's schema; by default the connection's own.
    :raises ValueError: nothing is selected.
    """

    def change(self, store: DelayedStoreHook, **arguments: Any) -> PauseReport:
        """Begin the pause."""
        return store.pause(**arguments)


class DelayedUnpauseOperator(_PauseBase):
    """Ends the pause that began with the same criteria. The parameters are those of :class:`DelayedPauseOperator`.

    ``on_unpause`` and ``spread`` are in place of what the pause says. The result has ``ended``, whether there was such
    a pause; ``due``, how many messages fell due meanwhile; and ``cancelled``, how many of them were dropped.

    :raises ValueError: nothing is selected, or ``duration`` is given.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.duration is not None:
            raise ValueError("duration= is for a pause; it ends now")

    def change(self, store: DelayedStoreHook, **arguments: Any) -> UnpauseReport:
        """End the pause."""
        return store.unpause(**arguments)
