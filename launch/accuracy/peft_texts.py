"""PEFT's prompt and prefix tuning of a language model, in the setting of configs/sums.py.

launch/accuracy calls it. The initial values and the order of the examples are those of jaxprompt's
run with the same seed; model, tokenization, loss, optimizer and generation are those of PEFT,
transformers and torch.
"""

import resource
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxprompt.build.backbone import load_weights, open_backbone
from jaxprompt.build.examples import read_examples
from jaxprompt.build.initial_params import init_params
from jaxprompt.build.placement import build_placement
from jaxprompt.build.task import encode_splits, scorer_from_config, train_batches
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.folder import resolve
from jaxprompt.data.sources.files import read_file
from jaxprompt.errors import InputError
from jaxprompt.training.run_result import RunResult
from launch.accuracy.peft_runs import METHODS, start_torch

IGNORED = -100  # label of a token without loss, in transformers


def shared_start(config: RunConfig) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns jaxprompt's initial table, and the examples of each step by their index."""
    placement = build_placement(config)
    examples, backbone = read_examples(config), open_backbone(config.backbone)
    scorer = scorer_from_config(config, backbone, examples, placement)
    train = encode_splits(scorer, examples)["train"]
    backbone, loaded = load_weights(backbone, placement)
    initial = init_params(config, scorer.with_backbone(backbone), loaded, None, placement)
    (table,) = initial.trainable.values()
    batches = train_batches(config, scorer, train)
    steps = [
        np.asarray(batch.index)[np.asarray(batch.weights) > 0]
        for batch in islice(batches, config.train.total_steps)
    ]
    batches.close()
    return np.asarray(table), steps


def as_peft(table: np.ndarray) -> torch.Tensor:
    """Returns a table as PEFT stores it: soft tokens [P, E], or [L, 2, P, N, D] as [P, L2ND]."""
    if table.ndim == 2:
        return torch.tensor(table)
    return torch.tensor(table.transpose(2, 0, 1, 3, 4).reshape(table.shape[2], -1))


class TextModel:
    """A language model with a prompt, its loss and its greedy texts."""

    def __init__(self, config: RunConfig, method: str, table: np.ndarray):
        """Opens the backbone by transformers and sets the initial values of PEFT's prompt."""
        folder = resolve(config.backbone.path)
        gguf = {"gguf_file": folder.name} if folder.is_file() else {}
        folder = folder.parent if gguf else folder
        self.config, self.tokenizer = config, AutoTokenizer.from_pretrained(folder, **gguf)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **gguf)
        length = config.prompt.get("length")
        adapter = METHODS[method](task_type="CAUSAL_LM", num_virtual_tokens=length)
        self.model = peft.get_peft_model(base, adapter)
        with torch.no_grad():
            self.model.prompt_encoder["default"].embedding.weight.copy_(as_peft(table))

    def encode(self, rows: Sequence[dict[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Returns the tokens of each example and of its target."""
        ids = lambda text: self.tokenizer(text).input_ids
        stop = self.tokenizer.eos_token_id
        return [(ids(f" {row['sum']} ="), [*ids(f" {row['result']}"), stop]) for row in rows]

    def loss(self, rows: Sequence[dict[str, str]]) -> torch.Tensor:
        """Returns the mean loss of the target tokens."""
        encoded = self.encode(rows)
        longest = max(len(text) + len(target) for text, target in encoded)
        ids = torch.full((len(rows), longest), self.tokenizer.eos_token_id)
        labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
        for i, (text, target) in enumerate(encoded):
            whole = torch.tensor(text + target)
            ids[i, : len(whole)], mask[i, : len(whole)] = whole, 1
            labels[i, len(text) : len(whole)] = whole[len(text) :]
        return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss

    def exact_match(self, rows: Sequence[dict[str, str]]) -> float:
        """Returns the share of right texts; inputs of equal length are one batch, unpadded."""
        texts = [text for text, _ in self.encode(rows)]
        (stop,), hits = self.config.generate.stop, 0
        for length in sorted({len(text) for text in texts}):
            chosen = [i for i, text in enumerate(texts) if len(text) == length]
            new = self.greedy(torch.tensor([texts[i] for i in chosen]))
            end = self.tokenizer.eos_token
            for i, text in zip(chosen, self.tokenizer.batch_decode(new), strict=True):
                hits += text.split(end)[0].split(stop)[0].strip() == rows[i]["result"]
        return hits / len(rows)

    def greedy(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the most likely tokens after inputs without padding. [B, T] -> [B, N]

        `generate` of PEFT 0.21.2 with transformers 5.24 writes other tokens than those that PEFT's
        own forward pass scores best; these do.
        """
        model, prompt = self.model.get_base_model(), self.model.get_prompt(batch_size=len(ids))
        if self.config.prompt.name == "prefix":
            inputs = {"input_ids": ids, "past_key_values": prompt}
        else:
            vectors = model.get_input_embeddings()(ids)
            inputs = {"inputs_embeds": torch.cat([prompt, vectors], 1)}
        tokens: list[torch.Tensor] = []
        for _ in range(self.config.generate.max_new_tokens):
            output = model(**inputs, use_cache=True)
            tokens.append(output.logits[:, -1].argmax(-1))
            inputs = {"input_ids": tokens[-1][:, None], "past_key_values": output.past_key_values}
        return torch.stack(tokens, 1)


def read_rows(config: RunConfig, split: str) -> list[dict[str, str]]:
    """Returns the rows of a split."""
    return list(read_file(Path(config.data.source) / f"{split}.csv"))


def train_text(config: RunConfig, method: str) -> RunResult:
    """Trains as jaxprompt does, and restores the evaluation that is best on dev."""
    started = time.monotonic()
    table, steps = shared_start(config)
    start_torch(config.seed)
    model = TextModel(config, method, table)
    rows = {split: read_rows(config, split) for split in ("train", "dev", "test")}
    parameters = [p for p in model.model.parameters() if p.requires_grad]
    optim, total = config.optim, len(steps)
    optimizer = torch.optim.AdamW(
        parameters, lr=optim.lr, betas=(optim.b1, optim.b2), eps=optim.eps,
        weight_decay=optim.weight_decay,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    best: tuple[float, int, list[torch.Tensor]] | None = None
    for step, index in enumerate(steps, 1):
        model.model.train()
        loss = model.loss([rows["train"][i] for i in index])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, optim.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % config.train.log_steps == 0:
            print(f"step {step}: loss {loss.item():.5f}", file=sys.stderr, flush=True)
        if step % config.train.eval_steps == 0:
            dev = measure(model, rows["dev"])
            print(f"step {step}: dev {dev:.3f}", file=sys.stderr, flush=True)
            if best is None or dev > best[0]:
                best = dev, step, [p.detach().clone() for p in parameters]
    if best is None:
        raise InputError(f"train.eval_steps={config.train.eval_steps} is over {total} steps")
    with torch.no_grad():
        for p, value in zip(parameters, best[2], strict=True):
            p.copy_(value)
    test = measure(model, rows["test"])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return RunResult(
        method=f"peft {method}", seed=config.seed, trained=sum(p.numel() for p in parameters),
        total=sum(p.numel() for p in model.model.parameters()), steps=total, best_step=best[1],
        dev={"exact_match": best[0]}, test={"exact_match": test},
        time={
            "seconds": time.monotonic() - started, "cpu_seconds": usage.ru_utime + usage.ru_stime
        },
    )  # fmt: skip


def measure(model: TextModel, rows: Sequence[dict[str, str]]) -> float:
    """Scores rows without dropout and gradients."""
    model.model.eval()
    with torch.no_grad():
        return model.exact_match(rows)
