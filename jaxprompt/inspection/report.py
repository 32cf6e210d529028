"""Writes the results of an inspection: words as text, all as JSON, PNG files, and one HTML page."""

from pathlib import Path

import numpy as np

from jaxprompt.errors import escape
from jaxprompt.files import make_folder, write_atomic, write_error
from jaxprompt.inspection import pictures as draw
from jaxprompt.inspection.findings import START, Findings
from jaxprompt.inspection.learned_rows import LearnedRow
from jaxprompt.inspection.page import Page, with_marks, with_note
from jaxprompt.scoring.separation import class_separation, pca_project, tsne_embed
from jaxprompt.training.pictures import draw_curves, read_curves

PAGE, JSON, WORDS = "inspect.html", "inspect.json", "words.txt"
_IN_3D = 3  # plotted words per label (Zhang et al. 2022, figure 5)
_FEWEST = 8  # minimum points for t-SNE
_FOLDED = 8  # tables with more rows are collapsed
_STREAMS = {
    "encoder": "self-attention of the input",
    "decoder": "self-attention of the decoder",
    "cross": "cross-attention of the decoder",
}


def list_words(found: Findings) -> str:
    """Returns one line for each trained vector, with its nearest words."""
    lines = []
    for row in found.rows:
        words = ", ".join(f"{word.token} {word.cosine:.2f}" for word in row.nearest)
        moved = ""
        if row.start_nearest is not None:
            near = f"{row.start_nearest.token} {row.start_nearest.cosine:.2f}"
            moved = f"  (cosine {row.cosine:.4f} with its start, nearest {near})"
        lines.append(f"{_name(row)}: {words}{moved}")
    return escape("".join(line + "\n" for line in lines) or found.notes["rows"] + "\n")


def list_instances(found: Findings, colours: bool) -> str:
    """Returns texts with the words nearest to their prompts in red, or in brackets."""
    lines = []
    for case in found.instances.shown if found.instances else ():
        words = [
            (f"\x1b[31m{escape(word)}\x1b[0m" if colours else f"[{escape(word)}]")
            if place in case.nearest else escape(word)
            for place, word in enumerate(case.tokens)
        ]  # fmt: skip
        lines.append(f"{escape(case.label) or 'unknown class'}: {' '.join(words)}\n")
    return "".join(lines)


def write_report(found: Findings, workdir: str, title: str) -> list[Path]:
    """Writes all files to WORKDIR/inspect.

    Returns:
      The paths, the page first.

    Raises:
      InputError: if the files cannot be written.
    """
    folder = make_folder(Path(workdir) / "inspect")
    try:
        for old in folder.glob("*.png"):  # of earlier inspections
            old.unlink()
    except OSError as error:
        raise write_error(folder, error) from error
    page = Page(title)
    page.table((), list(found.about.items()), breaks=True)
    for remark in found.remarks:
        page.say(f"Note: {remark}.")
    pictures = _write_rows(page, found)
    pictures += _write_states(page, found, folder)
    pictures += _write_instances(page, found, folder)
    pictures += _write_labels(page, found, folder)
    pictures += _write_confusion(page, found, folder)
    pictures += _write_attention(page, found, folder)
    pictures += _write_curves(page, workdir, folder)
    texts = {PAGE: page.text(), JSON: found.to_json(), WORDS: list_words(found)}
    for name, text in texts.items():
        write_atomic(folder / name, text)
    return [folder / name for name in texts] + pictures


def _name(row: LearnedRow) -> str:
    return f"{row.kind} {row.name}"


def _step(step: int) -> str:
    return "before training" if step == START else f"step {step}"


def _write_rows(page: Page, found: Findings) -> list[Path]:
    page.section("Nearest words")
    if "rows" in found.notes:
        page.say(found.notes["rows"])
        return []
    page.say(
        "The tokens of the vocabulary whose embeddings have the highest cosine with each trained "
        f"vector at step {found.step}, and the cosine of the vector with its initial value."
    )
    rows = []
    for row in found.rows:
        near = with_note([(word.token, f"{word.cosine:.2f}") for word in row.nearest])
        start = "unknown"
        if row.start_nearest is not None:
            start = with_note([(row.start_nearest.token, f"{row.start_nearest.cosine:.2f}")])
        cosine = "" if row.cosine is None else f"{row.cosine:.4f}"
        rows.append((_name(row), near, start, cosine))
    page.table(("vector", "nearest words", "initially nearest", "cosine with initial value"), rows)
    return []


def _write_states(page: Page, found: Findings, folder: Path) -> list[Path]:
    page.section("Hidden states that the head reads")
    states = found.states
    if states is None:
        page.say(found.notes["states"])
        return []
    page.say(
        "R_D is the mean distance between hidden states within a class, divided by that between "
        "classes (Zhang et al. 2022, appendix A.6). A lower value means better separated classes. "
        "The states are those of the last layer at the position that the head reads."
    )
    rows = [
        (_step(step), f"{own.ratio:.4f}", f"{own.intra:.3f}", f"{own.inter:.3f}")
        for step, own in states.separations.items()
    ]
    page.table(("", "R_D", "within a class", "between classes"), rows, folded=len(rows) > _FOLDED)
    made = []
    if len(states.separations) > 1:
        ratios = {step: own.ratio for step, own in states.separations.items()}
        made.append(draw.draw_ratio(ratios, found.step, folder / "ratio.png"))
        page.pictures([(made[0], "R_D at the saved steps")], wide=True)
    else:
        page.say("Only one step is saved; raise train.keep to get a curve of R_D.")
    steps = list(states.pictured)
    # Projected together, so that the figures of all steps have the same axes.
    whole = pca_project(np.concatenate(list(states.pictured.values())), 2)
    parts = np.split(whole, len(steps))
    limits = whole.min(0), whole.max(0)
    for kind, points, where in (
        ("PCA", parts, limits),
        ("t-SNE", [tsne_embed(own, 2) for own in states.pictured.values()], None),
    ):
        paths = []
        for step, own in zip(steps, points, strict=True):
            ratio = states.separations[step].ratio
            title = f"{kind}, {_step(step)}, $R_D$ {ratio:.3f}"
            path = folder / f"{kind.lower().replace('-', '')}-{step}.png"
            draw.draw_states(own, states.labels, states.names, title, path, where)
            paths.append((path, f"{kind} of the states, {_step(step)}"))
        page.pictures(paths)
        made += [path for path, _ in paths]
    if len(states.names) > draw.NAMED:
        page.say(f"The {len(states.names)} classes differ by colour and marker, without a legend.")
    return made


def _write_instances(page: Page, found: Findings, folder: Path) -> list[Path]:
    own = found.instances
    if own is None:
        return []
    page.section("Prompts of texts")
    if own.shown:
        page.say(
            "Marked are the words of a text whose embeddings have the highest cosine with any "
            "vector of its prompt (Jiang et al. 2022, table 4)."
        )
        rows = [(c.label or "unknown", with_marks(c.tokens, c.nearest)) for c in own.shown]
        page.table(("class", "text"), rows)
    else:
        page.say("The prompt consists of keys and values, which cannot be compared with words.")
    if own.places is None:
        return []
    names, labels, *both = own.places
    page.say(
        "Each text as the mean of its word embeddings, and as the mean of its prompt (Jiang et al. "
        "2022, figure 4). R_D is the mean distance within a class divided by that between classes."
    )
    paths = []
    for name, states in zip(("embeddings", "prompts"), both, strict=True):
        ratio = class_separation(states, labels)
        shown = f", $R_D$ {ratio.ratio:.3f}" if ratio else ""
        for kind, place in (("PCA", pca_project), ("t-SNE", tsne_embed)):
            path = folder / f"{name}-{kind.lower().replace('-', '')}.png"
            title = f"{kind} of {name}{shown}"
            draw.draw_states(place(states, 2), labels, names, title, path)
            paths.append((path, f"{kind} of the {name} of {len(states)} texts"))
    page.pictures(paths)
    return [path for path, _ in paths]


def _write_labels(page: Page, found: Findings, folder: Path) -> list[Path]:
    page.section("Label rows in three dimensions")
    rows = found.label_rows
    if not rows:
        page.say(found.notes["labels"])
        return []
    words = [(number, word) for number, row in enumerate(rows) for word in row.nearest[:_IN_3D]]
    begun = [row.start for row in rows if row.start is not None]
    has_starts = len(begun) == len(rows)
    near_words = [word.vector for _, word in words]
    parts = [[row.vector for row in rows], begun if has_starts else [], near_words]
    points = np.concatenate([np.stack(part) for part in parts if part])
    points = points / np.maximum(np.linalg.norm(points, axis=-1, keepdims=True), 1e-30)
    bounds = np.cumsum([len(part) for part in parts])[:2]
    paths = []
    for kind, place in (("PCA", pca_project), ("t-SNE", tsne_embed)):
        if place is tsne_embed and len(rows) + len(words) < _FEWEST:
            page.say(f"t-SNE is left out: {len(rows) + len(words)} points are too few for it.")
            continue
        # t-SNE does not preserve distances, so only PCA shows how far a row moved.
        moves = has_starts and place is pca_project
        own = points if moves else np.concatenate([points[: bounds[0]], points[bounds[1] :]])
        labels, starts, near = np.split(place(own, 3), bounds if moves else bounds[[0, 0]])
        path = draw.draw_labels(
            labels, starts if moves else None, near, [owner for owner, _ in words],
            [row.name for row in rows], [word.token for _, word in words],
            f"{kind} of label rows", folder / f"labels-{kind.lower().replace('-', '')}.png",
        )  # fmt: skip
        said = f"{kind} of the label rows (stars) and their nearest words, scaled to length 1"
        paths.append((path, said + (", with their initial values (rings)" if moves else "")))
    page.pictures(paths)
    return [path for path, _ in paths]


def _write_confusion(page: Page, found: Findings, folder: Path) -> list[Path]:
    page.section("Confusion matrix")
    if found.confusion is None:
        page.say(found.notes["confusion"])
        return []
    names, counts = found.confusion
    path = draw.draw_confusion(counts, names, folder / "confusion.png")
    right, known = int(np.trace(counts)), int(counts.sum())
    page.say(f"{right} of {known} answers are right.")
    caption = "Examples by true label (rows) and predicted label (columns)"
    page.pictures([(path, caption)], wide=True)
    return [path]


def _write_attention(page: Page, found: Findings, folder: Path) -> list[Path]:
    page.section("Attention on the prompt")
    if not found.attention:
        page.say(found.notes["attention"])
        return []
    page.say(
        "The share of the attention that falls on the prompt, its keys in front or its soft "
        "tokens, by layer and head: the mean over all tokens that are not soft, and that of the "
        "position that the head reads. Even attention would give every key that is seen the same."
    )
    paths = []
    for name, own in found.attention.items():
        parts = {"all tokens": own.tokens}
        if not np.isnan(own.read).any():
            parts["position read"] = own.read
        path = folder / f"attention-{name}.png"
        draw.draw_attention(parts, own.even, _STREAMS[name], path)
        mean = f"mean {own.tokens.mean():.3f}, uniform attention {own.even:.3f}"
        paths.append((path, f"Share of the prompt in the {_STREAMS[name]}: {mean}"))
    page.pictures(paths, wide=True)
    return [path for path, _ in paths]


def _write_curves(page: Page, workdir: str, folder: Path) -> list[Path]:
    page.section("Learning curves")
    if not read_curves(workdir):
        page.say("The run has written no metrics, so there are no curves.")
        return []
    path = draw_curves(workdir, path=folder / "curves.png")
    page.pictures([(path, "Loss and dev score over the steps")], wide=True)
    return [path]
