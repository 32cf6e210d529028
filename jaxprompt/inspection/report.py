"""Writes the results of an inspection: words as text, all as JSON, PNG files, and one HTML page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxprompt.errors import escape
from jaxprompt.files import make_folder, write_atomic, write_error
from jaxprompt.inspection import pictures as draw
from jaxprompt.inspection.findings import START, AttentionShare, Confusion, Findings, States
from jaxprompt.inspection.instances import Instances
from jaxprompt.inspection.learned_rows import LearnedRow, Word, normalize_rows
from jaxprompt.inspection.page import Markup, Page, markup_with_marks, markup_with_notes
from jaxprompt.scoring.separation import class_separation, pca_project, tsne_embed
from jaxprompt.training.pictures import draw_curves, read_curves

PAGE, JSON, WORDS = "inspect.html", "inspect.json", "words.txt"
_PLOTTED_WORDS = 3  # plotted words per label (Zhang et al. 2022, figure 5)
_MIN_TSNE_POINTS = 8  # minimum points for t-SNE
_MAX_OPEN_ROWS = 8  # tables with more rows are collapsed
_PROJECTIONS = {"PCA": pca_project, "t-SNE": tsne_embed}
_STREAMS = {
    "encoder": "self-attention of the input",
    "decoder": "self-attention of the decoder",
    "cross": "cross-attention of the decoder",
}


def list_words(findings: Findings) -> str:
    """Returns one line for each trained vector, with its nearest words."""
    lines = []
    for row in findings.rows:
        words = ", ".join(f"{word.token} {word.cosine:.2f}" for word in row.nearest)
        start_note = ""
        if row.start_nearest is not None:
            start_word = f"{row.start_nearest.token} {row.start_nearest.cosine:.2f}"
            start_note = f"  (cosine {row.cosine:.4f} with its start, nearest {start_word})"
        lines.append(f"{_row_title(row)}: {words}{start_note}")
    return escape("".join(line + "\n" for line in lines) or findings.notes["rows"] + "\n")


def list_instances(findings: Findings, colours: bool) -> str:
    """Returns texts with the words nearest to their prompts in red, or in brackets."""
    lines = []
    for case in findings.instances.shown if findings.instances else ():
        words = [
            (f"\x1b[31m{escape(word)}\x1b[0m" if colours else f"[{escape(word)}]")
            if position in case.nearest
            else escape(word)
            for position, word in enumerate(case.tokens)
        ]
        lines.append(f"{escape(case.label) or 'unknown class'}: {' '.join(words)}\n")
    return "".join(lines)


def list_errors(findings: Findings) -> str:
    """Returns one line for each of the most confident errors: classes, score and text."""
    lines = []
    for example in findings.errors:
        classes = f"{example.label} predicted as {example.prediction}"
        lines.append(f"{classes} {example.score:.2f}: {example.text} ({example.origin})\n")
    return escape("".join(lines))


def write_report(findings: Findings, workdir: str, title: str) -> list[Path]:
    """Writes all files to WORKDIR/inspect.

    Returns:
      The paths, the page first.

    Raises:
      InputError: if the files cannot be written.
    """
    folder = make_folder(Path(workdir) / "inspect")
    try:
        for path in folder.glob("*.png"):  # of earlier inspections
            path.unlink()
    except OSError as error:
        raise write_error(folder, error) from error
    page = Page(title)
    page.table((), list(findings.about.items()), breaks=True)
    for remark in findings.remarks:
        page.paragraph(f"Note: {remark}.")
    notes = findings.notes
    page.section("Nearest words", notes.get("rows", ""))
    if findings.rows:
        _write_rows(page, findings)
    page.section("Hidden states that the head reads", notes.get("states", ""))
    if findings.states:
        _write_states(page, findings.states, findings.step, folder)
    if findings.instances:
        page.section("Prompts of texts")
        _write_instances(page, findings.instances, folder)
    page.section("Label rows in two dimensions", notes.get("labels", ""))
    if findings.label_rows:
        _write_labels(page, findings.label_rows, folder)
    page.section("Confusion matrix", notes.get("confusion", ""))
    if findings.confusion:
        _write_confusion(page, findings.confusion, folder)
    if findings.errors or "errors" in notes:
        page.section("Most confident errors", notes.get("errors", ""))
        rows = [
            (x.text, x.label, x.prediction, f"{x.score:.2f}", x.origin) for x in findings.errors
        ]
        page.table(("text", "true label", "predicted label", "score", "row"), rows)
    page.section("Attention on the prompt", notes.get("attention", ""))
    if findings.attention:
        _write_attention(page, findings.attention, folder)
    page.section("Learning curves")
    if read_curves(workdir):
        curves = draw_curves(workdir, path=folder / "curves.png")
        page.pictures([(curves, "Loss and dev score over the steps")], wide=True)
    else:
        page.paragraph("The run has written no metrics, so there are no curves.")
    texts = {PAGE: page.text(), JSON: findings.to_json(), WORDS: list_words(findings)}
    for name, text in texts.items():
        write_atomic(folder / name, text)
    return [folder / name for name in texts] + page.paths


def _row_title(row: LearnedRow) -> str:
    return f"{row.kind} {row.name}"


def _step_title(step: int) -> str:
    return "before training" if step == START else f"step {step}"


def _file_name(kind: str) -> str:
    return kind.lower().replace("-", "")


def _write_rows(page: Page, findings: Findings) -> None:
    page.paragraph(
        "The tokens of the vocabulary whose embeddings have the highest cosine with each trained "
        f"vector at step {findings.step}, and the cosine of the vector with its initial value."
    )

    def markup(words: Sequence[Word]) -> Markup:
        return markup_with_notes([(word.token, f"{word.cosine:.2f}") for word in words])

    rows = [
        (
            _row_title(row),
            markup(row.nearest),
            "unknown" if row.start_nearest is None else markup([row.start_nearest]),
            "" if row.cosine is None else f"{row.cosine:.4f}",
        )
        for row in findings.rows
    ]
    page.table(("vector", "nearest words", "initially nearest", "cosine with initial value"), rows)


def _write_states(page: Page, states: States, best: int, folder: Path) -> None:
    page.paragraph(
        "R_D is the mean distance between hidden states within a class, divided by that between "
        "classes (Zhang et al. 2022, appendix A.6). A lower value means better separated classes. "
        "The states are those of the last layer at the position that the head reads."
    )
    rows = [
        (_step_title(step), f"{x.ratio:.4f}", f"{x.intra:.3f}", f"{x.inter:.3f}")
        for step, x in states.separations.items()
    ]
    page.table(
        ("", "R_D", "within a class", "between classes"), rows, folded=len(rows) > _MAX_OPEN_ROWS
    )
    if len(rows) > 1:
        ratios = {step: separation.ratio for step, separation in states.separations.items()}
        picture = draw.draw_ratio(ratios, best, folder / "ratio.png")
        page.pictures([(picture, "R_D at the saved steps")], wide=True)
    else:
        page.paragraph("Only one step is saved; raise train.keep to get a curve of R_D.")
    # Projected together, so that the figures of all steps have the same axes.
    projected = pca_project(np.concatenate(list(states.pictured.values())), 2)
    parts = np.split(projected, len(states.pictured))
    limits = projected.min(0), projected.max(0)
    for kind, points, axis_limits in (
        ("PCA", parts, limits),
        ("t-SNE", [tsne_embed(x, 2) for x in states.pictured.values()], None),
    ):
        paths = []
        for step, step_points in zip(states.pictured, points, strict=True):
            title = f"{kind}, {_step_title(step)}, $R_D$ {states.separations[step].ratio:.3f}"
            path = folder / f"{_file_name(kind)}-{step}.png"
            draw.draw_states(step_points, states.labels, states.names, title, path, axis_limits)
            paths.append((path, f"{kind} of the states, {_step_title(step)}"))
        page.pictures(paths)
    if len(states.names) > draw.MAX_NAMED_CLASSES:
        page.paragraph(
            f"The {len(states.names)} classes differ by colour and marker, without a legend."
        )


def _write_instances(page: Page, instances: Instances, folder: Path) -> None:
    if instances.shown:
        page.paragraph(
            "Marked are the words of a text whose embeddings have the highest cosine with any "
            "vector of its prompt (Jiang et al. 2022, table 4)."
        )
        rows = [
            (c.label or "unknown", markup_with_marks(c.tokens, c.nearest)) for c in instances.shown
        ]
        page.table(("class", "text"), rows)
    else:
        page.paragraph(
            "The prompt consists of keys and values, which cannot be compared with words."
        )
    if instances.places is None:
        return
    names, labels, *vectors = instances.places
    page.paragraph(
        "Each text as the mean of its word embeddings, and as the mean of its prompt (Jiang et al. "
        "2022, figure 4). R_D is the mean distance within a class divided by that between classes."
    )
    paths = []
    for name, states in zip(("embeddings", "prompts"), vectors, strict=True):
        ratio = class_separation(states, labels)
        ratio_text = f", $R_D$ {ratio.ratio:.3f}" if ratio else ""
        for kind, reduce in _PROJECTIONS.items():
            path = folder / f"{name}-{_file_name(kind)}.png"
            title = f"{kind} of {name}{ratio_text}"
            draw.draw_states(reduce(states, 2), labels, names, title, path)
            paths.append((path, f"{kind} of the {name} of {len(states)} texts"))
    page.pictures(paths)


def _write_labels(page: Page, rows: Sequence[LearnedRow], folder: Path) -> None:
    words = [
        (number, word) for number, row in enumerate(rows) for word in row.nearest[:_PLOTTED_WORDS]
    ]
    starts = [row.start for row in rows if row.start is not None]
    has_starts = len(starts) == len(rows)
    paths = []
    for kind, reduce in _PROJECTIONS.items():
        if reduce is tsne_embed and len(rows) + len(words) < _MIN_TSNE_POINTS:
            page.paragraph(
                f"t-SNE is left out: {len(rows) + len(words)} points are too few for it."
            )
            continue
        # t-SNE does not preserve distances, so only PCA shows how far a row moved.
        moves = has_starts and reduce is pca_project
        parts = [
            [row.vector for row in rows],
            starts if moves else [],
            [word.vector for _, word in words],
        ]
        points = reduce(normalize_rows(np.concatenate([np.stack(x) for x in parts if x])), 2)
        labels, initial, word_points = np.split(points, np.cumsum(list(map(len, parts)))[:2])
        path = draw.draw_labels(
            labels,
            initial if moves else None,
            word_points,
            [owner for owner, _ in words],
            [row.name for row in rows],
            [word.token for _, word in words],
            f"{kind} of label rows",
            folder / f"labels-{_file_name(kind)}.png",
        )
        caption = f"{kind} of the label rows (stars) and their nearest words, scaled to length 1"
        paths.append((path, caption + (", with their initial values (rings)" if moves else "")))
    page.pictures(paths)


def _write_confusion(page: Page, confusion: Confusion, folder: Path) -> None:
    names, counts = confusion
    path = draw.draw_confusion(counts, names, folder / "confusion.png")
    page.paragraph(f"{int(np.trace(counts))} of {int(counts.sum())} answers are right.")
    caption = "Examples by true label (rows) and predicted label (columns)"
    page.pictures([(path, caption)], wide=True)


def _write_attention(page: Page, attention: Mapping[str, AttentionShare], folder: Path) -> None:
    page.paragraph(
        "The share of the attention that falls on the prompt, its keys in front or its soft "
        "tokens, by layer and head: the mean over all tokens that are not soft, and that of the "
        "position that the head reads. Even attention would give every key that is seen the same."
    )
    paths = []
    for name, shares in attention.items():
        parts = {"all tokens": shares.tokens}
        if not np.isnan(shares.read).any():
            parts["position read"] = shares.read
        path = folder / f"attention-{name}.png"
        draw.draw_attention(parts, shares.even, _STREAMS[name], path)
        mean = f"mean {shares.tokens.mean():.3f}, uniform attention {shares.even:.3f}"
        paths.append((path, f"Share of the prompt in the {_STREAMS[name]}: {mean}"))
    page.pictures(paths, wide=True)
