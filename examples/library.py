"""The same from Python: inspect a checkpoint, verify it, and write weights in the type that you serve in.

python examples/library.py CHECKPOINT OUT
"""

from __future__ import annotations

import sys

import ckpttool


def main() -> None:
    """Inspect, verify and consolidate one checkpoint."""
    src, out = sys.argv[1:3]

    checkpoint = ckpttool.inspect(src)  # a few kilobytes are read, nothing in the files is run
    print(f"{checkpoint.tag}: ZeRO-{checkpoint.stage} over {checkpoint.topology.data_parallel} ranks")
    for parameter in checkpoint.parameters:
        print(f"  {parameter.name} {parameter.shape}: {', '.join(parameter.states)}")

    for finding in ckpttool.verify(src, deep=True).findings:
        print(f"  {finding.path}: {finding.problem}")

    try:
        report = ckpttool.consolidate(src, out, to="safetensors", dtype="bf16", exclude=["*.scratch"])
    except ckpttool.CkptError as error:
        raise SystemExit(f"{error.path}: {error.problem}; {error.hint}") from error
    written = report.written
    print(f"wrote {report.tensors} tensors, {written.nbytes_written:,} bytes, to {written.out}")


if __name__ == "__main__":
    main()
