"""A password reaches a detached campaign from the shell that launches it, and shows nowhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from guarded_postgresql import launched_and_left

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_campaign_keeps_the_password_when_its_shell_is_gone_and_it_is_started_again(tmp_path):
    report = launched_and_left(sys.executable, tmp_path)
    assert {Path(path).parent for path in report["trappm"]} == {ROOT / "trappm"}
