"""How the importer of GPUMemNet's sheet judges its rows, beside our reading of each row.

    python benchmarks/store/import_faults.py ../shared/data

The sheet's reading (`a100_40gb_train_memory_quality.csv`) is the yardstick: the importer never sees
it. Rows are told by class and by what became of them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import pandas as pd

from trappm.store.exchange.importers.gpumemnet import verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder with the published sheets")
    parser.add_argument("--check-models", action="store_true", help="as the importer (minutes)")
    arguments = parser.parse_args()
    folder = arguments.data
    judged = verdicts(folder / "a100_40gb_train_memory.csv", check_models=arguments.check_models)
    reading = pd.read_csv(folder / "a100_40gb_train_memory_quality.csv")
    reading.loc[reading.spike == 1, "class"] += " (spike)"
    rows = [
        {
            "architecture": v.measurement.configuration.architecture,
            "batch_size": v.measurement.configuration.batch_size,
            "verdict": f"{v.kind}: {v.reason}",
        }
        for v in judged
        if v.measurement is not None
    ]
    both = reading.merge(pd.DataFrame(rows), how="left")
    both["verdict"] = both["verdict"].fillna("rejected")
    print(pd.crosstab(both["verdict"], both["class"]).to_string())
    for (kind, reason), count in Counter((v.kind, v.reason) for v in judged).most_common():
        print(f"{count:5} {kind}: {reason}")


if __name__ == "__main__":
    main()
