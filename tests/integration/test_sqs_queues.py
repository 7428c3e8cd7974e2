"""Queues made, compared and repaired; and who may delay for over 900 s. On a real SQS server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from uuid import uuid4

import pytest
from botocore.exceptions import ClientError
from support.sqs import ClockedWorld, World

from airflow_delayed.delivery import State
from airflow_delayed.errors import AccessDenied, InputError, LimitExceeded, SendFailed, TopologyError
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.sqs import client
from airflow_delayed.sqs.entries import DELAY_SECONDS, string
from airflow_delayed.sqs.settings import QueueSettings
from services import sqs


def findings(report) -> list[tuple[State, str, str | None]]:
    return [(found.state, found.resource.removeprefix("queue "), found.argument) for found in report]


def wanted(world: World, **more) -> QueueSettings:
    return QueueSettings(
        **{
            "retention": timedelta(days=2),
            "visibility_timeout": 120,
            "receive_wait": 20,
            "delay": 5,
            "encryption": "alias/orders",
            "dead_letter_queue": f"{world.destination}-dead",
            "max_receive_count": 3,
            **more,
        }
    )


def test_a_destination_made_as_wanted(world: World):
    settings, dead = wanted(world), f"{world.queue}-dead"
    everything = {"create_destinations": True, "settings": settings}
    planned = world.hook.install([world.destination], dry_run=True, **everything)
    assert findings(planned) == [(State.PLANNED, name, None) for name in (dead, world.queue, world.fifo)]
    assert world.client.list_queues(QueueNamePrefix=world.queue).get("QueueUrls", []) == []
    assert findings(world.hook.install([world.destination], **everything)) == [
        (State.CREATED, name, None) for name in (dead, world.queue, world.fifo)
    ]
    made = world.attributes(world.queue)
    assert {name: made[name] for name in ("MessageRetentionPeriod", "VisibilityTimeout", "DelaySeconds")} == {
        "MessageRetentionPeriod": "172800",
        "VisibilityTimeout": "120",
        "DelaySeconds": "5",
    }
    assert made["ReceiveMessageWaitTimeSeconds"] == "20"
    policy = {"deadLetterTargetArn": world.attributes(dead)["QueueArn"], "maxReceiveCount": 3}
    assert json.loads(made["RedrivePolicy"]) == policy
    assert world.attributes(dead)["MessageRetentionPeriod"] == "1209600"
    # the same bodies wait in all three
    assert {world.attributes(name)["KmsMasterKeyId"] for name in (dead, world.queue, world.fifo)} == {"alias/orders"}
    for report in (
        world.hook.install([world.destination], **everything),
        world.hook.verify([world.destination], settings=settings),
        world.hook.verify([world.destination]),
    ):
        assert {found.state for found in report} == {State.OK}


def test_what_differs_is_named_planned_and_repaired_only_when_told(world: World):
    world.install()
    settings = wanted(world)
    with pytest.raises(TopologyError, match=r"repair=True") as caught:
        world.hook.install([world.destination], create_destinations=True, settings=settings)
    differing = [
        (world.queue, "MessageRetentionPeriod"),
        (world.queue, "VisibilityTimeout"),
        (world.queue, "ReceiveMessageWaitTimeSeconds"),
        (world.queue, "DelaySeconds"),
        (world.queue, "encryption"),
        (world.queue, "RedrivePolicy"),
        (world.fifo, "encryption"),
    ]
    assert findings(caught.value.report)[1:] == [(State.DIFFERS, *one) for one in differing]
    assert all(found.why and found.repair for found in caught.value.report.problems)
    assert world.attributes(world.queue)["VisibilityTimeout"] == "30"
    repairing = {"settings": settings, "repair": True}
    plan = world.hook.install([world.destination], dry_run=True, **repairing)
    assert plan.ok
    assert findings(plan)[1:] == [(State.WOULD_REPAIR, *one) for one in differing]
    assert world.attributes(world.queue)["VisibilityTimeout"] == "30"
    assert findings(world.hook.install([world.destination], **repairing))[1:] == [
        (State.REPAIRED, *one) for one in differing
    ]
    assert world.hook.verify([world.destination], settings=settings).counts() == {"ok": 3}


def test_a_dead_letter_queue_is_made_only_with_destinations(world: World):
    world.install()
    settings = QueueSettings(dead_letter_queue=f"{world.destination}-dead", max_receive_count=3)
    for dry_run in (True, False):
        options = {"settings": settings, "repair": True, "dry_run": dry_run}
        if dry_run:
            report = world.hook.install([world.destination], **options)
        else:
            with pytest.raises(TopologyError, match=f"{world.queue}-dead: missing") as caught:
                world.hook.install([world.destination], **options)
            report = caught.value.report
        assert findings(report)[:2] == [
            (State.MISSING, f"{world.queue}-dead", None),
            # it cannot be repaired while there is nothing to lead to
            (State.DIFFERS, world.queue, "RedrivePolicy"),
        ]
        assert report.missing_destinations == ()


def test_a_dead_letter_queue_that_forgets_too_early(world: World):
    dead = f"{world.queue}-dead"
    world.client.create_queue(QueueName=dead)
    settings = wanted(world, retention=timedelta(days=4))
    with pytest.raises(TopologyError, match=r"gone as soon as it is dead-lettered"):
        world.hook.install([world.destination], create_destinations=True, settings=settings)
    world.hook.install([world.destination], settings=settings, repair=True)
    assert world.attributes(dead)["MessageRetentionPeriod"] == "1209600"


def test_a_delay_queue_is_repaired_and_what_waits_in_it_stays(world: World):
    world.install()
    world.hook.send([world.message(1000)])
    dead = world.client.create_queue(QueueName=f"{world.queue}-dead.fifo", Attributes={"FifoQueue": "true"})
    arn = world.client.get_queue_attributes(QueueUrl=dead["QueueUrl"], AttributeNames=["QueueArn"])["Attributes"]
    policy = json.dumps({"deadLetterTargetArn": arn["QueueArn"], "maxReceiveCount": 3})
    wrong = {"DelaySeconds": "10", "MessageRetentionPeriod": "3600", "RedrivePolicy": policy}
    world.client.set_queue_attributes(QueueUrl=world.url_of(world.fifo), Attributes=wrong)
    # nothing more goes into it, by a hook that has not looked yet
    hook = SqsDelayHook(world.conn_id)
    near = [world.message(0, f"near{number}") for number in range(12)]
    with pytest.raises(TopologyError, match=r"DelaySeconds: wanted 900, found 10 .*store_conn_id=.*repair=True"):
        hook.send([*near, world.message(1000, "far")])
    assert world.ids() == []
    report = world.hook.install([world.destination], repair=True)
    assert [found.state for found in report] == [State.OK] + [State.REPAIRED] * 3
    assert world.hook.verify([world.destination]).ok
    assert "RedrivePolicy" not in world.attributes(world.fifo)
    assert world.counts(world.fifo) == (0, 1, 0)
    assert hook.send([world.message(1000, "far")]).sent == 1


@pytest.mark.parametrize("create", [True, False])
def test_a_fifo_queue_is_no_destination(world: World, create):
    with pytest.raises(LimitExceeded, match="is a FIFO queue"):
        world.hook.install([f"{world.queue}.fifo"], create_destinations=create)
    assert world.client.list_queues(QueueNamePrefix=world.queue).get("QueueUrls", []) == []


# the table in the documentation of NServiceBus.AmazonSQS, "Enable unrestricted delayed delivery"; its 901
# leaves a test no second until it sends
@pytest.mark.parametrize(
    "delay, sender, receiver, supported",
    [
        (900, False, False, True),
        (900, False, True, True),
        (900, True, False, True),
        (900, True, True, True),
        (960, False, False, False),
        (960, False, True, False),
        (960, True, False, False),
        (960, True, True, True),
    ],
)
def test_both_sides_have_to_know_of_unrestricted_delay(world: World, connect, delay, sender, receiver, supported):
    def hook(side: str, unrestricted: bool) -> SqsDelayHook:
        return SqsDelayHook(connect(side, **sqs.connection(world.url, unrestricted_delay=unrestricted)))

    hook("receiver", receiver).install([world.destination], create_destinations=True)
    sending = hook("sender", sender)
    near = [world.message(0, f"near{number}") for number in range(12)]
    far = world.message(delay, "far")
    report = sending.verify([world.destination], max_delay=timedelta(seconds=delay))
    assert report.ok is supported
    if supported:
        sending.check(far, world.now())
        assert sending.send([*near, far]).sent == 13
        assert world.counts(world.queue)[1] + (world.counts(world.fifo)[1] if delay > 900 else 0) == 1
        return
    assert "store_conn_id=" in str(TopologyError("sender", report))
    if not sender:
        with pytest.raises(LimitExceeded, match=r"'sender'; let such messages wait in a store") as caught:
            sending.check(far, world.now())
        assert caught.value.column == "due_at"
    with pytest.raises((LimitExceeded, TopologyError), match="store_conn_id="):
        sending.send([*near, far])
    assert world.counts(world.queue) == (0, 0, 0)
    with pytest.raises(SendFailed, match=r"message far: .*store_conn_id=") as failed:
        sending.send(iter([*near, far]))  # too late: a stream cannot be looked through before
    assert [message_id for message_id, _ in failed.value.failures] == ["far"]
    assert len(world.ids()) == 12


@pytest.mark.parametrize(
    "choice, found", [(True, True), ("true", True), ("True", True), (False, False), ("false", False), (None, False)]
)
def test_the_choice_is_in_the_connection(connect, choice, found):
    extra = {} if choice is None else {"unrestricted_delay": choice}
    assert SqsDelayHook(connect("choice", **sqs.connection("http://127.0.0.1:1", **extra))).unrestricted_delay is found


def test_a_choice_that_is_none(connect):
    hook = SqsDelayHook(connect("choice", **sqs.connection("http://127.0.0.1:1", unrestricted_delay="perhaps")))
    with pytest.raises(InputError, match="unrestricted_delay='perhaps' in its extra; use true or false"):
        hook.install(["orders"])


def test_without_the_choice_there_is_no_delay_queue(world: World, connect):
    hook = SqsDelayHook(connect("near", **sqs.connection(world.url)))
    assert hook.install([world.destination], create_destinations=True).counts() == {"created": 1}
    assert hook.verify([world.destination]).counts() == {"ok": 1}


def test_what_waits_is_sent_on_also_after_the_choice_was_undone(world: World, connect):
    world.install()
    world.hook.send([world.message(1000)])
    hook = SqsDelayHook(connect("near", **sqs.connection(world.url)))
    assert hook.waiting(world.destination) == 1
    assert hook.cycle(world.destination).moved == 0


@pytest.fixture
def guarded(clocked: ClockedWorld, connect) -> Iterator[ClockedWorld]:
    """A world whose queues, a dead-letter queue among them, can deny what a policy says."""
    clocked.conn_id = connect("guarded", **sqs.connection(clocked.url, unrestricted_delay=True))
    clocked.hook.install([clocked.destination], create_destinations=True, settings=wanted(clocked))
    clocked.client.create_queue(QueueName=f"{clocked.queue}-error")
    yield clocked
    for queue in (client.DELAY_QUEUE, client.DEAD_LETTER_QUEUE, client.ERROR_QUEUE, client.DESTINATION):
        # one may deny to be changed, and can be deleted; the others may deny just that
        with suppress(ClientError):
            deny(clocked, queue)


def fill(world: ClockedWorld) -> None:
    """Let there be messages to move: in the delay queue due, for another round and not to be read; and a dead one."""
    fifo, url = world.url_of(world.fifo), world.url_of(world.queue)
    world.client.set_queue_attributes(QueueUrl=fifo, Attributes={"DelaySeconds": "0"})
    for delay in ("0", "5000", "soon"):
        world.client.send_message(
            QueueUrl=fifo,
            MessageBody="x",
            MessageGroupId=uuid4().hex,
            MessageDeduplicationId=uuid4().hex,
            MessageAttributes={DELAY_SECONDS: string(delay)},
        )
    world.client.set_queue_attributes(QueueUrl=fifo, Attributes={"DelaySeconds": "900"})
    world.advance(305)  # what was just sent waits
    world.client.send_message(QueueUrl=url, MessageBody="x", DelaySeconds=0)
    for _ in range(4):
        world.client.receive_message(QueueUrl=url, VisibilityTimeout=0, WaitTimeSeconds=0)


def deny(world: World, queue: str, **actions: list[str]) -> str:
    """Let the policy of one queue deny actions, or nothing; return the queue's name."""
    name = {
        client.DESTINATION: world.queue,
        client.DELAY_QUEUE: world.fifo,
        client.DEAD_LETTER_QUEUE: f"{world.queue}-dead",
        client.ERROR_QUEUE: f"{world.queue}-error",
    }[queue]
    # the server puts a queue's name at the end; to ask for it may be denied
    url = f"{world.url}/000000000000/{name}"
    statement = {"Effect": "Deny", "Principal": "*", "Resource": "*", **actions}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]}) if actions else ""
    world.client.set_queue_attributes(QueueUrl=url, Attributes={"Policy": policy})
    return name


def use(world: World, method: str) -> object:
    """Call one method so that it needs all that it may need."""
    hook = SqsDelayHook(world.conn_id, clock=world.now)
    repaired = {"settings": wanted(world, encryption="alias/other"), "repair": True}
    calls = {
        "verify": lambda: hook.verify([world.destination], settings=wanted(world)),
        "install": lambda: hook.install([world.destination], **repaired),
        "send": lambda: hook.send([world.message(0, "near"), world.message(1000, "far")]),
        "cycle": lambda: (hook.cycle(world.destination), hook.waiting(world.destination)),
        "life": lambda: hook.life(world.destination),
        "extend_visibility": lambda: hook.extend_visibility(world.destination, ["handle"], 60),
        "redrive": lambda: hook.redrive(world.destination, by_sqs=False),
    }
    return calls[method]()


NEEDED = {
    (need.method, need.queue): {
        action
        for other in client.NEEDS
        if (other.method, other.queue) == (need.method, need.queue)
        for action in other.actions
        # a queue's policy cannot deny its creation, and the emulator has no tasks
        if action not in ("sqs:CreateQueue", "sqs:ListDeadLetterSourceQueues", "sqs:StartMessageMoveTask")
    }
    for need in client.NEEDS
    # the policy of a queue that is not there yet denies nothing
    if need.queue != "*"
}


@pytest.mark.parametrize("method", sorted({method for method, _ in NEEDED}))
def test_what_is_listed_is_enough(guarded: World, method):
    fill(guarded)
    for queue in (client.DELAY_QUEUE, client.DEAD_LETTER_QUEUE, client.ERROR_QUEUE, client.DESTINATION):
        actions = NEEDED.get((method, queue), set())
        # the test's own client may always do this
        deny(guarded, queue, NotAction=sorted(actions | {"sqs:SetQueueAttributes"}))
    use(guarded, method)


# what is not given back becomes visible by itself, a little later; and without the other nothing can be undone
FORGIVEN = {"sqs:ChangeMessageVisibility", "sqs:SetQueueAttributes"}


@pytest.mark.parametrize("method", sorted({method for method, _ in NEEDED} - {"extend_visibility"}))
def test_what_is_denied_is_named(guarded: World, method):
    for (other, queue), actions in NEEDED.items():
        # for want of an error queue, its messages stay, and the others go on
        for action in sorted(actions - FORGIVEN) if other == method and queue != client.ERROR_QUEUE else ():
            fill(guarded)
            name = deny(guarded, queue, Action=[action])
            with pytest.raises(AccessDenied, match=f"'guarded' could .* may not do {action} on queue {name}[.] Allow"):
                use(guarded, method)
            deny(guarded, queue)


@pytest.mark.parametrize("action", sorted(NEEDED["life", client.DEAD_LETTER_QUEUE]))
def test_a_sender_without_rights_on_the_dead_letter_queue_verifies_the_others(guarded: World, action):
    fill(guarded)
    deny(guarded, client.DEAD_LETTER_QUEUE, Action=[action])
    report = SqsDelayHook(guarded.conn_id).verify([guarded.destination])
    assert guarded.queue in str(report)
    assert "dead-letters" not in {one.code for one in report}


@pytest.mark.parametrize("action", sorted(NEEDED["cycle", client.ERROR_QUEUE]))
def test_an_error_queue_that_is_denied_is_named_in_the_log(guarded: World, action, caplog):
    fill(guarded)
    name = deny(guarded, client.ERROR_QUEUE, Action=[action])
    counts = SqsDelayHook(guarded.conn_id).cycle(guarded.destination)
    assert (counts.delivered, counts.requeued, counts.to_error_queue, counts.failed) == (1, 1, 0, 1)
    assert f"may not do {action} on queue {name}" in caplog.text


@pytest.mark.parametrize("queue", [client.DESTINATION, client.DELAY_QUEUE, client.DEAD_LETTER_QUEUE])
def test_a_repair_that_is_denied_is_named(guarded: World, queue):
    name = deny(guarded, queue, Action=["sqs:SetQueueAttributes"])
    with pytest.raises(AccessDenied, match=f"may not do sqs:SetQueueAttributes on queue {name}[.]"):
        use(guarded, "install")


def test_a_visibility_that_may_not_be_changed(guarded: World):
    name = deny(guarded, client.DESTINATION, Action=["sqs:ChangeMessageVisibility"])
    with pytest.raises(AccessDenied, match=f"may not do sqs:ChangeMessageVisibility on queue {name}[.]"):
        use(guarded, "extend_visibility")
