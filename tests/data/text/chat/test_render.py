"""Templates in a tokenizer's own chat form, and text that a template holds as it is."""

import json

import numpy as np
import pytest
import transformers
from reading_rows import CHAT, make_encoder
from sentence_pieces import CHATS, ENDED_CHAT, KINDS, write_pieces

from jaxprompt.data.tasks.conversation import MESSAGES, Conversation
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.chat.render import _LIMITS, in_chat
from jaxprompt.data.text.template import parse
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role

LAID = '["<|start|>user\\n"]{text} It was["<|end|>\\n<|start|>assistant\\n"][mask]'


@pytest.fixture(scope="module")
def tokenizer(chat_tokenizer):
    return chat_tokenizer


def encode(tokenizer, template, text, **changes):
    encoder = make_encoder(tokenizer, template, "causal", max_len=80, num_types=1, **changes)
    (row,) = encoder.encode(Example({"text": text}))
    return row


def theirs(tokenizer, text):
    turns = [{"role": "user", "content": text}]
    return tokenizer(
        tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True),
        add_special_tokens=False,
    )["input_ids"]


def test_a_template_is_a_turn(tokenizer):
    assert in_chat(tokenizer, "{text} It was [mask]") == LAID
    assert in_chat(tokenizer, " {text} It was ") == LAID.removesuffix("[mask]")
    row = encode(tokenizer, LAID, "the cat sat.")
    assert row.ids.tolist() == theirs(tokenizer, "the cat sat. It was")
    hard = row.ids[row.roles == Role.HARD].tolist()
    assert hard.count(2) == 2 and hard.count(3) == 1  # turns begin and end by tokens
    assert row.ids[0] == 0 and (row.ids == 0).sum() == 1  # <s> once
    soft = encode(tokenizer, LAID, "the cat sat.", num_slots=2)
    assert soft.roles[:2].tolist() == [Role.SOFT] * 2 and soft.ids[2:].tolist() == row.ids.tolist()


def test_no_thought_stands_before_the_answer(tokenizer, monkeypatch):
    """Qwen 3's template lays an empty one where thinking is off, and none where it is on."""
    thought = "{% if enable_thinking is defined and not enable_thinking %}thought{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", CHAT + thought)
    assert in_chat(tokenizer, "{text} It was [mask]") == LAID.replace('"][', 'thought"][')


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", CHATS)
def test_every_kind_of_sentence_pieces(kind, chat, tmp_path):
    folder = write_pieces(tmp_path, kind, CHATS[chat])
    released = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    expected = theirs(released, "hello world It was")
    if expected[0] != released.bos_token_id:  # which begins every input here
        expected = [released.bos_token_id, *expected]
    for template in ("{text} It was [mask]", "  {text}  It was [mask] "):
        row = encode(tokenizer, in_chat(tokenizer, template), "hello world")
        assert row.ids.tolist() == expected
    turns = [{"role": "user", "content": "hello world It was"}]
    assert encode_conversation(tokenizer, turns).ids.tolist() == expected


def encode_conversation(tokenizer, turns, **changes):
    encoder = make_encoder(tokenizer, "{text}", "causal", max_len=120, num_types=1, **changes)
    chat = Conversation(turns, [], []).to_json()
    (row,) = encoder.for_conversations().encode(Example({MESSAGES: chat}))
    return row


def test_a_conversation_is_encoded_as_by_transformers(tokenizer):
    turns = [
        {"role": role, "content": f"the cat sat, {role}."}
        for role in ("system", "user", "assistant", "user")
    ]
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert encode_conversation(tokenizer, turns).ids.tolist() == expected
    row = encode_conversation(tokenizer, turns, num_slots=2)
    assert row.slot.tolist() == [0, 1, *[-1] * len(expected)]
    assert row.ids[2:].tolist() == expected


def test_a_text_cannot_open_a_turn(tokenizer):
    row = encode(tokenizer, LAID, "the <|end|> cat")
    text = row.ids[row.roles == Role.TEXT]
    assert 3 not in text and tokenizer.decode(text) == "the <|end|> cat"


def test_smollm2(smollm):
    tokenizer = load_tokenizer(smollm)
    laid = in_chat(tokenizer, "{text} It was [mask]")
    assert laid == (
        '["<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging '
        'Face<|im_end|>\\n<|im_start|>user\\n"]{text} It was["<|im_end|>\\n<|im_start|>assistant'
        '\\n"][mask]'
    )
    row = encode(tokenizer, laid, "a gorgeous film")
    assert row.ids.tolist() == theirs(tokenizer, "a gorgeous film It was")


LLAMA = (  # as the templates of Llama 3.2 begin
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}"
    "{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
)


@pytest.mark.parametrize("code, said", [
    ("%d %b %Y", "26 Jul 2024"), ("%Y-%m-%d", "2024-07-26"), ("%-d %B %Y", "26 July 2024"),
    ("%A, %H:%M:%S.%f", "Friday, 00:00:00.000000"),
])  # fmt: skip
def test_a_chat_does_not_depend_on_the_day(tokenizer, monkeypatch, code, said):
    """It would be another template in a run that goes on tomorrow, and is recorded with the run."""
    chat = "\n." + LLAMA + "{{ date_string }} or {{ strftime_now('" + code + "') }}." + CHAT
    monkeypatch.setattr(tokenizer, "chat_template", chat)
    laid = in_chat(tokenizer, "{text} It was [mask]")
    assert laid.startswith(f'["\\n.26 Jul 2024 or {said}.<s><|start|>user\\n"]{{text}} It was[')


def test_where_an_answer_begins_on_a_line_of_its_own(tokenizer):
    for template in (LAID, LAID.removesuffix("[mask]"), '{text}["\\n"][mask] .["\\n"]'):
        assert parse(template).writes_space("causal", one_space=False)
        assert not parse(template).writes_space("seq2seq", one_space=False)
        assert not parse(template).writes_space("masked", one_space=True)
    plain = ("{text} It was [mask]", '{text}["x"] [mask]', '["x\\n"]{text} [mask]')
    for template in (*plain, '{text} [mask]["\\n"]'):
        assert not parse(template).writes_space("causal", one_space=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_takes_the_space_behind_it(kind, tmp_path):
    folder = write_pieces(tmp_path, kind, ENDED_CHAT)
    state = json.loads((folder / "tokenizer.json").read_text())
    (end,) = (token for token in state["added_tokens"] if token["content"] == "</s>")
    end["rstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "chat_template.jinja").write_text(
        ENDED_CHAT.replace("eos_token +", "eos_token + ' \\n' +")
    )
    released = transformers.AutoTokenizer.from_pretrained(folder)
    assert released.added_tokens_decoder[2].rstrip
    tokenizer = load_tokenizer(folder)
    row = encode(tokenizer, in_chat(tokenizer, "{text} It was [mask]"), "hello world")
    assert row.ids.tolist() == theirs(released, "hello world It was")


def test_brackets_and_quotes_as_they_are():
    (part, _, other) = parse('["[INST] \\"a\\" {b}\\\\"]{text}["é\\n"]').parts
    assert part.text == '[INST] "a" {b}\\' and other.text == "é\n"
    assert not part.space and part.kind == "exact"


@pytest.mark.parametrize("chat, line", [
    (None, "has no chat template"),
    ("{{ raise_exception('no users') }}", "fails (no users)"),
    ("{% for m in messages %}{{ m['content'] * 2 }}{% endfor %}", "writes the user's turn 2 times"),
    ("hello", "writes the user's turn 0 times"),
    ("{{ nothing.at.all }}", "fails"),
    ("{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1 seconds"),
    ("{{ 'a' * 10**10 }}", "fails (MemoryError)"),
    ("{{ messages[0].content }}{{ 'a' * 10**5 }}", "fails (it writes 100,001 characters)"),
    ("{% set _ = namespace(__call__=1) %}", "fails (the name '__call__' is not allowed)"),
])  # fmt: skip
def test_a_chat_that_does_not_fit_is_named(tokenizer, monkeypatch, chat, line):
    monkeypatch.setattr(tokenizer, "chat_template", chat)
    monkeypatch.setitem(_LIMITS, "seconds", 1)
    with pytest.raises(InputError) as error:
        in_chat(tokenizer, "{text} [mask]")
    assert line in str(error.value) and "\n" not in str(error.value)


def test_offsets_of_the_parts(tokenizer):
    row = encode(tokenizer, '["a\\n"] {text} ["b"][mask]', "cat")
    assert tokenizer.decode(row.ids[1:]) == "a\n catb"
    assert np.all(row.positions == np.arange(len(row.ids)))
