"""Messages in a delay queue that their destination refuses for good."""

from __future__ import annotations

import pytest
from support.sqs import ClockedWorld

#: Seconds from the first try to the last but one: pauses of 5, 10, 20 ... 300 s.
PAUSES = (5, 10, 20, 40, 80, 160, 300, 300, 300)


def refuse_large(clocked: ClockedWorld) -> None:
    attributes = {"MaximumMessageSize": "1024"}
    clocked.client.set_queue_attributes(QueueUrl=clocked.url_of(clocked.queue), Attributes=attributes)


@pytest.fixture
def refused(clocked: ClockedWorld) -> ClockedWorld:
    """One message is in the delay queue that the destination does not take."""
    clocked.install()
    clocked.hook.send([clocked.message(1000, "large", body=b"x" * 5000, headers={"Kind": "reminder"})])
    refuse_large(clocked)
    clocked.advance(905)
    return clocked


def test_a_message_that_is_refused_for_good_goes_whole_to_the_error_queue_in_the_end(refused: ClockedWorld, caplog):
    for pause in PAUSES:
        counts = refused.hook.cycle(refused.destination)
        assert (counts.failed, counts.to_error_queue) == (1, 0)
        refused.advance(pause + 1)
    counts = refused.hook.cycle(refused.destination)
    assert (counts.failed, counts.to_error_queue) == (0, 1)
    assert refused.hook.waiting(refused.destination) == 0
    (rejected,) = refused.raw(f"{refused.queue}-error")
    assert rejected["Body"] == "x" * 5000
    attributes = {name: value["StringValue"] for name, value in rejected["MessageAttributes"].items()}
    assert attributes["Kind"] == "reminder"
    assert attributes["NServiceBus.MessageId"] == "large"
    assert attributes["AirflowDelayed.FromQueue"] == refused.fifo
    assert attributes["AirflowDelayed.Reason"].startswith(f"queue {refused.queue} refuses it: ")
    assert f"queue {refused.queue} refuses it" in caplog.text
    # others go on
    refused.hook.send([refused.message(1000, "good")])
    refused.advance(905)
    assert refused.hook.cycle(refused.destination).delivered == 1
    refused.advance(120)
    assert refused.ids() == ["good"]


@pytest.mark.parametrize(
    "code", ["KmsDisabled", "KmsAccessDenied", "RequestThrottled", "AWS.SimpleQueueService.UnsupportedOperation"]
)
def test_what_is_wrong_with_the_queue_moves_no_message_to_the_error_queue(refused: ClockedWorld, monkeypatch, code):
    answer = {"Successful": [], "Failed": [{"Id": "0", "Code": code, "SenderFault": True, "Message": "no"}]}
    monkeypatch.setattr(refused.hook.get_conn(), "send_message_batch", lambda **_: answer)
    for pause in (*PAUSES, 300, 300):
        counts = refused.hook.cycle(refused.destination)
        assert (counts.failed, counts.to_error_queue) == (1, 0)
        refused.advance(pause + 1)
    monkeypatch.undo()
    assert refused.hook.waiting(refused.destination) == 1
