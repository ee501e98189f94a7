"""The formats that are read, of the core and of extensions."""

from __future__ import annotations

from ckpttool.formats.zero.files import RUN_STATE
from ckpttool.registry import EXTENSIONS, Format

_DCP = {"dcp": "torch.distributed.checkpoint"}
FORMATS = (
    Format("ckpttool.formats.dcp.read_dcp", _DCP, marker=".metadata", last=(".metadata",)),
    Format("ckpttool.formats.dcp.read_dcp_pair", _DCP, marker="pytorch_model_fsdp_0/"),
    *(known for extension in EXTENSIONS for known in extension.formats),
    Format("ckpttool.formats.shards.read_shards", {"safetensors": "safetensors"}),
    Format(
        "ckpttool.formats.weights.read_weights",
        {"safetensors": "safetensors", "torch": "state dict of torch.save"},
        last=("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    ),
    Format(
        "ckpttool.formats.universal.read_universal", {"universal": "universal checkpoint"}, tagged=True, marker="zero/"
    ),
    Format("ckpttool.formats.torch_run.read_torch_run", _DCP, tagged=True, marker=RUN_STATE),
    Format(
        "ckpttool.formats.thin.read_thin",
        {"thin": "thin (weights without optimizer states, of a run on {ranks})"},
        tagged=True,
        marker=RUN_STATE,
    ),
    Format("ckpttool.formats.zero.reader.read_zero", {"zero": "ZeRO-{stage} over {ranks}"}, tagged=True, numbered=True),
)
"""In the order of the attempts: formats with a marker first."""


def formats_with_tags(*, tagged: bool) -> list[Format]:
    """Return the formats whose checkpoints have a tag, or the formats without tags."""
    return [f for f in FORMATS if f.tagged == tagged]
