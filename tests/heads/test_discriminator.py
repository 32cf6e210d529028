"""DPT's classes against an independent statement of its equations in torch, and their layout."""

import jax
import numpy as np
import pytest
import transformers
from tiny_run import make_backbone, sentences
from transformers import AutoTokenizer

from jaxprompt.build.backbone import load_weights, open_backbone
from jaxprompt.build.scorer import build_scorer, task_info
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert.prompt_metadata import ExampleLayout
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.class_list import ClassList, ListEntry, make_tree
from jaxprompt.errors import InputError
from jaxprompt.heads.discriminator import log_scores
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.prompts import InitSource, make_prompt
from jaxprompt.scoring.losses import binary_cross_entropy
from jaxprompt.tree import flatten
from jaxprompt.types import Dims, Role, TaskInfo

torch = pytest.importorskip("torch")

LABELS = ("beast", "food", "tool")
TASK = custom_task(
    fields=("text",), labels=LABELS, words=(("old beast",), ("food",), ("big tool",))
)
TEMPLATE = "{text} about: [classes]."
TEXTS = [row["text"] for row in sentences(0, 5)]
GOLD = np.array([0, 1, 2, 1, 0], np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_backbone(tmp_path_factory.mktemp("heads") / "electra", "discriminator")
    torch.manual_seed(1)
    model = transformers.ElectraForPreTraining.from_pretrained(folder)
    with torch.no_grad():  # else every logit is near 0
        model.discriminator_predictions.dense_prediction.weight.normal_(0, 0.5)
        model.discriminator_predictions.dense_prediction.bias.fill_(0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def backbone(folder):
    config = BackboneConfig(path=str(folder), dropout=0.0)
    return load_weights(open_backbone(config), make_placement(1, 1, devices=jax.devices()[:1]))


def make(backbone, task=TASK, template=TEMPLATE, prompt=None, max_len=40, **head):
    """Builds all that scores, and its parameters. -> scorer, params"""
    opened, loaded = backbone
    scorer = build_scorer(
        opened, task, ExampleLayout(
            max_len=max_len, max_target=8, multiple=8, padding_side="right", choices=1,
            form="cloze",
            answer="", eos=True,
        ),
        prompt=OpenBlock.from_dict(prompt or {"name": "none"}),
        head=OpenBlock("discriminator", head), template=template, batch=8,
    )  # fmt: skip
    params = scorer.model.init(jax.random.key(0), loaded.params)
    table = np.asarray(loaded.params["embed"]["word"]["table"])
    init_source = InitSource(
        scorer.tokenizer, 0, (), None, lambda ids: table[list(ids)], *[None] * 5
    )
    begun = scorer.model.prompt.begin(params["prompt"], init_source)
    return scorer, params | {"prompt": begun}


def examples(texts=TEXTS, gold=GOLD):
    return [Example({"text": text}, label=int(g)) for text, g in zip(texts, gold, strict=True)]


def torch_inputs(folder, names, order, between=", "):
    """Writes the template out as text. -> ids and mask [B, T], where each class begins [B, C]"""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids, places = [], []
    for text in TEXTS:
        tokens = tokenizer.tokenize(text) + tokenizer.tokenize("about:")
        at = [0] * len(names)
        for rank, number in enumerate(order):
            tokens += tokenizer.tokenize(between) if rank else []
            at[number] = 1 + len(tokens)  # behind [CLS]
            tokens += tokenizer.tokenize(names[number])
        tokens = ["[CLS]", *tokens, *tokenizer.tokenize("."), "[SEP]"]
        ids.append(torch.tensor(tokenizer.convert_tokens_to_ids(tokens)))
        places.append(at)
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    return padded, mask, torch.tensor(places)


def torch_loss(logits, places, score, is_mean):
    """States equations 2 and 3, as they stand, in float64."""
    z = logits.double()[torch.arange(len(TEXTS))[:, None], places]
    s = 1 - torch.sigmoid(z) if score == "original" else torch.sigmoid(z)
    y = torch.nn.functional.one_hot(torch.tensor(GOLD).long(), len(LABELS)).double()
    terms = -(y * torch.log(s)) - (1 - y) * torch.log(1 - s)
    return (terms.mean(1) if is_mean else terms.sum(1)).mean()


@pytest.mark.default_cases("original-mean-order2")
@pytest.mark.parametrize(
    "score, loss, order",
    [
        ("original", "sum", (0, 1, 2)),
        ("replaced", "sum", (2, 0, 1)),
        ("original", "mean", (1, 2, 0)),
    ],
)
def test_loss_and_gradients_are_those_of_the_equations(backbone, folder, score, loss, order):
    listed = tuple(LABELS[n] for n in order)
    scorer, params = make(backbone, score=score, loss=loss, listed=listed)
    batch = scorer.one_batch(scorer.encode(examples()).rows, GOLD)
    (objective,) = scorer.head.objectives(0.0)

    def ours(weights):
        scores = scorer.model.forward(params | {"backbone": weights}, batch)
        total, n = objective.loss(scores, batch.labels, batch.weights)
        return total / n

    actual, grads = jax.value_and_grad(ours)(params["backbone"])
    theirs = transformers.ElectraForPreTraining.from_pretrained(folder).eval()
    ids, mask, places = torch_inputs(folder, [w for (w,) in TASK.words], order)
    logits = theirs(input_ids=ids, attention_mask=mask).logits
    expected = torch_loss(logits, places, score, loss == "mean")
    expected.backward()
    np.testing.assert_allclose(actual, expected.item(), rtol=1e-5)
    grads = flatten({"b": grads})
    torch_params = dict(theirs.named_parameters())
    pairs = {
        "b/embed/word/table": torch_params["electra.embeddings.word_embeddings.weight"],
        "b/embed/project/kernel": torch_params["electra.embeddings_project.weight"],
        "b/rtd/dense/kernel": torch_params["discriminator_predictions.dense.weight"],
        "b/rtd/dense/bias": torch_params["discriminator_predictions.dense.bias"],
        "b/rtd/out/kernel": torch_params["discriminator_predictions.dense_prediction.weight"],
        "b/rtd/out/bias": torch_params["discriminator_predictions.dense_prediction.bias"],
    }
    for name, leaf in pairs.items():
        turned = leaf.grad.T if name.endswith("kernel") else leaf.grad
        size = float(turned.abs().max())
        assert size > 1e-4, name
        np.testing.assert_allclose(
            grads[name], turned.numpy(), atol=1e-5 * max(size, 1), err_msg=name
        )


def test_copies_start_as_the_words_and_train_beside_the_vocabulary(backbone, folder):
    """Gradients of the copies are those of the rows of a vocabulary that had them besides."""
    plain, params = make(backbone)
    copied, separate = make(backbone, prompt={"name": "dpt"}, copies=True)
    names = [word for (word,) in TASK.words]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pieces = sum((tokenizer(name, add_special_tokens=False)["input_ids"] for name in names), [])
    assert separate["prompt"]["rows"].shape == (len(pieces), 24)
    batches = [s.one_batch(s.encode(examples()).rows, GOLD) for s in (plain, copied)]
    scores = [
        s.model.forward(p, b)
        for s, p, b in zip((plain, copied), (params, separate), batches, strict=True)
    ]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)

    def loss(prompt):
        total, n = binary_cross_entropy(
            copied.model.forward(separate | {"prompt": prompt}, batches[1]), GOLD, np.ones(5)
        )
        return total / n

    grads = jax.grad(loss)(separate["prompt"])["rows"]
    theirs = transformers.ElectraForPreTraining.from_pretrained(folder).eval()
    ids, mask, places = torch_inputs(folder, names, range(3))
    words = theirs.electra.embeddings.word_embeddings
    rows = words.weight[pieces].detach().clone().requires_grad_()
    embedded = words(ids).detach().clone()
    starts = np.cumsum([0] + [len(tokenizer.tokenize(name)) for name in names])
    lengths = np.diff(starts)
    built = []
    for b in range(len(TEXTS)):
        parts = list(embedded[b])
        for c, at in enumerate(places[b].tolist()):
            for j in range(lengths[c]):
                parts[at + j] = rows[starts[c] + j]
        built.append(torch.stack(parts))
    logits = theirs(inputs_embeds=torch.stack(built), attention_mask=mask).logits
    torch_loss(logits, places, "original", False).backward()
    np.testing.assert_allclose(grads, rows.grad.numpy(), atol=1e-5)


def test_copies_are_of_all_subwords_of_the_first_word_of_each_class():
    words = (((11, 12), (13,)), ((21,), (22, 23)))
    dims = Dims(vocab=60, width=4, embed=2, layers=1, heads=1, head_dim=4, max_len=8)
    prompt = make_prompt("dpt", dims, TaskInfo(2, words, -1))
    table = np.arange(120, dtype=np.float32).reshape(60, 2)
    init_source = InitSource(None, 0, (), None, lambda ids: table[list(ids)], *[None] * 5)
    begun = prompt.begin({"rows": np.zeros((3, 2))}, init_source)
    np.testing.assert_array_equal(begun["rows"], table[[11, 12, 21]])


def test_the_bias_is_added_to_the_logit_of_its_class(backbone):
    scorer, params = make(backbone, bias=True, listed=("tool", "beast", "food"))
    batch = scorer.one_batch(scorer.encode(examples()).rows)
    before = scorer.model.forward(params, batch)
    bias = np.array([1.0, -2.0, 0.5], np.float32)
    moved = scorer.model.forward(params | {"head": {"main": {"bias": bias}}}, batch)
    np.testing.assert_allclose(moved, before - bias, atol=1e-5)


@pytest.mark.parametrize("logit", [-200.0, 0.0, 200.0])
def test_the_loss_is_finite_where_a_sigmoid_is_not(logit):
    scores = np.full((1, 2), logit, np.float32)
    total, _ = binary_cross_entropy(scores, np.array([0]), np.ones(1))
    assert float(total) == pytest.approx(abs(logit) or 2 * np.log(2), rel=1e-6)


# -- layout ---------------------------------------------------------------------------------------


def spell(scorer, row):
    return " ".join(scorer.tokenizer.convert_ids_to_tokens(row.ids.tolist()))


def test_the_text_is_cut_and_never_the_list(backbone):
    scorer, _ = make(backbone, max_len=16)
    ((row,),) = scorer.encode(examples([TEXTS[0] * 9], GOLD[:1])).rows
    assert len(row.ids) == 16 and row.cut
    assert spell(scorer, row).endswith("about : old beast , food , big tool . [SEP]")
    first = [scorer.tokenizer.convert_ids_to_tokens([row.ids[at]])[0] for at in row.label_pos]
    assert first == ["old", "food", "big"]


def test_a_random_order_is_drawn_once_and_kept(backbone):
    orders = {make(backbone, order="random", order_seed=s)[0].head.listed for s in range(40)}
    assert len(orders) == 6  # all of them
    scorer, _ = make(backbone, order="random", order_seed=3)
    again, _ = make(backbone, **{n: x for n, x in scorer.head.block().items() if n != "name"})
    assert again.head.listed == scorer.head.listed
    a, b = (s.encode(examples()).rows[0][0] for s in (scorer, again))
    assert a.ids.tolist() == b.ids.tolist() and a.label_pos.tolist() == b.label_pos.tolist()


def test_the_released_layout_is_written(backbone):
    task = custom_task(
        fields=("text",), labels=LABELS[:2], words=(("bad ,",), ("good ,",))
    )  # fmt: skip
    scorer, _ = make(
        backbone, task, "{text} [sep] about : [classes]", separator=" ", loss="mean",
        copies=True, prompt={"name": "dpt"},
    )  # fmt: skip
    ((row,),) = scorer.encode(examples(["the cat"], GOLD[:1])).rows
    names = scorer.tokenizer.convert_ids_to_tokens(row.ids.tolist())
    shown = [name if slot < 0 else str(slot) for name, slot in zip(names, row.slot, strict=True)]
    assert " ".join(shown) == "[CLS] the cat [SEP] about : 0 1 2 3 [SEP]"
    assert row.label_pos.tolist() == [6, 8]
    assert task_info(scorer.task, 1, scorer.verbalizer, scorer.encoder._specials).words == tuple(
        (tuple(scorer.tokenizer(word, add_special_tokens=False)["input_ids"]),)
        for word in ("bad ,", "good ,")
    )


def test_an_entry_is_read_at_its_first_subword_and_its_copies_follow_one_another():
    entries = (ListEntry((7, 8, 9), 0, row=2), ListEntry((5,), 1), ListEntry((3, 4), 2))
    assert list(ClassList(entries, separator=(6,)).runs()) == [
        ((7,), Role.LABEL, 2), ((8, 9), Role.HARD, 3), ((6,), Role.HARD, -1),
        ((5,), Role.LABEL, -1), ((6,), Role.HARD, -1), ((3,), Role.LABEL, -1),
        ((4,), Role.HARD, -1),
    ]  # fmt: skip


# -- several lists --------------------------------------------------------------------------------


def test_a_tree_lists_children_of_one_parent():
    tree = make_tree("abcdefg", range(7), ("x", "x", "x/u", "x/u", "y", "z", "z"), group=2)
    names = [[tree.names[n] for n in members] for members in tree.lists]
    assert names == [["x", "y"], ["z"], ["a", "b"], ["u"], ["c", "d"], ["f", "g"]]
    assert [tree.names[n] for n in tree.paths[2]] == ["x", "u", "c"]
    assert tree.lists_of(2) == [0, 1, 2, 3, 4] and tree.lists_of(4) == [0, 1]
    assert tree.depth == 5
    flat = make_tree("abcde", [4, 3, 2, 1, 0], group=3)
    assert flat.lists == ((4, 3, 2), (1, 0)) and flat.lists_of(1) == [0, 1] and flat.depth == 2


@pytest.mark.long
def test_the_classes_of_all_groups_are_compared(backbone):
    scorer, params = make(backbone, group=2)
    split = scorer.encode(examples(), targets=True)
    assert len(split.rows) == 10 and split.size == 5
    assert split.labels.tolist()[:4] == [[1, 0], [0, -1], [0, 1], [0, -1]]
    actual = np.asarray(scorer.model.forward(params, scorer.one_batch(split.rows, split.labels)))
    scores = log_scores(split, actual, 3)
    right = float(np.mean(scores.argmax(1) == GOLD))
    assert scorer.measure(split, actual) == {"accuracy": right}
    answers = list(scorer.answers(examples(), split, actual))
    assert [a["prediction"] for a in answers] == [LABELS[c] for c in scores.argmax(1)]
    line = scorer.head.tell(TASK, 3, {"train": split})[-1]
    assert line == "listed: old beast, food | big tool; forward passes per example: 2"


def test_a_group_has_its_scores_in_the_order_of_the_classes_however_it_lists_them(backbone):
    """The lists are tool, food and beast: labels and scores of a list are sorted by class."""
    scorer, params = make(backbone, group=2, listed=("tool", "food", "beast"))
    split = scorer.encode(examples(), targets=True)
    assert scorer.head.tree(TASK).lists == ((2, 1), (0,))
    learned = {0: [[0, 0], [1, -1]], 1: [[1, 0], [0, -1]], 2: [[0, 1], [0, -1]]}
    assert split.labels.tolist() == [row for label in GOLD for row in learned[int(label)]]
    actual = np.asarray(scorer.model.forward(params, scorer.one_batch(split.rows, split.labels)))
    scores = log_scores(split, actual, 3)
    pair = custom_task(fields=("text",), labels=LABELS[1:], words=TASK.words[1:])
    alone, _ = make(backbone, pair, listed=("tool", "food"))
    rows = alone.encode(examples(TEXTS, GOLD * 0)).rows
    logits = np.asarray(alone.model.forward(params, alone.one_batch(rows)), np.float64)
    assert np.ptp(logits, axis=1).min() > 1e-3  # the two classes differ
    np.testing.assert_allclose(scores[:, 1:], -np.log1p(np.exp(-logits)), atol=1e-5)


def test_a_hierarchy_learns_the_way_down_and_scores_every_class(backbone):
    scorer, params = make(backbone, hierarchy=("living", "thing", "thing"))
    learned = scorer.encode(examples(), targets=True)
    assert learned.parts.list.tolist() == [0, 0, 1, 0, 1, 0, 1, 0]  # a beast is an only child
    assert learned.labels.tolist()[:3] == [[1, 0], [0, 1], [1, 0]]
    split = scorer.encode(examples())
    assert len(split.rows) == 10
    actual = np.asarray(scorer.model.forward(params, scorer.one_batch(split.rows)), np.float64)
    log_s = -np.log1p(np.exp(-actual.reshape(5, 2, 2)))
    expected = np.stack(
        [log_s[:, 0, 0], log_s[:, 0, 1] + log_s[:, 1, 0], log_s[:, 0, 1] + log_s[:, 1, 1]], axis=1
    )
    np.testing.assert_allclose(log_scores(split, actual, 3), expected, atol=1e-6)
    with pytest.raises(InputError, match="score dev or test"):
        log_scores(learned, actual[:8], 3)
    line = scorer.head.tell(TASK, 3, {"train": learned})[-1]
    assert line.startswith("listed: living, thing | food, big tool; forward passes per example: 2")


def test_a_list_of_parents_alone_scores_their_classes(backbone):
    """Whose order is that of the list, not that of the classes."""
    parents = ("living", "food", "thing")
    for listed in (LABELS, LABELS[::-1], ("food", "tool", "beast")):
        scorer, params = make(backbone, hierarchy=parents, listed=listed)
        plain, _ = make(
            backbone,
            custom_task(fields=("text",), labels=LABELS, words=tuple((x,) for x in parents)),
            listed=listed,
        )
        learned = scorer.encode(examples(), targets=True).labels.argmax(1)
        assert [listed[place] for place in learned] == [LABELS[label] for label in GOLD]
        scores = []
        for candidate in (scorer, plain):
            split = candidate.encode(examples())
            actual = np.asarray(candidate.model.forward(params, candidate.one_batch(split.rows)))
            scores.append(log_scores(split, actual, 3))
        np.testing.assert_allclose(*scores, atol=1e-6)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(template="{text} about it."), r"has no \[classes\]"),
        (dict(template="{text} [classes] [classes]"), r"has 2 \[classes\]"),
        (dict(template="{text} [mask] [classes]"), r"has \[mask\], which head.name=discriminator"),
        (dict(listed=("tool", "food")), "needs each class of custom once: beast, food, tool"),
        (dict(hierarchy=("a", "b")), "has 2 entries for 3 classes"),
        (dict(hierarchy=("a", "b", "c/")), "the parents of 'tool' are 'c/'"),
        (dict(hierarchy=("日", "food", "food")), "the parent '日' is not in the vocabulary of"),
        (dict(hierarchy=("\u200b", "food", "food")), r"the parent '\\u200b' is empty; give a word"),
        (
            dict(hierarchy=("Thing", "thing", "thing")),
            "'Thing' and 'thing' in the same list have the same tokens",
        ),
        (
            dict(hierarchy=("a/food", "a", "a")),
            "'food' and 'food' in the same list have the same tokens",
        ),
        (dict(separator=" 日 "), "head.separator=' 日 ' is not in the vocabulary of"),
        (dict(separator="\u200b"), r"head.separator='\\u200b' is empty; give a word"),
        (dict(head="linear"), r"has \[classes\], which this head does not read"),
        (dict(copies=True), "5 vectors, one per subword.*trains 0; use prompt.name=dpt"),
        (dict(max_len=11), r"7 for a list of classes.*head.group or head.hierarchy"),
        (dict(bias=True, group=2), "head.bias=True has one parameter per class"),
        (
            dict(task=custom_task(fields=("text",), choices=("a", "b"))),
            "examples of .* have separate choices",
        ),
    ],
)
def test_what_does_not_fit_is_named(backbone, changes, message):
    head = {"name": changes.pop("head")} if "head" in changes else {}
    with pytest.raises(InputError, match=message):
        make(backbone, **changes, **head)


def test_a_backbone_without_the_head_is_refused(tmp_path):
    opened = open_backbone(BackboneConfig(path=str(make_backbone(tmp_path / "bert"))))
    with pytest.raises(InputError, match="no replaced-token head for head.name=discriminator"):
        make((opened, None))
