"""OPT against torch: models to 1e-4, float32."""

import numpy as np
import pytest
import transformers
from pairs import (
    assert_near,
    draw_tokens,
    make_batch,
    make_tokens,
    pair_fixture,
    randomise,
    read_pair,
    run,
    run_torch,
)
from tiny import CONFIGS

from jaxprompt.backbones import make_backbone
from jaxprompt.errors import InputError
from jaxprompt.types import Injection, Prefix, Stream

torch = pytest.importorskip("torch")

MODEL = 1e-4  # max abs, float32
SIZES = dict(
    vocab_size=60, hidden_size=32, ffn_dim=44, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=20, word_embed_proj_dim=32,
)  # fmt: skip
KINDS = {"plain": {}, "untied": dict(tie_word_embeddings=False, activation_function="gelu")}


def make_pair(folder, kind):
    torch.manual_seed(len(kind))
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**SIZES | KINDS[kind]))
    randomise(model, 0.3).save_pretrained(folder)
    return read_pair(folder, "opt", transformers.OPTForCausalLM)


pairs = pair_fixture(make_pair)


@pytest.mark.default_cases("plain-right")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_model(pairs, kind, side):
    pair, tokens = pairs(kind), draw_tokens(60, side, first=2)
    with torch.no_grad():
        expected = run_torch(pair.torch, tokens)
    hidden, logits = run(pair, make_batch(tokens))
    assert_near(hidden, expected.hidden_states[-1], MODEL, tokens.mask)
    assert_near(logits, expected.logits, MODEL, tokens.mask)
    assert np.asarray(hidden)[tokens.mask].std() > 0.3


@pytest.mark.long
def test_prefix(pairs):
    """Past keys of transformers; the text's positions follow them."""
    pair, length = pairs("plain"), 2
    k, v = np.random.default_rng(1).normal(size=(2, 3, 1, length, 4, 8)).astype(np.float32)
    tokens = draw_tokens(60)
    positions = np.arange(9) * tokens.mask + length
    tokens = make_tokens(tokens.ids, tokens.mask, positions=positions)
    past = transformers.DynamicCache(config=pair.torch.config)
    for layer in range(3):
        rows = (torch.tensor(x[layer]).transpose(1, 2).repeat(3, 1, 1, 1) for x in (k, v))
        past.update(*rows, layer)
    with torch.no_grad():
        expected = run_torch(pair.torch, tokens, past).logits
    prefix = Prefix(k, v, np.ones((3, 1, length), bool), np.arange(length, dtype=np.int32))
    _, logits = run(pair, make_batch(tokens), Injection(Stream(prefix=prefix)))
    assert_near(logits, expected, MODEL, tokens.mask)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(do_layer_norm_before=False), "do_layer_norm_before=false"),
        (dict(enable_bias=False), "enable_bias=false"),
        (dict(word_embed_proj_dim=8), "word_embed_proj_dim=8 must be hidden_size=16"),
    ],
)
def test_what_is_not_supported_is_refused(changes, message):
    """As of opt-350m, whose norms are behind the layers."""
    with pytest.raises(InputError, match=message):
        make_backbone("opt", CONFIGS["opt"] | changes, ("lm",))
