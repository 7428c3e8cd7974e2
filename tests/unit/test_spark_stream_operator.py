"""DelayedSparkSendOperator with a checkpoint: what the job gets, its lease, counts and restarts, without Spark."""

from __future__ import annotations

import json
import logging
import runpy
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.execution_time.context import OutletEventAccessors
from support.recorder import Recorder
from support.send_runs import States, deliver_by
from support.times import by_clock

from airflow_delayed.delivery import TopologyReport
from airflow_delayed.errors import DelayedError, TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin
from airflow_delayed.operators.spark import DelayedSparkSendOperator
from airflow_delayed.operators.spark_stream import StreamCheckpoint
from airflow_delayed.spark.options import settings_of
from airflow_delayed.store.streams import STREAM_LEASE

NOW = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
#: The least that a stream needs.
STREAM = {
    "task_id": "send",
    "conn_id": "broker",
    "source": "/rows",
    "checkpoint": "/c",
    "rejects": "/r",
    "past_due": "send",
}
#: A batch of the job that stands in for Spark's: rows, and when the first is due.
BATCH = (3, "2026-02-01T00:00:00+00:00")


class Job:
    """Takes the application, in place of spark-submit, and leaves what Spark's driver would leave."""

    _should_track_driver_status = _is_yarn_cluster_mode = False

    def __init__(self, operator: DelayedSparkSendOperator, query: str, batches: dict[int, tuple[int, str]]) -> None:
        self.operator = operator
        self._query = query
        self._batches = batches

    def _should_track_driver_via_k8s_api(self) -> bool:
        return False

    def submit(self, application: str) -> None:
        self.args = runpy.run_path(application)["arguments"](self.operator.application_args)
        self.options = dict(self.args.set)
        checkpoint = Path(self.args.checkpoint)
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "metadata").write_text(json.dumps({"id": self._query}))
        counts = Path(self.options["manifest"]) / self._query
        counts.mkdir(parents=True, exist_ok=True)
        (checkpoint / "commits").mkdir(exist_ok=True)
        for number, (rows, due) in self._batches.items():
            summary = {"rows": rows, "sent": rows, "stored": 0, "replaced": 0, "not_replaced": 0, "duplicates": 0}
            summary |= {"skipped": 0, "rejected": 1, "first_due": due, "last_due": due}
            content = {"origin": json.loads(self.options["origin"]), "summary": summary, "destinations": {"mail": rows}}
            (counts / f"{number:09}.json").write_text(json.dumps(content))
            (checkpoint / "commits" / str(number)).touch()


@pytest.fixture
def store(connect, tmp_path: Path) -> Iterator[DelayedStoreHook]:
    connect("broker", conn_type="rabbitmq", host="nowhere.invalid")
    connect("db", conn_type="sqlite", host=str(tmp_path / "store.db"))
    with closing(DelayedStoreHook("db", "broker")) as made:
        made.install([])
        yield made


@pytest.fixture
def run(store: DelayedStoreHook, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[dict, Job]]:
    deliver_by(
        monkeypatch,
        lambda conn_id, **options: Recorder("broker"),
        lambda conn_id, deliver, **options: DelayedStoreHook(conn_id, deliver, **options),
    )

    def execute(
        run_id: str = "r", of: str = "q1", batches: dict | None = None, **arguments: Any
    ) -> tuple[dict[str, Any], Job]:
        ti = SimpleNamespace(dag_id="d/1", run_id=run_id, task_id="send", map_index=2, max_tries=0, try_number=1)
        ti.xcom_push = lambda key, value: None
        context = {"ti": ti, "task_state_store": States(), "outlet_events": OutletEventAccessors()}
        given = {**STREAM, "checkpoint": str(tmp_path / "streams"), "rejects": str(tmp_path / "rejects")}
        operator = DelayedSparkSendOperator(**{"store_conn_id": "db", **given, **arguments})
        by_clock(operator, lambda: NOW)
        job = operator._hook = Job(operator, of, {0: BATCH} if batches is None else batches)
        return operator.execute(context), job

    return execute


def test_the_job_gets_a_checkpoint_of_its_dag_task_and_map_index(run, tmp_path: Path) -> None:
    summary, job = run(
        destination="mail",
        delay="PT30M",
        delay_from="clicked_at",
        max_future=timedelta(days=30),
        past_due="send",
        until_due=True,
        id_columns="cart",
        query="SELECT * FROM source",
    )
    folder = str(tmp_path / "streams/d%2F1/send/2/0")
    assert (job.args.checkpoint, job.args.source) == (f"{folder}/checkpoint", "/rows")
    settings = settings_of(job.options, NOW, stream=True)
    assert (settings.manifest, settings.attempts) == (f"{folder}/counts", f"{folder}/attempts")
    assert (settings.rejects, settings.max_future) == (str(tmp_path / "rejects"), timedelta(days=30))
    assert (settings.rules.delay_from, settings.rules.delay) == ("clicked_at", timedelta(minutes=30))
    assert (settings.past_due, settings.until_due, settings.rules.id_columns) == ("send", True, ("cart",))
    assert (summary["rows"], summary["sent"], summary["rejected"]) == (3, 3, 1)
    assert summary["first_due"] == BATCH[1]


def test_the_batches_of_all_tries_of_a_run_are_added_up(run) -> None:
    run("yesterday", batches={0: (50, "2026-01-01T00:00:00+00:00")})
    with pytest.raises(TypeError):
        # a job that fails after a batch
        run("today", batches={1: BATCH, 2: None})
    summary, _ = run("today", batches={2: (4, "2026-02-02T00:00:00+00:00")})
    assert (summary["rows"], summary["rejected"]) == (7, 2)
    assert (summary["first_due"], summary["last_due"]) == (BATCH[1], "2026-02-02T00:00:00+00:00")
    # nothing is new
    summary, _ = run("tomorrow", batches={})
    assert (summary["rows"], summary["first_due"]) == (0, None)


def test_destinations_beyond_those_that_a_batch_names_are_counted(store: DelayedStoreHook, tmp_path: Path) -> None:
    origin = Origin(dag_id="d", run_id="r", task_id="send", map_index=-1)
    stream = StreamCheckpoint(str(tmp_path), origin, b"f" * 16, store, log=logging.getLogger("test"), lost=list)
    counts = tmp_path / "counts/q1"
    counts.mkdir(parents=True)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/metadata").write_text('{"id": "q1"}')
    summary = {"rows": 1, "first_due": None, "last_due": None}
    for number, more in enumerate(({"other_destinations": 7}, {})):
        content = {"origin": origin.to_json(), "summary": summary, "destinations": {"mail": 1}, **more}
        (counts / f"{number:09}.json").write_text(json.dumps(content))
    found = stream.counts(str(tmp_path))
    assert (found["destinations"], found["other_destinations"], found["batches"]) == ({"mail": 2}, 7, 2)


def test_what_a_killed_driver_left_unfinished_is_no_batch(run) -> None:
    _, job = run(batches={0: BATCH})
    Path(job.options["manifest"], "q1", "000000001.json.1a2b.unfinished").write_text("{")
    summary, _ = run(batches={2: BATCH})
    assert summary["rows"] == 6


def test_a_checkpoint_that_this_machine_does_not_see(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(self: Job, application: str) -> None:
        """Stand for a driver on another machine, whose disk has the checkpoint."""

    monkeypatch.setattr(Job, "submit", elsewhere)
    with pytest.raises(DelayedError, match=r"its checkpoint is not at .*give checkpoint= a URL that both can open"):
        run()


def test_a_broker_that_cannot_be_reached_from_here(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(self: Recorder, destinations: Iterable[str], **options: object) -> TopologyReport:
        raise TransportUnavailable("connection 'broker': no route to host")

    monkeypatch.setattr(Recorder, "verify", verify)
    assert run()[0]["rows"] == 3


def test_a_checkpoint_that_is_lost_is_an_error_until_the_stream_is_restarted(
    run, store: DelayedStoreHook, tmp_path: Path
) -> None:
    _, job = run()
    metadata = Path(job.args.checkpoint, "metadata")
    metadata.rename(tmp_path / "kept")
    with pytest.raises(AirflowFailException, match="is missing, and the store knows query q1 there") as caught:
        run("next")
    place = str(caught.value).rpartition(" ")[2]
    # brought back, it goes on
    (tmp_path / "kept").rename(metadata)
    run("next")
    metadata.write_text('{"id": "q9"}')
    with pytest.raises(AirflowFailException, match="is that of query q9, and the store knows query q1"):
        run("another")
    assert not store.restart_stream("elsewhere")
    assert store.restart_stream(place, actor="ann", because="moved")
    _, job = run("again", of="q2")
    assert job.args.checkpoint == f"{place}/1/checkpoint"
    (audited,) = store.audit()
    assert (audited.action, audited.who, audited.because) == ("stream-restart", "ann", "moved")
    assert audited.selection == {"stream": place}


def test_the_checkpoint_of_another_source_or_query_is_an_error(run) -> None:
    run(query="SELECT * FROM source")
    for other in ({"query": "SELECT 1 FROM source"}, {"source": "/others", "query": "SELECT * FROM source"}):
        with pytest.raises(AirflowFailException, match=r"is that of another source or query\..* stream-restart"):
            run(**other)
    # in other lines
    run(query="SELECT *\n  FROM source")


def test_a_query_is_corrected_that_has_not_sent_a_batch(run) -> None:
    with pytest.raises(TypeError):
        run(query="SELECT wrong FROM source", batches={0: None})
    run(query="SELECT * FROM source")
    with pytest.raises(AirflowFailException, match="is that of another source or query"):
        run(query="SELECT 1 FROM source")


def test_one_task_at_a_time_runs_a_stream(run, store: DelayedStoreHook, tmp_path: Path) -> None:
    place = str(tmp_path / "streams/d%2F1/send/2")
    now, held = 0.0, store.take_stream(place, "another")
    assert held is not None

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    def checkpoint(sleep: Callable[[float], None]) -> StreamCheckpoint:
        origin = Origin(dag_id="d/1", run_id="r", task_id="send", map_index=2)
        log, options = logging.getLogger("test"), {"sleep": sleep, "monotonic": lambda: now}
        return StreamCheckpoint(str(tmp_path / "streams"), origin, b"f" * 16, store, log=log, lost=list, **options)

    with pytest.raises(DelayedError, match="another task runs the stream of"), checkpoint(wait).leased():
        pass
    # as long as the lease of a worker that was killed
    assert now > STREAM_LEASE.total_seconds()
    assert not store.restart_stream(place)
    # the other one ends meanwhile
    with checkpoint(lambda seconds: store.release_stream(place, "another", held)).leased() as folder:
        assert folder == f"{place}/0"
        assert not store.renew_stream(place, "another")
    run()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"rejects": None}, "a stream needs rejects=, a folder for rows"),
        ({"invalid_rows": "fail"}, "a stream needs rejects=, a folder for rows"),
        ({"rejects": None, "invalid_rows": "fail", "past_due": "fail"}, "would fail for ever"),
        ({"past_due": None}, "needs past_due=: after an outage"),
        ({"check_first": True, "dry_run": True}, "has no check_first= or dry_run="),
        ({"manifest": "/m"}, "has no manifest="),
        ({"source": None, "query": "SELECT 1"}, "a stream reads table= or source="),
        ({"delay": 60}, "counts from a column, which delay_from= has to name"),
        ({"checkpoint": None}, "are for a stream; give checkpoint= too"),
        ({"checkpoint": "s3://key:hush@bucket/c"}, "is an address with a login"),
    ],
)
def test_arguments_that_a_stream_cannot_have(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DelayedSparkSendOperator(**{**STREAM, **arguments})


def test_a_template_of_a_folder_that_renders_to_nothing(run) -> None:
    for name in ("checkpoint", "rejects"):
        with pytest.raises(AirflowFailException, match=name):
            run(**{name: ""})


def test_without_a_store_airflow_keeps_one_task_at_a_time() -> None:
    assert DelayedSparkSendOperator(**STREAM).max_active_tis_per_dag == 1
    assert DelayedSparkSendOperator(**STREAM, store_conn_id="db").max_active_tis_per_dag is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"tag": "{{ ds }}"},
        {"destination": "{% if true %}mail{% endif %}"},
        {"headers": {"day": "{{ ds }}"}},
        {"headers": "{{ var.json.headers }}"},
        {"expires_at": "{{ data_interval_end }}"},
        {"due_at": "{{ data_interval_end }}"},
        {"delay": "{{ var.value.delay }}", "delay_from": "clicked_at"},
    ],
)
def test_what_stands_in_a_message_is_no_template(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))}= of a stream .* cannot be a template"):
        DelayedSparkSendOperator(**STREAM, **arguments)


def test_what_stands_in_a_message_is_no_result_of_another_task() -> None:
    with DAG("d"):
        first = task(task_id="first")(lambda: {"day": "1"})()
        for number, arguments in enumerate(({"headers": first}, {"headers": {"day": first}}, {"tag": first})):
            with pytest.raises(ValueError, match="cannot be a template or the result of another task"):
                DelayedSparkSendOperator(**{**STREAM, "task_id": f"send{number}"}, **arguments)
        # a batch is sent with what its own run says
        DelayedSparkSendOperator(task_id="batch", conn_id="broker", source="/rows", headers=first, tag="{{ ds }}")
