"""The command ``ckpttool shapes SRC``."""

from __future__ import annotations

import click

import ckpttool


@click.command(short_help="Print the shape of each parameter.")
@click.argument("src")
def shapes(src: str) -> None:
    """Print the shape of each parameter of the checkpoint SRC, and its name."""
    for parameter in ckpttool.inspect(src).parameters:
        click.echo(f"{'x'.join(map(str, parameter.shape)) or 'scalar'}  {parameter.name}")
