"""How well time of training language models are predicted, on published sheets.

    PYTHONPATH=. python research/priors/language_models.py ../shared/data [--details] [--fit]
        [--only llm-foundry neusight]

Constants that were learned are judged on models held out: each model's rows by a fit on all others.
With --fit the constants of `trappm/extensions/transformers/step_times.py` are printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from research.priors.language import pretraining, whole_models
from research.priors.language.rows import details, read_rows, summary

SOURCES = ("llm-foundry", "neusight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with the published labels")
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--details", action="store_true", help="a line a row")
    parser.add_argument("--fit", action="store_true", help="constants from all rows")
    options = parser.parse_args()
    nodes = options.data / "nodes"
    for source in options.only:
        if source == "neusight":
            rows = list(whole_models.judged(read_rows(nodes / "neusight_llm_e2e_fp32.csv")))
            if options.fit:
                sys.stdout.write(f"{whole_models.fitted(rows)}\n")
        else:
            published = read_rows(nodes / "llm_training.csv", source)
            rows = list(pretraining.judged(published))
            if options.fit:
                sys.stdout.write(f"{pretraining.fitted(published)}\n")
        if options.details:
            sys.stdout.write(f"{details(rows)}\n")
        sys.stdout.write(f"{summary(rows)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
