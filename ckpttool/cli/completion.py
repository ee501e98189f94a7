"""``completion``: the script by which a shell completes commands, options, tags and names of parameters."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Print the script for the completion of a shell.")
@click.argument("shell", metavar="SHELL", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, tags and names of parameters in a shell.

    \b
    bash: echo 'eval "$(ckpttool completion bash)"' >> ~/.bashrc
    zsh:  echo 'eval "$(ckpttool completion zsh)"' >> ~/.zshrc
    fish: ckpttool completion fish > ~/.config/fish/completions/ckpttool.fish
    """  # noqa: D301  click reads the backspace
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is not None:  # click knows all of SHELLS
        click.echo(found(ctx.find_root().command, {}, "ckpttool", "_CKPTTOOL_COMPLETE").source())
