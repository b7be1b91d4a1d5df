"""`trappm generate`: what it costs a decoder to read a prompt and to write after it."""

from __future__ import annotations

from typing import Annotated

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson, print_json


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A decoder by its hf: name, or a config.json's.")
    ],
    prompt: Annotated[int, typer.Option(help="Tokens that each sequence begins with.")] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens that are written after each prompt.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    device: Annotated[
        str, typer.Option(help="A card, such as a100.", autocompletion=shell.devices)
    ] = "a100",
    precision: Annotated[str, typer.Option(help="Of weights and cache: bf16 or fp32.")] = "bf16",
    as_json: AsJson = False,
) -> None:
    """Predict what text costs a decoder: first token, time a token, weights and cache.

    Of transformers' own modules without compilation; no serving engine.

    Example: trappm generate hf:llama-2-7b --prompt 512 --tokens 128 --batch-size 8
    """
    from trappm.generation.generating import generate as generate_tokens
    from trappm.generation.generation_tables import print_generation

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
        print_generation(made)
