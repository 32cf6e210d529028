"""Examples of a pre-training task as texts with labels: does a backbone carry the task at all?

launch/accuracy calls it. A linear head on the frozen backbone, or the whole backbone, is then
trained on them as on any classification task.
"""

import json
from pathlib import Path

from configs.ppt import PRETRAINING, pretrain
from jaxprompt.build.corpus import read_corpus
from jaxprompt.build.placement import build_placement
from jaxprompt.config.load import set_field, to_run_config
from jaxprompt.corpus import Shuffle
from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.errors import check_known
from jaxprompt.files import make_folder, write_atomic
from jaxprompt.runs import ppt

SPLITS = {"train": (0, 12_000), "dev": (1, 500), "test": (1, 1_000)}  # 1 = held-out documents


def write_examples(task: str, settings: list[tuple[str, str]], workdir: str) -> dict[str, int]:
    """Writes SPLITS as JSON lines, each with random numbers of its own. -> examples by split"""
    values = pretrain(check_known("--task", task, PRETRAINING), "causal-deep")
    for field, value in settings:
        set_field(values, field, value)
    c = to_run_config(values)
    placement = build_placement(c)
    ppt_task = ppt.open_task(c, placement)
    tokenizer = ppt_task.scorer.tokenizer
    corpus = read_corpus(c, tokenizer, ppt_task.backbone.module.cfg.vocab, workdir)
    made = ppt.make_corpus_examples(c, corpus, ppt_task, placement.batch_part()).tasks
    folder = make_folder(Path(workdir) / task)
    for seed, (split, (part, count)) in enumerate(SPLITS.items(), 1):
        order = Shuffle(len(made[part]), 0)
        lines = []
        for i in range(count):
            row, label = made[part](order[i % len(order)], sample_rng(seed, i))
            ids = row.ids[row.slot < 0].tolist()
            text = tokenizer.decode(ids, skip_special_tokens=True).strip()
            lines.append(json.dumps({"text": text, "label": int(label)}) + "\n")
        # Whole or not at all: a file that was cut would be trained on as it is.
        write_atomic(folder / f"{split}.jsonl", "".join(lines))
    return {split: count for split, (_, count) in SPLITS.items()}
