"""PEFT's adapter folders, read from peft and loaded back by peft."""

import json

import numpy as np
import pytest
import transformers
from reference_peft import peft
from safetensors.numpy import load_file, save_file

from jaxprompt.convert.peft import (
    prefix_from_peft,
    read_peft,
    tie_layers,
    write_peft,
)
from jaxprompt.errors import InputError

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


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_peft_loads_what_is_written(tmp_path, kind):
    """peft -> numpy -> peft: the logits are the same to the bit."""
    model = adapter(kind)
    model.save_pretrained(tmp_path / "theirs")
    read = read_peft(tmp_path / "theirs")
    prefix = (read.k, read.v) if kind == "prefix" else None
    write_peft(tmp_path / "ours", **SHAPE, soft=read.soft, prefix=prefix, head=read.head)
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
