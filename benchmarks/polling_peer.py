"""What a team has without this package: a table, and a DAG that looks every five minutes; see polling_dag.py.

It is written as a team that knows PostgreSQL and SQS would write it: an index on what waits, rows locked while they are
sent (two runs never send the same row), requests of ten messages, SQS's answer for each message looked at, and the
row's id in the message, so that consumers can recognise duplicates.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from datetime import datetime, timedelta

from airflow.providers.amazon.aws.hooks.sqs import SqsHook
from airflow.providers.postgres.hooks.postgres import PostgresHook
from airflow.sdk import dag, task

DATABASE, AWS, QUEUE = "reminders_db", "aws_default", "reminders"
#: Rows in a transaction: if a run is killed, so many may be sent twice, or be lost if they are marked first.
BATCH = 500
#: SQS can hold a message back for 15 minutes, so a run may take what falls due after it too.
AHEAD = timedelta(0)
MARK_FIRST = False

TABLE = """
CREATE TABLE IF NOT EXISTS reminders (
    id text PRIMARY KEY,
    customer text,
    body text NOT NULL,
    due_at timestamptz NOT NULL,
    state text NOT NULL DEFAULT 'waiting',
    changed_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS reminders_due ON reminders (due_at) WHERE state = 'waiting';
CREATE INDEX IF NOT EXISTS reminders_customer ON reminders (customer) WHERE state = 'waiting';
"""
DUE = """
SELECT id, body, greatest(0, ceil(extract(epoch FROM due_at - clock_timestamp())))::int
FROM reminders WHERE state = 'waiting' AND due_at <= clock_timestamp() + %s
ORDER BY due_at LIMIT %s FOR UPDATE SKIP LOCKED
"""
MARK = "UPDATE reminders SET state = 'sent', changed_at = now() WHERE id = ANY(%s)"
TAKE_BACK = """
UPDATE reminders SET state = 'cancelled', changed_at = now() WHERE customer = %s AND state = 'waiting'
"""
STORE = "INSERT INTO reminders (id, customer, body, due_at) VALUES (%s, %s, %s, %s) ON CONFLICT (id) DO NOTHING"


def install() -> None:
    PostgresHook(DATABASE).run(TABLE)


def remind(rows: Iterable[tuple[str, str, str, datetime]]) -> None:
    """Store reminders: id, customer, body and due time of each."""
    with closing(PostgresHook(DATABASE).get_conn()) as connection, connection, connection.cursor() as cursor:
        cursor.executemany(STORE, list(rows))


def take_back(customer: str) -> int:
    with closing(PostgresHook(DATABASE).get_conn()) as connection, connection, connection.cursor() as cursor:
        cursor.execute(TAKE_BACK, [customer])
        return cursor.rowcount


def send_due() -> int:
    """Send what is due, a batch a transaction."""
    sqs, total = SqsHook(AWS).get_conn(), 0
    url = sqs.get_queue_url(QueueName=QUEUE)["QueueUrl"]
    with closing(PostgresHook(DATABASE).get_conn()) as connection, connection.cursor() as cursor:
        while True:
            cursor.execute(DUE, [AHEAD, BATCH])
            rows = cursor.fetchall()
            if MARK_FIRST:
                cursor.execute(MARK, [[row[0] for row in rows]])
                connection.commit()
            for ten in chunks(rows, 10):
                send(sqs, url, ten)
            if not MARK_FIRST:
                cursor.execute(MARK, [[row[0] for row in rows]])
                connection.commit()
            total += len(rows)
            if len(rows) < BATCH:
                return total


def send(sqs, url: str, rows: list[tuple[str, str, int]]) -> None:
    entries = [
        {
            "Id": str(number),
            "MessageBody": body,
            "DelaySeconds": delay,
            "MessageAttributes": {"ReminderId": {"DataType": "String", "StringValue": reminder}},
        }
        for number, (reminder, body, delay) in enumerate(rows)
    ]
    answer = sqs.send_message_batch(QueueUrl=url, Entries=entries)
    if failed := answer.get("Failed"):
        raise RuntimeError(f"SQS refused {len(failed)} reminders: {failed[0]['Message']}")


def chunks(rows: list, size: int) -> list[list]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@dag(schedule="*/5 * * * *", catchup=False, max_active_runs=1)
def send_reminders():
    task(send_due, retries=3)()


send_reminders()
