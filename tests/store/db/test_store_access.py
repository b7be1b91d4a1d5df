"""Another process reaches the store as this one does, and what it is given prints as nothing."""

import logging
import pickle
import secrets
import traceback
from functools import partial

import pytest
from guarded_postgresql import PASSWORD, guard

from trappm.profiler.errors import StoreError
from trappm.store import Home, Patience, Store, StoreAccess
from trappm.store.engine import make_engine
from trappm.store.transactions import IMPATIENT


@pytest.fixture
def guarded(postgresql_server, monkeypatch):
    """Of a database that asks for a password, which no URL has."""
    url = guard(postgresql_server, f"guarded_{secrets.token_hex(4)}")
    text = url.render_as_string(hide_password=False)
    assert PASSWORD not in text
    monkeypatch.setenv("TRAPPM_DATABASE", text)
    return text


def test_database_passwords_are_passed_to_workers(guarded, monkeypatch, tmp_path):
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    handed_on = pickle.dumps(StoreAccess.of(Home(tmp_path)))
    monkeypatch.setenv("PGPASSWORD", "that of another node")
    monkeypatch.setenv("PGOPTIONS", "-c no_such_setting=1")  # nor does this belong to the store
    with pytest.raises(StoreError):
        Store.open(guarded, IMPATIENT)
    with Store.open(pickle.loads(handed_on).take_over(), IMPATIENT) as store:  # noqa: S301
        assert store.campaigns.all() == []


def test_a_password_file_is_read_before_access_is_passed_on(guarded, monkeypatch, tmp_path):
    file = tmp_path / "pgpass"
    file.write_text(f"*:*:*:guarded:{PASSWORD}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    access = StoreAccess.of(Home(tmp_path))
    monkeypatch.delenv("PGPASSFILE")
    with pytest.raises(StoreError, match="password"):
        Store.open(guarded, IMPATIENT)
    with Store.open(access.take_over(), IMPATIENT) as store:
        assert store.campaigns.all() == []


def test_printed_access_shows_no_password(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAPPM_DATABASE", f"postgresql://me:{PASSWORD}@host/labels")
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    access = StoreAccess.of(Home(tmp_path))
    assert PASSWORD in access.url
    assert PASSWORD in access.variables["PGPASSWORD"]
    for text in (repr(access), str(access), f"{access}", repr([access])):
        assert PASSWORD not in text


def test_addresses_in_the_form_of_libpq_are_accepted(monkeypatch, tmp_path):
    url = "postgres://me@host/labels"
    assert make_engine(url).dialect.name == "postgresql"
    monkeypatch.setenv("TRAPPM_DATABASE", url)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert StoreAccess.of(Home(tmp_path)).variables["PGPASSWORD"] == PASSWORD


SECRET = "pa55/word of?mine#1"  # noqa: S105
QUOTED = "pa55%2Fword%20of%3Fmine%231"
NO_SERVER = "/tmp/no-such-folder"


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://guarded:{0}@/labels?host={folder}",
        "postgresql://guarded@/labels?host={folder}&password={0}",
        "postgresql://guarded:{0}@/labels?host={folder}&sslmode=nonsense",
        "postgresql://guarded:{0}@/labels?host={no_server}",
        "postgresql://guarded:{0}@no-host.invalid/labels",
        "postgresql://guarded:{0}@host:port/labels",
        "postgresql://guarded:{0}@too@many/labels",
        "postgresql+no_driver://guarded:{0}@host/labels",
        "postgres ql://guarded:{0}@host/labels",
    ],
)
@pytest.mark.parametrize("secret", [SECRET, QUOTED])
def test_errors_notices_and_logs_show_no_password(postgresql_server, caplog, address, secret):
    caplog.set_level(logging.DEBUG)
    guard(postgresql_server, f"guarded_{secrets.token_hex(4)}")
    folder = postgresql_server.query["host"]
    url = address.format(secret, folder=folder, no_server=NO_SERVER)
    notices, now = [], iter(range(0, 10_000, 250))
    patience = Patience(tell=notices.append, clock=lambda: next(now), sleep=lambda seconds: None)
    with pytest.raises(StoreError) as caught:
        patience(partial(Store.open, url))
    said = "\n".join([*traceback.format_exception(caught.value), *notices, caplog.text])
    assert "pa55" not in said
    assert "\n" not in str(caught.value)
