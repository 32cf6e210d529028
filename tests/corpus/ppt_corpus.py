"""Corpora of numbers for the tests of pre-training tasks: a unit's ids tell where it stands."""

import numpy as np

from jaxprompt.corpus import Corpus
from jaxprompt.corpus.encode import EncodedDocuments
from jaxprompt.corpus.ppt import get_pattern, make_forms, option_counts
from jaxprompt.corpus.store import StoreWriter
from jaxprompt.data.text.encode import Answer, ExampleEncoder
from jaxprompt.data.text.specials import SENTINEL, read_specials
from jaxprompt.data.text.target import (
    Frame,
    branch_plan,
    make_answer_frame,
    masked_plan,
    read_answer,
)
from jaxprompt.data.text.template import parse
from jaxprompt.data.text.verbalizer import make_verbalizer
from jaxprompt.types import Role

FIRST = 2000  # ids below stand in no text
ENGLISH = """no maybe yes terrible bad good great ? . the correct one is answer""".split()
CHINESE = list("矛盾中立相似差不好一般赞二三四五六七八九十答案是为？。、")
LETTERS = list("abcdefghijklmnop")


def make_corpus(folder, documents):
    """Writes a store of documents, lists of units, lists of ids."""
    folder.mkdir()
    units = [unit for document in documents for unit in document]
    writer = StoreWriter(folder, "<u2")
    counts = np.array([len(document) for document in documents])
    lengths = np.array([len(unit) for unit in units])
    writer.add(EncodedDocuments(counts, lengths, np.concatenate(units)))
    fingerprint = {"files": {}, "settings": {"units": "paragraph"}, "tokenizer": "numbers"}
    writer.seal(fingerprint=fingerprint, stats={}, source="", skipped=0, first_skipped="")
    writer.close()
    return Corpus(folder)


def number_documents(lengths):
    """Makes documents of units of these lengths; each unit repeats its number, FIRST on."""
    number, documents = FIRST, []
    for unit_lengths in lengths:
        documents.append([[number + i] * length for i, length in enumerate(unit_lengths)])
        number += len(unit_lengths)
    return documents


def even_corpus(folder, documents=20, units=12, length=6):
    """A corpus in which all units are of one length."""
    return make_corpus(folder, number_documents([[length] * units] * documents))


def close_corpus(folder, documents=100, units=20):
    """A corpus in which neighbours are 3 tokens apart at most: nearer than a class of lengths."""
    rng = np.random.RandomState(0)
    walk = rng.randint(-3, 4, (documents, units)).cumsum(1) + rng.randint(20, 70, (documents, 1))
    return make_corpus(folder, number_documents(walk.clip(5, 80)))


def tiny_bert(words=ENGLISH + LETTERS):
    """A tokenizer that knows the words of patterns."""
    from transformers import BertTokenizer

    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    return BertTokenizer(vocab={word: i for i, word in enumerate(vocab)})


def bert_forms(name, *, max_len=1100, num_slots=4, style="en", options=None, **changes):
    """Lays a task out for a masked backbone."""
    tokenizer = tiny_bert(CHINESE + LETTERS if style == "zh" else ENGLISH + LETTERS)
    if options is None:
        options = option_counts(name) if name in ("nss", "unified") else (0,)
    return make_forms(
        get_pattern(name, style), tokenizer, "masked", num_slots=num_slots,
        max_len=max_len, options=options, **changes,
    )  # fmt: skip


def texts_of(row):
    """Cuts the texts out of a row. -> lists of ids"""
    is_text = np.concatenate([[0], row.roles == Role.TEXT, [0]]).astype(int)
    starts, stops = (np.flatnonzero(np.diff(is_text) == step) for step in (1, -1))
    return [row.ids[a:b].tolist() for a, b in zip(starts, stops, strict=True)]


def unit_numbers(row):
    """Tells which units of a corpus of numbers the texts of a row are."""
    return [text[0] - FIRST for text in texts_of(row)]


def text_lengths(examples):
    """Lengths of the texts of examples. [examples, texts]"""
    return np.array([[len(text) for text in texts_of(row)] for row, _ in examples], float)


def guess_by_trees(examples):
    """Accuracy of boosted trees that see the lengths of the texts alone, cross-validated."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import cross_val_predict
    from threadpoolctl import threadpool_limits

    lengths, labels = text_lengths(examples), np.array([label for _, label in examples])
    query, options = lengths[:, :1], lengths[:, 1:]
    gaps = options - query
    ranks = [x.argsort(1).argsort(1) for x in (options, abs(gaps))]
    inputs = np.concatenate([query, options, gaps, abs(gaps), *ranks], 1)
    trees = HistGradientBoostingClassifier(
        max_iter=15, learning_rate=0.2, max_leaf_nodes=8, early_stopping=False
    )
    with threadpool_limits(1):  # threads wait for each other where tests run side by side
        return (cross_val_predict(trees, inputs, labels, cv=3) == labels).mean()


def make_encoder(
    tokenizer, style, template, words, *, spaced, max_len=512, slots=0, decoder_slots=0, eos=False,
    option="", names=(),
):  # fmt: skip
    """Returns the encoder of a downstream task with a verbalizer."""
    answer, sentinels = read_answer("[mask] {label}")
    specials = read_specials(tokenizer, style, eos=eos, sentinel=SENTINEL, num_masks=sentinels)
    verbalizer = make_verbalizer(tokenizer, words, leading_space=spaced)
    is_seq2seq = style == "seq2seq"
    around = make_answer_frame(answer, specials) if is_seq2seq else Frame((), ())
    plan = masked_plan(verbalizer.ids)
    if style != "masked":
        plan = branch_plan(verbalizer.ids, around, whole=False)
    stem = (0, *around.stem) if is_seq2seq else ()
    return ExampleEncoder(
        tokenizer, parse(template), specials, num_slots=slots, num_masks=verbalizer.num_masks,
        max_len=max_len, needs_mask=True, num_types=2, option=option, names=names,
        answer=Answer(plan, stem, decoder_slots),
    )  # fmt: skip


def task_encoder(tokenizer, style, task, **options):
    """Returns the encoder of a task with a verbalizer."""
    template = task.causal if style == "causal" else task.template
    names = task.widest if task.options else [group[0] for group in task.words]
    return make_encoder(
        tokenizer, style, template, task.words, spaced=task.spaced, option=task.option,
        names=names, **options,
    )  # fmt: skip
