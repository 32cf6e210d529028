"""Label words and free texts on T5 and GPT-2: every shortcut against the plain computation.

The plain one is torch's: each word's whole target through the whole model, logits over the whole
vocabulary, one word after the other.
"""

import dataclasses
import functools
import json
import shutil
from typing import NamedTuple

import jax
import numpy as np
import pytest
from scipy import special
from tiny import assert_close, jit

from jaxprompt.build.backbone import load_weights, open_backbone
from jaxprompt.build.scorer import build_scorer, choose_template
from jaxprompt.build.task import build_objectives
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.load import load_config
from jaxprompt.config.run import BackboneConfig, GenerateConfig
from jaxprompt.convert.prompt_metadata import ExampleLayout
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.tokenizer import encode_exact, encode_texts, load_tokenizer
from jaxprompt.heads import make_head
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.training.evaluation import make_answer_fn
from jaxprompt.tree import flatten

log_softmax = functools.partial(special.log_softmax, axis=-1)
CLASSES = ("good", "bad")
WORDS = (("good", "unwatchable"), ("bad",))  # of one piece and of several
TEXTS = ("A fine film", "Dull", "Nothing much happens, and it takes two hours")
STYLES = ("seq2seq", "causal")
SETTINGS = dict(
    max_len=40,
    max_target=8,
    multiple=8,
    padding_side="right",
    choices=1,
    form="cloze",
    answer="",
    eos=True,
)


class Pair(NamedTuple):
    """A backbone on disk, opened, and the same in torch."""

    backbone: object
    params: dict
    torch: object


@pytest.fixture(scope="module")
def pairs(shared, tmp_path_factory):
    """Tiny models of random weights with real tokenizers."""
    torch = pytest.importorskip("torch")
    from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    t5 = T5Config(
        vocab_size=32128, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=3,
        num_heads=4, feed_forward_proj="gated-gelu", decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    gpt2 = GPT2Config(
        vocab_size=50265, n_embd=24, n_layer=2, n_head=4, n_positions=48, bos_token_id=0,
        eos_token_id=2, pad_token_id=1, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    cases = {
        "seq2seq": ("t5", T5ForConditionalGeneration(t5), t5),
        "causal": ("roberta", GPT2LMHeadModel(gpt2), gpt2),
    }
    results = {}
    for style, (tokenizer, model, config) in cases.items():
        folder = tmp_path_factory.mktemp(style)
        for file in (shared / "tokenizers" / tokenizer).iterdir():
            if file.name != "config.json":
                shutil.copy(file, folder)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.copy_(torch.randn_like(weight) * 0.3)
        model.eval().save_pretrained(folder)
        hf = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(hf | {"model_type": config.model_type}))
        backbone, loaded = load_weights(
            open_backbone(BackboneConfig(path=str(folder))), make_placement(1, 1)
        )
        results[style] = Pair(backbone, loaded.params, model)
    return results


def make_scorer(pair, *, task=None, head=None, **changes):
    task = task or custom_task(fields=("text",), labels=CLASSES, words=WORDS)
    head = make_head(**({"name": "verbalizer"} | (head or {})))
    settings = SETTINGS | changes
    template = settings.pop("template", "")
    style = pair.backbone.module.STYLE
    if head.READS_WORDS and settings["form"] == "cloze" and not template:
        template = "{text} It was [mask]" if style == "causal" else "{text} It was [mask]."
    template = choose_template(task, head, style, settings["form"], template)
    return build_scorer(
        pair.backbone, task, ExampleLayout(**settings), prompt=OpenBlock("none"),
        head=OpenBlock.from_dict(head.block()), template=template, batch=4,
    )  # fmt: skip


def run(pair, scorer, head="main", examples=None, **encoding):
    examples = examples or [Example({"text": text}, (), i % 2) for i, text in enumerate(TEXTS)]
    rows = scorer.encode(examples, **encoding).rows
    batch = scorer.one_batch(rows)
    order = np.argsort(batch.index)  # longest first
    params = scorer.model.init(jax.random.key(0), pair.params)
    scores = jit(lambda p, b: scorer.model.forward(p, b, head=head))(params, batch)
    return np.asarray(scores)[order], rows


def word_ids(tokenizer):
    return [[encode_texts(tokenizer, [f" {word}"])[0] for word in group] for group in WORDS]


def plain_scores(pair, tokenizer, inputs, stem, end=(), rows=None, average=np.mean):
    """Scores every class for every input, word by word. -> [B, C]"""
    table = []
    for ids in inputs:
        scores = []
        for group in word_ids(tokenizer):
            log_probs = []
            for word in group:
                said = [*word, *end]
                logp = torch_logits(pair, ids, stem, said)
                logp = log_softmax(logp if rows is None else logp[:, rows])
                columns = said if rows is None else [list(rows).index(x) for x in said]
                log_probs.append(average(logp[np.arange(len(said)), columns]))
            scores.append(np.mean(log_probs))
        table.append(scores)
    return np.array(table, np.float32)


def torch_logits(pair, ids, stem, said):
    """Gives the logits that predict each token of `said`, after the input `ids`. -> [*, V]"""
    torch = pytest.importorskip("torch")

    with torch.no_grad():
        if pair.backbone.module.STYLE == "causal":
            logits = pair.torch(input_ids=torch.tensor([[*ids, *said]])).logits[0]
            return logits[len(ids) - 1 : -1].double().numpy()
        fed = torch.tensor([[0, *stem, *said[:-1]]])
        logits = pair.torch(input_ids=torch.tensor([ids]), decoder_input_ids=fed).logits[0]
        return logits[len(stem) :].double().numpy()


def inputs_of(pair, tokenizer, template="{} It was"):
    """Encodes the texts as torch sees them; T5's sentinel and end of sequence included."""
    results = []
    for text in TEXTS:
        if pair.backbone.module.STYLE == "causal":
            results.append(encode_texts(tokenizer, [template.format(text)])[0])
        else:
            front = encode_texts(tokenizer, [" " + template.format(text)])[0]
            results.append([*front, 32099, *encode_texts(tokenizer, ["."])[0], 1])
    return results


@pytest.mark.default_cases("causal-full-sum", "causal-restricted-mean")
@pytest.mark.parametrize(
    "scores, pieces", [("full", "mean"), ("full", "sum"), ("restricted", "mean")]
)
@pytest.mark.parametrize("style", STYLES)
def test_branches_score_like_one_word_after_the_other(style, scores, pieces, pairs):
    pair = pairs[style]
    scorer = make_scorer(pair, head={"scores": scores, "pieces": pieces})
    actual, rows = run(pair, scorer)
    tokenizer = scorer.tokenizer
    inputs = inputs_of(pair, tokenizer)
    stem = [32099] if style == "seq2seq" else []
    words = sum(word_ids(tokenizer), [])
    assert max(map(len, words)) >= 3
    subwords = np.unique(sum(words, []))
    expected = plain_scores(
        pair, tokenizer, inputs, stem, rows=None if scores == "full" else subwords,
        average=np.mean if pieces == "mean" else np.sum,
    )  # fmt: skip
    if scores == "full":
        first = np.stack([log_softmax(torch_logits(pair, ids, stem, [0]))[0] for ids in inputs])
        outside = np.delete(first, subwords, axis=1).max(1).astype(np.float32)
        expected = np.concatenate([expected, outside[:, None]], axis=1)
    assert_close(actual, expected, rtol=2e-5)
    # The decoder runs over its own few positions, and each input stands once in the batch.
    fed = sum(len(word) - 1 for word in words)
    (row,) = rows[0]
    if style == "seq2seq":
        assert len(row.decoder.ids) == 2 + fed
    else:
        assert len(row.ids) == len(inputs[0]) + fed


ANSWERS = {
    "[mask] {label}": ((32099,), ()),
    "[mask] {label} [mask]": ((32099,), (32098,)),
    "{label} [sep]": ((), (1,)),
}


@pytest.mark.long
@pytest.mark.parametrize("answer", ANSWERS)
def test_loss_over_the_whole_target_is_torchs(answer, pairs):
    """PPT's tuning and pre-training loss, and prompt tuning's: the mean over a target's tokens."""
    torch = pytest.importorskip("torch")

    pair, (stem, end) = pairs["seq2seq"], ANSWERS[answer]
    task = custom_task(fields=("text",), labels=CLASSES, words=("good", "unwatchable"))
    form = "cloze" if stem else "text"
    scorer = make_scorer(pair, task=task, head={"span": "target"}, answer=answer, form=form)
    actual, _ = run(pair, scorer, head="target")
    inputs = inputs_of(pair, scorer.tokenizer)
    if not stem:
        inputs = [encode_texts(scorer.tokenizer, [" " + text])[0] + [1] for text in TEXTS]
    for i, ids in enumerate(inputs):
        for c, word in enumerate(("good", "unwatchable")):
            target = [*stem, *encode_texts(scorer.tokenizer, [f" {word}"])[0], *end]
            with torch.no_grad():
                out = pair.torch(input_ids=torch.tensor([ids]), labels=torch.tensor([target]))
            assert actual[i, c] == pytest.approx(-float(out.loss), rel=2e-5), (i, word)
    c = load_config("base", [("head.name", "verbalizer"), ("head.span", "target")])
    (objective,) = build_objectives(c, scorer.model)
    total, n = objective.loss(actual, np.array([0, 1, 1]), np.ones(3))
    assert objective.head == "target" and n == 3
    assert float(total) == pytest.approx(-(actual[0, 0] + actual[1, 1] + actual[2, 1]))
    decided, _ = run(pair, scorer)  # the answer itself is picked by the label's tokens
    assert decided.shape == (3, 2)


def text_task():
    return custom_task(fields=("text",), target="answer")


@pytest.mark.long_cases("seq2seq")
@pytest.mark.parametrize("style", STYLES)
def test_loss_of_a_free_text_is_torchs(style, pairs):
    pair = pairs[style]
    scorer = make_scorer(pair, task=text_task(), head={"name": "text"})
    targets = ("very good", "no", "not worth it")
    examples = [Example({"text": t}, target=w) for t, w in zip(TEXTS, targets, strict=True)]
    logp, _ = run(pair, scorer, examples=examples, targets=True)
    config = load_config("base", [("head.name", "text")])
    total, n = build_objectives(config, scorer.model)[0].loss(logp, None, np.ones(3, np.float32))
    expected = []
    for text, target in zip(TEXTS, targets, strict=True):
        said = [*encode_texts(scorer.tokenizer, [f" {target}"])[0], scorer.tokenizer.eos_token_id]
        space = " " if style == "seq2seq" else ""
        ids = encode_texts(scorer.tokenizer, [space + text])[0] + [1] * (style == "seq2seq")
        logits = torch_logits(pair, ids, [], said)
        expected += list(-log_softmax(logits)[np.arange(len(said)), said])
    assert n == len(expected)
    assert float(total) == pytest.approx(sum(expected), rel=2e-5)


CHAT = (
    "{% for m in messages %}{{ m['role'] + '|' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant|' }}{% endif %}"
)


def test_loss_of_the_turns_of_a_conversation_is_torchs(pairs):
    """With two turns of the assistant in a row of the batch, and one in the other."""
    pair = pairs["causal"]
    tokenizer = load_tokenizer(pair.backbone.folder)
    tokenizer.chat_template = CHAT
    pair = pair._replace(backbone=pair.backbone._replace(tokenizer=tokenizer))
    task = custom_task(fields=(), messages=["messages"], metric="perplexity")
    scorer = make_scorer(pair, task=task, head={"name": "text"}, max_len=48)
    turns = [("user", "a fine"), ("assistant", "not so bad"), ("user", "no"), ("assistant", "yes")]
    messages = [{"role": role, "content": content} for role, content in turns]
    examples = [read_example(task, {"messages": part}, "f:1") for part in (messages, messages[:2])]
    logp, _ = run(pair, scorer, examples=examples, targets=True)
    adds_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    expected = []
    for part in (messages, messages[:2]):
        ids, answers = [tokenizer.bos_token_id] * adds_bos, []
        for message in part:
            said = [*encode_exact(tokenizer, message["content"]), tokenizer.eos_token_id]
            ids += encode_exact(tokenizer, f"{message['role']}|")
            if message["role"] == "assistant":
                answers += range(len(ids), len(ids) + len(said))
            ids += said + encode_exact(tokenizer, "\n")
        logits = torch_logits(pair, ids[:1], [], ids[1:])
        expected += [-log_softmax(logits[at - 1])[ids[at]] for at in answers]
    measured = scorer.measure(scorer.encode(examples, targets=True), logp)
    assert measured["loss"] == pytest.approx(np.mean(expected), rel=2e-5)
    assert measured["perplexity"] == pytest.approx(np.exp(np.mean(expected)), rel=2e-5)


@pytest.mark.default_cases("seq2seq-1")
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("style", STYLES)
def test_written_texts_are_those_of_torch(style, num_beams, pairs):
    torch = pytest.importorskip("torch")

    pair = pairs[style]
    scorer = make_scorer(pair, task=text_task(), head={"name": "text"})
    tokenizer = scorer.tokenizer
    split = scorer.encode([Example({"text": text}) for text in TEXTS])
    batch = scorer.one_batch(split.rows)
    how, layout = GenerateConfig(max_new_tokens=6, num_beams=num_beams), scorer.layout
    layout = dataclasses.replace(layout, ends=(tokenizer.eos_token_id,))
    write = make_answer_fn(scorer.head, make_placement(1, 1), scorer.model, how, tokenizer, layout)
    params = scorer.model.init(jax.random.key(0), pair.params)
    actual = write({}, flatten(params), [batch], len(TEXTS))
    for text, ((ours, *_),) in zip(TEXTS, actual, strict=True):
        space = " " if style == "seq2seq" else ""
        ids = encode_texts(tokenizer, [space + text])[0] + [1] * (style == "seq2seq")
        with torch.no_grad():
            out = pair.torch.generate(
                torch.tensor([ids]), max_new_tokens=6, num_beams=num_beams, do_sample=False,
                use_cache=False,  # transformers sizes its own by the encoder's depth
            )[0]  # fmt: skip
        new = out[1:] if style == "seq2seq" else out[len(ids) :]
        assert ours == tokenizer.decode(new, skip_special_tokens=True).strip()


@pytest.mark.long_cases("config.json")
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_text_ends_where_the_model_says_too(pairs, tmp_path, file):
    """Chat models have an end of a turn beside the tokenizer's end of text."""
    pair, how = pairs["causal"], GenerateConfig(max_new_tokens=8)

    def write(backbone):
        scorer = make_scorer(
            pair._replace(backbone=backbone), task=text_task(), head={"name": "text"}
        )
        arguments = make_placement(1, 1), scorer.model, how, scorer.tokenizer, scorer.layout
        answer = make_answer_fn(True, *arguments)
        batch = scorer.one_batch(scorer.encode([Example({"text": TEXTS[0]})]).rows)
        ((written,),) = answer({}, flatten({"backbone": pair.params}), [batch], 1)
        return scorer, written.text

    scorer, free = write(pair.backbone)
    last = scorer.tokenizer.eos_token_id
    assert scorer.layout.ends == (last, 2)
    later = encode_texts(scorer.tokenizer, [f" {word}" for word in free.split()[1:]])
    end = next(ids[0] for ids in later if len(ids) == 1)
    folder = shutil.copytree(pair.backbone.folder, tmp_path / "own")
    hf = pair.backbone.hf
    if file == "config.json":
        (folder / "generation_config.json").unlink()
        (folder / file).write_text(json.dumps(hf | {"eos_token_id": [2, end, 10**6]}))
    else:
        (folder / file).write_text(json.dumps({"eos_token_id": [2, end]}))
    backbone = open_backbone(BackboneConfig(path=str(folder)))
    scorer, actual = write(backbone)
    assert scorer.layout.ends == (last, 2, end)
    # The id is a plain word of the tokenizer, and no part of the text that it ends.
    assert actual and actual != free and free.startswith(actual)
