"""Recorded behavior that a refactoring must not change, and the functions that record it.

Each file next to this module is what one function below returned. Write all of them again, after a
change that is meant to change them, with:

    export PYTHONPATH=.:tests:tests/cluster:tests/learner:tests/profiler/tracing:tests/store
    python tests/golden/golden.py
"""

import contextlib
import csv
import io
import itertools
import json
import lzma
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
DEVICE_KEYS = ("a100-40gb", "v100-16gb", "rtx3090", "cpu-2t")
LABELS = ROOT / "examples/data/h100/sweeps/first.jsonl.xz"


def campaign_rows() -> list[dict[str, Any]]:
    """Return all rows of a store with a campaign that met faults, and with one of each other row.

    Without processes. Names drawn at random are numbered; of a time, only that it is there is kept.
    """
    import sqlalchemy
    from fakes import FakeWorkers, ran
    from store_whole import fill

    from trappm.reports.campaign_facts import campaign_facts
    from trappm.store import Store

    with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{folder}/s.db") as store:
        run = ran(store, FakeWorkers(faults={2: "error", 5: "unstable", 7: "oom"}))
        facts = {"table": "facts", **campaign_facts(store, run.id).to_json()}
        for device in facts["devices"].values():
            del device["attempts_per_minute"]
        fill(store)
        tables = sqlalchemy.MetaData()
        tables.reflect(store.database.engine)
        with store.database.engine.connect() as connection:
            rows = [
                {"table": table.name, **row}
                for table in tables.sorted_tables
                for row in connection.execute(
                    sqlalchemy.select(table).order_by(sqlalchemy.text("rowid"))
                ).mappings()
            ]
        campaign_ids = [campaign.id for campaign in store.campaigns.all()]
    for row in rows:
        row.pop("owner_process", None)
    text = json.dumps([*rows, facts], default=lambda value: type(value).__name__)
    drawn = re.compile("|".join([r"\b[0-9a-f]{32}\b", *campaign_ids]))
    numbers: dict[str, str] = {}
    text = drawn.sub(lambda name: numbers.setdefault(name[0], f"#{len(numbers)}"), text)
    return json.loads(re.sub(r"20\d\d-\d\d-\d\dT[\d:.+Z]+", "time", text))


def label_export() -> list[list[str]]:
    """Return the CSV export of a store that holds the first labels of our H100."""
    with _home() as folder:
        _first_labels(folder / "labels.jsonl")
        _run("labels", "import", str(folder / "labels.jsonl"))
        _run("labels", "export", str(folder / "labels.csv"))
        with (folder / "labels.csv").open(newline="") as file:
            return [*csv.reader(file)]


def json_shapes() -> dict[str, Any]:
    """Return the keys and types of `--json` by command."""
    with _home() as folder:
        _first_labels(folder / "labels.jsonl")
        resnet = ("resnet18", "--batch-size", "4")
        commands = [
            ("predict", *resnet, "--device", "v100"),
            ("compare", *resnet, "--device", "v100", "--device", "a100"),
            ("devices",),
            ("labels", "import", str(folder / "labels.jsonl")),
            ("labels", "query", "--limit", "3"),
            ("snapshot", "show"),
            ("snapshot", "show", "default"),
            ("campaign", "status"),
            ("store", "upgrade"),
        ]
        shapes = {}
        for command in commands:
            words = [word for word in command if not word.startswith(("/", "--"))]
            shapes[" ".join(words[:2])] = _shape(json.loads(_run(*command, "--json")))
        return shapes


def subjects() -> list[str]:
    """Return the models of `predictions`: 200 timm architectures and 30 transformers."""
    from trappm.extensions.transformers.model_names import builtin_shapes
    from trappm.profiler.models.zoo import architectures

    names = architectures(["*"])
    shapes = sorted(builtin_shapes())
    return [
        *(names[len(names) * place // 200] for place in range(200)),
        *(f"hf:{shapes[len(shapes) * place // 30]}" for place in range(30)),
    ]


def predictions(models: Sequence[str]) -> list[dict[str, Any]]:
    """Return what the shipped snapshot predicts of a training step with 8 samples.

    Per model and device: step time in ms, memory in MiB and power in W; null where it has none.
    A model that cannot be traced has the name of the error instead.
    """
    import trappm

    answers: list[dict[str, Any]] = []
    with _home():
        for model in models:
            tokens = {"sequence_length": 128} if model.startswith("hf:") else {}
            try:
                of_devices = trappm.compare(model, DEVICE_KEYS, batch_size=8, **tokens)
            except trappm.TrappmError as error:
                answers.append({"model": model, "error": type(error).__name__})
            else:
                answers.append({"model": model} | {one.device: [*one] for one in of_devices})
    return answers


def _first_labels(path: Path) -> None:
    """Write the first 20 labels of our H100 as JSON lines."""
    with lzma.open(LABELS, "rt") as file:
        path.write_text("".join(itertools.islice(file, 20)))


def _shape(value: Any) -> Any:
    """Return a value's keys and types; of a list, those of its first element."""
    if isinstance(value, dict):
        return {key: _shape(part) for key, part in sorted(value.items())}
    if isinstance(value, list):
        return [_shape(value[0])] if value else []
    return type(value).__name__


@contextlib.contextmanager
def _home() -> Iterator[Path]:
    """Provide an empty data folder, which `TRAPPM_HOME` names meanwhile."""
    before = os.environ.get("TRAPPM_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRAPPM_HOME"] = str(Path(folder) / "home")
        try:
            yield Path(folder)
        finally:
            os.environ.pop("TRAPPM_HOME")
            if before is not None:
                os.environ["TRAPPM_HOME"] = before


def _run(*arguments: str) -> str:
    """Return what a command prints.

    Raises:
        RuntimeError: The command failed.
    """
    from trappm import cli

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = cli.run(list(arguments))
    if status:
        raise RuntimeError(f"trappm {' '.join(arguments)} ended with status {status}")
    return output.getvalue()


def write(name: str, value: Any) -> None:
    """Write a recording, one element per line."""
    if isinstance(value, list):
        text = "[\n" + ",\n".join(json.dumps(part) for part in value) + "\n]\n"
    else:
        text = json.dumps(value, indent=1) + "\n"
    (FOLDER / name).write_text(text)


def read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


if __name__ == "__main__":
    import whole_answers
    import whole_learning
    import whole_steps

    write("campaign_rows.json", campaign_rows())
    write("label_export.json", label_export())
    write("json_shapes.json", json_shapes())
    write("answers.json", whole_answers.answers())
    write("comparisons.json", whole_answers.comparisons())
    write("simulated.json", whole_answers.simulated())
    write("steps.json", whole_steps.steps())
    write("learned.json", whole_learning.learned())
    write("predictions.json", predictions(subjects()))
