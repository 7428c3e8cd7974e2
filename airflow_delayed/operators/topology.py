"""TopologyInstallOperator: a task that makes the queues, exchanges or tables of a transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_delayed.compat import AirflowFailException
from airflow_delayed.delivery import TopologyReport, check_options, delivery_for, type_of
from airflow_delayed.errors import InputError, UnsupportedOption
from airflow_delayed.links import DeliveriesLink
from airflow_delayed.sources.templated import rendered_flag
from airflow_delayed.sqs.settings import QueueSettings, settings_of

if TYPE_CHECKING:
    from airflow.sdk import Context


class TopologyInstallOperator(BaseOperator):
    """Makes the queues, exchanges or tables that delayed messages need. It may run again at any time.

    Existing parts stay as they are; a part that differs from the plan is reported and fails the task. ``settings`` and
    ``repair`` are for SQS, those from ``topology`` on are for RabbitMQ; for another connection they are an error before
    anything is changed.

    What to make:

    :param conn_id: a connection of type ``aws``, ``rabbitmq`` or ``amqp``, or a SQL connection for a store.
    :param destinations: the queues that will receive messages; none for a store without queue tables.
    :param create_destinations: make missing destinations; without it a missing destination is an error.
    :param settings: the settings of each destination, as a QueueSettings or a dictionary of its fields: ``retention``,
        ``visibility_timeout``, ``receive_wait``, ``delay``, ``encryption``, ``dead_letter_queue``,
        ``max_receive_count``.
    :param topology: the delay levels: ``delayed``, ``nservicebus``, ``nservicebus-v1`` or ``celery``; by default the
        connection's.
    :param routing: NServiceBus's routing topology, ``conventional`` or ``direct``.
    :param unroutable_policy: on a topology that other programs declare too, set a policy that leads unroutable messages
        into a queue of this package. Needs the management API and the tag policymaker.

    What to change:

    :param repair: change settings that differ; the log describes the effect on messages that are there already.
    :param replace: delete and make again each part that differs, unless messages wait there.

    What to remove:

    :param uninstall: delete the topology instead of making it; destinations are neither needed nor deleted. Refused
        while messages wait.
    :param force: with ``uninstall``, delete waiting messages too.

    Safety:

    :param dry_run: change nothing, and log the plan; may be a template, such as ``"{{ params.dry_run }}"``. The log
        counts what would be made; ``airflow delayed install --dry-run`` lists each part. Among the rendered templates
        it is ``only_plan``, because each operator of Airflow has a method ``dry_run``.

    Result:

    :return: the number of parts in each state, such as ``{"ok": 1, "created": 2}``.
    :raises TopologyError: something differs, or a destination is missing.
    :raises MessagesWaiting: messages wait in a part that was to be deleted.
    """

    template_fields: Sequence[str] = ("conn_id", "destinations", "only_plan", "topology", "routing")
    template_fields_renderers: ClassVar[dict[str, str]] = {"destinations": "json"}
    operator_extra_links = (DeliveriesLink(),)
    ui_color = "#e8f1fb"

    def __init__(
        self,
        *,
        conn_id: str,
        destinations: Sequence[str] | str = (),
        create_destinations: bool = False,
        dry_run: bool | str = False,
        settings: QueueSettings | Mapping[str, Any] | None = None,
        repair: bool = False,
        topology: str | None = None,
        routing: str | None = None,
        replace: bool = False,
        unroutable_policy: bool = False,
        uninstall: bool = False,
        force: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if force and not uninstall:
            raise ValueError("force is for uninstall=True alone; what differs is changed by replace=True")
        makes = (create_destinations, replace, unroutable_policy, repair, settings is not None)
        if uninstall and any(makes):
            raise ValueError(
                "uninstall=True makes nothing; leave out create_destinations, replace, unroutable_policy, settings"
                " and repair"
            )
        self.conn_id = conn_id
        self.destinations = destinations
        self.create_destinations = create_destinations
        # BaseOperator has a method of the parameter's name
        self.only_plan = dry_run
        self.settings = None if settings is None else settings_of(settings)
        self.repair = repair
        self.topology = topology
        self.routing = routing
        self.replace = replace
        self.unroutable_policy = unroutable_policy
        self.uninstall = uninstall
        self.force = force

    def execute(self, context: Context) -> dict[str, int]:
        """Install or uninstall, or log the plan."""
        try:
            report = self._run(rendered_flag("dry_run", self.only_plan))
        except (InputError, ValueError) as error:
            raise AirflowFailException(str(error)) from error
        for finding in report.notable:
            log = self.log.info if finding.severity == "ok" else self.log.warning
            log("%s", finding)
        self.log.info("%s: %s", self.conn_id, report.headline)
        return report.counts()

    def _run(self, only_plan: bool) -> TopologyReport:
        conn_type = type_of(self.conn_id)
        # a template may render to an empty text
        delivery: Any = delivery_for(self.conn_id, topology=self.topology or None, routing=self.routing or None)
        try:
            if self.uninstall:
                if not hasattr(delivery, "uninstall"):
                    raise UnsupportedOption(self.conn_id, conn_type, ["uninstall"])
                removed: TopologyReport = delivery.uninstall(force=self.force, dry_run=only_plan)
                return removed
            names_of_options = ("settings", "repair", "replace", "unroutable_policy")
            options = {name: value for name in names_of_options if (value := getattr(self, name))}
            check_options(self.conn_id, conn_type, delivery.install, options)
            names = [self.destinations] if isinstance(self.destinations, str) else list(self.destinations)
            made: TopologyReport = delivery.install(
                names, create_destinations=self.create_destinations, dry_run=only_plan, **options
            )
            return made
        finally:
            delivery.close()
