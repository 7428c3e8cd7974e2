"""CustomStoreDispatchOperator: a task that dispatches the messages of a store of your own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

from airflow.sdk import BaseOperator

from airflow_delayed import config, metrics
from airflow_delayed.delivery import delivery_for
from airflow_delayed.links import DeliveriesLink
from airflow_delayed.store.dispatch.custom import CustomDispatcher
from airflow_delayed.store.dispatch.report import DispatchFailed
from airflow_delayed.store.policy import BREAKER_TIME, DispatchPolicy
from airflow_delayed.store.protocol import DelayedMessageStore

if TYPE_CHECKING:
    from airflow.sdk import Context


class CustomStoreDispatchOperator(BaseOperator):
    """Dispatches the messages of a store of your own that are due within ``lookahead``, and removes them.

    Experimental: it may change without a deprecation before (docs/development/stability.md).

    The store implements :mod:`airflow_delayed.store.protocol`. A message is dispatched at least once; any number of
    these tasks may run side by side. Lookahead must be longer than the time between two runs and a worker's start.

    Returns counts (``dispatched``, ``retried``, ``failed``, ``expired``, ``error_destination``, ``by_connection``) and
    the first and last due time.

    The store:

    :param store: the path of the store, as ``package.module:name``: a class or function without arguments that returns
        it. It is called where the task runs. The path is no template: only the DAG's text decides which code is called.
    :param name: the store's name; the store may name its tables by it.
    :param set_up: make the store's infrastructure where it is missing; False if the task has no right to.

    Where to:

    :param conn_id: the connection that delivers.

    When, and how fast:

    :param lookahead: how long before its due time a message is dispatched, or less if its transport cannot delay it for
        so long. "auto" is ``[delayed] lookahead``, 15 minutes.
    :param until: None makes one pass; "empty" goes on until the store is empty.
    :param batch_size: messages that are fetched at a time, from a store that can fetch several.

    Safety:

    :param number_of_retries: as StoreDispatchOperator's; so are ``error_destination`` and ``give_up_after``.

    Result:

    :raises ValueError: a parameter has a value that is not possible.
    """

    # without store: a user with the right to trigger a run could have any code imported and called
    template_fields: Sequence[str] = ("name", "conn_id", "error_destination")
    operator_extra_links = (DeliveriesLink(),)

    def __init__(
        self,
        *,
        store: str,
        name: str,
        conn_id: str,
        lookahead: timedelta | Literal["auto"] = "auto",
        batch_size: int = 500,
        until: Literal["empty"] | None = None,
        set_up: bool = True,
        number_of_retries: int = 7,
        error_destination: str | None = None,
        give_up_after: timedelta = BREAKER_TIME,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if until not in (None, "empty"):
            raise ValueError(f"until={until!r} must be None, for one pass, or 'empty'")
        self.store = store
        self.name = name
        self.conn_id = conn_id
        self.lookahead = lookahead
        self.auto_lookahead = config.lookahead() if lookahead == "auto" else lookahead
        self.batch_size = batch_size
        self.until = until
        self.set_up = set_up
        self.number_of_retries = number_of_retries
        self.error_destination = error_destination
        self.give_up_after = give_up_after
        DispatchPolicy.of(vars(self))

    def execute(self, context: Context) -> dict[str, Any]:
        """Dispatch messages, and return the counts.

        :raises DispatchFailed: messages failed and are still in the store, or the connection failed for too long.
        :raises BreakerTripped: the store failed for too long.
        :raises ValueError: the store's path cannot be imported.
        """
        dispatcher = CustomDispatcher(
            load(self.store),
            name=self.name,
            transport=delivery_for(self.conn_id),
            conn_id=self.conn_id,
            policy=DispatchPolicy.of(vars(self)),
            set_up=self.set_up,
        )
        try:
            report = dispatcher.run(self.until)
        except DispatchFailed as error:
            metrics.count_report(self.name, self.conn_id, error.report)
            raise
        metrics.count_report(self.name, self.conn_id, report)
        return report.to_json()


def load(store: str) -> DelayedMessageStore:
    """Make the store with the path ``package.module:name``."""
    module, _, name = store.partition(":")
    try:
        make = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"store={store!r} is not found: {error}; write it as 'package.module:name'") from error
    return cast(DelayedMessageStore, make())
