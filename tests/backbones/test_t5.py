"""T5 in all its versions against torch: modules to 1e-5, models to 1e-4, float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import linen as nn
from jax.flatten_util import ravel_pytree
from pairs import (
    BF16_MAX,
    assert_near,
    assert_near_in_16_bits,
    compiled,
    draw_tokens,
    make_batch,
    make_tokens,
    pair_fixture,
    primitives,
    randomise,
    read_ours,
    read_pair,
    run,
    run_torch,
    write_checkpoint,
)
from tiny import make_batch as make_tiny_batch
from tiny import make_params, make_tiny

from jaxprompt.errors import InputError
from jaxprompt.heads import linear
from jaxprompt.heads.verbalizer import log_probabilities
from jaxprompt.layers.attention import Attention
from jaxprompt.models.model import Model
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import cross_entropy
from jaxprompt.types import Injection, Prefix, Stream, TaskInfo

torch = pytest.importorskip("torch")

MODULE, MODEL = 1e-5, 1e-4  # max abs, float32

WIDE = dict(
    vocab_size=60, d_model=32, d_kv=12, d_ff=48, num_layers=3, num_decoder_layers=2, num_heads=4,
    decoder_start_token_id=0, pad_token_id=0,
)  # fmt: skip
DEEP = dict(
    WIDE, vocab_size=97, d_model=24, d_kv=8, num_layers=2, num_decoder_layers=4, num_heads=3,
    relative_attention_num_buckets=8, relative_attention_max_distance=10,
)  # fmt: skip
UNTIED = dict(tie_word_embeddings=False)
# name: (model class, config.json, whether the file holds an output table of its own)
KINDS = {
    "v1.0": ("T5", WIDE | dict(feed_forward_proj="relu"), False),
    "v1.0-deep": ("T5", DEEP | dict(layer_norm_epsilon=1e-3), False),
    "v1.1": ("T5", WIDE | UNTIED | dict(feed_forward_proj="gated-gelu"), True),
    "v1.1-deep": ("T5", DEEP | UNTIED | dict(feed_forward_proj="gated-gelu"), True),
    "gated-silu": ("T5", DEEP | UNTIED | dict(feed_forward_proj="gated-silu"), True),
    "gated-tied": ("T5", WIDE | dict(feed_forward_proj="gated-gelu"), False),
    "gelu": ("T5", WIDE | dict(feed_forward_proj="gelu"), False),
    "relu-untied": ("T5", WIDE | dict(feed_forward_proj="relu"), True),
    "mt5": ("MT5", DEEP | UNTIED | dict(feed_forward_proj="gated-gelu"), True),
    "mt5-tied": ("MT5", WIDE | dict(feed_forward_proj="gated-gelu"), False),
}  # fmt: skip
SIDES = ("right", "left")


def make_pair(folder, kind):
    name, config, untied = KINDS[kind]
    torch.manual_seed(len(kind))
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    model = randomise(model_class(getattr(transformers, f"{name}Config")(**config)))
    tensors = {n: t for n, t in model.state_dict().items() if "embed_tokens" not in n}
    tensors["lm_head.weight"] = torch.randn_like(tensors["shared.weight"])
    if not untied:
        del tensors["lm_head.weight"]
    config = config | dict(model_type=name.lower(), is_encoder_decoder=True)
    write_checkpoint(folder, config, tensors)
    pair = read_pair(folder, "t5", model_class)
    one, other = pair.torch.shared.weight, pair.torch.lm_head.weight
    assert (one is other) == (pair.module.cfg.tied) == (not untied)
    return pair


pairs = pair_fixture(make_pair)


def batch_of(pair, side="right"):
    vocab = pair.config["vocab_size"]
    decoder = draw_tokens(vocab, lengths=(6, 2, 4), width=6, seed=1, first=0)
    return make_batch(draw_tokens(vocab, side), decoder)


@torch.no_grad()
def expect(pair, batch):
    fed, mask = (torch.tensor(x).long() for x in (batch.decoder.ids, batch.decoder.mask))
    return run_torch(
        pair.torch, batch.encoder, position_ids=None, decoder_input_ids=fed,
        decoder_attention_mask=mask,
    )  # fmt: skip


def encode(module, batch):
    return module.encode(batch, Injection(), deterministic=True)


@pytest.mark.default_cases("left-v1.1*", "left-mt5")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_model(pairs, kind, side):
    pair = pairs(kind)
    batch = batch_of(pair, side)
    expected = expect(pair, batch)
    source = compiled(pair.module, encode)(pair.params, batch)
    assert_near(source, expected.encoder_last_hidden_state, MODEL, batch.encoder.mask)
    hidden, logits = run(pair, batch)
    assert_near(hidden, expected.decoder_hidden_states[-1], MODEL, batch.decoder.mask)
    assert_near(logits, expected.logits, MODEL, batch.decoder.mask)
    spread = expected.logits[torch.tensor(batch.decoder.mask)].std()
    assert 0.3 < spread < 20  # 1e-4 of numbers like these means something


def test_fused_attention(pairs):
    pair = pairs("v1.0")
    batch = batch_of(pair, "left")
    module, *_ = read_ours(pair.folder, "t5", attention="fused")
    hidden, _ = run(pair, batch, module=module)
    expected = expect(pair, batch).decoder_hidden_states[-1]
    assert_near(hidden, expected, MODEL, batch.decoder.mask)


@pytest.mark.long_cases("v1.1")
@pytest.mark.parametrize("kind", ["v1.0", "v1.1"])
def test_bfloat16(pairs, kind):
    pair = pairs(kind)
    module, params, _ = read_ours(pair.folder, "t5", dtype="bfloat16")
    batch = batch_of(pair)
    hidden, _ = run(pair, batch, module=module, params=params)
    expected = expect(pair, batch).decoder_hidden_states[-1]
    assert_near_in_16_bits(hidden, expected, batch.decoder.mask)


@pytest.mark.long
def test_gradients_of_unrolled_layers_in_bfloat16():
    """The decoder is short, so its cross attention computes no keys: transposed products."""
    batch = make_tiny_batch(rows=2, family="t5")
    module, params = make_tiny("t5", stack="unroll", d_kv=16)

    def gradient(dtype):
        run = module.clone(cfg=dataclasses.replace(module.cfg, dtype=dtype))

        def loss(slots):
            injection = Injection(Stream(slots, None), Stream(None, None), Stream(None, None))
            return run.apply({"params": params}, batch, injection, deterministic=True).sum()

        return np.asarray(jax.jit(jax.grad(loss))(jnp.ones((1, 2, module.dims.embed))), np.float64)

    batch.encoder.slot[:, :2] = np.arange(2)
    expected, actual = gradient(jnp.float32), gradient(jnp.bfloat16)
    np.testing.assert_allclose(actual, expected, atol=2**-4 * np.abs(expected).max())


def test_norms_softmax_and_logits_are_float32_under_bfloat16(pairs):
    """Of the roots and exponentials in the program; logits are the exact sum of the products."""
    pair = pairs("v1.0")
    module, params, _ = read_ours(pair.folder, "t5", dtype="bfloat16")
    batch = batch_of(pair)

    def scores(module, batch):
        hidden = module(batch, Injection(), deterministic=True)
        return log_probabilities(module, hidden), module.lm_features(hidden)

    program = compiled(module, scores).trace(params, batch).jaxpr
    wide = [
        (equation.primitive.name, equation.invars[0].aval.dtype)
        for equation in primitives(program.jaxpr)
        if equation.primitive.name in ("rsqrt", "exp", "reduce_max", "log")
    ]
    # 3 x 2 and 2 x 3 norms and the 2 last ones; 3 and 2 x 2 softmaxes and that of the scores.
    assert [name for name, _ in wide].count("rsqrt") == 14
    assert [name for name, _ in wide].count("exp") == 8
    assert {dtype.name for _, dtype in wide} == {"float32"}
    logp, features = compiled(module, scores)(params, batch)
    assert logp.dtype == jnp.float32 and features.dtype == jnp.bfloat16
    table = np.float32(params["embed"]["word"]["table"])
    logits = np.float32(features) @ table.T
    assert_near(logp, jax.nn.log_softmax(logits), MODULE)


def draw_prefixes(dims, shift, length=2):
    """Draws a prompt for the input and a prefix for every attention."""
    rng = np.random.default_rng(4)

    def prefix(layers, shift=None):
        shape = (2, layers, 1, length, dims.heads, dims.head_dim)
        k, v = rng.normal(size=shape).astype(np.float32)
        positions = np.arange(length, dtype=np.int32) if shift else None
        return Prefix(k, v, np.ones((layers, 1, length), bool), positions)

    slots = rng.normal(size=(1, 1, dims.embed)).astype(np.float32)
    return Injection(
        Stream(slots, prefix(dims.layers, shift)),
        Stream(None, prefix(dims.decoder_layers, shift)),
        Stream(None, prefix(dims.decoder_layers)),
    )


@pytest.mark.default_cases("shift")
@pytest.mark.parametrize("prompt", ["none", "outside", "shift"])
def test_branches_are_rows_of_their_own(pairs, prompt):
    """Two label words behind one stem, in one row with branches and in a row each."""
    pair = pairs("v1.0-deep")
    injection = Injection()
    if prompt != "none":
        injection = draw_prefixes(pair.module.dims, prompt == "shift")
    start = 2 if prompt == "shift" else 0
    encoder = draw_tokens(97, "right", lengths=(7,), width=7)
    encoder = encoder._replace(positions=encoder.positions + start)
    stem, words = [0, 11], ([21, 22], [31, 32, 33])
    ids = [stem + words[0] + words[1]]
    types, positions = [[0, 0, 1, 1, 2, 2, 2]], [[0, 1, 2, 3, 2, 3, 4]]
    joint = make_tokens(ids, None, types, np.array(positions) + start)
    together, _ = run(pair, make_batch(encoder, joint), injection)
    for word, columns in zip(words, ([0, 1, 2, 3], [0, 1, 4, 5, 6]), strict=True):
        size = len(columns)
        row = stem + word + [0] * (7 - size)  # padded, for one program
        tokens = make_tokens([row], np.arange(7)[None] < size)
        tokens = tokens._replace(positions=tokens.positions + start)
        batch = make_batch(encoder, tokens)
        alone, _ = run(pair, batch, injection)
        assert_near(together[:, columns], alone[:, :size], MODULE)
        if prompt == "none":
            expected = expect(pair, batch).decoder_hidden_states[-1]
            assert_near(together[:, columns], expected[:, :size], MODEL)
    mixed = joint._replace(types=np.zeros_like(joint.types))
    other, _ = run(pair, make_batch(encoder, mixed), injection)
    assert np.abs(other - together)[:, 4:].max() > 0.01
    assert_near(other[:, :4], together[:, :4], MODULE)


def before_norm(module, batch):
    """Returns what the last norms of both stacks are given."""
    captured = {}

    def intercept(call, args, kwargs, context):
        if context.module.name in ("norm", "decoder_norm"):
            captured[context.module.name] = args[0]
        return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        module(batch, Injection(), deterministic=True)
    return captured


@pytest.mark.long
@pytest.mark.parametrize("kind", ["v1.0", "v1.1", "gated-tied", "relu-untied", "gated-silu"])
def test_rescale_leaves_the_function_as_it_is(pairs, kind):
    pair = pairs(kind)
    batch = batch_of(pair)
    hidden, logits = run(pair, batch)
    module, params, report = read_ours(pair.folder, "t5", rescale=100.0)
    assert module.cfg.eps == pytest.approx(pair.module.cfg.eps / 100**2)
    actual = run(pair, batch, module=module, params=params)
    for one, other in zip(actual, (hidden, logits), strict=True):
        assert_near(one, other, 1e-5 * np.abs(other).max())
    before = compiled(pair.module, before_norm)(pair.params, batch)
    divided = compiled(module, before_norm)(params, batch)
    assert before.keys() == divided.keys() == {"norm", "decoder_norm"}
    for name, stream in before.items():
        assert_near(divided[name] * 100, stream, 1e-5 * np.abs(stream).max())
        assert np.abs(stream).max() > 1
    _, _, plain = read_ours(pair.folder, "t5")
    assert report == plain  # the fingerprint too: it is of the file


@pytest.mark.long
def test_rescale_in_bfloat16(pairs):
    """Rounding is relative, so dividing by 128, a power of two, changes the last bits at most."""
    pair = pairs("v1.1")
    batch = batch_of(pair)
    results = []
    for rescale in (1.0, 128.0):
        module, params, _ = read_ours(pair.folder, "t5", dtype="bfloat16", rescale=rescale)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
        results.append(run(pair, batch, module=module, params=params)[0].astype(jnp.float32))
    assert_near(results[1], results[0], BF16_MAX, batch.decoder.mask)


def test_rescale_needs_a_block_that_it_passes_through(pairs):
    with pytest.raises(InputError, match="needs a gated or relu .* 'gelu'; use rescale=1"):
        read_ours(pairs("gelu").folder, "t5", rescale=100.0)


def test_dims(pairs):
    dims = pairs("v1.0").module.dims
    assert (dims.width, dims.heads, dims.head_dim) == (32, 4, 12)
    assert (dims.layers, dims.decoder_layers, dims.vocab) == (3, 2, 60)
    assert dims.max_len == 2**31 - 1


@pytest.mark.long  # tests/layers/test_attention.py has the layer
@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("method", ["soft", "prefix", "p_tuning", "cross"])
def test_a_short_decoder_needs_no_keys_of_the_source(family, method, monkeypatch):
    """Losses and gradients are those with keys and values, which a prefix of its own needs."""
    sizes = dict(d_kv=24) if family == "t5" else dict(d_model=48)
    module, weights = make_tiny(family, stack="scan", **sizes)
    fields = dict(length=3, cross=2) if method == "cross" else dict(length=3)
    name = method.replace("cross", "prefix")
    prompt = make_prompt(name, module.dims, TaskInfo(3), **fields)
    model = Model(module, prompt, {"main": linear.Classifier(3)})
    # Halved: T5 does not scale its scores, and rounding grows with them.
    params = make_params(model, jax.tree.map(lambda leaf: leaf / 2, weights))
    slots, shift = prompt.num_slots(), prompt.position_shift()
    batch = make_tiny_batch(slots=slots, shift=shift, length=16, family=family)
    calls = []
    inner = Attention.attend_to_source
    count = lambda *args, **options: calls.append(args) or inner(*args, **options)
    monkeypatch.setattr(Attention, "attend_to_source", count)

    def loss(trainable):
        sums = cross_entropy(model.forward(params | trainable, batch), batch.labels, batch.weights)
        return sums[0]

    def results():
        trainable = {name: params[name] for name in ("prompt", "head") if name in params}
        value, gradients = jax.jit(jax.value_and_grad(loss))(trainable)
        return np.float64(value), np.float64(ravel_pytree(gradients)[0])

    value, gradients = results()
    assert bool(calls) == (method != "cross")
    monkeypatch.setattr(Attention, "is_faster_without_keys", lambda *_: False)
    expected_value, expected = results()
    assert abs(value - expected_value) <= 1e-6 * abs(expected_value)
    assert np.linalg.norm(gradients - expected) <= 1e-6 * np.linalg.norm(expected)
