"""``airflow delayed install``: as TopologyInstallOperator does; or the SQL of a store, for a database administrator."""

from __future__ import annotations

import os
from argparse import Namespace
from contextlib import closing
from shlex import quote

from airflow.utils.cli import suppress_logs_and_warning

from airflow_delayed.cli.commands import show
from airflow_delayed.delivery import TopologyReport, delivery_for
from airflow_delayed.errors import DelayedError, NotAStore
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.api import install_script


@suppress_logs_and_warning
def install_(args: Namespace) -> None:
    """``airflow delayed install``: print what is there and what was made; exit code 1 if something differs."""
    from airflow_delayed.compat import AirflowException

    # as Airflow's own commands: connections are those of its database too
    os.environ.setdefault("_AIRFLOW_PROCESS_CONTEXT", "server")
    try:
        if args.sql:
            print(_script(args), end="")
            return
        if args.dialect:
            raise DelayedError("--dialect is for --sql alone")
        report = _install(args)
    except (DelayedError, ValueError, AirflowException) as error:
        raise SystemExit(str(error)) from None
    rows = [{"where": finding.where, "what": str(finding).removeprefix(f"{finding.where}: ")} for finding in report]
    show(rows, args.output)
    if not report.ok:
        raise SystemExit(1)


def _install(args: Namespace) -> TopologyReport:
    if not args.conn_id:
        raise DelayedError("--conn-id is missing: name the connection of the store or the broker")
    with closing(delivery_for(args.conn_id, table=args.table, schema=args.schema)) as delivery:
        return delivery.install(args.queue or [], create_destinations=True, dry_run=args.dry_run)


def _script(args: Namespace) -> str:
    names = {"table": args.table} if args.table else {}
    return install_script(args.dialect or _dialect(args.conn_id), args.queue or [], schema=args.schema, **names)


def _dialect(conn_id: str | None) -> str:
    """Return SQLAlchemy's name of a connection's database, by the connection's type alone.

    :raises DelayedError: the type does not name one database, or the connection is a broker's.
    """
    if not conn_id:
        raise DelayedError("--sql needs the connection of the store, or --dialect")
    try:
        name = DelayedStoreHook(conn_id).database()
    except NotAStore:
        raise DelayedError(
            f"connection {conn_id!r} is a broker's, which has no SQL. This shows what an install makes there: airflow"
            f" delayed install --conn-id {quote(conn_id)} --queue ... --dry-run. A user who may make it runs the same"
            " without --dry-run"
        ) from None
    if name == "mysql":
        raise DelayedError(
            f"connection {conn_id!r} is of type mysql, which serves MySQL and MariaDB, and their SQL differs: add"
            " --dialect mysql or --dialect mariadb"
        )
    return name
