"""Conversations and packed examples, through the command line."""

import json
import shutil

import pytest
from tiny_run import (
    flags,
    make_backbone,
    make_config,
    predict,
    succeed,
    tiny_fields,
    train_and_export,
    write_rows,
)

CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}"
    "{{ m.role[0] }} : {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}a : {% endif %}"
)
FIELDS = {
    "head.name": "text", "task.messages": "messages", "data.max_target": 8, "data.max_len": 60,
    "data.multiple": 60, "generate.max_new_tokens": 5, "data.source": "", "task.fields": "",
    "task.name": "custom",
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = make_backbone(tmp_path_factory.mktemp("llama") / "llama", "llama")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT}))
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


def conversations(count):
    """Makes questions about a word, every third with a second one."""
    rows = []
    for i in range(count):
        word, topic = (("cat", "beast"), ("soup", "food"), ("axe", "tool"))[i % 3]
        messages = [
            {"role": "user", "content": f"a {word}"},
            {"role": "assistant", "content": topic},
        ]
        if i % 2:
            messages += [
                {"role": "user", "content": "is it"},
                {"role": "assistant", "content": topic},
            ]
        rows.append({"messages": messages})
    return rows


def test_what_validate_says_of_conversations(llama, data, tmp_path, capsys, refused):
    path = write_rows(tmp_path / "train.jsonl", conversations(24))
    fields = tiny_fields(llama, data) | FIELDS | {
        "data.files.train": path, "data.protocol": "holdout", "data.protocol.size": 6,
        "data.packed": True, "task.metric": "perplexity",
    }  # fmt: skip
    out, _ = succeed(capsys, "validate", "--config=base:soft", *flags(fields))
    for line in (
        "train 18, dev 6", "texts cut to 60 tokens: train 0 of 18", "tokens of an example: train",
        "18 training examples are packed into ", "learned of it: ",
    ):  # fmt: skip
        assert line in out
    command = ("validate", "--config=base:soft")
    assert "data.packed=True puts several" in refused(
        *command, *flags(fields | {"cache.location": "host", "prompt.name": "soft"})
    )
    rows = conversations(24)
    rows[3]["messages"].insert(0, {"role": "system", "content": "be good"})
    write_rows(tmp_path / "train.jsonl", rows)
    message = refused(*command, *flags(fields))
    assert "refuses messages of the roles system, user" in message and "no system" in message
    rows[3]["messages"] = rows[3]["messages"][:2]
    write_rows(tmp_path / "train.jsonl", rows)
    assert "train.jsonl:4: column 'messages' has no assistant turn" in refused(
        *command, *flags(fields)
    )


@pytest.mark.long
@pytest.mark.parametrize("metric", ["exact_match", "loss"])
def test_learns_to_answer(metric, llama, data, tmp_path, capsys, refused):
    folder = tmp_path / "chats"
    folder.mkdir()
    for name, size in {"train": 48, "dev": 12, "test": 12}.items():
        write_rows(folder / f"{name}.jsonl", conversations(size))
    fields = FIELDS | {
        "optim.lr": 1e-2, "train.total_steps": 60, "train.eval_steps": 60, "data.packed": True,
        "task.metric": metric, "data.source": str(folder),
    }  # fmt: skip
    config = make_config(llama, folder, "full", **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, config)
    if metric == "loss":
        assert result["dev"]["loss"] < 0.2 and list(result["dev"]) == ["loss", "perplexity"]
    else:
        assert result["dev"]["exact_match"] >= 0.75, result
    rows, err = predict(capsys, workdir, f"--input={folder / 'test.jsonl'}")
    answers = [row["generated"] == row["messages"][-1]["content"] for row in rows]
    assert sum(answers) >= 9 and "exact_match" in err
    rows, _ = predict(capsys, workdir, "--text=a soup")
    assert rows[0]["generated"] == "food"
    edited = shutil.copytree(llama, tmp_path / "edited")
    (edited / "chat_template.jinja").write_text(CHAT.replace("a : ", "answer : "))
    message = refused("predict", f"--workdir={workdir}", f"--backbone={edited}", "--text=a soup")
    assert message.startswith("the prompt was trained with another chat template")
