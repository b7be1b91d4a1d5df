"""`store mend`: it takes away what `store check` finds wrong with labels, and nothing else."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, text
from store_faults import FAULTS, IN_OTHER_WORDS, findings, inject
from store_samples import contents

from trappm import cli
from trappm.store import Store

OF_LABELS = [
    "links without a label",
    "a censored label that was lost",
    "a label of a bound although there is a value",
    "a label that differs from its measurement",
    "a label of another protocol",
    "a censored label with another bound",
]


CASES = [("sqlite", name) for name in OF_LABELS]
CASES += [
    pytest.param("postgresql", name, marks=() if name in IN_OTHER_WORDS else pytest.mark.slow)
    for name in OF_LABELS
]


@pytest.mark.parametrize(("databases", "name"), CASES, indirect=["databases"])
def test_mending_does_what_check_advises(whole_url, name):
    """The faults of labels are gone then, and nothing else is touched."""
    before = rows(whole_url, "SELECT id, measurement_id FROM labels ORDER BY id")
    linked = rows(whole_url, "SELECT assignment_id FROM assignment_labels ORDER BY 1")
    for statement in FAULTS[name][0]:
        inject(whole_url, statement)
    advised = [f for f in findings(whole_url).values() if "trappm store mend" in f.mend]
    assert advised
    status = cli.run(["store", "mend", "--database", whole_url])
    left = findings(whole_url)
    assert status == (1 if left else 0)
    assert left.keys() <= {"assignments done without a label or an attempt"}
    after = rows(whole_url, "SELECT id, measurement_id FROM labels ORDER BY id")
    kept = rows(whole_url, "SELECT assignment_id FROM assignment_labels ORDER BY 1")
    assert (len(after), kept) == (len(before), linked)
    if name == "a label of a bound although there is a value":
        assert after == [*before[:2], (3, 4)]
    elif name not in OF_LABELS[:2] and name != "a label of another protocol":
        assert after == before


def test_mending_a_whole_store_changes_nothing(whole_url):
    before = contents(whole_url)
    with Store.open(whole_url) as store:
        assert vars(store.maintenance.relabel()) == {"wrong": 0, "made": 0}
    assert contents(whole_url) == before


def rows(url, query):
    engine = create_engine(url)
    with engine.connect() as connection:
        records = [tuple(row) for row in connection.execute(text(query))]
    engine.dispose()
    return records
