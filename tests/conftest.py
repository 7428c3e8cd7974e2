"""Servers for the tests, started when a test first asks for one; an Airflow home of the test run's own."""

from __future__ import annotations

import fcntl
import gc
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

# Airflow reads its home when it is first imported
_HOME = tempfile.TemporaryDirectory(prefix="airflow-delayed-")
os.environ.update(
    AIRFLOW_HOME=_HOME.name,
    AIRFLOW__CORE__DAGS_FOLDER=_HOME.name + "/dags",
    AIRFLOW__CORE__LOAD_EXAMPLES="False",
    AIRFLOW__CORE__UNIT_TEST_MODE="False",
    AIRFLOW__LOGGING__LOGGING_LEVEL="INFO",
)
Path(_HOME.name, "dags").mkdir()

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from support import cpu, lengths, scopes, servers  # noqa: E402
from support.cpu import pytest_runtest_protocol  # noqa: E402, F401
from support.fresh import fresh_fixture  # noqa: E402, F401
from support.send_runs import log_fixture, run_fixture  # noqa: E402, F401

# a slow machine is no failure, and a short run need not be lucky
settings.register_profile("long", deadline=None, max_examples=100)
settings.register_profile("short", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("long" if lengths.LONG else "short")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the controller of a run of several processes; its workers are configured on their own."""
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(servers.Controller())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> scopes.Scopes:
    return scopes.Scopes(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of a short run what only a long one plays, and begin with what takes longest."""
    # who chooses by marks has chosen
    everything = lengths.LONG or config.option.markexpr
    left_out = [] if everything else [item for item in items if lengths.is_long(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    scopes.order(items)


def pytest_collection_finish() -> None:
    """Take what has been imported out of the garbage collector, which would look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Have a worker tell its controller what its tests cost, how long they were, and what they measured."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["cpu"] = cpu.SECONDS
        output["lengths"] = lengths.LENGTHS
        output["tables"] = lengths.TABLES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    cpu.SECONDS.update(output.get("cpu", {}))
    lengths.LENGTHS.update(output.get("lengths", {}))
    lengths.TABLES.update(output.get("tables", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end what cost most, and of a long run how long it was."""
    terminalreporter.section("most CPU, with what was set up for it; the servers of the run are not counted")
    terminalreporter.write("\n".join([*cpu.lines(), ""]))
    if lengths.LONG:
        terminalreporter.section("what ran at its full length")
        for what, chosen in sorted(lengths.LENGTHS.items()):
            terminalreporter.line(f"{what}: {chosen}")
        for title, lines in lengths.TABLES.items():
            terminalreporter.section(title)
            terminalreporter.write("\n".join([*lines, ""]))


@pytest.fixture(scope="session")
def rabbitmq_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """amqp:// URL of a RabbitMQ: that of RABBITMQ_URL, or a private one."""
    with servers.url_of("rabbitmq", pytestconfig) as url:
        yield url


@pytest.fixture(scope="session")
def postgres_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """postgresql:// URL of a database that may be filled: that of POSTGRES_URL, or a private one."""
    with servers.url_of("postgres", pytestconfig) as url:
        yield url


@pytest.fixture(scope="session")
def mariadb_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """mysql:// URL of a database; its user may make more. That of MARIADB_URL, or a private one."""
    with servers.url_of("mariadb", pytestconfig) as url:
        yield url


@pytest.fixture(scope="session")
def sqs_endpoint(pytestconfig: pytest.Config) -> Iterator[str]:
    """http:// endpoint of an SQS: that of SQS_ENDPOINT, or a private ministack."""
    with servers.url_of("sqs", pytestconfig) as url:
        yield url


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch):
    """Define an Airflow connection for one test: connect("name", conn_type=..., host=..., extra={...}) or a URI."""
    import json

    def define(conn_id: str, uri: str | None = None, **fields: object) -> str:
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", uri or json.dumps(fields))
        return conn_id

    return define


@pytest.fixture
def spools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user's spools, in the test's own."""
    monkeypatch.setenv("AIRFLOW__DELAYED__SPOOL_FOLDER", str(tmp_path / "spools"))
    return tmp_path / "spools" / f"airflow-delayed-spool-{os.getuid()}"


@pytest.fixture
def here() -> Path:
    """The top of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def airflow_db(pytestconfig: pytest.Config) -> None:
    """Airflow's own database, for tests that run a DAG; the workers of a run make it once, and copy it."""
    mine = Path(_HOME.name, "airflow.db")
    if (folder := servers.shared_folder(pytestconfig)) is None:
        _make_airflow_db()
        return
    made = folder / "airflow.db"
    with (folder / "airflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _make_airflow_db()
            _copy_database(mine, made)
            return
    # an empty file may be there already: Airflow makes it when it looks for something
    _copy_database(made, mine)


def _copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as found, closing(sqlite3.connect(target)) as copy:
        found.backup(copy)


def _make_airflow_db() -> None:
    # in this process, which has Airflow imported
    from airflow.utils.db import initdb

    initdb()


@pytest.fixture
def run_dag(airflow_db: None):
    """Run a DAG that a test has made, in this process, and return its run."""

    def run(dag, **arguments):
        from airflow.dag_processing.bundles.manager import DagBundlesManager
        from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db

        bag = DagBag(os.devnull)
        bag.bag_dag(dag)
        DagBundlesManager().sync_bundles_to_db()
        sync_bag_to_db(bag, "dags-folder", None)
        return dag.test(**arguments)

    return run
