"""All spans that answer a question: laid out, learned, judged as DPT says, and found again."""

import re
import unicodedata

import numpy as np
import pytest
from test_tags import make_encoder
from tiny import make_batch, make_tiny

from jaxprompt.data.tasks.readers.reading import read_all, read_example
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.data.text.template import parse
from jaxprompt.errors import InputError
from jaxprompt.heads import BackboneInfo, make_head
from jaxprompt.heads.multi_spans import JudgedTokens
from jaxprompt.types import Injection

torch = pytest.importorskip("torch")

CONTEXT = "Anna-Lena and Xqzwvb, both of Gansu, met Big Ralph. Ralph bought 1,095 rats for Xqzwvb!"
TASK = custom_task(fields=("question", "context"), answers="answers")
LAYOUT = "{question|whole} [sep] {context}"


def row(*answers, context=CONTEXT):
    starts = [context.index(answer) for answer in answers]
    actual = {"text": list(answers), "answer_start": starts}
    return {"question": "Who met?", "context": context, "answers": actual}


def encode(tokenizer, rows, max_len=128, **fields):
    head = make_head("multi_spans", **({"stride": 6} | fields))
    examples = read_all(TASK, rows, lambda i: f"r:{i + 1}")
    encoder = make_encoder(tokenizer, max_len, LAYOUT)
    return head, examples, head.encode(encoder, TASK, examples, classes=0, targets=True)


def logits_of(split, sure=3.0):
    """Logits of s that say what the labels do."""
    return np.where(split.labels == 1, sure, -sure).astype(np.float32)


def texts(head, examples, split, actual):
    answers = list(head.answers(TASK, examples, split, actual, 0))
    for example, answer in zip(examples, answers, strict=True):
        text = example.fields["context"]
        for span in answer["spans"]:
            assert text[span["start"] : span["end"]] == span["text"]
            assert 0 < span["score"] < 1
        assert [span["text"] for span in answer["spans"]] == answer["prediction"]
    return [answer["prediction"] for answer in answers]


@pytest.mark.parametrize("max_len", [128, 24, 17])
def test_answers_come_back_from_the_labels(tokenizer, max_len):
    rows = [row("Xqzwvb", "Big Ralph"), row("Gansu"), row("1,095 rats", "Anna-Lena", "Ralph.")]
    head, examples, split = encode(tokenizer, rows, max_len)
    assert (len(split.rows) > 3) == (max_len < 128) and split.size == 3
    actual = texts(head, examples, split, logits_of(split))
    assert actual == [["Xqzwvb", "Big Ralph"], ["Gansu"], ["Anna-Lena", "Ralph.", "1,095 rats"]]
    assert head.measure("f1", split, logits_of(split), 0) == {"f1": 1.0, "exact_match": 1.0}
    # Every token of a text is read, and learned, in one window.
    first = [len(split.rows[w][0].label_pos) for w in range(len(split.rows))]
    per_text = np.bincount(split.parts.owner, weights=first).astype(int)
    whole, _, one = encode(tokenizer, rows, 128)
    assert per_text.tolist() == [len(row[0].label_pos) for row in one.rows]
    assert (split.labels == 1).sum() == (one.labels == 1).sum()


def test_a_word_is_whole_where_one_subword_passes(bert):
    head, examples, split = encode(bert, [row("Gansu")])
    pieces = bert.convert_ids_to_tokens(split.rows[0][0].ids[split.rows[0][0].label_pos].tolist())
    at = next(i for i, piece in enumerate(pieces) if piece.startswith("##") and i > 4)
    actual = np.full(split.labels.shape, -3.0, np.float32)
    actual[0, at] = 3.0
    ((word,),) = texts(head, examples, split, actual)
    assert word == "Xqzwvb"


def test_the_threshold_is_on_the_share_of_replaced(bert):
    """Section A: a token is of the answer where its sigmoid is lower than 0.6."""
    head, examples, split = encode(bert, [row("Gansu")], no_answer=True)
    for sigmoid, passes in ((0.59, True), (0.61, False)):
        logit = -np.log(sigmoid / (1 - sigmoid))  # of s = 1 - sigmoid
        actual = np.where(split.labels == 1, logit, -9.0).astype(np.float32)
        assert texts(head, examples, split, actual) == [["Gansu"] * passes]


def test_one_word_answers_where_none_passes_unless_there_may_be_no_answer(bert):
    actual = lambda split: np.where(split.labels == 1, -2.0, -3.0).astype(np.float32)
    for no_answer, expected in ((False, [["Gansu"], ["Anna"]]), (True, [[], []])):
        head, examples, split = encode(bert, [row("Gansu"), row()], no_answer=no_answer)
        assert texts(head, examples, split, actual(split)) == expected
    assert head.measure("f1", split, actual(split), 0) == {"f1": 0.5, "exact_match": 0.5}


def test_equal_texts_are_one_answer_in_any_case(bert):
    """The first is kept, as it stands in the text; a span is as sure as its words on the mean."""
    context = "Big Ralph met BIG ralph and Gansu."
    head, examples, split = encode(bert, [row("Gansu", context=context)])
    (places,) = split.parts.offsets
    odds = {0: 4.0, 4: 1.0, 14: 5.0, 18: 5.0, 28: 2.0}  # of s, by where a word begins
    actual = np.full(split.labels.shape, -4.0, np.float32)
    for start, logit in odds.items():
        end = start + len(re.match(r"\w+", context[start:])[0])
        actual[0, : len(places)][(places[:, 0] >= start) & (places[:, 1] <= end)] = logit
    assert texts(head, examples, split, actual) == [["Big Ralph", "Gansu"]]
    (answer,) = head.answers(TASK, examples, split, actual, 0)
    sure = lambda logit: 1 / (1 + np.exp(-logit))
    expected = [(sure(4.0) + sure(1.0)) / 2, sure(2.0)]
    assert [span["score"] for span in answer["spans"]] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("context", "answers", "remaining"),
    [
        ("Ralph. Big Ralph", ["Ralph", "Big Ralph"], ["Big Ralph"]),  # behind a space
        ("Anna met Anna Lee", ["Anna", "Anna Lee"], ["Anna Lee"]),  # in front of one
        ("a rat, two rats", ["rat", "rats"], ["rats"]),  # in front of an s
        ("Ava asked Avan", ["Ava", "Avan"], ["Avan"]),  # in front of an n
        ("ark, then Marked", ["ark", "Marked"], ["Marked"]),  # inside
        ("ED, then Marked", ["ED", "Marked"], ["ED", "Marked"]),  # the end of a word
        ("Mark, then Marked", ["Mark", "Marked"], ["Mark", "Marked"]),  # its beginning
        ("BIG RALPH, Ralph", ["BIG RALPH", "Ralph"], ["BIG RALPH"]),  # in any case
    ],
)
def test_answers_that_are_part_of_others_are_dropped_as_released(bert, context, answers, remaining):
    """`_remove_substring_from_decoded_output` of DPT's multi_span_head.py."""
    question = row(answers[0], context=context)
    at = context.rindex(answers[1])
    question["answers"] = {"text": answers, "answer_start": [context.index(answers[0]), at]}
    for drops, expected in ((True, remaining), (False, answers)):
        head, examples, split = encode(bert, [question], drop_substrings=drops)
        assert texts(head, examples, split, logits_of(split)) == [expected]


def test_the_threshold_is_tuned_on_dev_and_taken_over(bert):
    head, examples, split = encode(bert, [row("Gansu"), row("Anna")], tune=True, no_answer=True)
    actual = np.full(split.labels.shape, -9.0, np.float32)
    actual[split.labels == 1] = np.log(0.28 / 0.72)  # s = 0.28: below 0.4, which 0.6 asks for
    actual[:, 5] = np.log(0.2 / 0.8)
    measured = head.measure("f1", split, actual, 0)
    assert measured == {"f1": 1.0, "exact_match": 1.0, "threshold": 0.75}
    fixed = head.fitted(measured)
    assert fixed.threshold == 0.75 and not fixed.tune
    assert fixed.measure("f1", split, actual, 0) == {"f1": 1.0, "exact_match": 1.0}
    assert head.fitted({"f1": 0.5}) == head and fixed.fitted(measured) == fixed


def test_alternatives_of_one_span_each(bert):
    """As SQuAD has them: the first is learned, any is right, and one span is the answer."""
    head, examples, split = encode(bert, [row("Big Ralph", "Ralph")], single=True)
    (places,) = split.parts.offsets
    learned = [CONTEXT[a:b] for a, b in places[split.labels[0, : len(places)] == 1]]
    assert learned == ["Big", "Ralph"]
    actual = np.full(split.labels.shape, -4.0, np.float32)
    actual[0, : len(places)][places[:, 0] == CONTEXT.index("Ralph. Ralph") + 7] = 3.0
    actual[0, 0] = 1.0
    assert texts(head, examples, split, actual) == [["Ralph"]]
    assert head.measure("exact_match", split, actual, 0)["exact_match"] == 1.0


def test_one_span_is_the_likeliest_of_equal_texts_too(bert):
    head, examples, split = encode(bert, [row("Ralph")], single=True)
    (places,) = split.parts.offsets
    actual = np.full(split.labels.shape, -4.0, np.float32)
    first, second = CONTEXT.index("Ralph"), CONTEXT.rindex("Ralph")
    for start, logit in ((first, 1.0), (CONTEXT.index("Gansu"), 2.0), (second, 3.0)):
        actual[0, : len(places)][places[:, 0] == start] = logit
    (answer,) = head.answers(TASK, examples, split, actual, 0)
    assert answer["prediction"] == ["Ralph"] and answer["spans"][0]["start"] == second > first


def test_questions_without_known_answers_teach_nothing_and_are_not_measured(bert):
    head = make_head("multi_spans")
    unknown = read_example(TASK, {"question": "Who?", "context": CONTEXT}, "r:1", need_label=False)
    answered = read_example(TASK, row("Gansu"), "r:2")
    encoder = make_encoder(bert, 128, LAYOUT)
    split = head.encode(encoder, TASK, [unknown, answered], classes=0, targets=False)
    assert (split.labels[0] == -1).all() and (split.labels[1] == 1).any()
    measured, count = head.measure_labelled("f1", [head.labelled(split, logits_of(split), 0)])
    assert count == 1 and measured["f1"] == 1.0


def test_a_text_without_words_has_no_answer(bert):
    head, examples, split = encode(bert, [row(context=" ")])
    assert texts(head, examples, split, logits_of(split)) == [[]]
    assert split.rows[0][0].label_pos.tolist() == [0] and (split.labels == -1).all()


def test_it_tells_how_many_have_several_answers_none_or_windows(bert):
    rows = [row("Gansu"), row("Gansu", "Ralph"), row()]
    head, _, split = encode(bert, rows, 24)
    assert head.tell(TASK, 0, {"train": split}) == [
        "train: 1 of 3 questions with several answers, 1 without, 3 texts are split into windows"
    ]


@pytest.mark.parametrize("original", [True, False])
def test_tokens_are_judged_by_the_checkpoints_head_or_a_new_layer(original):
    """The score is the logit of s = 1 - sigmoid(z), or of sigmoid(z) if not `original`."""
    module, weights = make_tiny("electra")
    batch = make_batch(rows=2, masks=3, family="electra")
    bound = module.bind({"params": weights})
    hidden = bound(batch, Injection(), deterministic=True)
    kernel = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
    params = {"params": {"out": {"kernel": kernel, "bias": np.ones(1, np.float32)}}}
    args = hidden, batch, None, bound
    new = JudgedTokens("linear", original).apply(params, *args, deterministic=True)
    old = JudgedTokens("discriminator", original).apply({}, *args, deterministic=True)
    read = np.take_along_axis(np.asarray(hidden), batch.label_pos[..., None], axis=1)
    sign = -1 if original else 1
    np.testing.assert_allclose(new, sign * ((read @ kernel)[..., 0] + 1), rtol=1e-5, atol=1e-5)
    logits = np.take_along_axis(np.asarray(bound.rtd(hidden)), batch.label_pos, axis=1)
    np.testing.assert_allclose(old, sign * logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_the_loss_of_a_window_is_the_mean_or_the_sum_over_its_tokens(loss):
    (objective,) = make_head("multi_spans", loss=loss).objectives(0.0)
    scores, labels = np.zeros((2, 3), np.float32), np.array([[1, 0, -1], [0, 1, 1]])
    total, n = objective.loss(scores, labels, np.ones(2))
    assert float(total) == pytest.approx(np.log(2) * (2 if loss == "mean" else 5)) and n == 2


def test_chinese_answers_end_where_they_do(tokenizer):
    """A run of Chinese has no spaces: not all of it is the answer."""
    question = row("田纳西", "1996年", context="他在田纳西，1996年。")
    head, examples, split = encode(tokenizer, [question])
    assert texts(head, examples, split, logits_of(split)) == [["田纳西", "1996年"]]
    assert head.measure("f1", split, logits_of(split), 0) == {"f1": 1.0, "exact_match": 1.0}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize(
    ("text", "answers"),
    [("a café noir or tea", ["café noir", "tea"]), ("वह हिन्दी बोलता है", ["हिन्दी", "है"])],
)
def test_a_mark_belongs_to_its_word(tokenizer, form, text, answers):
    """An accent or a vowel sign may be a character of its own, which no subword may cover."""
    text, *answers = (unicodedata.normalize(form, x) for x in (text, *answers))
    head, examples, split = encode(tokenizer, [row(*answers, context=text)])
    assert texts(head, examples, split, logits_of(split)) == [answers]


def test_tasks_backbones_and_templates_that_do_not_fit():
    head = make_head("multi_spans")
    head.check_task(TASK)
    with pytest.raises(InputError, match="cmrc_f1"):
        head.check_task(get_task("cmrc2018"))
    facts = BackboneInfo("bert", "folder", "masked", frozenset({"mlm"}), 2, 0, "")
    make_head("multi_spans", layer="linear").check_backbone(facts)
    with pytest.raises(InputError, match="no replaced-token head.*or head.layer=linear"):
        head.check_backbone(facts)
    with pytest.raises(InputError, match="gpt2"):
        head.check_backbone(facts._replace(style="causal", family="gpt2"))
    with pytest.raises(InputError, match="once and without modifiers"):
        head.check_template(parse("{question} [sep] {context|lower}"))
