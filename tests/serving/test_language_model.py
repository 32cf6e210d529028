"""Sequences of token ids: which inputs are made of them, and what is refused."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import make_tiny

from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.text.encoded import Encoded, make_row
from jaxprompt.errors import InputError
from jaxprompt.layers.reading import GreedyScores
from jaxprompt.models.model import Model
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.prompts import make_prompt
from jaxprompt.serving.language_model import LanguageModel, _front, make_language_model
from jaxprompt.types import Role

SOFT, SPECIAL, TEXT = Role.SOFT, Role.SPECIAL, Role.TEXT


def make_encoded(slot, roles):
    row = make_row([7] * len(slot), slot, [0] * len(slot), roles, range(len(slot)))
    return Encoded(**row._asdict(), label_pos=np.zeros(1, np.int32))


@pytest.fixture(scope="module")
def model():
    """A Llama that reads <s>, two soft tokens and up to six tokens of text."""
    backbone, params = make_tiny("llama", stack="scan")
    prompt = make_prompt("constant", backbone.dims, slots=2)
    soft = jax.random.normal(jax.random.key(1), (2, backbone.dims.embed))
    params = {"backbone": params, "prompt": {"slots": soft}}
    front = _front(make_encoded([-1, 0, 1, -1], [SPECIAL, SOFT, SOFT, TEXT]), "")
    model = Model(backbone, prompt, {"main": GreedyScores()})
    layout = Layout(batch=4, max_len=8, pad_id=0, multiple=0, ends=(1,))
    return LanguageModel(model, params, make_placement(1, 1), layout, front, None, 6)


def test_soft_tokens_follow_the_first_token(model):
    source, first = model._arrange([5, 9, 8], [4, 3])
    assert (source.tokens, first) == ((5, 9, 8, 4), 4)  # of 5 0 1 9 8 4
    row = model._encode(source, SimpleNamespace(positions=[4], targets=[4]))
    assert row.slot.tolist() == [-1, 0, 1, -1, -1, -1]
    assert row.ids[row.slot < 0].tolist() == [5, 9, 8, 4]


def test_a_long_context_is_cut_on_the_left(model):
    source, first = model._arrange([5, 9, 8, 7, 6, 5, 4], [4, 3])
    assert (source.tokens, first) == ((8, 7, 6, 5, 4, 4), 6)


def test_equal_inputs_are_read_once(model, monkeypatch):
    """Answers of one token share an input, and batches and padding change nothing."""
    pairs = [([5, 9], [4]), ([5, 9], [8]), ([5, 9, 8], [4, 3]), ([5], [9, 4]), ([6], [6])]
    numbers, batches = [], LanguageModel._batches

    def count(self, rows):
        numbers.append(len(rows))
        return batches(self, rows)

    monkeypatch.setattr(LanguageModel, "_batches", count)
    together = model.score(pairs)
    assert numbers == [3]
    alone = [model.score([pair])[0] for pair in pairs[2:4]]
    np.testing.assert_allclose([x.logp for x in together[2:4]], [x.logp for x in alone], rtol=1e-5)
    assert [x.is_greedy for x in together[2:4]] == [x.is_greedy for x in alone]


@pytest.mark.long
def test_answers_of_one_token_are_a_distribution(model):
    scored = model.score([([5, 9], [i]) for i in range(model.model.backbone.dims.vocab)])
    assert np.exp([x.logp for x in scored]).sum() == pytest.approx(1.0, abs=1e-5)
    assert [x.is_greedy for x in scored].index(True) == np.argmax([x.logp for x in scored])
    assert sum(x.is_greedy for x in scored) == 1


@pytest.mark.long
def test_greedy_search_writes_what_scores_as_greedy(model):
    (written,) = model.generate([[5, 9]], max_new_tokens=3)
    ends = range(1, len(written) + 1)
    assert all(x.is_greedy for x in model.score([([5, 9], written[:end]) for end in ends]))
    (stopped,) = model.generate([[5, 9]], max_new_tokens=3, stop=written[:1])
    assert stopped == written[:1]


def test_nothing_is_scored(model):
    assert model.score([]) == model.generate([], max_new_tokens=3) == []


@pytest.mark.parametrize("length", [0, 7])
def test_a_continuation_has_a_token_and_fits(model, length):
    with pytest.raises(InputError, match=f"{length} tokens.* 1 to 6"):
        model.score([([5], [4] * length)])


def test_new_tokens_fit(model):
    with pytest.raises(InputError, match="max_gen_toks=6.*at most 5"):
        model.generate([[5]], max_new_tokens=6)


def test_soft_tokens_stand_first():
    ways = {(SOFT, SOFT, TEXT): 2, (SOFT, SPECIAL, TEXT): 1, (SPECIAL, SOFT, TEXT): 2, (TEXT,): 0}
    for roles, count in ways.items():
        slot = [0 if role == SOFT else -1 for role in roles]
        assert len(_front(make_encoded(slot, roles), "").slot) == count
    with pytest.raises(InputError, match="'{text} .soft.' has soft tokens after its text"):
        _front(make_encoded([-1, 0], [TEXT, SOFT]), "{text} [soft]")


@pytest.mark.parametrize(
    "style, reads, message",
    [
        ("masked", (), "an encoder"),
        ("infilling", (), "a GLM"),
        ("causal", ("encoder",), "computed from each input"),
    ],
)
def test_models_without_scores_of_a_continuation(model, style, reads, message):
    parts = SimpleNamespace(
        backbone=SimpleNamespace(STYLE=style), prompt=SimpleNamespace(reads=reads)
    )
    scorer = SimpleNamespace(model=parts, layout=model.layout)
    with pytest.raises(InputError, match=message):
        make_language_model(scorer, {}, model.placement)
