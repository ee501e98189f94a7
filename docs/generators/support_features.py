"""The table of supported checkpoints: features in words, and the bundled checkpoints that show each of them.

Stages, types and DeepSpeed releases of a row come from its checkpoints. Each bundled checkpoint must show something,
and each pattern must name one: a test checks both.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import filter as matching
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .support_matrix import Row


@dataclass(frozen=True)
class Feature:
    """One row of the table."""

    what: str
    """Kind of checkpoint."""
    result: str
    """The result of reading it."""
    shown_by: tuple[str, ...] = ()
    """Patterns of names of bundled checkpoints."""


FEATURES = (
    Feature(
        "ZeRO 1, 2, 3 over any number of ranks", "weights, master weights, every optimizer state", ("zero[123]-dp*",)
    ),
    Feature(
        "no ZeRO (stage 0), fused and unfused",
        "the same, joined by shape and order, as the optimizer only numbers its parameters; where several orders fit, "
        "the model's own weights, and a note",
        ("zero0-dp2-*",),
    ),
    Feature("BF16_Optimizer, also with immediate gradient update", "the same", ("zero1-dp*-bf16-grad-fp32*",)),
    Feature(
        "several parameter groups; frozen, tied, scalar, odd-sized and empty parameters; buffers of any type",
        "exactly as in the module",
        ("zero[123]-dp*", "zero[12]-dp2-bf16-empty"),
    ),
    Feature(
        "modules that are registered several times (looped layers, shared heads)",
        "every name, tied, as the placeholders of stage 3 show where DeepSpeed's own list does not",
        ("zero*-dp2-bf16-repeated*",),
    ),
    Feature(
        "sequence parallelism (Ulysses, ALST), also under the Trainer", "the same as without", ("zero*-bf16-ulysses*",)
    ),
    Feature(
        "ZenFlow, whose 16-bit weights are newer than the master weights",
        "the weights are the module's; `--to zero` keeps both, other targets compute the master weights from "
        "the weights, with a note",
        ("zero2-dp2-bf16-zenflow",),
    ),
    Feature(
        "`elastic_checkpoint`",
        "master weights and states; hyper-parameters are not in it, so that `--to zero` refuses it, and "
        "`ckpttool.load` and `--to universal` keep the run's own",
        ("zero2-dp2-bf16-elastic",),
    ),
    Feature("`exclude_frozen_parameters`", "the saved weights and states", ("zero*-without-frozen",)),
    Feature(
        "`round_robin_gradients`, which DeepSpeed's `ds_to_universal` silently corrupts",
        "exact",
        ("zero2-dp2-bf16-round-robin",),
    ),
    Feature(
        "`parameter_alignment`; small `sub_group_size`",
        "exact",
        ("zero2-dp2-bf16-aligned", "zero3-dp2-bf16-sub-groups"),
    ),
    Feature("CPU offload of optimizer and parameters", "exact", ("zero*-cpu-adam-offload",)),
    Feature(
        "NVMe offload of the optimizer (`offloaded_tensors`)",
        "states, read from the swap files",
        ("zero3-dp2-bf16-nvme", "zero3-dp2-bf16-nvme-parameters"),
    ),
    Feature(
        "ZeRO++ hpZ; MiCS (DeepSpeed up to 0.19.7)",
        "the primary partitions",
        ("zero3-dp4-bf16-hpz", "ds0.18.9-zero3-dp4-bf16-mics"),
    ),
    Feature(
        "SGD momentum, Adagrad, AMSGrad, Lion, CPU Adagrad, fused and CPU Adam",
        "every state under its own name",
        ("zero*-sgd", "zero*-adagrad", "zero*-adam-amsgrad", "zero*-lion"),
    ),
    Feature(
        "Muon, whose matrices two ranks may both hold whole",
        "`momentum_buffer` of every matrix; the two copies are compared",
        ("zero*-muon*",),
    ),
    Feature("a state that no rule fits (8-bit blocks)", "named as not sliceable, never cut"),
    Feature(
        "1-bit Adam, 1-bit LAMB, 0/1 Adam (DeepSpeed up to 0.19.6)",
        "weights, moments, variances; a note: DeepSpeed saves the compression errors of the first rank alone, and its "
        "load resets them; `--to zero` refuses these states",
        ("ds0.19.6-zero0-*",),
    ),
    Feature(
        "compression, MoQ, eigenvalue, sparse attention, progressive layer dropping, the earlier `curriculum_learning` "
        "(DeepSpeed up to 0.19.6)",
        "masks as buffers, and the configuration; a note: DeepSpeed saves no other state, and has removed them",
        ("ds0.19.6-zero2-dp2-fp32-removed",),
    ),
    Feature(
        "LoRA and other PEFT training",
        "trained weights, or with `--adapter-only` the adapter's folder",
        ("zero*-lora-trainer",),
    ),
    Feature(
        "mixtures of experts, also PR-MoE, whose layers have other numbers of experts over other numbers of ranks, and "
        "CPU offload",
        "experts under their global numbers",
        ("moe-*",),
    ),
    Feature("AutoEP", "experts stacked, as the model has them", ("autoep-*",)),
    Feature(
        "the same with modules that are registered several times",
        "a note: DeepSpeed clones tensors that it saves beside experts, so ties are not recorded; further names keep "
        "their own copies",
    ),
    Feature(
        "data efficiency: curriculum learning's data sampler, random layerwise token dropping",
        "their states, which `--to zero` and `--to universal` keep, and `ckpttool.load` restores on any ranks",
        ("zero2-dp2-bf16-data-efficiency",),
    ),
    Feature(
        "parameters offloaded to NVMe (`offload_param`)",
        "the same files as without; a restore into an engine with parameters on NVMe is refused, because DeepSpeed "
        "fails at it: offload them to the CPU; no bundled checkpoint",
    ),
    Feature(
        "pipeline parallelism",
        "whole model; tied layers compared",
        ("pipeline-zero1-pp2-dp2-bf16", "pipeline-zero0-pp2-dp2-bf16"),
    ),
    Feature(
        "the same at stage 0 in fp16 and fp32",
        "the model's own weights: no file records the layer of a numbered state",
        ("pipeline-zero0-pp2-dp1-fp32", "pipeline-zero0-pp2-dp2-fp16"),
    ),
    Feature(
        "tensor parallelism: AutoTP, also uneven and fused layers", "whole tensors; replicas compared", ("autotp-*",)
    ),
    Feature(
        "tensor parallelism by the patterns of `universal_checkpoint_info` (Megatron-DeepSpeed)",
        "cut along the right dimension, replicated, averaged, sub-parameters in order, vocabulary without padding",
        ("megatron-*", "pipeline-zero1-pp2-tp2-bf16"),
    ),
    Feature("tensor parallelism without that information", "refused: the files do not record how the tensors were cut"),
    Feature(
        "universal checkpoints (0.2 and 0.4, with and without tensor and pipeline parallelism)",
        "their whole content",
        ("universal-*",),
    ),
    Feature(
        "safetensors and `pytorch_model.bin`, whole or sharded; `torch.distributed.checkpoint`, torchtitan's included",
        "weights; with `torch.distributed.checkpoint` also states. Tested with the libraries that write them",
    ),
    Feature(
        "Hugging Face Trainer, Accelerate, Lightning",
        "found without flags",
        ("zero*-trainer", "zero*-accelerate", "zero*-lightning"),
    ),
    Feature("files of `torch.save` in the form before ZIP", "exact", ("zero2-dp2-bf16-legacy",)),
    Feature("older DeepSpeed, elastic checkpoints included", "exact, but for the next rows", ("ds0.*",)),
    Feature(
        "DeepSpeed before 0.5.4, stage 3 with several groups or frozen parameters; the old stage 1 (up to 0.5.8)",
        "refused: the files do not record the place of each parameter",
        ("ds0.3.16-zero3-dp2-fp16",),
    ),
    Feature(
        "frozen weights at stage 3 before DeepSpeed 0.9.1",
        "a note: they were never saved",
        ("ds0.5.8-zero3-dp2-fp16", "ds0.7.3-zero3-dp2-fp16"),
    ),
)


def shown_by(feature: Feature, names: Sequence[str]) -> list[str]:
    """Names of the bundled checkpoints that show a feature."""
    return list(dict.fromkeys(name for pattern in feature.shown_by for name in matching(names, pattern)))


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of the table."""
    lines = [
        "| checkpoint | result | stages | types | DeepSpeed | shown by |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    by_name = {row.name: row for row in rows}
    for feature in FEATURES:
        found = [by_name[name] for name in shown_by(feature, list(by_name))]
        facts = [_listed({row.facts.get(key, "") for row in found}) for key in ("stage", "dtype", "release")]
        lines.append(f"| {feature.what} | {feature.result} | {' | '.join(facts)} | {_links(found)} |")
    return lines


def _listed(values: set[str]) -> str:
    return ", ".join(sorted(values - {""}, key=lambda v: [int(n) if n.isdigit() else n for n in v.split(".")]))


def _links(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    first = f"[{rows[0].name}](#fixture-{rows[0].name})"
    return first if len(rows) == 1 else f"{first} and {len(rows) - 1} more"
