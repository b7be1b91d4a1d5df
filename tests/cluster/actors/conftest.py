"""Scenarios on emulated Ray clusters, each in a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def play(tmp_path):
    """Run a scenario of `pool_scenarios` or `cluster_scenarios`; return its report.

    Ray reads its environment when it is imported, so each scenario has its own process.
    """

    def run(program, *arguments, measure_s=0.0, timeout=280):
        result = subprocess.run(
            [sys.executable, Path(__file__).with_name(program), *arguments],
            env=os.environ | {"MEASURE_S": str(measure_s), "TRAPPM_HOME": str(tmp_path)},
            capture_output=True, text=True, check=False, timeout=timeout,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return run
