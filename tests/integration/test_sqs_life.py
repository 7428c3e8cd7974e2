"""A message's life: counted, kept hidden, dead-lettered and moved back. On a real SQS server."""

from __future__ import annotations

import json
import signal
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.forked import Child
from support.lengths import length
from support.sqs import ClockedWorld, World
from support.sqs_processes import moves_dead_letters

from airflow_delayed.delivery import State
from airflow_delayed.errors import TopologyError
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.sqs.entries import decode
from airflow_delayed.sqs.settings import QueueSettings
from services import sqs


def with_dead_letters(world: World, **more: Any) -> str:
    """Install a destination whose messages are dead-lettered after one receive; return the dead-letter queue's name."""
    dead = f"{world.queue}-dead"
    settings = QueueSettings(dead_letter_queue=dead, max_receive_count=1, **more)
    world.hook.install([world.destination], create_destinations=True, settings=settings)
    return dead


def give_up(world: World, name: str | None = None) -> None:
    """Receive all, fail at it, and ask once more, which is when SQS moves it to the dead-letter queue."""
    url = world.url_of(name or world.queue)
    while world.client.receive_message(QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=0).get("Messages"):
        pass


def test_every_stage_is_counted(world: World):
    dead = with_dead_letters(world, retention=timedelta(days=2), visibility_timeout=60)
    world.hook.send([world.message(0, "dead")])
    give_up(world)
    near = [world.message(0, f"m{number}") for number in range(3)]
    world.hook.send([*near, world.message(600, "delayed"), world.message(1000, "far")])
    world.client.receive_message(QueueUrl=world.url_of(world.queue), MaxNumberOfMessages=1)
    life = world.hook.life(world.destination)
    here = life.destination
    assert (here.queue, here.waiting, here.in_flight, here.delayed, here.total) == (world.queue, 2, 1, 1, 4)
    assert (here.retention, here.visibility_timeout) == (timedelta(days=2), timedelta(minutes=1))
    assert life.delay_queue is not None
    assert (life.delay_queue.queue, life.delay_queue.delayed, life.delay_queue.waiting) == (world.fifo, 1, 0)
    assert life.delay_queue.retention == timedelta(days=14)
    assert life.dead_letter_queue is not None
    assert (life.dead_letter_queue.queue, life.dead_letter_queue.waiting, life.dead_lettered) == (dead, 1, 1)
    assert life.max_receive_count == 1
    # SQS tells neither, and nothing is made up
    assert (here.oldest, life.expired) == (None, None)


def test_life_without_the_other_queues(world: World):
    world.client.create_queue(QueueName=world.queue)
    life = world.hook.life(world.destination)
    assert (life.delay_queue, life.dead_letter_queue, life.max_receive_count, life.dead_lettered) == (
        None,
        None,
        None,
        0,
    )
    with pytest.raises(TopologyError, match="queue nowhere: missing"):
        world.hook.life("nowhere")


def test_messages_are_kept_hidden_and_given_back(clocked: ClockedWorld):
    clocked.install()
    clocked.hook.send([clocked.message(0, f"m{number}") for number in range(12)])
    received = clocked.raw(delete=False)
    handles = [message["ReceiptHandle"] for message in received]
    assert clocked.hook.extend_visibility(clocked.destination, handles, timedelta(hours=1)) == {}
    clocked.advance(3540)
    assert clocked.raw() == []
    assert clocked.hook.extend_visibility(clocked.destination, handles[:5], 600) == {}
    clocked.advance(61)
    assert len(clocked.raw()) == 7
    # the receipt of a message that is gone is refused by its name, the others are kept
    refused = clocked.hook.extend_visibility(clocked.destination, [*handles[:5], handles[11]], 0)
    assert list(refused) == [handles[11]]
    assert len(clocked.raw()) == 5


def test_dead_letters_come_back_as_they_were(world: World):
    dead = with_dead_letters(world, delay=300)
    sent = [
        world.message(0, "text", headers={"Kind": "reminder", "Lang": "de"}),
        world.message(0, "binary", body=bytes(range(256))),
        *(world.message(0, f"m{number}", body=b"x" * 200_000) for number in range(13)),
    ]
    world.hook.send(sent)
    trace = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5759e988-bd862e3fe1be46a994272793"}}
    other = {"DataType": "Binary", "BinaryValue": b"\x00\xff"}
    world.client.send_message(
        QueueUrl=world.url_of(world.queue),
        MessageBody="of another sender",
        MessageAttributes={"Raw": other},
        MessageSystemAttributes=trace,
        DelaySeconds=0,
    )
    give_up(world)
    assert world.hook.life(world.destination).dead_lettered == 16
    asked: list[dict[str, Any]] = []
    world.on(
        "before-call.sqs.SendMessageBatch", lambda params, **_: asked.extend(json.loads(params["body"])["Entries"])
    )
    done = world.hook.redrive(world.destination)
    assert (done.task, done.moved, done.others, done.undeleted, done.failures) == (None, 16, 0, 0, {})
    assert world.counts(dead) == (0, 0, 0)
    received = world.raw()
    assert len(received) == 16  # at once, whatever delay the queue has
    (foreign,) = [message for message in received if message["Body"] == "of another sender"]
    assert foreign["MessageAttributes"] == {"Raw": other}
    # the emulator drops it from a batch
    assert [entry["MessageSystemAttributes"] for entry in asked if "MessageSystemAttributes" in entry] == [trace]
    ours = {found.message_id: found for found in map(decode, received) if found.body != b"of another sender"}
    assert {name: (found.body, found.headers) for name, found in ours.items()} == {
        message.message_id: (message.body, message.headers) for message in sent
    }


def test_only_what_came_from_the_destination_goes_back(world: World):
    dead = with_dead_letters(world)
    other = f"{world.queue}-other"
    settings = QueueSettings(dead_letter_queue=dead, max_receive_count=1)
    world.hook.install([other], create_destinations=True, settings=settings)
    world.hook.send([world.message(0, f"theirs{number}", destination=other) for number in range(12)])
    world.hook.send([world.message(0, f"ours{number}") for number in range(12)])
    give_up(world)
    give_up(world, other)
    world.client.send_message(QueueUrl=world.url_of(dead), MessageBody="by hand")
    done = world.hook.redrive(world.destination)
    assert (done.moved, done.others) == (12, 13)
    assert world.ids() == sorted(f"ours{number}" for number in range(12))
    assert world.counts(dead) == (13, 0, 0)  # visible again at once


def test_what_fails_again_meanwhile_does_not_go_round_for_ever(clocked: ClockedWorld):
    dead = with_dead_letters(clocked)
    clocked.hook.send([clocked.message(0, f"m{number}") for number in range(10)])
    give_up(clocked)
    clocked.advance(2)

    def fail_at_once(**_: object) -> None:
        clocked.advance(2)
        give_up(clocked)

    clocked.on("after-call.sqs.DeleteMessageBatch", fail_at_once)
    done = clocked.hook.redrive(clocked.destination)
    # SQS tells the time in whole seconds, so what it sent back within the first one may be moved twice
    assert (done.moved in (10, 20), done.others) == (True, 10)
    assert clocked.counts(dead) == (10, 0, 0)


def test_what_cannot_be_sent_back_stays(world: World):
    dead = with_dead_letters(world)
    world.hook.send([world.message(0, "large", body=b"x" * 5000), world.message(0, "small")])
    give_up(world)
    limit = {"MaximumMessageSize": "1024"}
    world.client.set_queue_attributes(QueueUrl=world.url_of(world.queue), Attributes=limit)
    done = world.hook.redrive(world.destination)
    assert done.moved == 1
    assert ["InvalidParameterValue" in reason for reason in done.failures.values()] == [True]
    assert world.ids() == ["small"]
    assert world.counts(dead) == (1, 0, 0)


def test_without_a_dead_letter_queue_there_is_nothing_to_move(world: World):
    world.install()
    with pytest.raises(TopologyError, match=r"for dead letters of .*: missing \(.*set dead_letter_queue="):
        world.hook.redrive(world.destination)
    world.client.delete_queue(QueueUrl=world.url_of(world.fifo))
    dead = with_dead_letters(ClockedWorld(world.url, world.conn_id, destination=f"{world.queue}-2"))
    world.client.delete_queue(QueueUrl=world.url_of(dead))
    with pytest.raises(TopologyError, match=f"queue {dead}: missing"):
        world.hook.redrive(f"{world.queue}-2")


KILLS = length("kills of what moves dead letters back, on SQS", 2, 5)
DEAD_LETTERS = length("dead letters that are moved back meanwhile, on SQS", 160, 400)


def test_killed_at_any_moment_nothing_is_lost(clocked: ClockedWorld):
    dead = with_dead_letters(clocked)
    clocked.hook.send([clocked.message(0, f"m{number}") for number in range(DEAD_LETTERS)])
    give_up(clocked)
    kills = 0
    for pause in (0.0, 0.01, 0.03, 0.05, 0.1)[:KILLS]:
        before = clocked.counts(dead)
        mover = Child(moves_dead_letters, conn_id=clocked.conn_id, destination=clocked.destination)
        while clocked.counts(dead) == before:  # it has begun
            time.sleep(0.001)
        time.sleep(pause)
        mover.kill()
        kills += mover.ended() == -signal.SIGKILL
        mover.close()
        clocked.advance(130)  # what it was about to move is visible again
        if clocked.counts(dead) == (0, 0, 0):
            break
    assert kills
    clocked.hook.redrive(clocked.destination)
    assert clocked.counts(dead) == (0, 0, 0)
    arrived = clocked.ids()
    assert set(arrived) == {f"m{number}" for number in range(DEAD_LETTERS)}  # none lost
    assert len(arrived) - DEAD_LETTERS <= 10 * kills  # twice: a batch for each kill at most


def test_sqs_moves_them_itself_where_it_can(world: World):
    """No emulator has these requests: their answers are made up, and what is asked is checked by boto3's model."""
    dead = with_dead_letters(world)
    asked: list[tuple[str, dict[str, Any]]] = []

    class Answered:
        status_code = 200

    def answer(name: str, parsed: dict[str, Any]):
        def handler(params, **_):
            asked.append((name, json.loads(params["body"])))
            return Answered(), parsed

        return handler

    sources = {"queueUrls": [world.url_of(world.queue)]}
    world.on("before-call.sqs.ListDeadLetterSourceQueues", answer("list", sources))
    world.on("before-call.sqs.StartMessageMoveTask", answer("start", {"TaskHandle": "handle"}))
    done = world.hook.redrive(world.destination)
    assert (done.task, done.moved) == ("handle", 0)
    assert asked[1][0] == "start"
    assert list(asked[1][1]) == ["SourceArn"]
    assert asked[1][1]["SourceArn"].endswith(f":{dead}")
    asked.clear()
    # it would move what is not ours
    sources["queueUrls"].append(f"{world.url}/000000000000/another")
    assert world.hook.redrive(world.destination).task is None
    assert [name for name, _ in asked] == ["list"]
    assert world.hook.redrive(world.destination, by_sqs=False).task is None
    assert len(asked) == 1


def test_a_backlog_that_could_expire_unread_is_told_and_does_not_fail(world: World):
    world.install()
    world.hook.send([world.message(0, f"m{number}") for number in range(100)])
    report = world.hook.verify([world.destination])
    assert report.ok
    (warning,) = [found for found in report if found.state is State.WARNING]
    assert f"queue {world.queue}: 100 messages wait and none is being read" in str(warning)
    assert warning.code == "could-expire"
    world.raw()
    assert world.hook.verify([world.destination]).counts() == {"ok": 2}


def plan(world: World, delay: timedelta, count: int, **options: Any) -> None:
    """Let the operator check messages, and send none."""
    task = DelayedSendOperator(
        task_id="send",
        conn_id=world.conn_id,
        messages=[{"value": f"{number}"} for number in range(count)],
        destination=world.destination,
        delay=delay,
        dry_run=True,
        **options,
    )
    ti = SimpleNamespace(dag_id="dag", run_id="run", task_id="send", map_index=-1, max_tries=0, try_number=1)
    task.execute({"ti": ti, "task_state_store": {}})  # type: ignore[typeddict-item]


def test_a_sender_is_told_of_the_backlog_and_of_its_requests(world: World, capsys):
    world.install()
    world.hook.send([world.message(0, f"m{number}") for number in range(100)])
    plan(world, timedelta(days=365), 20)
    log = capsys.readouterr().out
    assert "100 messages wait and none is being read" in log
    assert "20 messages, due in 36" in log  # 364 days, 23:59:59, or 365 days
    assert "2,102,360 requests, or 210,236 if every batch is full. In a store (store_conn_id=) they would" in log
    plan(world, timedelta(days=365), 1)
    assert "delay queues" not in capsys.readouterr().out


def test_a_sender_without_the_choice_is_told_of_the_store(world: World, connect, tmp_path, capsys):
    world.install()
    world.conn_id = connect("near", **sqs.connection(world.url))
    with pytest.raises(AirflowFailException, match=r"due_at: is over 900 s away.*store_conn_id="):
        plan(world, timedelta(seconds=902), 1)
    store = connect("store", conn_type="sqlite", host=str(tmp_path / "store.db"))
    TopologyInstallOperator(task_id="install", conn_id=store).execute({})
    plan(world, timedelta(days=365), 20, store_conn_id=store)
    log = capsys.readouterr().out
    assert "0 at once, 20 through the store" in log
    assert "delay queues" not in log


def test_the_hook_estimates_without_asking_sqs(connect):
    hook = SqsDelayHook(connect("nowhere", **sqs.connection("http://127.0.0.1:1")))
    assert hook.estimate(timedelta(days=365), price=0.0000005) == pytest.approx(0.03504)
    assert hook.estimate(timedelta(minutes=15), price=0.0000005) == 0
