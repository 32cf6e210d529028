"""Generation: token for token as transformers and PEFT, and as a plain run without a cache."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from tiny import assert_close, assert_equal, jit

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.errors import InputError
from jaxprompt.layers import cache
from jaxprompt.layers.capping import logit_cap, soft_cap
from jaxprompt.models.generation import Generated, generate
from jaxprompt.models.model import Model
from jaxprompt.models.sampling import Sampling, make_row_keys
from jaxprompt.prompts import make_prompt
from jaxprompt.tree import split_layers
from jaxprompt.types import Batch, Tokens

torch = pytest.importorskip("torch")

V, PAD, START, NEW = 31, 0, 0, 10
MODEL = 1e-4  # relative, of sharp logits in float32
LENGTHS = (8, 3, 6, 5)
T5 = dict(
    vocab_size=V, d_model=24, d_kv=7, d_ff=30, num_heads=3, decoder_start_token_id=START,
    relative_attention_num_buckets=8, relative_attention_max_distance=12,
)  # fmt: skip
GPT2 = dict(
    vocab_size=V, n_embd=24, n_layer=2, n_head=3, n_positions=32, bos_token_id=1, eos_token_id=1,
    pad_token_id=PAD,
)  # fmt: skip
LLAMA = dict(
    vocab_size=V, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, intermediate_size=30, max_position_embeddings=32, bos_token_id=1,
    eos_token_id=1, pad_token_id=PAD, tie_word_embeddings=True,
)  # fmt: skip
BART = dict(
    vocab_size=V, d_model=24, encoder_layers=3, decoder_layers=2, encoder_attention_heads=3,
    decoder_attention_heads=3, encoder_ffn_dim=30, decoder_ffn_dim=30, max_position_embeddings=32,
    pad_token_id=PAD, decoder_start_token_id=START, forced_bos_token_id=None,
    forced_eos_token_id=None, bos_token_id=1, eos_token_id=1,
)  # fmt: skip
KINDS = {
    "bart": ("Bart", 3, BART),
    "bart-forced": ("Bart", 3, BART | dict(forced_bos_token_id=2, forced_eos_token_id=6)),
    "t5": ("T5", 3, T5 | dict(num_layers=3, num_decoder_layers=2)),
    "t5-v1.1": (
        "T5", 2,
        T5 | dict(num_layers=2, num_decoder_layers=3, feed_forward_proj="gated-gelu",
                  tie_word_embeddings=False),
    ),
    "gpt2": ("GPT2", 4, GPT2),
    "llama": ("Llama", 5, LLAMA),
    "mistral": ("Mistral", 5, LLAMA | dict(sliding_window=4)),
    "qwen2": (
        "Qwen2", 5,
        LLAMA | dict(hidden_size=32, use_sliding_window=True, sliding_window=4,
                     max_window_layers=1),
    ),
    "qwen3": ("Qwen3", 5, LLAMA),
    "gemma": ("Gemma", 5, LLAMA),
    "gemma3": (
        "Gemma3", 6,
        LLAMA | dict(sliding_window=4, query_pre_attn_scalar=8,
                     layer_types=["sliding_attention", "full_attention"]),
    ),
    # One layer rotates neighbouring dimensions in a window, the other has no positions.
    "cohere2": (
        "Cohere2", 6,
        LLAMA | dict(hidden_size=32, sliding_window=4,
                     layer_types=["sliding_attention", "full_attention"]),
    ),
    "glm4": ("Glm4", 5, LLAMA),
    "olmo3": ("Olmo3", 5, LLAMA | dict(sliding_window=4)),
    "phi3": ("Phi3", 5, LLAMA | dict(hidden_size=32)),
    "smollm3": ("SmolLM3", 5, LLAMA | dict(no_rope_layers=[1, 0])),
    "granite": (
        "Granite", 5,
        LLAMA | dict(embedding_multiplier=2.0, residual_multiplier=0.7, logits_scaling=0.5),
    ),
    "gpt_oss": (
        "GptOss", 5,
        LLAMA | dict(sliding_window=4, num_local_experts=4, num_experts_per_tok=2, head_dim=8,
                     hidden_size=24, intermediate_size=32),
    ),
    # A token of every other layer sees five.
    "gemma2": ("Gemma2", 6, LLAMA | dict(sliding_window=5, query_pre_attn_scalar=8)),
}  # fmt: skip
FED = ("t5", "t5-v1.1", "bart", "bart-forced")
# Those of transformers whose positions padding on the left does not move.
EVERY = tuple(kind for kind in KINDS if "bart" not in kind)


class Pair(NamedTuple):
    """One set of weights in both frameworks, and an end id that some rows reach."""

    torch: Any
    module: Any
    params: dict
    eos: int

    def model(self, method="none", **fields) -> Model:
        return Model(self.module, make_prompt(method, self.module.dims, **fields), {})


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Returns a function of the kind that makes each pair once."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("generate")

    @functools.cache
    def make(kind) -> Pair:
        name, seed, fields = KINDS[kind]
        torch.manual_seed(seed)
        cls = {
            "T5": "T5ForConditionalGeneration", "GPT2": "GPT2LMHeadModel",
            "Bart": "BartForConditionalGeneration",
        }  # fmt: skip
        family = name.lower() if name in cls else "llama"
        cls = cls.get(name, f"{name}ForCausalLM")
        cls = getattr(transformers, cls)
        model = cls(cls.config_class(**fields))
        with torch.no_grad():
            for path, weight in model.named_parameters():
                scale = "weight" in path and ("norm" in path or "ln_" in path)
                weight.normal_(1.0 if scale else 0.0, spread(path))
        forced = {field: x for field, x in fields.items() if field.startswith("forced")}
        model.generation_config.update(**forced)
        model.save_pretrained(root / kind)
        model, config = type(model).from_pretrained(root / kind).eval(), read_config(root / kind)
        params, report = load_backbone(root / kind, family, config)
        module = make_backbone(family, config, report.heads, dropout=0.0)
        assert report.tied and module.cfg.tied  # transformers 5 ties every T5 that it makes
        pair = Pair(model, module, jax.tree.map(jnp.asarray, params), -1)
        free = torch_ids(pair, make_batch(kind, "right" if name == "Bart" else "left"))
        # Written by most rows, but not by all: rows end at different steps, and at none.
        written = np.array([(free == token).any(1).sum() for token in range(V)])
        return pair._replace(eos=int(np.argmax(np.where(written < len(free), written, 0))))

    return make


def spread(path) -> float:
    """Chosen so that the texts vary and no two scores are near."""
    if "bias" in path and "relative" not in path:
        return 0.1
    if path == "model.shared.weight":  # a BART's states stay near the embedding of their token
        return 0.1
    return (
        1.0
        if "wpe" in path or "positions" in path
        else 0.5
        if any(x in path for x in ("wte", "shared", "embed"))
        else 0.8
    )


def make_tokens(lengths, width, side="right", slots=0, shift=0, seed=0) -> Tokens:
    """Draws rows of the lengths, `slots` soft tokens first."""
    rng, lengths = np.random.default_rng(seed), np.array(lengths)[:, None] + slots
    column, width = np.arange(width + slots)[None], width + slots
    number = column if side == "right" else column - (width - lengths)
    mask = (number >= 0) & (number < lengths)
    text = np.zeros(mask.shape, np.int32)
    text[mask & (number >= slots)] = rng.integers(2, V, int((lengths - slots).sum()))
    slot = np.where(mask & (number < slots), number, -1)
    positions = np.where(mask, number + shift, 0)
    zeros = np.zeros_like(text)
    return Tokens(text, mask, np.int32(slot), np.int32(positions), zeros, np.int8(zeros))


def make_batch(kind, side="right", *, stems=None, seed=0, **prompt) -> Batch:
    """Draws a batch; `stems` are lengths of what T5's decoder is fed, the start id included."""
    decoder_shift = prompt.pop("decoder_shift", 0)
    tokens = make_tokens(LENGTHS, max(LENGTHS), side, seed=seed, **prompt)
    rows, decoder = len(LENGTHS), None
    if kind in FED:
        stems = stems or [1] * rows
        decoder = make_tokens(stems, max(stems), shift=decoder_shift, seed=9)
        decoder.ids[:, 0] = START
    index = np.arange(rows, dtype=np.int32)
    return Batch(tokens, index[:, None], index, np.ones(rows, np.float32), index, decoder)


def inputs_width(batch: Batch, decodes: bool) -> int:
    return 1 if decodes and batch.decoder is None else batch.read.ids.shape[1]


def torch_generate(model, batch: Batch, eos, max_new_tokens=NEW, **how):
    """Runs torch's own loop. -> its output with scores, ids tidied to [B, max_new_tokens]"""
    inputs = dict(
        input_ids=torch.tensor(batch.encoder.ids).long(),
        attention_mask=torch.tensor(batch.encoder.mask).long(),
    )
    if batch.decoder is not None:
        inputs["decoder_input_ids"] = torch.tensor(batch.decoder.ids).long()
    # Torch's cache has as many layers as the encoder.
    cached = getattr(model.config, "num_decoder_layers", 0) <= model.config.num_hidden_layers
    with torch.no_grad():
        actual = model.generate(
            **inputs, use_cache=cached, max_new_tokens=max_new_tokens, do_sample=False,
            eos_token_id=eos,
            pad_token_id=PAD, return_dict_in_generate=True, output_scores=True, **how,
        )  # fmt: skip
    new = actual.sequences.numpy()[:, inputs_width(batch, model.config.is_encoder_decoder) :]
    ids = np.full((len(new), max_new_tokens), PAD)
    ids[:, : new.shape[1]] = new
    ends = np.isin(ids, [] if eos is None else eos)
    ended = ends.cumsum(1) - ends > 0  # torch may fill with the end id
    return actual, np.where(ended, PAD, ids)


def torch_ids(pair, batch, **how):
    return torch_generate(pair.torch, batch, pair.eos if pair.eos >= 0 else None, **how)[1]


def run(pair: Pair, batch, model=None, prompt=None, **how) -> Generated:
    """Runs ours, compiled."""
    how = dict(max_new_tokens=NEW, eos=pair.eos, pad=PAD) | how
    step = jit(functools.partial(generate, model or pair.model(), **how))
    actual = step({"backbone": pair.params, "prompt": prompt or {}}, batch)
    return Generated(*(np.asarray(part) for part in actual))


def lengths_of(ids, eos):
    ends = np.isin(ids, eos)
    return np.where(ends.any(1), ends.argmax(1) + 1, ids.shape[1])


@pytest.mark.default_cases("gpt2", "llama", "gemma3")
@pytest.mark.parametrize("kind", EVERY)
def test_greedy(pairs, kind):
    pair = pairs(kind)
    batch = make_batch(kind, "left")
    expected = torch_ids(pair, batch)
    lengths = lengths_of(expected, pair.eos)
    assert len(set(lengths)) > 1 and lengths.max() == NEW
    actual = run(pair, batch)
    np.testing.assert_array_equal(actual.ids, expected)
    np.testing.assert_array_equal(actual.lengths, lengths)
    assert actual.ids.dtype == actual.lengths.dtype == np.int32
    other = run(pair, make_batch(kind, "right"))  # the same rows, padded on the other side
    np.testing.assert_array_equal(other.ids, expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_repetition_is_penalized(pairs, kind):
    """Each row alone in torch, which penalizes the padding, too."""
    pair, batch = pairs(kind), make_batch(kind)
    actual = run(pair, batch, sampling=Sampling(repetition_penalty=1.5))
    for row, length in enumerate(LENGTHS):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], batch)
        tokens = jax.tree.map(lambda x, length=length: x[:, :length], alone.encoder)
        expected = torch_ids(pair, alone._replace(encoder=tokens), repetition_penalty=1.5)
        np.testing.assert_array_equal(actual.ids[row : row + 1], expected)
    free = run(pair, batch)
    assert (free.ids != actual.ids).any()
    is_real = np.arange(NEW) < actual.lengths[:, None]
    assert (actual.logprobs[is_real] < 0).all() and not actual.logprobs[~is_real].any()


RULES = [
    (num_beams, penalty, stop)
    for i, penalty in enumerate((0.6, 1.0, 2.0))
    for j, stop in enumerate((False, True, "never"))
    for num_beams in [3 + (i + j) % 2]
    if (i, j) not in ((0, 2), (2, 0))
]
CASES = [("t5", *rule) for rule in RULES] + [
    (kind, *rule) for kind in ("t5-v1.1", "gpt2") for rule in RULES[1::3]
]
CASES += [(kind, *RULES[1]) for kind in ("mistral", "qwen3", "gemma3", "gpt_oss")]


@pytest.mark.default_cases("gpt2-4-0.6-True", "gemma3-4-0.6-True")
@pytest.mark.parametrize(("kind", "num_beams", "penalty", "stop"), CASES)
def test_beam_search(pairs, kind, num_beams, penalty, stop):
    pair = pairs(kind)
    batch = make_batch(kind, "left")
    how = dict(length_penalty=penalty, early_stopping=stop)
    expected, ids = torch_generate(pair.torch, batch, pair.eos, num_beams=num_beams, **how)
    actual = run(pair, make_batch(kind) if kind in FED else batch, num_beams=num_beams, **how)
    np.testing.assert_array_equal(actual.ids, ids)
    np.testing.assert_array_equal(actual.lengths, lengths_of(ids, pair.eos))
    assert_close(actual.scores, expected.sequences_scores.numpy(), MODEL)


@pytest.mark.default_cases("1-1.0")
@pytest.mark.parametrize(("num_beams", "penalty"), [(1, 1.0), (3, 0.6), (3, 2.0)])
def test_forced_tokens_of_a_bart(pairs, num_beams, penalty):
    """The first token counts in a beam's length, the last costs nothing."""
    pair, batch = pairs("bart-forced"), make_batch("bart", stems=[2] * len(LENGTHS))
    batch.decoder.ids[:, 1] = 2
    how = dict(length_penalty=penalty) if num_beams > 1 else {}
    expected, ids = torch_generate(
        pair.torch, batch._replace(decoder=None), 6, NEW + 1, num_beams=num_beams, **how
    )
    assert (ids[:, 0] == 2).all() and len(set(lengths_of(ids, 6))) > 1 and 6 in ids[:, -1]
    actual = run(pair, batch, num_beams=num_beams, eos=6, **how)
    np.testing.assert_array_equal(actual.ids, ids[:, 1:])
    if num_beams > 1:
        assert_close(actual.scores, expected.sequences_scores.numpy(), MODEL)


@pytest.mark.default_cases("t5-1", "gpt2-3")
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("kind", ["t5", "gpt2", "qwen3"])
def test_any_of_several_ends_is_one(pairs, kind, num_beams):
    pair, batch = pairs(kind), make_batch(kind, "left")
    # The one that most rows write, of those that the first leaves unfinished too.
    first = lengths_of(torch_ids(pair, batch), pair.eos)
    ids = torch_ids(pair._replace(eos=-1), batch)
    shorter = [(lengths_of(ids, (pair.eos, x)) < first).sum() for x in range(V)]
    ends = (pair.eos, int(np.argmax(shorter)))
    expected, ids = torch_generate(pair.torch, batch, list(ends), num_beams=num_beams)
    actual = run(pair, make_batch(kind) if kind in FED else batch, num_beams=num_beams, eos=ends)
    np.testing.assert_array_equal(actual.ids, ids)
    np.testing.assert_array_equal(actual.lengths, lengths_of(ids, ends))
    if num_beams == 1:
        last = np.take_along_axis(actual.ids, actual.lengths[:, None] - 1, axis=1)
        assert set(ends) <= set(last.ravel().tolist())  # each ends a row
    else:
        assert_close(actual.scores, expected.sequences_scores.numpy(), MODEL)


@pytest.mark.long
def test_a_forced_stem_and_one_token(pairs):
    """Rows whose decoders are fed differing numbers of tokens: each equals torch's run of it."""
    pair, stems = pairs("t5"), [3, 1, 2, 3]
    batch = make_batch("t5", stems=stems)
    how = dict(num_beams=3)
    actual, one = run(pair, batch, num_beams=3), run(pair, batch, max_new_tokens=1)
    for row, stem in enumerate(stems):
        take = lambda x, row=row: x[row : row + 1]
        alone = jax.tree.map(take, batch)
        alone = alone._replace(decoder=jax.tree.map(lambda x, n=stem: x[:, :n], alone.decoder))
        np.testing.assert_array_equal(take(actual.ids), torch_ids(pair, alone, **how))
        np.testing.assert_array_equal(take(one.ids), torch_ids(pair, alone, max_new_tokens=1))


def grow(batch: Batch, actual) -> Batch:
    """Puts tokens right behind those that are read, by plain loops."""
    tokens = batch.read
    wide = jax.tree.map(lambda x: np.pad(x, [(0, 0), (0, NEW)]), tokens)
    wide.slot[:, -NEW:] = -1
    for row, new in enumerate(actual):
        at = np.flatnonzero(tokens.mask[row])[-1]
        for i, token in enumerate(new):
            wide.ids[row, at + 1 + i], wide.mask[row, at + 1 + i] = token, True
            wide.positions[row, at + 1 + i] = tokens.positions[row, at] + 1 + i
    return batch._replace(**{"encoder" if batch.decoder is None else "decoder": wide})


def plain_scores(pair, model, params, batch):
    """Returns a function of the tokens so far: log-probabilities by whole runs without a cache."""

    @jit
    def forward(params, batch):
        hidden = model.hidden(params, batch)
        bound = model.backbone.bind({"params": params["backbone"]})
        scores = bound.lm_features(hidden) @ bound.lm_table()[0].T
        return jax.nn.log_softmax(soft_cap(scores, logit_cap(model.backbone)))

    last = [np.flatnonzero(mask)[-1] for mask in batch.read.mask]
    rows = np.arange(len(last))[:, None]

    def score(actual):  # of each row the tokens -> log-probabilities of each next one [B, n+1, V]
        logp = np.asarray(forward(params, grow(batch, actual)))
        return logp[rows, np.array(last)[:, None] + np.arange(len(actual[0]) + 1)]

    return score


def draw(model, params, scale):
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), params))["prompt"]
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda leaf: np.float32(rng.normal(0, scale, leaf.shape)), shapes)


PROMPTS = {
    "soft-t5": ("t5", "soft", dict(length=4), dict(slots=4)),
    "soft-gpt2": ("gpt2", "soft", dict(length=4), dict(slots=4)),
    "prefix-gpt2": ("gpt2", "prefix", dict(length=3, layers="2-2"), dict(shift=3)),
    "soft-llama": ("llama", "soft", dict(length=4), dict(slots=4)),
    "prefix-gemma2": ("gemma2", "prefix", dict(length=3), dict(shift=3)),
    "prefix-gemma2-outside": ("gemma2", "prefix", dict(length=6, shift=False), {}),
    "prefix-t5": (
        "t5", "prefix", dict(length=2, decoder=3, cross=4), dict(shift=2, decoder_shift=3)
    ),
    "prefix-bart": (
        "bart", "prefix", dict(length=2, decoder=3, cross=4), dict(shift=2, decoder_shift=3)
    ),
    "prefix-t5-outside": (
        "t5-v1.1", "prefix", dict(length=2, decoder=3, cross=4, cross_layers="1-1", shift=False), {}
    ),
}  # fmt: skip


@pytest.mark.default_cases("prefix-gemma2-outside")
@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_read_once(pairs, name):
    """The cached run equals whole runs; its beams' scores are those of what they wrote."""
    kind, method, fields, place = PROMPTS[name]
    pair = pairs(kind)
    batch = make_batch(kind, **place, stems=[2, 1, 1, 2] if kind in FED else None)
    model = pair.model(method, **fields)
    prompt = draw(model, pair.params, 1.5)
    score = plain_scores(pair, model, {"backbone": pair.params, "prompt": prompt}, batch)
    ids = np.zeros((len(LENGTHS), NEW), int)
    for i in range(NEW):  # what is behind a token does not change its scores
        ids[:, i] = score(ids)[:, i].argmax(-1)
    actual = run(pair, batch, model, prompt, eos=-1)
    np.testing.assert_array_equal(actual.ids, ids)
    rows, columns = np.arange(len(ids))[:, None], np.arange(NEW)
    assert_close(actual.logprobs, score(ids)[rows, columns, ids], MODEL)
    assert_close(actual.scores, score(ids)[rows, columns, ids].sum(1) / NEW, MODEL)
    bare = run(pair, make_batch(kind), eos=-1)
    assert (bare.ids != actual.ids).any(), "the prompt has no effect"
    num_beams = run(pair, batch, model, prompt, num_beams=3, length_penalty=0.6)
    is_real = columns < num_beams.lengths[:, None]
    logp = score(num_beams.ids)[rows, columns, num_beams.ids]
    assert_close(
        num_beams.scores, np.where(is_real, logp, 0).sum(1) / num_beams.lengths**0.6, MODEL
    )


@pytest.mark.default_cases("t5")
@pytest.mark.parametrize("kind", ["t5", "gpt2", "gemma2"])
def test_layers_that_are_read_where_they_lie_write_the_same(pairs, kind, monkeypatch):
    """As on TPUs, whose compiler slices a stack inside the product."""
    pair, batch = pairs(kind), make_batch(kind)
    copied, calls = run(pair, batch, num_beams=2), []
    with monkeypatch.context() as patch:
        patch.setattr(cache, "copies_layers", lambda platform: bool(calls.append(platform)))
        actual = run(pair, batch, num_beams=2)
    assert calls
    assert_equal(actual.ids, copied.ids)
    assert_close(actual.scores, copied.scores)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["t5", "gpt2", "gemma2"])
def test_separate_layers_write_the_same(pairs, kind):
    pair, batch = pairs(kind), make_batch(kind)
    stacked = run(pair, batch, num_beams=2)
    actual = run(pair._replace(params=split_layers(pair.params)), batch, num_beams=2)
    assert_equal(actual.ids, stacked.ids)
    assert_close(actual.scores, stacked.scores)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_bfloat16(pairs, kind):
    """Ids and scores of whole runs in float32, but for the rounding of states and caches."""
    pair, batch = pairs(kind), make_batch(kind)
    cfg = pair.module.cfg.__class__(**(vars(pair.module.cfg) | {"dtype": jnp.bfloat16}))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), pair.params)
    half = pair._replace(module=pair.module.clone(cfg=cfg), params=params)
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    score = plain_scores(pair, pair.model(), {"backbone": exact, "prompt": {}}, batch)
    rows, columns = np.arange(len(LENGTHS))[:, None], np.arange(NEW)
    for num_beams in (1, 2):
        actual = run(half, batch, num_beams=num_beams, eos=-1)
        assert actual.scores.dtype == np.float32
        plain = score(actual.ids)[rows, columns, actual.ids].mean(1)
        assert np.abs(actual.scores - plain).max() < 0.3  # large weights amplify rounding


def test_one_compile_and_rows_that_fill(pairs):
    """A row of weight 0 writes nothing and is not waited for; batches of one shape share a run."""
    pair, batch = pairs("gpt2"), make_batch("gpt2")
    batch = batch._replace(weights=np.array([1, 0, 1, 1], np.float32))
    for num_beams in (1, 3):
        how = dict(max_new_tokens=NEW, eos=pair.eos, pad=PAD, num_beams=num_beams)
        step = jit(functools.partial(generate, pair.model(), **how))
        params = {"backbone": pair.params}
        actual = step(params, batch)
        full = step(params, batch._replace(weights=np.ones(4, np.float32)))
        step(params, make_batch("gpt2", seed=1))
        assert step._cache_size() == 1
        assert actual.lengths[1] == actual.scores[1] == 0 and (actual.ids[1] == PAD).all()
        for one, other in zip(actual[:3], full[:3], strict=True):
            assert_equal(np.delete(one, 1, 0), np.delete(other, 1, 0))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
        (dict(num_beams=0), "num_beams=0 must be at least 1"),
        (dict(num_beams=16), "num_beams=16 is too many: the search ranks 2 tokens per beam, "
         "from a vocabulary of 31; use at most 15"),
        (dict(num_beams=2, sampling=Sampling(1.0), row_keys=make_row_keys(0)),
         "num_beams=2 ranks the most likely texts"),
        (dict(sampling=Sampling(-1.0)), "temperature=-1.0 must be at least 0"),
        (dict(num_beams=11, eos=(1, 2)), "num_beams=11 is too many: the search ranks 3 tokens"),
        (dict(max_new_tokens=23), "8 tokens of input + 2 positions of the prompt + "
         "max_new_tokens=23 exceed the "
         "model's 32 positions, of which 22 are free"),
    ],
)  # fmt: skip
def test_what_cannot_be(pairs, how, message):
    pair = pairs("gpt2")
    model, batch = pair.model("prefix", length=2), make_batch("gpt2", shift=2)
    with pytest.raises(InputError) as error:
        run(pair, batch, model, **how)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_several_documents_in_a_row_are_refused(pairs):
    pair = pairs("gpt2")
    batch = make_batch("gpt2")
    batch = batch._replace(encoder=batch.encoder._replace(segments=np.int32(batch.encoder.mask)))
    with pytest.raises(
        InputError, match="has several documents in a row, .* put each document in a"
    ):
        run(pair, batch)
