"""The learner's own limit of memory, in a process that stands for its actor."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import numpy as np
from trappm.cluster.campaign.learner_handle import prepare_learner
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import this_code

class Learner:
    def __init__(self, labels):
        self.labels = labels

procfs.allowed_memory_mib = lambda: 3000.0
learner = prepare_learner(Learner)(this_code(), labels=5)
few = np.ones(1 << 20)
try:
    np.empty(4 << 30)
except MemoryError:
    print(type(learner).__name__, learner.labels, "has its own limit")
"""


def test_a_learner_that_takes_too_much_fails_instead_of_its_container():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "Learner 5 has its own limit\n"
