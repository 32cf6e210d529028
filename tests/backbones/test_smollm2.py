"""SmolLM2-135M, a real language model, against torch on real sentences."""

import gzip
import json

import numpy as np
import pytest
import transformers
from pairs import compiled, make_batch, make_tokens, states_and_logits

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.types import Injection

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")

COUNT, BATCH, WIDTH = 200, 8, 64


def sentences(shared):
    with gzip.open(shared / "data/sst2/dev.jsonl.gz", "rt") as file:
        return [json.loads(next(file))["sentence"] for _ in range(COUNT)]


def test_logits_on_real_sentences(shared, smollm):
    torch.set_num_threads(2)
    path = smollm
    config, tokenizer = read_config(path), load_tokenizer(path)
    params, report = load_backbone(path, "llama", config)
    assert report.tied and report.unused == ()
    module = make_backbone("llama", config, report.heads)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    run = compiled(module, states_and_logits)
    rows = [tokenizer(text)["input_ids"][:WIDTH] for text in sentences(shared)]
    worst, same, total = 0.0, 0, 0
    for at in range(0, COUNT, BATCH):
        batch_rows = rows[at : at + BATCH]
        mask = np.arange(WIDTH) < np.array([[len(row)] for row in batch_rows])
        ids = np.zeros(mask.shape, np.int32)
        ids[mask] = np.concatenate(batch_rows)
        _, actual = run(params, make_batch(make_tokens(ids, mask)), Injection())
        with torch.no_grad():
            inputs = torch.tensor(ids).long(), torch.tensor(mask).long()
            expected = theirs(input_ids=inputs[0], attention_mask=inputs[1]).logits.numpy()
        actual = np.asarray(actual)[mask]
        worst = max(worst, np.abs(actual - expected[mask]).max())
        same += (actual.argmax(-1) == expected[mask].argmax(-1)).sum()
        total += len(actual)
    assert worst <= 1e-3 and same == total > 3000, (worst, same, total)
