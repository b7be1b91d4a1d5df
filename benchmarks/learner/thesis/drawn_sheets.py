"""Published sheets cut down to some architectures, where all of them would take too long to trace.

    PYTHONPATH=. python benchmarks/learner/thesis/drawn_sheets.py ../shared/data FOLDER

Architectures are drawn uniformly of those that the four sheets of timm's models have in common;
fewer are part of more. Of the inference sheets only rows at the size of the training sheet are
kept, so that each architecture is traced at one size.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

NAMES = {
    "rtx3090_train_step_amp_nchw.csv": "model",
    "a100_40gb_train_memory.csv": "architecture",
    "rtx3090_infer_step_amp_nchw.csv": "model",
    "rtx4090_infer_step_amp_nchw.csv": "model",
}
"""Files, and the column with the architecture of each."""
SEED = 1337

Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Rows) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def architecture(row: dict[str, str], column: str) -> str:
    """Without the tag of its weights, which some sheets have and others lack."""
    return row[column].split(".")[0]


def drawn(sheets: dict[str, Rows], count: int) -> dict[str, Rows]:
    """The sheets with `count` architectures."""
    names = [{architecture(r, NAMES[sheet]) for r in rows} for sheet, rows in sheets.items()]
    common = sorted(set.intersection(*names))
    kept = set(np.random.default_rng(SEED).permutation(common)[:count].tolist())
    cut = {
        sheet: [row for row in rows if architecture(row, NAMES[sheet]) in kept]
        for sheet, rows in sheets.items()
    }
    sizes = {
        (architecture(r, "model"), r["train_img_size"])
        for r in cut["rtx3090_train_step_amp_nchw.csv"]
    }
    return {
        sheet: [
            row
            for row in rows
            if "infer_img_size" not in row
            or (architecture(row, "model"), row["infer_img_size"]) in sizes
        ]
        for sheet, rows in cut.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with the published labels")
    parser.add_argument("into", type=Path, help="where the cut sheets go")
    parser.add_argument("--architectures", type=int, default=100)
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    sheets = {name: read(options.data / name) for name in NAMES}
    for name, rows in drawn(sheets, options.architectures).items():
        write(options.into / name, rows)
        sys.stdout.write(f"{name}: {len(rows)} of {len(sheets[name])} rows\n")


if __name__ == "__main__":
    main()
