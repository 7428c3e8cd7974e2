"""One demo for the browser tests of the page: Airflow as it is live, with messages in every state."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import demo_ui
import pytest
from support.browsed_page import Site

from acceptance.conftest import Site as Browser
from acceptance.conftest import World


@pytest.fixture(scope="package")
def site(world: World, airflow_ui: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    pictures = tmp_path_factory.mktemp("pictures")
    broker = urlsplit(world.broker.url)._replace(path="/" + quote(world.broker.name, safe="")).geturl()
    demo = demo_ui.Demo(world.live, world.reminders.parent, broker)
    run = demo_ui.fill(demo)
    yield Site(world, demo, run, airflow_ui, pictures)
    # other tests count what the store holds
    world.empty_store()
    if wanted := os.environ.get("SCREENSHOTS"):
        Path(wanted).mkdir(parents=True, exist_ok=True)
        for picture in pictures.glob("*.png"):
            shutil.copy(picture, wanted)
