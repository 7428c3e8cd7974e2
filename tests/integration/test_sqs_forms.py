"""The forms of what is sent, and what happens when SQS is too busy, on a real SQS server."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from botocore.awsrequest import AWSResponse
from support.sqs import ClockedWorld, World, grown

from airflow_delayed.errors import InputError, LimitExceeded
from airflow_delayed.hooks.sqs import SqsDelayHook
from services import sqs

FORMS = ("raw", "nservicebus", "nservicebus-unwrapped")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("delay", [0, 1000])
def test_each_form_arrives_as_it_was_sent(clocked: ClockedWorld, connect, form, delay):
    clocked.install()
    extra = {"envelope": form, "unrestricted_delay": True}
    hook = SqsDelayHook(connect("sqs_form", **sqs.connection(clocked.url, **extra)), clock=clocked.now)
    bodies = [b"{}", b"1234", b"\x00\xff", "Grüße".encode()]
    hook.send([clocked.message(delay, f"m{number}", body=body) for number, body in enumerate(bodies)])
    clocked.advance(905)
    hook.cycle(clocked.destination)
    clocked.advance(200)
    arrived = sorted(clocked.arrived(), key=lambda found: found.message_id)
    assert [found.body for found in arrived] == bodies
    due = set() if form == "raw" else {"NServiceBus.DeliverAt"}
    assert [found.headers.keys() - due for found in arrived] == [{"Kind"}] * len(bodies)
    assert all(found.headers.keys() >= due for found in arrived)
    assert all((found.due_at is not None) == bool(delay) for found in arrived)


def test_the_argument_comes_before_the_connection(world: World, connect):
    world.install()
    conn_id = connect("sqs_form", **sqs.connection(world.url, envelope="nservicebus"))
    SqsDelayHook(conn_id).send([world.message(0, "wrapped")])
    SqsDelayHook(conn_id, envelope="raw").send([world.message(0, "raw")])
    bodies = {
        found["MessageAttributes"]["NServiceBus.MessageId"]["StringValue"]: found["Body"] for found in world.raw()
    }
    assert bodies["raw"] == "body of raw"
    assert list(json.loads(bodies["wrapped"])) == ["Body", "S3BodyKey", "Headers"]


def test_an_empty_body_needs_the_envelope(world: World):
    world.install()
    empty = world.message(0, body=b"")
    with pytest.raises(LimitExceeded, match="envelope"):
        world.hook.send([empty])
    hook = SqsDelayHook(world.conn_id, envelope="nservicebus")
    hook.check(empty, world.now())
    hook.send([empty])
    assert [found.body for found in world.arrived()] == [b""]


def test_a_form_that_is_none(world: World):
    world.install()
    with pytest.raises(InputError, match=r"envelope='xml' is none of 'raw'"):
        SqsDelayHook(world.conn_id, envelope="xml").send([world.message(0)])


def _busy(world: World, times: int, code: str) -> list[int]:
    """Refuse whole requests, so many times; return how many entries each had."""
    sizes: list[int] = []

    def refuse(request, **_):
        sizes.append(len(json.loads(request.body)["Entries"]))
        if len(sizes) <= times:
            raw = SimpleNamespace(stream=lambda: [json.dumps({"__type": code}).encode()])
            return AWSResponse(request.url, 403, {}, raw)
        return None

    world.on("before-send.sqs.SendMessageBatch", refuse)
    return sizes


@pytest.mark.parametrize("times, wanted", [(1, [10] * 2), (4, [10] * 5), (5, [10] * 5 + [1] * 10)])
def test_when_sqs_is_too_busy_batches_stay_whole_until_the_last_try(world: World, monkeypatch, times, wanted):
    slept: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=slept.append))
    world.install()
    sizes = _busy(world, times, "RequestThrottled")
    assert world.hook.send([world.message(0, f"m{number}") for number in range(10)]).sent == 10
    assert sizes == wanted
    assert (len(slept), world.slept) == (min(times, 4), [])
    assert len(world.ids()) == 10


@pytest.mark.parametrize("times, wanted", [(1, [10, 10]), (2, [10, 10, 10]), (3, [10, 10, 10] + [1] * 10)])
def test_a_key_that_is_too_busy_is_not_asked_again_at_once(world: World, times, wanted):
    """Which botocore does not repeat."""
    world.install()
    sizes = _busy(world, times, "KmsThrottled")
    assert world.hook.send([world.message(0, f"m{number}") for number in range(10)]).sent == 10
    assert sizes == wanted
    assert grown(world.slept, *[0.2, 0.4, 0.8][:times])
    assert len(world.ids()) == 10
