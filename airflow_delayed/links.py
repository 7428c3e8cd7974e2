"""The address of the page of delayed deliveries, and the links to it from a task instance.

Airflow makes these links on the worker when a task ends there, and keeps them as XComs. The plugin, which every
component of Airflow imports, imports this module: it must stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

#: The page's route within Airflow's UI (``url_route`` of the plugin's view), and the path that its app is mounted at.
ROUTE = "delayed-deliveries"


def base_path(base_url: str) -> str:
    """Return the path of ``[api] base_url`` without a slash at its end: ``""``, or such as ``/airflow``."""
    return urlsplit(base_url).path.rstrip("/")


def page_link(
    base_url: str,
    *,
    store: str | None = None,
    dag_id: str | None = None,
    run_id: str | None = None,
    task_id: str | None = None,
    map_index: int | None = None,
) -> str:
    """Return the page's address in Airflow's UI: a path without a host, so that it is right behind any proxy.

    A parameter that is None is left out, and so is the ``map_index`` of a task that is not mapped, which is below 0.
    """
    wanted = {
        "store": store,
        "dag_id": dag_id,
        "run_id": run_id,
        "task_id": task_id,
        "map_index": None if map_index is None or map_index < 0 else str(map_index),
    }
    query = urlencode({name: value for name, value in wanted.items() if value is not None}, quote_via=quote, safe="")
    top = base_path(base_url)
    # Airflow's UI opens in its frame what follows the page's route, with the query
    return f"{top}/plugin/{ROUTE}" + (f"{top}/{ROUTE}/?{query}" if query else "")


class StoredMessagesLink(BaseOperatorLink):
    """The messages that a task stored; no link for a task without a store.

    The operator's ``stored_in`` is the connection of that store, once it is known.
    """

    name = "Messages in the store"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the link, or nothing."""
        store = getattr(operator, "stored_in", None)
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
    """The page, at the operator's ``store_conn_id``, or the whole page without it."""

    name = "Delayed deliveries"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the link."""
        return page_link(_base_url(), store=getattr(operator, "store_conn_id", None))


def _base_url() -> str:
    from airflow_delayed.compat import conf

    return str(conf.get("api", "base_url", fallback="/"))
