"""The commands of README and the guides run as they stand, but for sizes, on tiny models."""

import gzip
import itertools
import json
import math
import shlex
import shutil
from pathlib import Path

import jax
import pytest
from test_guides import PAGES, ROOT, commands, page_id
from test_token_heads import asked, tagged
from tiny_pretrain import DOCUMENTS, UNITS, make_corpus
from tiny_run import TOPICS, flags, make_backbone, sentences, write_rows

from jaxprompt.__main__ import main
from jaxprompt.build.method import get_method
from jaxprompt.cli import options
from jaxprompt.config.load import load_config
from jaxprompt.corpus.ppt import Annotations
from jaxprompt.data.sources.files import read_file
from jaxprompt.data.text.tokenizer import load_tokenizer

GUIDES = {page_id(page): commands(page) for page in PAGES if commands(page)}

# How a command begins, and why it is not run.
SKIPPED = {
    "plan --config=base --config.prompt.name=prefix '--devices=1x v5e' --limit=64": (
        "simulates 64 devices, in a process of its own; tests/cli/test_plan.py plans codes"
    ),
    "plan --config=configs/ppt/t5_xxl.py": (
        "needs libtpu; tests/cli/test_plan.py has a stand-in for it"
    ),
    "plan --config=base --config.backbone.path=google/gemma-3-1b-pt": (
        "needs libtpu; tests/accelerators compiles such a step"
    ),
    **dict.fromkeys(
        (
            "plan --config=configs/ppt/t5_base.py '--devices=1x h100' --compiler=cuda",
            "plan --config=configs/ppt/t5_xl.py '--devices=8x A100-40' --limit=16 --compiler=cuda",
            "plan --config=configs/ppt/t5_xl.py --config.backbone.dtype=bfloat16",
            "plan --config=base --config.backbone.path=openai-community/gpt2-xl",
            "plan --config=base --config.backbone.path=google-bert/bert-large-uncased "
            "--config.backbone.dtype=bfloat16",
        ),
        "needs NVIDIA's compiler; tests/cli/test_plan.py",
    ),
    "train --config=configs/ppt/t5_xxl.py:boolq,pt --workdir=/shared/boolq --coordinator=": (
        "is for four hosts; tests/cli/test_device_runs.py trains in several processes"
    ),
    "export --workdir=runs/tickets --push=": (
        "writes to the hub; tests/convert/test_hub_prompts.py pushes to a stand-in"
    ),
    **dict.fromkeys(
        (
            "train --config=dart/relations:sem_eval_2010_task_8,8",
            "train --config=configs/dart/relations.py:sem_eval_2010_task_8,8,dart",
            "export --workdir=runs/semeval",
            "predict --workdir=runs/semeval",
            "validate --config=base:dart --config.backbone.path=google-bert/bert-base-uncased "
            "--config.task.name=sem_eval_2010_task_8",
        ),
        "its words are several subwords here; tests/cli/test_relation_runs.py trains relations",
    ),
    **dict.fromkeys(
        (
            "train --config=base:soft --workdir=runs/chats",
            "train --config=base:soft --workdir=runs/instructions",
            "train --config=base:prefix --workdir=runs/assistant",
            "export --workdir=runs/assistant",
            "predict --workdir=runs/assistant",
        ),
        "its texts are spelled by letters here; tests/cli/test_conversation_runs.py trains on some",
    ),
    **dict.fromkeys(
        (
            "train --config=base:prefix --workdir=runs/conll05",
            "export --workdir=runs/conll05",
            "predict --workdir=runs/conll05",
        ),
        "needs files of roles; tests/cli/test_role_runs.py trains on such",
    ),
    "train --config=configs/dpt/tasks.py:quoref,full,dpt": (
        "needs QUOREF's files; of the guide on DPT a command on such runs"
    ),
    "evaluate --config=base:zero_shot --split=test --config.data.source=DATA/trec": (
        "spells its template by letters here; a command of the guide on data shows examples"
    ),
    **dict.fromkeys(
        (
            "train --config=p_tuning/lama --workdir=runs/capitals",
            "export --workdir=runs/capitals",
            "evaluate --config=p_tuning/lama --split=test",
        ),
        "no country is a token here; tests/build/test_word_list.py reads such words",
    ),
    **dict.fromkeys(
        (
            "evaluate --config=configs/sums.py:zero_shot",
            "evaluate --config=configs/sums.py:four_shot",
            "sweep --config=configs/sums.py",
            "train --config=configs/sums.py",
        ),
        "its numbers are no words here; tests/cli/test_configs.py builds these configs",
    ),
    "lm_eval": "needs lm_eval; tests/api/test_lm_eval_runs.py runs it",
    **dict.fromkeys(
        (
            "router --prompt=tickets=",
            "predict --prompt=tickets=runs/tickets/export --prompt=topics=runs/topics-soft/export "
            "--route=auto",
        ),
        "its tasks have the same texts here; tests/api/test_routed_banks.py tells some apart",
    ),
    "predict --prompt=hub:": "reads from the hub; tests/convert/test_hub_prompts.py",
}


STEPS = 2
FAMILIES = {
    "bert": "bert",
    "roberta": "roberta",
    "t5": "t5",
    "electra": "discriminator",
    "llama": "llama",
}
NEW = 5  # rows of a file to label
POSITIONS = 64  # of the tiny models
SHORT = {
    "train.total_epochs": 0, "train.total_steps": STEPS, "train.total_examples": 0,
    "train.eval_epochs": 0, "train.eval_steps": 1, "train.save_steps": 0,
    "train.tracker": "none", "train.plot": False, "mesh.data": 1,
    "data.batch": 4, "data.eval_batch": 32, "generate.max_new_tokens": 4,
    "corpus.processes": 1, "corpus.held_out": 0.2, "corpus.dev_rows": 16,
}  # fmt: skip


def is_skipped(words):
    """Tells whether a command is one of SKIPPED."""
    return any(shlex.join(words).startswith(start) for start in SKIPPED)


def test_what_is_skipped_stands_in_a_guide():
    lines = [shlex.join(words) for words in itertools.chain(*GUIDES.values())]
    assert [s for s in SKIPPED if not any(line.startswith(s) for line in lines)] == []


# -- the reader's files ---------------------------------------------------------------------------


def draw(seed, size, *fields, **classes):
    """Draws rows of texts, and of a column `label=(...)` of classes that take turns."""
    texts = iter(sentences(seed, size * len(fields)))
    return [
        {field: next(texts)["text"] for field in fields}
        | {label: names[number % len(names)] for label, names in classes.items()}
        for number in range(size)
    ]


def write_splits(folder, make, train=66):
    folder.mkdir(parents=True)
    for seed, (split, size) in enumerate({"train": train, "dev": 12, "test": 12}.items()):
        write_rows(folder / f"{split}.jsonl", make(seed, size))


def renamed(seed, size):
    """Draws rows of words with three kinds of tags, the last without a scheme."""
    return [
        {"tokens": row["tokens"], "ner_tags": row["tags"], "chunk_tags": row["tags"],
         "pos_tags": ["X" if tag == "O" else "NN" for tag in row["tags"]]}
        for row in tagged(seed, size)
    ]  # fmt: skip


def as_entities(seed, size):
    """Draws rows of words with the tags of CoNLL-2003."""
    names = dict(zip(TOPICS, ("PER", "ORG", "LOC"), strict=True))
    return [
        {"tokens": row["tokens"], "ner_tags": [
            tag[:2] + names[tag[2:]] if tag != "O" else tag for tag in row["tags"]
        ]}
        for row in tagged(seed, size)
    ]  # fmt: skip


def gap_in(seed, size):
    """Draws passages with a gap, in the fields of ReCoRD."""
    return [
        {"query": "it was @placeholder .", "passage": row["text"], "idx": number}
        | {"entities": list(TOPICS), "answers": [row["label"]]}
        for number, row in enumerate(sentences(seed, size))
    ]


def caused(seed, size):
    """Draws choices, in the fields of COPA."""
    rows = draw(seed, size, "premise", "choice1", "choice2", label=(0, 1))
    return [row | {"question": "cause", "idx": number} for number, row in enumerate(rows)]


def answered(seed, size):
    """Draws three answers a question, in the fields of MultiRC."""
    rows = draw(seed, size, "paragraph", "question", "answer", label=(0, 1))
    for number, row in enumerate(rows):
        row |= {"paragraph": rows[number // 3 * 3]["paragraph"], "question": f"{number // 3}"}
        row["idx"] = {"paragraph": number // 3, "question": number // 3, "answer": number}
    return rows


def write_benchmarks(root):
    """Writes WSC and MNLI as they are downloaded."""
    (root / "WSC").mkdir()
    spans = {"span1_index": 0, "span2_index": 1}
    for seed, (split, size) in enumerate({"train": 24, "val": 8, "test": NEW}.items()):
        rows = []
        for number, sentence in enumerate(sentences(seed, size)):
            named = {f"span{i}_text": sentence["text"].split()[i - 1] for i in (1, 2)}
            rows.append({"text": sentence["text"], "idx": number, "target": {**spans, **named}})
            rows[-1] |= {} if split == "test" else {"label": bool(number % 2)}
        write_rows(root / f"WSC/{split}.jsonl", rows)
    (root / "MNLI").mkdir()
    for seed, (split, size) in enumerate({"train": 24, "dev_matched": 8}.items()):
        labels = itertools.cycle(("neutral", "entailment", "contradiction"))
        rows = draw(seed, size, "sentence1", "sentence2")
        lines = [f"{r['sentence1']}\t{r['sentence2']}\t{next(labels)}\n" for r in rows]
        (root / f"MNLI/{split}.tsv").write_text(
            "sentence1\tsentence2\tgold_label\n" + "".join(lines)
        )


@pytest.fixture(scope="session")
def backbones(tmp_path_factory):
    """Folders of tiny models, by family."""
    root = tmp_path_factory.mktemp("backbones")
    actual = {name: make_backbone(root / name, family) for name, family in FAMILIES.items()}
    whole = make_backbone(root / "whole", "bert", hidden_size=64, intermediate_size=64)
    return actual | {"whole": whole}


@pytest.fixture(scope="session")
def files(backbones, tmp_path_factory):
    """A folder with all that the commands name: data sets, texts, models. Copy it."""
    root = tmp_path_factory.mktemp("reader")
    (root / "docs").symlink_to(ROOT / "docs")
    ner = {"task.name": "custom", "task.fields": ["tokens"], "task.tags": "ner_tags"}
    ner |= {"head.name": "tags", "data.source": "ner/"}
    chunks = ner | {"task.tags": "chunk_tags"}
    speech = ner | {"task.tags": "pos_tags", "task.scheme": "none"}
    one = {"head.name": "spans", "head.stride": 8, "task.name": "squad", "data.source": "squad"}
    many = one | {"head.name": "multi_spans", "task.name": "quoref", "data.source": "quoref"}
    files = {"entities": ner, "chunks": chunks, "speech": speech}
    files |= {"squad": one, "quoref": many | {"head.layer": "linear"}}
    for name, text in files.items():
        (root / f"{name}.json").write_text(json.dumps(text))
    (root / "BoolQ").mkdir()
    asked_rows = draw(1, NEW, "question", "passage")
    write_rows(root / "BoolQ/test.jsonl", [r | {"idx": i} for i, r in enumerate(asked_rows)])
    data_sets = {
        "rte": lambda *at: draw(*at, "premise", "hypothesis", label=(0, 1)),
        "DATA/yahoo_answers_topics": lambda *at: draw(
            *at, "question_title", "question_content", "best_answer", topic=range(10)
        ),
        **dict.fromkeys(
            ("boolq", "DATA/boolq"),
            lambda *at: draw(*at, "question", "passage", label=(0, 1)),
        ),
        "ner": renamed,
        "squad": asked,
        "quoref": asked,
        "P36": lambda *at: draw(*at, "sub_label", obj_label=("beast", "food", "tool")),
        "DATA/sst2": lambda *at: draw(*at, "sentence", label=(0, 1)),
        "DATA/trec": lambda *at: draw(*at, "text", coarse_label=range(6)),
        "DATA/mpqa": lambda *at: draw(*at, "text", label=(0, 1)),
        # What `launch/accuracy examples` writes.
        "runs/probe/nsp": lambda *at: draw(*at, "text", label=range(3)),
        "DATA/rte": lambda *at: draw(*at, "premise", "hypothesis", label=(0, 1)),
        "DATA/sst5": lambda *at: draw(*at, "text", label=range(5)),
        "DATA/copa": caused,
        "DATA/multirc": answered,
        "DATA/record": gap_in,
        "DATA/conll2003": as_entities,
        "DATA/squad": asked,
    }
    for name, make in data_sets.items():
        # Of six classes 16 examples each to train on, and as many for dev.
        write_splits(root / name, make, 192 if name == "DATA/trec" else 66)
    write_benchmarks(root)
    (root / "common_vocab_cased.txt").write_text("beast\nfood\ntool\n")
    rows = {"seed": 13, "train": list(range(12)), "dev": list(range(12, 24))}
    for name in ("trec", "sst2"):
        with gzip.open(root / f"DATA/{name}/kshot_16.jsonl.gz", "wt") as file:
            file.write(json.dumps(rows) + "\n")
    for name in ("BOOKS", "texts"):
        make_corpus(root / name)
    (root / "MLM").symlink_to(backbones["bert"])
    return root


# -- commands -------------------------------------------------------------------------------------


def config_of(words):
    """Loads the config of a command with the fields that it gives; None where it names none."""
    args, overrides = options.Parser("", "").read(
        [word for word in words if word.startswith(("--config=", "--config."))]
    )
    return args.config and load_config(args.config, overrides)


def flag(words, name):
    """Gives the value of a flag; "" where it is absent."""
    return next((word.split("=", 1)[1] for word in words if word.startswith(f"--{name}=")), "")


def shrink(words, backbones):
    """Makes a command's run small: short, on a tiny model of the family that it names."""
    if words[0] == "plan":
        return words if flag(words, "limit") else [*words, f"--limit={jax.device_count()}"]
    config = config_of(words)
    if config is None:
        return words
    fields = dict(SHORT)
    if not Path(config.backbone.path).exists():
        name = config.backbone.path.lower()
        family = next(
            (name_part for name_part in ("roberta", "t5", "electra") if name_part in name), "bert"
        )
        # Its words are more subwords of the tiny RoBERTa than rows.
        if config.prompt.name == "dart":
            family = "bert"
        if config.backbone.quantize != "none":  # needs sizes that blocks divide
            family = "whole"
        if "smollm" in name and (
            config.head.name == "text" or flag(words, "config") == "quickstart_lm"
        ):
            family, fields["backbone.quantize"] = "llama", "none"  # writes texts
        fields["backbone.path"] = backbones[family]
    length = config.prompt.get("length", 0)
    if length > 20:
        fields["prompt.length"] = length = 8
    if config.prompt.get("layers"):
        fields["prompt.layers"] = "2-2"  # of the two that there are
    shift = get_method(config).position_shift()
    room = POSITIONS - (length if config.prompt.name == "prefix" else shift)
    fields |= {"data.max_len": room, "data.multiple": room}
    if config.data.protocol.name == "holdout":
        fields["data.protocol.size"] = 12
    if not config.data.source and Path(config.task.name).is_dir():
        fields["data.source"] = config.task.name
    if config.data.protocol.name == "fraction":
        fields["data.protocol.ratio"] = 2
    if config.demos.encoder:
        fields["demos.encoder"] = backbones["bert"]
    if config.demos.exact:
        fields |= {"demos.exact": 2, "demos.max_demo_tokens": 8, "demos.max_example_tokens": 8}
    if getattr(config.optim.schedule, "warmup_steps", 0):
        fields["optim.schedule.warmup_steps"] = 1
    if config.ppt.thresholds:
        fields["ppt.thresholds"] = (0, 0, 0, 0, 0)
    if "stride" in config.head.fields:
        fields["head.stride"] = 8
    fields |= {f"runs.{name}": getattr(config.runs, name)[:2] for name in ("seeds", "lr")}
    taken = tuple(f"--config.{name}=" for name in fields)
    return [*(word for word in words if not word.startswith(taken)), *flags(fields)]


def check_run(words, out):
    folder = Path(flag(words, "workdir"))
    axes = config_of(words).runs.to_dict().values()
    lists = [values for values in axes if isinstance(values, tuple)]
    runs = math.prod(max(len(values), 1) for values in lists)
    results = [json.loads(path.read_text()) for path in folder.rglob("result.json")]
    assert len(results) == runs and all(result["steps"] == STEPS for result in results)
    if words[0] == "adapt":
        assert (folder / "backbone/model.safetensors").exists()


# Four methods with three seeds; two models on 41 relations.
SWEEPS = {"configs/quickstart.py": 12, "p_tuning/lama": 82}


def check_sweep(words, out):
    folder = flag(words, "workdir")
    if folder and "--table" not in words:
        listed = out.count("python -m jaxprompt train")
        results = list(Path(folder).rglob("result.json"))
        runs = SWEEPS[flag(words, "config")]
        assert (listed, len(results)) == ((0, runs) if "--run" in words else (runs, 0))
    elif flag(words, "best"):  # of two runs there are no best three
        assert out.startswith("| method ") and len(out.splitlines()) == 3
    else:
        methods = ("prefix", "soft", "head_only", "full") if folder else ("prefix", "soft")
        assert all(f"\n| {method} " in out for method in methods)


KINDS = ("output", "peft", "npy", "stablehlo")


def check_export(words, out):
    sizes = json.loads(out)
    assert len(sizes) >= 2 and sizes == {path: Path(path).stat().st_size for path in sizes}
    for place in filter(None, (flag(words, name) for name in KINDS)):
        assert any(path.startswith(place) for path in sizes)


def check_predict(words, out):
    path = flag(words, "output")
    if path and path.endswith("/"):  # the file has the benchmark's name for it
        (path,) = Path(path).iterdir()
    rows = [json.loads(line) for line in (Path(path).read_text() if path else out).splitlines()]
    if flag(words, "format"):
        assert [set(row) for row in rows] == [{"idx", "label"}] * NEW
        return
    count = len(read_file(flag(words, "input"))) if flag(words, "input") else 1
    assert len(rows) == count
    assert all({"prediction", "generated"} & set(row) for row in rows)


def check_evaluate(words, out):
    scores = json.loads(out)
    if flag(words, "column"):  # of a bank, by prompt
        assert scores and all(0 <= run_scores["accuracy"] <= 1 for run_scores in scores.values())
        return
    metric = "hit_at_1" if flag(words, "config") == "p_tuning/lama" else "accuracy"
    assert scores["split"] == flag(words, "split") and 0 <= scores[metric] <= 1


def check_annotate(words, out):
    units = json.loads(out)["units"]
    assert units == len(Annotations(flag(words, "output"))) > 0
    if flag(words, "config.corpus.path") == "BOOKS":
        assert units == UNITS * DOCUMENTS


def check_tokenizer(words, out):
    assert len(load_tokenizer(flag(words, "output"))) > 100


def check_convert(words, out):
    assert {"config.json", "model.safetensors"} <= {
        p.name for p in Path(flag(words, "output")).iterdir()
    }


def check_plan(words, out):
    assert all(line in out for line in ("as configured", "fits", "one step", "fastest, 1x"))


def check_printed(words, out):
    assert out.strip()


PROMISES = {
    "train": check_run, "pretrain": check_run, "adapt": check_run, "sweep": check_sweep,
    "export": check_export, "predict": check_predict, "evaluate": check_evaluate,
    "annotate": check_annotate, "tokenizer": check_tokenizer, "plan": check_plan,
    "convert": check_convert,
}  # fmt: skip


def refuse(*address, **_):
    """Stands in for the look-up of an address: no command leaves this machine."""
    raise OSError(f"{address} is outside of the tests; put the command into SKIPPED")


@pytest.mark.default_cases("quickstart")
@pytest.mark.parametrize("page", GUIDES)
def test_commands_run(page, files, backbones, tmp_path, monkeypatch, capsys):
    """Each ends with 0 and leaves what it promises."""
    here = shutil.copytree(files, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    for words in GUIDES[page]:
        if is_skipped(words):
            continue
        words = shrink(words, backbones)
        capsys.readouterr()
        code = main(words)
        out, err = capsys.readouterr()
        assert code == 0, f"{shlex.join(words)}\n{err}"
        PROMISES.get(words[0], check_printed)(words, out)
