"""Links from a task instance to the page of delayed deliveries.

Airflow makes them on the worker when a task ends there, and keeps them as XComs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperatorLink

from airflow_delayed.compat import conf
from airflow_delayed.ui.links import page_link

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class StoredMessagesLink(BaseOperatorLink):
    """The messages that a task left in a store; none where it had no store.

    Its operator's ``held_in`` is the connection of that store, once it is known.
    """

    name = "Messages in the store"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the link, or nothing."""
        store = getattr(operator, "held_in", None)
        if not store:
            return ""
        # on the worker it is the task instance, whose map_index may be None
        key: Any = ti_key
        return page_link(
            _base_url(),
            store=store,
            dag_id=key.dag_id,
            run_id=key.run_id,
            task_id=key.task_id,
            map_index=key.map_index,
        )


class DeliveriesLink(BaseOperatorLink):
    """The page, at the store that its operator's ``page_store`` names; else as a whole."""

    name = "Delayed deliveries"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the link."""
        return page_link(_base_url(), store=getattr(operator, "page_store", None))


def _base_url() -> str:
    return str(conf.get("api", "base_url", fallback="/"))
