"""PEFT's prefix and prompt tuning, on the examples of ours.

launch/accuracy calls it. Of tags and spans it takes our rows, loss and decisions too: what differs
is the model, its prefix and its optimizer, torch's.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import peft
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from jaxprompt.build.backbone import open_backbone
from jaxprompt.build.examples import read_examples
from jaxprompt.build.placement import build_placement
from jaxprompt.build.task import encode_splits, scorer_from_config
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.folder import resolve
from jaxprompt.scoring.losses import END, START
from jaxprompt.training.run_result import RunResult
from jaxprompt.types import ABSENT
from launch.accuracy.fit import Training, fit

METHODS = {"prefix": peft.PrefixTuningConfig, "soft": peft.PromptTuningConfig}
MODELS = {
    "tags": (AutoModelForTokenClassification, "TOKEN_CLS"),
    "spans": (AutoModelForQuestionAnswering, "QUESTION_ANS"),
}


# -- texts with a class --------------------------------------------------------------------------


def train_classes(c: RunConfig, seed: int, method: str) -> RunResult:
    """Trains by a config of configs/accuracy.py with a linear head. -> the result"""
    examples = read_examples(c)
    start_torch(seed)
    tokenizer, model = open_classifier(c, method, len(examples.task.labels))
    splits = {}
    for name, part in examples.splits.items():
        texts = ([example.fields[field] for example in part] for field in examples.task.fields)
        rows = tokenizer(*texts, truncation=True, max_length=c.data.max_len)
        splits[name] = rows, np.array([example.label for example in part])

    def batch(rows, chosen):
        return tokenizer.pad(
            {k: [x[i] for i in chosen] for k, x in rows.items()}, return_tensors="pt"
        )

    def loss(chosen) -> torch.Tensor:
        rows, labels = splits["train"]
        return model(**batch(rows, chosen), labels=torch.tensor(labels[chosen])).loss

    def measure(name: str) -> dict[str, float]:
        rows, labels = splits[name]
        order = np.argsort([len(row) for row in rows["input_ids"]], kind="stable")
        parts = [order[i : i + 64] for i in range(0, len(order), 64)]
        classes = np.concatenate([model(**batch(rows, p)).logits.argmax(-1) for p in parts])
        return {"accuracy": float((classes == labels[order]).mean())}

    size = len(splits["train"][1])
    return _fit(c, seed, Training(f"peft {method}", model, size, loss, measure))


def open_classifier(c: RunConfig, method: str, classes: int) -> tuple[Any, peft.PeftModel]:
    """Loads a backbone and adds a head and a prompt to it. -> its tokenizer, the model"""
    folder = resolve(c.backbone.path)
    gguf = {"gguf_file": folder.name} if folder.is_file() else {}
    folder = folder.parent if gguf else folder
    tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
    base = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=classes, dtype=torch.float32, **gguf
    )
    base.config.pad_token_id = tokenizer.pad_token_id
    if method == "soft" and hasattr(base, "score"):
        # Given embeddings, transformers' decoders read the last position, padding or not.
        tokenizer.padding_side = "left"
    config = METHODS[method](task_type="SEQ_CLS", num_virtual_tokens=c.prompt.get("length"))
    return tokenizer, peft.get_peft_model(base, config)


# -- tags and spans ------------------------------------------------------------------------------


class TokenModel(NamedTuple):
    """PEFT's model of tags or spans, read where ours reads."""

    kind: str  # of head: tags | spans
    model: peft.PeftModel
    pad: int  # token id
    length: int  # of the prefix

    def scores(self, rows: Sequence[Any]) -> torch.Tensor:
        """Scores the label positions of encoded rows.

        Returns:
          Scores [B, M, C], of spans [B, M, 2]; ABSENT where a row has fewer positions than M.
        """
        fill = lambda name, value: torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(getattr(row, name), dtype=torch.long) for row in rows], True, value
        )
        ids = fill("ids", self.pad)  # [B, T]
        lengths = torch.tensor([len(row.ids) for row in rows])
        mask = torch.arange(-self.length, ids.shape[1]) < lengths[:, None]  # [B, P + T]
        # Not by PEFT's own forward, which drops the token types of question answering.
        out = self.model.base_model(
            input_ids=ids, token_type_ids=fill("types", 0), attention_mask=mask.long(),
            past_key_values=self.model.get_prompt(batch_size=len(rows)),
        )  # fmt: skip
        is_tags = self.kind == "tags"
        logits = out.logits if is_tags else torch.stack([out.start_logits, out.end_logits], 2)
        label_pos = fill("label_pos", 0)  # [B, M]
        scores = logits.gather(1, label_pos[..., None].expand(-1, -1, logits.shape[2]))
        counts = torch.tensor([len(row.label_pos) for row in rows])
        present = torch.arange(label_pos.shape[1]) < counts[:, None]
        return torch.where(present[..., None], scores, torch.tensor(ABSENT))

    def loss(self, rows: Sequence[Any], labels: np.ndarray) -> torch.Tensor:
        """Returns the mean loss of encoded rows; `labels` may be padded to more than M."""
        scores = self.scores(rows)
        loss = {"tags": tag_loss, "spans": span_loss}[self.kind]
        return loss(scores, torch.tensor(labels[:, : scores.shape[1]]))

    def scores_of_split(self, split: Any) -> np.ndarray:
        """Scores every row of a split, rows of like lengths together. [N, M, C or 2]"""
        order = np.argsort([len(row[0].ids) for row in split.rows], kind="stable")
        table = None
        for i in range(0, len(order), 64):
            chosen = order[i : i + 64]
            scores = self.scores([split.rows[n][0] for n in chosen]).numpy()
            if table is None:
                shape = (len(order), split.labels.shape[1], scores.shape[2])
                table = np.full(shape, ABSENT, np.float32)
            table[chosen, : scores.shape[1]] = scores
        return table


def train_tokens(c: RunConfig, seed: int) -> RunResult:
    """Trains by a config of configs/accuracy.py with a head of tags or spans. -> the result"""
    start_torch(seed)
    placement, backbone = build_placement(c), open_backbone(c.backbone)
    examples = read_examples(c)
    scorer = scorer_from_config(c, backbone, examples, placement)
    splits = encode_splits(scorer, examples)
    kind, (model_class, task_type) = c.head.name, MODELS[c.head.name]
    labels = {"num_labels": len(scorer.task.labels)} if kind == "tags" else {}
    config = peft.PrefixTuningConfig(task_type=task_type, num_virtual_tokens=c.prompt.get("length"))
    model = peft.get_peft_model(model_class.from_pretrained(backbone.folder, **labels), config)
    tokens = TokenModel(kind, model, scorer.layout.pad_id, c.prompt.get("length"))
    train = splits["train"]

    def loss(chosen) -> torch.Tensor:
        return tokens.loss([train.rows[i][0] for i in chosen], train.labels[chosen])

    def measure(name: str) -> dict[str, float]:
        return scorer.measure(splits[name], tokens.scores_of_split(splits[name]))

    metric = scorer.task.metric
    return _fit(c, seed, Training("peft prefix", model, len(train.rows), loss, measure, metric))


def tag_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy over the words."""
    return torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), labels.long().flatten(), ignore_index=-1
    )


def span_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy of starts and ends, as `scoring.losses.span_loss`."""
    bits = labels.clamp(min=0)
    ends = [((bits & bit) > 0).long().argmax(1) for bit in (START, END)]
    losses = [torch.nn.functional.cross_entropy(scores[..., i], end) for i, end in enumerate(ends)]
    return sum(losses) / 2


# -- both ----------------------------------------------------------------------------------------


def start_torch(seed: int) -> None:
    """Sets the threads and the seed of torch."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(seed)


def _fit(c: RunConfig, seed: int, training: Training) -> RunResult:
    """Trains without weight decay; the learning rate falls linearly to 0."""
    parameters = [p for p in training.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=c.optim.lr, weight_decay=0.0)
    epochs = int(c.train.total_epochs)
    steps = epochs * -(-training.examples // c.data.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    return fit(c, seed, training, epochs, optimizer, schedule)
