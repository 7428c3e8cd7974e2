"""An SQS that only talks: each request is answered at once with what was made before. python canned_sqs.py PORT

GET / answers how many requests of each kind came since the last time, and makes the delay queue full again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from email.utils import formatdate

#: How often a delay queue has ten messages, before it is empty.
FULL = 1_000
DUE = "2090-01-01T00:00:00.000000Z"


def _string(value: str) -> dict[str, str]:
    return {"DataType": "String", "StringValue": value}


def _received() -> bytes:
    now = int(time.time() * 1000)
    return json.dumps(
        {
            "Messages": [
                {
                    "MessageId": f"00000000-0000-0000-0000-{number:012}",
                    "ReceiptHandle": "h" * 180 + str(number),
                    "MD5OfBody": "0" * 32,
                    "Body": "x" * 200,
                    "Attributes": {
                        "MessageDeduplicationId": f"order-{number}",
                        "SentTimestamp": str(now - 900_000),
                        "ApproximateFirstReceiveTimestamp": str(now),
                        "ApproximateReceiveCount": "1",
                    },
                    "MessageAttributes": {
                        "NServiceBus.MessageId": _string(f"order-{number}"),
                        "Kind": _string("reminder"),
                        "NServiceBus.AmazonSQS.DelaySeconds": _string("2000000000"),
                        "AirflowDelayed.DueAt": _string(DUE),
                    },
                }
                for number in range(10)
            ]
        }
    ).encode()


RECEIVED = _received()
#: Of the delay queue; of the destination only the retention counts.
ATTRIBUTES = {"FifoQueue": "true", "DelaySeconds": "900", "MessageRetentionPeriod": "1209600"}
COUNTS: Counter[str] = Counter()
LEFT = {"receives": FULL}


def answer(action: str, body: bytes) -> bytes:
    COUNTS[action] += 1
    if action == "GetQueueUrl":
        return json.dumps({"QueueUrl": f"http://127.0.0.1/000000000000/{json.loads(body)['QueueName']}"}).encode()
    if action == "GetQueueAttributes":
        return json.dumps({"Attributes": ATTRIBUTES}).encode()
    if action == "ReceiveMessage":
        LEFT["receives"] -= 1
        return RECEIVED if LEFT["receives"] >= 0 else b"{}"
    if action in ("SendMessageBatch", "DeleteMessageBatch"):
        entries = json.loads(body)["Entries"]
        return json.dumps(
            {
                "Successful": [
                    {"Id": entry["Id"], "MessageId": "00000000-0000-0000-0000-000000000000", "MD5OfMessageBody": "0"}
                    for entry in entries
                ]
            }
        ).encode()
    return b"{}"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            if head[0].startswith("GET"):
                content = json.dumps(COUNTS).encode()
                COUNTS.clear()
                LEFT["receives"] = FULL
            else:
                content = answer(fields.get("x-amz-target", "").rpartition(".")[2], body)
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/x-amz-json-1.0\r\n"
                b"Date: %s\r\nContent-Length: %d\r\n\r\n" % (formatdate(usegmt=True).encode(), len(content)) + content
            )
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    async with await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
