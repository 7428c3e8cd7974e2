"""The commands and their arguments. Airflow imports this each time it starts: what does the work is imported later."""

from __future__ import annotations

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

_CONN_ID = Arg(("--conn-id",), help="The store's connection, of a SQL database", required=True)
_TABLE = Arg(("--table",), help="The store's table (default: delayed_messages)", default="delayed_messages")
_SCHEMA = Arg(("--schema",), help="The table's schema; by default the connection's own")
_IDS = Arg(("message_id",), help="The ids of messages, instead of a filter", nargs="*")
_ID = Arg(("message_id",), help="The id of a message")
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
    help="Only what stands so, may be given several times: waiting, due, 'in flight', retrying, failed, expired",
    action="append",
)
_LIMIT = Arg(("--limit",), help="At most so many; 0: all (default: 100)", type=int, default=100)
_AFTER = Arg(("--after",), help="Go on where a list ended, with the token that it gave")
_OVERDUE = Arg(
    ("--overdue",), help="Due for longer than so many seconds counts as overdue (default: 60)", type=float, default=60
)
_HOURS = Arg(("--hours",), help="Count by hour for so many hours, 0 to 744 (default: 24)", type=int, default=24)
_BY_DESTINATION = Arg(("--by-destination",), help="Count by destination, which reads all rows", action="store_true")
_DUE_AT = Arg(("--due-at",), help="The new due time: 2026-01-31T09:30:00+01:00")
_DELAY = Arg(("--delay",), help="Due in so many seconds from now, instead of --due-at", type=float)
_OLDER_THAN = Arg(("--older-than",), help="What is so for longer than so many days", type=float, required=True)
_REASON = Arg(
    ("--reason",),
    help="What to purge, may be given several times: failed, expired, remembered (default: all of them)",
    action="append",
    choices=("failed", "expired", "remembered"),
)
_DRY_RUN = Arg(("--dry-run",), help="Change nothing, and tell what would happen", action="store_true")

_OF_ID = Arg(("--message-id",), help="Only changes that name this id, which those by a filter do not")
_SINCE = Arg(("--since",), help="Only what began then or later: 2026-01-31T09:30:00+01:00")

_STORE = (_CONN_ID, _TABLE, _SCHEMA)
_FILTER = (_TAG, _DESTINATION, _DELIVER_CONN_ID, _DUE_FROM, _DUE_UNTIL, _STATE)
_SHOWN = (ARG_OUTPUT, ARG_VERBOSE)
_CHANGE = (_DRY_RUN, ARG_YES, *_SHOWN)
_SAFE = "Works beside dispatchers. By a filter, it tells how many messages are meant and asks, unless --yes is given."


def get_delayed_commands() -> list[CLICommand]:
    """Return the commands of the provider, for Airflow's parser."""
    return [
        GroupCommand(
            name="delayed",
            help="See and change messages that wait in a store",
            subcommands=(
                _command("list", "List messages by due time", (*_STORE, _IDS, *_FILTER, _LIMIT, _AFTER, *_SHOWN)),
                _command("get", "Tell what is known of a message", (*_STORE, _ID, *_SHOWN)),
                _command(
                    "counts",
                    "Count messages by how they stand",
                    (*_STORE, _TAG, _DESTINATION, _DELIVER_CONN_ID, _OVERDUE, _HOURS, _BY_DESTINATION, *_SHOWN),
                ),
                _command("cancel", "Cancel messages, failed ones too", (*_STORE, _IDS, *_FILTER, *_CHANGE), _SAFE),
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
                    "Remove messages and all that is known of them but the id",
                    (*_STORE, _IDS, *_FILTER, *_CHANGE),
                    _SAFE,
                ),
                _command(
                    "audit",
                    "Tell who changed what, the newest first",
                    (*_STORE, _OF_ID, _SINCE, _LIMIT, _AFTER, *_SHOWN),
                ),
                _command("dispatchers", "Tell who dispatches, and who did lately", (*_STORE, *_SHOWN)),
            ),
        )
    ]


def _command(name: str, help_: str, args: tuple[Arg, ...], description: str | None = None) -> ActionCommand:
    function = lazy_load_command(f"airflow_delayed.cli.commands.{name}_")
    return ActionCommand(name=name, help=help_, func=function, args=args, description=description)
