"""The commands and their arguments. Airflow imports this at each start, so that a command imports its work later."""

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

_STORE_CONN_ID = Arg(("--store-conn-id",), help="The store's connection, of a SQL database", required=True)
_TABLE = Arg(("--table",), help="The store's table (default: delayed_messages)", default="delayed_messages")
_SCHEMA = Arg(("--schema",), help="The table's schema; by default the connection's own")
_IDS = Arg(("message_id",), help="The ids of messages, instead of a filter", nargs="*")
_LISTED_IDS = Arg(
    ("message_id",),
    help="The ids of messages, or their keys: the values of id_columns, such as order_id=1001",
    nargs="*",
)
_ID = Arg(("message_id",), help="The id of a message, or its key: the values of id_columns, such as order_id=1001")
_TAG = Arg(("--tag",), help="Only messages with this tag")
_DESTINATION = Arg(("--destination",), help="Only messages to this queue")
_DELIVER_CONN_ID = Arg(
    ("--deliver-conn-id",),
    help="Only messages that this connection delivers; the store's own for its queue tables",
)
_DUE_FROM = Arg(("--due-from",), help="Only what is due then or later: 2026-01-31T09:30:00+01:00")
_DUE_UNTIL = Arg(("--due-until",), help="Only what is due before then")
_STATE = Arg(
    ("--state",),
    help="Only messages in this state, also several: waiting, due, 'in flight', retrying, failed, expired",
    action="append",
)
_LISTED_STATE = Arg(
    ("--state",),
    help="Only messages in this state, also several: waiting, due, 'in flight', retrying, failed, expired; or those"
    " that have left the store, the last one first: dispatched, cancelled",
    action="append",
)
_ERASED_STATE = Arg(
    ("--state",),
    help="Only messages in this state, also several: waiting, due, 'in flight', retrying, failed, expired; or those"
    " whose cancel can still be taken back: cancelled",
    action="append",
)
_REJECTS = Arg(
    ("--rejects",), help="With --tag: a file of rejected rows on this machine; also several", action="append"
)
_RESTORED_STATE = Arg(
    ("--state",), help="All messages whose cancel can still be taken back", action="append", choices=("cancelled",)
)
_OVERDUE_OK = Arg(
    ("--overdue-ok",), help="Also messages that are due by now; they are dispatched at once", action="store_true"
)
_LIMIT = Arg(("--limit",), help="At most so many; 0: all (default: 100)", type=int, default=100)
_AFTER = Arg(("--after",), help="Go on where a list ended, with the token that it gave")
_OVERDUE = Arg(
    ("--overdue",), help="Due for longer than so many seconds counts as overdue (default: 60)", type=float, default=60
)
_HOURS = Arg(("--hours",), help="Count by hour for so many hours, 0 to 744 (default: 24)", type=int, default=24)
_BY_DESTINATION = Arg(("--by-destination",), help="Count by destination, which reads all rows", action="store_true")
_DUE_AT = Arg(("--due-at",), help="The new due time: 2026-01-31T09:30:00+01:00")
_DELAY = Arg(("--delay",), help="Due in so many seconds from now, or so long (PT10M, P1D), instead of --due-at")
_OLDER_THAN = Arg(("--older-than",), help="Only messages in that state for more days", type=float, required=True)
_REASON = Arg(
    ("--reason",),
    help="What to purge, may be given several times: failed, expired, remembered (default: all of them)",
    action="append",
    choices=("failed", "expired", "remembered"),
)
_ENVIRONMENT = Arg(("name",), help="The store's environment from now on", nargs="?")
_DRY_RUN = Arg(("--dry-run",), help="Change nothing, and report what would happen", action="store_true")

_EXAMINED = Arg(("--conn-id",), help="A connection to examine, of any kind; also several", action="append")
_VERIFIED = Arg(
    ("--destination",),
    help="A queue of the brokers that must be ready; with a store alone, its queue table; also several",
    action="append",
)
_OF_ID = Arg(("--message-id",), help="Only changes that name this id, which those by a filter do not")
_SINCE = Arg(("--since",), help="Only what began then or later: 2026-01-31T09:30:00+01:00")


def _policy(name: str, help_: str, default: str, **options: Any) -> Arg:
    """Return the argument for a parameter of StoreDispatchOperator; its default stays with the policy."""
    return Arg((f"--{name.replace('_', '-')}",), help=f"{help_} (default: {default})", **options)


_DELIVER_CONN_IDS = _policy(
    "deliver_conn_ids",
    "The connections that it may deliver through; the store's own for queue tables in its database",
    "[delayed] deliver_conn_ids",
    nargs="+",
)
_LOOKAHEAD = _policy(
    "lookahead",
    "Seconds before its due time at which a message is dispatched, fewer if its transport cannot delay it for so long;"
    " auto: through RabbitMQ when it is due, and [delayed] lookahead ahead at the end of the last dispatcher",
    "auto",
    type=lambda text: text if text == "auto" else float(text),
)
_BATCH_SIZE = _policy("batch_size", "Messages that are claimed at a time", "500", type=int)
_CONSISTENCY = _policy(
    "consistency",
    "exactly_once allows queue tables alone",
    "at_least_once",
    choices=("at_least_once", "exactly_once"),
)
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
    "remember", "Seconds for which ids of what was dispatched are remembered", "[delayed] remember", type=float
)
_CLAIM_TIMEOUT = _policy(
    "claim_timeout", "Seconds after which the claims of a dispatcher that was killed end", "30", type=float
)
_ALLOWED_DESTINATIONS = _policy(
    "allowed_destinations", "Names, or patterns with *, ? and [...]; others fail", "all", nargs="+"
)
_HOST = Arg(
    ("--host",),
    help="The address of /live, /ready and /metrics, of IPv4 or IPv6 (default: 127.0.0.1)",
    default="127.0.0.1",
)
_ONLY_TO = Arg(
    ("--destination",),
    help="Only messages to this queue, which is bound if it is not yet; also several",
    action="append",
)
_RATES = Arg(
    ("rate",),
    help="destination=messages a second, such as sms=50, or sms=none for no limit; without any, the rates are shown",
    nargs="*",
)
_PORT = Arg(("--port",), help="Their port; 0: any free one (default: 8787)", type=int, default=8787)
_PLAN = Arg(("--dry-run",), help="Look at the store and the connections, say what is due, and end", action="store_true")
_RABBITMQ = Arg(("--conn-id",), help="The connection of RabbitMQ", required=True)
_EXCHANGE = Arg(("--exchange",), help="The exchange to which the services publish", required=True)
_TARGET = Arg(("--target",), help="The exchange to which the consumers' queues are bound", required=True)
_TYPE = Arg(
    ("--type",), help="Of the services' exchange (default: topic)", choices=("topic", "fanout"), default="topic"
)
_INSTALL = Arg(("--install",), help="Make what is missing, and end; with --dry-run show it", action="store_true")
_REDRIVE = Arg(("--redrive",), help="Send on what is parked, once its cause is repaired, and end", action="store_true")
_CHECK = Arg(("--dry-run",), help="Change nothing; show what is there, missing or wrong, and end", action="store_true")
_BRIDGE = (_RABBITMQ, _EXCHANGE, _TARGET, _TYPE, _INSTALL, _REDRIVE, _CHECK)

_DAG_ID = Arg(("dag_id",), help="The DAG")
_KEY = Arg(("--key",), help="In place of the notifier's own key, which a run's params may make")
_INSTALLED = Arg(("--conn-id",), help="The connection: of a SQL database for a store, of RabbitMQ, or of AWS for SQS")
_QUEUE = Arg(
    ("--queue",), help="A destination to make if it is missing, in a store a queue table; also several", action="append"
)
_OWN_TABLE = Arg(("--table",), help="The name of a store's table (default: delayed_messages)")
_SQL = Arg(
    ("--sql",), help="Print a store's SQL for a database administrator; connect to no database", action="store_true"
)
_DIALECT = Arg(
    ("--dialect",),
    help="The database of --sql, if there is no connection, or one of type mysql",
    choices=("postgresql", "mysql", "mariadb", "sqlite"),
)

_DELIVERER = Arg(
    ("--conn-id",),
    help="The connection that delivers: of RabbitMQ, AWS, or a database with queue tables",
    required=True,
)
_WAITS_IN = Arg(
    ("--store-conn-id",), help="Let it wait in this store, whatever its delay is, so that a dispatcher delivers it"
)
_TO = Arg(("--destination",), help="The queue that receives it")
_VALUE = Arg(("--value",), help="The body (default: sent by hand)", default="sent by hand")
_SENT_DUE_AT = Arg(("--due-at",), help="When it is due: 2026-01-31T09:30:00+01:00")
_SENT_DELAY = Arg(("--delay",), help="Due in so many seconds, instead of --due-at (default: 0)", type=float)
_SENT_TAG = Arg(("--tag",), help="By which it is found in the store")
_HEADER = Arg(("--header",), help="A header, as NAME=VALUE; also several", action="append")
_SENT_ID = Arg(("--message-id",), help="Its id; by default a new one")
_WAIT = Arg(
    ("--wait",),
    help="Send it to a temporary queue, wait until it has arrived there, and remove that",
    action="store_true",
)
_TIMEOUT = Arg(
    ("--timeout",), help="With --wait: seconds from its due time until this fails (default: 60)", type=float, default=60
)
_SENDS_NOTHING = Arg(("--dry-run",), help="Check everything, and send nothing", action="store_true")

_STORE = (_STORE_CONN_ID, _TABLE, _SCHEMA)
_POLICY = (
    *(_LOOKAHEAD, _BATCH_SIZE, _CONSISTENCY, _NUMBER_OF_RETRIES, _ERROR_DESTINATION, _GIVE_UP_AFTER),
    *(_MAX_RATE, _REMEMBER, _CLAIM_TIMEOUT, _ALLOWED_DESTINATIONS),
)
_FILTER = (_TAG, _DESTINATION, _DELIVER_CONN_ID, _DUE_FROM, _DUE_UNTIL, _STATE)
_LISTED = (*_FILTER[:-1], _LISTED_STATE)
_SHOWN = (ARG_OUTPUT, ARG_VERBOSE)
_ASKED = (_DRY_RUN, ARG_YES, *_SHOWN)
_ACTOR = Arg(("--actor",), help="The person for whom you change it, for the audit beside the system's user")
_BECAUSE = Arg(("--because",), help="The reason, for the audit; 1000 characters at most")
_CHANGE = (_ACTOR, _BECAUSE, *_ASKED)
_SAFE = "Works beside dispatchers. By a filter, it reports how many messages match and asks, unless --yes is given."


def get_delayed_commands() -> list[CLICommand]:
    """Return the commands of the provider, for Airflow's parser."""
    return [
        GroupCommand(
            name="delayed",
            help="Messages that wait in a store; a dispatcher and a bridge that stay; why messages are late",
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
                    "For [delayed] cancel_grace, by default 10 minutes, a cancelled message is kept. " + _SAFE,
                ),
                _command(
                    "reschedule",
                    "Give messages that wait another due time",
                    (*_STORE, _IDS, _DUE_AT, _DELAY, *_FILTER, *_CHANGE),
                    _SAFE,
                ),
                _command("retry", "Let failed messages wait again", (*_STORE, _IDS, *_FILTER[:-1], *_CHANGE), _SAFE),
                _command(
                    "purge",
                    "Remove what failed or expired, forget what is remembered",
                    (*_STORE, _OLDER_THAN, _REASON, *_CHANGE),
                ),
                _command(
                    "erase",
                    "Remove messages and all that is known of them but the id; by a tag alone in other places too",
                    (*_STORE, _IDS, *_FILTER[:-1], _ERASED_STATE, _REJECTS, *_CHANGE),
                    "With --tag and no other filter it also erases what has left the store, the rows of queue tables in"
                    " the same schema, of --rejects files and of spools on this machine; ids beside it are of messages"
                    " whose tag the store knows no longer. It prints what remains, where and until when. " + _SAFE,
                    module="erase_command",
                ),
                _command(
                    "audit",
                    "Show the audit, newest first",
                    (*_STORE, _OF_ID, _SINCE, _LIMIT, _AFTER, *_SHOWN),
                ),
                _command("dispatchers", "Show the dispatchers", (*_STORE, *_SHOWN)),
                _command(
                    "dispatcher",
                    "Dispatch what is due until SIGTERM",
                    (*_STORE, _DELIVER_CONN_IDS, *_POLICY, _HOST, _PORT, _PLAN, *_SHOWN),
                    "Stays, and goes on when the database or a broker was away. Several may run side by side. SIGTERM"
                    " ends it within 5 seconds. Its parameters are those of StoreDispatchOperator.",
                ),
                _command(
                    "rates",
                    "Show or set the rates of destinations",
                    (*_STORE, _RATES, _ACTOR, _BECAUSE, *_SHOWN),
                    "A rate is how many messages a second all dispatchers of the store together send to a destination"
                    " at most. It is kept in the store; dispatchers at work follow it within 5 seconds.",
                ),
                _command(
                    "environment",
                    "Show or change the environment that a store is of",
                    (*_STORE, _ENVIRONMENT, ARG_YES, _ACTOR, _BECAUSE, *_SHOWN),
                    "A dispatcher whose [delayed] environment differs takes no message from it. Give a copy the name of"
                    " its own environment when what waits in it may be delivered from there. It counts what waits and"
                    " asks, unless --yes is given.",
                ),
                _command(
                    "arm",
                    "Let the message wait that a MissedRunNotifier has about a DAG's next run",
                    (_DAG_ID, _KEY, *_SHOWN),
                    "It is delivered unless a run ends well in time; each good end lets the next one wait. Run it once"
                    " for a new DAG, and after a message was cancelled or a schedule changed.",
                ),
                ActionCommand(
                    name="install",
                    help="Make a store's tables, RabbitMQ's delay levels or SQS queues; or print a store's SQL",
                    description="May run again: it makes what is missing, and reports what differs. With --sql it"
                    " prints the statements that a database administrator runs in its place.",
                    func=lazy_load_command("airflow_delayed.cli.topology_commands.install_"),
                    args=(_INSTALLED, _QUEUE, _OWN_TABLE, _SCHEMA, _DRY_RUN, _SQL, _DIALECT, *_SHOWN),
                ),
                ActionCommand(
                    name="send",
                    help="Send a message by hand; with --wait until it has arrived in a queue of its own",
                    description="Tries a chain of connections: the transport alone, or with --store-conn-id the store,"
                    " its dispatcher and the transport. The exit code is 1 if it cannot be sent or does not arrive."
                    " Ctrl-C ends --wait, takes the message back where that is possible, and removes the queue.",
                    func=lazy_load_command("airflow_delayed.cli.send_command.send_"),
                    args=(
                        *(
                            _DELIVERER,
                            _WAITS_IN,
                            _OWN_TABLE,
                            _SCHEMA,
                            _TO,
                            _VALUE,
                            _SENT_DELAY,
                            _SENT_DUE_AT,
                            _SENT_TAG,
                        ),
                        *(_HEADER, _SENT_ID, _WAIT, _TIMEOUT, _SENDS_NOTHING, *_SHOWN),
                    ),
                ),
                _command(
                    "upgrade",
                    "Bring a store's tables to this release's version",
                    (*_STORE, _DRY_RUN, *_SHOWN),
                    "Run it before the hosts get this release: those with the release before stay at work."
                    " Missing tables and indexes are made too.",
                ),
                ActionCommand(
                    name="doctor",
                    help="Examine connections: what keeps messages from arriving in time, and what to do",
                    description="Changes nothing. Errors come first; with one, the exit code is 1. Without --conn-id"
                    " it examines all connections that the section [delayed] of Airflow's configuration names.",
                    func=lazy_load_command("airflow_delayed.cli.doctor.doctor"),
                    args=(_EXAMINED, _VERIFIED, *_SHOWN),
                ),
                ActionCommand(
                    name="redrive",
                    help="Send RabbitMQ's unroutable messages again, to the destinations that exist by now",
                    description="Reports how many would be sent and asks, unless --yes is given. What cannot be sent"
                    " stays. Without --destination it needs the management API, which names the bound destinations.",
                    func=lazy_load_command("airflow_delayed.cli.topology_commands.redrive_"),
                    args=(_RABBITMQ, _ONLY_TO, *_ASKED),
                ),
                ActionCommand(
                    name="bridge",
                    help="Deliver what services publish to RabbitMQ with x-delay; stays until SIGTERM",
                    func=lazy_load_command("airflow_delayed.cli.topology_commands.bridge_"),
                    args=(*_BRIDGE, ARG_VERBOSE),
                    description="Takes the place of the plugin rabbitmq_delayed_message_exchange. Several may run.",
                ),
            ),
        )
    ]


def _command(
    name: str, help_: str, args: tuple[Arg, ...], description: str | None = None, module: str = "commands"
) -> ActionCommand:
    function = lazy_load_command(f"airflow_delayed.cli.{module}.{name}_")
    return ActionCommand(name=name, help=help_, func=function, args=args, description=description)
