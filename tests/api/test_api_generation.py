"""Texts from Python: samples, stop strings, log-probabilities, streams and conversations."""

import re

import pytest
from tiny_run import make_backbone

import jaxprompt as jp

pytestmark = pytest.mark.long

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TEXTS = ["the new cat", "rice", "a red saw is old", "big", "the dog"]
SAMPLED = {"temperature": 1.5, "top_k": 40, "max_new_tokens": 20}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    backbone = jp.load_backbone(
        str(make_backbone(tmp_path_factory.mktemp("writer") / "llama", "llama"))
    )
    return backbone


@pytest.fixture(scope="module")
def model(backbone):
    return attach(backbone)


def attach(backbone, batch=4):
    task = jp.task("text", target="answer", template="{text}", metric="exact_match")
    return jp.attach(
        backbone, None, task=task, head=jp.text(), batch=batch, max_len=40, max_target=8
    )


@pytest.fixture(scope="module")
def samples(model):
    return jp.generate(model, TEXTS, n=3, **SAMPLED)


def test_samples_depend_on_the_seed_and_the_row(model, samples):
    assert [len(texts) for texts in samples] == [3] * 5
    assert len({text for texts in samples for text in texts}) > 10
    assert jp.generate(model, TEXTS, n=3, **SAMPLED) == samples
    assert jp.generate(model, TEXTS[:2], **SAMPLED) == [texts[0] for texts in samples[:2]]
    assert jp.generate(model, TEXTS, n=3, seed=1, **SAMPLED) != samples


def test_a_stop_string_cuts_texts_and_their_tokens(model, samples):
    text = samples[0][0]
    stop = text.split()[len(text.split()) // 2]
    cut = jp.generate(model, TEXTS, n=3, stop=[stop], **SAMPLED)
    expected = [[text.partition(stop)[0].strip() for text in texts] for texts in samples]
    assert cut == expected and cut != samples
    rows = jp.predict(model, TEXTS, n=3, stop=[stop], logprobs=True, **SAMPLED)
    assert [row["generated"] for row in rows] == expected
    assert "".join(rows[0]["tokens"][0]).strip().endswith(stop)
    for row in rows:
        for tokens, logprobs in zip(row["tokens"], row["logprobs"], strict=True):
            assert len(tokens) == len(logprobs) and all(x < 0 for x in logprobs)


@pytest.mark.parametrize("options", [{}, {"stop": ["e"]}])
def test_a_stream_is_the_text_in_pieces(model, samples, options):
    pieces = list(jp.stream(model, TEXTS[0], **SAMPLED, **options))
    assert "".join(pieces) == samples[0][0].partition(options.get("stop", ["\0"])[0])[0].strip()
    assert len(pieces) > 1 or options


def test_metrics_of_samples(model, samples):
    rows = [{"text": text, "answer": texts[1]} for text, texts in zip(TEXTS, samples, strict=True)]
    scores = jp.evaluate(model, rows, n=3, **SAMPLED)
    assert scores["pass@3"] == 1 and scores["examples"] == 5
    assert 1 / 3 <= scores["exact_match"] < 1 and scores["maj@3"] <= 1


def test_a_conversation_is_a_text_in_the_chat_template(model):
    tokenizer = model.scorer.tokenizer
    tokenizer.chat_template = CHAT
    messages = [{"role": "user", "content": text} for text in TEXTS]
    try:
        texts = jp.generate(model, [messages[:1], messages[1:2]], **SAMPLED)
        assert jp.generate(model, messages[:1], **SAMPLED) == texts[:1]
        assert "".join(jp.stream(model, messages[:1], **SAMPLED)) == texts[0]
        several = jp.generate(model, messages[:3], **SAMPLED)
        whole = "".join(TEXTS[:3])
        assert several == jp.generate(model, [whole], **SAMPLED)
        assert texts == jp.generate(model, TEXTS[:2], **SAMPLED)
        answered = [*messages[:1], {"role": "assistant", "content": "yes"}]
        with pytest.raises(jp.InputError, match="'yes', is the assistant's"):
            jp.generate(model, answered)
        with pytest.raises(jp.InputError, match="conversation 2: .* must be a list of messages"):
            jp.generate(model, [messages, [{"role": "user"}]])
    finally:
        tokenizer.chat_template = None
    with pytest.raises(jp.InputError, match="has no chat template for messages"):
        jp.generate(model, messages[:1])


WRONG = {
    "beams": (jp.generate, dict(num_beams=2, temperature=1.0), "excludes generate.temperature=1.0"),
    "temperature": (jp.generate, dict(temperature=-1), r"temperature=-1 must be at least 0"),
    "stop": (jp.generate, dict(stop=[""]), "has an empty string"),
    "a typo": (jp.predict, dict(temprature=1.0), "nearest: temperature"),
    "room": (jp.stream, dict(max_new_tokens=500), "max_new_tokens=500 exceed"),
    "several": (jp.stream, dict(temperature=1.0, n=2), "set n=1, not 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(model, case):
    function, options, message = WRONG[case]
    row = TEXTS[0] if function is jp.stream else TEXTS
    with pytest.raises(jp.InputError, match=message) as error:
        function(model, row, **options)
    assert not re.search("\n", str(error.value))


def test_samples_do_not_depend_on_the_batch(backbone, samples):
    for batch in (1, 8):
        assert jp.generate(attach(backbone, batch), TEXTS, n=3, **SAMPLED) == samples


def test_samples_do_not_depend_on_the_mesh(backbone, samples):
    """There no row is replaced, and a stop string cuts whole texts; a stream runs step by step."""
    model = attach(jp.load_backbone(backbone.backbone.config.path, mesh=(2, 2)))
    stop = [samples[0][0].split()[-1]]
    cut = [[text.partition(stop[0])[0].strip() for text in texts] for texts in samples]
    assert jp.generate(model, TEXTS, n=3, stop=stop, **SAMPLED) == cut
    assert "".join(jp.stream(model, TEXTS[0], **SAMPLED)) == samples[0][0]
