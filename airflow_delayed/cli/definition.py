"""The commands and their arguments. Airflow imports this at each start, so that a command imports its work later.

No text may have a word in square brackets: Airflow's help takes it for a style, and leaves it out.
"""

from __future__ import annotations

from typing import Any

from airflow.cli.cli_config import (
    ARG_OUTPUT,
    ARG_VERBOSE,
    ARG_YES,
    ActionCommand,
    Arg,
    CLICommand,
    GroupCommand,
    lazy_load_command,
)


def _arg(name: str, help_: str, **options: Any) -> Arg:
    return Arg((name,), help=help_, **options)


def _switch(name: str, help_: str) -> Arg:
    return _arg(name, help_, action="store_true")


def _several(name: str, help_: str, **options: Any) -> Arg:
    return _arg(name, help_, action="append", **options)


_STORE_CONN_ID = _arg("--store-conn-id", "The store's connection, of a SQL database", required=True)
_TABLE = _arg("--table", "The store's table (default: delayed_messages)", default="delayed_messages")
_SCHEMA = _arg("--schema", "The table's schema; by default the connection's own")
_IDS = _arg("message_id", "The ids of messages, instead of a filter", nargs="*")
_LISTED_IDS = _arg(
    "message_id", "The ids of messages, or their keys: the values of id_columns, such as order_id=1001", nargs="*"
)
_ID = _arg("message_id", "The id of a message, or its key: the values of id_columns, such as order_id=1001")
_TAG = _arg("--tag", "Only messages with this tag")
_DESTINATION = _arg("--destination", "Only messages to this queue")
_DELIVER_CONN_ID = _arg(
    "--deliver-conn-id",
    "Only messages that this connection delivers; the store's own for its queue tables",
)
_DUE_FROM = _arg("--due-from", "Only what is due then or later: 2026-01-31T09:30:00+01:00")
_DUE_UNTIL = _arg("--due-until", "Only what is due before then")
_IN_STATE = "Only messages in this state, also several: waiting, due, 'in flight', retrying, failed, expired"
_STATE = _several("--state", _IN_STATE)
_LISTED_STATE = _several(
    "--state", f"{_IN_STATE}; or messages that have left the store, the last one first: dispatched, cancelled"
)
_ERASED_STATE = _several("--state", f"{_IN_STATE}; or those whose cancel can still be taken back: cancelled")
_RESTORED_STATE = _several("--state", "All messages whose cancel can still be taken back: cancelled")
_OVERDUE_OK = _switch("--overdue-ok", "Also messages that are due by now; they are dispatched at once")
_LIMIT = _arg("--limit", "At most so many; 0: all (default: 100)", type=int, default=100)
_AFTER = _arg("--after", "Go on where a list ended, with the token that it gave")
_OVERDUE = _arg(
    "--overdue", "Due for longer than so many seconds counts as overdue (default: 10)", type=float, default=10
)
_HOURS = _arg("--hours", "Count by hour for so many hours, 0 to 744 (default: 24)", type=int, default=24)
_BY_DESTINATION = _switch("--by-destination", "Count by destination, which reads all rows")
_DUE_AT = _arg("--due-at", "The new due time: 2026-01-31T09:30:00+01:00")
_DELAY = _arg("--delay", "Due in so many seconds from now, or so long (PT10M, P1D), instead of --due-at")
_DRY_RUN = _switch("--dry-run", "Change nothing, and report what would happen")

_EXAMINED = _several("--conn-id", "A connection to examine, of any kind; also several")
_VERIFIED = _several(
    "--destination", "A queue of the brokers that must be ready; with a store alone, its queue table; also several"
)


def _policy(name: str, help_: str, default: str, **options: Any) -> Arg:
    """Return the argument for a parameter of StoreDispatchOperator; its default stays with the policy."""
    return Arg((f"--{name.replace('_', '-')}",), help=f"{help_} (default: {default})", **options)


_DELIVER_CONN_IDS = _policy(
    "deliver_conn_ids",
    "The connections that it may deliver through; the store's own for queue tables in its database",
    "option deliver_conn_ids of section delayed",
    nargs="+",
)
_LOOKAHEAD = _policy(
    "lookahead",
    "Seconds before its due time at which a message is dispatched, fewer if its transport cannot delay it for so long;"
    " auto: through RabbitMQ when it is due, else by option lookahead ahead",
    "auto",
    type=lambda text: text if text == "auto" else float(text),
)
_BATCH_SIZE = _policy("batch_size", "Messages that are claimed at a time", "500", type=int)
_NUMBER_OF_RETRIES = _policy("number_of_retries", "Retries of a message that its transport refuses", "7", type=int)
_ERROR_DESTINATION = _policy(
    "error_destination", "Receives messages after their last try", "none, but the table of failed messages"
)
_GIVE_UP_AFTER = _policy(
    "give_up_after",
    "Seconds for which the store or a delivering connection may fail, until the connection's dispatcher begins again",
    "30",
    type=float,
)
_MAX_RATE = _policy("max_rate", "Messages a second at most, of all connections together", "no limit", type=float)
_REMEMBER = _policy(
    "remember",
    "Seconds for which ids of what was dispatched are remembered",
    "option remember of section delayed",
    type=float,
)
_CLAIM_TIMEOUT = _policy(
    "claim_timeout", "Seconds after which the claims of a dispatcher that was killed end", "30", type=float
)
_ALLOWED_DESTINATIONS = _policy(
    "allowed_destinations", "Names, or patterns with *, ? and [...]; others fail", "all", nargs="+"
)
_HOST = _arg("--host", "The address of /live and /ready, of IPv4 or IPv6 (default: 127.0.0.1)", default="127.0.0.1")
_ONLY_TO = _several("--destination", "Only messages to this queue, which is bound if it is not yet; also several")
_PORT = _arg("--port", "Their port; 0: any free one (default: 8787)", type=int, default=8787)
_PLAN = _switch("--dry-run", "Look at the store and the connections, say what is due, and end")
_RABBITMQ = _arg("--conn-id", "The connection of RabbitMQ", required=True)

_OF_DAG = _arg("--dag-id", "Only messages that this DAG stored")
_OF_RUN = _arg("--run-id", "Only messages that this run of it stored")
_END = _switch("--end", "End the pause; what fell due meanwhile is sent at once")
_INSTALLED = _arg("--conn-id", "The connection: of a SQL database for a store, of RabbitMQ, or of AWS for SQS")
_QUEUE = _several("--queue", "A destination to make if it is missing, in a store a queue table; also several")
_OWN_TABLE = _arg("--table", "The name of a store's table (default: delayed_messages)")
_SQL = _switch("--sql", "Print a store's SQL for a database administrator; connect to no database")
_DIALECT = _arg(
    "--dialect",
    "The database of --sql, if there is no connection, or one of type mysql",
    choices=("postgresql", "mysql", "mariadb", "sqlite"),
)

_STORE = (_STORE_CONN_ID, _TABLE, _SCHEMA)
_POLICY = (
    *(_LOOKAHEAD, _BATCH_SIZE, _NUMBER_OF_RETRIES, _ERROR_DESTINATION, _GIVE_UP_AFTER),
    *(_MAX_RATE, _REMEMBER, _CLAIM_TIMEOUT, _ALLOWED_DESTINATIONS),
)
_FILTER = (_TAG, _DESTINATION, _DELIVER_CONN_ID, _OF_DAG, _OF_RUN, _DUE_FROM, _DUE_UNTIL, _STATE)
_LISTED = (*_FILTER[:-1], _LISTED_STATE)
_SHOWN = (ARG_OUTPUT, ARG_VERBOSE)
_ASKED = (_DRY_RUN, ARG_YES, *_SHOWN)
_ACTOR = _arg("--actor", "The person for whom you change it, for the audit beside the system's user")
_BECAUSE = _arg("--because", "The reason, for the audit; 1000 characters at most")
_CHANGE = (_ACTOR, _BECAUSE, *_ASKED)
_SAFE = "Works beside dispatchers. By a filter, it reports how many messages match and asks, unless --yes is given."


def get_delayed_commands() -> list[CLICommand]:
    """Return the commands of the provider, for Airflow's parser."""
    return [
        GroupCommand(
            name="delayed",
            help="Messages that wait in a store; a dispatcher that stays; why messages are late",
            subcommands=(
                _command(
                    "list", "List messages by due time", (*_STORE, _LISTED_IDS, *_LISTED, _LIMIT, _AFTER, *_SHOWN)
                ),
                _command("get", "Show a message", (*_STORE, _ID, *_SHOWN)),
                _command(
                    "counts",
                    "Count messages by state",
                    (*_STORE, _TAG, _DESTINATION, _DELIVER_CONN_ID, _OVERDUE, _HOURS, _BY_DESTINATION, *_SHOWN),
                ),
                _command("cancel", "Cancel messages, failed ones too", (*_STORE, _IDS, *_FILTER, *_CHANGE), _SAFE),
                _command(
                    "restore",
                    "Take cancels back",
                    (*_STORE, _IDS, _OVERDUE_OK, *_FILTER[:-1], _RESTORED_STATE, *_CHANGE),
                    "A cancelled message is kept for option cancel_grace of section delayed, by default a day. "
                    + _SAFE,
                ),
                _command(
                    "reschedule",
                    "Give messages that wait another due time",
                    (*_STORE, _IDS, _DUE_AT, _DELAY, *_FILTER, *_CHANGE),
                    _SAFE,
                ),
                _command("retry", "Let failed messages wait again", (*_STORE, _IDS, *_FILTER[:-1], *_CHANGE), _SAFE),
                _command(
                    "erase",
                    "Remove messages and all that the store knows of them but the id",
                    (*_STORE, _IDS, *_FILTER[:-1], _ERASED_STATE, *_CHANGE),
                    "With --tag and no other filter it also erases what is remembered of messages that have left the"
                    " store. It prints what it does not reach: rejects files, queue tables, brokers, spools, backups. "
                    + _SAFE,
                ),
                _command(
                    "pause",
                    "Let no dispatcher take messages to a destination, or for a connection; or end that",
                    (*_STORE, _DESTINATION, _DELIVER_CONN_ID, _END, *_CHANGE),
                    "Each dispatcher obeys within 2 seconds. It prints what a broker has already, which nobody can"
                    " stop. Without a selection it shows what is paused. It asks, unless --yes is given.",
                ),
                _command(
                    "dispatcher",
                    "Dispatch what is due until SIGTERM",
                    (*_STORE, _DELIVER_CONN_IDS, *_POLICY, _HOST, _PORT, _PLAN, *_SHOWN),
                    "Stays, and goes on when the database or a broker was away. Several may run side by side. SIGTERM"
                    " ends it within 5 seconds. Its parameters are those of StoreDispatchOperator.",
                ),
                _command(
                    "install",
                    "Make a store's tables, RabbitMQ's delay levels or SQS queues; or print a store's SQL",
                    (_INSTALLED, _QUEUE, _OWN_TABLE, _SCHEMA, _DRY_RUN, _SQL, _DIALECT, *_SHOWN),
                    "May run again: it makes what is missing, and reports what differs. With --sql it"
                    " prints the statements that a database administrator runs in its place.",
                    module="topology_commands",
                ),
                _command(
                    "uninstall",
                    "Delete RabbitMQ's delay levels, and no destination",
                    (_RABBITMQ, *_ASKED),
                    "Stop the senders first. Refused while messages wait in the levels. Reports how many parts would be"
                    " deleted and asks, unless --yes is given.",
                    module="topology_commands",
                ),
                _command(
                    "doctor",
                    "Examine connections: what keeps messages from arriving in time, and what to do",
                    (_EXAMINED, _VERIFIED, *_SHOWN),
                    "Changes nothing. Names the dispatchers at work of each store. Errors come first; with one, the"
                    " exit code is 1. Without --conn-id"
                    " it examines all connections that section delayed of Airflow's configuration names.",
                    module="doctor",
                ),
                _command(
                    "redrive",
                    "Send RabbitMQ's unroutable messages again, to the destinations that exist by now",
                    (_RABBITMQ, _ONLY_TO, *_ASKED),
                    "Reports how many would be sent and asks, unless --yes is given. What cannot be sent"
                    " stays. Without --destination it needs the management API, which names the bound destinations.",
                    module="topology_commands",
                ),
            ),
        )
    ]


def _command(
    name: str, help_: str, args: tuple[Arg, ...], description: str | None = None, module: str = "commands"
) -> ActionCommand:
    function = lazy_load_command(f"airflow_delayed.cli.{module}.{name.replace('-', '_')}_")
    return ActionCommand(name=name, help=help_, func=function, args=args, description=description)
