"""Measuring needs neither Ray, SQL nor any other library of an extra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from trappm.profiler.records import Measurement, Outcome

ABSENT = (
    "alembic", "onnx", "onnx_tool", "optuna", "pandas", "plotext", "ray", "rich", "sqlalchemy",
    "torch_geometric",
)  # fmt: skip

BLOCKER = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.partition(".")[0] in {ABSENT!r}
        return None if absent else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


def test_measures_without_the_libraries_of_the_other_rooms(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    for name in ("ray", "onnx"):  # the node is as bare as we say, its subprocesses included
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import {name}'])"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"No module named '{name}'" in done.stderr
    wanted = tmp_path / "list.yaml"
    wanted.write_text(
        "[{architecture: test_resnet, batch_size: 1, input_size: 64}]",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-c", "from trappm.cli import main; main()", "measure",
         "--sweep", str(wanted), "--device", "cpu-1t", "--out", str(tmp_path / "out.jsonl"),
         "--protocol", "quick", "--retries", "0"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    measurement = Measurement.from_dict(json.loads(line))
    # Others on the machine may make it unstable, but it was measured.
    assert measurement.outcome in {Outcome.OK, Outcome.UNSTABLE}, measurement.message
    assert measurement.step_time_ms is not None
    assert measurement.memory_mib is not None
