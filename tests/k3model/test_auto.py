"""transformers' Auto classes resolve K3 checkpoints without remote code, and only after ``register()``."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import k3model
from k3kernels import K3Op
from k3model.config import KimiK3Config
from k3model.network import KimiK3ForConditionalGeneration
from k3model.presets import tiny_config_dict
from k3model.released_names import released_views

transformers = pytest.importorskip("transformers")

NUM_LAYERS = 2
FIRST_SPECIAL = 448
SPECIALS = {
    "<|open|>": 500,
    "<|close|>": 501,
    "<|sep|>": 502,
    "<|media_begin|>": 503,
    "<|media_content|>": 504,
    "<|media_pad|>": 505,
    "<|media_end|>": 506,
    "[BOS]": 507,
    "<|end_of_msg|>": 509,
    "[UNK]": 510,
    "[PAD]": 511,
    "[EOS]": 508,
}


def auto_mappings() -> list[dict[Any, Any]]:
    """Everything that registration may write to."""
    from transformers.models.auto import configuration_auto, modeling_auto, processing_auto, tokenization_auto

    return [
        configuration_auto.CONFIG_MAPPING._extra_content,
        modeling_auto.MODEL_MAPPING._extra_content,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING._extra_content,
        processing_auto.PROCESSOR_MAPPING._extra_content,
        tokenization_auto.TOKENIZER_MAPPING._extra_content,
        tokenization_auto.REGISTERED_TOKENIZER_CLASSES,
    ]


@pytest.fixture
def registered() -> Iterator[None]:
    """K3 registered for one test."""
    mappings = auto_mappings()
    before = [dict(mapping) for mapping in mappings]
    k3model.register()
    yield
    for mapping, content in zip(mappings, before, strict=True):
        mapping.clear()
        mapping.update(content)


def raw_config() -> dict[str, Any]:
    raw = tiny_config_dict()
    raw["text_config"] |= {"num_hidden_layers": NUM_LAYERS}
    raw["text_config"]["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2]}
    return raw


@pytest.fixture(scope="module")
def network() -> KimiK3ForConditionalGeneration:
    """A network whose experts lie on the MXFP4 grid."""
    torch.manual_seed(0)
    network = KimiK3ForConditionalGeneration.from_config(KimiK3Config.from_dict(raw_config())).bfloat16()
    quantize, decode = K3Op("mxfp4", "quantize", "eager"), K3Op("mxfp4", "dequantize", "eager")
    with torch.no_grad():
        for name, view in released_views(network):
            if ".experts." in name:
                view.copy_(decode(*quantize(view, rule="compressed-tensors"), dtype=torch.bfloat16))
    return network.eval()


def write_folder(folder: Path, network: KimiK3ForConditionalGeneration, *, packed: bool, root: str) -> None:
    """A checkpoint as another tool would write it; what it declares about remote code must not matter."""
    quantize = K3Op("mxfp4", "quantize", "eager")
    tensors: dict[str, Tensor] = {}
    for name, view in released_views(network):
        stored_name = name.removeprefix("language_model.") if root == "bare" else name
        if packed and ".experts." in name:
            tensors[f"{stored_name}_packed"], tensors[f"{stored_name}_scale"] = quantize(
                view, rule="compressed-tensors"
            )
        elif name.endswith("A_log"):
            tensors[stored_name] = torch.nn.functional.pad(view, (0, 128 - view.numel()))
        else:
            tensors[stored_name] = view.clone()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(raw_config()))
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "auto_map": {"AutoProcessor": "kimi_k3_processor.KimiK3Processor"},
                "media_proc_cfg": {"in_patch_limit": 64, "image_mean": [0.5, 0.5, 0.5]},
            }
        )
    )
    ranks = [bytes([value]) for value in range(256)] + [b"%03d" % number for number in range(FIRST_SPECIAL - 256)]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
                "added_tokens_decoder": {str(i): {"content": name, "special": True} for name, i in SPECIALS.items()},
                "bos_token": "[BOS]",
                "eos_token": "[EOS]",
                "pad_token": "[PAD]",
                "unk_token": "[UNK]",
                "tokenizer_class": "TikTokenTokenizer",
            }
        )
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, network: KimiK3ForConditionalGeneration) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    write_folder(folder, network, packed=True, root="language_model")
    return folder


IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModelForImageTextToText"])
@torch.no_grad()
def test_row_64_auto_models_load_a_packed_checkpoint(
    registered: None, folder: Path, network: KimiK3ForConditionalGeneration, auto_class: str
) -> None:
    loaded = getattr(transformers, auto_class).from_pretrained(folder)

    assert isinstance(loaded, KimiK3ForConditionalGeneration)
    assert not loaded.training
    assert torch.equal(loaded(input_ids=IDS).logits, network(IDS).logits)


@pytest.mark.parametrize("root", ["language_model", "bare"])
@torch.no_grad()
def test_row_64_a_plain_checkpoint_loads_under_either_root(
    registered: None, tmp_path: Path, network: KimiK3ForConditionalGeneration, root: str
) -> None:
    write_folder(tmp_path, network, packed=False, root=root)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, ops={"moe": "grouped_mm"})

    assert loaded.language_model.lm_head.weight.dtype == torch.float32
    for (name, got), (_, want) in zip(released_views(loaded), released_views(network), strict=True):
        assert torch.equal(got, want.float()), name


def test_row_64_a_config_resolves_to_k3_and_back_to_the_native_one(registered: None, folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)

    assert config.model_type == "kimi_k3"
    assert config.text_config.hidden_size == 128
    assert config.native() == KimiK3Config.from_dict(raw_config())
    assert config.native().unknown_keys == ()


@pytest.mark.parametrize("library", ["present", "deleted"])
def test_row_87_the_inner_type_resolves_to_k3_with_the_librarys_own_present_or_deleted(
    registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if library == "deleted":
        monkeypatch.delitem(CONFIG_MAPPING._mapping, "kimi_linear", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(raw_config()["text_config"]))

    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config)

    assert isinstance(model, KimiK3ForConditionalGeneration)
    assert model.config.vision is None
    assert model.config.text == KimiK3Config.from_dict(raw_config()).text


def test_row_87_k3_registers_where_the_library_never_knew_the_inner_type(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    monkeypatch.delitem(CONFIG_MAPPING._mapping, "kimi_linear", raising=False)
    mappings = auto_mappings()
    before = [dict(mapping) for mapping in mappings]

    k3model.register()
    k3model.register()

    assert CONFIG_MAPPING["kimi_linear"].__module__ == "k3model.auto.configuration"
    for mapping, content in zip(mappings, before, strict=True):
        mapping.clear()
        mapping.update(content)


def test_row_64_an_older_kimi_linear_config_stays_the_librarys(registered: None, tmp_path: Path) -> None:
    kimi_linear = pytest.importorskip("transformers.models.kimi_linear")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_linear", "num_hidden_layers": 4}))

    config = transformers.AutoConfig.from_pretrained(tmp_path)

    assert type(config) is kimi_linear.KimiLinearConfig


def test_an_older_config_is_refused_where_the_library_has_no_class(
    registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_linear", "num_hidden_layers": 4}))
    monkeypatch.setattr("k3model.auto.configuration.find_spec", lambda name: None)

    with pytest.raises(ValueError, match="is not K3's"):
        transformers.AutoConfig.from_pretrained(tmp_path)


def test_the_tokenizer_resolves_and_gives_texts_back(registered: None, folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    encoded = tokenizer(["héllo 你好", "a"], padding=True)

    assert type(tokenizer).__module__ == "k3model.auto.tokenization"
    assert tokenizer.decode(encoded["input_ids"][0]) == "héllo 你好"
    assert encoded["input_ids"][1][-1] == tokenizer.pad_token_id == 511
    assert tokenizer.convert_tokens_to_ids("<|open|>") == 500
    assert len(tokenizer) == 512


def test_the_tokenizer_encodes_conversations_with_their_loss_mask(registered: None, folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    one = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    two = [{"role": "user", "content": "<|open|>"}]

    batch = tokenizer.apply_chat_template(
        [one, two], padding=True, return_assistant_tokens_mask=True, thinking_effort=None, return_tensors="pt"
    )

    ids, mask, trained = batch["input_ids"], batch["attention_mask"], batch["assistant_masks"]
    assert ids.shape == mask.shape == trained.shape
    alone = tokenizer.apply_chat_template(one, thinking_effort=None)["input_ids"]
    assert ids[0][mask[0].bool()].tolist() == alone
    assert tokenizer.decode(ids[0][trained[0].bool()]).endswith(
        "yes<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    assert int(trained[1].sum()) == 0
    assert ids[1].tolist().count(500) == 1  # what the user typed is no control token


def test_the_default_thinking_effort_of_a_conversation_is_max(registered: None, folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)

    assert "`thinking_effort=max`" in text


def test_a_saved_tokenizer_is_the_same(registered: None, folder: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())

    tokenizer.save_pretrained(tmp_path)

    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again("x<|sep|>").input_ids == tokenizer("x<|sep|>").input_ids


@torch.no_grad()
def test_the_processor_resolves_and_its_batch_runs(registered: None, folder: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    content = [{"type": "image", "image": Image.new("RGB", (60, 40))}, {"type": "text", "text": "?"}]

    batch = processor.apply_chat_template([{"role": "user", "content": content}], thinking=False)

    assert processor.image_processor.max_patches == 64
    assert batch["grid_thws"].tolist() == [[1, 4, 6]]
    assert batch["input_ids"][0].tolist().count(505) == 1
    assert model(**batch).logits.shape == (1, batch["input_ids"].shape[1] + 5, 512)


@pytest.mark.parametrize(
    "settings",
    [
        {"transparent_bg_config": {"pattern": "white"}},
        {"transparent_bg_config": {"pattern": "chessboard", "chessboard_square_on_top_left": False}},
        {"transparent_bg_fill_stage": "before_resize"},
        {"image_mean": [0.5, 0.4, 0.5]},
    ],
    ids=str,
)
def test_preprocessing_of_another_kind_is_refused(
    registered: None, folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    for name in ("config.json", "tiktoken.model", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": settings}))

    with pytest.raises(ValueError, match=r"transparent|image_mean"):
        transformers.AutoProcessor.from_pretrained(tmp_path)


def test_an_option_that_means_nothing_is_refused(registered: None, folder: Path) -> None:
    with pytest.raises(TypeError, match="quantization_config"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config={"a": 1})


def test_weights_and_config_that_do_not_belong_together_are_refused(
    registered: None, tmp_path: Path, network: KimiK3ForConditionalGeneration
) -> None:
    write_folder(tmp_path, network, packed=True, root="language_model")
    raw = raw_config()
    raw["text_config"]["attn_res_block_size"] = None
    (tmp_path / "config.json").write_text(json.dumps(raw))

    with pytest.raises(ValueError, match=r"have no place in the network.*_res_"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


SNAPSHOT = """
import importlib, json, pkgutil, sys, warnings
import torch, transformers, transformers.activations
from transformers.models.auto import configuration_auto, modeling_auto, tokenization_auto

def snapshot():
    return {
        "activations": {name: id(value) for name, value in vars(transformers.activations).items()},
        "functional": {name: id(value) for name, value in vars(torch.nn.functional).items()},
        "tensor": {name: id(value) for name, value in vars(torch.Tensor).items()},
        "module": {name: id(value) for name, value in vars(torch.nn.Module).items()},
        "configs": sorted(configuration_auto.CONFIG_MAPPING._extra_content),
        "models": len(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content),
        "tokenizers": sorted(tokenization_auto.REGISTERED_TOKENIZER_CLASSES),
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "seed": torch.initial_seed(),
        "warnings": len(warnings.filters),
    }

before = snapshot()
import k3kernels, k3model, k3convert
names = [module.name for module in pkgutil.walk_packages(k3model.__path__, "k3model.")]
for name in [*names, "k3convert.loading"]:
    importlib.import_module(name)
after = snapshot()
print(json.dumps({"changed": [key for key in before if before[key] != after[key]], "modules": len(names)}))
"""


def test_row_84_importing_everything_changes_nothing_in_transformers_or_torch() -> None:
    result = subprocess.run([sys.executable, "-c", SNAPSHOT], capture_output=True, text=True, check=True)

    found = json.loads(result.stdout.splitlines()[-1])
    assert found["changed"] == []
    assert found["modules"] > 30


@pytest.mark.parametrize("package", ["k3model", "k3kernels", "k3convert"])
def test_importing_a_package_imports_no_torch_and_no_transformers(package: str) -> None:
    script = f"import sys, {package}; print({{'torch', 'transformers'}} & set(sys.modules))"

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "set()"
