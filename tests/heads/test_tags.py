"""A tag for every word: read at its first subword in one window, and compared by entities."""

import copy

import numpy as np
import pytest

from jaxprompt.data.tasks.readers.reading import read_example, with_labels
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.specials import read_specials
from jaxprompt.data.text.template import parse
from jaxprompt.errors import InputError
from jaxprompt.heads import make_head
from jaxprompt.scoring import metrics

TEXT = "The President of the United States , Jiuquan Zhao , went to Uppsala on Xqzwvb ."
TAGS = "O O O O B-LOC I-LOC O B-PER I-PER O O O B-LOC O B-X O"
ROWS = [
    {"tokens": TEXT.split(), "tags": TAGS.split()},
    {"tokens": ["Hello"], "tags": ["O"]},
]  # fmt: skip


def read(rows=ROWS, **fields):
    task = custom_task(fields=("tokens",), tags="tags", **fields)
    task = with_labels(task, rows)
    return task, [read_example(task, row, f"r:{i}") for i, row in enumerate(rows, 1)]


def make_encoder(tokenizer, max_len, template="{tokens}"):
    specials = read_specials(tokenizer, "masked", eos=True, sentinel="", num_masks=0)
    return ExampleEncoder(
        tokenizer, parse(template), specials, num_slots=0, num_masks=1, max_len=max_len,
        needs_mask=False, num_types=2,
    )  # fmt: skip


@pytest.mark.parametrize("max_len", [64, 16, 9, 5])
def test_windows_lose_no_word(tokenizer, max_len):
    task, examples = read()
    head = make_head("tags", stride=4)
    encoder = make_encoder(tokenizer, max_len)
    split = head.encode(encoder, task, examples, classes=0, targets=True)
    assert (len(split.rows) > 2) == (max_len < 64) and split.size == 2
    # What is read, put together, is the first subword of every word and its tag.
    firsts = [ids[0] for ids in encoder.tokenise(examples[0].words)]
    windows = [w for w in range(len(split.rows)) if split.parts.owner[w] == 0]
    actual = [int(i) for w in windows for i in split.rows[w][0].ids[split.rows[w][0].label_pos]]
    assert actual == firsts
    tags = [task.labels[i] for w in windows for i in split.labels[w] if i >= 0]
    assert tuple(tags) == examples[0].tags
    for (row,) in split.rows:
        assert len(row.ids) <= max_len
        assert row.ids[0] == tokenizer.cls_token_id and row.ids[-1] == tokenizer.sep_token_id
    # Scores of every window come back word by word.
    scores = np.full((*split.labels.shape, len(task.labels)), -5.0, np.float32)
    for w, row in enumerate(split.labels):
        for m, label in enumerate(row):
            scores[w, m, label] = 5.0
    assert head.measure("entity_f1", split, scores, 0)["entity_f1"] == 1.0
    answer, _ = head.answers(task, examples, split, scores, 0)
    assert tuple(answer["prediction"]) == examples[0].tags
    for entity in answer["entities"]:
        assert TEXT[entity["start"] : entity["end"]] == entity["text"] and entity["score"] > 0.99
    assert [e["text"] for e in answer["entities"]] == [
        "United States", "Jiuquan Zhao", "Uppsala", "Xqzwvb",
    ]  # fmt: skip


def test_entities_are_counted_as_conlleval_does():
    gold = ["B-A I-A O B-B", "O B-A"]
    pred = ["B-A I-A O B-A", "I-A B-A"]  # what begins with I- is an entity too
    actual = metrics.score_tags("entity_f1", [g.split() for g in gold], [p.split() for p in pred])
    assert actual["precision"] == 2 / 4 and actual["recall"] == 2 / 3
    assert actual["entity_f1"] == pytest.approx(2 * 2 / (4 + 3)) and actual["accuracy"] == 4 / 6


def test_texts_and_lists_are_read_alike():
    task, (first, _) = read()
    assert task.scheme == "iob2" and task.labels[:3] == ("O", "B-LOC", "I-LOC")
    row = {"tokens": TEXT.replace(" , ", " ,  "), "tags": " ".join(ROWS[0]["tags"])}
    other = read_example(task, row, "r:1")
    assert other.words == first.words and other.tags == first.tags
    unknown = read_example(task, {"tokens": TEXT}, "r:1", need_label=False)
    assert unknown.words == first.words and unknown.tags == ()


def test_tags_without_a_scheme_stay_as_they_are():
    rows = [{"tokens": ["I", "run", ","], "tags": ["PRP", "VB", ","]}, {"tokens": "O", "tags": "I"}]
    task, examples = read(rows, scheme="none")
    assert task.labels == (",", "I", "PRP", "VB") and task.metric == "accuracy"
    assert [example.tags for example in examples] == [("PRP", "VB", ","), ("I",)]
    named, _ = read(rows, scheme="none", labels=("VB", "PRP", ",", "I", "NN"))
    assert named.labels == ("VB", "PRP", ",", "I", "NN")
    with pytest.raises(InputError, match="r:9: tag 'NN' is not one of task custom: ,, I, PRP, VB"):
        read_example(task, {"tokens": ["a"], "tags": ["NN"]}, "r:9")
    # Of the words of both texts three are right; a mean over texts would be another.
    gold, pred = [example.tags for example in examples], [("PRP", "VB", "VB"), ("I",)]
    assert metrics.score_tags("accuracy", gold, pred) == {"accuracy": 0.75}


def test_the_example_that_plan_makes_up_has_tags_of_its_task(tokenizer):
    task = custom_task(fields=("tokens",), tags="tags", scheme="none", labels=("NN", "VB"))
    head, encoder = make_head("tags"), make_encoder(tokenizer, 16)
    longest = head.longest_example(task, "a b c", 0)
    assert head.encode(encoder, task, [longest], classes=0, targets=True).labels.tolist() == [
        [0] * 3
    ]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"metric": "entity_f1"}, "task.metric=entity_f1 needs tags that span words"),
        ({"predicate": "verb"}, "task.predicate=verb needs tags that span words"),
        ({"labels": ("NN",)}, "task.labels=NN must be 2 or more"),
        ({"labels": ("NN", "VB", "NN")}, "task.labels=NN,VB,NN must be 2 or more"),
    ],
)
def test_what_tags_without_a_scheme_do_not_have(fields, message):
    with pytest.raises(InputError, match=message):
        custom_task(fields=("tokens",), tags="tags", scheme="none", **fields)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "r:9: 2 words in column 'tokens', but 1 tags in"),
        ({"tokens": ["a"], "tags": ["B-NEW"]}, "r:9: tag 'B-NEW' is not one of task custom: O, B-"),
        ({"tokens": ["a"], "tags": ["I-LOC"]}, "r:9: word 1 has 'I-LOC' after 'the beginning'"),
        ({"tokens": ["a"], "tags": [3]}, "r:9: column 'tags' has the tag 3; write"),
        ({"tokens": ["a"], "tags": {"a": 1}}, "r:9: column 'tags' must be a list of"),
        ({"tokens": ["a"]}, "r:9: there is no column 'tags'; columns: tokens"),
        ({"tokens": ["a", " "], "tags": ["O", "O"]}, "r:9: column 'tokens' has an empty word"),
        ({"tokens": [], "tags": []}, "r:9: column 'tokens' has an empty word, or no words"),
        ({"words": ["a"], "tags": ["O"]}, "r:9: there is no column 'tokens'"),
    ],
)
def test_rows_that_are_wrong(row, message):
    task, _ = read()
    with pytest.raises(InputError) as caught:
        read_example(task, row, "r:9")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("max_len, stride", [(512, 32), (40, 19)])
def test_windows_share_32_tokens_unless_half_is_less(max_len, stride, bert):
    task, examples = read([{"tokens": ["a"] * 800, "tags": ["B-X"] + ["O"] * 799}])
    encoder = make_encoder(bert, max_len)

    def windows(**fields):
        head = make_head("tags", **fields)
        split = head.encode(encoder, task, examples, classes=0, targets=True)
        return [len(row.label_pos) for (row,) in split.rows]

    assert windows() == windows(stride=stride) and len(windows()) > 1
    assert windows() != windows(stride=stride - 8)


def test_a_word_that_a_tokenizer_turns_into_nothing_is_read_at_a_token_of_its_own(bert):
    """A zero-width joiner, which BERT's tokenizer drops: its tag is neither lost nor another's."""
    rows = [{"tokens": ["Rome", "\u200d", "the"], "tags": ["B-LOC", "B-X", "O"]}]
    task, examples = read(rows)
    assert bert("\u200d", add_special_tokens=False)["input_ids"] == []
    split = make_head("tags").encode(
        make_encoder(bert, 16), task, examples, classes=0, targets=True
    )
    ((row,),) = split.rows
    assert [task.labels[i] for i in split.labels[0]] == ["B-LOC", "B-X", "O"]
    (first,), (last,) = bert(["Rome", "the"], add_special_tokens=False)["input_ids"]
    assert row.ids[row.label_pos].tolist() == [first, bert.unk_token_id, last]


def test_a_word_of_no_token_is_refused_where_there_is_no_unknown_token(bert):
    task, examples = read([{"tokens": ["Rome", "\u200d"], "tags": ["B-LOC", "O"]}])
    tokenizer = copy.deepcopy(bert)
    tokenizer.unk_token = None
    encoder = make_encoder(tokenizer, 16)
    with pytest.raises(InputError, match="no token for the word .*no unknown token"):
        make_head("tags").encode(encoder, task, examples, classes=0, targets=True)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="needs exactly one field"):
        custom_task(fields=("a", "b"), tags="tags")
    with pytest.raises(InputError, match="task.tags='t' and task.choices are both set"):
        custom_task(fields=("a",), tags="t", choices=("c",))
    with pytest.raises(InputError, match="has only one tag in the training rows, 'O'"):
        read([{"tokens": ["a"], "tags": ["O"]}])
    with pytest.raises(InputError, match="must contain the words once and without modifiers"):
        make_head("tags").check_template(parse("{tokens|lower}"))
    with pytest.raises(InputError, match="has only one tag in the training rows, 'NN'"):
        read([{"tokens": ["a"], "tags": ["NN"]}], scheme="none")
    with pytest.raises(InputError, match="task.scheme=none has none"):
        plain = custom_task(fields=("a",), tags="t", scheme="none")
        make_head("tags", decode="viterbi").check_task(plain)
    task, _ = read()
    with pytest.raises(InputError, match="head.name=linear does not support a tagging task"):
        make_head("linear").check_task(task)
    with pytest.raises(InputError, match="head.name=tags does not support a classification task"):
        make_head("tags").check_task(custom_task(fields=("text",)))
