"""A consumer outside Airflow: it writes down every message of an SQS queue and when it came, and deletes it.

    python demo_consumer.py QUEUE FILE

FILE gets a line of JSON a message: id, body, arrived (seconds since 1970). The endpoint comes from boto3's own
environment (AWS_ENDPOINT_URL_SQS). It waits for a queue that is not there yet, and ends by TERM.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import boto3


def queue_url(sqs, queue: str) -> str:
    """Return a queue's URL once it exists."""
    while True:
        try:
            return sqs.get_queue_url(QueueName=queue)["QueueUrl"]
        except sqs.exceptions.QueueDoesNotExist:
            time.sleep(0.2)


def main(queue: str, file: Path) -> None:
    sqs = boto3.client("sqs")
    url = queue_url(sqs, queue)
    with file.open("a") as arrivals:
        while True:
            batch = sqs.receive_message(
                QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=5, MessageAttributeNames=["All"]
            ).get("Messages", [])
            now = time.time()
            for message in batch:
                message_id = message["MessageAttributes"]["NServiceBus.MessageId"]["StringValue"]
                arrivals.write(json.dumps({"id": message_id, "body": message["Body"], "arrived": now}) + "\n")
            arrivals.flush()  # written down before it is deleted
            if batch:
                entries = [{"Id": str(i), "ReceiptHandle": m["ReceiptHandle"]} for i, m in enumerate(batch)]
                sqs.delete_message_batch(QueueUrl=url, Entries=entries)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
