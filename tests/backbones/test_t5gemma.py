"""T5Gemma against transformers: states, logits, prefixes and generated texts."""

import functools

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
)
from tiny import CONFIGS, jit

from jaxprompt.backbones import make_backbone
from jaxprompt.errors import InputError
from jaxprompt.models.generation import generate
from jaxprompt.models.model import Model
from jaxprompt.prompts import make_prompt
from jaxprompt.types import Injection, Prefix, Stream

torch = pytest.importorskip("torch")

MODEL = 1e-4  # max abs, float32
TINY = CONFIGS["t5gemma"]
SHARED = dict(vocab_size=60, pad_token_id=0, initializer_range=0.2)


def config_of(kind):
    """Returns a config: windows that are shorter than the text, or biases and no caps."""
    more = SHARED | dict(sliding_window=3)
    if kind == "plain":
        more |= dict(
            attention_bias=True, attn_logit_softcapping=None, final_logit_softcapping=None,
            hidden_activation="silu", rope_parameters=dict(rope_type="default", rope_theta=50.0),
        )  # fmt: skip
    blocks = {name: TINY[name] | more for name in ("encoder", "decoder")}
    return TINY | blocks | dict(vocab_size=60, tie_word_embeddings=kind != "plain")


def make_pair(folder, kind):
    torch.manual_seed(len(kind))
    model_class = transformers.T5GemmaForConditionalGeneration
    randomise(model_class(transformers.T5GemmaConfig(**config_of(kind)))).save_pretrained(folder)
    return read_pair(folder, "t5gemma", model_class)


pairs = pair_fixture(make_pair)


def expect(pair, batch, past=None):
    """Runs torch; the past keys of the decoder are seen and stand in front."""
    ids, mask, fed, fed_mask, positions = (
        torch.tensor(x).long()
        for x in (
            batch.encoder.ids, batch.encoder.mask, batch.decoder.ids, batch.decoder.mask,
            batch.decoder.positions,
        )
    )  # fmt: skip
    inputs = {}
    if past is not None:
        length = past.get_seq_length()
        fed_mask = torch.cat([torch.ones(len(fed), length, dtype=torch.long), fed_mask], dim=1)
        inputs = dict(past_key_values=past)
    with torch.no_grad():
        return pair.torch(
            input_ids=ids, attention_mask=mask, decoder_input_ids=fed,
            decoder_attention_mask=fed_mask, decoder_position_ids=positions,
            output_hidden_states=True, use_cache=past is not None, **inputs,
        )  # fmt: skip


def batch_of(lengths=(6, 2, 4)):
    return make_batch(draw_tokens(60), draw_tokens(60, "right", lengths, 6, seed=1))


@pytest.mark.default_cases("windows")
@pytest.mark.parametrize("kind", ["windows", "plain"])
def test_states_and_logits(pairs, kind):
    pair, batch = pairs(kind), batch_of()
    expected, mask = expect(pair, batch), batch.decoder.mask
    hidden, logits = run(pair, batch)
    assert_near(hidden, expected.decoder_hidden_states[-1], MODEL, mask)
    assert_near(logits, expected.logits, MODEL, mask)
    assert expected.logits.std() > 0.05


@pytest.mark.long
def test_a_prefix_of_the_decoder_is_past_keys(pairs):
    pair, length = pairs("windows"), 2
    config, rng = pair.module.cfg, np.random.default_rng(1)
    layers = config.decoder_layers
    shape = (2, layers, 1, length, config.key_heads, config.head_dim)
    k, v = rng.normal(size=shape).astype(np.float32)
    batch = batch_of((6, 6, 6))
    fed = batch.decoder
    fed = make_tokens(fed.ids, fed.mask, positions=np.arange(6) * fed.mask + length)
    batch = batch._replace(decoder=fed)
    past = transformers.EncoderDecoderCache(
        transformers.DynamicCache(config=pair.torch.config.decoder), transformers.DynamicCache()
    )
    for layer in range(layers):
        lay = lambda x, layer=layer: torch.tensor(x[layer]).transpose(1, 2).repeat(3, 1, 1, 1)
        past.self_attention_cache.update(lay(k), lay(v), layer)
    expected = expect(pair, batch, past).logits
    mask = np.ones((layers, 1, length), bool)
    prefix = Prefix(k, v, mask, np.arange(length, dtype=np.int32))
    _, logits = run(pair, batch, Injection(decoder=Stream(prefix=prefix)))
    assert_near(logits, expected, MODEL, fed.mask)


@pytest.mark.long
@pytest.mark.parametrize("num_beams", [1, 3])
def test_texts_are_those_of_torch(pairs, num_beams):
    pair, start, end = pairs("windows"), 2, 7
    encoder = draw_tokens(60)
    decoder = make_tokens(np.full((3, 1), start))
    batch = make_batch(encoder, decoder)
    ids, mask = (torch.tensor(x).long() for x in (encoder.ids, encoder.mask))
    how = dict(max_new_tokens=8, num_beams=num_beams)
    expected = pair.torch.generate(
        input_ids=ids, attention_mask=mask, decoder_input_ids=torch.tensor(decoder.ids).long(),
        do_sample=False, eos_token_id=end, pad_token_id=0, use_cache=False, **how,
    ).numpy()[:, 1:]  # fmt: skip
    model = Model(pair.module, make_prompt("none", pair.module.dims), {})
    step = jit(functools.partial(generate, model, eos=end, pad=0, **how))
    actual = np.asarray(step({"backbone": pair.params, "prompt": {}}, batch).ids)
    np.testing.assert_array_equal(actual[:, : expected.shape[1]], expected)
    assert len(np.unique(expected)) > 3


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(decoder=TINY["decoder"] | dict(hidden_size=24)), "width=16 and the decoder 24"),
        (dict(decoder=None), "decoder=None must be the config of the decoder"),
        (dict(is_encoder_decoder=False), "is_encoder_decoder=false"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, words):
    with pytest.raises(InputError, match=words):
        make_backbone("t5gemma", TINY | changes, ("lm",))
