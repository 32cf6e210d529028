"""Tiny backbones of every family, random parameters and random batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.quantize import quantize, quantize_float8, quantize_outputs
from jaxprompt.layers.quantized import BLOCK_BITS, input_axes, plane_dtypes
from jaxprompt.parallel.compilation import supported_options
from jaxprompt.tree import flatten, unflatten
from jaxprompt.types import Batch, Role, Tokens

# What takes most of the compilation is left out: tiny programs do not miss it.
QUICK = supported_options(xla_backend_optimization_level=0, xla_cpu_use_fusion_emitters=False)
jit = functools.partial(jax.jit, compiler_options=QUICK)
# Where each product and sum is to be rounded as in a real run.
exact_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})

BERT = dict(
    vocab_size=53, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=24, max_position_embeddings=40, type_vocab_size=2,
)  # fmt: skip
# Log buckets from a distance of 2 on.
_RELATIVE = dict(
    relative_attention=True, position_biased_input=False, pos_att_type=["p2c", "c2p"],
    type_vocab_size=0,
)  # fmt: skip
CONFIGS = {
    "bert": BERT,
    "distilbert": dict(
        vocab_size=53, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=40,
    ),
    "albert": BERT | dict(embedding_size=12, hidden_act="gelu"),
    "deberta": BERT | _RELATIVE,
    "deberta_v2": BERT
    | _RELATIVE
    | dict(position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True),
    "roberta": BERT | dict(pad_token_id=1, layer_norm_eps=1e-5),
    "mpnet": BERT | dict(layer_norm_eps=1e-5),
    "xlm_roberta_xl": BERT | dict(pad_token_id=1, layer_norm_eps=1e-5),
    # Two heads of keys serve four.
    "eurobert": dict(
        model_type="eurobert", vocab_size=53, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
        max_position_embeddings=40,
    ),
    "electra": BERT | dict(embedding_size=12),
    # One local layer between two global ones; a token sees two to each side.
    "modernbert": BERT
    | dict(num_hidden_layers=3, global_attn_every_n_layers=2, local_attention=4, pad_token_id=0),
    "gpt2": dict(vocab_size=53, n_embd=16, n_layer=2, n_head=2, n_positions=40),
    # Two heads of keys serve four.
    "llama": dict(
        vocab_size=53, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=24, max_position_embeddings=40,
        tie_word_embeddings=True,
    ),
    # Two of four dimensions rotate.
    "gpt_neox": BERT | dict(rotary_pct=0.5, num_attention_heads=4),
    "opt": BERT | dict(ffn_dim=24),
    "glm": dict(
        vocab_size=53, hidden_size=16, num_layers=2, num_attention_heads=2, max_sequence_length=40,
        block_position_encoding=True,
    ),
    "bart": dict(
        vocab_size=53, d_model=16, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, encoder_layers=2, decoder_layers=3,
        max_position_embeddings=40,
    ),
    "t5": dict(
        vocab_size=53, d_model=16, d_kv=6, num_heads=2, d_ff=24, num_layers=2,
        num_decoder_layers=3, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, pad_token_id=0,
    ),
}  # fmt: skip
# Of a Llama with experts.
MIXTURE = dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
_T5GEMMA = dict(
    vocab_size=53, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, head_dim=4,
    num_key_value_heads=2, intermediate_size=24, max_position_embeddings=40, sliding_window=5,
    query_pre_attn_scalar=6,
)  # fmt: skip
CONFIGS["t5gemma"] = dict(
    model_type="t5gemma", encoder=_T5GEMMA, decoder=_T5GEMMA | dict(num_hidden_layers=3)
)
MODEL_HEADS = {
    "electra": ("mlm", "rtd"),
    "distilbert": ("mlm",),
    "eurobert": ("mlm",),
    "bart": ("lm", "lm_bias"),
} | dict.fromkeys(("gpt2", "llama", "gpt_neox", "opt", "t5", "t5gemma", "glm"), ("lm",))
CAUSAL = ("gpt2", "llama", "gpt_neox", "opt")
FED = ("bart", "t5", "t5gemma", "glm")  # what they write is read apart from the input
# T5 does not scale its attention: at 0.3 the probabilities are near 0 and 1, and rounding grows.
SCALES = {"t5": 0.2, "t5gemma": 0.2}
PAD, CLS, SEP, MASK, FIRST = 0, 1, 2, 3, 4  # ids; text starts at FIRST
PADS = Tokens(
    ids=PAD, mask=False, slot=-1, positions=0, types=0, roles=Role.PAD, segments=0, lengths=None
)


def fill(shapes, seed=0, scale=0.3):
    """Draws N(0, scale^2) for every leaf, around 1 for a norm's scale: no leaf is trivial."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(centre, scale, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def draw_params(module, *args, seed=0, **options):
    """Draws the parameters of a module that is called with these arguments. -> params"""
    init = lambda: module.init(jax.random.key(0), *args, **options)
    return fill(jax.eval_shape(init).get("params", {}), seed)


def make_tiny(
    family="bert", seed=0, *, dropout=0.0, attention_dropout=None, stack="unroll", remat="none",
    attention="auto", **changes,
):  # fmt: skip
    """Makes a backbone and random parameters. -> (module, params)"""
    hf = CONFIGS.get(family, BERT) | changes
    heads = MODEL_HEADS.get(family, ("pooler", "mlm"))
    module = make_backbone(
        family, hf, heads, dropout=dropout, attention_dropout=attention_dropout, stack=stack,
        remat=remat, attention=attention,
    )  # fmt: skip
    batch = make_batch(rows=1, family=family)
    init = lambda: module.init(jax.random.key(0), batch, method="init_all")["params"]
    return module, fill(jax.eval_shape(init), seed, SCALES.get(family, 0.3))


def make_params(model, backbone, seed=0, choices=1):
    """Draws a model's parameters beside a backbone's. -> params"""
    init = lambda: model.init(jax.random.key(0), backbone, choices=choices)
    return fill(jax.eval_shape(init), seed) | {"backbone": backbone}


def make_batch(
    seed=0, *, rows=8, length=12, slots=0, classes=3, choices=1, masks=1, shift=0, side="right",
    family="bert", decoder_slots=0, decoder_shift=0,
):  # fmt: skip
    """Makes rows of differing lengths: [CLS] slots text [MASK]... text [SEP], padded on `side`.

    A head reads the masks; in GPT-2 and Llama the last tokens of the row, in T5 and GLM those of
    the answer.
    """
    rng = np.random.default_rng(seed)
    rows *= choices
    shape = (rows, length)
    ids, positions, types = (np.zeros(shape, np.int32) for _ in range(3))
    slot, roles = np.full(shape, -1, np.int32), np.zeros(shape, np.int8)
    label_pos = np.zeros((rows, masks), np.int32)
    shortest = slots + masks + 4
    for row in range(rows):
        n = length if row == 0 else int(rng.integers(shortest, length + 1))
        text = n - slots - masks - 2
        before = int(rng.integers(1, text))
        kinds = [Role.SPECIAL] + [Role.SOFT] * slots + [Role.TEXT] * before
        at = len(kinds)
        label_role = Role.LABEL if family == "glm" else Role.SPECIAL  # GLM finds its blank by it
        kinds += [label_role] * masks + [Role.TEXT] * (text - before) + [Role.SPECIAL]
        words = rng.integers(FIRST, BERT["vocab_size"], n)
        words[0], words[1 : 1 + slots], words[at : at + masks], words[-1] = CLS, PAD, MASK, SEP
        start = length - n if side == "left" else 0
        here = slice(start, start + n)
        ids[row, here], roles[row, here] = words, kinds
        slot[row, start + 1 : start + 1 + slots] = np.arange(slots)
        positions[row, here] = np.arange(n) + shift
        types[row, start + at : start + n] = family not in (*CAUSAL, *FED)
        label_pos[row] = start + (n - masks if family in CAUSAL else at) + np.arange(masks)
    tokens = Tokens(ids, roles != Role.PAD, slot, positions, types, roles)
    if side == "right":
        tokens = tokens._replace(lengths=tokens.mask.sum(1, dtype=np.int32))
    examples = rows // choices
    labels = rng.integers(0, classes, examples).astype(np.int32)
    index = np.arange(examples, dtype=np.int32)
    batch = Batch(tokens, label_pos, labels, np.ones(examples, np.float32), index)
    return add_decoder(batch, rng, decoder_slots, decoder_shift) if family in FED else batch


def add_decoder(batch: Batch, rng, slots: int, shift: int) -> Batch:
    """Feeds a decoder: the start id, slots, 1 to 3 words more than are read; padded right."""
    rows, masks = batch.label_pos.shape
    real = 1 + slots + masks + rng.integers(0, 3, (rows, 1))  # [B, 1]
    column = np.arange(4 + slots + masks)[None]
    mask, soft = column < real, (0 < column) & (column <= slots)
    text = mask & (column > slots)
    ids = np.where(text, rng.integers(FIRST, BERT["vocab_size"], mask.shape), PAD)
    slot = np.where(soft, column - 1, -1) + 0 * real
    roles = np.select([soft & mask, text, mask], [Role.SOFT, Role.TEXT, Role.SPECIAL], Role.PAD)
    ints = (np.int32(x) for x in (ids, slot, np.where(mask, column + shift, 0), 0 * ids))
    ids, slot, positions, types = ints
    tokens = Tokens(ids, mask, slot, positions, types, np.int8(roles))
    label_pos = np.int32(real - masks + np.arange(masks))
    return batch._replace(decoder=tokens, label_pos=label_pos)


def widen(batch: Batch, by: int, side: str) -> Batch:
    """Adds `by` columns of padding on one side; a decoder's always stand on the right."""

    def pad(tokens, side):
        width = [(0, 0), (by, 0) if side == "left" else (0, by)]
        tokens = tokens._replace(lengths=None) if side == "left" else tokens
        pad = lambda x, fill: np.pad(x, width, constant_values=fill)
        keeps = lambda x, fill: x is None or fill is None
        pairs = zip(tokens, PADS, strict=True)
        return Tokens(*(x if keeps(x, fill) else pad(x, fill) for x, fill in pairs))

    batch = batch._replace(encoder=pad(batch.encoder, side))
    if batch.decoder is not None:
        return batch._replace(decoder=pad(batch.decoder, "right"))
    return batch._replace(label_pos=batch.label_pos + (by if side == "left" else 0))


def assert_close(actual, expected, rtol=1e-5):
    """Compares leaf by leaf, relative to each leaf's greatest magnitude."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    leaves = zip(paths, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for path, a, b in leaves:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, path
        gap, bound = np.abs(a - b).max(initial=0.0), rtol * np.abs(b).max(initial=1e-6)
        assert gap <= bound, f"{path}: {gap} > {bound}"


def assert_equal(actual, expected):
    """Compares bit for bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# Sizes that blocks of 32 divide, by the names of each family; of encoders the last.
_BLOCKS = {
    "gpt2": dict(n_embd=64, n_head=2, n_inner=128),
    "bart": dict(
        d_model=64, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=128,
        decoder_ffn_dim=128,
    ),
    "distilbert": dict(dim=64, n_heads=2, hidden_dim=128),
    "glm": dict(hidden_size=64, num_attention_heads=2),
    "t5": dict(d_model=32, d_kv=32, d_ff=64),
    "llama": dict(hidden_size=128, intermediate_size=64),
    "gpt_neox": dict(hidden_size=128, intermediate_size=64),
    "opt": dict(hidden_size=64, num_attention_heads=2, ffn_dim=128),
    "eurobert": dict(hidden_size=128, intermediate_size=64),
    "t5gemma": {
        name: CONFIGS["t5gemma"][name] | dict(hidden_size=128, head_dim=32, intermediate_size=64)
        for name in ("encoder", "decoder")
    },
}  # fmt: skip


_ENCODER_BLOCKS = dict(hidden_size=64, num_attention_heads=2, intermediate_size=128)


def make_quantizable(family="bert", **how):
    """Makes a tiny backbone whose matrices consist of whole blocks. -> (module, params)"""
    return make_tiny(family, **block_sizes(family), **how)


def block_sizes(family):
    """Gives the sizes of a backbone whose matrices consist of whole blocks."""
    sizes = _BLOCKS.get(family, _ENCODER_BLOCKS)
    return sizes | (dict(embedding_size=32) if family in ("albert", "electra") else {})


def quantize_params(params, storage):
    """Quantizes a backbone's parameters as `load_backbone` does."""
    flat = {}
    for name, leaf in flatten({"backbone": params}).items():
        axes = input_axes(name.partition("/")[2], storage)
        if not axes:
            flat[name] = leaf
            continue
        blocks = storage in BLOCK_BITS
        axes = axes[-1:] if blocks else axes
        last = np.moveaxis(np.asarray(leaf), axes, range(-len(axes), 0))
        outputs, inputs = last.shape[: -len(axes)], last.shape[-len(axes) :]
        rows = last.reshape(-1, int(np.prod(inputs)))
        planes = (
            quantize(rows, BLOCK_BITS[storage]) if blocks
            else (quantize_float8 if storage == "fp8" else quantize_outputs)(rows)
        )  # fmt: skip
        for plane, array in zip(plane_dtypes(storage), planes, strict=True):
            ends = inputs if array.size == last.size else [1] * (len(axes) - 1) + [-1]
            array = np.moveaxis(array.reshape(*outputs, *ends), range(-len(axes), 0), axes)
            flat[f"{name}/{plane}"] = jnp.asarray(array)
    return unflatten(flat)["backbone"]
