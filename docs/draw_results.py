"""Draws the pictures of docs/results/ from the tables there and in docs/devices.md.

usage: python docs/draw_results.py [FOLDER]            (default: docs/pictures)
       python docs/draw_results.py --record RUNS       (reads the learning curves off four runs)
       python docs/draw_results.py --seeds TASK,SYSTEM=WORKDIR ...   (adds the scores of grids)
       python docs/draw_results.py --pretraining TASK,PROMPT=WORKDIR ...   (reads `pretrain` runs)

The learning curves are recorded in docs/pictures/curves.json; RUNS is the workdir of
`python -m jaxprompt sweep --config=configs/quickstart.py --run --workdir=RUNS`. The test scores of
the seeds of a grid are recorded in docs/pictures/seeds.json, by task and system, and the held-out
accuracy of pre-training in docs/pictures/pretraining.json.
"""

import json
import re
import sys
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams |= {"svg.hashsalt": "jaxprompt", "font.size": 10}
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

HERE = Path(__file__).parent
CURVES, SEEDS = HERE / "pictures" / "curves.json", HERE / "pictures" / "seeds.json"
PRETRAINING = HERE / "pictures" / "pretraining.json"
PAPERS, SPEED, SIZE = "results/papers.md", "results/speed.md", "results/size.md"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
NAMES = {
    "prefix": "P-tuning v2", "soft": "soft prompt tuning", "head_only": "linear head alone",
    "full": "full fine-tuning",
}  # fmt: skip


def read_table(page: str, first: str) -> list[list[str]]:
    """Returns the rows of the table whose header line begins with `first`, header included."""
    lines = (HERE / page).read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


def mean_std(cell: str) -> tuple[float, float]:
    """Reads "0.472 ± 0.090"."""
    mean, _, std = cell.partition("±")
    return float(mean), float(std)


def accuracy_parameters(folder: Path) -> None:
    """Draws the accuracy on TREC over the trained parameters, a panel per backbone."""
    head, *rows = read_table(SIZE, "| method, TREC |")
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    labelled: set[str] = set()
    for axis, column in zip(figure.subplots(1, 2, sharex=True, sharey=True), (1, 3), strict=True):
        for row, colour, marker in zip(rows, [*COLOURS, "#999999"], "sovD^P*", strict=True):
            if not row[column]:
                continue
            trained, (mean, std) = int(row[column].replace(",", "")), mean_std(row[column + 1])
            label = row[0] if row[0] not in labelled else None
            labelled.add(row[0])
            axis.errorbar(trained, mean, yerr=std, fmt=marker, capsize=4, color=colour, label=label)
        axis.set_xscale("log")
        axis.set(title=head[column].partition(":")[0], xlabel="trained parameters", xlim=(1e3, 5e8))
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("test accuracy on TREC")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save(figure, folder / "accuracy_parameters.svg")


def few_shot(folder: Path) -> None:
    """Draws accuracy with 16 examples per class."""
    head, *rows = read_table(PAPERS, "| method | TREC | SST-2 | MPQA |")
    rows = [row for row in rows if row[4]]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = zip(figure.subplots(1, 2, sharex=True), (4, 5), (1 / 6, 1 / 2), strict=True)
    for axis, column, chance in panels:
        values = [mean_std(row[column]) for row in rows]
        for place, (mean, std) in enumerate(values):
            axis.errorbar(mean, place, xerr=std, fmt="o", capsize=4, color=COLOURS[place])
        axis.axvline(chance, color="black", linewidth=0.8, linestyle="--")
        axis.annotate(
            f"chance, {chance:.2f}", (chance, 0.5), (3, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", fontsize=8, va="center",
        )  # fmt: skip
        axis.set_yticks(range(len(rows)), [row[0] for row in rows] if column == 4 else [""] * 4)
        axis.invert_yaxis()
        axis.set(title=head[column], xlabel="test accuracy", xlim=(0, 1))
        axis.grid(axis="x", alpha=0.3)
    save(figure, folder / "few_shot.svg")


def group_size(folder: Path) -> None:
    """Draws runs per minute and memory over the runs that train at once."""
    head, speed, memory = read_table(SPEED, "| runs at once |")
    sizes = [int(cell) for cell in head[1:]]
    figure = Figure(figsize=(8, 3), layout="constrained")
    titles = ("runs per minute", "peak memory, GiB")
    for axis, row, title, colour in zip(
        figure.subplots(1, 2), (speed, memory), titles, COLOURS, strict=False
    ):
        axis.plot(sizes, [float(cell) for cell in row[1:]], "o-", color=colour)
        axis.set(xlabel="runs at once", ylabel=title, ylim=(0, None), xticks=sizes)
        axis.grid(alpha=0.3)
    save(figure, folder / "group_size.svg")


def beside_peft(folder: Path) -> None:
    """Draws time and peak memory of a step as shares of PEFT's."""
    head, *rows = read_table(SPEED, "| work | ours | PEFT |")
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axis = figure.subplots()
    for number, (column, title) in enumerate(((3, "time"), (4, "peak memory"))):
        there = [(place, float(row[column])) for place, row in enumerate(rows) if row[column]]
        places, values = zip(*there, strict=True)
        bars = axis.barh(
            [place + 0.4 * number - 0.2 for place in places], values, 0.38, color=COLOURS[number],
            label=title,
        )  # fmt: skip
        axis.bar_label(bars, [f"{value:.2f}" for value in values], padding=2, fontsize=8)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.annotate(
        "PEFT", (1.0, 1), (0, 2), xycoords=("data", "axes fraction"),
        textcoords="offset points", fontsize=9, ha="center", va="bottom",
    )  # fmt: skip
    axis.set_yticks(range(len(rows)), [row[0].replace("`", "") for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="share of PEFT's time or memory (lower is better)", xlim=(0, 1.15))
    figure.legend(fontsize=8, loc="outside lower right", ncols=2, frameon=False)
    save(figure, folder / "beside_peft.svg")


def memory_by_device(folder: Path) -> None:
    """Draws what compiled training steps hold on one device: arguments and temporary arrays."""
    head, *rows = read_table("devices.md", "| step | backbone | v5e |")
    wanted = ("base", "ppt/t5_large", "ppt/t5_xxl", "adapt/mlm")
    rows = [row for row in rows if row[0].strip("`") in wanted]
    devices = head[2:-1]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, row in zip(figure.subplots(1, len(rows), sharey=True), rows, strict=True):
        for place, cell in enumerate(row[2:-1]):
            held, temporary = map(float, re.findall(r"(\d+\.\d+) \+ (\d+\.\d+)", cell)[0])
            axis.bar(place, held, color=COLOURS[0], label="arguments" if not place else None)
            axis.bar(
                place, temporary, bottom=held, color=COLOURS[4],
                label="temporary" if not place else None,
            )  # fmt: skip
        axis.set_xticks(range(len(devices)), devices, rotation=60)
        axis.set_title(f"{row[0].strip('`')}\n{row[1].strip('`')}", fontsize=9)
    figure.axes[0].set_ylabel("GiB per device")
    figure.axes[0].legend(fontsize=8)
    save(figure, folder / "memory_by_device.svg")


def learning_curves(folder: Path) -> None:
    """Draws the dev accuracy of four methods over their steps."""
    curves = json.loads(CURVES.read_text())
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axis = figure.subplots()
    for number, (name, title) in enumerate(NAMES.items()):
        steps = curves[name]["step"]
        runs = curves[name]["dev"]
        means = [sum(values) / len(values) for values in zip(*runs, strict=True)]
        axis.plot(steps, means, color=COLOURS[number], label=title)
        low, high = ([pick(v) for v in zip(*runs, strict=True)] for pick in (min, max))
        axis.fill_between(steps, low, high, color=COLOURS[number], alpha=0.15)
    axis.set(xlabel="step", ylabel="dev accuracy", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, title="mean and range of 3 seeds", title_fontsize=8)
    save(figure, folder / "learning_curves.svg")


def spread(folder: Path) -> None:
    """Draws the test score of every seed, a panel per task."""
    tasks = json.loads(SEEDS.read_text())
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    names = list(next(iter(tasks.values())))  # the first task has all systems
    for axis, (task, systems) in zip(panels, tasks.items(), strict=True):
        for place, (name, scores) in enumerate(systems.items()):
            colour = COLOURS[names.index(name)]
            step = 0.3 / len(scores)
            beside = [place + step * (n - (len(scores) - 1) / 2) for n in range(len(scores))]
            axis.plot(beside, sorted(scores), "o", color=colour, markersize=4)
            axis.hlines(median(scores), place - 0.25, place + 0.25, color="black", linewidth=0.8)
        axis.set_xticks(range(len(systems)), list(systems), fontsize=8)
        axis.set(title=task, xlim=(-0.5, len(systems) - 0.5))
        axis.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("test accuracy of each seed")
    save(figure, folder / "seeds.svg")


def pretraining(folder: Path) -> None:
    """Draws the held-out accuracy of pre-training over the examples seen, a panel per task."""
    tasks = json.loads(PRETRAINING.read_text())
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axis, (task, runs) in zip(panels, tasks.items(), strict=True):
        for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
            thousands = [count / 1000 for count in run["examples"]]
            axis.plot(thousands, run["accuracy"], "o-", markersize=3, color=colour, label=name)
        axis.axhline(run["majority"], color="black", linewidth=0.8, linestyle="--")
        axis.set(title=task, xlabel="thousands of examples")
        axis.grid(alpha=0.3)
        if len(runs) > 1:
            axis.legend(fontsize=7)
    panels[0].set_ylabel("held-out accuracy")
    save(figure, folder / "pretraining.svg")


def instance_curves(folder: Path) -> None:
    """Draws the accuracy of prompts computed from each text over two of their fields."""
    fields = ("prompt.utilization", "prompt.length")
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axis, field in zip(figure.subplots(1, 2, sharey=True), fields, strict=True):
        head, *rows = read_table(PAPERS, f"| `{field}` |")
        places = [float(cell) for cell in head[1:]]
        for row, colour in zip(rows, COLOURS, strict=False):
            means, stds = zip(*map(mean_std, row[1:]), strict=True)
            axis.errorbar(places, means, yerr=stds, fmt="o-", capsize=4, color=colour, label=row[0])
        axis.set_xticks(places, head[1:])
        axis.set(xlabel=field)
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("accuracy")
    figure.axes[0].legend(fontsize=8)
    save(figure, folder / "instance_curves.svg")


def prefix_curves(folder: Path) -> None:
    """Draws the scores of P-tuning v2 over the layers that have a prefix, and over its length."""
    (_, *layers), *depths = read_table(PAPERS, "| layers with a prefix |")
    (_, *places), *lengths = read_table(PAPERS, "| tokens of the prefix |")
    columns = max(len(depths), len(lengths))
    figure = Figure(figsize=(4 * columns, 6), layout="constrained")
    axes = iter(figure.subplots(2, columns).flat)
    for name, *cells in depths:
        draw_depths(next(axes), name, dict(zip(layers, map(mean_std, cells), strict=True)))
    for name, *cells in lengths:
        draw_lengths(next(axes), name, places, cells)
    save(figure, folder / "prefix_curves.svg")


def score_label(name: str) -> str:
    """Turns the name of a row, "TREC, accuracy", into the label of an axis."""
    task, _, score = name.partition(", ")
    return f"test {score}, {task}"


def draw_depths(axis: Axes, name: str, found: dict[str, tuple[float, float]]) -> None:
    """Draws scores over the layers that have a prefix, of 6."""
    for label, names, colour in zip(
        ("lowest layers", "highest layers"),
        (("1-2", "1-4", "1-6"), ("5-6", "3-6", "1-6")), COLOURS, strict=False,
    ):  # fmt: skip
        means, stds = zip(*(found[layers] for layers in names), strict=True)
        axis.errorbar((2, 4, 6), means, yerr=stds, fmt="o-", capsize=4, color=colour, label=label)
    axis.set(
        xlabel="number of layers with a prefix (of 6)", xticks=(2, 4, 6), ylabel=score_label(name)
    )
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def draw_lengths(axis: Axes, name: str, places: list[str], cells: list[str]) -> None:
    """Draws scores over the length of a prefix."""
    means, stds = zip(*map(mean_std, cells), strict=True)
    tokens = [int(place) for place in places]
    axis.errorbar(tokens, means, yerr=stds, fmt="o-", capsize=4, color=COLOURS[0])
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, places)
    axis.set(xlabel="prefix length (tokens)", ylabel=score_label(name))
    axis.grid(alpha=0.3)


def record_seeds(grids: list[str]) -> None:
    """Reads test scores off grids, TASK,SYSTEM=WORKDIR each, and adds them to SEEDS."""
    found: dict[str, dict[str, list[float]]] = json.loads(SEEDS.read_text())
    for grid in grids:
        name, _, workdir = grid.partition("=")
        task, _, system = name.partition(",")
        paths = sorted(Path(workdir).glob("*/result.json"))
        results = (json.loads(path.read_text()) for path in paths)
        scores = [round(next(iter(result["test"].values())), 4) for result in results]
        found.setdefault(task, {})[system.replace("/", "\n")] = scores
    SEEDS.write_text(json.dumps(found) + "\n")


def record_pretraining(runs: list[str]) -> None:
    """Reads held-out accuracy off runs of `pretrain`, TASK,PROMPT=WORKDIR each -> PRETRAINING."""
    found: dict[str, dict[str, object]] = {}
    for run in runs:
        name, _, workdir = run.partition("=")
        task, _, prompt = name.partition(",")
        batch = json.loads((Path(workdir) / "config.json").read_text())["data"]["batch"]
        lines = map(json.loads, (Path(workdir) / "metrics.jsonl").read_text().splitlines())
        scored = [line for line in lines if "dev" in line]
        found.setdefault(task, {})[prompt] = {
            "examples": [line["step"] * batch for line in scored],
            "accuracy": [round(line["dev"]["accuracy"], 4) for line in scored],
            "majority": round(scored[-1]["dev"]["majority"], 4),
        }
    PRETRAINING.write_text(json.dumps(found) + "\n")


def record(runs: Path) -> None:
    """Reads dev accuracy off the runs of four methods, and writes CURVES."""
    found = {}
    for name in NAMES:
        parts = []
        for path in sorted(runs.glob(f"{name}-*/metrics.jsonl")):
            lines = map(json.loads, path.read_text().splitlines())
            parts.append([(x["step"], round(x["dev"]["accuracy"], 4)) for x in lines if "dev" in x])
        steps = [step for step, _ in parts[0]]
        found[name] = {"step": steps, "dev": [[value for _, value in part] for part in parts]}
    CURVES.write_text(json.dumps(found) + "\n")


def save(figure: Figure, path: Path) -> None:
    """Writes a picture without the time of its making."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--seeds"]:
        record_seeds(sys.argv[2:])
    elif sys.argv[1:2] == ["--pretraining"]:
        record_pretraining(sys.argv[2:])
    else:
        target = Path(sys.argv[1]) if sys.argv[1:] else HERE / "pictures"
        pictures = (
            accuracy_parameters, few_shot, group_size, beside_peft, memory_by_device,
            learning_curves, spread, pretraining, instance_curves, prefix_curves,
        )  # fmt: skip
        for draw in pictures:
            draw(target)
