"""The environment of a store: dispatchers of another one refuse a restored copy until it is bound to them."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from airflow.cli import cli_parser
from sqlalchemy import create_engine, event, text
from support.stores import Transport, message

from airflow_delayed.errors import DelayedError, WrongEnvironment
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.triggers.store_dispatch import StoreDispatchTrigger

PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)
OPTION = "AIRFLOW__DELAYED__ENVIRONMENT"


class Databases:
    """Databases of one PostgreSQL, each with a connection of its name."""

    def __init__(self, url: str, connect: Callable[[str, str], str]) -> None:
        self._url, self._connect = url, connect
        self._engine = create_engine(
            url.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT"
        )
        self.names: list[str] = []

    def make(self, conn_id: str, template: str | None = None) -> str:
        """Make a database, or a copy of one, and return its name."""
        name = f"{conn_id}_{uuid4().hex[:8]}"
        self._run(f'CREATE DATABASE "{name}"' + (f' TEMPLATE "{template}"' if template else ""))
        self.names.append(name)
        self._connect(conn_id, urlsplit(self._url)._replace(path=f"/{name}").geturl())
        return name

    def close(self) -> None:
        for name in self.names:
            self._run(f'DROP DATABASE "{name}" WITH (FORCE)')
        self._engine.dispose()

    def _run(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.execute(text(statement))


@pytest.fixture
def databases(postgres_url: str, connect) -> Iterator[Databases]:
    made = Databases(postgres_url, connect)
    yield made
    made.close()


@pytest.fixture
def hooks() -> Iterator[Callable[..., DelayedStoreHook]]:
    made: list[DelayedStoreHook] = []

    def make(conn_id: str) -> DelayedStoreHook:
        made.append(DelayedStoreHook(conn_id, "broker"))
        return made[-1]

    yield make
    for hook in made:
        hook.close()


def dispatch(hook: DelayedStoreHook) -> list[str]:
    """Dispatch what is due, and return its ids."""
    transport = Transport()
    hook.dispatcher(["broker"], lambda conn_id, clock: transport, lookahead=timedelta(0)).run()
    return transport.ids


def test_a_restored_copy_is_refused_until_it_is_bound(
    databases: Databases, hooks, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv(OPTION, "production")
    original = databases.make("original")
    hook = hooks("original")
    hook.install([])
    assert hook.environment() == "production"
    hook.send(message(f"m{number}", PAST) for number in range(3))
    hook.close()
    databases.make("copy", template=original)

    monkeypatch.setenv(OPTION, "staging")
    copy = hooks("copy")
    # an install of the copy's own DAG
    assert copy.install([]).ok
    command = "airflow delayed environment --store-conn-id copy staging"
    refused = rf"of environment 'production', and \[delayed\] environment is 'staging' here.*cancel.*{command}"
    for until in (None, "empty", timedelta(minutes=1)):
        operator = StoreDispatchOperator(
            task_id="d", store_conn_id="copy", deliver_conn_ids="broker", until=until, deferrable=False
        )
        with pytest.raises(WrongEnvironment, match=refused):
            operator.execute({})
    with pytest.raises(WrongEnvironment, match=refused):
        dispatch(copy)
    deferred = StoreDispatchTrigger(store_conn_id="copy", deliver_conn_ids=["broker"], until="empty").work()
    assert (deferred["status"], "environment 'production'" in deferred["error"]) == ("unavailable", True)
    (finding,) = (one for one in copy.verify([]).problems if one.code == "environment")
    assert (finding.severity, f"bind it to 'staging': {command}. If it is" in finding.remedy) == ("error", True)
    assert ([one.state for one in copy.list()], copy.dispatchers()) == (["due"] * 3, [])

    def delayed(*arguments: str, answer: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        args = cli_parser.get_parser().parse_args(
            ["delayed", "environment", "--store-conn-id", "copy", *arguments, "-o", "plain"]
        )
        args.func(args)
        done = capsys.readouterr()
        return done.out + done.err

    with pytest.raises(SystemExit, match="Nothing was changed"):
        delayed("staging", answer="n\n")
    assert "3 messages" in capsys.readouterr().err
    assert "production" in delayed()
    assert "staging" in delayed("staging", "--because", "restored for a test", answer="y\n")
    (entry,) = copy.audit()
    assert (entry.action, entry.selection, entry.because) == (
        "environment",
        {"environment": "staging", "former": "production"},
        "restored for a test",
    )
    assert dispatch(copy) == ["m0", "m1", "m2"]
    # the original knows nothing of it
    monkeypatch.setenv(OPTION, "production")
    assert dispatch(hooks("original")) == ["m0", "m1", "m2"]


def test_a_store_that_was_there_before_the_option_has_to_be_named(
    databases: Databases, hooks, monkeypatch: pytest.MonkeyPatch
):
    """Which one it is a copy of, nobody knows: neither an install nor a dispatcher names it."""
    databases.make("unnamed")
    hook = hooks("unnamed")
    hook.install([])
    hook.send([message("m", PAST)])
    monkeypatch.setenv(OPTION, "production")
    hook.install([])
    with pytest.raises(
        WrongEnvironment, match=r"has no name.*airflow delayed environment --store-conn-id unnamed prod"
    ):
        dispatch(hook)
    hook.set_environment("production", actor="op")
    assert dispatch(hook) == ["m"]


def test_without_the_option_nothing_is_compared(databases: Databases, hooks, monkeypatch: pytest.MonkeyPatch):
    databases.make("named")
    hook = hooks("named")
    hook.install([])
    assert (hook.environment(), [one.code for one in hook.health()]) == (None, [])
    hook.set_environment("production", actor="op")
    statements: list[str] = []
    event.listen(hook.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    hook.send([message("m", PAST)])
    assert dispatch(hook) == ["m"]
    assert [one for one in statements if "_version" in one] == []
    (finding,) = hook.health()
    assert (finding.code, finding.severity) == ("environment", "warning")
    # nobody is led to start a dispatcher on a host without a name before it is known whose store this is
    hook.send([message("late", PAST)])
    (finding,) = hook.health()
    assert (finding.code, finding.severity) == ("environment", "error")
    assert "1 overdue" in finding.what
    assert "airflow delayed dispatcher" not in str(finding.remedy)
    for wrong in ("", "x" * 251):
        with pytest.raises(ValueError, match="1 to 250 characters"):
            hook.set_environment(wrong)
    monkeypatch.setenv(OPTION, "x" * 251)
    with pytest.raises(DelayedError, match="environment"):
        dispatch(hook)
