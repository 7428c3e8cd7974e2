"""Which run of a task stored a message: what makes two of them one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.identity import MAX_NAME, Origin

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=4)
ORIGINS = st.builds(Origin, dag_id=NAMES, run_id=NAMES, task_id=NAMES, map_index=st.integers(-1, 20))


@given(ORIGINS, ORIGINS)
def test_different_runs_have_different_digests(one, other):
    assert len(one.digest) == 16
    assert (one == other) == (one.digest == other.digest)


def test_the_digest_is_fixed():
    """Another one would find no run that was noted before."""
    one = Origin(dag_id="d", run_id="scheduled__2030-01-01T00:00:00+00:00", task_id="send")
    assert one.digest.hex() == "7b9dd2bbac5fd0527c2e829eb5027081"


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1), "a\0b"])
@pytest.mark.parametrize("field", ["dag_id", "run_id", "task_id"])
def test_a_name_fits_its_column(field, name):
    if (field, name) == ("task_id", ""):
        # the run itself
        assert Origin(dag_id="d", run_id="r", task_id="").task_id == ""
        return
    with pytest.raises(ValueError, match=f"{field} must have 1 to 250 characters"):
        Origin(**{"dag_id": "d", "run_id": "r", "task_id": "t", field: name})
