"""Weights under other names, and adapters: outputs hold the engine's values under the names that libraries look for."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.model.names import adapter_name
from ckpttool.targets.weights import READY_MADE
from tests.cli.command import ckpttool as command
from tests.truth import source, truth
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path


TRAINER = "zero3-dp2-bf16-trainer"


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_rules_and_a_table_give_the_same_values_new_names(to: Any, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps({"model.norm.weight": "final.weight"}))
    report = ckpttool.consolidate(
        source(TRAINER), tmp_path / "out", to=to, max_shard_size="9kB", prove=True, rename_map=tmp_path / "map.json",
        rename=["s/^model\\.layers\\.(\\d+)\\./h.\\1./", "s|_proj|/proj|g", "module", r"s/EMBED_TOKENS/embed/i"],
    )  # fmt: skip

    def new(name: str) -> str:
        name = {"model.norm.weight": "final.weight"}.get(name, name)
        name = re.sub(r"^model\.layers\.(\d+)\.", r"h.\1.", name).replace("_proj", "/proj")
        return name.replace("embed_tokens", "embed")

    expected = {new(n): t for n, t in truth(TRAINER).state_dict(torch.float32).items()}
    tied = {new(a): new(n) for a, n in truth(TRAINER).tied.items()}
    assert report.tied == tied
    assert report.notes == ("rename module changes no name",)
    found: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors" if to == "safetensors" else "*.bin")):
        found |= load_file(path) if to == "safetensors" else torch.load(path, weights_only=True)
    expected |= {a: expected[n] for a, n in tied.items()} if to == "torch" else {}
    assert _same(found, expected)
    index = {"safetensors": "model.safetensors.index.json", "torch": "pytorch_model.bin.index.json"}[to]
    assert json.loads((tmp_path / "out" / index).read_text())["weight_map"].keys() == expected.keys()


@pytest.mark.parametrize(
    ("rule", "wrap"),
    [
        ("module", lambda m: _Holder(module=m)),
        ("compile", lambda m: torch.compile(m)),
        ("fsdp", lambda m: _wrapped_for_activation_checkpoints(m)),
        ("peft", lambda m: _Holder(base_model=_Holder(model=m))),
    ],
)
def test_wrappers_names_become_those_of_the_model(rule: str, wrap: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = wrap(model)
    assert wrapped.state_dict().keys() != plain.keys()
    save_file({n: t.clone() for n, t in wrapped.state_dict().items()}, tmp_path / "wrapped.safetensors")
    ckpttool.consolidate(tmp_path / "wrapped.safetensors", tmp_path / "out", to="safetensors", rename=[rule])
    assert _same(load_file(tmp_path / "out/model.safetensors"), plain)


class _Holder(torch.nn.Module):  # type: ignore[misc]  # mypy does not follow torch
    """Holds modules under names, as wrappers do."""

    def __init__(self, **modules: torch.nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def _wrapped_for_activation_checkpoints(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.model.layers[0] = _Holder(_fsdp_wrapped_module=checkpoint_wrapper(model.model.layers[0]))
    model.model.layers[1] = _Holder(_fsdp_wrapped_module=model.model.layers[1])
    # The wrapper hides its own name from state dicts; older releases of torch did not.
    assert not any("_checkpoint_wrapped" in name for name in model.state_dict())
    return model


def test_a_tied_name_that_the_header_needs_is_refused(tmp_path: Path) -> None:
    rules = ["s/^head.weight$/format/"]
    with refused(ckpttool.PlanError):
        ckpttool.consolidate(source("zero3-dp2-bf16"), tmp_path / "out", to="safetensors", rename=rules)


def test_tied_name_that_becomes_its_owners_is_left_out(tmp_path: Path) -> None:
    name = "zero3-dp2-bf16"
    assert truth(name).tied == {"head.weight": "embed.weight"}
    report = ckpttool.consolidate(source(name), tmp_path / "out", to="torch", rename=["s/^(head|embed)/both/"])
    assert report.tied == {}
    assert "both.weight" in torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rename", r"s/\.[01]\./.0./"], "would have both model.layers.0.self_attn.q_proj.weight and "),
        (["--rename", "s/nothing/x/"], "holds no name that 's/nothing/x/' changes; correct --rename"),
        (["--rename", "s/.*//"], "would have model.embed_tokens.weight renamed to nothing; correct --rename"),
        (["--rename", "s/.*/__metadata__/", "--include", "model.norm.*"], "safetensors cannot hold it"),
        (["--rename", "s/a/b"], "--rename: is 's/a/b', which does not have two parts and then g or i; write 's/"),
        (["--rename", "ddp"], "--rename: is 'ddp', which is not a rule; write 's/PATTERN/REPLACEMENT/', or one of mod"),
        (["--rename", "s/(/x/"], "which is not a regular expression: missing )"),
        (["--rename", "s/a/\\2/"], "which is not a regular expression: invalid group reference 2"),
        (["--rename-map", "MAP"], "holds no layer.weight, which the table of new names lists; correct --rename-map"),
        (["--rename-map", "LIST"], "list.json: is not a JSON object of new names by old ones"),
        (["--rename-map", "TWICE"], "twice.json: gives 'model.norm.weight' two new names; leave one of them out"),
        (["--rename-map", "none.json"], "none.json: does not exist"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_is_written(options: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"layer.weight": "x"}')
    (tmp_path / "list.json").write_text('["layer.weight"]')
    (tmp_path / "twice.json").write_text('{"model.norm.weight": "a", "model.norm.weight": "b"}')
    options = [str(tmp_path / f"{o.lower()}.json") if o in {"MAP", "LIST", "TWICE"} else o for o in options]
    error = command("consolidate", source(TRAINER), tmp_path / "out", "--to", "safetensors", *options).error
    assert message in error
    assert not (tmp_path / "out").exists()


def test_table_that_is_no_table_is_refused() -> None:
    with refused(ArgumentError):
        ckpttool.consolidate(source(TRAINER), "out", to="safetensors", rename_map={"a": 1})  # type: ignore[dict-item]


def test_help_names_every_ready_made_map() -> None:
    helped = " ".join(command("consolidate", "--help").stdout.split())
    assert f"a ready-made map: {', '.join(READY_MADE)}" in helped


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


def test_a_note_names_the_exports_of_an_adapter(tmp_path: Path) -> None:
    whole, adapter = (
        ckpttool.consolidate(source(NAMES[0]), tmp_path / str(alone), to="safetensors", adapter_only=alone).notes
        for alone in (False, True)
    )
    told = "contains a LoRA adapter under PEFT's names: adapter_only exports it for PEFT"
    assert [note.partition(",")[0] for note in (*whole, *adapter) if "LoRA" in note] == [told]


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
    with refused(PlanError):
        ckpttool.consolidate(source("zero2-dp2-bf16"), tmp_path / "out", to="safetensors", adapter_only=True)
    with refused(PlanError):
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
