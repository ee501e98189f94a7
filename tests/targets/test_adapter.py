"""The written adapter equals PEFT's adapter of the live model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import PlanError
from ckpttool.targets.weights import adapter_name
from tests.truth import source, truth

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["zero2-dp2-bf16-lora-trainer", "zero3-dp2-bf16-lora-trainer"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "kind"), [("fp32", "adapter_fp32"), ("bf16", "adapter")])
def test_adapter_is_what_peft_gives_on_the_live_model(name: str, dtype: str, kind: str, tmp_path: Path) -> None:
    report = ckpttool.consolidate(
        source(name), tmp_path / "out", to="safetensors", adapter_only=True, dtype="bf16" if dtype == "bf16" else "fp32"
    )
    assert [f.name for f in report.written.files] == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    written = load_file(str(tmp_path / "out" / "adapter_model.safetensors"))
    prefix = f"{kind}/"
    expected = {k.removeprefix(prefix): t for k, t in truth(name).tensors.items() if k.startswith(prefix)}
    assert expected
    assert written.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(written[key], tensor), key


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_loads_the_adapter(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    ckpttool.consolidate(source(NAMES[0]), tmp_path / "out", to="safetensors", adapter_only=True)
    held = {p.name: p.shape for p in ckpttool.inspect(source(NAMES[0])).parameters}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    vocabulary, width = held["base_model.model.lm_head.modules_to_save.default.weight"]
    value = held["base_model.model.model.layers.0.self_attn.v_proj.lora_B.default.weight"][0]
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2 * value // width,
        )
    )
    model = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    assert config["peft_type"] == "LORA"
    state = model.state_dict()
    for name, tensor in truth(NAMES[0]).tensors.items():
        if name.startswith("fp32/"):
            assert torch.equal(state[name.removeprefix("fp32/")], tensor), name


def test_a_checkpoint_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"holds no PEFT adapter: no parameter is named like one"):
        ckpttool.consolidate(source("zero2-dp2-bf16"), tmp_path / "out", to="safetensors", adapter_only=True)
    with pytest.raises(PlanError, match="writes the whole adapter, as safetensors"):
        ckpttool.consolidate(source(NAMES[0]), tmp_path / "out", to="torch", adapter_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base_model.model.q.lora_A.default.weight", ("default", "base_model.model.q.lora_A.weight")),
        ("base_model.model.emb.lora_embedding_B.mine", ("mine", "base_model.model.emb.lora_embedding_B")),
        ("base_model.model.q.ia3_l.default", ("default", "base_model.model.q.ia3_l")),
        ("base_model.model.head.modules_to_save.default.weight", ("default", "base_model.model.head.weight")),
        ("base_model.model.q.base_layer.weight", None),
        ("lora_A", None),
    ],
)
def test_names_of_adapters(name: str, expected: tuple[str, str] | None) -> None:
    assert adapter_name(name) == expected
