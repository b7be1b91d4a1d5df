"""Fits of the shipped constants to published labels (`python -m research fit-priors`)."""

from typing import Annotated

import typer

IsWriting = Annotated[bool, typer.Option("--write", help="Write the constants into the package.")]
