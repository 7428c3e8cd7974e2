"""The operations page as Airflow mounts it, with Airflow's own login and a user of each role."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient

from airflow_delayed.ui.app import create
from airflow_delayed.ui.asking import Asking

ROLES = ("viewer", "user", "op", "admin")
PREFIX = "/delayed-deliveries"


class Page:
    """Asks the page as a user of one role; as nobody, unless ``role`` is given."""

    def __init__(self, client: TestClient, tokens: dict[str, str]) -> None:
        self._client = client
        self._tokens = tokens

    def ask(self, method: str, path: str, role: str | None = "admin", **options: Any) -> httpx.Response:
        headers = dict(options.pop("headers", {}))
        if role is not None:
            headers["Authorization"] = f"Bearer {self._tokens[role]}"
        self._client.cookies.clear()
        return self._client.request(method, PREFIX + path, headers=headers, **options)

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


@contextmanager
def serving(folder: Path, asking: Asking | None = None) -> Iterator[Page]:
    """Serve the page with a user of each role; the configuration is in the environment already."""
    from airflow.api_fastapi.app import init_auth_manager, purge_cached_app

    passwords = {role: secrets.token_hex() for role in ROLES}
    file = folder / "passwords.json"
    file.write_text(json.dumps(passwords))
    os.environ.update(
        AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS=",".join(f"{role}:{role}" for role in ROLES),
        AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE=str(file),
        AIRFLOW__API_AUTH__JWT_SECRET=secrets.token_hex(32),
    )
    root, asking = FastAPI(), asking or Asking()
    init_auth_manager(root)
    root.mount(PREFIX, create(asking))
    try:
        with TestClient(root) as client:
            tokens = {}
            for role, password in passwords.items():
                answer = client.post("/auth/token", json={"username": role, "password": password})
                assert answer.status_code == 201, answer.text
                tokens[role] = answer.json()["access_token"]
            yield Page(client, tokens)
    finally:
        asking.close()
        purge_cached_app()
