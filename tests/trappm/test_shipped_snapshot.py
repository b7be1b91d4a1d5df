"""The snapshot that ships with the package."""

import json
import re
from importlib.resources import files


def test_the_shipped_snapshot_names_the_clean_commit_that_trained_it():
    manifest = files("trappm").joinpath("shipped_snapshot", "manifest.json").read_text()
    assert re.fullmatch("[0-9a-f]{12}", json.loads(manifest)["versions"]["commit"])
