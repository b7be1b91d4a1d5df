"""Options that several commands of research share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MetricName = Annotated[str, typer.Option(help="memory, step-time, power or energy.")]
Usable = Annotated[
    Path | None,
    typer.Option(help="Sheet of architecture, batch_size, class, spike: judge usable rows."),
]
GraphProcesses = Annotated[
    int | None,
    typer.Option(min=1, max=256, help="Processes for missing graphs (default: one per core)."),
]
