"""Merged adapters equal PEFT's ``merge_and_unload`` to the last bit in fp32, and load in transformers."""

from __future__ import annotations

import copy
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import PlanError
from ckpttool.model.derived import lora
from tests import sampling
from tests.cli.command import ckpttool as command
from tests.model.derived.workers import PickledTasks
from tests.truth import source, truth

if TYPE_CHECKING:
    from pathlib import Path

peft: Any = None
"""The package, from the first test on: importing it takes seconds, which processes with other tests need not spend."""
# PEFT with the tested transformers, and on tied weights and bases that it does not find on the Hub.
pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """PEFT, if it is installed."""
    global peft
    peft = pytest.importorskip("peft", reason="the merge is compared with PEFT's")


TRAINED = ["zero2-dp2-bf16-lora-trainer", "zero3-dp2-bf16-lora-trainer"]


def _llama(*, tied: bool = False, hidden: int = 64) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=53, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, attention_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _gpt2(*, tied: bool = True) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(6)
    config = GPT2Config(vocab_size=53, n_embd=32, n_layer=2, n_head=2, n_positions=16, tie_word_embeddings=tied)
    return GPT2LMHeadModel(config)


def _randomize(model: Any) -> Any:
    """Give adapters values, as training would: PEFT begins with lora_B = 0."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data = parameter.data + noise if "magnitude" in name or "modules_to_save" in name else noise
    return model


def _assert_merged(out: Path, model: Any) -> None:
    """The output has the tensors of PEFT's merge, and transformers computes the same with them."""
    from transformers import AutoModelForCausalLM

    merged = model.merge_and_unload()
    expected = {n: t for n, t in merged.state_dict().items() if "rotary" not in n}
    found = load_file(out / "model.safetensors")
    missing = expected.keys() - found.keys()
    assert missing <= {"lm_head.weight"}  # tied: stored once
    assert found.keys() <= expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    loaded, info = AutoModelForCausalLM.from_pretrained(out, dtype="float32", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(loaded.eval()(tokens).logits, merged.eval()(tokens).logits)


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "LoRA": {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR},
    "rank-stabilised": {"r": 12, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    "DoRA": {"r": 4, "lora_alpha": 6, "target_modules": ALL_LINEAR, "use_dora": True},
    "rank-stabilised DoRA": {"r": 16, "target_modules": ["v_proj"], "use_dora": True, "use_rslora": True},
    "patterns": {
        "r": 4, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 9},
        "alpha_pattern": {"q_proj": 3, "^model.layers.0.self_attn.v_proj": 7},
    },
    "modules to save": {"r": 64, "target_modules": ["k_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "biases": {"r": 2, "target_modules": ["q_proj", "k_proj"], "lora_bias": True},
    "embedding": {"r": 6, "lora_alpha": 7, "target_modules": ["embed_tokens", "up_proj"]},
    "large rank": {"r": 192, "lora_alpha": 3, "target_modules": ["gate_proj"]},  # torch's bits for more differ by CPU
}  # fmt: skip


def _with_adapter(options: dict[str, Any], base: Any) -> Any:
    return _randomize(peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)))


def _save_base(model: Any, directory: Path) -> None:
    model.save_pretrained(directory)


@pytest.mark.parametrize("case", sampling.some(CASES, 9))
def test_merge_equals_peft(case: str, tmp_path: Path) -> None:
    """From PEFT's own files, with the base model in a directory of its own."""
    base = _llama()
    _save_base(base, tmp_path / "base")
    model = _with_adapter(CASES[case], base)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base", prove=True
    )
    _assert_merged(tmp_path / "out", model)


def test_patterns_that_peft_has_sorted_are_noted(tmp_path: Path) -> None:
    """Training takes the first pattern that matches; the file has them sorted."""
    base = _llama()
    _save_base(base, tmp_path / "base")
    options = {"r": 4, "target_modules": ["q_proj"], "alpha_pattern": {"q_proj": 32, "layers.0.self_attn.q_proj": 64}}
    _with_adapter(options, base).save_pretrained(tmp_path / "adapter")
    done = command(
        "consolidate", tmp_path / "adapter", tmp_path / "out", "--to", "safetensors", "--merge-lora", "--base",
        tmp_path / "base",
    )  # fmt: skip
    assert "note: model.layers.0.self_attn.q_proj is scaled by layers.0.self_attn.q_proj in" in done.stdout
    loaded = peft.PeftModel.from_pretrained(_llama(), tmp_path / "adapter")
    _assert_merged(tmp_path / "out", loaded)


def test_a_merge_of_a_larger_rank_differs_from_peft_in_the_last_bits_only(tmp_path: Path) -> None:
    base = _llama()
    _save_base(base, tmp_path / "base")
    model = _with_adapter({"r": 320, "lora_alpha": 3, "target_modules": ["gate_proj"]}, base)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
    )
    expected = model.merge_and_unload().state_dict()
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("case", "stage"), [("LoRA", 3), ("DoRA", 2), ("modules to save", 1), ("embedding", 2)])
def test_base_weights_of_the_checkpoint_itself(case: str, stage: int, tmp_path: Path) -> None:
    """From a ZeRO checkpoint of several ranks with the frozen weights in it."""
    model = _with_adapter(CASES[case], _llama(tied=case == "embedding"))
    state = {n: t.clone() for n, t in model.state_dict().items() if "rotary" not in n}
    if case == "embedding":
        del state["base_model.model.lm_head.weight"]
    save_file(state, tmp_path / "peft.safetensors")
    ckpttool.convert(tmp_path / "peft.safetensors", tmp_path / "zero", to="zero", world_size=3, stage=min(stage, 2))
    if stage == 3:
        ckpttool.convert(tmp_path / "zero", tmp_path / "three", to="universal")
    root = tmp_path / ("three" if stage == 3 else "zero")
    model.peft_config["default"].save_pretrained(root)
    model.get_base_model().config.save_pretrained(root)
    done = command(
        "consolidate", root, tmp_path / "out", "--to", "safetensors", "--merge-lora", "--max-shard-size", "1GB"
    )
    assert done.code == 0, done.stderr
    _assert_merged(tmp_path / "out", model)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapter_that_deepspeed_trained(name: str, dtype: Any, tmp_path: Path) -> None:
    """The Trainer leaves frozen weights out; PEFT loads the adapter that the engine held into the same base."""
    torch.manual_seed(8)
    base = _llama(hidden=16)
    held = {n.partition("/")[2]: t for n, t in truth(name).tensors.items() if n.startswith("adapter_fp32/")}
    widths = {n: t.shape for n, t in held.items()}
    assert widths["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][1] == 16
    _save_base(base, tmp_path / "base")
    shutil.copytree(source(name), tmp_path / "adapter", ignore=shutil.ignore_patterns("global_step*", "*.pt*"))
    (adapter_files := tmp_path / "adapter" / "adapter_model.safetensors").unlink(missing_ok=True)
    save_file({n: t.contiguous() for n, t in held.items()}, adapter_files)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    ckpttool.consolidate(
        source(name),
        tmp_path / "out",
        to="safetensors",
        merge_lora=True,
        base=tmp_path / "base",
        dtype=dtype,
        prove=True,
    )
    merged = model.merge_and_unload().state_dict()
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == {n for n in merged if "rotary" not in n}
    for key, tensor in found.items():
        assert torch.equal(tensor, merged[key].to(tensor.dtype)), key


def test_conv1d_of_gpt2(tmp_path: Path) -> None:
    base = _gpt2()
    _save_base(base, tmp_path / "base")
    options = {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    model = _with_adapter(options, base)
    model.save_pretrained(tmp_path / "adapter")
    ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
    )
    _assert_merged(tmp_path / "out", model)


@pytest.mark.parametrize(
    ("targets", "refused"), [(["attn.c_proj", "lm_head"], True), (["c_attn", "mlp.c_proj", "lm_head"], False)]
)
def test_conv1d_beside_linear_layers(targets: list[str], refused: bool, tmp_path: Path) -> None:
    """PEFT keeps the fan_in_fan_out of the last layer: for a square weight of another kind it is the wrong one."""
    base = _gpt2(tied=False)
    _save_base(base, tmp_path / "base")
    model = _with_adapter({"r": 4, "target_modules": targets, "fan_in_fan_out": True}, base)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    assert not json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["fan_in_fan_out"]
    if refused:
        with pytest.raises(PlanError, match=r"c_proj\.weight, of which fan_in_fan_out does not tell whether it is"):
            ckpttool.consolidate(
                tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
            )
        return
    ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
    )
    _assert_merged(tmp_path / "out", model)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (_gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True},
            "c_attn.weight, which is a Conv1D (fan_in_fan_out): that is not merged here; merge it with PEFT"),
        (_llama, {"target_modules": ["embed_tokens"]},
            "embed_tokens.weight, which is an embedding: that is not merged here; merge it with PEFT"),
    ],
    ids=["Conv1D", "embedding"],
)  # fmt: skip
def test_dora_on_other_layers_than_linear_ones_is_refused(
    build: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = build()
    _save_base(base, tmp_path / "base")
    model = _with_adapter({"r": 4, "use_dora": True, **options}, base)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(PlanError) as caught:
        ckpttool.consolidate(
            tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
        )
    assert message in str(caught.value)


@pytest.mark.parametrize("case", ["LoRA", "DoRA", "embedding"])
def test_parts_of_a_weight_are_merged_alike(
    case: str, s3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In tasks of a cluster that begin and end inside rows, and from bucket to bucket."""
    base = _llama()
    _save_base(base, tmp_path / "base")
    model = _with_adapter(CASES[case], base)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    for name in ("adapter", "base"):
        s3.upload(tmp_path / name, name)
    out = s3.url("out")
    ckpttool.consolidate(s3.url("adapter"), out, to="safetensors", merge_lora=True, base=s3.url("base"), prove=True)
    with monkeypatch.context() as patched:
        patched.setattr("ckpttool.api.consolidate.workers_for", lambda *_: PickledTasks())
        patched.setattr("ckpttool.execution.distributed.TASK_BYTES", 1000)
        ckpttool.consolidate(
            tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
        )
    assert s3.get("out/model.safetensors") == (tmp_path / "out/model.safetensors").read_bytes()
    _assert_merged(tmp_path / "out", model)


def test_several_adapters_merge_in_the_given_order(tmp_path: Path) -> None:
    model = _with_adapter(CASES["LoRA"], _llama())
    model.add_adapter("style", peft.LoraConfig(**CASES["rank-stabilised"]))
    _randomize(model)
    save_file({n: t.clone() for n, t in model.state_dict().items() if "rotary" not in n}, tmp_path / "peft.safetensors")
    root = tmp_path / "run"
    root.mkdir()
    (tmp_path / "peft.safetensors").rename(root / "model.safetensors")
    model.peft_config["default"].save_pretrained(root)
    model.peft_config["style"].save_pretrained(root / "style")
    model.get_base_model().config.save_pretrained(root)
    arguments = ["consolidate", root, tmp_path / "out", "--to", "safetensors", "--merge-lora"]
    error = command(*arguments).error
    assert "holds several adapters: default, style; choose with --adapter" in error
    assert "holds no adapter other; choose one of default, style" in command(*arguments, "--adapter", "other").error
    twice = command(*arguments, "--adapter", "style", "--adapter", "style").error
    assert "would have the adapter style merged twice; name it once with --adapter" in twice
    done = command(*arguments, "--adapter", "style", "--adapter", "default")
    assert "note: merged the adapters style, default, in this order" in done.stdout
    both = copy.deepcopy(model)
    both.base_model.set_adapter(["style", "default"])
    _assert_merged(tmp_path / "out", both)
    assert command(*arguments[:2], tmp_path / "one", *arguments[3:], "--adapter", "style").code == 0
    model.set_adapter("style")
    _assert_merged(tmp_path / "one", model)


@pytest.mark.parametrize("name", ["modules_to_save", "lora_B", "weight", "base_layer"])
def test_adapters_named_like_parts_of_peft(name: str, tmp_path: Path) -> None:
    options = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = _randomize(peft.get_peft_model(_llama(), options, adapter_name=name))
    save_file({n: t.clone() for n, t in model.state_dict().items() if "rotary" not in n}, tmp_path / "peft.safetensors")
    (root := tmp_path / "run").mkdir()
    (tmp_path / "peft.safetensors").rename(root / "model.safetensors")
    options.save_pretrained(root)
    model.get_base_model().config.save_pretrained(root)
    ckpttool.consolidate(root, tmp_path / "out", to="safetensors", merge_lora=True)
    _assert_merged(tmp_path / "out", model)


def test_projection_trained_apart_from_a_tied_embedding_is_not_tied_again(tmp_path: Path) -> None:
    base = _llama(tied=True)
    _save_base(base, tmp_path / "base")
    assert "lm_head.weight" not in load_file(tmp_path / "base/model.safetensors")
    model = _with_adapter({"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, base)
    model.save_pretrained(tmp_path / "adapter")
    report = ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
    )
    assert any(note.startswith("config.json says tie_word_embeddings: false") for note in report.notes)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    _assert_merged(tmp_path / "out", model)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=["embedding", "both", "adapter of the embedding"],
)
@pytest.mark.parametrize("saved_by", ["peft", "deepspeed"])
def test_an_embedding_trained_apart_from_a_tied_projection(
    saved_by: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base = _llama(tied=True)
    _save_base(base, tmp_path / "base")
    model = _with_adapter({"r": 4, **options}, base)
    if saved_by == "peft":
        model.save_pretrained(tmp_path / "adapter")
    else:
        state = {n: t for n, t in model.state_dict().items() if "rotary" not in n}
        (tmp_path / "adapter").mkdir()
        torch.save(state, tmp_path / "adapter/pytorch_model.bin")  # torch.save keeps ties, as DeepSpeed does
        model.peft_config["default"].save_pretrained(tmp_path / "adapter")
        base.config.save_pretrained(tmp_path / "adapter")
    ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True,
        base=tmp_path / "base" if saved_by == "peft" else None,
    )  # fmt: skip
    _assert_merged(tmp_path / "out", model)


def test_copy_of_an_adapted_embedding_under_its_tied_name_is_refused(tmp_path: Path) -> None:
    base = _llama(tied=True)
    _save_base(base, tmp_path / "base")
    model = _with_adapter({"r": 4, "target_modules": ["embed_tokens"]}, base)
    left = {n: t for n, t in model.state_dict().items() if "lora_" in n or "lm_head" in n}  # as DeepSpeed leaves it
    (tmp_path / "adapter").mkdir()
    torch.save(left, tmp_path / "adapter/pytorch_model.bin")
    model.peft_config["default"].save_pretrained(tmp_path / "adapter")
    with pytest.raises(ckpttool.CkptError, match=r"holds lm_head.weight, which the base model ties to model.embed"):
        ckpttool.consolidate(
            tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
        )
    assert not (tmp_path / "out").exists()


def test_an_embedding_of_gpt2_trained_apart_from_its_tied_projection(tmp_path: Path) -> None:
    base = _gpt2()
    _save_base(base, tmp_path / "base")
    model = _with_adapter({"r": 4, "target_modules": ["c_attn"], "modules_to_save": ["wte"]}, base)
    model.save_pretrained(tmp_path / "adapter")
    report = ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
    )
    assert "lm_head.weight" not in report.tied
    _assert_merged(tmp_path / "out", model)
    assert "lm_head.weight" in load_file(tmp_path / "out/model.safetensors")


def test_a_position_embedding_with_the_shape_of_the_embedding_is_no_projection(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    base = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=32, n_layer=1, n_head=2, n_positions=48))
    _save_base(base, tmp_path / "base")
    model = _with_adapter({"r": 4, "target_modules": ["c_attn"], "modules_to_save": ["wte"]}, base)
    model.save_pretrained(tmp_path / "adapter")
    ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
    )
    _assert_merged(tmp_path / "out", model)
    assert "lm_head.weight" in load_file(tmp_path / "out/model.safetensors")


def _bert(kind: str) -> Any:
    import transformers

    torch.manual_seed(8)
    config = transformers.BertConfig(
        vocab_size=53, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3
    )
    return getattr(transformers, kind)(config)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertLMHeadModel", "BertForPreTraining"])
def test_an_embedding_trained_apart_from_a_projection_of_unknown_name_is_refused(tmp_path: Path, kind: str) -> None:
    base = _bert(kind)
    _save_base(base, tmp_path / "base")
    options = {"r": 4, "target_modules": ["query"], "modules_to_save": ["word_embeddings"]}
    _randomize(peft.get_peft_model(base, peft.LoraConfig(**options))).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ckpttool.CkptError, match=f"word_embeddings in modules_to_save, which {kind} ties to other"):
        ckpttool.consolidate(
            tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "whole"),
    [("BertForSequenceClassification", ["word_embeddings", "classifier"]), ("BertForMaskedLM", ["decoder"])],
)
def test_trained_modules_of_an_encoder_are_loaded_back(tmp_path: Path, kind: str, whole: list[str]) -> None:
    import transformers

    base = _bert(kind)
    _save_base(base, tmp_path / "base")
    options: dict[str, Any] = {"r": 4, "target_modules": ["query"], "modules_to_save": whole}
    model = _randomize(peft.get_peft_model(base, peft.LoraConfig(**options)))
    model.save_pretrained(tmp_path / "adapter")
    ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
    )
    expected = model.merge_and_unload().state_dict()
    loaded = getattr(transformers, kind).from_pretrained(tmp_path / "out").state_dict()
    assert expected.keys() == loaded.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name


def test_all_biases_and_a_classifier(tmp_path: Path) -> None:
    """PEFT saves the classifier's bias under two names."""
    base = _bert("BertForSequenceClassification")
    _save_base(base, tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["query"], bias="all", task_type="SEQ_CLS")
    model = _randomize(peft.get_peft_model(base, config))
    model.save_pretrained(tmp_path / "adapter")
    ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
    )
    expected = model.merge_and_unload().state_dict()
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == load_file(tmp_path / "base/model.safetensors").keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_adapters_of_both_embeddings_that_peft_saved_with_their_base_weights(tmp_path: Path) -> None:
    base = _llama()
    _save_base(base, tmp_path / "base")
    model = _with_adapter({"r": 4, "target_modules": ["embed_tokens", "lm_head"]}, base)
    model.save_pretrained(tmp_path / "adapter")
    assert sum("base_layer" in name for name in load_file(tmp_path / "adapter/adapter_model.safetensors")) == 2
    ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
    )
    _assert_merged(tmp_path / "out", model)


def test_adapter_of_an_embedding_that_peft_saved_with_its_base_weight(tmp_path: Path) -> None:
    base = _llama()
    _save_base(base, tmp_path / "base")
    model = _with_adapter({"r": 4, "target_modules": ["q_proj", "embed_tokens"]}, base)
    model.save_pretrained(tmp_path / "adapter")
    assert any("embed_tokens.base_layer" in n for n in load_file(tmp_path / "adapter/adapter_model.safetensors"))
    ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
    )
    _assert_merged(tmp_path / "out", model)


def test_a_projection_with_another_name_is_not_taken_for_a_tied_one(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=53, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    base = GPTNeoXForCausalLM(config)
    _save_base(base, tmp_path / "base")
    model = _with_adapter({"r": 4, "target_modules": ["query_key_value"], "modules_to_save": ["embed_in"]}, base)
    model.save_pretrained(tmp_path / "adapter")
    report = ckpttool.consolidate(
        tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
    )
    assert not report.tied
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(tmp_path / "base/model.safetensors").keys()
    expected = model.merge_and_unload().state_dict()
    loaded = GPTNeoXForCausalLM.from_pretrained(tmp_path / "out").state_dict()  # it calls embed_out lm_head
    assert expected.keys() == loaded.keys()
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Path]:
    """An adapter and its base model."""
    base = _llama()
    _save_base(base, tmp_path / "base")
    _with_adapter(CASES["rank-stabilised"], base).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", tmp_path / "base"


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_does_not_fit_is_refused_before_anything_is_written(trained: tuple[Path, Path], tmp_path: Path) -> None:
    adapter, base = trained
    arguments = ["consolidate", adapter, tmp_path / "out", "--to", "safetensors", "--merge-lora"]

    def refused(*options: object) -> str:
        error = command(*arguments, *options).error
        assert not (tmp_path / "out").exists()
        return error

    assert "holds no base weight of model.layers.0.mlp.down_proj: frozen weights were left out" in refused()
    _save_base(_llama(hidden=32), tmp_path / "other")
    assert "has an adapter for model.layers.0.mlp.down_proj.weight of shape [64, 192]" in refused(
        "--base", tmp_path / "other"
    )
    _save_base(_gpt2(), tmp_path / "gpt2")
    assert "which the base model lacks; give the model that it was trained on as --base" in refused(
        "--base", tmp_path / "gpt2"
    )
    config = adapter / "adapter_config.json"
    kept = config.read_text()
    for change, message in (
        ({"peft_type": "IA3"}, "has the PEFT method 'IA3' in adapter_config.json, not LORA"),
        ({"layer_replication": [[0, 1]]}, "was trained with layer_replication"),
        ({"lora_alpha": "a"}, "has no number lora_alpha"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changed the weights of the base model"),
        ({"init_lora_weights": "olora"}, "which changed the weights of the base model"),
        ({"alpha_pattern": {"(q_+)+": 2}}, "has '(q_+)+' in alpha_pattern of adapter_config.json, which is no number"),
        ({"alpha_pattern": {"q_proj[": 2}}, "has 'q_proj[' in alpha_pattern"),
        ({"alpha_pattern": {"q_proj": "2"}}, "has 'q_proj' in alpha_pattern"),
        ({"rank_pattern": {"(q_+)+": 2}}, "has '(q_+)+' in rank_pattern of adapter_config.json, which is no number"),
        ({"r": [3]}, "has no number r in adapter_config.json; restore"),
        ({"r": 3}, "has matrices of rank "),
    ):
        _edit(config, **change)
        assert message in refused("--base", base)
        config.write_text(kept)
    config.write_text("[")
    assert "adapter_config.json: is not a JSON object; restore it" in refused("--base", base)
    config.unlink()
    assert "has no adapter_config.json, which records the scaling of the adapter; copy the one" in refused(
        "--base", base
    )
    config.write_text(kept)
    assert (
        "--base: is for the merge of adapters"
        in command("consolidate", base, tmp_path / "out", "--to", "torch", "--base", base).error
    )
    assert (
        "holds no LoRA adapter" in command("consolidate", base, tmp_path / "out", "--to", "torch", "--merge-lora").error
    )
    assert "--merge-lora: writes the merged model" in refused("--exclude-frozen", "--base", base)


def test_tensors_of_every_other_method_of_peft_are_recognised() -> None:
    tuners = peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING.values()
    prefixes = {tuner.prefix for tuner in tuners if hasattr(tuner, "prefix")} - {"lora_"}
    assert len(prefixes) > 20
    unknown = [
        p for p in sorted(prefixes) if not lora.OTHER_METHODS.search(f"base_model.model.layers.0.fc.{p}A.weight")
    ]
    assert not unknown


@pytest.mark.parametrize("apart", [True, False], ids=["base apart", "base in the checkpoint"])
def test_an_adapter_of_multihead_attention_is_refused(apart: bool, tmp_path: Path) -> None:
    base = torch.nn.ModuleDict({"attn": torch.nn.MultiheadAttention(16, 2), "fc": torch.nn.Linear(16, 16)})
    (root := tmp_path / "run").mkdir()
    (tmp_path / "base").mkdir()
    save_file(base.state_dict(), tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["attn", "fc"]))
    if apart:
        model.save_pretrained(root)
    else:
        save_file({n: t.clone() for n, t in model.state_dict().items()}, root / "model.safetensors")
        model.peft_config["default"].save_pretrained(root)
    with pytest.raises(PlanError, match=r"has an adapter of attn, an nn.MultiheadAttention.*merge it with PEFT"):
        ckpttool.consolidate(
            root, tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base" if apart else None
        )
    assert not (tmp_path / "out").exists()


def test_adapter_of_a_tied_projection_is_refused(tmp_path: Path) -> None:
    base = _llama(tied=True)
    _save_base(base, tmp_path / "base")
    _with_adapter({"r": 4, "target_modules": ["lm_head"]}, base).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ckpttool.CkptError, match="has an adapter of lm_head, whose weight the base model ties"):
        ckpttool.consolidate(
            tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
        )
    assert not (tmp_path / "out").exists()


def test_adapter_of_a_tied_projection_is_refused_with_the_base_in_the_checkpoint(tmp_path: Path) -> None:
    model = _with_adapter({"r": 4, "target_modules": ["lm_head"]}, _llama(tied=True))
    state = {n: t.clone() for n, t in model.state_dict().items() if "rotary" not in n}
    embedding, head = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.base_layer.weight"
    del state[head]
    (root := tmp_path / "run").mkdir()
    save_file(state, root / "model.safetensors", metadata={head: embedding, "format": "pt"})
    model.peft_config["default"].save_pretrained(root)
    with pytest.raises(ckpttool.CkptError, match="has an adapter of lm_head, whose weight the base model ties"):
        ckpttool.consolidate(root, tmp_path / "out", to="safetensors", merge_lora=True)


def test_an_embedding_trained_apart_in_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    base = T5ForConditionalGeneration(T5Config(vocab_size=53, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2))
    _save_base(base, tmp_path / "base")
    options = {"r": 4, "target_modules": ["q"], "modules_to_save": ["shared"]}
    peft.get_peft_model(base, peft.LoraConfig(**options)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ckpttool.CkptError, match="was trained with shared in modules_to_save"):
        ckpttool.consolidate(
            tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
        )
