"""docs/start, docs/deploy and docs/compared.md: links, YAML, commands, and the figures of the code and of Airflow."""

from __future__ import annotations

import re
import shlex
from datetime import timedelta
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import yaml
from airflow.cli import cli_parser
from airflow.configuration import conf
from airflow.sdk import DAG
from support import pages

from airflow_delayed import __version__, config
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.triggers.store_dispatch import StoreDispatchTrigger
from airflow_delayed.ui import hook_pool

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted([*DOCS.glob("start/*.md"), *DOCS.glob("deploy/*.md"), DOCS / "compared.md", DOCS / "dotnet.md"])
INSTALL, KUBERNETES, CELERY, SCHEDULERS = (
    DOCS / name for name in ("start/install.md", "deploy/kubernetes.md", "deploy/celery.md", "deploy/schedulers.md")
)


def documents(page: Path) -> list[Any]:
    return [yaml.safe_load(text) for language, text in pages.blocks(page) if language == "yaml"]


def default(section: str, option: str) -> str:
    return str(conf.get_default_value(section, option))


def test_the_defaults_of_concepts_and_glossary() -> None:
    assert config.hold_over() == config.lookahead() == timedelta(minutes=15)
    policy = DispatchPolicy()
    assert (policy.claim_timeout, policy.remember) == (timedelta(seconds=30), timedelta(days=14))
    assert policy.time_to_trigger_dispatch_circuit_breaker == timedelta(seconds=30)


def test_the_extras_are_those_of_the_package() -> None:
    table = INSTALL.read_text().partition("| extra |")[2].partition("\n\n")[0]
    named = {extra for row in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE) for extra in re.findall(r"`(\w+)`", row)}
    assert named == set(metadata("airflow-provider-delayed").get_all("Provides-Extra") or ())
    asked = re.findall(r"\[([a-z,]+)\](?=['\"=>])", INSTALL.read_text())
    assert len(asked) == 5
    assert {extra for extras in asked for extra in extras.split(",")} <= named


def test_the_files_of_the_platforms_name_this_release() -> None:
    text = INSTALL.read_text()
    assert set(re.findall(r"airflow_provider_delayed-([\d.]+)-py3", text)) == {__version__}
    assert set(re.findall(r"airflow-provider-delayed\[[a-z,]+\][=>]=([\d.]+)$", text, re.MULTILINE)) == {__version__}
    assert text.count("**Untested: ") == 5


def test_the_dispatcher_of_docker_compose() -> None:
    compose, values = documents(INSTALL)
    service = compose["services"]["delayed-dispatcher"]
    # what the service has of the file's common part
    assert service["build"] == "."
    args = cli_parser.get_parser().parse_args(shlex.split(service["command"]))
    assert f"AIRFLOW_CONN_{args.store_conn_id.upper()}" in service["environment"]
    assert service["healthcheck"]["test"][-1] == f"http://localhost:{args.port}/ready"
    assert service["environment"]["AIRFLOW__DELAYED__PAGE_STORES"] == args.store_conn_id
    # a string that the chart makes into YAML
    assert yaml.safe_load(values["extraEnvFrom"]) == [{"secretRef": {"name": "delayed-connections"}}]
    assert values["images"]["airflow"]["tag"] == f"{values['airflowVersion']}-{__version__}"
    assert f"FROM apache/airflow:{values['airflowVersion']}\n" in INSTALL.read_text()


def test_the_budget_is_for_the_pods_of_the_deployment() -> None:
    budget, _, resources = documents(KUBERNETES)
    (deployment,) = documents(DOCS / "store/dispatchers.md")
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    assert resources["resources"].keys() == {"requests", "limits"}


def test_the_deployment_has_the_image_and_the_secret_of_the_chart() -> None:
    _, values = documents(INSTALL)
    (deployment,) = documents(DOCS / "store/dispatchers.md")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    image = values["images"]["airflow"]
    assert container["image"] == f"{image['repository']}:{image['tag']}"
    assert container["envFrom"] == yaml.safe_load(values["extraEnvFrom"])


def test_the_mapping_in_the_chart_is_the_file_s() -> None:
    (chart,) = (one for one in documents(KUBERNETES) if "statsd" in one)
    mapping = yaml.safe_load((DOCS / "operations/monitoring/statsd-mapping.yml").read_text())
    assert [one for one in chart["statsd"]["extraMappings"] if one not in mapping["mappings"]] == []


def test_the_dag_for_celery() -> None:
    names: dict[str, Any] = {}
    ((_, code),) = pages.blocks(CELERY)
    exec(compile(code, CELERY.name, "exec"), names)
    dag: DAG = names["dag"]
    (task,) = dag.tasks
    assert f"--queues {task.queue}`" in CELERY.read_text()
    assert task.execution_timeout + task.retry_delay < task.lookahead


def test_the_commands_in_sentences_are_commands() -> None:
    found = [one for page in PAGES for one in re.findall(r"`airflow (delayed [^`.]*--[^`.]+)`", page.read_text())]
    assert len(found) == 4
    for command in found:
        assert cli_parser.get_parser().parse_args(shlex.split(command))


def test_the_figures_of_airflow_are_those_of_the_installed_one() -> None:
    seconds = default("scheduler", "task_instance_heartbeat_timeout")
    assert f"Airflow notices after {seconds} seconds" in CELERY.read_text()
    seconds = default("triggerer", "triggerer_health_check_threshold")
    assert f"`[triggerer] triggerer_health_check_threshold`, {float(seconds):g} seconds" in SCHEDULERS.read_text()
    assert f"takes {int(default('triggerer', 'capacity')):,} triggers" in SCHEDULERS.read_text()


def test_the_figures_of_this_package() -> None:
    assert f"at most {hook_pool.CALLS} for each store and API server process" in SCHEDULERS.read_text()
    assert f"within {StoreDispatchTrigger.grace:g} seconds" in KUBERNETES.read_text()
    assert "SQS takes no message more than 870 seconds ahead" in KUBERNETES.read_text()
