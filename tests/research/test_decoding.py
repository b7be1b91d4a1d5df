"""Fit of the constants of text generation, on errors with a known best fit."""

import numpy as np
import pandas as pd

from research.priors.decoding import FACTORS, HOSTS_US, fitted, held_out

HOSTS, FACTOR = np.log(HOSTS_US), np.log(FACTORS)


def errors(host, prompt, token):
    """Errors of rows measured at these indices, shape (hosts, factors, rows, steps)."""
    hosts = (HOSTS - HOSTS[np.array(host)][:, None]).T[:, None, :]
    prompts, tokens = (
        (FACTOR - FACTOR[np.array(where)][:, None]).T[None] for where in (prompt, token)
    )
    return np.stack(np.broadcast_arrays(prompts + 0 * hosts, np.hypot(hosts, tokens)), axis=-1)


def test_fit_finds_the_constants_of_the_rows():
    assert fitted(errors([3, 3], [5, 5], [9, 9])) == (3, 5, 9)


def test_held_out_rows_do_not_fit_themselves():
    groups = pd.Series(["a", "a", "b"])
    table = errors([3, 3, 4], [5, 5, 7], [9, 9, 9])
    own = held_out(table, groups)
    assert own[2, 0] == table[3, 5, 2, 0]
    assert own[2, 1] == table[3, 9, 2, 1]
    assert own[0, 0] == table[4, 7, 0, 0]
