"""DART, LM-BFF and DPT in torch alone, on the examples of our runs.

launch/accuracy calls it. Tokens, rows, losses and optimizer are written here, from the papers'
equations; of ours it takes the examples, the label words and the numbers of configs/.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, embedding
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

from jaxprompt.build.examples import read_examples
from jaxprompt.config.run import RunConfig
from jaxprompt.training.run_result import RunResult
from launch.accuracy.fit import Training, fit

HIDE = 0.1  # share of the text's tokens that the fluency objective hides, as prompt.hide
SLOTS = 3  # "It was." around the mask: It, was, [MASK] and the full stop


class Rows:
    """The examples of a split, as tokens."""

    def __init__(self, examples, encoded):
        """Takes ids, slots and the columns that are read of each example."""
        self.labels = torch.tensor([example.label for example in examples])
        self.encoded = encoded

    def __len__(self) -> int:
        return len(self.encoded)

    def batch(self, chosen):
        """Joins examples. -> ids, slots, mask [B, T], the columns that are read [B, M], labels"""
        ids, slots, read = zip(*(self.encoded[i] for i in chosen), strict=True)
        fill = lambda part, value: torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row) for row in part], True, value
        )
        lengths = torch.tensor([len(row) for row in ids])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return fill(ids, 0), fill(slots, -1), mask, torch.tensor(read), self.labels[chosen]


def train_words(c: RunConfig, seed: int, *, dart: bool) -> RunResult:
    """Trains by configs/dart/few_shot.py:sst2 or lm_bff.py:sst2 (Zhang et al. 2022). -> the result

    Without `dart` the words of template and labels stay words, and there is no fluency objective.
    """
    examples, tokenizer, model = _open(c, seed, AutoModelForMaskedLM)
    words, head = model.get_input_embeddings().weight, model.cls.predictions
    encoded = tokenizer(["It was.", *(word[0] for word in examples.task.words)])["input_ids"]
    start, *answers = (row[1:-1] for row in encoded)
    if len(start) != SLOTS or any(len(word) != 1 for word in answers):
        sys.exit("the words of the template are not one subword each")
    answers = [word[0] for word in answers]
    it, was, stop = start
    # Rows 0 to 2 are the template's, behind them is one per class (sections 4.2 and 4.3).
    rows = torch.nn.Parameter(words[start + answers].detach().clone(), requires_grad=dart)
    bias = torch.nn.Parameter(torch.zeros(len(answers)), requires_grad=dart)

    def encode(example):
        text = _text(tokenizer, example, c.data.max_len - 6)
        ids = [tokenizer.cls_token_id, *text, it, was, tokenizer.mask_token_id, stop]
        slots = [-1] * (len(text) + 1) + [0, 1, -1, 2, -1]
        return [*ids, tokenizer.sep_token_id], slots, [len(text) + 3]

    splits = {n: Rows(part, [encode(x) for x in part]) for n, part in examples.splits.items()}

    def features(ids, slot, mask):
        """Runs encoder and transform; a row stands where `slot` says so. -> [B, T, H]"""
        embedded_rows, embedded = embedding(slot.clamp(min=0), rows), embedding(ids, words)
        embedded = torch.where((slot >= 0)[..., None], embedded_rows, embedded)
        hidden = model.base_model(inputs_embeds=embedded, attention_mask=mask.long())
        return head.transform(hidden.last_hidden_state)

    def scores(ids, slot, mask, read):
        hidden = features(ids, slot, mask)[torch.arange(len(ids)), read[:, 0]]
        if dart:
            return hidden @ rows[SLOTS:].T + bias  # eq. 4 and 5
        return (hidden @ words.T + head.bias)[:, answers]

    def fluency(ids, slot, mask, read, gold):
        """-log p of hidden words of the text, the gold label's row at the mask (eq. 8 and 9)."""
        columns = torch.arange(ids.shape[1])
        text = (columns > 0) & (columns < read - 2)
        chance = torch.where(text, torch.rand(ids.shape), 2.0)
        hidden = text & ((chance < HIDE) | (chance == chance.min(1, keepdim=True).values))
        slot = slot.scatter(1, read, SLOTS + gold[:, None])
        masked = torch.where(hidden, tokenizer.mask_token_id, ids)
        logits = features(masked, slot, mask)[hidden] @ words.T + head.bias
        return cross_entropy(logits, ids[hidden])

    def loss(*inputs):
        *tokens, gold = inputs
        class_loss = cross_entropy(scores(*tokens), gold)
        return class_loss + fluency(*tokens, gold) if dart else class_loss  # eq. 10, lambda 1

    method = "torch dart" if dart else "torch lm_bff"
    return _fit(c, seed, method, model, [rows, bias], splits, scores, loss)


def train_listed(c: RunConfig, seed: int) -> RunResult:
    """Trains by configs/dpt/tasks.py:sst2,low,dpt (Yao et al. 2022, eq. 1 to 3). -> the result"""
    examples, tokenizer, model = _open(c, seed, AutoModelForPreTraining)
    ask = tokenizer("Class:", add_special_tokens=False).input_ids
    comma, stop = tokenizer(", .", add_special_tokens=False).input_ids
    names = tokenizer(list(c.task.words), add_special_tokens=False).input_ids

    def encode(example):
        room = c.data.max_len - 2 - len(ask) - sum(len(name) + 1 for name in names)
        ids, read = [tokenizer.cls_token_id, *_text(tokenizer, example, room), *ask], []
        for name in names:
            read.append(len(ids))  # its first token judges a class
            ids += [*name, stop if name is names[-1] else comma]
        ids.append(tokenizer.sep_token_id)
        return ids, [-1] * len(ids), read

    splits = {n: Rows(part, [encode(x) for x in part]) for n, part in examples.splits.items()}

    def scores(ids, slot, mask, read):
        """Returns -z: that a class is original, as a logit. -> [B, C]"""
        return -model(input_ids=ids, attention_mask=mask.long()).logits.gather(1, read)

    def loss(*inputs):
        *tokens, gold = inputs
        logits = scores(*tokens)
        labels = torch.nn.functional.one_hot(gold, logits.shape[1]).float()
        return binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(1).mean()

    return _fit(c, seed, "torch dpt", model, [], splits, scores, loss)


def _open(c: RunConfig, seed: int, kind: Any):
    """Reads examples, tokenizer and model. -> these three"""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(seed)
    # The file may hold 16 bits, in which torch would train.
    model = kind.from_pretrained(c.backbone.path, dtype=torch.float32)
    return read_examples(c), AutoTokenizer.from_pretrained(c.backbone.path), model


def _text(tokenizer, example, room: int) -> list[int]:
    return tokenizer(example.fields["sentence"], add_special_tokens=False).input_ids[:room]


def _fit(
    c: RunConfig, seed: int, method: str, model, more: list, splits: dict[str, Rows],
    scores: Callable, loss: Callable,
) -> RunResult:  # fmt: skip
    """Trains all weights and `more`, chooses the epoch on dev, and scores test. -> the result"""
    added = torch.nn.ParameterList(p for p in more if p.requires_grad)
    whole = torch.nn.ModuleList([model, added])
    trained = list(whole.param_shardings())
    # Biases and norms do not decay.
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": c.optim.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=c.optim.lr, eps=c.optim.eps)
    rows = splits["train"]
    each = -(-len(rows) // c.data.batch)
    steps = c.train.total_steps or int(c.train.total_epochs) * each
    warm = round(getattr(c.optim.schedule, "warmup_ratio", 0.0) * steps)
    rate = lambda step: min((step + 1) / max(warm, 1), (steps - step) / (steps - warm))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def measure(name: str) -> dict[str, float]:
        split, right = splits[name], 0
        for at in range(0, len(split), 64):
            *tokens, gold = split.batch(range(at, min(at + 64, len(split))))
            right += int((scores(*tokens).argmax(-1) == gold).sum())
        return {"accuracy": right / len(split)}

    training = Training(method, whole, len(rows), lambda chosen: loss(*rows.batch(chosen)), measure)
    return fit(c, seed, training, steps // each, optimizer, schedule)
