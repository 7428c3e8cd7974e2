"""Where the page of delayed deliveries is, and how to link to a part of it. No Airflow here."""

from __future__ import annotations

from urllib.parse import quote, urlencode, urlsplit

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
    """Return the page's address as seen from Airflow's UI: a path, so that it holds behind whatever host name.

    What is None is left out, and so is a ``map_index`` below 0, which a task has that is not mapped.

    :param base_url: Airflow's ``[api] base_url``.
    :param store: the connection of the store that is shown.
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
