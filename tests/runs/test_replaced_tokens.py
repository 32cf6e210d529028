"""Generator and discriminator together: against torch, and by what must hold of their parts."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from replaced_tokens import replace_masks
from tiny import assert_close, assert_equal, jit, make_batch, make_tiny

from configs.adapt import rtd
from jaxprompt import rng
from jaxprompt.backbones import make_backbone
from jaxprompt.config.load import to_run_config
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.errors import InputError
from jaxprompt.layers.output import VocabScores
from jaxprompt.runs.adapt import make_denoiser
from jaxprompt.runs.replaced_tokens import (
    Pair,
    generator_config,
    make_objectives,
    make_pair,
    replace_tokens,
    tie_embeddings,
    untie_embeddings,
)
from jaxprompt.scoring.metrics import score_detection, score_targets
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_train_step
from jaxprompt.tree import flatten

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

KEEP_GRADIENT = optax.chain(optax.trace(decay=0.0), optax.sgd(0.5))  # its state is the gradient
VOCAB = 56
CONFIG = tiny.CONFIGS["electra"] | dict(vocab_size=VOCAB, num_attention_heads=4)
SMALL = CONFIG | dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1)


class Case(NamedTuple):
    """A pair and its parameters, all of which train."""

    pair: Pair
    trainable: dict


def make_backbones():
    return (
        make_backbone("electra", SMALL, ("mlm",), stack="scan", dropout=0.0),
        make_backbone("electra", CONFIG, ("rtd",), stack="scan", dropout=0.0),
    )


def make_case() -> Case:
    generator, discriminator = make_backbones()
    batch = make_batch(rows=1)

    def draw(module, seed):
        init = lambda: module.init(jax.random.key(0), batch, method="init_all")["params"]
        return tiny.fill(jax.eval_shape(init), seed)

    params = {"backbone": draw(discriminator, 0), "generator": untie_embeddings(draw(generator, 1))}
    return Case(make_pair(generator, discriminator, block=5), flatten(params))


def batch_of(seed=0, masks=3, **changes):
    """Makes rows of 0 to 3 masks; what is not asked points to the row's start, as padding does."""
    batch = make_batch(seed, family="electra", masks=masks)
    draw = np.random.default_rng(seed)
    targets = draw.integers(tiny.FIRST, tiny.BERT["vocab_size"], (8, masks)).astype(np.int32)
    targets[1, 1:] = targets[5] = -1
    label_pos = np.where(targets >= 0, batch.label_pos, 0)
    return batch._replace(targets=targets, label_pos=label_pos, **changes)


def run(case, batch, tx=KEEP_GRADIENT, objectives=None, **options):
    step = make_train_step(case.pair, tx, objectives or make_objectives(), **options)
    state = make_state(jax.tree.map(jnp.copy, case.trainable), tx, jax.random.key(0))
    return jit(step)(state, {}, batch)


def moving(gradients):
    """Leaves out the keys' biases, which move no softmax: theirs are rounding errors."""
    return {name: g for name, g in gradients.items() if not name.endswith("key/bias")}


def drawn_in_first_step(pair, params, batch):
    """Repeats what the generator draws in the first step of `run`."""
    key = jax.random.fold_in(rng.at_step(jax.random.key(0), 0), 0)
    forward = functools.partial(pair.forward, head="generator", deterministic=False)
    return np.asarray(jit(forward)(params, batch, key=key).sampled)


# -- against torch --------------------------------------------------------------------------------


class Torches(NamedTuple):
    """The same pair in torch, whose embeddings are one module."""

    generator: torch.nn.Module
    discriminator: torch.nn.Module


@pytest.fixture(scope="module")
def torches():
    torch.manual_seed(0)
    make = lambda sizes, kind: kind(transformers.ElectraConfig(**sizes)).eval()
    generator = make(SMALL, transformers.ElectraForMaskedLM)
    discriminator = make(CONFIG, transformers.ElectraForPreTraining)
    with torch.no_grad():
        for parameter in [*generator.parameters(), *discriminator.parameters()]:
            parameter.add_(0.1 * torch.randn_like(parameter))
    generator.electra.embeddings = discriminator.electra.embeddings
    words = discriminator.electra.embeddings.word_embeddings
    words.padding_idx = None  # would leave a padding token that was drawn without a gradient
    generator.generator_lm_head.weight = words.weight
    return Torches(generator, discriminator)


def read(torches, folder) -> dict:
    """Reads what torch saves, by our names."""
    params = {}
    for name, model in zip(("generator", "backbone"), torches, strict=True):
        model.save_pretrained(folder / name)
        params[name], _ = load_backbone(folder / name, "electra", read_config(folder / name))
    return params | {"generator": untie_embeddings(params["generator"])}


def torch_loss(torches, batch, sampled):
    """Computes the loss of the paper with torch's models and the draws of ours."""
    tokens = batch.encoder

    def inputs(ids):
        return dict(
            input_ids=torch.tensor(ids).long(),
            attention_mask=torch.tensor(tokens.mask).long(),
            token_type_ids=torch.tensor(tokens.types).long(),
            position_ids=torch.tensor(tokens.positions).long(),
        )

    there = batch.targets >= 0
    rows = np.nonzero(there)[0]
    logits = torches.generator(**inputs(tokens.ids)).logits[rows, batch.label_pos[there]]
    mlm = torch.nn.functional.cross_entropy(logits, torch.tensor(batch.targets[there]).long())
    shown, is_replaced = replace_masks(tokens.ids, batch.label_pos, batch.targets, sampled)
    labels = torch.tensor(is_replaced).float()
    actual = torches.discriminator(**inputs(shown)).logits
    each = torch.nn.functional.binary_cross_entropy_with_logits(actual, labels, reduction="none")
    right = ((actual > 0) == (labels > 0))[torch.tensor(tokens.mask)]
    hits = (logits.argmax(-1) == torch.tensor(batch.targets[there])).sum(), right.sum()
    return mlm, each[torch.tensor(tokens.mask)].mean(), is_replaced, [int(n) for n in hits]


def test_loss_and_gradients_are_torchs(torches, tmp_path):
    batch = batch_of()
    params = read(torches, tmp_path / "weights")
    case = Case(make_pair(*make_backbones(), block=5), flatten(params))
    state, measured = run(case, batch)
    sampled = drawn_in_first_step(case.pair, params, batch)
    torches.generator.zero_grad()
    torches.discriminator.zero_grad()
    mlm, detection, labels, hits = torch_loss(torches, batch, sampled)
    (mlm + 50 * detection).backward()
    assert_close(measured["loss"], (mlm + 50 * detection).item())
    sums = measured["sums"]
    assert 0 < sums["discriminator"]["replaced"] == labels.sum() <= (batch.targets >= 0).sum()
    assert [int(sums[name]["hits"]) for name in ("generator", "discriminator")] == hits
    assert_close(score_targets(sums["generator"])["loss"], mlm.item())
    assert_close(score_detection(sums["discriminator"])["loss"], detection.item())
    # Saved in the weights' place, gradients come back by our names.
    with torch.no_grad():
        for model in torches:
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
    expected = flatten(read(torches, tmp_path / "gradients"))
    actual = state.opt_state[0].trace
    assert "generator/embed/project/kernel" in actual
    assert_close(moving(actual), moving(expected))


# -- the parts ------------------------------------------------------------------------------------


def test_every_chosen_token_becomes_the_mask(bert):
    config = to_run_config(rtd.get_config())  # 128 tokens
    ids = np.random.RandomState(0).randint(2000, 29000, 126)
    sample = make_denoiser(config, bert, None)([ids], sample_rng(0, 0))
    assert (sample.encoder.ids[sample.label_pos] == bert.mask_token_id).all()
    np.testing.assert_array_equal(sample.targets, ids[sample.label_pos - 1])


def test_replacing_is_that_of_the_data():
    batch = batch_of()
    draw = np.random.default_rng(1)
    sampled = np.where(draw.random((8, 3)) < 0.5, batch.targets, draw.integers(4, 53, (8, 3)))
    shown, is_replaced = replace_masks(batch.encoder.ids, batch.label_pos, batch.targets, sampled)
    actual = replace_tokens(batch, VocabScores(None, None, np.int32(sampled)))
    assert_equal(actual.encoder.ids, shown)
    labels = np.where(batch.encoder.mask, is_replaced, -1)
    assert_equal(actual.targets, labels)
    assert {-1, 0, 1} == set(labels.ravel())
    assert actual.encoder._replace(ids=None) == batch.encoder._replace(ids=None)


def test_tied_parameters_are_the_same_arrays():
    generator, discriminator = (
        dict(a=1, embed={**dict.fromkeys(("word", "position", "type", "norm"), step), **more})
        for step, more in ((1, {"project": 2}), (3, {"project": 4}))
    )
    untied = untie_embeddings(generator)
    assert untied == {"a": 1, "embed": {"project": 2}}
    tied = tie_embeddings(untied, discriminator)
    assert tied["embed"] == dict(word=3, position=3, type=3, norm=3, project=2)
    del generator["embed"]["project"]  # as wide as the embeddings
    assert untie_embeddings(generator) == {"a": 1}
    assert "project" not in tie_embeddings(untie_embeddings(generator), discriminator)["embed"]
    table = object()
    assert tie_embeddings({}, {"embed": {"word": table}})["embed"]["word"] is table


def forced():
    """Draws by the targets alone, so that parts of a batch draw what the whole does."""
    generator, discriminator = make_objectives()

    def then(batch, scored):
        sampled = jnp.where(batch.targets % 2, batch.targets, batch.targets + 1)
        return replace_tokens(batch, scored._replace(sampled=sampled))

    return [generator._replace(then=then), discriminator]


UNEVEN = np.array([1, 1, 0, 1, 0, 1, 1, 0], np.float32)


@pytest.mark.long
def test_accumulation_is_exact():
    """Parts of uneven numbers of masks and tokens, one of which has none; some rows only fill."""
    batch, weights = batch_of(weights=UNEVEN), UNEVEN[:, None]
    expected, actual = (
        run(make_case(), batch, objectives=forced(), accumulate=parts) for parts in (1, 8)
    )
    assert_close(actual[1], expected[1])
    assert_close(*(moving(state.opt_state[0].trace) for state, _ in (actual, expected)))
    n = {name: sums["n"] for name, sums in actual[1]["sums"].items()}
    assert n["discriminator"] == (weights * batch.encoder.mask).sum()
    assert n["generator"] == (weights * (batch.targets >= 0)).sum()


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, options, expected",
    [
        # ELECTRA-small, -base and -large of the paper's table 6: width, MLP, heads.
        (dict(hidden_size=256, embedding_size=128), dict(width=1.0), (256, 1024, 4, 12, 128)),
        (dict(hidden_size=768), dict(width=1 / 3), (256, 1024, 4, 12, 768)),
        (dict(hidden_size=1024), dict(width=0.25), (256, 1024, 4, 12, 1024)),
        (dict(hidden_size=384), dict(layers=0.5), (96, 384, 1, 6, 384)),
        (dict(hidden_size=800), {}, (200, 800, 2, 12, 800)),  # 200 / 64 heads would not divide it
        (dict(hidden_size=16), dict(width=0.01, layers=0.01), (1, 4, 1, 1, 16)),
    ],
)
def test_generator_sizes(sizes, options, expected):
    hf = dict(vocab_size=9, num_hidden_layers=12, num_attention_heads=4, max_position_embeddings=8)
    actual = generator_config(hf | sizes, **options)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    assert tuple(actual[name] for name in (*names, "embedding_size")) == expected
    assert actual["model_type"] == "electra" and actual["vocab_size"] == 9
    make_backbone("electra", actual, ("mlm",))


def test_bad_pairs_say_what_is_wrong():
    with pytest.raises(InputError, match="width is 1.5 of .* above 0 and at most 1"):
        generator_config(CONFIG, width=1.5)
    with pytest.raises(InputError, match="layers is 0 of"):
        generator_config(CONFIG, layers=0)
    generator, _ = make_tiny("electra", vocab_size=99)
    with pytest.raises(InputError, match="vocab is 99 and 56; use a generator"):
        make_pair(generator, make_backbones()[1])
