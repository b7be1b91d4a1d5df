"""Run pip with one line of progress; its output is shown only if it fails.

    python3 deploy/quiet_pip.py .venv/bin/python -m pip install -e .

Needs nothing but Python, as it runs before anything is installed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import TextIO

FIRST_REPORT = 4
"""A file gets a line at this number of packages, and each time it has doubled."""


def follow(lines: Iterable[str], out: TextIO) -> list[str]:
    """Show the progress of pip, and return its output.

    Args:
        lines: Lines of pip's output.
        out: A terminal has one line that is rewritten; a file gets a few lines.
    """
    output, packages, next_report = [], 0, FIRST_REPORT
    for line in lines:
        output.append(line)
        words = line.split()
        if words[:1] == ["Collecting"]:
            packages += 1
            text = f"{packages} packages found"
        elif words[:2] == ["Building", "wheel"]:
            text = f"building {words[3]}" if len(words) > 3 else "building"
        elif words[:3] == ["Installing", "collected", "packages:"]:
            packages = len(words) - 3
            text = f"installing {packages} packages"
        elif words[:2] == ["Successfully", "installed"]:
            text = f"{len(words) - 2} packages installed"
        else:
            continue
        if out.isatty():
            out.write(f"\r\x1b[K  {text}")
        elif not text.endswith("found") or packages >= next_report:
            next_report = 2 * packages
            out.write(f"  {text}\n")
        out.flush()
    if out.isatty() and packages:
        out.write("\n")
    return output


def main(command: list[str]) -> int:
    """Run the command, and return its exit status."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None  # noqa: S101
    output = follow(process.stdout, sys.stdout)
    status = process.wait()
    if status:
        sys.stderr.writelines(output)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
