"""`trappm labels show | lookup`: one label, and the answer for one model."""

from __future__ import annotations

from typing import Annotated

import typer

from trappm.cli import options, shell
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


def lookup(
    model: options.Model,
    device: Annotated[
        str | None,
        typer.Option(help="Device key (default: a100-40gb).", autocompletion=shell.devices),
    ] = None,
    batch_size: options.BatchSize = None,
    input_size: options.InputSize = None,
    sequence_length: options.SequenceLength = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, amp-fp16, amp-bf16 or bf16 (default: fp32).")
    ] = None,
    memory_format: Annotated[
        str | None, typer.Option(help="contiguous or channels-last (default: contiguous).")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, momentum, adam or adamw (default: sgd).")
    ] = None,
    phase: Annotated[str, typer.Option(help="train or infer.")] = "train",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure here where there is no label, and keep it.")
    ] = False,
    protocol: Annotated[
        str | None, typer.Option(help="To measure by; quick on CPUs, paper elsewhere.")
    ] = None,
    snapshot: Annotated[
        str | None, typer.Option(help="What predicts: a snapshot's id, alias or folder.")
    ] = None,
    explain: options.Explain = False,
    as_json: AsJson = False,
) -> None:
    """Return the measured cost of a step if there is a label of its graph, else a prediction."""
    from trappm.prediction.looking_up.lookup import lookup as look_up

    answer = look_up(
        model,
        device=device,
        batch_size=batch_size,
        input_size=input_size,
        sequence_length=sequence_length,
        snapshot=snapshot,
        measure=measure,
        protocol=protocol,
        precision=precision,
        memory_format=memory_format,
        optimizer=optimizer,
        phase=phase,
    )
    if as_json:
        print_json(answer.to_dict())
    else:
        from trappm.terminal.label_tables import print_answer

        print_answer(answer, explain=explain)
