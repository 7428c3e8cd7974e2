"""@task.delayed_send: a function whose messages are sent as the operator would."""

from __future__ import annotations

from datetime import timedelta

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from support.send_runs import NOW

from airflow_delayed.decorators.delayed_send import delayed_send_task
from airflow_delayed.errors import SendFailed
from airflow_delayed.message import DelayedMessage

pytestmark = pytest.mark.usefixtures("spools")


def made(function, *args, decorate=None, **options):
    """The operator of a function, outside of any DAG."""
    options = {"conn_id": "recorder", "destination": "mail", **options}
    return (decorate or delayed_send_task)(**options)(function)(*args).operator


def execute(run, operator, **more):
    run.try_number += 1
    operator.clock = lambda: run.now
    ready = operator.prepare_for_execution()
    context = {**run.context, "ds": "2030-05-06", **more}
    ready.render_template_fields(context)
    return ready.execute(context)


def three():
    for number in range(3):
        yield {"value": f"body {number}", "delay_seconds": 60 + number}


def test_what_a_function_yields_is_sent_and_leaves_nothing_on_the_disk(run, spools):
    assert execute(run, made(three))["sent"] == 3
    assert run.bodies() == ["body 0", "body 1", "body 2"]
    assert run.transport.sent[2].due_at == NOW + timedelta(seconds=62)
    assert list(spools.iterdir()) == []


def test_it_has_the_parameters_that_need_a_store(run):
    with pytest.raises(ValueError, match="until_due=True needs a store"):
        made(three, until_due=True)
    execute(run, made(three, until_due=True, store_conn_id="store"))
    assert (len(run.store.sent), run.transport.sent) == (3, [])


def test_a_list_and_messages_will_do_and_have_the_ids_of_messages(run):
    run.execute(messages=list(three()))
    listed = run.ids()
    run.transport.sent.clear()
    run.states.clear()

    def together():
        return list(three())

    execute(run, made(together))
    assert run.ids() == listed
    run.transport.sent.clear()

    def one():
        return [DelayedMessage(destination="mail", body=b"x", due_at=NOW, message_id="own", headers={"a": "b"})]

    execute(run, made(one))
    [message] = run.transport.sent
    assert (message.message_id, message.headers) == ("own", {"a": "b"})


def test_rows_of_all_kinds_side_by_side(run):
    day = {"delay_seconds": 5, "order": 2**80}

    def kinds():
        yield {"value": {"json": [1]}, **day}
        yield {"body": b"bytes", "due_at": NOW + timedelta(hours=1), "order": "text"}
        yield {"value": "text", "due_at": "2026-03-01T14:00:00", "timezone": "Europe/Berlin", "order": 1.5}
        yield {"value": "zoned", "headers": {"a": "b"}, "delay_seconds": 1.5, "order": 7}

    execute(run, made(kinds, id_columns=["order"]))
    assert run.bodies() == ['{"json":[1]}', "bytes", "text", "zoned"]
    assert [message.due_at - NOW for message in run.transport.sent] == [
        timedelta(seconds=5),
        timedelta(hours=1),
        timedelta(hours=1),
        timedelta(seconds=1.5),
    ]
    ids = run.ids()
    run.transport.sent.clear()
    run.execute(messages=list(kinds()), id_columns=["order"])
    assert run.ids() == ids


def test_the_function_runs_once_in_all_tries_on_a_worker(run, spools):
    calls = []

    def counted():
        calls.append(1)
        yield from three()

    run.max_tries = 1
    run.transport.fail_after = 1
    operator = made(counted, retries=1)
    with pytest.raises(SendFailed):
        execute(run, operator)
    run.transport.fail_after = None
    assert execute(run, operator)["sent"] == 3
    assert len(calls) == 1
    assert list(spools.iterdir()) == []


def test_a_function_that_fails_in_the_middle_sends_nothing(run, spools):
    def fails():
        yield from three()
        raise OSError("the service is away")

    with pytest.raises(OSError, match="the service is away"):
        execute(run, made(fails))
    assert (run.bodies(), list(spools.iterdir())) == ([], [])


def test_a_function_may_skip_its_task(run):
    def skips():
        raise AirflowSkipException("not today")
        yield

    with pytest.raises(AirflowSkipException):
        execute(run, made(skips))


@pytest.mark.parametrize(
    "returned, says",
    [
        (None, "must return a list of messages, or yield them, and returned NoneType"),
        ({"value": "x"}, "returned dict"),
        ("text", "returned str"),
        ([5], "row 1, column message: must be a dictionary or a DelayedMessage, not int"),
        ([{"value": "x"}], "row 1, column fields: no column due_at or delay_seconds"),
        ([{"value": object(), "delay_seconds": 1}], "row 1, column value: must be text, bytes"),
        ([{"value": "x", "delay_seconds": timedelta(1)}], "column delay_seconds: must be a number, not timedelta"),
        ([{"value": "x", "delay_seconds": 1, "headers": {"a": 1}}], "column headers: the value of 'a' must be text"),
        ([{"value": "x", "delay_seconds": 1, "due_at": NOW}], "column delay_seconds: is given, and due_at too"),
        ([{"value": "x", "due_at": "2030-01-01T09:00", "timezone": "Mars"}], "column timezone: 'Mars' is not an IANA"),
        ([{"value": "y" * 101, "delay_seconds": 1}], "is 101 bytes, and the limit is 100"),
    ],
)
def test_what_cannot_be_sent_is_an_error_before_anything_is(run, spools, returned, says):
    def gives():
        return returned

    with pytest.raises(AirflowFailException, match=says):
        execute(run, made(gives))
    assert (run.bodies(), list(spools.iterdir())) == ([], [])


def test_what_is_wrong_when_the_dag_is_parsed():
    with pytest.raises(TypeError, match=r"the function gives the messages .* leave messages= out"):
        made(three, messages=[])

    async def later():
        return []

    with pytest.raises(TypeError, match="must be a plain one"):
        made(later)
    with pytest.raises(ValueError, match="past_due='maybe' is none of"):
        made(three, past_due="maybe")


def test_arguments_are_templates_and_the_context_comes_by_name(run):
    def greet(name, *, ds, again=None):
        yield {"value": f"{name} {ds} {again}", "delay_seconds": 1}

    with DAG("dag", schedule=None):
        operator = made(greet, "{{ ds }}!")
    execute(run, operator)
    assert run.bodies() == ["2030-05-06! 2030-05-06 None"]


def test_parts_are_overridden_given_beforehand_and_expanded(run):
    with DAG("dag", schedule=None) as dag:

        @task.delayed_send(conn_id="recorder", destination="mail", delay=60)
        def greet(name, greeting):
            yield {"value": f"{greeting} {name}"}

        greet.override(task_id="late", delay=3600)("Ada", greeting="Good night")
        greet.partial(greeting="Hello").expand(name=["Bob", "Eve"])

    late = dag.get_task("late")
    assert late.delay == 3600
    execute(run, late)
    mapped = dag.get_task("greet")
    for run.map_index, name in enumerate(["Bob", "Eve"]):
        operator = mapped.prepare_for_execution().unmap({"op_kwargs": {"name": name}})
        operator.clock = lambda: run.now
        operator.execute(run.context)
    assert run.bodies() == ["Good night Ada", "Hello Bob", "Hello Eve"]


def test_another_tasks_result_comes_first():
    with DAG("dag", schedule=None) as dag:

        @task
        def customers():
            return ["Ada"]

        @task.delayed_send(conn_id="recorder", destination="mail", delay=60)
        def greet(names):
            yield from ({"value": name} for name in names)

        greet(customers())
    assert dag.get_task("greet").upstream_task_ids == {"customers"}
    # its messages are not among what Airflow shows
    assert "source" not in dag.get_task("greet").template_fields
