"""What Airflow asks of a provider: a literal, made without importing Airflow."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Return the provider's metadata (Airflow's ``provider_info.schema.json``)."""
    return {
        "package-name": "airflow-provider-delayed",
        "name": "Delayed delivery",
        "description": "Messages that arrive at their due time, through Amazon SQS, RabbitMQ or a SQL store.",
        "integrations": [
            {
                "integration-name": "Delayed delivery",
                "external-doc-url": "https://docs.particular.net/nservicebus/messaging/delayed-delivery",
                "tags": ["software"],
            }
        ],
        "operators": [
            {
                "integration-name": "Delayed delivery",
                "python-modules": [
                    "airflow_delayed.operators.send",
                    "airflow_delayed.operators.topology",
                    "airflow_delayed.operators.dispatch",
                ],
            }
        ],
        "sensors": [{"integration-name": "Delayed delivery", "python-modules": ["airflow_delayed.sensors.fifo_cycle"]}],
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
                    "airflow_delayed.triggers.rabbitmq_message",
                ],
            }
        ],
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
                        "description": "Encrypt, and verify the broker's certificate; the port is then 5671.",
                        "schema": {"type": ["boolean", "null"], "default": False},
                    },
                    "heartbeat": {
                        "label": "Heartbeat",
                        "description": "Seconds between heartbeats; empty: as the broker proposes.",
                        "schema": {"type": ["integer", "null"], "minimum": 0, "maximum": 65535},
                    },
                    "cacertfile": {
                        "label": "Authorities (file)",
                        "description": "PEM file of those that may have signed the broker's certificate; empty: the"
                        " system's.",
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
                        "description": "verify_peer (empty) or verify_none.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "server_name_indication": {
                        "label": "Name in the broker's certificate",
                        "description": "Empty: the host.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "auth_mechanism": {
                        "label": "Login by",
                        "description": "plain (empty): login and password; external: the client certificate.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "connection_timeout": {
                        "label": "Connection timeout",
                        "description": "Milliseconds to connect to a host; empty: 15000.",
                        "schema": {"type": ["integer", "null"], "minimum": 1},
                    },
                    "blocked_timeout": {
                        "label": "Blocked timeout",
                        "description": "Seconds to wait for a broker that is short of memory or disk; empty: 300.",
                        "schema": {"type": ["number", "null"], "exclusiveMinimum": 0},
                    },
                    "management_url": {
                        "label": "Management API",
                        "description": "http(s)://host:port; empty: 10,000 ports above AMQP's; none: do without.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "topology": {
                        "label": "Topology",
                        "description": "delayed (empty), nservicebus, nservicebus-v1, celery or celery-classic.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "routing": {
                        "label": "NServiceBus routing",
                        "description": "conventional (empty) or direct.",
                        "schema": {"type": ["string", "null"]},
                    },
                },
            }
        ],
    }
