"""A store in SQLite where workers may run on other machines is an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_delayed.errors import DelayedError
from airflow_delayed.hooks.store import DelayedStoreHook


@pytest.fixture
def install(connect, tmp_path: Path) -> Callable[[], object]:
    connect("db", conn_type="sqlite", host=str(tmp_path / "store.db"))

    def install() -> object:
        hook = DelayedStoreHook("db")
        try:
            return hook.install([]).counts()
        finally:
            hook.close()

    return install


@pytest.mark.parametrize(
    ("executor", "named"),
    [
        ("CeleryExecutor", "CeleryExecutor"),
        ("LocalExecutor,KubernetesExecutor", "KubernetesExecutor"),
        ("LocalExecutor;team1=CeleryExecutor", "team1=CeleryExecutor"),
        ("LocalExecutor,far:acme.executors.FarExecutor", "far:acme.executors.FarExecutor"),
    ],
)
def test_remote_workers_are_refused(install, executor, named, monkeypatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)
    wanted = rf"workers of {named} may run .*PostgreSQL or MySQL.*AIRFLOW__DELAYED__SQLITE_ON_SHARED_DISK"
    with pytest.raises(DelayedError, match=wanted):
        install()
    monkeypatch.setenv("AIRFLOW__DELAYED__SQLITE_ON_SHARED_DISK", "True")
    install()


def test_a_pod_knows_itself_whatever_its_configuration_says(install, monkeypatch) -> None:
    """As Airflow's Helm chart sets both."""
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "LocalExecutor")
    monkeypatch.setenv("AIRFLOW_IS_K8S_EXECUTOR_POD", "True")
    with pytest.raises(DelayedError, match="workers of KubernetesExecutor"):
        install()


@pytest.mark.parametrize("executor", ["LocalExecutor", "airflow.executors.local_executor.LocalExecutor"])
def test_local_workers_share_the_file(install, executor, monkeypatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)
    install()
