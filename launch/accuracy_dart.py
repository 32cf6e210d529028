"""DART and prompt-based fine-tuning in torch alone, on the examples of our run (Zhang et al. 2022).

launch/accuracy.py calls it. Tokens, rows, losses and optimizer are written here, from the paper's
equations; of ours it takes the examples, the label words and the numbers of configs/dart.py.
"""

import os
import sys
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMaskedLM, AutoTokenizer

from jaxprompt.assembly import from_config

HIDE = 0.1  # share of the text's tokens that the fluency objective hides, as prompt.hide
SLOTS = 3  # "It was." around the mask: It, was, [MASK] and the full stop


def train(c, seed: int, *, dart: bool) -> dict:
    """Trains by configs/dart.py:sst2, chooses on dev, and scores test. -> the result

    Without `dart` the words of template and labels stay words, and there is no fluency objective.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(seed)
    examples = from_config.read_examples(c)
    tokenizer = AutoTokenizer.from_pretrained(c.backbone.path)
    # The file may hold 16 bits, in which torch would train.
    model = AutoModelForMaskedLM.from_pretrained(c.backbone.path, dtype=torch.float32)
    words = model.get_input_embeddings().weight
    start = tokenizer("It was.", add_special_tokens=False).input_ids
    answers = [tokenizer(own[0], add_special_tokens=False).input_ids for own in examples.task.words]
    assert len(start) == SLOTS and all(len(own) == 1 for own in answers)
    answers = [own[0] for own in answers]
    # Rows 0 to 2 are the template's, behind them is one per class (sections 4.2 and 4.3).
    rows = torch.nn.Parameter(words[start + answers].detach().clone(), requires_grad=dart)
    bias = torch.nn.Parameter(torch.zeros(len(answers)), requires_grad=dart)
    trained = [p for p in [*model.parameters(), rows, bias] if p.requires_grad]
    encoded = {name: encode(part, tokenizer, c) for name, part in examples.splits.items()}
    labels = {n: torch.tensor([x.label for x in part]) for n, part in examples.splits.items()}

    def features(ids, slot, mask):
        """Runs encoder and transform; a row stands where `slot` says so. -> [B, T, H]"""
        own = torch.nn.functional.embedding(slot.clamp(min=0), rows)
        embedded = torch.nn.functional.embedding(ids, words)
        embedded = torch.where((slot >= 0)[..., None], own, embedded)
        hidden = model.base_model(inputs_embeds=embedded, attention_mask=mask.long())
        return model.cls.predictions.transform(hidden.last_hidden_state)

    def scores(ids, slot, mask, at):
        read = features(ids, slot, mask)[torch.arange(len(ids)), at]
        if dart:
            return read @ rows[SLOTS:].T + bias  # eq. 4 and 5
        return (read @ words.T + model.cls.predictions.bias)[:, answers]

    def fluency(ids, slot, mask, text, at, gold):
        """-log p of hidden words of the text, the gold label's row at the mask (eq. 8 and 9)."""
        chance = torch.where(text, torch.rand(ids.shape), 2.0)
        hidden = text & ((chance < HIDE) | (chance == chance.min(1, keepdim=True).values))
        slot = slot.clone()
        slot[torch.arange(len(ids)), at] = SLOTS + gold
        seen = torch.where(hidden, tokenizer.mask_token_id, ids)
        found = features(seen, slot, mask)[hidden] @ words.T + model.cls.predictions.bias
        return cross_entropy(found, ids[hidden])

    def accuracy(name: str) -> float:
        model.eval()
        right = 0
        with torch.no_grad():
            for i in range(0, len(labels[name]), 64):
                ids, slot, mask, _, at = pad(encoded[name][i : i + 64], tokenizer)
                found = scores(ids, slot, mask, at).argmax(-1)
                right += int((found == labels[name][i : i + 64]).sum())
        return right / len(labels[name])

    flat = [p for p in trained if p.ndim == 1]  # biases and norms do not decay
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": c.optim.weight_decay},
        {"params": flat, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=c.optim.lr, eps=c.optim.eps)
    steps, each = c.train.total_steps, -(-len(labels["train"]) // c.data.batch)
    warm = round(c.optim.warmup_ratio * steps) if c.optim.schedule == "warmup_linear" else 0
    rise = lambda step: min((step + 1) / max(warm, 1), (steps - step) / (steps - warm))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rise)
    rng, best, started = np.random.RandomState(seed), None, time.monotonic()
    for epoch in range(steps // each):
        model.train()
        order = rng.permutation(len(labels["train"]))
        for i in range(0, len(order), c.data.batch):
            chosen = order[i : i + c.data.batch]
            gold = labels["train"][chosen]
            ids, slot, mask, text, at = pad([encoded["train"][j] for j in chosen], tokenizer)
            loss = cross_entropy(scores(ids, slot, mask, at), gold)
            if dart:
                loss = loss + fluency(ids, slot, mask, text, at, gold)  # eq. 10, lambda 1
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, c.optim.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        dev = accuracy("dev")
        print(f"epoch {epoch + 1}: dev {dev:.4f}", file=sys.stderr, flush=True)
        if best is None or dev > best[0]:
            best = dev, [p.detach().clone() for p in trained]
    with torch.no_grad():
        for p, value in zip(trained, best[1], strict=True):
            p.copy_(value)
    return {
        "method": "torch dart" if dart else "torch words", "seed": seed,
        "trained": sum(p.numel() for p in trained), "total": sum(p.numel() for p in trained),
        "dev": {"accuracy": best[0]}, "test": {"accuracy": accuracy("test")},
        "time": {"seconds": time.monotonic() - started},
    }  # fmt: skip


def encode(examples, tokenizer, c):
    """Writes `[CLS] text It was [MASK]. [SEP]`. -> ids and slots of each example"""
    encoded = []
    for example in examples:
        ids = tokenizer(example.fields["sentence"], add_special_tokens=False).input_ids
        ids = ids[: c.data.max_len - 6]
        stop = tokenizer(". It was", add_special_tokens=False).input_ids
        tail = [*stop[1:], tokenizer.mask_token_id, stop[0], tokenizer.sep_token_id]
        slot = [-1] * (len(ids) + 1) + [0, 1, -1, 2, -1]
        encoded.append(([tokenizer.cls_token_id, *ids, *tail], slot))
    return encoded


def pad(rows, tokenizer):
    """Joins examples. -> ids, slots, mask, text [B, T], and where [MASK] is [B]"""
    fill = lambda part, value: torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in part], True, value
    )
    ids, slots = zip(*rows, strict=True)
    lengths = torch.tensor([len(row) for row in ids])
    column = torch.arange(int(lengths.max()))
    text = (column > 0) & (column < lengths[:, None] - 5)
    mask = column < lengths[:, None]
    return fill(ids, tokenizer.pad_token_id), fill(slots, -1), mask, text, lengths - 3
