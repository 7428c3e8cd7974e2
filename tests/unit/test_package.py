"""What `pip install` brings: light imports, and metadata that Airflow accepts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points, metadata
from importlib.resources import files
from inspect import isabstract
from pkgutil import walk_packages
from typing import get_origin

import pytest
from airflow.plugins_manager import AirflowPlugin
from airflow.sdk import BaseHook, BaseNotifier, BaseOperator, BaseOperatorLink, BaseSensorOperator
from airflow.triggers.base import BaseTrigger

import airflow_delayed
from airflow_delayed.provider_info import get_provider_info

INFO = get_provider_info()


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import airflow_delayed",
        "import airflow_delayed.provider_info; airflow_delayed.provider_info.get_provider_info()",
        "import airflow_delayed.config, airflow_delayed.lineage",
        "import airflow_delayed.message, airflow_delayed.identity, airflow_delayed.delivery, airflow_delayed.sending",
        "import airflow_delayed.rabbitmq.levels, airflow_delayed.sqs.queues, airflow_delayed.sqs.hops",
    ],
)
def test_core_knows_neither_airflow_nor_a_client(statement):
    heavy = {"airflow", "pika", "boto3", "botocore", "sqlalchemy", "pyspark", "pyarrow", "fsspec"}
    assert loaded_by(statement) & heavy == set()


def test_what_airflow_imports_when_it_starts_loads_no_client(fresh):
    loaded = set(fresh["imported at Airflow's start"])
    assert loaded & {"pika", "boto3", "botocore", "pyspark", "pyarrow"} == set()


def test_a_store_can_be_filled_without_airflow():
    """As Spark's executors do."""
    modules = ("api", "enqueue", "schema", "engine", "setup", "dialects")
    assert "airflow" not in loaded_by("import " + ", ".join(f"airflow_delayed.store.{name}" for name in modules))


def test_sending_without_a_store_needs_no_sqlalchemy_2():
    """Airflow 3.1's constraints have SQLAlchemy 1.4."""
    code = (
        "import sys, airflow_delayed.operators.send; print(*(name for name in sys.modules if '_delayed.store' in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"airflow_delayed.store", "airflow_delayed.store.policy"}


def test_metadata_fits_airflows_schema():
    import jsonschema

    schema = json.loads(files("airflow").joinpath("provider_info.schema.json").read_text())
    jsonschema.validate(INFO, schema)
    (entry,) = (entry for entry in entry_points(group="apache_airflow_provider") if "airflow_delayed" in entry.value)
    assert entry.load()() == INFO
    assert INFO["package-name"] == metadata("airflow-provider-delayed")["Name"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", airflow_delayed.__version__)


def test_airflow_finds_the_provider_and_its_connection_type():
    from airflow.providers_manager import ProvidersManager
    from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

    assert ProvidersManager().providers["airflow-provider-delayed"].version == airflow_delayed.__version__
    assert (
        ProvidersManagerTaskRuntime().hooks["rabbitmq"].hook_class_name
        == "airflow_delayed.hooks.rabbitmq.RabbitMQDelayHook"
    )


def named(kind: str) -> set[str]:
    return {module for group in INFO[kind] for module in group["python-modules"]}


def classes(base: type, *packages: str) -> set[str]:
    """The classes of that kind in these packages or modules, by their paths."""
    modules = []
    for name in packages:
        modules.append(import_module(f"airflow_delayed.{name}"))
        inside = getattr(modules[-1], "__path__", ())
        modules += [import_module(found.name) for found in walk_packages(inside, f"airflow_delayed.{name}.")]
    return {
        f"{found.__module__}.{found.__name__}"
        for module in modules
        for found in vars(module).values()
        # on Python 3.10 list[str] is a type too
        if isinstance(found, type)
        and get_origin(found) is None
        and issubclass(found, base)
        and found.__module__ == module.__name__
        # a base of several is none itself
        and not isabstract(found)
    }


def test_the_metadata_names_every_module_that_has_an_operator_sensor_hook_or_trigger_and_no_other():
    sensors = classes(BaseSensorOperator, "operators", "sensors")
    found = {
        "operators": classes(BaseOperator, "operators", "sensors") - sensors,
        "sensors": sensors,
        "hooks": classes(BaseHook, "hooks"),
        "triggers": classes(BaseTrigger, "triggers"),
    }
    for kind, paths in found.items():
        assert named(kind) == {path.rpartition(".")[0] for path in paths}, kind


def test_the_metadata_names_every_link_notifier_plugin_and_command():
    assert set(INFO["extra-links"]) == classes(BaseOperatorLink, "links", "operators", "sensors", "ui")
    assert set(INFO["notifications"]) == classes(BaseNotifier, "notifications")
    assert {one["plugin-class"] for one in INFO.get("plugins", ())} == classes(AirflowPlugin, "ui")
    (path,) = INFO["cli"]
    commands = getattr(import_module(path.rpartition(".")[0]), path.rpartition(".")[2])()
    assert [command.name for command in commands] == ["delayed"]


def test_airflow_knows_the_links_and_the_configuration():
    from airflow.providers_manager import ProvidersManager

    manager = ProvidersManager()
    assert set(INFO["extra-links"]) <= set(manager.extra_links_class_names)
    assert dict(manager.provider_configs)["airflow-provider-delayed"] == INFO["config"]
    for hook in (kind["hook-class-name"] for kind in INFO["connection-types"]):
        assert hook in classes(BaseHook, "hooks")
