"""Merged adapters are those of PEFT's ``merge_and_unload`` in fp64, within a unit in the last place of fp32."""

from __future__ import annotations

import copy
import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import PlanError
from tests.cli.command import ckpttool as command
from tests.model.workers import PickledTasks
from tests.truth import source, truth
from tests.wording import refused

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

    merged = _merged(model)
    expected = {n: t for n, t in merged.state_dict().items() if "rotary" not in n}
    found = load_file(out / "model.safetensors")
    missing = expected.keys() - found.keys()
    assert missing <= {"lm_head.weight"}  # tied: stored once
    assert found.keys() <= expected.keys()
    for name, tensor in found.items():
        _assert_close(tensor, expected[name], name)
    loaded, info = AutoModelForCausalLM.from_pretrained(out, dtype="float32", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(loaded.eval()(tokens).logits, merged.eval()(tokens).logits)


def _merged(model: Any) -> Any:
    """PEFT's merge, computed in fp64 as ours is: in fp32 it rounds each product and sum."""
    return copy.deepcopy(model).double().merge_and_unload().float()


def _assert_close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    unit = torch.from_numpy(np.spacing(expected.detach().abs().numpy()))
    assert ((found - expected).abs() <= unit).all(), name


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
    "large rank": {"r": 320, "lora_alpha": 3, "target_modules": ["gate_proj"]},
}  # fmt: skip


def _with_adapter(options: dict[str, Any], base: Any) -> Any:
    return _randomize(peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)))


def _save_base(model: Any, directory: Path) -> None:
    model.save_pretrained(directory)


@pytest.mark.parametrize("case", CASES)
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


@pytest.mark.parametrize(("case", "stage"), [("LoRA", 3), ("DoRA", 2), ("modules to save", 1)])
def test_base_weights_of_the_checkpoint_itself(case: str, stage: int, tmp_path: Path) -> None:
    """From a ZeRO checkpoint of several ranks with the frozen weights in it."""
    model = _with_adapter(CASES[case], _llama())
    state = {n: t.clone() for n, t in model.state_dict().items() if "rotary" not in n}
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
    merged = _merged(model).state_dict()
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == {n for n in merged if "rotary" not in n}
    for key, tensor in found.items():
        if dtype == "fp32":
            _assert_close(tensor, merged[key], key)
        else:
            torch.testing.assert_close(tensor, merged[key].to(tensor.dtype), rtol=2**-7, atol=0)


@pytest.mark.parametrize("case", ["LoRA", "DoRA"])
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
        patched.setattr("ckpttool.api._run._workers_of", lambda *_: PickledTasks())
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
    ],
    ids=["embedding", "both"],
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
    with refused(ckpttool.CkptError):
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
    expected = _merged(model).state_dict()
    loaded = getattr(transformers, kind).from_pretrained(tmp_path / "out").state_dict()
    assert expected.keys() == loaded.keys()
    for name, tensor in loaded.items():
        _assert_close(tensor, expected[name], name)


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
    expected = _merged(model).state_dict()
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == load_file(tmp_path / "base/model.safetensors").keys()
    for name, tensor in found.items():
        _assert_close(tensor, expected[name], name)


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
    expected = _merged(model).state_dict()
    loaded = GPTNeoXForCausalLM.from_pretrained(tmp_path / "out").state_dict()  # it calls embed_out lm_head
    assert expected.keys() == loaded.keys()
    for name in expected:
        _assert_close(loaded[name], expected[name], name)


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

    def refusal(*options: object) -> str:
        error = command(*arguments, *options).error
        assert not (tmp_path / "out").exists()
        return error

    assert "holds no base weight of model.layers.0.mlp.down_proj: frozen weights were left out" in refusal()
    _save_base(_llama(hidden=32), tmp_path / "other")
    assert "has an adapter for model.layers.0.mlp.down_proj.weight of shape [64, 192]" in refusal(
        "--base", tmp_path / "other"
    )
    _save_base(_gpt2(), tmp_path / "gpt2")
    assert "which the base model lacks; give the model that it was trained on as --base" in refusal(
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
        (
            {"alpha_pattern": {"(q_+)+": 2}},
            "has '(q_+)+' in alpha_pattern of adapter_config.json, which is not a number",
        ),
        ({"alpha_pattern": {"q_proj[": 2}}, "has 'q_proj[' in alpha_pattern"),
        ({"alpha_pattern": {"q_proj": "2"}}, "has 'q_proj' in alpha_pattern"),
        ({"rank_pattern": {"(q_+)+": 2}}, "has '(q_+)+' in rank_pattern of adapter_config.json, which is not a number"),
        ({"r": [3]}, "has no number r in adapter_config.json; restore"),
        ({"r": 3}, "has matrices of rank "),
    ):
        _edit(config, **change)
        assert message in refusal("--base", base)
        config.write_text(kept)
    config.write_text("[")
    assert "adapter_config.json: is not a JSON object; restore it" in refusal("--base", base)
    config.unlink()
    assert "has no adapter_config.json, which records the scaling of the adapter; copy the one" in refusal(
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
    assert "--merge-lora: writes the merged model" in refusal("--exclude-frozen", "--base", base)


def _conv1d() -> tuple[Any, Any]:
    return _gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)


def _conv1d_beside_linear() -> tuple[Any, Any]:
    """PEFT records the ``fan_in_fan_out`` of the last layer, which is false, and a square weight does not say."""
    return _gpt2(tied=False), peft.LoraConfig(r=4, target_modules=["attn.c_proj", "lm_head"], fan_in_fan_out=True)


def _embedding() -> tuple[Any, Any]:
    return _llama(), peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"])


def _biases() -> tuple[Any, Any]:
    return _llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True)


def _other_method() -> tuple[Any, Any]:
    return _llama(), peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])


def _mixed() -> tuple[Any, Any]:
    model = peft.get_peft_model(_llama(), peft.LoHaConfig(target_modules=["q_proj"]), mixed=True)
    model.add_adapter("other", lora := peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model, lora


REFUSED: dict[str, tuple[Any, str]] = {
    "Conv1D": (_conv1d, "was trained with fan_in_fan_out"),
    "Conv1D beside linear layers": (_conv1d_beside_linear, "c_proj.weight, which may be a Conv1D"),
    "embedding": (_embedding, "lora_embedding_A"),
    "biases": (_biases, "lora_B.bias, which is not of LoRA or DoRA of a linear layer"),
    "another method": (_other_method, "holds no LoRA adapter"),
    "two methods": (_mixed, "hada_w1_a.default, which is not of LoRA or DoRA"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_but_lora_of_linear_layers_is_refused(case: str, tmp_path: Path) -> None:
    build, message = REFUSED[case]
    base, config = build()
    (root := tmp_path / "adapter").mkdir()
    if case == "two methods":
        state = base.state_dict()
        save_file({n: t.clone() for n, t in state.items() if "rotary" not in n}, root / "model.safetensors")
        config.save_pretrained(root)
        given = None
    else:
        _save_base(base, given := tmp_path / "base")
        _randomize(peft.get_peft_model(base, config)).save_pretrained(root, save_embedding_layers=False)
    with pytest.raises(PlanError) as caught:
        ckpttool.consolidate(root, tmp_path / "out", to="safetensors", merge_lora=True, base=given)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


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
    message = (
        "has an adapter of attn, an nn.MultiheadAttention" if apart else "attn.base_layer.in_proj_bias, which is not"
    )
    with pytest.raises(PlanError, match=f"{message}.*merge it with PEFT"):
        ckpttool.consolidate(
            root, tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base" if apart else None
        )
    assert not (tmp_path / "out").exists()


def test_adapter_of_a_tied_projection_is_refused(tmp_path: Path) -> None:
    base = _llama(tied=True)
    _save_base(base, tmp_path / "base")
    _with_adapter({"r": 4, "target_modules": ["lm_head"]}, base).save_pretrained(tmp_path / "adapter")
    with refused(ckpttool.CkptError):
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
    with refused(ckpttool.CkptError):
        ckpttool.consolidate(root, tmp_path / "out", to="safetensors", merge_lora=True)


def test_an_embedding_trained_apart_in_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    base = T5ForConditionalGeneration(T5Config(vocab_size=53, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2))
    _save_base(base, tmp_path / "base")
    options = {"r": 4, "target_modules": ["q"], "modules_to_save": ["shared"]}
    peft.get_peft_model(base, peft.LoraConfig(**options)).save_pretrained(tmp_path / "adapter")
    with refused(ckpttool.CkptError):
        ckpttool.consolidate(
            tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_lora=True, base=tmp_path / "base"
        )
