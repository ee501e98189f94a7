"""An extension of ckpttool in a package of its own: weights in files of ``numpy.savez``, and a command."""

from ckpttool.registry import Command, Extension, Format

EXTENSION = Extension(
    "npz",
    formats=(Format("ckpttool_npz_reader.read_npz", {"npz": "arrays of numpy.savez"}),),
    commands=(Command("shapes", "Look", "inspect", "ckpttool_npz_command"),),
)
