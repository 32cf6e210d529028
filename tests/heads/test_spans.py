"""The span of a text that answers a question: laid out, learned, found again, and compared."""

import dataclasses

import numpy as np
import pytest
import transformers
from test_tags import make_encoder
from tiny import assert_close, draw_params, make_batch

from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.data.text.template import parse
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError
from jaxprompt.heads import make_head
from jaxprompt.heads.spans import SpanScores
from jaxprompt.heads.tags import TagScores
from jaxprompt.scoring import metrics
from jaxprompt.scoring.losses import END, START
from jaxprompt.types import ABSENT, Injection

torch = pytest.importorskip("torch")

CONTEXT = "Jiuquan, a city of Gansu, lies west. It has 1,095,947 people and (of late) 2 airports."
TASK = custom_task(fields=("question", "context"), answers="answers")
LAYOUT = "{question|whole} [sep] {context}"


def row(*answers, question="How many live there?"):
    starts = [CONTEXT.index(answer) for answer in answers]
    actual = {"text": list(answers), "answer_start": starts}
    return {"question": question, "context": CONTEXT, "answers": actual}


def encode(tokenizer, rows, max_len=128, **fields):
    head = make_head("spans", **({"stride": 6} | fields))
    examples = [read_example(TASK, row, f"r:{i}") for i, row in enumerate(rows, 1)]
    encoder = make_encoder(tokenizer, max_len, LAYOUT)
    return head, examples, head.encode(encoder, TASK, examples, classes=0, targets=True)


def scores_of(split):
    """Scores that name what the labels say; windows without the answer say so less surely."""
    actual = np.full((*split.labels.shape, 2), -9.0, np.float32)
    for window, labels in enumerate(split.labels):
        for column, bit in enumerate((START, END)):
            at = np.flatnonzero((labels > 0) & (labels & bit > 0))[0]
            actual[window, at, column] = 5.0 if at else 1.0
    return actual


@pytest.mark.parametrize("max_len", [128, 24, 19])
def test_answers_come_back_from_the_labels(tokenizer, max_len):
    rows = [row("1,095,947"), row("Gansu", question="Where?"), row("of late", "2 airports")]
    head, examples, split = encode(tokenizer, rows, max_len)
    assert (len(split.rows) > 3) == (max_len < 128) and split.size == 3
    answers = list(head.answers(TASK, examples, split, scores_of(split), 0))
    assert [a["prediction"] for a in answers] == ["1,095,947", "Gansu", "of late"]
    for answer in answers:
        assert CONTEXT[answer["start"] : answer["end"]] == answer["prediction"]
    assert head.measure("f1", split, scores_of(split), 0) == {"f1": 1.0, "exact_match": 1.0}
    for (encoded,) in split.rows:
        assert (
            len(encoded.ids) <= max_len
            and encoded.ids[encoded.label_pos[0]] == tokenizer.cls_token_id
        )
        assert encoded.num_choices == len(encoded.label_pos)


@pytest.mark.long_cases(
    "-{question} context: {context}-multi_spans",
    "-{question} [sep] {context}-multi_spans",
    " -{question} context: {context}-multi_spans",
    " -{question} [sep] {context}-multi_spans",
)
@pytest.mark.parametrize("head", ["spans", "multi_spans"])
@pytest.mark.parametrize("layout", ["{question} context: {context}", "{question} [sep] {context}"])
@pytest.mark.parametrize("space", ["", " ", "\n  "])
def test_a_text_is_encoded_as_anywhere_else(shared, head, layout, space):
    """Behind a word with the space that a byte-level BPE counts to what follows."""
    tokenizer = load_tokenizer(shared / "tokenizers/roberta")
    example_row = row("Gansu", "2 airports")
    example_row["context"] = space + CONTEXT
    example_row["answers"]["answer_start"] = [
        len(space) + at for at in example_row["answers"]["answer_start"]
    ]
    example = read_example(TASK, example_row, "r:1")
    encoder = make_encoder(tokenizer, 128, layout)
    split = make_head(head).encode(encoder, TASK, [example], classes=0, targets=True)
    ((actual,),) = split.rows
    assert actual.ids.tolist() == encoder.encode(example)[0].ids.tolist()
    places = split.parts.offsets[0]
    marked = split.labels[0][-len(places) :] > 0
    first, last = np.flatnonzero(marked)[[0, -1 if head == "multi_spans" else 1]]
    assert example_row["context"][places[first, 0] :].startswith("Gansu")
    end = "2 airports" if head == "multi_spans" else "Gansu"
    assert example_row["context"][: places[last, 1]].endswith(end)


def test_no_answer_is_said_where_it_may_be(bert):
    rows = [row("Gansu"), row()]
    head, examples, split = encode(bert, rows, no_answer=True)
    assert examples[1].references == ("",) and split.labels[1, 0] == START | END
    answers = list(head.answers(TASK, examples, split, scores_of(split), 0))
    assert [a["prediction"] for a in answers] == ["Gansu", ""]
    assert answers[1]["start"] == -1 and 0 < answers[1]["score"] <= 1
    assert head.measure("f1", split, scores_of(split), 0)["f1"] == 1.0
    # Over a threshold that no score reaches, and where there always is one, the best is taken.
    for fields in (dict(no_answer=True, threshold=100.0), {}):
        other, _, _ = encode(bert, rows, **fields)
        actual = list(other.answers(TASK, examples, split, scores_of(split), 0))
        assert actual[1]["prediction"] and actual[0]["prediction"] == "Gansu"


def test_an_answer_has_max_answer_tokens_at_most(bert):
    head, examples, split = encode(bert, [row("Gansu")], max_answer=2)
    places = split.parts.offsets[0]
    scores = np.full((1, split.labels.shape[1], 2), -9.0, np.float32)
    scores[0, 1, 0], scores[0, 2:4, 1] = 5.0, (1.0, 5.0)  # behind [CLS]: 2 tokens, or better 3
    for longest, last in ((2, 1), (3, 2), (1, 0)):
        shorter = dataclasses.replace(head, max_answer=longest)
        scores[0, 1, 1] = 0.0 if longest == 1 else -9.0
        (answer,) = shorter.answers(TASK, examples, split, scores, 0)
        assert (answer["start"], answer["end"]) == (places[0, 0], places[last, 1])


@pytest.mark.parametrize("surest", [0, 1])
def test_the_window_that_is_least_sure_of_no_answer_decides(bert, surest):
    """The least score of none over the windows (utils_qa.py of the released code)."""
    head, examples, split = encode(bert, [row("Gansu")], max_len=24, no_answer=True)
    assert len(split.rows) > 1
    scores = np.full((len(split.rows), split.labels.shape[1], 2), -9.0, np.float32)
    scores[:, 0] = 5.0  # [CLS], of every window
    scores[surest, 0], scores[surest, 1] = -1.0, 0.0  # a token of one is better than none there
    (answer,) = head.answers(TASK, examples, split, scores, 0)
    assert answer["prediction"] != "" and answer["start"] == split.parts.offsets[surest][0, 0]


def test_answers_that_are_all_hidden_are_not_measured(bert):
    """Empty lists, as test files have them; one answer tells that the others are none."""
    for rows, count in (([row(), row()], 0), ([row(), row("Gansu")], 2)):
        head, _, split = encode(bert, rows)
        labelled = head.labelled(split, scores_of(split), 0)
        assert head.measure_labelled("f1", [labelled])[1] == count


@pytest.mark.parametrize("metric", ["f1", "exact_match"])
def test_the_threshold_of_no_answer_is_the_best_on_dev(bert, metric):
    rng = np.random.default_rng(0)
    rows = [row("Gansu") if rng.random() < 0.5 else row() for _ in range(12)]
    head, _, split = encode(bert, rows, no_answer=True, tune=True)
    actual = scores_of(split) + 6 * rng.normal(size=(*split.labels.shape, 2)).astype(np.float32)
    measured = head.measure(metric, split, actual, 0)
    plain = lambda at: dataclasses.replace(head, tune=False, threshold=at)
    tried = [plain(at).measure(metric, split, actual, 0)[metric] for at in np.arange(-40, 40, 0.5)]
    assert measured[metric] >= max(tried) and measured[metric] > tried[80]
    fitted = head.fitted(measured)
    assert fitted == plain(measured["threshold"])
    assert fitted.measure(metric, split, actual, 0)[metric] == measured[metric]
    with pytest.raises(InputError, match="selects the threshold of no answer; set head.no_answer"):
        make_head("spans", tune=True)


def test_white_space_neither_answers_nor_stands_around_an_answer(roberta):
    """Byte-level BPE makes tokens of second spaces and of line ends."""
    text = "Jiuquan \n\n  lies west.  Of  Gansu. \u3000 Far"
    answers = {"text": ["Far"], "answer_start": [text.index("Far")]}
    question = {"question": "Where?", "context": text, "answers": answers}
    head, examples, split = encode(roberta, [question], max_answer=9)
    places = split.parts.offsets[0]
    blank = [not text[first:last].strip() for first, last in places]
    assert sum(blank) > 2  # else this tests nothing
    tokens = split.counts[0] - 1
    for begin in range(tokens):
        for end in range(begin, min(begin + 3, tokens)):
            actual = np.full((*split.labels.shape, 2), -9.0, np.float32)
            actual[0, 1 + begin, 0] = actual[0, 1 + end, 1] = 9.0
            (answer,) = head.answers(TASK, examples, split, actual, 0)
            span = answer["prediction"]
            assert span and span == span.strip() == text[answer["start"] : answer["end"]]
            if not all(blank[begin : end + 1]):
                assert span == text[places[begin][0] : places[end][1]].strip()


def test_an_answer_has_the_accents_of_its_last_letter(bert):
    """BERT drops a decomposed accent, which no subword then holds."""
    context = "He went to the cafe\u0301 and drank an e\u0301te\u0301."
    for answer in ("cafe\u0301", "e\u0301te\u0301"):
        answers = {"text": [answer], "answer_start": [context.index(answer)]}
        example_row = {"question": "Where?", "context": context, "answers": answers}
        head, examples, split = encode(bert, [example_row])
        (actual,) = head.answers(TASK, examples, split, scores_of(split), 0)
        assert actual["prediction"] == answer == context[actual["start"] : actual["end"]]
        assert head.measure("f1", split, scores_of(split), 0)["exact_match"] == 1.0


def test_answers_that_are_out_of_reach_are_counted(bert):
    """CMRC's are longer than SQuAD's: a third of its training set has more than 30 tokens."""
    rows = [row("Gansu"), row("It has 1,095,947 people"), row()]
    lines = lambda max_len, **fields: encode(bert, rows, max_len, **fields)[0].tell(
        TASK, 0, {"train": encode(bert, rows, max_len, **fields)[2]}
    )
    assert len(lines(128)) == 1
    message = lines(128, max_answer=4)[1]
    assert message.startswith(
        "train: of 3 questions, 1 have an answer longer than head.max_answer=4"
    )
    assert "tokens and 0 have an answer that no window" in message
    message = lines(17, stride=0)[1]
    assert "0 have an answer longer than head.max_answer=30 tokens and 2 have" in message


def test_a_span_of_two_windows_counts_once(bert):
    """Its score is the share of the better of the two, as if the other window had not held it."""
    head, examples, split = encode(bert, [row("2 airports")], max_len=30, n_best=1)
    offsets = split.parts.offsets
    assert len(offsets) > 1
    shared_places = {tuple(place) for place in offsets[0]} & {tuple(place) for place in offsets[1]}
    place = sorted(shared_places)[-1]  # near the end of the first window
    at = [1 + [tuple(x) for x in window].index(place) for window in offsets[:2]]
    actual = np.full((*split.labels.shape, 2), -9.0, np.float32)
    actual[0, at[0]], actual[1, at[1]] = 2.0, 1.5  # 4 and 3 as a span
    # The windows that do not hold it answer with another one each.
    others = len(offsets) - 2
    for window in range(2, len(offsets)):
        actual[window, 1] = 1.0
    (answer,) = head.answers(TASK, examples, split, actual, 0)
    assert (answer["start"], answer["end"]) == place
    assert answer["score"] == pytest.approx(np.exp(4) / (np.exp(4) + others * np.exp(2)))


def test_a_span_is_neither_backward_nor_too_long(bert):
    head, examples, split = encode(bert, [row("Gansu")], max_answer=3)
    actual = np.zeros((*split.labels.shape, 2), np.float32)
    actual[0, 9, 0], actual[0, 4, 1], actual[0, 20, 1] = 9.0, 9.0, 8.0
    (answer,) = head.answers(TASK, examples, split, actual, 0)
    start, end = answer["start"], answer["end"]
    places = split.parts.offsets[0]
    first = int(np.flatnonzero(places[:, 0] == start)[0])
    last = int(np.flatnonzero(places[:, 1] == end)[-1])
    assert 0 <= last - first < 3


@pytest.mark.parametrize(
    "head, name, layer, labels",
    [
        (SpanScores(), "BertForQuestionAnswering", "qa_outputs", 2),
        (TagScores(5, 0.0), "BertForTokenClassification", "classifier", 5),
    ],
)
def test_scores_are_those_of_transformers(head, name, layer, labels):
    """Which reads every token; of these we read some, one of them in half of the rows."""
    batch = make_batch(masks=2)
    counts = np.array([1, 2] * 4, np.int32) if labels == 2 else None
    hidden = np.random.default_rng(0).normal(size=(8, 12, 16)).astype(np.float32)
    args = hidden, batch._replace(counts=counts), Injection(), None
    params = draw_params(head, *args, deterministic=True)
    actual = head.apply({"params": params}, *args, deterministic=True)
    config = transformers.BertConfig(hidden_size=16, num_attention_heads=2, num_labels=labels)
    linear = getattr(getattr(transformers, name)(config), layer)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor(np.array(params["out"]["kernel"].T)))
        linear.bias.copy_(torch.tensor(np.array(params["out"]["bias"])))
        every = linear(torch.tensor(hidden)).numpy()
    expected = np.take_along_axis(every, batch.label_pos[..., None], 1)
    if counts is not None:
        expected[np.arange(2) >= counts[:, None]] = ABSENT
    assert_close(actual, expected)


@pytest.mark.parametrize(
    "gold, pred, f1, exact",
    [
        (["The Cat"], "cat!", 1.0, 1.0),
        (["a cat sat"], "the cat", 2 / 3, 0.0),
        (["dog", "big cat"], "cat", 2 / 3, 0.0),
        ([""], "", 1.0, 1.0),
        ([""], "cat", 0.0, 0.0),
        (["cat cat"], "cat", 2 / 3, 0.0),
        (["光荣和ω"], "光荣", 2 * 2 / (2 + 4), 0.0),
    ],
)
def test_answers_are_compared_as_squad_does(gold, pred, f1, exact):
    actual = metrics.score_spans("f1", [gold], [pred])
    assert actual["f1"] == pytest.approx(f1) and actual["exact_match"] == exact
    assert list(metrics.score_spans("exact_match", [gold], [pred]))[0] == "exact_match"


def test_answers_are_read_in_both_forms():
    (one,) = [read_example(TASK, row("Gansu"), "r:1")]
    listed = row("Gansu") | {"answers": [{"text": "Gansu", "answer_start": 19}]}
    assert read_example(TASK, listed, "r:1") == one and one.spans == ((19, 24),)
    without = {name: value for name, value in row("Gansu").items() if name != "answers"}
    assert read_example(TASK, without, "r:1", need_label=False).references == ()


@pytest.mark.parametrize(
    "start, actual",
    [(0, 3), (3, 3), (6, 3), (8, 11), (11, 11), (12, 11), (13, 14), (14, 14), (99, 14), (-1, 3)],
)
def test_an_answer_elsewhere_is_taken_from_the_nearest_place(start, actual):
    text = "I, ab, the abbab, of a"
    assert [at for at in range(len(text)) if text.startswith("ab", at)] == [3, 11, 14]
    question = row() | {"context": text, "answers": {"text": ["ab"], "answer_start": [start]}}
    example = read_example(TASK, question, "r:9")
    assert example.spans == ((actual, actual + 2),)
    assert example.is_moved == (start not in (3, 11, 14))
    scored = read_example(TASK, question, "r:9", need_place=False)
    assert scored.spans == (() if example.is_moved else example.spans) and not scored.is_moved


@pytest.mark.parametrize(
    "answers, message",
    [
        (
            {"text": ["Kansas"], "answer_start": [19]},
            "r:9: the answer 'Kansas' does not occur in 'context', which has "
            f"{len(CONTEXT)} characters; fix it, or remove the example",
        ),
        ({"text": ["Gansu"], "answer_start": []}, "r:9: column 'answers' must be {\"text\": [.."),
        ({"text": "Gansu", "answer_start": 19}, "r:9: column 'answers' must be"),
        ("Gansu", "r:9: column 'answers' must be"),
        ({"text": ["Gansu"], "answer_start": ["19"]}, "r:9: column 'answers' must be"),
        ({"text": [" "], "answer_start": [8]}, "r:9: column 'answers' has an empty answer"),
        (None, "r:9: column 'answers' must be"),
    ],
)
def test_answers_that_are_wrong(answers, message):
    with pytest.raises(InputError) as caught:
        read_example(TASK, row() | {"answers": answers}, "r:9")
    assert str(caught.value).startswith(message)


def test_a_missing_column_of_answers_is_named():
    without = {name: value for name, value in row().items() if name != "answers"}
    with pytest.raises(InputError, match="r:9: there is no column 'answers'; columns: "):
        read_example(TASK, without, "r:9")
    assert read_example(TASK, without, "r:9", need_label=False).references == ()
    assert read_example(TASK, row() | {"answers": None}, "r:9", need_label=False).spans == ()


def test_what_does_not_fit_is_refused(bert):
    with pytest.raises(InputError, match="task.answers='a' and task.labels are both set"):
        custom_task(fields=("q", "c"), answers="a", labels=("x", "y"))
    with pytest.raises(InputError, match="'c' is also in task.fields"):
        custom_task(fields=("q", "c"), answers="c")
    for text in ("{context} {question} {context}", "{question} {context|lower}"):
        with pytest.raises(InputError, match="must contain {context}, the text with the answer"):
            make_head("spans").check_template(parse(text))
    with pytest.raises(InputError, match="leaves no room in max_len 12"):
        encode(bert, [row("Gansu", question="why " * 20)], max_len=12)
