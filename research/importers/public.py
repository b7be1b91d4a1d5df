"""Importer of public files of other users: `trappm labels export --public`.

A file with more than `store.public_labels` leaves in it is refused: its sender may not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trappm.profiler.errors import InputError
from trappm.store.files import ParsedRow, read_file
from trappm.store.public_labels import public_label

SOURCE = "public"
KEY = "sent_in"
"""Key in the environment of a label that was sent in."""
MAX_TEXT = 200


def parse_rows(path: Path, by: str | None, licence: str | None) -> Iterator[ParsedRow]:
    """Yield each row of a public file, with who measured it and under which licence it is.

    Args:
        path: The file.
        by: Who measured; the source of its labels.
        licence: Licence under which they are shown.

    Raises:
        InputError: The sender or the licence is missing, the file or a row cannot be read, or a row
            has more than a public file has.
    """
    for option, text in (("--by", by), ("--licence", licence)):
        if not text or len(text) > MAX_TEXT or not text.isprintable():
            raise InputError(
                f"a file that was sent in needs {option} with 1 to {MAX_TEXT} letters, such as "
                "--by 'Example Lab' --licence Apache-2.0"
            )
    for number, row in enumerate(read_file(path), 1):
        label = row.measurement
        if label is None or public_label(label) != label:
            raise InputError(
                f"{path.name}, row {number}: it is not as trappm labels export --public writes it; "
                "ask for such a file; nothing was imported"
            )
        environment = {**label.environment, "source": by, "licence": licence, KEY: True}
        yield ParsedRow(reason=f"from {by}", measurement=replace(label, environment=environment))
