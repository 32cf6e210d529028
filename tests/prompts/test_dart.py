"""DART against an independent statement of its equations in torch, and what it may not touch."""

import copy

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from tiny import assert_close

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.data.text.encoded import Split
from jaxprompt.errors import InputError
from jaxprompt.heads import make_head
from jaxprompt.heads.label_rows import LabelRows
from jaxprompt.heads.linear import Classifier
from jaxprompt.layers.hiding import mask_text
from jaxprompt.models.model import Model
from jaxprompt.prompts import InitSource, make_prompt
from jaxprompt.tree import flatten, merge, split_trainable, trainable_mask
from jaxprompt.types import Batch, Role, TaskInfo, Tokens

torch = pytest.importorskip("torch")

MASK, CLASSES, SLOTS, ROWS, LENGTH = 4, 3, 3, 5, 14
WORDS = (((11, 12),), ((21,), (22, 23)), ((31,),))  # of each class, subwords of each word
ASKS = TaskInfo(CLASSES, WORDS, MASK)
SIZES = dict(
    vocab_size=60, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=40, max_position_embeddings=32, initializer_range=0.2,
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random BERT with its MLM head, as torch reads it, and ours with its parameters."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    with torch.no_grad():
        theirs.cls.predictions.bias.normal_(0, 0.3)
    theirs.save_pretrained(folder)
    config = read_config(folder)
    weights, report = load_backbone(folder, "bert", config)
    module = make_backbone("bert", config, report.heads, dropout=0.0)
    return theirs.eval(), module, weights


def make_model(pair, scores="restricted", **fields):
    """Makes DART on the BERT, its numbers random. -> model, params"""
    _, module, weights = pair
    prompt = make_prompt("dart", module.dims, ASKS, length=SLOTS, **fields)
    counts = tuple(len(words) for words in WORDS)
    head = LabelRows(counts, scores) if prompt.labels else Classifier(CLASSES)
    model = Model(module, prompt, {"main": head} | prompt.modules())
    params = model.init(jax.random.key(1), weights)
    draw = lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.3
    drawn_params = {name: jax.tree.map(draw, params[name]) for name in ("prompt", "head")}
    return model, params | drawn_params


def make_batch(masks=1):
    """[CLS] text, slot, slot, [MASK] ..., slot [SEP], of differing lengths."""
    rng = np.random.default_rng(3)
    ids = np.zeros((ROWS, LENGTH + masks - 1), np.int32)
    slot, roles = np.full_like(ids, -1), np.full(ids.shape, Role.PAD, np.int8)
    at = np.zeros((ROWS, masks), np.int32)
    for row in range(ROWS):
        text = 4 + row
        ids[row, 0], ids[row, 1 : 1 + text] = 1, rng.integers(5, 60, text)
        roles[row, 0], roles[row, 1 : 1 + text] = Role.SPECIAL, Role.TEXT
        slot[row, 1 + text : 3 + text], roles[row, 1 + text : 3 + text] = (0, 1), Role.SOFT
        at[row] = 3 + text + np.arange(masks)
        ids[row, at[row]], roles[row, at[row]] = MASK, Role.LABEL
        slot[row, at[row, -1] + 1], roles[row, at[row, -1] + 1] = 2, Role.SOFT
        ids[row, at[row, -1] + 2], roles[row, at[row, -1] + 2] = 2, Role.SPECIAL
    mask = roles != Role.PAD
    positions = np.where(mask, mask.cumsum(1) - 1, 0).astype(np.int32)
    tokens = Tokens(ids, mask, slot, positions, np.zeros_like(ids), roles)
    labels = (np.arange(ROWS) % CLASSES).astype(np.int32)
    index = np.arange(ROWS, dtype=np.int32)
    weights = np.ones(ROWS, np.float32)
    weights[-1] = 0.0  # an example that only fills the batch
    return Batch(tokens, at, labels, weights, index)


def torch_hidden(theirs, hidden_batch, slots):
    """Runs torch's encoder on tokens whose slots are given rows. -> [B, T, H]"""
    ids, slot = (torch.tensor(np.array(x)).long() for x in (hidden_batch.ids, hidden_batch.slot))
    words = theirs.bert.embeddings.word_embeddings(ids)
    words = torch.where((slot >= 0)[..., None], slots[slot.clamp(min=0)], words)
    mask = torch.tensor(np.array(hidden_batch.mask)).long()
    hidden = theirs.bert(inputs_embeds=words, attention_mask=mask).last_hidden_state
    return theirs.cls.predictions.transform(hidden)


def torch_loss(theirs, params, batch, hidden_batch, weight, full, each):
    """States equations 4 to 10 of the paper. -> loss, and the rows that it depends on

    With a row for each word the score of a class is the mean over its words.
    """
    prompt_params = params["prompt"]
    table, labels = (
        torch.tensor(np.array(prompt_params[n]), requires_grad=True) for n in ("table", "rows")
    )
    bias = torch.tensor(np.array(params["head"]["main"]["bias"]), requires_grad=True)
    slots = torch.cat([table, labels])
    there = torch.tensor(batch.weights)
    gold = torch.tensor(batch.labels).long()
    rows = torch.arange(ROWS)
    features = torch_hidden(theirs, batch.encoder, slots)
    read = features[rows, torch.tensor(batch.label_pos[:, 0]).long()]
    owner = [c for c in range(CLASSES) for _ in WORDS[c]] if each == "word" else range(CLASSES)
    owner = torch.tensor(list(owner))
    scores = read @ labels.T + bias[owner]
    out, out_bias = theirs.cls.predictions.decoder.weight, theirs.cls.predictions.bias
    if full:
        scores = torch.cat([scores, read @ out.T + out_bias], dim=1)
    if batch.counts is not None:  # a choice that an example lacks is no class of its own
        lacks = owner >= torch.tensor(batch.counts)[:, None]
        some = scores[:, : len(owner)].masked_fill(lacks, -1e9)
        scores = torch.cat([some, scores[:, len(owner) :]], dim=1)
    logp = scores.log_softmax(-1)
    means = [logp[:, : len(owner)][:, owner == c].mean(-1) for c in range(CLASSES)]
    classes = torch.stack(means, -1)
    picked = (classes if full else classes.log_softmax(-1))[rows, gold]
    loss = -(picked * there).sum() / there.sum()
    if weight:
        features = torch_hidden(theirs, hidden_batch.encoder, slots)
        logits = features @ out.T + out_bias
        total, count = 0.0, 0
        targets, places = np.array(hidden_batch.targets), np.array(hidden_batch.label_pos)
        for row, k in zip(*np.nonzero(targets >= 0), strict=True):
            if batch.weights[row]:
                log_probs = logits[row, places[row, k]].log_softmax(-1)
                total, count = total - log_probs[targets[row, k]], count + 1
        loss = loss + weight * total / count
    return loss, {"prompt/table": table, "prompt/rows": labels, "head/main/bias": bias}


def named_as_ours(theirs, folder):
    """Gives the gradients of torch's backbone by our names: saved in the place of the weights."""
    gradients = copy.deepcopy(theirs)
    with torch.no_grad():
        for grad, param in zip(gradients.parameters(), theirs.parameters(), strict=True):
            grad.copy_(torch.zeros_like(grad) if param.grad is None else param.grad)
    gradients.save_pretrained(folder)
    return load_backbone(folder, "bert", read_config(folder))[0]


@pytest.mark.long_cases(
    "class-restricted-0.0-None",
    "class-full-0.0-counts2",
    "word-full-0.0-counts2",
    "word-full-2.5-None",
    "class-restricted-2.5-None",
    "class-full-0.0-None",
    "word-restricted-0.0-None",
    "word-full-0.0-None",
    "word-restricted-2.5-None",
    "class-full-2.5-None",
)
@pytest.mark.parametrize("weight, counts", [(0.0, None), (2.5, None), (0.0, (2, 2, 3, 1, 3))])
@pytest.mark.parametrize("scores", ["restricted", "full"])
@pytest.mark.parametrize("each", ["class", "word"])
def test_loss_and_gradients_are_those_of_the_equations(
    pair, weight, counts, scores, each, tmp_path
):
    theirs = pair[0]
    model, params = make_model(pair, scores, fluency=weight, hide=0.3, each=each)
    assert len(params["prompt"]["rows"]) == {"class": 3, "word": 4}[each]
    batch = make_batch()
    batch = batch if counts is None else batch._replace(counts=np.array(counts, np.int32))
    head = make_head("label_rows", scores=scores)
    objectives = [*head.objectives(0.0), *model.prompt.objectives()]
    key = jax.random.key(5)
    trainable, frozen = split_trainable(params, trainable_mask(params, (".*",)))
    hidden = batch

    def loss_of(trainable):
        total = 0.0
        for objective in objectives:
            view = objective.view(batch, key) if objective.view else batch
            actual = model.forward(merge(trainable, frozen), view, head=objective.head)
            part, n = objective.loss(actual, view.labels, view.weights)
            total += objective.weight * part / n
        return total

    ours, grads = jax.value_and_grad(loss_of)(trainable)
    if weight:
        hidden = objectives[1].view(batch, key)
    expected, leaves = torch_loss(theirs, params, batch, hidden, weight, scores == "full", each)
    theirs.zero_grad()
    expected.backward()
    np.testing.assert_allclose(ours, expected.item(), rtol=1e-5)
    actual = {name: leaf.grad.numpy() for name, leaf in leaves.items()}
    actual |= flatten({"backbone": named_as_ours(theirs, tmp_path)})
    assert actual.keys() == grads.keys() and len(actual) > 20
    for name, grad in actual.items():
        np.testing.assert_allclose(grads[name], grad, atol=1e-5, err_msg=name)
        # Without fluency the bias of the vocabulary has a part in full scores alone.
        assert np.abs(grad).max() > 1e-4 or name.endswith("bias"), name


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_scores_of_examples_with_fewer_choices_are_lowered(pair, platform):
    model, params = make_model(pair, "full", each="word")
    batch = make_batch()._replace(counts=np.array((2, 2, 3, 1, 3), np.int32))
    jax.export.export(jax.jit(model.forward), platforms=[platform])(params, batch)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_fluency_objective_beside_words_of_several_subwords_is_lowered(pair, platform):
    model, params = make_model(pair, fluency=1.0, labels=False)

    def loss(params, batch, key):
        hidden_batch = model.prompt._hide_words(batch, key)
        return model.forward(params, hidden_batch, head="fluency").sum()

    step = jax.jit(jax.grad(loss))
    jax.export.export(step, platforms=[platform])(params, make_batch(3), jax.random.key(0))


@pytest.mark.parametrize("each", ["class", "word"])
def test_a_better_word_of_the_vocabulary_is_no_answer(pair, each):
    """Full scores are those of the rows alone: the best of them is the prediction."""
    model, params = make_model(pair, "full", each=each)
    params["prompt"]["rows"] *= 1e-3  # then nearly every word of the vocabulary is better
    batch = make_batch()
    scores = np.array(model.forward(params, batch))
    assert scores.shape == (ROWS, CLASSES) and (np.exp(scores).sum(1) < 0.3).all()
    split = Split([], batch.labels, np.full(ROWS, CLASSES, np.int32), [])
    measured = make_head("label_rows", scores="full").measure("accuracy", split, scores, CLASSES)
    assert measured["accuracy"] == np.mean(scores.argmax(1) == batch.labels)
    said = make_head("label_rows", scores="full").predicted_classes(split, scores, CLASSES)
    np.testing.assert_array_equal(said, scores.argmax(1))


def test_hidden_words_are_of_the_text_and_the_right_label_stands_at_the_mask(pair):
    model, _ = make_model(pair, fluency=1.0, hide=0.3)
    batch, counts = make_batch(), []
    for seed in range(60):
        hidden_batch = model.prompt._hide_words(batch, jax.random.key(seed))
        ids, before = np.array(hidden_batch.encoder.ids), batch.encoder.ids
        hidden = ids != before
        assert (batch.encoder.roles[hidden] == Role.TEXT).all() and (ids[hidden] == MASK).all()
        targets = np.array(hidden_batch.targets)
        assert ((targets >= 0).sum(1) == hidden.sum(1)).all() and (hidden.sum(1) >= 1).all()
        for row in range(ROWS):
            places = np.array(hidden_batch.label_pos)[row][targets[row] >= 0]
            assert sorted(places) == sorted(np.flatnonzero(hidden[row]))
            assert (before[row, places] == targets[row][targets[row] >= 0]).all()
        at = np.array(hidden_batch.encoder.slot)[np.arange(ROWS), batch.label_pos[:, 0]]
        assert (at == SLOTS + batch.labels).all()
        counts.append(hidden.sum(1) / (batch.encoder.roles == Role.TEXT).sum(1))
    assert 0.27 < np.mean(counts) < 0.42  # 0.3, and at least one of 4 to 8 words


def test_one_word_is_hidden_where_no_share_is_given(pair):
    model, _ = make_model(pair, fluency=1.0, hide=0.0)
    hidden = model.prompt._hide_words(make_batch(), jax.random.key(0))
    assert ((np.array(hidden.targets) >= 0).sum(1) == 1).all()


@pytest.mark.long_cases("3")
@pytest.mark.parametrize("masks", [2, 3])
def test_a_label_that_stays_a_word_stands_at_the_masks(pair, masks):
    """All its subwords do, and the masks that it leaves are gone: the text behind them moves up."""
    model, params = make_model(pair, fluency=1.0, labels=False)
    assert "rows" not in params["prompt"]
    batch, key = make_batch(masks), jax.random.key(0)
    hidden_batch = jax.tree.map(np.array, model.prompt._hide_words(batch, key))
    hidden = jax.tree.map(
        np.array, mask_text(batch.encoder, key, share=model.prompt.hide, mask=MASK)
    )
    words = [WORDS[label][0] for label in batch.labels]
    assert {len(word) for word in words} == {1, 2}
    for row, word in enumerate(words):
        at, length = batch.label_pos[row], hidden.tokens.mask[row].sum()
        remaining = np.setdiff1d(np.arange(length), at[len(word) :])
        ids = hidden.tokens.ids[row].copy()
        ids[at[: len(word)]] = word
        tokens, end = Tokens(*(x[row] for x in hidden_batch.encoder[:6])), len(remaining)
        assert (tokens.ids[:end] == ids[remaining]).all() and tokens.mask.tolist() == [
            column < end for column in range(len(tokens.mask))
        ]
        assert (tokens.slot[:end] == batch.encoder.slot[row, remaining]).all()
        assert (tokens.types[:end] == batch.encoder.types[row, remaining]).all()
        assert (tokens.positions == np.where(tokens.mask, np.arange(len(tokens.mask)), 0)).all()
        assert (
            tokens.roles[:end] == batch.encoder.roles[row, remaining]
        ).all() and not tokens.roles[end:].any()
        places, targets = hidden_batch.label_pos[row], hidden_batch.targets[row]
        assert (tokens.ids[places[targets >= 0]] == MASK).all()
        before = hidden.places[row][hidden.targets[row] >= 0]
        assert [remaining[place] for place in places[targets >= 0]] == before.tolist()
    assert (
        hidden_batch.encoder.lengths is None
        or (hidden_batch.encoder.lengths == hidden_batch.encoder.mask.sum(1)).all()
    )


def test_the_row_of_a_label_leaves_no_mask_beside_it(pair):
    model, _ = make_model(pair, fluency=1.0)
    batch = make_batch(masks=2)
    hidden = model.prompt._hide_words(batch, jax.random.key(0))
    at = batch.label_pos[:, 0]
    slot, rows = np.array(hidden.encoder.slot), np.arange(ROWS)
    assert (slot[rows, at] == SLOTS + batch.labels).all()
    # What stood behind the second mask stands behind the row.
    behind = np.minimum(at + 2, batch.encoder.ids.shape[1] - 1)
    assert (np.array(hidden.encoder.roles)[rows, at + 1] == batch.encoder.roles[rows, behind]).all()
    assert (np.array(hidden.encoder.mask).sum(1) == batch.encoder.mask.sum(1) - 1).all()


def test_no_row_of_the_vocabulary_is_among_what_trains(pair):
    model, params = make_model(pair, fluency=1.0)
    mask = flatten(trainable_mask(params, model.prompt.TRAINABLE))
    assert {n for n, trains in mask.items() if trains} == {
        "prompt/table", "prompt/rows", "head/main/bias",
    }  # fmt: skip


# -- where the rows start -------------------------------------------------------------------------


def source():
    """A tokenizer, and a backbone whose output table is not that of its embeddings."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"[UNK]": 0, "it": 1, "was": 2, ".": 3, "[PAD]": 4}
    vocab |= {f"[unused{i}]": 40 + i for i in range(1, 8)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]"
    )
    table = np.arange(60 * 24, dtype=np.float32).reshape(60, 24)
    output = 5_000 - 2 * table
    embed, rows = (lambda ids, own=own: own[list(ids)] for own in (table, output))
    return InitSource(tokenizer, 0, (), None, embed, rows, *[None] * 4), table, output


def test_rows_start_from_the_words(pair):
    """Those of the template from the embeddings, those of labels from the output table."""
    init_source, table, output = source()
    prompt = make_prompt("dart", pair[1].dims, ASKS, length=3, text="it was .")
    empty = {"table": np.zeros((3, 24)), "rows": np.zeros((3, 24))}
    params = prompt.begin(empty, init_source)
    assert_close(params["table"], table[[1, 2, 3]])
    means = [output[[11, 12]].mean(0), (output[21] + output[[22, 23]].mean(0)) / 2, output[31]]
    assert_close(params["rows"], np.stack(means))


def test_a_row_for_each_word_and_from_its_first_piece(pair):
    init_source, _, output = source()
    empty = {"rows": np.zeros((4, 24))}
    fields = dict(length=0, each="word")
    actual = make_prompt("dart", pair[1].dims, ASKS, **fields).begin(empty, init_source)["rows"]
    assert_close(
        actual, np.stack([output[list(w)].mean(0) for word_ids in WORDS for w in word_ids])
    )
    prompt = make_prompt("dart", pair[1].dims, ASKS, **fields, pieces="first")
    assert_close(prompt.begin(empty, init_source)["rows"], output[[11, 21, 22, 31]])
    prompt = make_prompt("dart", pair[1].dims, ASKS, length=0, pieces="first")
    first = prompt.begin({"rows": np.zeros((3, 24))}, init_source)["rows"]
    assert_close(first, np.stack([output[11], (output[21] + output[22]) / 2, output[31]]))


def test_rows_start_from_unused_words(pair):
    """Each from its table, where a backbone's two are not one."""
    init_source, table, output = source()
    prompt = make_prompt("dart", pair[1].dims, ASKS, length=3, start="unused", text="it was .")
    empty = {"table": np.zeros((3, 24)), "rows": np.zeros((3, 24))}
    params = prompt.begin(empty, init_source)
    assert_close(params["table"], table[[41, 42, 43]])
    assert_close(params["rows"], output[[44, 45, 46]])
    prompt = make_prompt("dart", pair[1].dims, ASKS, length=5, start="unused")
    with pytest.raises(InputError, match=r"no \[unused8\], but 8 rows .*; use prompt.start=words"):
        prompt.begin({"table": np.zeros((5, 24)), "rows": np.zeros((3, 24))}, init_source)


def test_of_several_rows_the_first_stands_at_the_mask(pair):
    model, _ = make_model(pair, fluency=1.0, each="word")
    batch = make_batch()
    hidden = model.prompt._hide_words(batch, jax.random.key(0))
    at = np.array(hidden.encoder.slot)[np.arange(ROWS), batch.label_pos[:, 0]]
    assert at.tolist() == [SLOTS + (0, 1, 3)[c] for c in batch.labels]


def test_a_text_of_another_length_is_named(pair):
    init_source, *_ = source()
    prompt = make_prompt("dart", pair[1].dims, ASKS, length=2, text="it was .")
    with pytest.raises(InputError, match="3 subwords, but prompt.length is 2; set prompt.length=3"):
        prompt.begin({"table": np.zeros((2, 24))}, init_source)


def test_fluency_needs_a_masked_model_and_label_words(pair):
    for task_info in (TaskInfo(CLASSES, WORDS), TaskInfo(CLASSES, (), MASK)):
        prompt = make_prompt("dart", pair[1].dims, task_info, fluency=0.5)
        with pytest.raises(InputError, match="prompt.fluency=0.5 needs a masked language model"):
            prompt.modules()


def test_label_rows_need_a_method_that_has_some(pair):
    _, module, weights = pair
    model = Model(module, make_prompt("none", module.dims), {"main": LabelRows((1,) * CLASSES)})
    with pytest.raises(InputError, match="use prompt.name=dart"):
        jax.eval_shape(lambda: model.init(jax.random.key(0), jax.tree.map(jnp.asarray, weights)))
