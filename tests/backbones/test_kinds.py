"""Later encoders against transformers: states, logits, and every gradient."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import transformers
from folders import CARD
from pairs import (
    assert_near,
    compiled,
    draw_tokens,
    make_batch,
    pair_fixture,
    read_ours,
    read_pair,
    run_torch,
    shake,
)
from safetensors.numpy import load_file, save_file
from tiny import BERT, CONFIGS, jit, make_tiny

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.save import save_backbone
from jaxprompt.errors import InputError
from jaxprompt.tree import flatten
from jaxprompt.types import Injection, Prefix, Stream

torch = pytest.importorskip("torch")

SIZES = BERT | dict(vocab_size=60)
# Their positions count the tokens that are no padding.
OFFSET = SIZES | dict(pad_token_id=1, layer_norm_eps=1e-5)
EUROBERT = CONFIGS["eurobert"] | dict(vocab_size=60, pad_token_id=0, initializer_range=0.2)
# Texts of more tokens than are told apart one by one.
RELATIVE = SIZES | dict(
    relative_attention=True, position_biased_input=False, type_vocab_size=0,
    pos_att_type=["p2c", "c2p"], max_position_embeddings=12,
)  # fmt: skip
V3 = RELATIVE | dict(position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True)
KINDS = {
    "v3": ("deberta_v2", "DebertaV2ForMaskedLM", V3),
    "v2-xlarge": (
        "deberta_v2", "DebertaV2ForMaskedLM",
        V3 | dict(conv_kernel_size=3, conv_act="gelu", legacy=False),
    ),
    "v2-apart": (
        "deberta_v2", "DebertaV2ForMaskedLM",
        RELATIVE | dict(embedding_size=12, max_relative_positions=5, pos_att_type="c2p",
                        position_biased_input=True, type_vocab_size=2),
    ),
    "v1": ("deberta", "DebertaForMaskedLM", RELATIVE | dict(max_relative_positions=6)),
    "albert": ("albert", "AlbertForMaskedLM", SIZES | dict(embedding_size=12)),
    "albert-groups": (
        "albert", "AlbertForMaskedLM",
        SIZES | dict(num_hidden_layers=3, num_hidden_groups=2, inner_group_num=2,
                     embedding_size=16),
    ),
    "modernbert": (
        "modernbert", "ModernBertForMaskedLM",
        CONFIGS["modernbert"]
        | dict(rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        }),
    ),
    "modernbert-biased": (
        "modernbert", "ModernBertForMaskedLM",
        CONFIGS["modernbert"] | dict(
            layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2,
            norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True,
            decoder_bias=False,
        ),
    ),
    "distilbert": (
        "distilbert", "DistilBertForMaskedLM",
        CONFIGS["distilbert"] | dict(vocab_size=60, activation="relu"),
    ),
    "mpnet": ("mpnet", "MPNetForMaskedLM", OFFSET),
    "xlm-roberta-xl": ("xlm_roberta_xl", "XLMRobertaXLForMaskedLM", OFFSET),
    "eurobert": ("eurobert", "EuroBertForMaskedLM", EUROBERT),
    "eurobert-biased": (
        "eurobert", "EuroBertForMaskedLM",
        EUROBERT | dict(
            attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=4,
            rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=500.0),
        ),
    ),
    "v1-plain": ("deberta", "DebertaForMaskedLM", SIZES | dict(legacy=False)),
}  # fmt: skip


def save(folder, kind):
    torch.manual_seed(len(kind))
    model_class = getattr(transformers, KINDS[kind][1])
    shake(model_class(model_class.config_class(**KINDS[kind][2]))).save_pretrained(folder)
    return folder


folder = pair_fixture(save)


def draw_batch(config, side="right"):
    types = config.get("type_vocab_size") or 1
    tokens = draw_tokens(
        config["vocab_size"], side, (11, 7, 1), 11, seed=3, types=types, pad=pad_of(config)
    )
    return make_batch(tokens)


def pad_of(config):
    return config.get("pad_token_id") or 0


def expect(model, batch):
    types = torch.tensor(batch.encoder.types).long()
    inputs = dict(use_cache=None, token_type_ids=types)
    if model.config.model_type in ("modernbert", "distilbert", "mpnet", "eurobert"):
        inputs["token_type_ids"] = None
    if model.config.model_type in ("mpnet", "xlm-roberta-xl"):
        inputs["position_ids"] = None
    return run_torch(model, batch.encoder, **inputs)


def scores(module, batch):
    hidden = module(batch, Injection(), deterministic=True)
    table, bias = module.lm_table()
    logits = jnp.einsum("btx,vx->btv", module.lm_features(hidden), table)
    return hidden, logits if bias is None else logits + bias


def states(module, batch, injection):
    return module(batch, injection, deterministic=True)


@pytest.mark.default_cases(
    "v3", "v2-xlarge", "albert", "modernbert", "distilbert", "mpnet", "xlm-roberta-xl", "eurobert"
)
@pytest.mark.parametrize("kind", KINDS)
def test_states_logits_and_gradients(folder, tmp_path, kind):
    where, (family, name, _) = folder(kind), KINDS[kind]
    pair = read_pair(where, family, getattr(transformers, name))
    for side in ("left", "right"):
        batch = draw_batch(pair.config, side)
        expected, mask = expect(pair.torch, batch), batch.encoder.mask
        hidden, logits = compiled(pair.module, scores)(pair.params, batch)
        assert_near(hidden, expected.hidden_states[-1].detach(), 1e-4, mask)
        assert_near(logits, expected.logits.detach(), 1e-4, mask)
        assert expected.logits.std() > 0.1
    weigh = np.random.default_rng(0).normal(size=logits.shape) * mask[..., None] / 10
    (expected.logits * torch.tensor(weigh).float()).sum().backward()
    # Saved in the weights' place, gradients come back by our names.
    (tmp_path / "config.json").write_text(json.dumps(pair.config))
    tensors = load_file(where / "model.safetensors")
    actual = {n: p.grad for n, p in pair.torch.named_parameters() if p.grad is not None}
    save_file(
        {n: actual[n].numpy() if n in actual else 0 * x for n, x in tensors.items()},
        tmp_path / "model.safetensors",
    )
    expected = load_backbone(tmp_path, family, pair.config).params
    loss = lambda p: (pair.module.apply({"params": p}, batch, method=scores)[1] * weigh).sum()
    gradients = jit(jax.grad(loss))(pair.params)
    # The padding's row has no gradient in torch.
    pad = pad_of(pair.config)
    gradients["embed"]["word"]["table"] = gradients["embed"]["word"]["table"].at[pad].set(0.0)
    expected["embed"]["word"]["table"][pad] = 0.0
    # A key's bias moves all scores of a query alike: by distances apart, its gradient is rounding.
    gradients, expected = flatten(gradients), flatten(expected)
    assert gradients.keys() == expected.keys()
    for path, reference in expected.items():
        assert_near(gradients[path], reference, 1e-4 * max(np.abs(reference).max(), 1e-2))


@pytest.mark.parametrize("kind", ["v1", "v3"])
def test_a_classifiers_pooler_is_read_and_written(tmp_path, kind):
    family, name, sizes = KINDS[kind]
    model_class = getattr(transformers, name.replace("ForMaskedLM", "ForSequenceClassification"))
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes)).eval()
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text("{}")
    module, params, report = read_ours(tmp_path / "in", family)
    assert report.heads == ("pooler",)
    assert report.unused == ("classifier.bias", "classifier.weight")
    x = np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32)
    actual = module.apply({"params": params}, x[:, 0], method="pool")
    assert_near(actual, model.pooler(torch.tensor(x)).detach(), 1e-5)
    save_backbone(
        tmp_path / "out", family, read_config(tmp_path / "in"), params, tokenizer=tmp_path / "in",
        card=CARD, run="r",
    )  # fmt: skip
    again = model_class.from_pretrained(tmp_path / "out")
    assert torch.equal(again.pooler.dense.weight, model.pooler.dense.weight)


def test_the_head_is_read_under_the_names_it_was_published_with(folder, tmp_path):
    """What Microsoft published has lm_predictions, and no `legacy` in its config.json."""
    source, (family, name, _) = folder("v2-xlarge"), KINDS["v2-xlarge"]
    (tmp_path / "in").mkdir()
    for file in source.iterdir():
        (tmp_path / "in" / file.name).write_bytes(file.read_bytes())
    config = read_config(source)
    del config["legacy"]
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    (tmp_path / "in/tokenizer.json").write_text("{}")
    module, params, report = read_ours(tmp_path / "in", family)
    assert report.heads == ("mlm",) and not report.unused
    save_backbone(
        tmp_path / "out", family, config, params, tokenizer=tmp_path / "in", card=CARD, run="r"
    )
    models = (getattr(transformers, name).from_pretrained(x) for x in (source, tmp_path / "out"))
    batch = draw_batch(config)
    before, after = (expect(model.eval(), batch).logits.detach().numpy() for model in models)
    np.testing.assert_allclose(after, before, atol=1e-6)
    assert_near(compiled(module, scores)(params, batch)[1], before, 1e-4, batch.encoder.mask)


def test_a_modernbert_that_classifies_has_no_head_for_words(tmp_path):
    model_class = transformers.ModernBertForSequenceClassification
    model_class(model_class.config_class(**CONFIGS["modernbert"])).save_pretrained(tmp_path)
    _, _, report = read_ours(tmp_path, "modernbert")
    assert report.heads == () and report.absent == ("mlm",)


def test_a_prefix_of_a_distilbert_is_that_of_a_bert_without_segments():
    module, params = make_tiny("distilbert")
    bert, _ = make_tiny("bert")
    untyped = params["embed"] | {"type": {"table": jnp.zeros((2, 16))}}
    batch = tiny.make_batch(shift=3)
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 2, 1, 3, 2, 8)).astype(np.float32)
    injection = Injection(Stream(prefix=Prefix(k, v, np.ones((2, 1, 3), bool), None)))
    with_types = params | {"embed": untyped}
    found, expected = (
        compiled(backbone, states)(p, batch, injection)
        for backbone, p in ((module, params), (bert, with_types))
    )
    assert_near(found, expected, 1e-6)


def test_no_kernel_is_promised_for_a_deberta():
    with pytest.raises(InputError, match="attention=fused is not supported for DeBERTa"):
        make_backbone("deberta_v2", CONFIGS["deberta_v2"], ("mlm",), attention="fused")
