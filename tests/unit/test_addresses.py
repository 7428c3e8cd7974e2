"""Addresses are shown without logins, queries and fragments, in logs, errors and lineage alike."""

from __future__ import annotations

import io
import json
from urllib.parse import quote

import pytest
from airflow.sdk.exceptions import AirflowFailException
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed import lineage
from airflow_delayed.addresses import is_secret, secrets_of, shown, without_secrets
from airflow_delayed.errors import InputError, SourceError
from airflow_delayed.intake.columns import ColumnRules
from airflow_delayed.intake.sources import Rejects, open_source


@pytest.mark.parametrize(
    ("url", "wanted", "secrets"),
    [
        ("/data/me:hush@x?y", "/data/me:hush@x?y", []),
        ("/data/me:hush@x", "/data/me:hush@x", []),
        ("s3://conn_id@bucket/a?b=c", "s3://bucket/a", []),
        ("data/day=1", "data/day=1", []),
        ("s3://aws_default@bucket/a", "s3://bucket/a", []),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c", []),
        ("s3://aws_default@bucket/a@b/c", "s3://bucket/a@b/c", []),
        ("hdfs://name:8020/a/b", "hdfs://name:8020/a/b", []),
        ("abfss://box@account.dfs.core.windows.net/a", "abfss://box@account.dfs.core.windows.net/a", []),
        ("sftp://me:hush@host:22/rows", "sftp://host:22/rows", ["hush"]),
        ("sftp://me:hu/sh@host/rows", "sftp://host/rows", ["hu/sh"]),
        ("sftp://me:hu@sh@host/rows", "sftp://host/rows", ["hu@sh"]),
        ("sftp://me:hu?s#h@host/rows", "sftp://host/rows", ["hu?s#h"]),
        ("sftp://me:hu%2Fsh@host/rows", "sftp://host/rows", ["hu%2Fsh", "hu/sh"]),
        ("https://hush@host/rows", "https://host/rows", ["hush"]),
        ("https://host/rows?sv=1&sig=hush", "https://host/rows", ["hush"]),
        ("https://host/rows?X-Amz-Date=1&X-Amz-Signature=hush#x", "https://host/rows", ["hush"]),
        ("https://host/rows#access_token=hush", "https://host/rows", ["hush"]),
        ("simplecache::https://me:hush@host/rows", "simplecache::https://host/rows", ["hush"]),
        ("zip://a.jsonl::https://host/z.zip?sig=hush", "zip://a.jsonl::https://host/z.zip", ["hush"]),
        ("jdbc:postgresql://host/db?user=me&password=hush", "jdbc:postgresql://host/db", ["hush"]),
        ("jdbc:sqlserver://host:1433;user=me;password=hush", "jdbc:sqlserver://host:1433", ["hush"]),
        ("jdbc:oracle:thin:me/hush@//host:1521/db", "jdbc:***", ["hush"]),
        ("https://host/rows;jsessionid=hush", "https://host/rows", ["hush"]),
        ("https://host/a;jsessionid=hush/b;v=1?c=d", "https://host/a/b", ["hush"]),
        ("https://host/token/hush/rows.jsonl", "https://host/token/***/rows.jsonl", ["hush"]),
        ("https://host/services/T0/hushDb3dE5fG7hI9jK1l/x", "https://host/services/T0/***/x", ["hushDb3dE5fG7hI9jK1l"]),
        ("https://host/bot12:hush-DEF12_ghIkl-zyx5/a", "https://host/***/a", ["bot12:hush-DEF12_ghIkl-zyx5"]),
        ("https://host/eyJhdQ.eyJhushQ.hush_/rows", "https://host/***/rows", ["eyJhdQ.eyJhushQ.hush_"]),
        ("https://host/keys/part-0.parquet", "https://host/keys/part-0.parquet", []),
        ("s3://bucket/token/hush;v=1/x", "s3://bucket/token/hush;v=1/x", []),
    ],
)
def test_what_is_shown_and_what_is_secret(url, wanted, secrets):
    assert shown(url) == wanted
    assert [secret for secret in secrets_of(url) if "hu" in secret] == secrets
    for secret in secrets:
        assert secret not in without_secrets(f"403 for {url!r}, of me:{secret}", url)


PASSWORDS = st.text("abcXYZ019/@:?#&=%+ .~", min_size=4, max_size=12)


@given(PASSWORDS, st.sampled_from(["sftp", "https", "s3", "ftp", "simplecache::ftp"]), st.booleans())
def test_no_password_is_shown_whatever_it_is_made_of(password, scheme, quoted):
    url = f"{scheme}://user:{quote(password, safe='') if quoted else password}@host.example/the/path.jsonl"
    assert shown(url) == f"{scheme}://host.example/the/path.jsonl"
    found = lineage.file(url.removeprefix("simplecache::"))
    assert (found.namespace.partition("://")[2], found.name) == ("host.example", "the/path.jsonl")
    assert password not in without_secrets(f"cannot open {url}: {password}", url).replace(shown(url), "")


@pytest.mark.parametrize(
    "name",
    [
        *("password", "PASSWORD", "dbPassword", "passwd", "pwd", "token", "session_token", "sessionToken", "secret"),
        *("fs.s3a.secret.key", "key", "apiKey", "access_key", "sas", "sig", "X-Amz-Signature", "credentials"),
        *("PGPASSWORD", "DBPASSWORD", "userpassword", "dbpass", "jwt", "auth", "basicAuth", "cookie"),
        *("connectionString", "connection_string", "conn_str", "clientsecret", "accesstoken", "storagekey"),
        *("jsessionid", "hmac"),
        *("private-key", "ssl.keystore.password", "kafka.sasl.jaas.config", "authorization", "pem_private_key"),
    ],
)
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("header", "user", "url", "dbtable", "keyspace", "partitionColumn", "multiLine", "monkey", "tokenizer"),
        *("bypass", "compass", "authType", "auth_mechanism", "author", "cookiePolicy", "connection", "stringtype"),
        *("credentialsFile", "privateKeyFile", "ssl.keystore.location", "key.deserializer", "recordKeyField", ""),
    ],
)
def test_names_of_other_things(name):
    assert not is_secret(name)


class Signed(MemoryFileSystem):
    """As the file system for HTTP: its paths are whole URLs."""

    protocol = "signed"
    cachable = False
    content = b""

    @classmethod
    def _strip_protocol(cls, path):
        return path

    def info(self, path, **options):
        return {"name": path, "size": len(self.content), "type": "file", "ETag": "1"}

    def exists(self, path, **options):
        return True

    def isdir(self, path):
        return False

    def _open(self, path, mode="rb", **options):
        raise OSError(f"403, message='Forbidden', url='{path}'")


HEX = "0123456789abcdef" * 2
PART = "part-00000-2cd5c5ea-77d4-4c4c-8f2f-0d3ffe1d4f9d-c000.snappy.parquet"


def test_parts_of_a_path_that_may_be_tokens_are_shown_nowhere():
    url = f"https://host/feeds/{HEX}/{PART}"
    assert shown(url) == f"https://host/feeds/***/{PART}"
    assert lineage.file(url).name == f"feeds/***/{PART}"
    assert HEX not in without_secrets(f"404, message='Not Found', url='{url}' ({HEX})", url)
    # of a store's keys none is one
    assert shown(f"s3://bucket/{HEX}") == f"s3://bucket/{HEX}"


SIGNED = "https://me:hush@host/rows.jsonl?sv=1&sig=hush"


def test_errors_of_a_signed_source_do_not_show_the_signature():
    source = open_source(Signed(), SIGNED, shown_as=shown(SIGNED))
    with pytest.raises(SourceError, match=r"https://host/rows\.jsonl cannot be read") as caught:
        list(source.batches(ColumnRules()))
    assert "hush" not in str(caught.value)


def test_rows_and_rejects_of_a_signed_source_do_not_show_the_signature(monkeypatch):
    content = json.dumps({"value": "x"}).encode()
    monkeypatch.setattr(Signed, "_open", lambda self, path, mode="rb", **options: io.BytesIO(content))
    (batch,) = open_source(Signed(), SIGNED, shown_as=shown(SIGNED)).batches(ColumnRules())
    assert batch.place(0) == "https://host/rows.jsonl row 1"
    with pytest.raises(InputError, match=r"rejects=https://host/rows\.jsonl is there already") as caught:
        Rejects(Signed(), SIGNED, "run")
    assert "hush" not in str(caught.value)


def test_a_scheme_that_nothing_opens_is_named_without_the_login(run):
    with pytest.raises(AirflowFailException, match="nonsense://host/rows cannot be opened") as caught:
        run.execute(source="nonsense://me:hush-hush@host/rows")
    assert "hush" not in str(caught.value)
    source_error = caught.value.__cause__
    assert isinstance(source_error, SourceError)
    assert source_error.__cause__ is None


def test_what_others_log_of_an_address_is_masked_in_the_tasks_log(run):
    from airflow.sdk.log import redact

    with pytest.raises(AirflowFailException, match="memory://host/rows"):
        run.execute(source="memory://me:hush-of-mine@host/rows?sig=hush-signed")
    assert redact("GET /rows?sig=hush-signed as me:hush-of-mine") == "GET /rows?sig=*** as me:***"
