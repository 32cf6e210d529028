"""GPT-2 against torch: modules to 1e-5, models to 1e-4, float32."""

import jax
import numpy as np
import pytest
import transformers
from pairs import (
    assert_near,
    assert_near_in_16_bits,
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

from jaxprompt.types import Injection, Prefix, Stream

torch = pytest.importorskip("torch")

MODULE, MODEL = 1e-5, 1e-4  # max abs, float32
SIZES = dict(vocab_size=60, n_embd=32, n_layer=3, n_head=4, n_positions=20)
KINDS = {
    "plain": {},
    "inner": dict(n_inner=44, activation_function="gelu", layer_norm_epsilon=1e-3),
    "unscaled": dict(scale_attn_weights=False, n_layer=2, n_head=2),
    "untied": dict(tie_word_embeddings=False, activation_function="relu"),
}


def make_pair(folder, kind):
    torch.manual_seed(len(kind))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES | KINDS[kind]))
    randomise(model).save_pretrained(folder)
    pair = read_pair(folder, "gpt2", transformers.GPT2LMHeadModel)
    assert pair.module.cfg.tied == (kind != "untied")
    return pair


pairs = pair_fixture(make_pair)


def batch_of(pair, side="right"):
    return make_batch(draw_tokens(pair.config["vocab_size"], side))


@torch.no_grad()
def expect(pair, batch):
    return run_torch(pair.torch, batch.encoder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_model(pairs, kind, side):
    pair = pairs(kind)
    batch = batch_of(pair, side)
    expected, mask = expect(pair, batch), batch.encoder.mask
    hidden, logits = run(pair, batch)
    assert_near(hidden, expected.hidden_states[-1], MODEL, mask)
    assert_near(logits, expected.logits, MODEL, mask)
    assert hidden[mask].std() > 0.3


def test_layouts_of_the_file(pairs, tmp_path):
    """Old files have no prefix, and each layer's causal mask as a buffer."""
    pair = pairs("plain")
    tensors = pair.torch.transformer.state_dict()
    for i in range(3):
        tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 20, 20).tril()
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    write_checkpoint(tmp_path / "old", pair.config, tensors)
    _, _, expected = read_ours(pair.folder, "gpt2")
    module, params, report = read_ours(tmp_path / "old", "gpt2")
    assert report == expected and report.unused == () and report.tied
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(pair.params), strict=True):
        np.testing.assert_array_equal(one, other)
    prefixed = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    prefixed["lm_head.weight"] = tensors["wte.weight"]
    write_checkpoint(tmp_path / "copies", pair.config, prefixed)
    assert read_ours(tmp_path / "copies", "gpt2")[2] == expected


def test_fused_attention(pairs):
    pair = pairs("plain")
    batch = batch_of(pair, "left")
    module, *_ = read_ours(pair.folder, "gpt2", attention="fused")
    hidden, _ = run(pair, batch, module=module)
    assert_near(hidden, expect(pair, batch).hidden_states[-1], MODEL, batch.encoder.mask)


def test_bfloat16(pairs):
    pair = pairs("plain")
    module, params, _ = read_ours(pair.folder, "gpt2", dtype="bfloat16")
    batch = batch_of(pair)
    hidden, _ = run(pair, batch, module=module, params=params)
    assert_near_in_16_bits(hidden, expect(pair, batch).hidden_states[-1], batch.encoder.mask)
    forward = lambda p: module.apply({"params": p}, batch, Injection(), deterministic=True)
    wide = [
        equation.invars[0].aval.dtype.name
        for equation in primitives(jax.make_jaxpr(forward)(params).jaxpr)
        if equation.primitive.name in ("rsqrt", "exp")
    ]
    assert wide == ["float32"] * 10  # 7 norms, 3 softmaxes


def draw_prompt(dims, length=3):
    """Draws one soft row and a prefix."""
    rng = np.random.default_rng(4)
    shape = (2, dims.layers, 1, length, dims.heads, dims.head_dim)
    k, v = rng.normal(size=shape).astype(np.float32)
    slots = rng.normal(size=(1, 1, dims.embed)).astype(np.float32)
    return slots, k, v


def inject(slots, k, v):
    return Injection(Stream(slots, Prefix(k, v, np.ones(k.shape[:3], bool))))


@pytest.mark.parametrize("prompted", [False, True])
def test_branches_are_rows_of_their_own(pairs, prompted):
    """Two label words behind one left-padded text, in one row with branches and in a row each."""
    pair = pairs("plain")
    stem, words = [0, 0, 11, 12, 13], ([21, 22], [31, 32, 33])
    mask = np.arange(10)[None] >= 2
    types = [[0] * 5 + [1] * 2 + [2] * 3]
    positions = [[0, 0, 0, 1, 2, 3, 4, 3, 4, 5]]
    joint = make_tokens([stem + words[0] + words[1]], mask, types, positions)
    injection = inject(*draw_prompt(pair.module.dims)) if prompted else Injection()
    together, _ = run(pair, make_batch(joint), injection)
    for word, columns in zip(words, ([2, 3, 4, 5, 6], [2, 3, 4, 7, 8, 9]), strict=True):
        end = 5 + len(word)
        row = stem + word + [0] * (10 - end)  # padded, for one program
        batch = make_batch(make_tokens([row], mask & (np.arange(10) < end)))
        alone, _ = run(pair, batch, injection)
        assert_near(together[:, columns], alone[:, 2:end], MODULE)
        if not prompted:
            expected = expect(pair, batch).hidden_states[-1]
            assert_near(together[:, columns], expected[:, 2:end], MODEL)
    mixed = joint._replace(types=np.zeros_like(joint.types))
    other, _ = run(pair, make_batch(mixed), injection)
    assert np.abs(other - together)[:, 7:].max() > 0.01


def test_dims(pairs):
    dims = pairs("plain").module.dims
    assert (dims.width, dims.heads, dims.head_dim, dims.layers) == (32, 4, 8, 3)
    assert (dims.max_len, dims.decoder_layers, dims.vocab) == (20, 0, 60)
