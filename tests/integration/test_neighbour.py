"""Beside apache-airflow-provider-rabbitmq, which has a connection type ``rabbitmq`` too, whichever comes first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import airflow_delayed
from airflow_delayed.provider_info import get_provider_info

OURS = str(Path(airflow_delayed.__file__).parents[1])
#: Where .ci/setup puts it.
THEIRS = str(Path(sys.prefix) / "neighbour")
ASKED = """
import json
from airflow.providers_manager import ProvidersManager
from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime
from airflow_delayed.delivery import delivery_for

manager = ProvidersManager()
# by Airflow's own manager, as its UI makes the form
names = [name for name in manager.connection_form_widgets if name.startswith("extra__rabbitmq__")]
said = {
    "providers": sorted(name for name in manager.providers if "rabbitmq" in name or "delayed" in name),
    "hook": ProvidersManagerTaskRuntime().hooks["rabbitmq"].hook_class_name,
    "fields": sorted(name.removeprefix("extra__rabbitmq__") for name in names),
    "label": manager.field_behaviours["rabbitmq"]["relabeling"]["schema"],
    "transports": [type(delivery_for(name)).__name__ for name in ("by_rabbitmq", "by_amqp")],
}
print("\\n" + json.dumps(said))
"""


def test_the_type_is_ours_whichever_was_installed_first(connect) -> None:
    assert Path(THEIRS).is_dir(), "run `make setup`, which installs it there"
    connect("by_rabbitmq", "rabbitmq://localhost")
    connect("by_amqp", "amqp://localhost")
    both = []
    for path in ((OURS, THEIRS), (THEIRS, OURS)):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        both.append(subprocess.Popen([sys.executable, "-c", ASKED], env=env, stdout=subprocess.PIPE, text=True))
    (kind,) = get_provider_info()["connection-types"]
    for each in both:
        said, _ = each.communicate()
        # Airflow looks at providers by their names, so the order in which they were installed is all the same
        assert json.loads(said.splitlines()[-1]) == {
            "providers": ["airflow-provider-delayed", "apache-airflow-provider-rabbitmq"],
            "hook": kind["hook-class-name"],
            "fields": sorted(kind["conn-fields"]),
            "label": "Virtual host",
            "transports": ["RabbitMQDelayHook", "RabbitMQDelayHook"],
        }
