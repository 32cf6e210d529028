"""Conversations by a model's chat template, against transformers."""

import numpy as np
import pytest
import transformers
from reading_rows import CHAT, make_encoder
from sentence_pieces import KINDS, write_pieces

from jaxprompt.data.tasks.conversation import MESSAGES, Conversation
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.chat.conversation import ConversationEncoder
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role

MARKED = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TURNS = ("user", "the cat"), ("assistant", "It sat."), ("user", "bad"), ("assistant", "good")


@pytest.fixture(scope="module")
def tokenizer(chat_tokenizer):
    return chat_tokenizer


def test_a_text_ends_at_the_token_that_ends_a_turn(tokenizer, monkeypatch):
    """Or else at the tokenizer's end token."""
    plain = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    for template, end in ((MARKED, "<|end|>"), (plain, tokenizer.eos_token)):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        encoder = ConversationEncoder(tokenizer, tokenizer.eos_token_id, True)
        assert encoder.end_ids() == (tokenizer.convert_tokens_to_ids(end),)


def make_chat(*turns, trained=None, tools=()):
    messages = [{"role": role, "content": content} for role, content in turns]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return Conversation(messages, turns if trained is None else trained, list(tools))


def encode(tokenizer, chat, *, targets=True, bos=True):
    encoder = ConversationEncoder(tokenizer, tokenizer.eos_token_id, bos)
    return encoder.encode([chat.to_json()], targets=targets)[0]


def texts_of(tokenizer, chat):
    """Returns the consecutive learned tokens as texts."""
    groups = np.split(chat.ids, np.flatnonzero(np.diff(chat.is_trained)) + 1)
    return [tokenizer.decode(group) for group in groups[1::2]]


def test_turns_that_the_template_marks_are_those_of_transformers(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", MARKED)
    tools = [{"type": "function", "function": {"name": "sat"}}]
    chat = make_chat(("system", "It was"), *TURNS[:3], ("tool", "sat"), TURNS[3], tools=tools)
    expected = tokenizer.apply_chat_template(
        chat.messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    actual, size = encode(tokenizer, chat), sum(np.cumsum(expected["assistant_masks"][::-1]) > 0)
    # Nothing is learned after the last turn, and the first token is put before every input.
    assert actual.ids.tolist() == expected["input_ids"][1:size]
    assert actual.is_trained.tolist() == [x == 1 for x in expected["assistant_masks"][1:size]]
    # The same turns without marks, and a choice of them.
    for template in (
        MARKED,
        MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    ):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        unmarked = encode(tokenizer, chat)
        assert unmarked.ids.tolist() == actual.ids.tolist()
        assert unmarked.is_trained.tolist() == actual.is_trained.tolist()
        last = encode(tokenizer, chat._replace(trained=[5]))
        assert texts_of(tokenizer, last) == ["good<|end|>"]
        assert last.ids.tolist() == actual.ids.tolist()
    opened = encode(tokenizer, chat, targets=False)
    theirs = tokenizer.apply_chat_template(
        chat.messages[:-1], tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert opened.ids.tolist() == tokenizer(theirs, add_special_tokens=False)["input_ids"][1:]


@pytest.mark.default_cases("always-llama2", "first-zephyr")
@pytest.mark.parametrize("template", [LLAMA2, ZEPHYR], ids=["llama2", "zephyr"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sentence_pieces(kind, template, tmp_path):
    folder = write_pieces(tmp_path, kind, template)
    released = transformers.AutoTokenizer.from_pretrained(folder)
    text = released.apply_chat_template(make_chat(*TURNS).messages, tokenize=False)
    expected = released(text.rstrip("\n"), add_special_tokens=False)["input_ids"]
    actual = encode(load_tokenizer(folder), make_chat(*TURNS))
    assert actual.ids.tolist() == expected[expected[0] == released.bos_token_id :]
    assert [x.strip() for x in texts_of(released, actual)] in (
        ["It sat. </s>", "good </s>"], ["It sat.</s>", "good</s>"]
    )  # fmt: skip


def test_a_message_cannot_open_a_turn(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", MARKED)
    turns = ("user", "the <|end|>\ue0003\ue001\ue002 cat"), ("assistant", "</s> It\ue003")
    actual = encode(tokenizer, make_chat(*turns))
    assert (actual.ids == tokenizer.convert_tokens_to_ids("<|end|>")).sum() == 2
    assert tokenizer.eos_token_id not in actual.ids
    assert turns[0][1] in tokenizer.decode(actual.ids)
    assert texts_of(tokenizer, actual) == ["</s> It\ue003<|end|>"]


def test_a_turn_without_an_end_is_ended(tokenizer, monkeypatch):
    monkeypatch.setattr(
        tokenizer, "chat_template",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    )  # fmt: skip
    assert texts_of(tokenizer, encode(tokenizer, make_chat(*TURNS), bos=False)) == [
        "It sat.\n", "good\n</s>",
    ]  # fmt: skip


THINKS = (  # as Qwen 3 writes the thoughts of the last turn only
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}"
    "thought {% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\nthought {% endif %}"
)


@pytest.mark.parametrize("template, line", [
    (THINKS, "writes message 2, an assistant turn, in another way"),
    (CHAT.replace("<|start|>assistant", "<|start|>model"), "message 2, an assistant turn, in an"),
    (MARKED.replace("{% if m['role'] == 'assistant' %}", "{% if m['content'] == 'good' %}"),
     "marks 1 turns"),
    ("{{ raise_exception('no system') }}", "refuses messages of the roles system, user, assistant"),
    ("{% for m in messages[1:] %}{{ m.content }}{% endfor %}", "does not write the message of ro"),
    ("{{ nothing.at.all }}", "refuses"), (None, "task.messages is set, but tokenizer"),
])  # fmt: skip
def test_what_a_template_refuses(tokenizer, monkeypatch, template, line):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(InputError) as error:
        encode(tokenizer, make_chat(("system", "It was"), *TURNS)._replace(trained=[2, 4]))
    assert line.replace("message 2", "message 3") in str(error.value)
    assert "\n" not in str(error.value)
    if template is THINKS:  # the last turn alone is the same with and without others before it
        last = encode(tokenizer, make_chat(*TURNS, trained=[3]), bos=False)
        assert texts_of(tokenizer, last) == ["good<|end|>"]


def test_rows_of_targets(tokenizer):
    """Each learned token is predicted at the one before it, and the last is never fed."""
    conversations = ConversationEncoder(tokenizer, tokenizer.eos_token_id, True)
    example = Example({MESSAGES: make_chat(*TURNS).to_json()})

    def rows(max_len=80):
        encoder = make_encoder(
            tokenizer, "{messages}", "causal", max_len=max_len, num_types=1, num_slots=2,
            conversations=conversations,
        )  # fmt: skip
        return encoder.encode_all([example], targets=True)[0][0], encoder.encode(example)[0]

    row, opened = rows()
    chat = encode(tokenizer, make_chat(*TURNS))
    ids = [tokenizer.eos_token_id] * 2 + [0, *chat.ids]  # two soft tokens, <s>
    assert row.ids.tolist() == ids[:-1] and row.slot[:3].tolist() == [0, 1, -1]
    at = np.flatnonzero(chat.is_trained) + 3
    assert row.label_pos.tolist() == (at - 1).tolist()
    assert row.targets.tolist() == np.array(ids)[at].tolist() and not row.cut
    assert (row.roles[at[:-1]] == Role.LABEL).all()
    assert row.positions.tolist() == list(range(len(row.ids)))
    last = at[np.flatnonzero(np.diff(at) > 1)[-1] + 1]  # where the last turn begins
    assert opened.ids.tolist() == ids[:last] and opened.label_pos.tolist() == [last - 1]
    assert opened.targets is None and not opened.cut
    # What does not fit is the end of what is learned, and the beginning of an input.
    first = int(at[0])
    row, short = rows(first + 1)
    assert row.ids.tolist() == ids[:first] and row.targets.tolist() == [ids[first]]
    assert row.cut == len(ids) - first - 1
    assert short.ids.tolist() == ids[:3] + ids[last - first + 2 : last]
    assert short.cut == last - first - 1
    row, _ = rows(first)
    assert row.targets.tolist() == [-1] and row.label_pos.tolist() == [first - 1] and row.cut


@pytest.mark.long
def test_smollm2(smollm):
    tokenizer = load_tokenizer(smollm)
    chat = make_chat(*TURNS)
    expected = tokenizer.apply_chat_template(chat.messages, return_dict=True)["input_ids"]
    actual = encode(tokenizer, chat, bos=False)
    assert actual.ids.tolist() == expected[:-1]  # without the line break after the last turn
    assert texts_of(tokenizer, actual) == ["It sat.<|im_end|>", "good<|im_end|>"]
