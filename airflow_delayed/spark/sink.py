"""``df.write.format("delayed")``: executors send a DataFrame's rows, each to arrive at its own due time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from airflow_delayed.errors import InputError
from airflow_delayed.message import utcnow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from airflow_delayed.spark.attempts import Lost
    from airflow_delayed.spark.counts import Counts
    from airflow_delayed.spark.options import Settings
    from airflow_delayed.spark.places import Place


class DelayedDataSource(DataSource):
    """Sends rows as delayed messages.

    ``df.write.format("delayed").mode("append").option("deliver", "broker").save()``. Columns are those that
    DelayedSendOperator's sources have: ``value`` (or ``body``), ``destination``, ``due_at`` or ``delay_seconds``,
    ``headers``, ``message_id``, ``tag``, ``expires_at``. What is wrong with columns or options is an AnalysisException
    before the first task; what is wrong with a row fails its task, when others may have been sent.

    Options hold names and sizes, for Spark shows them; where connections come from, see
    :func:`airflow_delayed.spark.connections.find`.

    - ``deliver``: the name of the connection that delivers (rabbitmq, amqp, amqps, aws, or a SQL connection whose
      database has the destination as a queue table). ``store``: the name of a SQL connection, in whose store waits what
      is due later than ``hold_over`` seconds from now (900). ``on_conflict``: ``error``, ``keep`` or ``replace``.
    - ``destination``, ``due_at`` or ``delay`` (seconds), ``headers`` (a JSON object), ``tag``, ``expires_at``: for rows
      without the column or with a null in it. ``timezone``: of times without an offset.
    - ``id_columns``: columns, separated by commas, whose values name a message. Without, and without a column
      ``message_id``, the id is a hash of all that the message says, and of ``scope`` (text, or a JSON list as
      DelayedSendOperator's: DAG, run, task, map index).
    - ``origin``: the run of a task that what is stored comes from, by which it is found there: a JSON object of
      ``dag_id``, ``run_id``, ``task_id`` and, of a mapped task, ``map_index``; in a task loop ``iteration``.
      DelayedSparkSendOperator gives it.
    - ``anchor``: what relative delays count from; by default the present in the driver, made once. Give it, with
      ``scope``, so that a driver that is started again means the same messages. ``unknown`` refuses relative delays.
    - ``past_due``: ``fail``, ``send`` or ``skip`` rows due more than ``max_past`` seconds (3600) before ``began``,
      which is the anchor by default.
    - ``unknown_columns``: ``fail`` or ``ignore``.
    - ``topology``, ``routing``: RabbitMQ's; ``envelope``: SQS's; in place of what the connection says.
    - ``batch_rows``: messages given to the transport at a time (5000); ``window``: RabbitMQ's unconfirmed messages
      (1000); ``connections``: how many tasks of an executor may send at a time, by default all that it runs.
    - ``connections_file``: a JSON file of connections by name on every machine, or the bare name of one that
      spark-submit distributes (``--files``).
    - ``attempts``: a folder that executors and the driver share, in which attempts note what they have sent, so that
      what failed ones sent is counted. ``manifest``: a file that gets the counts when all is sent.
    - ``dry_run``: ``true`` reads and checks all rows and sends nothing.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "delayed"

    def writer(self, schema: StructType, overwrite: bool) -> DelayedWriter:
        """Check columns and options.

        :raises InputError: one of them is wrong.
        """
        from airflow_delayed.spark.columns import check_columns
        from airflow_delayed.spark.connections import ConnectionNotFound
        from airflow_delayed.spark.options import settings_of
        from airflow_delayed.spark.transports import route_of

        if overwrite:
            raise InputError("what was sent cannot be overwritten; use mode('append')")
        settings = settings_of(self.options, utcnow())
        check_columns(schema, settings.wanted, naive_ok=settings.rules.zone is not None)
        # nothing is connected; what the options and the connections' types do not allow is told now. The driver need
        # not know what the executors know
        with suppress(ConnectionNotFound):
            route_of(settings, clock=utcnow).close()
        return DelayedWriter(settings)


@dataclass
class Sent(WriterCommitMessage):
    """What a successful attempt sent.

    :param name: of the attempt, unlike that of any other.
    :param earlier: how many attempts at this partition came before.
    """

    name: str
    earlier: int
    counts: Counts


class DelayedWriter(DataSourceArrowWriter):
    """Sends in the executors, and tells in the driver what became of it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        #: Keeps apart what jobs note in one folder.
        self._job = uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send a partition."""
        from pyspark import TaskContext

        from airflow_delayed.spark.attempts import Attempt, Silent
        from airflow_delayed.spark.log import logger
        from airflow_delayed.spark.partition import PartitionSend, place_of
        from airflow_delayed.spark.slots import slot
        from airflow_delayed.spark.transports import route_of

        settings = self._settings
        context = TaskContext.get()
        assert context is not None
        partition, earlier = context.partitionId(), context.attemptNumber()
        name = f"{partition:06}-{context.taskAttemptId()}"
        attempt = Attempt(self._folder(), name) if settings.attempts else Silent()
        with ExitStack() as stack:
            route = None
            if not settings.dry_run:
                stack.enter_context(slot(settings.connections))
                route = route_of(settings, clock=utcnow)
                stack.callback(route.close)
                stack.enter_context(route.delivery.kept_open())
            sending = PartitionSend(
                settings,
                route,
                place=place_of(partition, earlier),
                clock=utcnow,
                log=logger(),
                going=attempt.going,
            )
            try:
                counts = sending.run(iterator)
            except BaseException:
                attempt.failed(sending.counts)
                raise
        return Sent(name, earlier, counts)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Tell what was sent, and write the manifest."""
        from airflow_delayed.spark import told
        from airflow_delayed.spark.log import logger

        done = _sent(messages)
        lost = self._lost(done)
        counts = [(one.earlier, one.counts) for one in done]
        told.committed(logger(), self._settings, counts, lost)
        if self._settings.manifest:
            from airflow_delayed.spark.manifest import manifest_of
            from airflow_delayed.spark.places import Place

            Place(self._settings.manifest).write(manifest_of(self._settings, counts, lost))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Tell what cannot be recalled."""
        from airflow_delayed.spark import told
        from airflow_delayed.spark.log import logger

        done = _sent(messages)
        told.aborted(logger(), self._settings, [one.counts for one in done], len(messages), self._lost(done))

    def _folder(self) -> Place:
        from airflow_delayed.spark.places import Place

        assert self._settings.attempts is not None
        return Place(self._settings.attempts).child(self._job)

    def _lost(self, done: Sequence[Sent]) -> Lost | None:
        """Return what attempts without success told of themselves, if there is a folder for it, and remove that."""
        from airflow_delayed.spark.attempts import lost

        if self._settings.attempts is None:
            return None
        folder = self._folder()
        found = lost(folder, {one.name for one in done})
        folder.remove()
        return found


def _sent(messages: Sequence[WriterCommitMessage | None]) -> list[Sent]:
    return [message for message in messages if isinstance(message, Sent)]
