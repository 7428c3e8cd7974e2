"""What `make test-newest` does around its tests: it refuses, removes, records and compares."""

from __future__ import annotations

from pathlib import Path

import newest
import pytest
from newest import Problem, Result


def test_its_record_is_what_it_reads():
    assert newest.write(newest.read(newest.RECORD.read_text())) == newest.RECORD.read_text()


@pytest.mark.parametrize(
    ("result", "good", "says"),
    [
        (Result("4.3.6", 100, 1), True, "as recorded"),
        (Result("4.4.0", 100, 1), True, "other than recorded"),
        (Result("4.3.6", 101, 0), True, "other than recorded"),
        (Result("4.3.6", 99, 1), False, "WORSE than recorded"),
        (Result("4.4.0", 100, 2, failures=("tests.test_x",)), False, "WORSE than recorded"),
        (Problem("Debian sid has no package rabbitmq-server any more"), False, "no package rabbitmq-server"),
    ],
)
def test_nothing_may_be_worse_than_recorded(result: Result | Problem, good: bool, says: str):
    lines, was_good = newest.compare({"RabbitMQ": result}, {"RabbitMQ": Result("4.3.6", 100, 1, "2026-11-22")})
    assert was_good is good
    assert says in lines[0]
    assert lines[1:] == [f"  failed: {name}" for name in getattr(result, "failures", ())]


def test_what_was_never_recorded_must_not_fail():
    assert newest.compare({"RabbitMQ": Result("4.3.6", 100)}, {})[1]
    assert not newest.compare({"RabbitMQ": Result("4.3.6", 100, 1)}, {})[1]


def test_a_folder_is_not_removed_while_something_is_mounted_in_it(tmp_path: Path, monkeypatch):
    folder, mounts = tmp_path / "a sid", tmp_path / "mountinfo"
    (folder / "dev").mkdir(parents=True)
    place = str(folder).replace(" ", r"\040")
    mounts.write_text(
        "24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw\n"
        f"98 27 0:6 / {place}beside rw,relatime - tmpfs tmpfs rw\n"
        f"99 27 0:6 / {place}/dev rw,relatime - devtmpfs devtmpfs rw\n"
    )
    found = newest.mounted_below(folder, mounts)
    assert found == [f"{folder}/dev"]
    with monkeypatch.context() as patch:
        patch.setattr(newest, "mounted_below", lambda _: found)
        with pytest.raises(SystemExit, match="Please unmount it first"):
            newest.remove(folder)
    assert (folder / "dev").exists()
    newest.remove(folder)
    assert not folder.exists()
