"""The tables and figures of a paper as commands, on written run directories."""

import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs import ipt
from configs.ipt import utilization
from configs.parts import ppt
from jaxprompt.config.load import load_config
from jaxprompt.config.run import Fraction, KFold, KShot, Linear
from jaxprompt.data.text.tokenizer import encode_texts
from jaxprompt.errors import InputError
from jaxprompt.scoring.metrics import METRICS, SPAN_METRICS
from launch.papers import core as paper
from launch.papers import dart as paper_dart
from launch.papers import dpt as paper_dpt
from launch.papers import figures as paper_figures
from launch.papers import ipt as paper_ipt
from launch.papers import ppt as paper_ppt
from launch.papers.table import read_published

ROOT = Path(__file__).resolve().parents[2]

SEEDS, RATES = (10, 20), ("0.01", "0.1")


def write_run(folder, dev, test, **blocks):
    """Writes what a finished run leaves; `blocks` are of the config."""
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"best_step": 1, "dev": dev, "test": test}))
    (folder / "config.json").write_text(json.dumps({"backbone": {"path": "mine"}} | blocks))


def finish(folder, name, backbone, score, *, kind="accuracy", **blocks):
    """Writes what finished runs of a cell leave: of each seed the second learning rate is chosen.

    The second seed scores 0.1 less than the first. `blocks` are of the config.
    """
    blocks = {"backbone": {"path": backbone}} | blocks
    for less, seed in enumerate(SEEDS):
        for rate, dev, test in ((RATES[0], 0.2, 0.99), (RATES[1], 0.3, score - less / 10)):
            run = folder / f"{name},lr={rate},seed={seed}"
            write_run(run, {kind: dev}, {kind: test}, **blocks)


@pytest.fixture
def call(tmp_path, capsys):
    """Makes (table, words) -> what the command prints of the runs in tmp_path."""

    def run(table, *words):
        flags = ["--print", f"--seeds={','.join(map(str, SEEDS))}"]
        flags += [f"--learning-rates={','.join(RATES)}", f"--workdir={tmp_path}"]
        assert paper.main(["ppt", table, *flags, *words]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def figures(monkeypatch):
    """Collects the figures that are written."""
    written, write = [], paper_figures.write

    def keep_and_write(path, figure, points, axis):
        written.append(figure)
        return write(path, figure, points, axis)

    monkeypatch.setattr(paper_figures, "write", keep_and_write)
    return written


def arguments(**changes):
    """Returns the arguments of a command line."""
    defaults = dict(
        paper="ppt", workdir="w", backbone="", adapted="", prompts="p", data="d", kind="t5",
        learning_rates="", seeds="1,2", tasks="", rows="", topics="t", ppt="p/nsp",
    )  # fmt: skip
    return SimpleNamespace(**defaults | changes)


# -- PPT -----------------------------------------------------------------------------------------


def read_all(name):
    """Reads the published numbers of a paper as the product has them, in their order."""
    with open(ROOT / f"launch/papers/published/{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_published_numbers_are_the_papers(shared):
    """Cell by cell; only the largest model's row of full tuning has a shorter name here."""
    theirs = json.loads((shared / "papers/ppt_tables.json").read_text())["cells"]
    ours = read_all("ppt")
    assert len(ours) == len(theirs) == 191
    for line, cell in zip(ours, theirs, strict=True):
        row = cell["row"].replace(" | ", " ")
        assert line["row"] == ("full" if row in ("full T5-XXL", "full CPM-2") else row)
        assert [line[name] for name in ("table", "task", "metric")] == [
            cell[name] for name in ("table", "task", "metric")
        ]
        assert (float(line["mean"]), float(line["std"])) == (cell["mean"], cell["std"])
        assert line["backbone"] == cell["model"].removesuffix(" (implied)")


def test_tables_have_exactly_the_published_cells():
    backbones = {}
    for name, table in paper_ppt.TABLES.items():
        for cell in () if table.draw else table.cells(table.tasks):
            key = (name.removesuffix("_chinese"), cell.row, cell.task)
            assert key not in backbones
            backbones[key] = "T5-XXL" if cell.backbone == paper_ppt.ADAPTED else cell.backbone
    published = {tuple(line[x] for x in ("table", "row", "task")): line for line in read_all("ppt")}
    assert backbones == {key: line["backbone"] for key, line in published.items()}


def test_the_first_word_of_table_1_stands_for_positive():
    cells = {cell.row: cell for cell in paper_ppt.table1(["sst2"])}
    words = {row: cell.changes.get("task.words") for row, cell in cells.items()}
    assert words["man1 bad/good"] == "good,bad" and words["man1 dog/cat"] == "cat,dog"
    assert words["man1 good/bad"] is None and ppt.TASKS["sst2"].words == ("bad", "good")
    assert "task.template" not in cells["none good/bad"].changes
    templates = {cells[f"man1 {pair}"].changes["task.template"] for pair in paper_ppt.LABEL_WORDS}
    assert templates == {"{sentence}. It was [mask]."}  # table 1: "s. It was <X>."


TABLES = [*((name, "t5") for name in paper_ppt.TABLES), ("table4", "masked-deep")]


@pytest.mark.long_cases("table4-*", "table4_chinese-t5")
@pytest.mark.parametrize(("name", "kind"), TABLES)
def test_every_cell_has_its_runs(name, kind):
    """Each loads, and no two are one run."""
    args = arguments(kind=kind, adapted="y", backbone="x")
    runs = [
        (cell, paper.list_runs(cell, args)) for cell in paper.pick(paper_ppt.TABLES[name], args)
    ]
    flat = [run for _, cell_runs in runs for run in cell_runs]
    assert len({run.workdir for run in flat}) == len(flat) >= 2 * 4 * 2
    for cell, cell_runs in runs:
        config = paper.sweep.load_run_config(cell_runs[0], ())
        assert config.data.source == f"d/{cell.task}"
        method = "prefix" if kind == "masked-deep" else "soft"
        assert config.prompt.name == ("none" if cell.method == "full" else method)
        assert config.backbone.path == ("y" if cell.method == "lm_adapt" else "x")
        if cell.method.endswith("ppt"):
            folder = "p/zh/" if paper_ppt.is_chinese(cell.task) else "p/"
            last = "unified" if "unified" in cell.method else ppt.TASKS[cell.task].group
            assert config.prompt.get("init") == folder + last
        if name == "figure4":
            assert config.data.protocol.n == int(cell.row.split(", ")[1].split()[0])


def test_full_tuning_searches_the_learning_rates_of_its_size(shared):
    rates = json.loads((shared / "papers/ppt_tables.json").read_text())["settings"]
    for table in ("table4", "table4_chinese"):
        for cell in paper.pick(paper_ppt.TABLES[table], arguments()):
            runs = paper.list_runs(cell, arguments())
            size = paper_ppt.HUB[cell.backbone].rpartition("-")[2]
            is_full = cell.method == "full"
            expected = rates["full_rates_by_size"][size] if is_full else rates["pt_rates"]
            assert sorted({run.changes["optim.lr"] for run in runs}) == expected


# Released scripts/TASK/full/{ft,pt}_full.sh: epochs, BATCH_SIZE, GRAD_ACC. On 8 GPUs with 4 for a
# copy of the model a step has BATCH_SIZE x GRAD_ACC x 2 examples.
SCRIPTS = {
    "full": "sst2 1 8 1; sst5 5 8 1; boolq 5 4 2; rte 10 4 1; cb 20 8 1; race_middle 5 4 2; "
    "race_high 2 4 2",
    "pt": "sst2 1 16 1; sst5 5 16 1; boolq 5 8 1; rte 20 8 1; cb 30 16 1; race_middle 5 16 1; "
    "race_high 5 16 1",
}


@pytest.mark.parametrize("method", SCRIPTS)
def test_all_examples_are_trained_on_as_released(method):
    expected = {}
    for line in SCRIPTS[method].split(";"):
        task, *numbers = line.split()
        epochs, batch, accumulated = map(int, numbers)
        expected[task] = (epochs, 2 * batch * accumulated)
    settings, backbones = {}, {}
    for cell in paper.pick(paper_ppt.TABLES["figure2"], arguments()):
        config = paper.sweep.load_run_config(paper.list_runs(cell, arguments())[0], ())
        backbones[cell.task] = (cell.backbone, config.backbone.dtype)
        if cell.row == f"{method}, all examples":
            assert config.data.protocol == Fraction(ratio=0.9, holdout=0.1)
            settings[cell.task] = (config.train.total_epochs, config.data.batch)
        else:
            assert config.data.batch == 16 or "all" in cell.row  # appendix C
    assert {task: settings[task] for task in expected} == expected
    # Figure 2 is of T5 and CPM-2, both of 11B.
    assert {name for name, _ in backbones.values()} == {"T5-XXL", "CPM-2"}
    assert backbones["lcqmc"] == ("CPM-2", "bfloat16") and len(backbones) == 14


def test_the_precision_is_that_of_the_size():
    """Appendix C: full below 11B, and where --backbone says nothing of a size."""
    dtypes = {}
    for cell in paper.pick(paper_ppt.TABLES["table4"], arguments(tasks="rte")):
        for backbone in ("", "mine"):
            run = paper.list_runs(cell, arguments(backbone=backbone))[0]
            dtypes.setdefault(backbone or cell.row, set()).add(run.changes["backbone.dtype"])
    assert dtypes.pop("mine") == {"float32"}
    small = {row for row, names in dtypes.items() if names == {"float32"}}
    assert small == {f"full T5-{size}" for size in ("Small", "Base", "Large", "XL")}
    run = paper.list_runs(cell, arguments(), [("backbone.dtype", "float16")])[0]
    assert run.changes["backbone.dtype"] == "float16"


# -- DART ---------------------------------------------------------------------------------------


def test_published_numbers_are_darts(shared):
    """Cell by cell; rows of relation extraction say how many examples there are."""
    theirs = json.loads((shared / "papers/dart_tables.json").read_text())["cells"]
    ours = read_all("dart")
    assert len(ours) == len(theirs) == 188
    names = {"semeval": "sem_eval_2010_task_8", "tacrev": "tacred_revisited"}
    for line, cell in zip(ours, theirs, strict=True):
        assert line["task"] == names.get(cell["task"], cell["task"])
        assert [line[name] for name in ("table", "metric")] == [cell["table"], cell["metric"]]
        row, _, examples = line["row"].partition(", ")
        assert row == cell["row"]
        if cell["table"] in ("table2", "table3"):
            every = cell["k"] == "full"
            assert examples == ("all examples" if every else f"K={cell['k']}")
        assert float(line["mean"]) == cell["mean"]
        assert (float(line["std"]) if line["std"] else None) == cell.get("std")
        assert line["backbone"] == (cell.get("model") or line["backbone"])


@pytest.mark.long_cases("table1")
@pytest.mark.parametrize("name", paper_dart.TABLES)
def test_every_cell_of_darts_tables_has_its_runs(name):
    args = arguments(paper="dart", backbone="x")
    table = paper_dart.TABLES[name]
    cells = paper.pick(table, args)
    runs = [(cell, paper.list_runs(cell, args)) for cell in cells]
    flat = [run for _, cell_runs in runs for run in cell_runs]
    assert len({run.workdir for run in flat}) == len(flat)
    published = read_published("dart", name)
    assert {key[:2] for key in published} == {(cell.row, cell.task) for cell in cells}
    for cell, cell_runs in runs:
        assert (cell.row, cell.task, "") in published
        assert published[cell.row, cell.task, ""].backbone == cell.backbone
        config = paper.sweep.load_run_config(cell_runs[0], ())
        assert config.task.name == cell.task and config.data.seed == cell_runs[0].changes["seed"]
        metric = config.task.metric or paper.metric_of(cell.task)
        assert metric == (cell.metric or paper.metric_of(cell.task))
        assert (cell.row, cell.task, metric) in published
        learns = cell.method.split(",")[-1]
        trained = {"dart", "no_fluency", "fixed_template", "fixed_labels"}
        expected = "dart" if learns in trained else "none"
        assert config.prompt.name == ("p_tuning" if learns == "p_tuning" else expected)
        if learns in ("lm_bff", "in_context", "zero_shot"):
            assert config.head.name == "verbalizer" and "soft" not in config.task.template
        if cell.does != "train":
            assert not config.trainable and len(cell_runs) == (1 if cell.once else 2)
            continue
        assert len(cell_runs) >= 6
        if "K=" in cell.row:
            k = int(cell.row.rpartition("=")[2])
            assert config.data.protocol == KShot(k=k, on_shortage=config.data.protocol.on_shortage)
        elif "all examples" not in cell.row:
            every = "full_data" in cell.row or name == "table5"
            assert config.data.protocol.name == ("fraction" if every else "kshot")
        if cell.task in paper_dart.few_shot.TASKS and learns in ("lm_bff", "full"):
            # Gao et al. (2021), appendix A, whose numbers the paper prints of both.
            batches = sorted(
                {run.changes.get("data.batch", config.data.batch) for run in cell_runs}
            )
            few = name in ("table1", "table4") and cell.row != "full_data_full"
            assert batches == ([2, 4, 8] if few else [8])
            assert config.train.total_steps == (1000 if few else 0)
            assert (config.optim.schedule, config.optim.weight_decay) == (Linear(), 0.0)
            assert sorted({run.changes["optim.lr"] for run in cell_runs}) == [1e-5, 2e-5, 5e-5]
            pooled = config.head.name == "linear" and config.head.get("pooler") == "trained"
            assert learns == "lm_bff" or pooled
        else:
            schedule = config.optim.schedule
            assert (schedule.warmup_ratio, schedule.warmup_steps) == (0.1, 0)
        rates = paper_dart.PAPER.rates(cell, "x")
        assert sorted({run.changes["optim.lr"] for run in cell_runs}) == sorted(rates)


A_1 = {
    "SST-2": "sst2", "MR": "mr", "CR": "cr", "Subj": "subj", "TREC": "trec", "QNLI": "qnli",
    "MRPC": "mrpc", "QQP": "qqp", "MNLI": "mnli", "SNLI": "snli",
    "TACRED-Revisit": "tacred_revisited", "WiKi80": "wiki80", "SemEval": "sem_eval_2010_task_8",
    "ChemProt": "chemprot", "DialogRE": "dialog_re",
}  # fmt: skip


def test_darts_settings_are_those_of_appendix_a_1(shared):
    """Of every list of tasks the values are among those that are printed below it."""
    text = (shared / "papers/dart.txt").read_text()
    text = text.partition("A. 1 Hyper-parameter Search Space")[2].partition("A.2 Base Prompt")[0]
    grids, names = {}, []
    for line in text.splitlines():
        if all(part.strip() in A_1 for part in line.split(",")):
            names = [A_1[part.strip()] for part in line.split(",")]
        match = re.match(r"•\s*(?:number )?([a-z ]+?):? ([\[\d].*)", line)
        for name in names if match else ():
            numbers = [float(n) for n in match[2].strip("[]").split(",")]
            grids.setdefault(name, {})[match[1]] = numbers
    assert grids.keys() == set(A_1.values())
    for name, grid in grids.items():
        related = name in paper_dart.relations.TASKS
        file, argument = ("relations", f"{name},8") if related else ("few_shot", name)
        config = paper.sweep.load_config(f"{ROOT}/configs/dart/{file}.py:{argument}")
        parts = config.optim.accumulate
        assert config.data.max_len in grid["max seq length"] and len(grid["max seq length"]) == 1
        assert config.train.total_epochs == grid["epochs"][0], name
        assert config.data.batch / parts in grid["batch size"], name
        assert parts in grid["gradient accumulation steps"], name
        assert config.optim.weight_decay in grid.get("weight decay", [0.01]), name
        args = arguments(paper="dart", backbone="x")
        cell = paper_dart.Cell("dart", name, "8,dart" if related else "dart", "RoBERTa-large")
        rates = {run.changes["optim.lr"] for run in paper.list_runs(cell, args)}
        assert rates == set(grid["learning rate"]) and config.optim.lr in rates


@pytest.mark.parametrize("task", ["mnli", "snli", "qnli", "mrpc", "qqp"])
def test_darts_template_of_pairs_has_the_two_words_of_appendix_a_2(task):
    config = paper.sweep.load_config(f"{ROOT}/configs/dart/few_shot.py:{task}")
    assert (config.prompt.get("length"), config.prompt.get("text")) == (2, "? ,")
    assert re.fullmatch(
        r"\{\w+\|chop\} \[soft\*1\] \[mask\] \[soft\*1\] \{\w+\|lower\}", config.task.template
    )


def test_darts_templates_of_table_4_have_their_lengths(roberta, bert):
    for length, (template, text) in paper_dart.LENGTHS.items():
        slots = sum(int(n) for n in re.findall(r"\[soft\*(\d+)\]", template))
        assert slots == length
        assert [len(ids) for ids in encode_texts(roberta, [f" {text}"])] == [length]
        assert [len(ids) for ids in encode_texts(bert, [text])] == [length]


def test_a_mean_without_a_deviation_stands_alone(tmp_path, capsys):
    finish(tmp_path, "full_data_full-sst2", "x", 0.9)
    words = ["--rows=full_data_full;dart", "--tasks=sst2", "--print", "--seeds=10,20"]
    words += [f"--learning-rates={','.join(RATES)}", f"--workdir={tmp_path}"]
    assert paper.main(["dart", "table1", *words]) == 0
    heading, table = capsys.readouterr().out.split("\n\n")
    assert heading.startswith("DART (Zhang et al. 2022), table1: the methods with 16 examples")
    assert "| full_data_full | 85.0 ± 5.0 [95.0] |" in table
    assert "| dart | - [93.5 ± 0.5] |" in table


# -- DPT ------------------------------------------------------------------------------------------


def test_published_numbers_are_dpts(shared):
    """Cell by cell, without the rows of differences."""
    theirs = json.loads((shared / "papers/dpt_tables.json").read_text())["cells"]
    theirs = [cell for cell in theirs if "delta" not in cell["row"]]
    ours = read_all("dpt")
    assert len(ours) == len(theirs) == 92
    for line, cell in zip(ours, theirs, strict=True):
        row, examples = line["row"].split(", ")
        assert row == cell["row"]
        assert examples == ("all examples" if cell["setting"] == "full" else "10%")
        metric = {"em": "exact_match"}.get(cell["metric"], cell["metric"])
        assert [line["table"], line["task"]] == [cell["table"], cell["task"]]
        assert line["metric"] == metric in (*METRICS, *SPAN_METRICS)
        assert float(line["mean"]) == cell["mean"] and not line["std"]
        assert line["backbone"].endswith(row.split()[0])


@pytest.mark.parametrize("name", paper_dpt.TABLES)
def test_every_cell_of_dpts_tables_has_its_runs(name):
    args = arguments(paper="dpt", backbone="", seeds="0,1", data="")
    table = paper_dpt.TABLES[name]
    cells = paper.pick(table, args)
    published = read_published("dpt", name)
    if not table.draw:
        keys = {key for key in published if bool(key[2]) == (name == "table2")}
        assert {(cell.row, cell.task, cell.metric) for cell in cells} == keys
    for cell in cells:
        runs = paper.list_runs(cell, args)
        assert [run.changes["seed"] for run in runs] == [0, 1]
        config = paper.sweep.load_run_config(runs[0], ())
        size = cell.backbone.partition("-")[2]
        assert config.backbone.path == paper_dpt.HUB[cell.backbone] and size in config.backbone.path
        assert config.data.seed == 0 and (
            "10%" not in cell.row or config.data.protocol.ratio == 0.1
        )
        assert config.optim.lr == (5e-6 if cell.task == "quoref" else 2e-5)
        heads = {"quoref": "multi_spans"} if cell.task == "quoref" else {}
        tuned = cell.row.endswith(("full, all examples", "full, 10%"))
        assert config.head.name == heads.get(cell.task, "linear" if tuned else "discriminator")
        if cell.task == "quoref":  # the baselines' answers are read off as DPT's are
            assert (config.head.get("threshold"), config.head.get("drop_substrings")) == (0.6, True)
        elif tuned:  # the released Electra scores the state of [CLS] by one linear layer
            pooler = {"bert": "checkpoint", "roberta": "trained", "electra": "cls"}
            assert config.head.get("pooler") == pooler[cell.row.split()[1]]
        if not table.draw:
            key = cell.row, cell.task, cell.metric
            assert published[key].backbone == cell.backbone


def test_the_best_seeds_stand_before_all(tmp_path, capsys):
    """Best on dev, not on test; of a row with two metrics the same by both, the task's first."""
    for seed, (dev, test) in enumerate([(0.5, 0.9), (0.9, 0.5), (0.8, 0.4), (0.7, 0.3)]):
        run = tmp_path / f"large_electra_dpt_10_-quoref,lr=5e-06,seed={seed}"
        scores = {"f1": test, "exact_match": test / 2}
        write_run(run, {"f1": dev, "exact_match": 1 - dev}, scores)
    words = ["--rows=large electra dpt, 10%", "--seeds=0,1,2,3", f"--workdir={tmp_path}", "--print"]
    assert paper.main(["dpt", "table2", *words]) == 0
    heading, table = capsys.readouterr().out.split("\n\n")
    assert table.splitlines() == [
        "| | quoref exact_match | quoref f1 |", "|---|---|---|",
        "| large electra dpt, 10% | 20.0 ± 4.1, all 26.2 ± 11.4 [63.65] | "
        "40.0 ± 8.2, all 52.5 ± 22.8 [73.09] |",
    ]  # fmt: skip
    assert "test exact_match of quoref; f1 of quoref; mean" in heading
    assert "the 3 seeds that are best on dev" in heading


def test_figure_2_of_dpt_shows_every_seed(tmp_path, capsys, figures):
    for method, scores in (("full", (0.2, 0.9)), ("dpt", (0.8, 0.85))):
        for seed, score in enumerate(scores):
            run = tmp_path / f"large_electra_{method}_10_-sst5,lr=2e-05,seed={seed}"
            write_run(run, {"accuracy": score}, {"accuracy": score})
    words = ["--seeds=0,1", f"--workdir={tmp_path}", "--print", "--tasks=sst5"]
    assert paper.main(["dpt", "figure2", *words]) == 0
    numbers = read_numbers(tmp_path / "figure2.csv")
    assert numbers["sst5", "electra", "10%"]["scores"] == "20.0000 90.0000"
    assert numbers["sst5", "dpt", "10%"]["mean"] == "82.5000"
    assert numbers["sst5", "dpt", "all"]["scores"] == ""
    (figure,) = figures
    (panel,) = figure.axes
    names = [label.get_text() for label in panel.get_xticklabels()]
    assert names == [
        f"{name}\n{part} examples" for part in ("all", "10%") for name in ("fine-tuning", "DPT")
    ]
    heights = [list(line.get_ydata()) for line in panel.lines]
    assert heights == [[], [], [20, 90], [80, 85]]
    assert round(panel.lines[2].get_xdata().mean(), 6) == 2


def test_bert_is_left_out_with_a_discriminator():
    cells = list(paper_dpt.table1(["sst2"]))
    left_out = [cell for cell in cells if paper_dpt.PAPER.why_not(cell, arguments(backbone="mine"))]
    assert {cell.method.split(",")[1] for cell in left_out} == {"bert", "roberta"}
    assert not any(paper_dpt.PAPER.why_not(cell, arguments()) for cell in cells)


# -- IPT ------------------------------------------------------------------------------------------


def test_published_numbers_are_ipts(shared):
    """Cell by cell. Table 3's names and what table 6 lacks in the text are of the pictures."""
    tables = json.loads((shared / "papers/ipt_tables.json").read_text())
    names = tables["table3_rows"]["names"]
    pictured = {("CNN", "1.3"): 61.6, ("MLP", "26"): 64.3}
    more = {"1.3": 61.9, "3": 62.3, "5": 62.7, "10": 63.3, "21": 64.4, "30": 64.3}  # of the MLP
    ours = read_all("ipt")
    from_picture = [f"Encoder IPT (MLP), {rate}%" for rate in more]
    lines = [line for line in ours if line["row"] not in from_picture]
    assert [float(line["mean"]) for line in ours if line["row"] in from_picture] == list(
        more.values()
    )
    assert len(lines) == len(tables["cells"]) == 111
    for line, cell in zip(lines, tables["cells"], strict=True):
        row, mean = cell["row"], cell["mean"]
        if cell["table"] == "table3":
            row = names[int(re.match(r"row (\d) ", row)[1]) - 1]
        if cell["table"] == "table6":
            kind = re.fullmatch(r"prompt_tuning \+ encoder \((\w+)\)", row)[1].upper()
            rate = f"{cell['utilization_percent']:g}"
            row, mean = f"Encoder IPT ({kind}), {rate}%", pictured.get((kind, rate), mean)
        named = [line[name] for name in ("table", "row", "task")]
        assert named == [cell["table"], row, cell["task"]]
        assert float(line["mean"]) == mean
        assert cell["metric"].startswith(line["metric"]) and line["metric"] == "accuracy"
        assert not line["std"] and line["backbone"] == paper_ipt.ROBERTA


@pytest.mark.parametrize("name", paper_ipt.TABLES)
def test_every_cell_of_ipts_tables_has_its_runs(name):
    args = arguments(paper="ipt", backbone="x", data="")
    table = paper_ipt.TABLES[name]
    cells = paper.pick(table, args)
    flat = [run for cell in cells for run in paper.list_runs(cell, args)]
    assert len({run.workdir for run in flat}) == len(flat)
    lines = [line for line in read_all("ipt") if line["table"] == name]
    printed = {(line["row"], line["task"]) for line in lines}
    rows = {(cell.row, cell.task) for cell in cells}
    assert rows == printed if lines else table.draw
    for cell in cells:
        runs = paper.list_runs(cell, args)
        assert len(runs) == 2 * 3
        config = paper.sweep.load_run_config(runs[0], ())
        _, system, place, *rest = cell.method.split(",")
        assert (config.data.seed, config.seed, config.task.name) == (1, 1, cell.task)
        shown = cell.metric or paper.metric_of(cell.task)
        assert shown == "accuracy" == (config.task.metric or shown)  # the paper's, of all its cells
        rates = ipt.FULL_RATES if system == "full" else ipt.RATES
        assert sorted({run.changes["optim.lr"] for run in runs}) == sorted(rates)
        kinds = {
            "full": "none",
            "ppt": "soft",
            "task": {"prompt": "soft", "prefix": "prefix"}[place],
        }
        assert config.prompt.name == kinds.get(system, "ipt")
        if config.prompt.name == "ipt":
            assert config.prompt.get("on") == place and config.prompt.get("fixed") == (
                system in ipt.ENCODERS
            )
            rows_of = {"random": "", "pretrained": f"t/cnn-{place}"}
            assert config.prompt.get("pretrained") == rows_of.get(system, f"t/{system}-{place}")
        if system == "ppt":
            assert config.prompt.get("init") == "p/nsp"
        if name.startswith("figure5"):
            assert config.prompt.get("length") == int(rest[0]) == int(cell.row.rpartition(" ")[2])
            room = config.prompt.get("length") if place == "prompt" else 0
            assert config.data.max_len == 384 + room <= 512
        if name == "table6":
            percent = float(cell.row.rpartition(", ")[2].removesuffix("%"))
            assert config.prompt.get("utilization") == pytest.approx(percent / 100)
        start = "Human Act" if cell.task == "ag_news" else "Culture and"
        template = config.task.template
        assert template.startswith(start) if "hard" in cell.row else not template


def test_both_settings_of_ipt_on_a_prefix_have_a_name():
    """The released code's: layer 1, times 0.05, beside the task's; the paper's: alone, in each."""
    released, published = (
        load_config(f"{ROOT}/configs/ipt/end_to_end.py:rte,lstm,{place}").prompt
        for place in ("prefix", "prefix_paper")
    )
    read = lambda prompt: tuple(map(prompt.get, ("on", "layers", "added", "coefficient")))
    assert read(released) == ("prefix", "1", True, 0.05)
    assert read(published) == ("prefix", "", False, 1.0)
    assert released.get("pretrained") == published.get("pretrained")
    assert "pretrained" in released.fields
    with pytest.raises(InputError, match="the place of task 'prefix_paper' is unknown"):
        load_config(f"{ROOT}/configs/ipt/end_to_end.py:rte,task,prefix_paper")


def test_rows_of_ipt_without_their_export_say_so(tmp_path):
    """Only the rows that start from topics or from PPT, and only where the export is missing."""
    (tmp_path / "cnn-prompt").mkdir()
    args = arguments(paper="ipt", topics=str(tmp_path), ppt="")
    why = {cell.row: paper_ipt.PAPER.why_not(cell, args) for cell in paper_ipt.table2(["rte"])}
    left_out = {row for row, reason in why.items() if reason}
    assert left_out == {"PPT"} | {
        f"{base} + {name}" for base in ("Prompt Tuning", "Prefix Tuning")
        for name in ("Pretrained IPT", *(f"Encoder IPT ({x})" for x in ("CNN", "RNN", "MLP")))
    } - {"Prompt Tuning + Pretrained IPT", "Prompt Tuning + Encoder IPT (CNN)"}  # fmt: skip
    assert why["Prefix Tuning + Encoder IPT (RNN)"] == (
        f"{tmp_path}/lstm-prefix does not exist; train configs/ipt/topics.py:lstm,prefix on texts "
        "with topics and `export` it there, or name another folder by --topics"
    )
    assert "name it by --ppt" in why["PPT"]
    with pytest.raises(InputError, match="--rows=PPT: .*pre-trained prompt"):
        paper.main(["ipt", "table2", "--rows=PPT", f"--workdir={tmp_path / 'new'}"])


def test_folds_choose_the_run_that_counts(tmp_path, capsys):
    """The mean over the folds chooses, not dev of the run that counts; other runs do not count."""
    name = "Prefix_Tuning_Random_IPT-cb"
    means = {10: {"0.01": (0.9, 0.1, 0.5, 0.5), "0.1": (0.6, 0.5, 0.6, 0.5)},
             20: {"0.01": (0.7, 0.7, 0.7, 0.7), "0.1": (0.9, 0.9, 0.4, 0.5)}}  # fmt: skip
    tests = {(10, "0.01"): 0.11, (10, "0.1"): 0.8, (20, "0.01"): 0.6, (20, "0.1"): 0.99}
    for seed, rates in means.items():
        for rate, devs in rates.items():
            run = f"{name},lr={rate},seed={seed}"
            for fold, dev in enumerate(devs):
                write_run(tmp_path / f"folds/{run},fold={fold}", {"accuracy": dev}, {})
            score = {"accuracy": tests[seed, rate]}
            write_run(tmp_path / run, score, score)
    words = ["--rows=Prefix Tuning + Random IPT", "--tasks=cb", "--seeds=10,20", "--print"]
    words += ["--learning-rates=0.01,0.1", f"--workdir={tmp_path}"]
    assert paper.main(["ipt", "table3", *words]) == 0
    heading, table = capsys.readouterr().out.split("\n\n")
    assert table.splitlines()[2] == "| Prefix Tuning + Random IPT | 70.0 ± 10.0 [69.6] |"
    assert "test accuracy of cb;" in heading
    (tmp_path / f"folds/{name},lr=0.1,seed=10,fold=3/result.json").unlink()
    assert paper.main(["ipt", "table3", *words]) == 0  # 0.5 of four folds before 0.57 of three
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "| Prefix Tuning + Random IPT | 35.5 ± 24.5 (17 of 18 runs) [69.6] |"


def test_the_runs_of_the_folds_are_the_cross_validation_of_the_paper():
    """Section 5.1: four folds of 2K examples per class choose, K train and K stop it early."""
    args = arguments(paper="ipt", backbone="x", data="")
    (cell,) = (x for x in paper_ipt.table3(["cb"]) if x.row == "Prefix Tuning + Random IPT")
    runs = paper.list_runs(cell, args)
    folds = paper.list_folds(cell, runs)
    assert len(folds) == 4 * len(runs) == 4 * 6
    assert len({fold.workdir for fold, _ in folds}) == len(folds)
    last = paper.sweep.load_run_config(runs[0], ()).data
    assert (last.protocol, last.seed) == (KShot(k=32, dev_k=0, on_shortage="use_fewer"), 1)
    for number, (fold, run) in enumerate(folds):
        config = paper.sweep.load_run_config(fold, ())
        assert config.data.protocol == KFold(
            k=64, folds=4, fold=number % 4, on_shortage="use_fewer"
        )
        assert (
            config.optim.lr == run.changes["optim.lr"] and config.data.seed == run.changes["seed"]
        )
        assert not config.train.test  # the test split is for the run that counts
    lines = paper.estimate([(cell, runs)], ()).splitlines()[::2]
    prompt = "a prompt (prompt.name=ipt, 100 tokens, inputs of 384):"
    assert lines == [
        "24 runs of 400 epochs of 3 of 4 folds of 64 examples per class, 64 per step, that train "
        + prompt,
        f"2 runs of 400 epochs of 32 examples per class, 64 per step, that train {prompt}",
        "total: 26 runs",
    ]


def test_figure_5_of_ipt_is_over_the_prompts_length(tmp_path, capsys, figures):
    for base, score in (("Prompt_Tuning", 0.6), ("Prompt_Tuning_Pretrained_IPT", 0.7)):
        finish(tmp_path, f"{base}_length_32-rte", "mine", score)
    words = ["--print", "--tasks=rte", "--seeds=10,20", f"--workdir={tmp_path}"]
    words += [f"--learning-rates={','.join(RATES)}"]
    assert paper.main(["ipt", "figure5", *words]) == 0
    assert "[as published]" not in capsys.readouterr().out
    with open(tmp_path / "figure5.csv", newline="") as file:
        numbers = list(csv.DictReader(file))
    measured = {(x["method"], x["length"]): x["mean"] for x in numbers if x["mean"]}
    assert measured == {("task", "32"): "55.0000", ("pretrained", "32"): "65.0000"}
    assert len(numbers) == 2 * 7
    (panel,) = figures[0].axes
    assert panel.get_xlabel() == "prompt length"
    labels = [label.get_text() for label in panel.get_xticklabels()]
    assert labels == ["5", "10", "16", "32", "64", "100", "120"]


def test_table_6_of_ipt_is_a_table_and_a_curve(tmp_path, capsys):
    finish(tmp_path, "Encoder_IPT_CNN_0.2_-boolq", "mine", 0.6)
    words = ["--print", "--seeds=10,20", f"--workdir={tmp_path}"]
    words += [f"--learning-rates={','.join(RATES)}"]
    assert paper.main(["ipt", "table6", *words]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert "| Encoder IPT (CNN), 0.2% | 55.0 ± 5.0 [61.2] |" in lines
    assert "| Encoder IPT (CNN), 1.3% | - [61.6] |" in lines
    assert "[as published]" in captured.out
    assert captured.err.split() == [f"{tmp_path}/table6.png", f"{tmp_path}/table6.csv"]
    with open(tmp_path / "table6.csv", newline="") as file:
        (line,) = (x for x in csv.DictReader(file) if x["mean"])
    assert (line["method"], line["utilization"], line["mean"]) == ("cnn", "0.2", "55.0000")


# -- which cells are run -------------------------------------------------------------------------


def run_rows(table, **flags):
    """Lists the rows of a table that are run."""
    args = arguments(table=table, **flags)
    cells = paper.pick(paper_ppt.TABLES[table], args)
    return list(
        dict.fromkeys(cell.row for cell in cells if not paper_ppt.PAPER.why_not(cell, args))
    )


def test_rows_that_run_by_default():
    sizes = ["full T5-Small", "full T5-Base", "full T5-Large", "full T5-XL"]
    prompts = [row for row in paper_ppt.PROMPTED if row != "lm_adapt"]
    assert run_rows("table4") == [*sizes, "full", *paper_ppt.PROMPTED]
    assert run_rows("table4", backbone="x") == ["full", *prompts]
    assert run_rows("table4", backbone="x", adapted="y") == ["full", *paper_ppt.PROMPTED]
    assert run_rows("table4", backbone="x", rows="full T5-XL") == ["full T5-XL"]
    # CPM-2 is not read: mT5-XXL is trained once, in the row of its own.
    chinese = [f"full m{size.removeprefix('full ')}" for size in [*sizes, "full T5-XXL"]]
    assert run_rows("table4_chinese") == [*chinese, *prompts]
    assert run_rows("table4_chinese", backbone="x") == ["full", *prompts]
    assert run_rows("table5") == ["full", "pt", "multiple_choice", "unified_ppt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table3"], "table3 is not a table or figure of this paper; use one of table1, table2"),
        (["table4", "--rows=ptt"], "--rows='ptt' is unknown; nearest: pt"),
        (["table4", "--kind=masked"], "--kind=masked needs --backbone"),
        (["table2", "--kind=t5-deep", "--backbone=x"], "--kind=t5-deep has no soft tokens to init"),
        (
            ["table4", "--config.optim.lr=1"],
            "--config.optim.lr cannot be set here; use --learning-rates",
        ),
        (["table4", "--rows=lm_adapt", "--backbone=x"], "--rows=lm_adapt: give --adapted, the ba"),
        (["table4", "--seeds=1;2"], "--seeds='1;2' must be whole numbers"),
        (["table4", "--tasks=sst2,cb"], "--tasks='sst2,cb': separate names by ;"),
        (["table4", "--config.train.test=False"], "--config.train.test: "),
        (
            ["table4", "--config.runs.seeds=1"],
            "--config.runs.seeds cannot be set here; use --seeds or --learn",
        ),
        (["table4", "--output=x.png"], "--output=x.png: table4 is not a figure"),
        (["table4", "--rows=ppt", "--prompts=none"], "none/cls does not exist; pre-train it "),
        (["table1", "--data=/none"], "/none/sst2 does not exist; --data "),
        (
            ["table4", "--rows=pt", "--config.prompt.length=0"],
            "pt-sst2,lr=0.005,seed=10: prompt.len",
        ),
        (["figure4", "--output=x.jpg"], "--output=x.jpg must end with one of .png, .pdf, .svg"),
    ],
)
def test_errors_before_anything_is_written(tmp_path, words, message):
    with pytest.raises(InputError, match=message):
        paper.main(["ppt", *words, f"--workdir={tmp_path / 'new'}"])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", [
    ["ipt", "table3", "--config.data.protocol.folds=2"],
    ["ppt", "figure4", "--config.data.protocol.n=8"],
    ["dpt", "table3", "--config.data.protocol.ratio=0.5"],
    ["dart", "table5", "--config.data.protocol="],
    ["dart", "table5", "--config.data.protocol.name=kshot"],
    ["ppt", "table4", "--config.ppt.hard=True"], ["dart", "table3", "--config.prompt.fluency=1"],
    ["ipt", "table2", "--config.prompt.on=prefix"],
    ["ptuning_v2", "figure4", "--config.prompt.length=8"],
    ["ptuning_v2", "figure4", "--config.prompt.hidden=8"],
])  # fmt: skip
def test_fields_that_name_rows_are_refused(tmp_path, words):
    with pytest.raises(InputError, match="distinguishes the rows of"):
        paper.main([*words, "--estimate", f"--workdir={tmp_path / 'new'}"])


EVERY_TABLE = [(name, table) for name, each in paper.PAPERS.items() for table in each.TABLES]


@pytest.mark.parametrize(("name", "table"), EVERY_TABLE)
def test_overrides_hold_for_every_row(name, table):
    """It is refused where the rows are named by it; a cell's own value would hide it."""
    args = arguments(paper=name, shared="s", layers=24)
    named_by = paper.PAPERS[name].TABLES[table].named_by
    for cell in paper.pick(paper.PAPERS[name].TABLES[table], args):
        overrides = {field: "7" for field in cell.changes if field not in named_by}
        for run in paper.list_runs(cell, args, [*overrides.items()])[:1]:
            assert {field: run.changes[field] for field in overrides} == overrides


def test_one_reason_of_many_runs_is_one_line(tmp_path, capsys):
    words = ["table1", f"--workdir={tmp_path}", "--backbone=/none", "--seeds=10"]
    words += ["--rows=none good/bad;full good/bad"]
    with pytest.raises(InputError, match="8 runs failed; the lines above the table say why"):
        paper.main(["ppt", *words])
    captured = capsys.readouterr()
    head, line = captured.err.splitlines()
    assert head == "table1: 8 runs, 0 of them finished"
    assert line.startswith("jaxprompt sweep: none_good_bad-sst2,lr=0.005,seed=10 and 7 more: ")
    assert "'/none'" in line and captured.out.endswith("| full good/bad | - [91.4 ± 0.8] |\n")


def test_a_workdir_is_of_one_table_and_kind(tmp_path, call):
    (tmp_path / "table.json").write_text('{"paper": "ppt", "table": "table2", "kind": "masked"}')
    with pytest.raises(InputError, match=f"{tmp_path} .* table2, not table4; "):
        call("table4")
    with pytest.raises(InputError, match=f"{tmp_path} .*masked, not causal; "):
        call("table2", "--kind=causal")
    call("table2")
    (tmp_path / "table.json").write_text('{"paper": "ppt"}')
    with pytest.raises(InputError, match=f"{tmp_path} .* None, not table2; "):
        call("table2")
    (tmp_path / "table.json").write_text("{")
    with pytest.raises(InputError, match="table.json cannot be read"):
        call("table2")


# -- tables --------------------------------------------------------------------------------------


def test_measured_and_published_scores(tmp_path, call):
    data = {"protocol": {"name": "balanced", "n": 8}, "batch": 16}
    blocks = {"data": data, "prompt": {"length": 3}, "mesh": {"model": 7}}
    finish(tmp_path, "pt-sst2", "google/t5-v1_1-xxl", 0.75, **blocks)
    finish(tmp_path, "hybrid_pt-cb", "mine/small", 0.5, kind="macro_f1")
    (tmp_path / "hybrid_pt-cb,lr=0.1,seed=20/result.json").unlink()
    captured = call("table4", "--rows=pt;hybrid_pt;lm_adapt", "--tasks=sst2;cb;dream")
    head, table = captured.out.split("\n\n")
    assert table.splitlines() == [
        "| | sst2 | cb | dream |",
        "|---|---|---|---|",
        "| pt | 70.0 ± 5.0 [70.5 ± 15.5] | - [50.7 ± 4.1] | - |",
        "| hybrid_pt | - [87.6 ± 6.6] | 74.5 ± 24.5 (3 of 4 runs) [66.5 ± 7.2] | - |",
        "| lm_adapt | - [77.6 ± 7.5] | - [61.2 ± 1.7] | - |",
    ]
    assert head.splitlines() == [
        "PPT (Gu et al. 2022), table4: the methods on English tasks",
        "test accuracy of sst2, dream; macro-F1 of cb; mean ± standard deviation over seeds 10,20, "
        "in percent; [as published]",
        "measured on mine/small; the paper uses T5-XXL",
        "learning rates 0.01,0.1 instead of those of the paper",
        "settings that differ from the paper (its values in brackets): data.protocol.n=8 (32), "
        "prompt.length=3 (100)",
    ]


@pytest.mark.parametrize(
    ("row", "task", "backbone", "line"),
    [
        ("pt", "sst2", "/models/t5-v1_1-xxl", ""),
        (
            "full T5-Small",
            "sst2",
            "google/t5-v1_1-base",
            "google/t5-v1_1-base; the paper uses T5-S",
        ),
        (
            "lm_adapt",
            "rte",
            "google/t5-xxl-lm-adapt",
            "the paper uses T5-XXL after 10K steps of LM",
        ),
        ("ppt", "lcqmc", "google/mt5-xxl", "measured on google/mt5-xxl; the paper uses CPM-2"),
    ],
)
def test_a_heading_names_what_is_not_the_papers_backbone(tmp_path, call, row, task, backbone, line):
    finish(tmp_path, f"{row}-{task}".replace(" ", "_").replace("T5-", "T5_"), backbone, 0.5)
    captured = call("table4", f"--tasks={task}")
    assert " 45.0 ± 5.0" in captured.out
    assert ("the paper uses" in captured.out) == bool(line) and line in captured.out
    (tmp_path / "table.json").write_text('{"paper": "ppt", "table": "table4", "kind": "masked"}')
    captured = call("table4", f"--tasks={task}")
    assert "measured with a backbone of kind masked; the paper uses t5" in captured.out


def test_the_estimate_counts_runs_of_a_size(capsys):
    words = ["--estimate", "--workdir=none", "--tasks=sst2;yahoo_answers_topics", "--seeds=1,01"]
    words += ["--rows=full T5-Small;pt;unified_ppt", "--config.data.max_len=64"]
    assert paper.main(["ppt", "table4", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    full = "a backbone (prompt.name=none, inputs of 64):"
    soft = "a prompt (prompt.name=soft, 100 tokens, inputs of 64):"
    assert [line for line in lines if line[0] != " "] == [
        f"3 runs of 50 epochs of 32 examples, 16 per step, that train {full}",
        f"3 runs of 50 epochs of 8 examples per class, 16 per step, that train {full}",
        f"8 runs of 50 epochs of 32 examples, 16 per step, that train {soft}",
        f"8 runs of 50 epochs of 8 examples per class, 16 per step, that train {soft}",
        "total: 22 runs",
    ]
    assert lines[1].strip() == (
        f"python -m jaxprompt plan --config={ROOT}/configs/ppt/cells.py:sst2,full,t5 "
        "--config.data.max_len=64 --config.backbone.dtype=float32 "
        "--config.backbone.path=google/t5-v1_1-small --devices=..."
    )


def test_the_estimate_keeps_apart_what_costs_more(capsys):
    """A second view of DART, and the lengths that are searched."""
    words = ["--estimate", "--workdir=none", "--seeds=1"]
    assert paper.main(["dart", "table1", "--tasks=sst2", "--rows=full;dart", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    for batch, line, command in zip((2, 4, 8), lines[0:6:2], lines[1:6:2], strict=True):
        assert f"{batch} per step" in line and "prompt.name=none" in line
        assert f"lm_bff.py:sst2,full --config.data.batch={batch}" in command
    assert ["prompt.name=dart" in lines[6], "few_shot.py:sst2 " in lines[7]] == [True, True]
    rows = "--rows=Prompt tuning, BERT-large"
    assert paper.main(["ptuning_v2", "table2", "--tasks=rte", rows, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 6 + 1
    assert lines[0].endswith("(prompt.name=soft, 4 tokens, inputs of 132):")
    assert " --config.prompt.length=128 --config.data.max_len=256 " in lines[-2]


def test_the_estimate_counts_the_runs_of_two_metrics_once(capsys):
    words = ["--estimate", "--workdir=none", "--seeds=1,2"]
    assert paper.main(["dpt", "table2", *words]) == 0
    lines = capsys.readouterr().out.splitlines()[::2]
    cells = list(paper.PAPERS["dpt"].TABLES["table2"].cells(("quoref",)))
    assert sum(int(line.partition(" runs of ")[0]) for line in lines[:-1]) == 2 * len(cells) / 2
    assert lines[-1] == f"total: {len(cells)} runs"


def test_the_estimate_says_what_it_leaves_out(tmp_path, capsys):
    """Of table 6 the CNN's classifier is there, the other two are not."""
    (tmp_path / "cnn-prompt").mkdir()
    words = ["--estimate", f"--workdir={tmp_path / 'new'}", f"--topics={tmp_path}", "--seeds=1"]
    assert paper.main(["ipt", "table6", *words]) == 0
    captured = capsys.readouterr()
    count = len(ipt.RATES) * len(utilization.PERCENTS)
    assert captured.out.startswith(f"{count} runs of ") and captured.out.count(" runs of ") == 1
    lines = captured.err.splitlines()
    assert all(" is left out: " in line for line in lines)
    for name in ("lstm", "mlp"):
        lost = sum(f"{name}-prompt does not exist" in line for line in lines)
        assert lost == len(utilization.PERCENTS) == len(lines) / 2


def listed_tables():
    """Reads docs/papers.md. -> paper and table: the number of its runs"""
    rows = re.findall(r"\| `(\w+) (\w+)` \| ([\d,]+) \|", (ROOT / "docs/papers.md").read_text())
    return {(name, table): int(runs.replace(",", "")) for name, table, runs in rows}


def test_the_list_of_commands_has_every_table():
    tables = [(name, table) for name, paper_ in paper.PAPERS.items() for table in paper_.TABLES]
    assert list(listed_tables()) == tables


@pytest.mark.default_cases("ptuning_v2-figure3")
@pytest.mark.parametrize("name, table", listed_tables())
def test_listed_costs_are_those_of_the_estimate(name, table, tmp_path, capsys):
    assert paper.main([name, table, "--estimate", f"--workdir={tmp_path / 'new'}"]) == 0
    total = capsys.readouterr().out.splitlines()[-1]
    assert total == f"total: {listed_tables()[name, table]} runs"


# -- figures -------------------------------------------------------------------------------------


def read_numbers(path):
    """Reads the CSV beside a picture. -> (task, method, examples) -> its line"""
    with open(path, newline="") as file:
        return {(x["task"], x["method"], x["examples"]): x for x in csv.DictReader(file)}


def test_figure_4_is_of_the_runs(tmp_path, call, figures):
    for examples, score in ((32, 0.4), (128, 0.8)):
        finish(tmp_path, f"ppt_{examples}_examples-cb", "mine", score, kind="macro_f1")
    finish(tmp_path, "pt_64_examples-race_middle", "mine", 0.3)
    captured = call("figure4")
    assert "| ppt, 32 examples | - | 35.0 ± 5.0 |" in captured.out.splitlines()
    assert captured.err.split() == [f"{tmp_path}/figure4.png", f"{tmp_path}/figure4.csv"]
    numbers = read_numbers(tmp_path / "figure4.csv")
    assert len(numbers) == 2 * 3 * 4
    measured = {key: (x["mean"], x["std"], x["runs"]) for key, x in numbers.items() if x["mean"]}
    assert measured == {
        ("cb", "ppt", "32"): ("35.0000", "5.0000", "4"),
        ("cb", "ppt", "128"): ("75.0000", "5.0000", "4"),
        ("race_middle", "pt", "64"): ("25.0000", "5.0000", "4"),
    }
    assert numbers["cb", "ppt", "32"]["backbone"] == "mine"
    assert numbers["cb", "ppt", "32"]["metric"] == "macro-F1"
    assert (tmp_path / "figure4.png").read_bytes()[:4] == b"\x89PNG"
    (figure,) = figures
    race, cb = figure.axes
    assert (race.get_title(), cb.get_title()) == ("race_middle", "cb")
    assert (race.get_ylabel(), cb.get_ylabel()) == ("accuracy, %", "macro-F1, %")
    assert figure.get_suptitle() == "measured on mine"
    lines = {box.get_label(): box.lines[0] for box in cb.containers}
    assert list(lines) == ["full tuning", "prompt tuning", "PPT"]
    np.testing.assert_array_equal(lines["PPT"].get_xdata(), [32, 64, 128, 256])
    shown = {name: np.ma.filled(line.get_ydata(), np.nan) for name, line in lines.items()}
    np.testing.assert_allclose(shown["PPT"].astype(float), [35, np.nan, 75, np.nan])
    assert np.isnan(shown["full tuning"].astype(float)).all()


def test_figure_2_is_of_the_runs(tmp_path, call, figures):
    finish(tmp_path, "full_all_examples-sst2", "mine", 0.9)
    finish(tmp_path, "pt_32_examples-rte", "mine", 0.6)
    captured = call("figure2", "--tasks=sst2;rte", f"--output={tmp_path / 'bars.svg'}")
    assert captured.err.split() == [f"{tmp_path}/bars.svg", f"{tmp_path}/bars.csv"]
    assert "<svg" in (tmp_path / "bars.svg").read_text()
    numbers = read_numbers(tmp_path / "bars.csv")
    assert numbers["sst2", "full", "all"]["mean"] == "85.0000"
    assert numbers["rte", "pt", "32"]["mean"] == "55.0000"
    assert numbers["rte", "pt", "all"]["mean"] == ""
    (figure,) = figures
    bars = {
        panel.get_title(): [
            (round(bar.get_x() + bar.get_width() / 2, 1), bar.get_height()) for bar in panel.patches
        ]
        for panel in figure.axes
    }  # tasks stand at 0 and 1, full tuning left of prompt tuning
    assert bars == {
        "all examples": [(-0.2, pytest.approx(85))],
        "32 examples": [(1.2, pytest.approx(55))],
    }


def test_no_picture_without_a_number(tmp_path, call):
    assert "- | - |" in call("figure4").out
    assert not list(tmp_path.iterdir())
