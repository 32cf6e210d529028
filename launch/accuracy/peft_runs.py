"""PEFT's prefix tuning of tags and spans, on the rows, the loss and the decisions of ours.

launch/accuracy calls it. What differs is the model, its prefix and its optimizer: torch's.
"""

import os
import sys
import time

import numpy as np
import peft
import torch
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from jaxprompt.build.backbone import open_backbone
from jaxprompt.build.examples import read_examples
from jaxprompt.build.placement import build_placement
from jaxprompt.build.task import encode_splits, scorer_from_config
from jaxprompt.scoring.losses import END, START
from jaxprompt.types import ABSENT

MODELS = {
    "tags": (AutoModelForTokenClassification, "TOKEN_CLS"),
    "spans": (AutoModelForQuestionAnswering, "QUESTION_ANS"),
}


def train(c, seed: int) -> dict:
    """Trains by a config of configs/accuracy.py, chooses on dev, and scores test. -> the result"""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(seed)
    placement, backbone = build_placement(c), open_backbone(c.backbone.to_dict())
    examples = read_examples(c)
    scorer = scorer_from_config(c, backbone, examples, placement)
    splits = encode_splits(scorer, examples)
    kind, (cls, task) = c.head.name, MODELS[c.head.name]
    own = {"num_labels": len(scorer.task.labels)} if kind == "tags" else {}
    setting = peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=c.prompt.length)
    model = peft.get_peft_model(cls.from_pretrained(backbone.folder, **own), setting)
    pad, loss = scorer.layout.pad_id, {"tags": tag_loss, "spans": span_loss}[kind]

    def scores(split, chosen) -> torch.Tensor:
        """Scores what is read of some windows. -> [B, M, C or 2], ABSENT where nothing is read"""
        rows = [split.rows[i][0] for i in chosen]
        fill = lambda name, value: torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(getattr(row, name), dtype=torch.long) for row in rows], True, value
        )
        ids = fill("ids", pad)
        lengths = torch.tensor([len(row.ids) for row in rows])
        seen = torch.arange(-c.prompt.length, ids.shape[1]) < lengths[:, None]
        # Not by PEFT's own forward, which drops the token types of question answering.
        out = model.base_model(
            input_ids=ids, token_type_ids=fill("types", 0), attention_mask=seen.long(),
            past_key_values=model.get_prompt(batch_size=len(rows)),
        )  # fmt: skip
        every = out.logits if kind == "tags" else torch.stack([out.start_logits, out.end_logits], 2)
        read = fill("label_pos", 0)
        found = every.gather(1, read[..., None].expand(-1, -1, every.shape[2]))
        counts = torch.tensor([len(row.label_pos) for row in rows])
        there = torch.arange(read.shape[1]) < counts[:, None]
        return torch.where(there[..., None], found, torch.tensor(ABSENT))

    def measure(split) -> dict[str, float]:
        model.eval()
        order = np.argsort([len(row[0].ids) for row in split.rows], kind="stable")
        found = None
        with torch.no_grad():
            for at in range(0, len(order), 64):
                chosen = order[at : at + 64]
                values = scores(split, chosen).numpy()
                if found is None:
                    shape = (len(order), split.labels.shape[1], values.shape[2])
                    found = np.full(shape, ABSENT, np.float32)
                found[chosen, : values.shape[1]] = values
        return scorer.measure(split, found)

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=c.optim.lr, weight_decay=0.0)
    rows = splits["train"]
    epochs, each = int(c.train.total_epochs), -(-len(rows.rows) // c.data.batch)
    decay = lambda step: 1 - step / (epochs * each)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    rng, best, started = np.random.RandomState(seed), None, time.monotonic()
    for epoch in range(epochs):
        model.train()
        order = rng.permutation(len(rows.rows))
        for at in range(0, len(order), c.data.batch):
            chosen = order[at : at + c.data.batch]
            found = scores(rows, chosen)
            loss(found, torch.tensor(rows.labels[chosen, : found.shape[1]])).backward()
            torch.nn.utils.clip_grad_norm_(trained, c.optim.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        dev = measure(splits["dev"])
        print(f"epoch {epoch + 1}: dev {dev}", file=sys.stderr, flush=True)
        if best is None or dev[scorer.task.metric] > best[0][scorer.task.metric]:
            best = dev, [p.detach().clone() for p in trained]
    with torch.no_grad():
        for p, value in zip(trained, best[1], strict=True):
            p.copy_(value)
    return {
        "method": "peft prefix", "seed": seed, "trained": sum(p.numel() for p in trained),
        "total": sum(p.numel() for p in model.parameters()),
        "dev": best[0], "test": measure(splits["test"]),
        "time": {"seconds": time.monotonic() - started},
    }  # fmt: skip


def tag_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Gives the mean cross entropy over the words."""
    return torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), labels.long().flatten(), ignore_index=-1
    )


def span_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Gives the mean cross entropy of starts and ends, as `scoring.losses.span_ends`."""
    there = labels.clamp(min=0)
    ends = [((there & bit) > 0).long().argmax(1) for bit in (START, END)]
    each = [torch.nn.functional.cross_entropy(scores[..., i], own) for i, own in enumerate(ends)]
    return sum(each) / 2
