"""A send in a task loop (Airflow 3.4), by contexts as its worker makes them."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.send_runs import NOW, Run, States

from airflow_delayed.errors import SendFailed
from airflow_delayed.identity import Origin

DUE = [{"value": "the same in each iteration", "due_at": NOW + timedelta(minutes=50)}]


class Loop(Run):
    """The iterations of one task: Airflow tells them apart by ``context["loop"]`` alone, and keeps each one's state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.index, self.region = 1, "region a"
        self._states: dict[tuple[str, int], States] = {}

    @property
    def context(self):
        found = super().context
        found["ti"].region_id = self.region
        states = self._states.setdefault((self.region, self.index), States())
        return {**found, "loop": SimpleNamespace(index=self.index), "task_state_store": states}

    def iterate(self, *indexes: int, **arguments: object) -> None:
        for self.index in indexes:
            self.try_number = 0
            self.execute(**arguments)

    def clear_iterations(self) -> None:
        """Make iterations anew, as Airflow does: other task instances, in another region, at their first try."""
        self.region += "'"


@pytest.fixture
def loop(monkeypatch):
    return Loop(monkeypatch)


def test_three_iterations_that_send_the_same_row_send_three_messages(loop):
    loop.iterate(1, 2, 3, messages=DUE)
    assert (len(loop.ids()), len(set(loop.ids()))) == (3, 3)


def test_a_retry_of_an_iteration_sends_the_same_message(loop):
    loop.transport.fail_after = 0
    with pytest.raises(SendFailed):
        loop.iterate(2, messages=DUE)
    loop.transport.fail_after = None
    loop.execute(messages=DUE)
    again = loop.ids()
    loop.transport.sent.clear()
    loop.clear_iterations()
    loop.iterate(2, messages=DUE)
    assert loop.ids() == again


@pytest.mark.parametrize("on_clear, ids", [("same_ids", 3), ("new_ids", 6)])
def test_iterations_that_a_clear_makes_anew(loop, on_clear, ids):
    loop.iterate(1, 2, 3, messages=DUE, on_clear=on_clear)
    loop.clear_iterations()
    loop.iterate(1, 2, 3, messages=DUE, on_clear=on_clear)
    assert (len(loop.ids()), len(set(loop.ids()))) == (6, ids)


def test_delays_that_count_from_the_try_are_refused_with_the_same_ids(loop):
    relative = [{"value": "x", "delay_seconds": 60}]
    with pytest.raises(AirflowFailException, match="iterations of a task loop"):
        loop.iterate(1, messages=relative)
    loop.iterate(1, messages=relative, delay_from=NOW)
    loop.iterate(2, messages=relative, on_clear="new_ids")
    assert [message.due_at - NOW for message in loop.transport.sent] == [timedelta(seconds=60)] * 2


def test_outside_of_loops_ids_are_what_they_were(loop, monkeypatch):
    run = Run(monkeypatch)
    run.execute(messages=DUE)
    # a golden id: what is stored and in brokers keeps its meaning
    assert run.ids() == ["4ecb113a5e510fe6b0ffe9b474cb5a4e"]


@pytest.mark.parametrize(
    "of_task, digest",
    [
        ({}, "2d883d150c0574b8386e701156f96c91"),
        ({"map_index": 2}, "c8c6392dc6199b807ff06f2691aa52ff"),
        ({"iteration": 2}, "9e2a9f82ca3ee36ffa3db46128dd4dc4"),
    ],
)
def test_a_store_finds_a_run_by_the_same_key_as_before(of_task, digest):
    assert Origin(dag_id="d", run_id="r", task_id="t", **of_task).digest.hex() == digest


def test_each_iteration_has_a_file_of_rejects(loop, tmp_path):
    wrong = [{"value": "x", "due_at": "no time"}]
    loop.iterate(1, 2, messages=wrong, rejects=str(tmp_path / "rejects.jsonl"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rejects-iteration-{n}.jsonl" for n in (1, 2)]
