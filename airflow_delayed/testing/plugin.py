"""The pytest plugin. Until a test asks for its fixture it imports nothing of Airflow, or of this package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from airflow_delayed.testing.delayed import Delayed


@pytest.fixture
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Delayed]:
    """What your DAG sends, without a broker: see :class:`airflow_delayed.testing.delayed.Delayed`."""
    from airflow_delayed.testing.stand_ins import played

    with pytest.MonkeyPatch.context() as patch:
        yield played(patch, tmp_path_factory.mktemp("delayed"))
