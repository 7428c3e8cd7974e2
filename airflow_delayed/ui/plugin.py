"""The page in Airflow's navigation, and in the tabs of a DAG, a run, a task and a task instance.

Every component of Airflow imports this module, so it imports next to nothing itself.
"""

from __future__ import annotations

from typing import Any

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

from airflow_delayed.ui.lazy import LazyApp
from airflow_delayed.ui.links import ROUTE, base_path

NAME = "Delayed deliveries"

#: The places of the page, with the query that each is opened with; Airflow's UI fills in the names, URI-encoded.
_PLACES = {
    "nav": "",
    "dag": "?dag_id={DAG_ID}",
    "dag_run": "?dag_id={DAG_ID}&run_id={RUN_ID}",
    "task": "?dag_id={DAG_ID}&task_id={TASK_ID}",
    "task_instance": "?dag_id={DAG_ID}&run_id={RUN_ID}&task_id={TASK_ID}&map_index={MAP_INDEX}",
}


def views() -> list[dict[str, Any]]:
    """Return the page's places in Airflow's UI."""
    # Airflow mounts apps below the path of its own address
    top = f"{base_path(conf.get('api', 'base_url', fallback=''))}/{ROUTE}/"
    return [
        {
            "name": NAME,
            "href": f"{top}{query}",
            "destination": place,
            # a route may be there once only
            "url_route": ROUTE if place == "nav" else f"{ROUTE}-{place.replace('_', '-')}",
            "icon": f"{top}static/icon.svg",
            "icon_dark_mode": f"{top}static/icon-dark.svg",
        }
        for place, query in _PLACES.items()
    ]


class DelayedPlugin(AirflowPlugin):
    """What Airflow loads, by the entry point and by the provider's metadata."""

    name = "delayed_deliveries"
    fastapi_apps = [{"app": LazyApp(), "url_prefix": f"/{ROUTE}", "name": NAME}]
    external_views = views()
