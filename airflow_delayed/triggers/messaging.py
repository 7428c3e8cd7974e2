"""The schemes ``delayed+rabbitmq`` and ``delayed+sql`` of common.messaging's MessageQueueTrigger.

``MessageQueueTrigger(scheme="delayed+sql", conn_id="orders_db", queue_name="orders")`` is
``QueueTableTrigger("orders_db", "orders")``, with all its other parameters. The queue is ``queue_name`` there, because
MessageQueueTrigger has a parameter ``queue`` of its own, the deprecated address of a queue, which overrides the scheme.

Airflow lists these classes under ``queues`` in our metadata, and imports them where common.messaging is used; so they
import the triggers, and what those need, only when a trigger of their scheme is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.exceptions import AirflowOptionalProviderFeatureException

if TYPE_CHECKING:
    from airflow.triggers.base import BaseEventTrigger

    from airflow_delayed.triggers.message_stream import MessageStreamTrigger

try:
    from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider
except ModuleNotFoundError as error:
    raise AirflowOptionalProviderFeatureException(
        "the schemes delayed+rabbitmq and delayed+sql need apache-airflow-providers-common-messaging 1.0.1 or later"
    ) from error


class _SchemeAlone(BaseMessageQueueProvider):
    """Matches its scheme and no address: addresses are deprecated, and each belongs to another provider."""

    def queue_matches(self, queue: str) -> bool:
        """Return that no address is ours."""
        return False

    def trigger_kwargs(self, queue: str, **kwargs: Any) -> dict[str, Any]:
        """Return no arguments: there is no address that has any."""
        return {}


def _named(trigger: type[MessageStreamTrigger[Any]]) -> type[BaseEventTrigger]:
    """Return a trigger's class that takes ``queue_name`` for the queue, and is kept as that trigger."""
    from airflow_delayed.triggers.base import class_path

    class NamedQueueTrigger(trigger):  # type: ignore[misc, valid-type]
        def __init__(self, *, queue_name: str, **options: Any) -> None:
            super().__init__(queue=queue_name, **options)

        def serialize(self) -> tuple[str, dict[str, Any]]:
            return class_path(trigger), super().serialize()[1]

    return NamedQueueTrigger


class RabbitMQQueueProvider(_SchemeAlone):
    """``delayed+rabbitmq``: :class:`airflow_delayed.triggers.rabbitmq_message.RabbitMQMessageTrigger`."""

    scheme = "delayed+rabbitmq"

    def trigger_class(self) -> type[BaseEventTrigger]:
        """Return the trigger, with ``queue_name`` for the queue."""
        from airflow_delayed.triggers.rabbitmq_message import RabbitMQMessageTrigger

        return _named(RabbitMQMessageTrigger)


class SqlQueueProvider(_SchemeAlone):
    """``delayed+sql``: :class:`airflow_delayed.triggers.queue_table.QueueTableTrigger`."""

    scheme = "delayed+sql"

    def trigger_class(self) -> type[BaseEventTrigger]:
        """Return the trigger, with ``queue_name`` for the queue."""
        from airflow_delayed.triggers.queue_table import QueueTableTrigger

        return _named(QueueTableTrigger)
