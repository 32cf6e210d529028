"""A tiny pre-trained model on disk, a task it can learn and a config that runs in seconds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxprompt.__main__ import main
from jaxprompt.config.load import apply_overrides, read_config, to_run_config
from jaxprompt.config.run import RunConfig
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {
    "bert": "BertForPreTraining",
    "roberta": "RobertaForMaskedLM",
    "electra": "ElectraForMaskedLM",
    "discriminator": "ElectraForPreTraining",
    "t5": "T5ForConditionalGeneration",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "gemma": "GemmaForCausalLM",
    "mistral": "MistralForCausalLM",
    "albert": "AlbertForMaskedLM",
    "deberta": "DebertaForMaskedLM",
    "deberta_v2": "DebertaV2ForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
}
METHOD_CONFIG = """
from configs.base import get_config as base
from configs.parts import methods


def get_config(method="prefix"):
    c = base()
    getattr(methods, method)(c)
    return c


"""  # the module of a config whose argument is a method
TOPICS = {
    "beast": "cat dog horse cow sheep goat lion tiger bear wolf fox hare".split(),
    "food": "bread rice apple pear plum soup cake cheese honey salt bean corn".split(),
    "tool": "hammer saw drill nail axe rope spade brush knife file vice lathe".split(),
}
FILLERS = "the a an this that was is near under over with very quite old new red big small".split()
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*TOPICS, *sum(TOPICS.values(), []), *FILLERS, "it", "about", "good", "bad", "不", "好"]
VOCAB = list(dict.fromkeys([*SPECIALS, *WORDS, *LETTERS, *(f"##{x}" for x in LETTERS), *".,:?!"]))
WIDTH, LAYERS = 32, 2
CHAT = (
    "{% for m in messages %}a {{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}it was {% endif %}"
)
# Of a run whose dropout counts, with `make_dropping`. Others have none: its random bits are most of
# what a step takes to compile.
DROPS = {"prompt.dropout": 0.1, "head.dropout": 0.1}


def make_backbone(folder: Path, family: str = "bert", seed: int = 0, **changes: int) -> Path:
    """Writes random weights with an MLM head and a tokenizer of some 150 words.

    `changes` are other sizes, of encoders and of a Llama.
    """
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    vocab = _write_tokenizer(folder, family)
    if family in ("t5", "gpt2", "llama", "gemma", "mistral"):
        return _make_decoder(folder, family, vocab, changes)
    if family == "glm":
        return _make_glm(folder, vocab)
    sizes = dict(
        vocab_size=vocab, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=66, type_vocab_size=2, initializer_range=0.1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    sizes |= changes
    if family == "roberta":
        sizes |= dict(bos_token_id=0, pad_token_id=1, eos_token_id=2)
    if family in ("electra", "discriminator", "albert"):
        sizes |= dict(embedding_size=24)
    if family in ("deberta", "deberta_v2"):
        sizes |= dict(
            relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
            type_vocab_size=0,
        )  # fmt: skip
    if family == "deberta_v2":
        sizes |= dict(position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True)
    if family == "modernbert":
        sizes |= dict(local_attention=8, global_attn_every_n_layers=2)
        sizes |= dict(pad_token_id=0, bos_token_id=2, eos_token_id=3)
    model = getattr(transformers, FAMILIES[family])
    model = model(model.config_class(**sizes))
    model.save_pretrained(folder)  # config.json, without which no tokenizer is read
    _teach(model, folder)
    model.save_pretrained(folder)
    return folder


def make_dropping(folder: Path, backbone: Path) -> Path:
    """Copies a BERT folder, with dropout as published."""
    shutil.copytree(backbone, folder)
    path = folder / "config.json"
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    path.write_text(json.dumps(json.loads(path.read_text()) | rates))
    return folder


def _make_decoder(folder: Path, family: str, vocab: int, changes: dict[str, int]) -> Path:
    """Writes a T5 whose decoder has a layer more than its encoder, a GPT-2 or a kind of Llama.

    A token of the Mistral sees eight, itself included.
    """
    import transformers

    if family == "t5":
        sizes = dict(
            d_model=WIDTH, d_kv=12, d_ff=48, num_layers=LAYERS, num_decoder_layers=LAYERS + 1,
            num_heads=2, feed_forward_proj="gated-gelu", decoder_start_token_id=0, pad_token_id=0,
            eos_token_id=1, dropout_rate=0.0,
        )  # fmt: skip
    elif family in ("llama", "gemma", "mistral"):
        sizes = dict(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=48, max_position_embeddings=66,
            head_dim=WIDTH // 4, bos_token_id=0, eos_token_id=1, pad_token_id=1,
            initializer_range=0.1, tie_word_embeddings=True,
        )  # fmt: skip
        sizes |= dict(sliding_window=8) if family == "mistral" else {}
    else:
        sizes = dict(
            n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=66, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
        )  # fmt: skip
    model = getattr(transformers, FAMILIES[family])
    model = model(model.config_class(vocab_size=vocab, **sizes | changes))
    model.save_pretrained(folder)  # config.json, without which no tokenizer is read
    _share_directions(model, folder, 2.0 * model.get_input_embeddings().weight.std().item())
    model.save_pretrained(folder)
    return folder


def _make_glm(folder: Path, vocab: int) -> Path:
    """Writes a GLM under the names of its release, which transformers has not. Random weights."""
    from safetensors.torch import save_file
    from torch_glm import GLM

    sizes = dict(
        model_type="glm", vocab_size=vocab, hidden_size=WIDTH, num_layers=LAYERS,
        num_attention_heads=2, max_sequence_length=66, block_position_encoding=True,
        embedding_dropout_prob=0.0, attention_dropout_prob=0.0, output_dropout_prob=0.0,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes))
    model = GLM(sizes)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data.normal_(0.0, 0.2)
    _share_directions(model, folder, 0.4)
    tensors = {f"glm.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _teach(model: Any, folder: Path) -> None:
    """Makes the weights know the topics, as pre-training would: words of one share a direction.

    Attention averages the words into every position, and the MLM head scores what stands there.
    """
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            outside = name.endswith(("dense.weight", "project.weight")) and ".layer." not in name
            if outside or name.endswith("self.value.weight"):
                weight += torch.eye(*weight.shape)
            elif name.endswith("attention.output.dense.weight"):
                weight += 2 * torch.eye(*weight.shape)
        if hasattr(model, "discriminator_predictions"):  # else every token looks alike
            model.discriminator_predictions.dense_prediction.weight.normal_(0, 0.5)
    _share_directions(model, folder, 1.0)


def _share_directions(model: Any, folder: Path, scale: float) -> None:
    """Moves the embeddings of a topic's words, and by half of that its name's, the same way."""
    import torch

    tokenizer, table = load_tokenizer(folder), model.get_input_embeddings().weight
    with torch.no_grad():
        for label, words in TOPICS.items():
            direction = scale * torch.randn(table.shape[1])
            spaced = [f" {word}" for word in words]
            pieces = encode_texts(tokenizer, words) + encode_texts(tokenizer, spaced)
            table[sorted(set(sum(pieces, [])))] += direction
            table[encode_texts(tokenizer, [f" {label}"])[0]] += 0.5 * direction


def _write_tokenizer(folder: Path, family: str) -> int:
    if family == "t5":
        return _write_sentence_piece(folder)
    if family in ("llama", "gemma", "mistral"):
        return _write_llama_tokenizer(folder)
    if family == "gpt2":
        return _write_byte_level(folder, ["<|endoftext|>"])
    if family == "glm":
        return _write_glm_tokenizer(folder)
    if family == "deberta":
        return _write_byte_level(folder, SPECIALS)
    if family in ("albert", "deberta_v2", "modernbert"):
        return _write_as_released(folder, family)
    if family != "roberta":
        (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n", encoding="utf-8")
        return len(VOCAB)
    return _write_byte_level(folder, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])


def _write_as_released(folder: Path, family: str) -> int:
    """Writes a tokenizer of the family's own class, every word whole, letters besides."""
    import transformers

    if family == "modernbert":
        vocab = {word: number for number, word in enumerate(VOCAB)}
        tokenizer = transformers.BertTokenizer(vocab=vocab)
    else:
        pad, unk = ("<pad>", "<unk>") if family == "albert" else ("[PAD]", "[UNK]")
        pieces = [(word, 0.0) for word in (pad, unk, "[CLS]", "[SEP]", "[MASK]")]
        words = dict.fromkeys(f"▁{word}" for word in WORDS)
        pieces += [(word, -3.0) for word in words]
        letters = (x for x in [*LETTERS, "▁", *".,:?!"] if x not in words)
        pieces += [(letter, -9.0) for letter in letters]
        kinds = {"albert": "AlbertTokenizer", "deberta_v2": "DebertaV2Tokenizer"}
        tokenizer = getattr(transformers, kinds[family])(vocab=pieces)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _write_byte_level(folder: Path, specials: list[str]) -> int:
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [" ".join(f"{word} {word}" for word in WORDS)] * 3, vocab_size=500, show_progress=False,
        special_tokens=specials,
    )  # fmt: skip
    bpe.save_model(str(folder))
    return bpe.get_vocab_size()


def _write_llama_tokenizer(folder: Path) -> int:
    """Writes a tokenizer as Llama 3's: bytes joined to subwords, <s> in front of every input."""
    import transformers
    from tokenizers import processors

    _write_byte_level(folder, ["<s>", "</s>"])
    tokenizer = transformers.GPT2Tokenizer(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"),
    )  # fmt: skip
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=CHAT
    ).save_pretrained(folder)
    return len(tokenizer)


def _write_glm_tokenizer(folder: Path) -> int:
    """Writes GLM's tokenizer: that of GPT-2 with tokens for blanks and what fills them."""
    import transformers

    special_tokens = [
        "<|endoftext|>",
        "[CLS]",
        "[MASK]",
        "[gMASK]",
        "<|startofpiece|>",
        "<|endofpiece|>",
    ]
    _write_byte_level(folder, special_tokens)
    tokenizer = transformers.GPT2Tokenizer(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"), cls_token="[CLS]",
        pad_token="<|endoftext|>", additional_special_tokens=special_tokens[2:],
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _write_sentence_piece(folder: Path) -> int:
    """Writes a Unigram tokenizer: every word whole, letters besides, three sentinels."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [f"▁{word}" for word in WORDS]
    letters = [*LETTERS, *(letter.upper() for letter in LETTERS), "▁", *".,:?!_0123456789"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(word, -3.0) for word in dict.fromkeys(words)]
    pieces += [(letter, -9.0) for letter in letters if letter not in words]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.Metaspace()
    sentinels = [f"<extra_id_{i}>" for i in range(3)]
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>", *sentinels])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = dict(
        tokenizer_class="PreTrainedTokenizerFast", pad_token="<pad>", eos_token="</s>",
        unk_token="<unk>", additional_special_tokens=sentinels,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return tokenizer.get_vocab_size()


def sentences(seed: int, size: int) -> list[dict[str, str]]:
    """Draws rows of 5 to 12 words, two or three of them of the row's topic."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(size):
        label = list(TOPICS)[i % len(TOPICS)]
        words = [*rng.choice(FILLERS, rng.integers(3, 10)), *rng.choice(TOPICS[label], 2)]
        rows.append({"text": " ".join(rng.permutation(words)), "label": label})
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")
    return path


def entities_of(task) -> dict[str, object]:
    """Gives the columns of "the old cat was near it" in which two entities are told."""
    (field, *_), row = task.fields, {}
    if not task.entities:
        return row
    parts = [entry.split("|") for entry in task.entities]
    if task.offsets == "tags":
        (a, b), (c, d) = parts
        return {field: f"the old {a}cat{b} was near {c}it{d}"}
    if task.offsets == "text":
        return {entry: name for entry, name in zip(task.entities, ("cat", "it"), strict=True)}
    for names, word in zip(parts, (2, 5), strict=False):  # wsc has one
        last = word + (task.offsets == "words")
        if len(names) == 2:
            row |= dict(zip(names, (word, last), strict=True))
        else:
            column, dot, inner = names[0].partition(".")
            row[column] = {inner: [word, last]} if dot else [word, last]
    return row


def make_data(folder: Path, train: int = 48) -> Path:
    """Writes train.jsonl, dev.jsonl and test.jsonl of the three topics."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, size) in enumerate({"train": train, "dev": 30, "test": 24}.items()):
        write_rows(folder / f"{name}.jsonl", sentences(seed, size))
    return folder


def tiny_fields(backbone: Path, data: Path) -> dict[str, object]:
    """Gives the fields of a small run on the three topics, by dotted name."""
    return {
        "backbone.path": backbone, "task.name": "custom", "task.fields": "text",
        "data.source": data, "data.max_len": 24, "data.multiple": 24, "data.batch": 16,
        "train.total_epochs": 0, "train.total_steps": 3, "train.tracker": "none",
        "train.plot": False,
        "prompt.length": 4, "mesh.data": 1,
    }  # fmt: skip


def changed(fields: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    """Changes fields of a small run; a known task has columns of its own."""
    is_custom = changes.get("task.name", "custom") == "custom"
    return {n: x for n, x in fields.items() if is_custom or n != "task.fields"} | changes


def make_config(
    backbone: Path, data: Path, method: str = "", *, arguments=None, **fields
) -> RunConfig:
    """Fills base.py for a small run; `method` names a function of configs/parts/methods.py.

    A field of a block is written with two underscores: optim__lr=1e-2.
    """
    config = read_config(str(ROOT / "configs/base.py"))
    overrides = tiny_fields(backbone, data) | {"prompt.dropout": 0, "head.dropout": 0}
    overrides = changed(
        overrides, {name.replace("__", "."): value for name, value in fields.items()}
    )
    head = overrides.pop("head.name", None)
    with config.unlocked():
        if head:
            from configs.parts.heads import HEADS

            HEADS[head](config)
        if method:
            from configs.parts import methods

            getattr(methods, method)(config, **(arguments or {}))
    for name in ("prompt.length", *DROPS):
        block, _, last = name.rpartition(".")
        if last not in config[block]:
            overrides.pop(name, None)
    apply_overrides(config, [(name, str(value)) for name, value in overrides.items()])
    return to_run_config(config)


def with_part(config: RunConfig, part: Callable[[ConfigDict], None]) -> RunConfig:
    """Returns a config with a part of configs/parts applied, as `parts.heads.tags`."""
    copied = ConfigDict(config.to_dict())
    part(copied)
    return to_run_config(copied)


def flags(c_or_fields: dict[str, object]) -> list[str]:
    """Writes fields as --config.NAME=VALUE."""
    return [f"--config.{name}={value}" for name, value in c_or_fields.items()]


def jaxprompt(capsys, *argv: str) -> tuple[int, str, str]:
    """Runs a command in this process. -> (exit code, stdout, stderr)"""
    capsys.readouterr()
    code = main([str(word) for word in argv])
    return code, *capsys.readouterr()


def succeed(capsys, *argv: str) -> tuple[str, str]:
    """Runs a command that must succeed. Returns what it printed on stdout and stderr."""
    code, out, err = jaxprompt(capsys, *argv)
    assert code == 0, err
    return out, err


def train_and_export(capsys, folder: Path, run_config: Any) -> tuple[dict[str, Any], Path, str]:
    """Trains a config in a folder, and exports the run. -> result, workdir, what training said"""
    config, workdir = folder / "config.json", folder / "run"
    config.write_text(run_config.to_json())
    out, log = succeed(capsys, "train", f"--config={config}", f"--workdir={workdir}")
    succeed(capsys, "export", f"--workdir={workdir}")
    return json.loads(out), workdir, log


class Served(NamedTuple):
    """A run that was trained and exported."""

    result: dict[str, Any]
    workdir: Path
    rows: list[dict]  # the answers of the export to the test rows
    log: str  # what training said


def serve(capsys, folder: Path, config: Any, test: Path) -> Served:
    """Trains a config, exports it, and compares the answers of the run and of its export."""
    result, workdir, log = train_and_export(capsys, folder, config)
    return Served(result, workdir, compare_answers(capsys, workdir, test), log)


def compare_answers(capsys, workdir: Path, test: Path) -> list[dict]:
    """Answers the file of the test split by a run and by its export alone: they are the same.

    Returns the rows that the export answered.
    """
    written, place = workdir / "evaluated.jsonl", f"--workdir={workdir}"
    out, _ = succeed(capsys, "evaluate", place, "--split=test", f"--output={written}")
    document, result = json.loads(out), json.loads((workdir / "result.json").read_text())
    assert {name: document[name] for name in result["test"]} == pytest.approx(result["test"])
    rows, _ = predict(capsys, workdir, f"--input={test}")
    for row, expected in zip(rows, read_lines(written), strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            is_score = isinstance(value, float) or name == "scores"
            assert row[name] == (pytest.approx(value, abs=5e-6) if is_score else value), name
    return rows


def predict(capsys, workdir: Path, *words: str) -> tuple[list[dict], str]:
    """Predicts with the export of a run. Returns the rows and what was said."""
    out, err = succeed(capsys, "predict", f"--workdir={workdir}", *words)
    return [json.loads(line) for line in out.splitlines()], err


def accuracy(rows: list[dict]) -> float:
    """Tells which share of rows is answered right."""
    return float(np.mean([row["prediction"] == row["label"] for row in rows]))


def read_lines(path: Path) -> list[dict]:
    """Reads JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def losses(workdir: Path) -> list[float]:
    """Lists the loss of each step."""
    return [line["loss"] for line in read_lines(workdir / "metrics.jsonl") if "loss" in line]


def timeless(record: dict) -> dict:
    """Drops wall-clock values."""
    return {name: value for name, value in record.items() if name != "time"}


def split_scores(config: Any, workdir: Path, split: str = "dev") -> np.ndarray:
    """Scores a split with the best prompt of a workdir. -> [examples, C]"""
    from jaxprompt.build.task import eval_batches
    from jaxprompt.runs.restore import restore_run
    from jaxprompt.training.evaluation import compile_step, predict_scores
    from jaxprompt.training.steps import make_eval_step

    trained = restore_run(config, str(workdir), [split])
    (trainable, frozen, _), part = trained.weights, trained.splits[split]
    step = compile_step(trained.placement, make_eval_step(trained.scorer.model))
    batches = eval_batches(trained.scorer, part)
    return predict_scores(step, trainable, frozen, batches, len(part.labels))
