"""What `pip install` brings: light imports, and metadata that Airflow accepts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points, metadata
from importlib.resources import files

import pytest

import airflow_delayed
from airflow_delayed.delivery import BUILT_IN
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
        "import airflow_delayed.provider_info",
        "import airflow_delayed.message, airflow_delayed.identity, airflow_delayed.delivery, airflow_delayed.sending",
        "import airflow_delayed.rabbitmq.levels, airflow_delayed.sqs.queues, airflow_delayed.sqs.hops",
    ],
)
def test_core_knows_neither_airflow_nor_a_client(statement):
    heavy = {"airflow", "pika", "boto3", "botocore", "sqlalchemy", "pyspark", "pyarrow", "fsspec"}
    assert loaded_by(statement) & heavy == set()


def test_a_store_can_be_filled_without_airflow():
    """As Spark's executors do."""
    modules = ("storing", "schema", "engine", "setup", "versions", "origin")
    assert "airflow" not in loaded_by("import " + ", ".join(f"airflow_delayed.store.{name}" for name in modules))


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


def test_every_module_that_the_metadata_names_is_there():
    for kind in ("operators", "sensors", "hooks", "triggers"):
        for group in INFO[kind]:
            for module in group["python-modules"]:
                import_module(module)


@pytest.mark.parametrize("target", sorted(set(BUILT_IN.values())))
def test_every_transport_offers_the_interface(target):
    module, _, name = target.partition(":")
    hook = getattr(import_module(module), name)
    for method in ("install", "verify", "check", "send", "close"):
        assert callable(getattr(hook, method)), method
    assert isinstance(hook.horizon, property)
