"""Records are answered a chunk at a time, up to the first that cannot be read."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxprompt.data.sources.records import Record, with_examples
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.errors import InputError
from jaxprompt.heads import Labelled
from jaxprompt.serving import stream
from jaxprompt.serving.answers import Answers
from jaxprompt.serving.stream import Predictor, Totals, answer_chunks, in_order

TASK = custom_task(fields=("text",), label="label", labels=("a", "b"))


@pytest.fixture
def predictor(monkeypatch):
    """Answers each text by itself, and cannot encode "long"."""

    def answer(records, first):
        texts = [record.example.fields["text"] for record in records if record.example]
        if "long" in texts:
            raise InputError("too long")
        gold = np.array([len(text) for text in texts])
        return {0: Answers([{"p": text} for text in texts], Labelled(gold, gold), cut=1)}

    def mark(scorers, records, generation):
        return [
            record._replace(example=None, error=f"{record.origin}: too long")
            if record.example and record.example.fields["text"] == "long"
            else record
            for record in records
        ]

    def measure(parts):
        return {"sum": sum(int(part.gold.sum()) for part in parts)}, sum(len(p.gold) for p in parts)

    monkeypatch.setattr(stream, "mark_errors", mark)
    layout = SimpleNamespace(max_len=8)
    scorer = SimpleNamespace(task=TASK, layout=layout, measure_labelled=measure)
    return Predictor([""], [scorer], lambda records: with_examples(TASK, records), answer)


def read(texts, seen):
    """Makes records of texts, of an exception at "stop", and of an error at "bad"."""
    for number, text in enumerate(texts, 1):
        seen.append(text)
        if text == "stop":
            raise InputError(f"in:{number}: stop")
        error = f"in:{number}: bad" if text == "bad" else ""
        yield Record(f"in:{number}", None if error else {"text": text}, error)


@pytest.mark.parametrize(
    "last, on_error, answers, error",
    [
        ("z", "raise", "abcdez", ""),
        ("bad", "raise", "abcde", "in:6: bad; use --on-error=skip to predict the other lines"),
        ("bad", "skip", "abcde", ""),
        ("long", "raise", "abcde", "in:6: too long; use --on-error=skip to predict"),
        ("long", "skip", "abcde", ""),
        ("stop", "skip", "abcde", "in:6: stop"),
    ],
)
def test_rows_before_one_that_cannot_be_read_are_answered(
    predictor, last, on_error, answers, error
):
    rows_read, sizes, answered = [], [], []
    totals = Totals(predictor)
    rows = predictor.read(read(["a", "b", "c", "d", "e", last], rows_read))
    try:
        for chunk, columns in answer_chunks(predictor, rows, 4, on_error):
            assert len(rows_read) == min(4 * len(sizes) + 4, 6)  # no row is read ahead
            totals.add(chunk, columns)
            sizes.append(len(chunk))
            answered += [row["p"] for row in in_order(chunk, columns)]
    except InputError as caught:
        assert error and str(caught).startswith(error)
    else:
        assert not error
    assert answered == list(answers) and sizes[0] == 4
    assert totals.metrics() == {"": ({"sum": len(answers)}, len(answers), len(answers))}
    skipped = [f"1 of 6 lines have no answer, the first is in:6: {'too ' * (last == 'long')}"]
    messages = list(totals.messages())
    assert messages[0] == f"texts cut to 8 tokens: 2 of {len(answers)}"
    assert len(messages) == 1 or messages[1].startswith(skipped[0])
    assert (len(messages) == 2) == (on_error == "skip" and last != "stop")
