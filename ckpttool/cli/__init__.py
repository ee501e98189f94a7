"""The command line: parse, call ``ckpttool``'s function of the same name, print what it returns."""

from __future__ import annotations

import io
import os
import sys

import click

from ckpttool._version import __version__
from ckpttool.cli._errors import run
from ckpttool.cli.consolidate import consolidate
from ckpttool.cli.convert import convert
from ckpttool.cli.cp import cp
from ckpttool.cli.diff import diff
from ckpttool.cli.extract import extract
from ckpttool.cli.inspect import inspect
from ckpttool.cli.ls import ls
from ckpttool.cli.prune import prune
from ckpttool.cli.stats import stats
from ckpttool.cli.verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, package_name="ckpttool")
def cli() -> None:
    """See, check and convert DeepSpeed ZeRO checkpoints, without torch and without running what is in them.

    SRC is a checkpoint root (with a file named latest), a tag's directory, a Hugging Face Trainer's checkpoint-N, a
    universal checkpoint, a directory of torch.distributed.checkpoint, or safetensors. Several SRC are directories of
    one checkpoint that hold the files of some ranks each. All of them, and every output, may be URLs: s3://, gs://, az://
    or whatever else fsspec reaches.

    Exit codes: 0 done; 1 the checkpoint is bad, the operation failed or checkpoints differ; 2 wrong usage.
    """


for _command in (inspect, consolidate, convert, verify, diff, stats, extract, ls, cp, prune):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the ``ckpttool`` command."""
    # numpy starts a pool of threads for linear algebra, of which there is none here: a third of the start-up time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding lacks is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    run(cli)
