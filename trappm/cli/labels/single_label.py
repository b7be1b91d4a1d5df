"""`trappm labels show`: one label."""

from __future__ import annotations

from typing import Annotated

import typer

from trappm.cli.options import AsJson, print_json


def show(
    label_id: Annotated[
        int, typer.Argument(metavar="ID", min=1, max=2**63 - 1, help="A label's id.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show everything about a label: metrics, spread, attempts, environment, raw samples."""
    from trappm.label_store import store_to_read

    with store_to_read() as store:
        label = store.labels.get(label_id)
        measurement = store.measurements.get(label.measurement_id)
        attempts = store.labels.attempts(label_id)
    if as_json:
        from dataclasses import asdict

        from trappm.label_store import records

        print_json(
            {
                **asdict(label),
                "configuration": label.configuration.to_dict(),
                "measurement": measurement.to_dict(),
                "attempts": list(records(attempts)),
            }
        )
    else:
        from trappm.terminal.label_tables import print_label

        print_label(label, measurement, attempts)
