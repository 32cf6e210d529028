"""The tables and figures of P-tuning v2: the paper's numbers, and the runs behind each."""

import csv
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_paper_tables
from test_paper_tables import read_all, write_run

from configs import ptuning_v2
from configs.ptuning_v2 import multi_task, qa, superglue, tagging
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.errors import InputError
from launch.papers import core as paper
from launch.papers import ptuning_v2 as tables

ROOT = Path(__file__).resolve().parents[2]

SYSTEMS = {"full": "full", "pt": "pt", "prefix": "prefix", "multi_task_prefix": "multi_task"}
TASKS = {
    "conll2012": "conll12", "conll2005_wsj": "conll05", "conll2005_brown": "conll05_brown",
    "squad1.1": "squad", "squad2.0": "squad_v2",
}  # fmt: skip
KIND_OF = {task: kind for kind in (superglue, tagging, qa) for task in kind.TASKS}
KINDS = {"full": "none", "pt": "soft", "p_tuning": "p_tuning"}


arguments = functools.partial(
    test_paper_tables.arguments, paper="ptuning_v2", backbone="x", data="", shared="s", layers=24
)


def test_published_numbers_are_the_papers(shared):
    cells = json.loads((shared / "papers/ptuning_v2_tables.json").read_text())["cells"]
    ours = read_all("ptuning_v2")
    assert len(ours) == len(cells) == 224
    for line, cell in zip(ours, cells, strict=True):
        row = cell["row"]
        if cell["table"] != "table4":
            row = f"{tables.SYSTEMS[SYSTEMS[cell['method']]]}, {cell['model']}"
        task = TASKS.get(cell["task"], cell["task"])
        named = [line[name] for name in ("table", "row", "task", "backbone")]
        assert named == [cell["table"], row, task, cell["model"]]
        assert float(line["mean"]) == cell["mean"] and not line["std"]
        kind = {"em": "exact_match", "micro_f1": "", "f1": "f1"}.get(cell["metric"], cell["metric"])
        assert line["metric"].endswith(kind) and line["metric"] in tables.METRICS[task]


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_cell_has_its_runs(name):
    args = arguments()
    cells = paper.pick(tables.TABLES[name], args)
    printed = set(paper.read_published("ptuning_v2", name))
    printed = {(row, task, metric) for row, task, metric in printed if metric}
    shown = {(x.row, x.task, x.metric) for x in cells}
    beside = {key for key in shown if key[2] == "role_f1"}  # not the paper's
    apart = {key for key in shown if key[0].startswith("P-tuning, ")}  # in a column with another
    assert printed == (shown - beside - apart if printed else set())
    assert bool(apart) == (name in ("table2", "table3"))
    roles = {(x.row, x.task) for x in cells if x.task.startswith(("conll05", "conll12"))}
    assert beside == {(row, task, "role_f1") for row, task in roles}
    for cell in cells:
        runs = paper.list_runs(cell, args)
        config = paper.sweep.load_run_config(runs[0], ())
        task = cell.task.removesuffix("_brown")
        file, system, *_ = cell.method.split(",")
        paper.check_config(config)
        assert config.task.name == task and config.prompt.name == KINDS.get(system, "prefix")
        assert {run.changes["seed"] for run in runs} == {1, 2}
        task_kind = get_task(task).kind
        by_words = system in ("verbalizer", "pt", "p_tuning")  # figure 2a and table 1
        heads = {"tags": "tags", "spans": "spans"}  # section 3.1: no label words
        assert config.head.name == heads.get(task_kind, "verbalizer" if by_words else "linear")
        rates = {run.changes.get("optim.lr") for run in runs}
        released = (task, tables.BACKBONES[cell.backbone]) in KIND_OF.get(task, superglue).RELEASED
        released &= system not in ("pt", "p_tuning")  # what is released was chosen for prefixes
        if system == "full":
            assert rates == set(ptuning_v2.FULL_RATES) and len(runs) == 6
        elif file != "prompt_length":
            searched = ptuning_v2.P_TUNING_RATES if system == "p_tuning" else ptuning_v2.RATES
            assert rates == ({None} if released else set(searched))
        if file in ("superglue", "tagging", "qa") and system in ("pt", "p_tuning", "prefix"):
            assert len(runs) == (2 if released else 2 * 3 * 6)
        if system in ("pt", "p_tuning"):  # beside every length the text has the same room
            rooms = {
                run.changes["data.max_len"] - run.changes["prompt.length"] * (file != "tagging")
                for run in runs
            }
            room = {"superglue": 128, "qa": 384, "tagging": 512}[file]
            assert rooms == {room} and len(runs) == 2 * 3 * 6
        if system == "multi_task":
            # As the shared run has it: neither cut nor repeated, and its head goes on.
            kind = next(kind for kind, tasks in multi_task.KINDS.items() if task in tasks)
            shared = multi_task.get_config(f"{kind},{tables.BACKBONES[cell.backbone]}")
            assert config.prompt.get("init") == f"s/{task}" and config.train.init_head
            assert config.prompt.get("length") == shared.prompt.length
            assert all("prompt.length" not in run.changes for run in runs)
        shift = config.prompt.get("length") if config.prompt.name == "prefix" else 0
        bounded = cell.backbone in ("BERT-large", "RoBERTa-large")
        assert not bounded or config.data.max_len + shift <= 512


@pytest.mark.parametrize("task", superglue.TASKS)
def test_soft_tokens_stand_between_text_and_mask(task):
    """Section 3, [e(x), h0, ..., hi, e([MASK])]; words of section 4.3 for the tasks it names."""
    words = {"boolq": "false true", "rte": "true false", "cb": "true false neutral"}
    for system in ("pt", "p_tuning"):
        config = superglue.tune(task, system, "bert-large")
        assert config.task.template.endswith(" [soft] [mask]") and config.trainable == ()
        assert " ".join(config.task.words) == words.get(task, " ".join(config.task.words))
        assert (config.prompt.get("encoder") == "lstm") == (system == "p_tuning")  # table 1


def test_a_paper_s_bert_is_cased_on_superglue_alone():
    """The released scripts load the cased one there, and the uncased for tags and questions."""
    args = arguments(backbone="")
    for name, task, ending in (("table2", "rte", "-cased"), ("table3", "conll04", "-uncased")):
        (cell, *_) = (
            cell
            for cell in paper.pick(tables.TABLES[name], args)
            if cell.task == task and cell.backbone == "BERT-large" and ",prefix," in cell.method
        )
        assert paper.list_runs(cell, args)[0].changes["backbone.path"].endswith(ending)


def test_seeds_are_those_of_the_released_scripts():
    seeds_by_cell = {}
    for cell in paper.pick(tables.TABLES["table2"], arguments(backbone="", seeds="")):
        if ",prefix," in cell.method or cell.method.endswith(",prefix"):
            seeds = {r.changes["seed"] for r in paper.list_runs(cell, arguments(seeds=""))}
            seeds_by_cell[cell.task, cell.backbone] = seeds
    assert seeds_by_cell["copa", "BERT-large"] == seeds_by_cell["wsc", "RoBERTa-large"] == {44}
    assert seeds_by_cell["rte", "BERT-large"] == {11}
    assert {r.changes["seed"] for r in paper.list_runs(cell, arguments(seeds="3"))} == {3}


def test_settings_are_those_of_the_released_scripts():
    """Batch, learning rate, tokens, epochs, dropout and seed, script by script."""
    scripts = """
        boolq bert 32 5e-3 40 100 .1 11; boolq roberta 32 7e-3 8 100 .1 11;
        rte bert 32 1e-2 20 60 .1 11; rte roberta 32 5e-3 128 100 .1 11;
        copa bert 16 1e-2 16 80 .1 44; copa roberta 16 9e-3 8 120 .1 11;
        wic bert 16 1e-4 20 80 .1 44; wic roberta 32 1e-2 8 50 .1 11;
        wsc bert 16 5e-3 20 80 .1 44; wsc roberta 16 1e-2 8 10 .1 44;
        conll2003 roberta 16 3e-2 11 30 .1 11; conll04 bert 32 2e-2 128 40 .2 11;
        conll04 roberta 32 6e-2 144 80 .1 11; ontonotes5 bert 16 1e-2 16 30 .1 11;
        ontonotes5 roberta 16 7e-3 48 60 .1 14; conll05 roberta 16 6e-3 224 15 .1 11;
        conll12 bert 16 5e-3 128 45 .1 11; conll12 roberta 32 5e-3 64 45 .1 11;
        squad roberta 8 5e-3 16 30 .2 11; squad_v2 roberta 8 5e-3 8 10 .2 11
    """
    for line in scripts.split(";"):
        task, model, *numbers = line.split()
        config = KIND_OF[task].tune(task, model=f"{model}-large")
        settings = (
            config.data.batch,
            config.optim.lr,
            config.prompt.length,
            config.train.total_epochs,
            config.prompt.dropout,
        )
        assert (*settings, config.seed) == tuple(map(float, numbers)), line
        assert config.backbone.dropout == config.prompt.dropout
        hidden = 512 if (task, model) == ("wic", "bert") else 0
        assert config.prompt.hidden == hidden
    assert len(scripts.split(";")) == sum(len(x.RELEASED) for x in (superglue, tagging, qa))
    poolers = [superglue.tune("rte", model=model).head.pooler for model in ptuning_v2.MODELS]
    assert poolers == ["auto", "auto", "trained", "auto", "auto"]


def test_a_shared_prompt_is_of_its_backbone():
    folders = {"": set(), "x": set()}
    for backbone, prompts in folders.items():
        for cell in paper.pick(tables.TABLES["table3"], arguments(tasks="conll2003")):
            if cell.method.split(",")[1] == "multi_task":
                (first, *_) = paper.list_runs(cell, arguments(backbone=backbone))
                prompts.add(first.changes["prompt.init"])
    assert folders["x"] == {"s/conll2003"}
    assert folders[""] == {
        f"s/{model}/conll2003" for model in tables.BACKBONES.values() if "glm" not in model
    }


def test_layers_are_counted_from_either_end_and_shared_out(tmp_path):
    ranges = {}
    for layers in (24, 6):
        args = arguments(layers=layers)
        cells = paper.pick(tables.TABLES["figure3"], arguments(tasks="rte"))
        ranges[layers] = [paper.list_runs(x, args)[0].changes["prompt.layers"] for x in cells]
    assert ranges[24] == [
        "1-4", "1-8", "1-12", "1-16", "1-20", "1-24", "21-24", "17-24", "13-24", "9-24", "5-24",
        "1-24",
    ]  # fmt: skip
    assert ranges[6] == [
        "1-1", "1-2", "1-3", "1-4", "1-5", "1-6", "6-6", "5-6", "4-6", "3-6", "2-6", "1-6",
    ]  # fmt: skip
    with pytest.raises(InputError, match="--layers=7 must be a multiple of 6"):
        paper.main(["ptuning_v2", "figure3", "--layers=7", f"--workdir={tmp_path}"])


def test_rows_without_a_shared_prompt_say_so(tmp_path):
    words = [f"--workdir={tmp_path / 'new'}", f"--shared={tmp_path}", "--tasks=conll05_brown"]
    with pytest.raises(
        InputError, match=f"{tmp_path}/bert-large/conll05 does not exist; train configs"
    ):
        paper.main(["ptuning_v2", "table3", "--rows=Multi-task P-tuning v2, BERT-large", *words])


def test_a_length_that_is_given_is_not_searched(tmp_path, capsys):
    override = ("prompt.length", "4")
    for table, task in (("table4", "sst2"), ("table4", "rte"), ("table2", "cb")):
        for cell in paper.pick(tables.TABLES[table], arguments(tasks=task)):
            system = cell.method.split(",")[1]
            if system == "full":
                continue
            runs = paper.list_runs(cell, arguments(seeds="1"), [override])
            assert {run.changes["prompt.length"] for run in runs} == {"4"}
            assert len({run.changes.get("optim.lr") for run in runs}) == len(runs)
            # Soft tokens are among those of the input: the text keeps its room.
            room = 128 + 4 * (system in ("pt", "p_tuning"))
            assert {run.changes["data.max_len"] for run in runs} == {room}
    row = tmp_path / "prefix_CLS_and_linear_head-sst2,lr=0.005,seed=1"
    write_run(row, {"accuracy": 0.5}, {"accuracy": 0.6}, prompt={"length": 4})
    words = ["--print", "--tasks=sst2", "--seeds=1", "--config.prompt.length=4"]
    assert paper.main(["ptuning_v2", "table4", *words, f"--workdir={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert "60.0 ± 0.0" in output
    assert (
        "settings that differ from the paper (its values in brackets): prompt.length=4 (searched)"
        in output
    )


@pytest.mark.parametrize(
    "figure, axis, rows, line, points",
    [
        ("figure3", "depth", ("layers_1_8", "layers_17_24"), "layers 17-24",
         [("ascending", "8"), ("descending", "8")]),
        ("figure4", "length", ("embedding_length_8", "mlp_length_64"), "mlp, length 64",
         [("embedding", "8"), ("mlp", "64")]),
    ],
)  # fmt: skip
def test_both_curves_are_drawn(figure, axis, rows, line, points, tmp_path, capsys):
    """Over the layers with a prompt, or its length; the paper's numbers are in a picture alone."""
    for row, score in zip(rows, (0.6, 0.7), strict=True):
        rate = {"e": "lr=0.005,", "m": "lr=0.0001,"}.get(row[0], "")
        run = tmp_path / f"{row}-rte,{rate}seed=11"
        write_run(run, {"accuracy": 0.5}, {"accuracy": score})
    words = ["--print", "--tasks=rte", f"--workdir={tmp_path}"]
    assert paper.main(["ptuning_v2", figure, *words]) == 0
    captured = capsys.readouterr()
    shown = next(x for x in captured.out.splitlines() if x.startswith(f"| {line} |"))
    assert " 70.0 ± 0.0" in shown
    assert (tmp_path / f"{figure}.png").exists()
    assert "counts are ours" in captured.out and "[as published]" not in captured.out
    with open(tmp_path / f"{figure}.csv", newline="") as file:
        numbers = [line for line in csv.DictReader(file) if line["mean"]]
    assert [(x["method"], x[axis]) for x in numbers] == points


WIC = {"word": "place", "sentence1": "Put it in place.", "sentence2": "A nice place."}
WSC = {"text": "Ann said she won.", "span1_text": "Ann", "span2_text": "she"}


@pytest.mark.parametrize(
    "cell, fields, text",
    [
        ("wic,bert-large", WIC, "place: Put it in place. [sep] place: A nice place."),
        ("wic,roberta-large", WIC, "Put it in place. A nice place. "
         "Does place have the same meaning in both sentences?"),
        ("wsc,bert-large", WSC, "she: Ann said she won. [sep] Ann"),
        ("wsc,roberta-large", WSC, "she: Ann said she won. [sep] Ann"),
    ],
)  # fmt: skip
def test_words_in_two_sentences_and_pronouns_are_read_as_released(cell, fields, text):
    """Templates 1 and 0 of WiC and 0 of WSC in the released tasks/superglue/dataset.py."""
    task, model = cell.split(",")
    template = superglue.RELEASED[task, model].template or get_task(task).plain
    assert template.format(**fields) == text


def test_on_another_backbone_the_rows_of_one_model_run(capsys, tmp_path):
    words = ["--backbone=x", "--tasks=rte", f"--workdir={tmp_path}", "--estimate"]
    assert paper.main(["ptuning_v2", "table2", *words]) == 0
    message = capsys.readouterr().err
    assert "RoBERTa-large is left out: " in message


def test_layers_are_bound_to_a_workdir_and_told(tmp_path):
    (tmp_path / "table.json").write_text('{"paper": "ptuning_v2", "table": "figure3", "layers": 6}')
    with pytest.raises(InputError, match="--layers=6, not 24; "):
        paper.main(["ptuning_v2", "figure3", "--print", f"--workdir={tmp_path}"])
    args = SimpleNamespace(table="figure3", layers=6)
    assert tables.PAPER.about(args) == {"layers": 6}
    assert tables.PAPER.remarks(args)[1] == "--layers=6: layers in proportion, 1-2 for 1-8 of 24"
    assert len(tables.PAPER.remarks(SimpleNamespace(table="figure3", layers=24))) == 1
