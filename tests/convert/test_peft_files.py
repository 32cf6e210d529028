"""PEFT's adapter folders, read from peft and loaded back by peft."""

import json

import numpy as np
import pytest
import transformers
from exports import make_metadata
from reference_peft import peft
from safetensors.numpy import load_file, save_file

from jaxprompt.api.prompts import load_prompt
from jaxprompt.build.initial_params import load_soft_tokens
from jaxprompt.convert.artifact import write_artifact
from jaxprompt.convert.peft import (
    prefix_from_peft,
    read_peft,
    tie_layers,
    write_peft,
)
from jaxprompt.errors import InputError
from jaxprompt.serving.adapters import import_prompt, is_adapter

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

P, LAYERS, HEADS, WIDTH = 5, 3, 4, 16
SIZES = dict(
    vocab_size=50, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    intermediate_size=20, max_position_embeddings=32,
)  # fmt: skip
SHAPE = dict(base="tiny-bert", layers=LAYERS, heads=HEADS)


def classifier(seed=0):
    torch.manual_seed(seed)
    config = transformers.BertConfig(**SIZES, num_labels=3, initializer_range=0.2)
    return transformers.BertForSequenceClassification(config).eval()


def logits(model):
    ids = torch.tensor([[2, 7, 8, 9, 3], [2, 6, 3, 0, 0]])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=(ids > 0).long()).logits


def adapter(kind):
    config = {
        "prompt": peft.PromptTuningConfig,
        "prefix": peft.PrefixTuningConfig,
        "p-tuning": peft.PromptEncoderConfig,
        "cartridge": peft.CartridgeConfig,
    }[kind](task_type="SEQ_CLS", num_virtual_tokens=P)
    model = peft.get_peft_model(classifier(), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return model


def peft_keys_and_values(model):
    """The [B, N, P, D] keys and values that peft hands to each layer."""
    cache = model.get_prompt(batch_size=1)
    cache = getattr(cache, "self_attention_cache", cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def test_prefix_is_read_as_peft_uses_it(tmp_path):
    model = adapter("prefix")
    model.save_pretrained(tmp_path)
    read = read_peft(tmp_path)
    assert read.method == "prefix" and read.soft is None
    assert read.k.shape == read.v.shape == (LAYERS, P, HEADS, WIDTH // HEADS)
    for i, (key, value) in enumerate(peft_keys_and_values(model)):  # [N, P, D]
        np.testing.assert_array_equal(read.k[i], key.detach().numpy().transpose(1, 0, 2))
        np.testing.assert_array_equal(read.v[i], value.detach().numpy().transpose(1, 0, 2))


@pytest.mark.parametrize("kind", ["prompt", "p-tuning"])
def test_soft_prompt_is_read(tmp_path, kind):
    model = adapter(kind)
    model.save_pretrained(tmp_path)
    read = read_peft(tmp_path)
    assert read.method == "soft" and read.k is None and read.v is None
    expected = model.get_prompt(batch_size=1)[0].detach().numpy()
    np.testing.assert_allclose(read.soft, expected, atol=1e-6)
    head = model.base_model.classifier.modules_to_save["default"]
    np.testing.assert_array_equal(read.head["classifier.weight"], head.weight.detach().numpy())
    np.testing.assert_array_equal(read.head["classifier.bias"], head.bias.detach().numpy())


@pytest.mark.parametrize(
    "kind, peft_type",
    [("prompt", None), ("p-tuning", "P_TUNING"), ("prefix", None), ("cartridge", "CARTRIDGE")],
)
def test_peft_loads_what_is_written(tmp_path, kind, peft_type):
    """peft -> numpy -> peft: the logits are the same to the bit."""
    model = adapter(kind)
    model.save_pretrained(tmp_path / "theirs")
    read = read_peft(tmp_path / "theirs")
    prefix = (read.k, read.v) if read.method == "prefix" else None
    form = dict(soft=read.soft, prefix=prefix, head=read.head, peft_type=peft_type)
    write_peft(tmp_path / "ours", **SHAPE, **form)
    loaded = peft.PeftModel.from_pretrained(classifier(), tmp_path / "ours").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.equal(logits(loaded), logits(classifier()))
    ours, theirs = read_peft(tmp_path / "ours"), read_peft(tmp_path / "theirs")
    assert set(ours.config) < set(theirs.config)
    same = set(ours.config) - {"base_model_name_or_path"}
    assert {key: ours.config[key] for key in same} == {key: theirs.config[key] for key in same}


def test_peft_is_told_the_state_of_the_model_on_the_hub(tmp_path):
    for revision in ("v2", ""):
        write_peft(tmp_path, **SHAPE, revision=revision, soft=np.ones((P, WIDTH), np.float32))
        assert peft.PeftConfig.from_pretrained(tmp_path).revision == (revision or None)


@pytest.mark.parametrize("kind", ["soft", "prefix"])
def test_prompt_without_head_for_feature_extraction(tmp_path, kind):
    rng = np.random.default_rng(0)
    soft = rng.normal(size=(P, WIDTH)).astype(np.float32)
    prefix = rng.normal(size=(2, LAYERS, P, HEADS, WIDTH // HEADS)).astype(np.float32)
    write_peft(tmp_path, **SHAPE, **({"soft": soft} if kind == "soft" else {"prefix": prefix}))
    bert = classifier().bert
    model = peft.PeftModel.from_pretrained(bert, tmp_path).eval()
    if kind == "soft":
        np.testing.assert_array_equal(model.get_prompt(1)[0].detach().numpy(), soft)
    else:
        for i, (key, value) in enumerate(peft_keys_and_values(model)):
            np.testing.assert_array_equal(key.detach().numpy().transpose(1, 0, 2), prefix[0, i])
            np.testing.assert_array_equal(value.detach().numpy().transpose(1, 0, 2), prefix[1, i])


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_rows_that_peft_deals_to_a_decoder(layers):
    """Layer i takes row 4i mod 2L of k_0, v_0, k_1, ... as its key, the next as its value."""
    flat = np.arange(P * 2 * layers * WIDTH, dtype=np.float32).reshape(P, -1)
    pair = tie_layers(*prefix_from_peft(flat, layers, HEADS, WIDTH // HEADS))
    rows = flat.reshape(P, 2 * layers, WIDTH)
    for part in (0, 1):
        for layer in range(layers):
            expected = rows[:, (4 * layer + part) % (2 * layers)]
            np.testing.assert_array_equal(pair[part][layer].reshape(P, WIDTH), expected)


def test_a_prefix_is_as_wide_as_its_heads(tmp_path):
    prefix = np.random.default_rng(0).normal(size=(2, LAYERS, P, HEADS, 7)).astype(np.float32)
    write_peft(tmp_path, **SHAPE, prefix=prefix)
    read = read_peft(tmp_path)
    assert read.config["token_dim"] == HEADS * 7
    np.testing.assert_array_equal(read.k, prefix[0])
    np.testing.assert_array_equal(read.v, prefix[1])


def test_half_precision_is_read_as_float32(tmp_path):
    write_peft(tmp_path, **SHAPE, soft=np.ones((P, WIDTH), np.float32))
    path = tmp_path / "adapter_model.safetensors"
    save_file({name: t.astype(np.float16) for name, t in load_file(path).items()}, path)
    assert read_peft(tmp_path).soft.dtype == np.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LORA"}, "peft_type 'LORA' is not supported; use one of PROMPT_TUNING"),
        ({"peft_type": "PREFIX_TUNING", "num_layers": None}, "lacks num_layers"),
        ({"peft_type": "PREFIX_TUNING"}, r"shape \[5, 16\]"),
        ({"peft_type": "CARTRIDGE"}, r"shape \[5, 16\]"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, r"prefix_task_cols \[0, 0, 0\]"),
    ],
)
def test_foreign_adapters_are_one_line(tmp_path, change, message):
    write_peft(tmp_path, **SHAPE, soft=np.ones((P, WIDTH), np.float32))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        read_peft(tmp_path)


def test_broken_adapters_are_one_line(tmp_path):
    write_peft(tmp_path, **SHAPE, soft=np.ones((P, WIDTH), np.float32))
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match="is missing or damaged"):
        read_peft(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match="safe_serialization=True"):
        read_peft(tmp_path)
    save_file({"other": np.zeros(1, np.float32)}, path)
    with pytest.raises(InputError, match="lacks the matrix 'prompt_embeddings'"):
        read_peft(tmp_path)
    save_file({"prompt_embeddings": np.full((P, WIDTH), np.nan, np.float32)}, path)
    with pytest.raises(InputError, match="prompt_embeddings contains NaN"):
        read_peft(tmp_path)


def test_an_export_is_read_instead_of_the_adapter_beside_it(tmp_path):
    """It has the task and any head; `export --output` and `--peft` may name one folder."""
    write_peft(tmp_path, **SHAPE, soft=np.ones((P, WIDTH), np.float32))
    assert is_adapter(str(tmp_path))
    (tmp_path / "prompt.json").touch()
    assert not is_adapter(str(tmp_path))


def multitask(folder, cols=(3, P, 2), rows=(3, 2, WIDTH), modules=1):
    """Writes a random adapter of several tasks. -> its tensors"""
    rng = np.random.default_rng(0)
    shapes = {"prompt_embeddings": (P * modules, WIDTH), "prefix_task_cols": cols}
    shapes["prefix_task_rows"] = rows
    tensors = {name: np.array(rng.normal(size=x), np.float32) for name, x in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "MULTITASK_PROMPT_TUNING", "num_transformer_submodules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors


def test_a_task_of_several_is_chosen(tmp_path):
    embeddings, cols, rows = multitask(tmp_path).values()
    for task in range(3):
        expected = embeddings * np.einsum("pr,re->pe", cols[task], rows[task])
        np.testing.assert_allclose(read_peft(tmp_path, task).soft, expected, rtol=1e-5)
    for task, value in ((None, "3 tasks"), (3, "task_id=3"), (-1, "task_id=-1")):
        with pytest.raises(InputError, match=value):
            read_peft(tmp_path, task)


def test_one_task_need_not_be_chosen(tmp_path):
    """On an encoder-decoder, half of its soft tokens are the decoder's."""
    multitask(tmp_path, (1, 2 * P, 2), (1, 2, WIDTH), modules=2)
    read = read_peft(tmp_path)
    whole = np.concatenate([read.soft, read.decoder_soft])
    np.testing.assert_array_equal(load_soft_tokens(str(tmp_path))[0], whole)
    imported = import_prompt(str(tmp_path), 0)
    assert imported.prompt == {"name": "constant", "slots": P, "decoder_slots": P}
    np.testing.assert_array_equal(imported.tensors["prompt/decoder_slots"], read.decoder_soft)


@pytest.mark.parametrize(
    "cols, rows", [((3, P, 2), (3, 1, WIDTH)), ((3, 1, 2), (3, 2, WIDTH)), ((), (3, 2, WIDTH))]
)
def test_factors_of_other_shapes_are_one_line(tmp_path, cols, rows):
    multitask(tmp_path, cols, rows)
    with pytest.raises(InputError, match="prefix_task_rows"):
        read_peft(tmp_path, 0)


def test_a_task_is_refused_where_there_is_none(tmp_path):
    write_peft(tmp_path, **SHAPE, soft=np.ones((P, WIDTH), np.float32))
    np.save(tmp_path / "soft.npy", np.ones((P, WIDTH), np.float32))
    write_artifact(tmp_path / "export", {"prompt/k": np.ones(1, np.float32)}, make_metadata())
    for path in (tmp_path, tmp_path / "soft.npy", tmp_path / "export"):
        with pytest.raises(InputError, match="task_id=1"):
            load_prompt(path, task_id=1)
    with pytest.raises(InputError, match="prompt.json cannot be read"):  # a misspelt path
        load_prompt(tmp_path / "absent", task_id=1)
