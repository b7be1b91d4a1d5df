"""Another process reaches the store as this one does, and what it is given prints as nothing."""

import pickle
import secrets

import pytest
from guarded_postgresql import PASSWORD, guard

from trappm.profiler.errors import StoreError
from trappm.store import Home, Store, StoreAccess
from trappm.store.db.retry import IMPATIENT


@pytest.fixture
def guarded(postgresql_server, monkeypatch):
    """Of a database that asks for a password, which no URL has."""
    url = guard(postgresql_server, f"guarded_{secrets.token_hex(4)}")
    text = url.render_as_string(hide_password=False)
    assert PASSWORD not in text
    monkeypatch.setenv("TRAPPM_DATABASE", text)
    return text


def test_what_libpq_reads_goes_along(guarded, monkeypatch, tmp_path):
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    handed_on = pickle.dumps(StoreAccess.of(Home(tmp_path)))
    monkeypatch.setenv("PGPASSWORD", "that of another node")
    monkeypatch.setenv("PGOPTIONS", "-c no_such_setting=1")  # nor does this belong to the store
    with pytest.raises(StoreError):
        Store.open(guarded, IMPATIENT)
    with Store.open(pickle.loads(handed_on).take_over(), IMPATIENT) as store:  # noqa: S301
        assert store.campaigns.all() == []


def test_a_password_file_goes_along(guarded, monkeypatch, tmp_path):
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


def test_it_prints_as_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAPPM_DATABASE", f"postgresql://me:{PASSWORD}@host/labels")
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    access = StoreAccess.of(Home(tmp_path))
    assert PASSWORD in access.url
    assert PASSWORD in access.variables["PGPASSWORD"]
    for text in (repr(access), str(access), f"{access}", repr([access])):
        assert PASSWORD not in text


def test_a_sqlite_store_takes_no_password_along(monkeypatch, tmp_path):
    monkeypatch.delenv("TRAPPM_DATABASE", raising=False)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert StoreAccess.of(Home(tmp_path)).variables == {}
