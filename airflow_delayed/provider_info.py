"""The metadata that Airflow asks of a provider, made without importing Airflow.

It has the options of the section ``[delayed]`` with their defaults, which :mod:`airflow_delayed.config` reads.
"""

from __future__ import annotations

from typing import Any

#: Seconds: the defaults of options that code without Airflow has too, which reads no configuration.
HOLD_OVER, LOOKAHEAD, REMEMBER, CANCEL_GRACE, MAX_PAST = 900, 900, 14 * 86_400, 86_400, 3600


def _one_of(default: str, *others: str) -> dict[str, Any]:
    """Return the schema of a field with a choice; not to choose is to take the default."""
    return {
        "type": ["string", "null"],
        "enum": [None, default, *others],
        "values_display": {"null": f"{default} (default)"},
    }


def _option(description: str, kind: str, *, default: str, example: str) -> dict[str, Any]:
    return {
        "description": description,
        "version_added": "0.1.0",
        "type": kind,
        "example": example,
        "default": default,
    }


def get_provider_info() -> dict[str, Any]:
    """Return the provider's metadata (Airflow's ``provider_info.schema.json``)."""
    return {
        "package-name": "airflow-provider-delayed",
        "name": "Delayed delivery",
        "description": "Messages that arrive at their due time, through Amazon SQS, RabbitMQ or a SQL store.",
        "integrations": [
            {
                "integration-name": "Delayed delivery",
                "tags": ["software"],
            }
        ],
        "operators": [
            {
                "integration-name": "Delayed delivery",
                "python-modules": [
                    "airflow_delayed.operators.send",
                    "airflow_delayed.operators.change",
                    "airflow_delayed.operators.topology",
                    "airflow_delayed.operators.dispatch",
                    "airflow_delayed.operators.custom_dispatch",
                    "airflow_delayed.operators.spark",
                ],
            }
        ],
        "task-decorators": [
            {"name": "delayed_send", "class-name": "airflow_delayed.decorators.delayed_send.delayed_send_task"}
        ],
        "sensors": [
            {
                "integration-name": "Delayed delivery",
                "python-modules": [
                    "airflow_delayed.sensors.due_time",
                    "airflow_delayed.sensors.fifo_cycle",
                ],
            }
        ],
        "hooks": [
            {
                "integration-name": "Delayed delivery",
                "python-modules": [
                    "airflow_delayed.hooks.rabbitmq",
                    "airflow_delayed.hooks.sqs",
                    "airflow_delayed.hooks.store",
                ],
            }
        ],
        "triggers": [
            {
                "integration-name": "Delayed delivery",
                "python-modules": [
                    "airflow_delayed.triggers.due_time",
                    "airflow_delayed.triggers.fifo_cycle",
                    "airflow_delayed.triggers.store_dispatch",
                ],
            }
        ],
        "notifications": [
            "airflow_delayed.notifications.notifiers.DelayedNotifier",
            "airflow_delayed.notifications.notifiers.DelayedCancelNotifier",
        ],
        "plugins": [{"name": "delayed_deliveries", "plugin-class": "airflow_delayed.ui.plugin.DelayedPlugin"}],
        "extra-links": ["airflow_delayed.links.StoredMessagesLink", "airflow_delayed.links.DeliveriesLink"],
        "cli": ["airflow_delayed.cli.definition.get_delayed_commands"],
        "config": {
            "delayed": {
                "description": "What holds for all delayed deliveries of an installation unless a task says otherwise,"
                " and what the page of delayed deliveries shows.",
                "options": {
                    "hold_over": _option(
                        "What is due later than this many seconds from now waits in a store, where a send has one."
                        " At least the time between two dispatches and a worker's start.",
                        "float",
                        default=str(HOLD_OVER),
                        example="600",
                    ),
                    "lookahead": _option(
                        "How many seconds before its due time a message is dispatched by a dispatcher that does not"
                        " stay. At least the time between two dispatches and a worker's start. RabbitMQ gets a message"
                        " from a dispatcher that stays when it is due.",
                        "float",
                        default=str(LOOKAHEAD),
                        example="600",
                    ),
                    "remember": _option(
                        "For how many seconds a dispatcher remembers the ids of what was dispatched or cancelled, so"
                        " that a late retry neither repeats nor revives. By default 14 days.",
                        "float",
                        default=str(REMEMBER),
                        example="2592000",
                    ),
                    "cancel_grace": _option(
                        "For how many seconds a cancelled message is kept, so that the cancel can be taken back. 0: it"
                        " is removed at once.",
                        "float",
                        default=str(CANCEL_GRACE),
                        example="3600",
                    ),
                    "max_past": _option(
                        "How many seconds before its first try began a send may find messages due without asking its"
                        " past_due=.",
                        "float",
                        default=str(MAX_PAST),
                        example="300",
                    ),
                    "max_messages_per_run": _option(
                        "How many messages one DelayedSendOperator may send in a run. With more it fails before the"
                        " first is sent, so that a wrong query does not reach every customer. 0 is no limit.",
                        "integer",
                        default="0",
                        example="10000000",
                    ),
                    "spool_folder": _option(
                        "The folder on a worker where rows of a query or of a function are spooled, until all of them"
                        " are sent. Empty: the folder for temporary files.",
                        "string",
                        default="",
                        example="/var/spool/airflow",
                    ),
                    "deliver_conn_ids": _option(
                        "The connections that a StoreDispatchOperator delivers through if it names none, with commas in"
                        " between. Whoever may write into a store can have messages sent through these.",
                        "string",
                        default="",
                        example="aws_default,rabbitmq_default",
                    ),
                    "sqlite_on_shared_disk": _option(
                        "Whether all of Airflow's processes see the file of a store in SQLite, although the executor's"
                        " workers may run on several machines. Without it such a store is an error.",
                        "boolean",
                        default="False",
                        example="True",
                    ),
                    "page_stores": _option(
                        "The SQL connections whose stores the page of delayed deliveries shows, with commas between.",
                        "string",
                        default="",
                        example="reminders_db",
                    ),
                    "page_rabbitmq": _option(
                        "The RabbitMQ connections that the page shows, with commas in between.",
                        "string",
                        default="",
                        example="rabbitmq_default",
                    ),
                    "page_sqs": _option(
                        "The SQS queues that the page shows, each as conn_id:queue, with commas in between. A queue is"
                        " named as messages name it as their destination.",
                        "string",
                        default="",
                        example="aws_default:reminders,aws_default:invoices",
                    ),
                    "viewers": _option(
                        "Who sees figures, lists and the chart of a connection on the page: those who may read the"
                        " connection (connections), or all who may see the pages of plugins (plugins).",
                        "string",
                        default="connections",
                        example="plugins",
                    ),
                    "page_body_limit": _option(
                        "How many bytes of a message's body the page shows to those who may see it; 0 shows none.",
                        "integer",
                        default="16384",
                        example="0",
                    ),
                },
            }
        },
        # SQS uses amazon's own type "aws", and the store the SQL connections that are there
        "connection-types": [
            {
                "connection-type": "rabbitmq",
                "hook-class-name": "airflow_delayed.hooks.rabbitmq.RabbitMQDelayHook",
                "hook-name": "RabbitMQ (delayed delivery)",
                "ui-field-behaviour": {
                    "relabeling": {"schema": "Virtual host"},
                    "placeholders": {"host": "rabbit1,rabbit2:5673", "port": "5672", "schema": "/"},
                },
                "conn-fields": {
                    "ssl": {
                        "label": "TLS",
                        "description": "Encrypt, and verify the broker's certificate; the port is 5671 then.",
                        "schema": {"type": ["boolean", "null"], "default": False},
                    },
                    "heartbeat": {
                        "label": "Heartbeat",
                        "description": "Seconds between heartbeats; empty: as the broker proposes.",
                        "schema": {"type": ["integer", "null"], "minimum": 0, "maximum": 65535},
                    },
                    "cacertfile": {
                        "label": "Authorities (file)",
                        "description": "PEM file of the authorities that may have signed the broker's certificate;"
                        " empty: the system's.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "certfile": {
                        "label": "Client certificate (file)",
                        "description": "PEM file, if the broker demands one.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "keyfile": {
                        "label": "Client key (file)",
                        "description": "PEM file without a passphrase; empty: it is in the certificate's file.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "verify": {
                        "label": "Verify the broker",
                        "description": "verify_none trusts whoever answers.",
                        "schema": _one_of("verify_peer", "verify_none"),
                    },
                    "server_name_indication": {
                        "label": "Name in the broker's certificate",
                        "description": "Empty: the host.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "auth_mechanism": {
                        "label": "Login by",
                        "description": "plain: login and password; external: the client certificate.",
                        "schema": _one_of("plain", "external"),
                    },
                    "connection_timeout": {
                        "label": "Connection timeout",
                        "description": "Milliseconds to log in at a host; empty: 15000, of several hosts 5000.",
                        "schema": {"type": ["integer", "null"], "minimum": 1},
                    },
                    "blocked_timeout": {
                        "label": "Blocked timeout",
                        "description": "Seconds to wait for a broker that is short of memory or disk; empty: 300.",
                        "schema": {"type": ["number", "null"], "exclusiveMinimum": 0},
                    },
                    "confirm_timeout": {
                        "label": "Confirm timeout",
                        "description": "Seconds that a send may be without a confirm of the broker; empty: 60.",
                        "schema": {"type": ["number", "null"], "exclusiveMinimum": 0},
                    },
                    "management_url": {
                        "label": "Management API",
                        "description": "http(s)://host:port; empty: 10,000 ports above AMQP's; none: do without.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "topology": {
                        "label": "Topology",
                        "description": "Whose delay levels are used: our own, or levels that others share with us.",
                        "schema": _one_of("delayed", "nservicebus", "nservicebus-v1", "celery"),
                    },
                    "routing": {
                        "label": "NServiceBus routing",
                        "description": "How NServiceBus's endpoints are addressed.",
                        "schema": _one_of("conventional", "direct"),
                    },
                },
            }
        ],
    }
