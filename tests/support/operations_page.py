"""The operations page as Airflow mounts it, with Airflow's own login and a user of each role."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from airflow.models.dag import DagModel
from airflow.models.dag_version import DagVersion
from airflow.models.dagbundle import DagBundleModel
from airflow.models.dagcode import DagCode
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.team import Team
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import LazyDeserializedDAG
from airflow.utils.session import create_session
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import delete

from airflow_delayed.ui.app import create
from airflow_delayed.ui.hook_pool import HookPool
from support.lengths import LONG
from support.stores import DATABASES, Store
from support.table_pools import FilePool, ServerPool, TablePool

ROLES = ("viewer", "user", "op", "admin")
PREFIX = "/delayed-deliveries"


class Page:
    """Asks the page as a user of one role; as nobody, unless ``role`` is given."""

    def __init__(self, client: TestClient, tokens: dict[str, str], pool: HookPool, app: FastAPI) -> None:
        self.pool = pool
        self.app = app
        self._client = client
        self._tokens = tokens

    def ask(self, method: str, path: str, role: str | None = "admin", **options: Any) -> httpx.Response:
        headers = dict(options.pop("headers", {}))
        top = options.pop("top", PREFIX)
        if role is not None:
            headers["Authorization"] = f"Bearer {self._tokens[role]}"
        self._client.cookies.clear()
        return self._client.request(method, top + path, headers=headers, **options)

    def add_user(self, name: str, role: str, teams: list[str]) -> None:
        """Log a user in who is a member of teams; ``name`` is a role from now on."""
        from airflow.api_fastapi.app import get_auth_manager
        from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

        user = SimpleAuthManagerUser(username=name, role=role, teams=teams)
        self._tokens[name] = get_auth_manager().generate_jwt(user)

    def cookie(self, role: str) -> dict[str, str]:
        """The cookie that a browser has."""
        return {"Cookie": f"_token={self._tokens[role]}"}

    def get(self, path: str, role: str | None = "admin", **query: Any) -> Any:
        """The answer to a question that is expected to go well."""
        answer = self.ask("GET", path, role, params={name: one for name, one in query.items() if one is not None})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, role: str | None = "admin", **body: Any) -> Any:
        answer = self.ask("POST", path, role, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def error(self, method: str, path: str, role: str | None = "admin", **options: Any) -> tuple[int, str]:
        """Status and code of a fault."""
        answer = self.ask(method, path, role, **options)
        assert answer.status_code >= 400, answer.text
        return answer.status_code, answer.json()["error"]["code"]


#: Tokens by role, while a page is served; a second page has the login of the first.
_TOKENS: dict[str, str] = {}


@contextmanager
def serving(folder: Path, pool: HookPool | None = None) -> Iterator[Page]:
    """Serve the page with a user of each role; the configuration is in the environment already."""
    from airflow.api_fastapi.app import init_auth_manager, purge_cached_app

    alone = not _TOKENS
    passwords = {role: secrets.token_hex() for role in ROLES}
    if alone:
        file = folder / "passwords.json"
        file.write_text(json.dumps(passwords))
        os.environ.update(
            AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS=",".join(f"{role}:{role}" for role in ROLES),
            AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE=str(file),
            AIRFLOW__API_AUTH__JWT_SECRET=secrets.token_hex(32),
        )
    # a user's five seconds may not be enough for a machine that runs tests
    root, pool = FastAPI(), pool or HookPool(seconds=60)
    init_auth_manager(root)
    root.mount(PREFIX, create(pool))
    try:
        with TestClient(root) as client:
            if alone:
                _TOKENS.update({role: _token(client, role, password) for role, password in passwords.items()})
            yield Page(client, _TOKENS, pool, root)
    finally:
        pool.close()
        if alone:
            _TOKENS.clear()
            purge_cached_app()


def _token(client: TestClient, role: str, password: str) -> str:
    answer = client.post("/auth/token", json={"username": role, "password": password})
    assert answer.status_code == 201, answer.text
    return answer.json()["access_token"]


@contextmanager
def dags(*dags: DAG, team: str | None = None, paused: bool = False) -> Iterator[None]:
    """Let Airflow know DAGs, with their tasks, until the block ends.

    :param team: the team that has them; with none they are nobody's.
    """
    bundle = f"bundle_{uuid4().hex[:8]}"
    ids = [dag.dag_id for dag in dags]
    with create_session() as session:
        made = DagBundleModel(name=bundle)
        session.add(made)
        session.flush()
        made.teams = [] if team is None else [session.get(Team, team)]
        session.add_all(DagModel(dag_id=name, bundle_name=bundle, is_paused=paused, fileloc="x") for name in ids)
        session.flush()
        for dag in dags:
            SerializedDagModel.write_dag(LazyDeserializedDAG.from_dag(dag), bundle, session=session)
    yield
    with create_session() as session:
        for model in (SerializedDagModel, DagCode, DagVersion, DagModel):
            session.execute(delete(model).where(model.dag_id.in_(ids)))
        gone = session.get(DagBundleModel, bundle)
        gone.teams = []
        session.delete(gone)


@pytest.fixture(name="store", params=DATABASES if LONG else ["sqlite"])
def own_store_fixture(request: pytest.FixtureRequest, connect: Callable[..., str], tmp_path: Path) -> Iterator[Store]:
    """A store in a database of its own: the page shows the tables of a connection's own schema.

    It is above SQL (see support.stores), and installed already.
    """
    conn_id = f"page_{uuid4().hex[:8]}"
    if request.param == "sqlite":
        pool: TablePool = FilePool(tmp_path / "store.db")
        connect(conn_id, conn_type="sqlite", host=str(tmp_path / "store.db"))
    else:
        url = request.getfixturevalue(f"{request.param}_url")
        pool = ServerPool.of(url, request.config, databases=True)
        connect(conn_id, pool.database_url())
    store = Store(conn_id, pool=pool)
    store.installed()
    yield store
    store.close()


#: The page of this process, whichever files ask for it.
_SERVED: list[Page] = []


@pytest.fixture(name="served_page", scope="session")
def served_page_fixture(
    airflow_db: None, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Page:
    if not _SERVED:
        running = ExitStack()
        pytestconfig.add_cleanup(running.close)
        _SERVED.append(running.enter_context(serving(tmp_path_factory.mktemp("page"))))
    return _SERVED[0]


@pytest.fixture(name="page")
def page_fixture(served_page: Page, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """The page of one store."""
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_STORES", store.conn_id)
    yield served_page
    served_page.pool.close()
