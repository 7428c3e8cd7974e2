"""TopologyInstallOperator: make what a transport needs, as a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_delayed.delivery import State, delivery_for
from airflow_delayed.errors import InputError

if TYPE_CHECKING:
    from airflow.sdk import Context

_GOOD = (State.OK, State.CREATED, State.PLANNED, State.REPAIRED, State.WOULD_REPAIR)


class TopologyInstallOperator(BaseOperator):
    """Make the queues, exchanges or tables that delayed messages need. It may be run again at any time.

    What is there already stays as it is; what differs from what is needed is reported and fails the task.

    :param conn_id: a connection of type ``aws``, ``rabbitmq`` or ``amqp``, or a SQL connection for a store.
    :param destinations: the queues that will receive messages; none for a store that only holds them.
    :param create_destinations: make destinations that do not exist; without it they are an error.
    :param dry_run: make nothing, and log the plan.
    :return: how many parts were found in which state, such as ``{"ok": 1, "created": 2}``.
    :raises TopologyError: something differs, or a destination is missing.
    """

    template_fields: Sequence[str] = ("conn_id", "destinations")
    ui_color = "#e8f1fb"

    def __init__(
        self,
        *,
        conn_id: str,
        destinations: Sequence[str] | str = (),
        create_destinations: bool = False,
        dry_run: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.conn_id = conn_id
        self.destinations = destinations
        self.create_destinations = create_destinations
        # BaseOperator has a method of the parameter's name
        self.only_plan = dry_run

    def execute(self, context: Context) -> dict[str, int]:
        """Install, or tell the plan."""
        names = [self.destinations] if isinstance(self.destinations, str) else list(self.destinations)
        delivery = delivery_for(self.conn_id)
        try:
            report = delivery.install(names, create_destinations=self.create_destinations, dry_run=self.only_plan)
        except InputError as error:
            raise AirflowFailException(str(error)) from error
        finally:
            delivery.close()
        for finding in report:
            log = self.log.info if finding.state in _GOOD else self.log.warning
            log("%s", finding)
        counts = report.counts()
        self.log.info(
            "%s: %s", self.conn_id, ", ".join(f"{count} {state}" for state, count in counts.items()) or "nothing"
        )
        return counts
