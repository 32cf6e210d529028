"""Damaged and hostile files of every kind end in success, or in one line and exit code 2."""

import gzip
import io
import json

import numpy as np
import pyarrow.parquet
import pytest
from exports import make_metadata
from fuzz import (
    SEED,
    TEXTS,
    VALUES,
    depth,
    dump,
    leaves,
    mutated,
    replaced,
    sample,
    survive,
    write,
)
from safetensors.numpy import save_file
from tiny import CONFIGS, MODEL_HEADS

from jaxprompt.build.backbone import open_backbone
from jaxprompt.build.new_backbone import open_untrained
from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.cli import results, show
from jaxprompt.config.load import load_config
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert.artifact import import_npy, write_artifact, write_npy
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.peft import read_peft, write_peft
from jaxprompt.convert.shapes import (
    axis_sizes,
    file_names,
    file_shape,
    get_family,
    num_copies,
    select_tensors,
)
from jaxprompt.corpus.read import DOCUMENTS, DocumentSource, TextSettings
from jaxprompt.data.sources.digest import SplitRecord
from jaxprompt.data.sources.files import read_file
from jaxprompt.data.tasks.readers.candidates import expand_rows
from jaxprompt.data.tasks.readers.reading import read_example, with_labels
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.data.tasks.task import Task
from jaxprompt.files import add_checksum
from jaxprompt.training import run_folder
from jaxprompt.training.run_record import BackboneRecord, TaskRecord
from jaxprompt.training.run_result import RunResult

COUNTS = {"config": 900, "mutated": 150, "header": 250, "torch": 60, "npy": 400, "peft": 250}
COUNTS |= {"data": 900, "corpus": 200, "records": 190}
FILE = "model.safetensors"


@pytest.fixture
def rng():
    """Draws the same in every run."""
    return np.random.default_rng(SEED)


# -- backbones ------------------------------------------------------------------------------------


def full_config(family: str) -> dict:
    """Gives every field of a family's transformers config, of a tiny model."""
    import transformers

    if family == "glm":  # transformers' own GLM is a later model
        return CONFIGS[family]
    names = {
        "bert": "Bert", "roberta": "Roberta", "electra": "Electra", "gpt2": "GPT2", "t5": "T5",
        "deberta": "Deberta", "deberta_v2": "DebertaV2", "albert": "Albert",
        "modernbert": "ModernBert", "llama": "Llama", "distilbert": "DistilBert", "bart": "Bart",
        "mpnet": "MPNet", "xlm_roberta_xl": "XLMRobertaXL", "eurobert": "EuroBert",
        "gpt_neox": "GPTNeoX", "opt": "OPT", "t5gemma": "T5Gemma",
    }  # fmt: skip
    hf = getattr(transformers, f"{names[family]}Config")(**CONFIGS[family]).to_dict()
    return hf | {"decoder_start_token_id": 0} if family == "t5" else hf


def make_tensors(family: str, hf: dict) -> dict[str, np.ndarray]:
    """Draws the tensors of a checkpoint, by the names of its file."""
    rng, table = np.random.default_rng(0), get_family(family)
    sizes, heads = axis_sizes(hf, table), MODEL_HEADS.get(family, ("pooler", "mlm"))
    wanted = select_tensors(table, hf, sizes, heads, tied=hf.get("tie_word_embeddings", True))
    tensors = {}
    for tensor in wanted:
        for i in range(num_copies(tensor, sizes)):
            values = rng.normal(size=file_shape(tensor, sizes)).astype(np.float32)
            tensors[file_names(tensor, i, table.prefix)[-1]] = values
    return tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, with weights."""
    root = tmp_path_factory.mktemp("backbones")
    for family in CONFIGS:
        (root / family).mkdir()
        hf = full_config(family)
        write(root / family / "config.json", json.dumps(hf))
        save_file(make_tensors(family, hf), root / family / FILE)
    return root


def test_a_config_json_of_any_content(folders, tmp_path, rng, monkeypatch):
    fields = [(family, name) for family in CONFIGS for name in full_config(family)]
    config, ends = tmp_path / "config.json", set()
    for (family, name), value in sample(rng, fields, VALUES, count=COUNTS["config"]):
        hf = dump(full_config(family) | {name: value})
        write(config, hf)
        (tmp_path / FILE).unlink(missing_ok=True)
        (tmp_path / FILE).symlink_to(folders / family / FILE)
        open_it = lambda: open_backbone(BackboneConfig(path=str(tmp_path)))
        ends.add(survive(monkeypatch, (family, name, value), open_it))
        if name == "model_type" or rng.random() < 0.1:
            start = lambda: open_untrained(BackboneConfig(init=str(config)), ("lm",))
            survive(monkeypatch, (family, name, value, "init"), start)
    assert ends == {0, 2}
    whole = json.dumps(full_config("bert")).encode()
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).symlink_to(folders / "bert" / FILE)
    for _ in range(COUNTS["mutated"]):
        write(config, text := mutated(whole, rng))
        survive(monkeypatch, text, open_backbone, BackboneConfig(path=str(tmp_path)))


@pytest.mark.long_cases("albert", "bart", "deberta", "distilbert", "modernbert")
@pytest.mark.parametrize("family", CONFIGS)
def test_damaged_weights(folders, tmp_path, rng, monkeypatch, family):
    hf, whole = full_config(family), (folders / family / FILE).read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    load = lambda: load_backbone(tmp_path, family, hf)
    for i in range(COUNTS["header"] // len(CONFIGS)):
        if i % 3:
            data = mutated(whole[:head], rng) + whole[head:]
        elif i % 2:  # the length that the header says it has
            text = mutated(whole[8:head], rng)
            data = len(text).to_bytes(8, "little") + text + whole[head:]
        else:
            data = whole[: int(rng.integers(0, len(whole)))]
        write(tmp_path / FILE, data)
        survive(monkeypatch, data[: head + 100], load)


@pytest.mark.long
def test_a_config_that_does_not_belong_to_the_weights(folders, tmp_path, rng, monkeypatch):
    for family in CONFIGS:
        fields, numbers = list(full_config(family)), [1, 2, 3, 8, 53, 1000, 10**6, 2**31 - 1]
        for name, value in sample(rng, fields, [*numbers, *VALUES], count=30):
            hf = full_config(family) | {name: value}
            load = lambda f=family, c=hf: load_backbone(folders / f, f, c)
            survive(monkeypatch, (family, name, value), load)


def test_a_damaged_torch_file(tmp_path, rng, monkeypatch):
    torch = pytest.importorskip("torch")

    hf = full_config("gpt2")
    state = {n: torch.from_numpy(t) for n, t in make_tensors("gpt2", hf).items()}
    for zipped in (True, False):
        path = tmp_path / "pytorch_model.bin"
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        whole = path.read_bytes()
        for _ in range(COUNTS["torch"] // 2):
            path.unlink()
            write(path, data := mutated(whole, rng))
            survive(monkeypatch, data[:300], load_backbone, tmp_path, "gpt2", hf)


# -- prompts --------------------------------------------------------------------------------------


def test_a_damaged_npy(tmp_path, rng, monkeypatch):
    path = tmp_path / "prompt.npy"
    write_npy(path, rng.normal(size=(3, 8)))
    whole, ends = path.read_bytes(), set()
    end = whole.index(b"\n")
    shapes = ["(1000000000000, 8)", "(3, 99999999999999999999)", "(-3, 8)", "(3.0, 8)", "(True, 8)"]
    shapes += ["('3', 8)", "[3, 8]", "3", "(" * 500, "-" * 5000 + "3", "(3, 8", "((3, 8), 1)", "()"]
    kinds = ["|O", "<f8", ">f4", "<c8", "<U9999999999", "|V0", "<M8[s]", "", "f4, f4", "<f2"]
    headers = [f"{{'descr': '<f4', 'fortran_order': False, 'shape': {x}, }}" for x in shapes]
    headers += [f"{{'descr': '{x}', 'fortran_order': False, 'shape': (3, 8), }}" for x in kinds]
    headers += ["{'descr': [('a', '<f4')], 'fortran_order': 1, 'shape': (3, 8), }", "{}", "[]", ""]
    files = [text.encode() + b"\n" for text in headers]
    files = [whole[:8] + len(x).to_bytes(2, "little") + x + whole[end + 1 :] for x in files]
    files += [mutated(whole, rng) for _ in range(COUNTS["npy"])]
    for data in files:
        write(path, data)
        ends.add(survive(monkeypatch, data, import_npy, path, 8))
    assert ends == {0, 2}


def test_a_damaged_adapter(tmp_path, rng, monkeypatch):
    sizes = dict(base="x", layers=2, heads=2)
    k = rng.normal(size=(2, 3, 2, 4)).astype("f4")
    folders = [tmp_path / "prefix", tmp_path / "soft"]
    write_peft(folders[0], prefix=(k, k), **sizes)
    write_peft(folders[1], soft=k[0].reshape(3, -1), **sizes)
    names = list(json.loads((folders[0] / "adapter_config.json").read_text()))
    for folder, name, value in sample(rng, folders, names, VALUES, count=COUNTS["peft"]):
        config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        before = config.read_bytes(), tensors.read_bytes()
        write(config, dump(json.loads(before[0]) | {name: value}))
        survive(monkeypatch, (folder.name, name, value), read_peft, folder)
        write(config, before[0])
        write(tensors, data := mutated(before[1], rng))
        survive(monkeypatch, data, read_peft, folder)
        write(tensors, before[1])
    for array in (
        np.zeros(3, "f4"),
        np.zeros((), "f4"),
        np.zeros((3, 8), bool),
    ):
        save_file({"prompt_embeddings": array}, folders[1] / "adapter_model.safetensors")
        survive(monkeypatch, array, read_peft, folders[1])


# -- records --------------------------------------------------------------------------------------

TASK = Task("topics", ("text",), labels=("a", "b"), words=(("a",), ("b", "c")))
RECORD = TaskRecord(
    task=TASK, choices=1, splits={"train": SplitRecord(3, {"a": 1, "b": 2}, "x")},
    identity={"tokenizer": "t"}, template="{text}", backbone=BackboneRecord("bert", "f"),
)  # fmt: skip
RESULT = RunResult(
    method="prefix", seed=0, trained=10, total=1000, steps=3, best_step=2,
    dev={"accuracy": 0.5}, test={"accuracy": 0.25}, time={"seconds": 3.0},
)  # fmt: skip
METRICS = {"step": 2, "loss": 1.5, "dev": {"accuracy": 0.5}, "time": {"seconds": 1.0}}


def read_records(folder) -> None:
    """Reads the files of a run, and its export."""
    read_export(str(folder / "export"))
    show.format_run(folder)
    results.print_table(results.read_folder(folder), {})


def test_damaged_records(tmp_path, rng, monkeypatch):
    config = load_config("base", [("backbone.path", "x")])
    write(tmp_path / "config.json", config.to_json())
    run_folder.write_record(tmp_path, RECORD)
    run_folder.write_result(tmp_path, RESULT)
    write(tmp_path / "metrics.jsonl", json.dumps(METRICS) + "\n")
    write_artifact(tmp_path / "export", {"head/bias": np.zeros(2)}, make_metadata())
    assert survive(monkeypatch, "undamaged", read_records, tmp_path) == 0
    names = ["record.json", "result.json", "metrics.jsonl", "export/prompt.json"]
    whole, ends = {name: (tmp_path / name).read_bytes() for name in names}, set()
    fields = [(name, path) for name in names for path in leaves(json.loads(whole[name]))]
    for (name, path), value in sample(rng, fields, VALUES, count=COUNTS["records"]):
        changed = replaced(json.loads(whole[name]), path, value)
        if "checksum" in changed and depth(changed) < 400:
            changed = add_checksum(changed)
        is_cut = rng.random() < 0.2
        write(
            tmp_path / name, data := mutated(whole[name], rng) if is_cut else dump(changed) + "\n"
        )
        ends.add(survive(monkeypatch, (name, path, data), read_records, tmp_path))
        write(tmp_path / name, whole[name])
    assert ends == {0, 2}


# -- rows -----------------------------------------------------------------------------------------

ROWS = [{"text": f"a b {i}, é", "kind": "xy"[i % 2], "of": ["u", "v"]} for i in range(4)]
FILES = {
    "x.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "x.json": json.dumps(ROWS),
    "x.csv": 'text,kind,of\n"a ""b"", c",x,1\n"d\ne",y,2\n',
    "x.tsv": 'text\tkind\tof\na "b\tx\t1\nd\ty\t2\n',
    "x.txt": "1 a b ||| B-A0 B-V\n0 c d ||| B-V O\n",
    "x.conll": "a - (A0*\nb - *)\nc see (V*)\n\nd be (V*)\n",
}
TASKS = [
    custom_task(fields=["text"], label="kind"), custom_task(fields=["text", "of"], label="kind"),
    custom_task(fields=["text"], target="of"),
    custom_task(fields=["text"], label="kind", choices=["of"]),
    custom_task(fields=["tokens"], tags="tags", predicate="predicate"),
]  # fmt: skip


def read_all(path, task) -> None:
    """Reads a file as examples of a task."""
    rows = expand_rows(task, read_file(path))
    task = with_labels(task, rows)
    for i, row in enumerate(rows):
        read_example(task, row, rows.origin(i))


def test_damaged_rows(tmp_path, rng, monkeypatch):
    ends = set()
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    whole = {name: text.encode() for name, text in FILES.items()} | {"x.parquet": table.getvalue()}
    for name, task in sample(rng, list(whole), TASKS, count=COUNTS["data"]):
        data = mutated(whole[name], rng)
        pack = rng.random() < 0.2
        path = tmp_path / f"{name}.gz" if pack else tmp_path / name
        data = gzip.compress(data, 1, mtime=0) if pack else data
        write(path, mutated(data, rng) if pack and rng.random() < 0.5 else data)
        ends.add(survive(monkeypatch, data, read_all, path, task))
    assert ends == {0, 2}


def test_rows_of_any_value(tmp_path, rng, monkeypatch):
    path = tmp_path / "x.jsonl"
    names, values = list(ROWS[0]), [*VALUES, *TEXTS]
    for task, name, value in sample(rng, TASKS, names, values, count=COUNTS["data"] // 2):
        rows = [*ROWS[1:], ROWS[0] | {name: value}]
        write(path, "".join(dump(row) + "\n" for row in rows))
        survive(monkeypatch, (task, name, value), read_all, path, task)


def read_documents(path, documents, on_error) -> None:
    """Reads a file as running text."""
    list(DocumentSource(str(path), TextSettings(documents=documents, on_error=on_error)))


def test_a_damaged_corpus(tmp_path, rng, monkeypatch):
    places = [(name, how) for name in ("x.jsonl", "x.txt") for how in DOCUMENTS]
    for (name, how), on_error in sample(rng, places, ["raise", "skip"], count=COUNTS["corpus"]):
        path = write(tmp_path / name, data := mutated(FILES["x.jsonl"].encode(), rng))
        survive(monkeypatch, (name, how, data), read_documents, path, how, on_error)
