"""`trappm generate`: time and memory of text generation with a decoder."""

from __future__ import annotations

from typing import Annotated

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson, Explain, print_json


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Predict")(generate)


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="hf: name of a decoder, or of a config.json.")
    ],
    prompt: Annotated[int, typer.Option(help="Tokens per prompt.")] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Number of sequences per batch.")] = 1,
    device: Annotated[
        str | None,
        typer.Option(help="Card, such as a100 (default: a100-40gb).", autocompletion=shell.devices),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="Precision of weights and cache: bf16 or fp32.")
    ] = "bf16",
    explain: Explain = False,
    as_json: AsJson = False,
) -> None:
    """Predict the cost of generating text: first token, time per token, weights and cache.

    Covers uncompiled modules of the transformers library, but not serving engines.

    Example: trappm generate hf:llama-2-7b --prompt 512 --tokens 128 --batch-size 8
    """
    from trappm.extensions.transformers.generation import generate as generate_tokens
    from trappm.extensions.transformers.generation import print_generation

    made = generate_tokens(
        model,
        prompt=prompt,
        tokens=tokens,
        batch_size=batch_size,
        device=device,
        precision=precision,
    )
    if as_json:
        print_json(made.to_dict())
    else:
        print_generation(made, explain=explain)
