"""The corpus store: what is in it, when it is made anew, and what a bad end leaves."""

import gzip
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from jaxprompt.corpus import Corpus, TextSettings, check_unchanged, check_vocabulary, index_corpus
from jaxprompt.corpus import index as indexing
from jaxprompt.corpus.read import DocumentSource
from jaxprompt.corpus.split import split_units
from jaxprompt.corpus.store import META
from jaxprompt.data.text.tokenizer import encode_texts
from jaxprompt.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", "one", "two", "three", "##s"]
ROWS = ["one two\nthree\n", "", "a [MASK] ones", " \n ", "b\n\x07\x07\nc d"]


@pytest.fixture(scope="module")
def tiny():
    from transformers import BertTokenizer

    return BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})


@pytest.fixture
def folder(tmp_path):
    """A corpus of 3 documents with text, in two files."""
    path = tmp_path / "text"
    path.mkdir()
    write(path / "a.jsonl", ROWS[:3])
    write(path / "b.jsonl.gz", ROWS[3:])
    return path


def write(path, texts):
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def index(source, tokenizer, store, processes=1, report=None, **settings):
    where = {"processes": processes, "report": report}
    return index_corpus(str(source), tokenizer, store, TextSettings(**settings), **where)


def ids(corpus):
    return [[unit.tolist() for unit in corpus.document(i)] for i in range(len(corpus))]


def words(*texts):
    """Ids of the words of each unit."""
    number = {word: i for i, word in enumerate(WORDS)}
    return [[number[word] for word in text.split()] for text in texts]


EXPECTED = [words("one two", "three"), words("a [UNK] [UNK] [UNK] one ##s"), words("b", "", "c d")]


def test_documents_and_units(folder, tiny, tmp_path):
    corpus = index(folder, tiny, tmp_path / "store")
    assert ids(corpus) == EXPECTED
    assert len(corpus) == 3 and corpus.num_units == 6 and corpus.num_tokens == 12
    assert corpus.empty == 2 and corpus.skipped == 0 and corpus.max_id == WORDS.index("##s")
    for number, units in enumerate(EXPECTED):
        assert corpus.tokens(number).tolist() == sum(units, [])
        assert corpus.unit_lengths(number).tolist() == [len(unit) for unit in units]
        document_units = corpus.units(number)
        assert [corpus.unit(i).tolist() for i in document_units] == units
    assert corpus.lengths().tolist() == [3, 6, 3]
    every = sum(sum(EXPECTED, []), [])
    assert corpus.token_counts().tolist() == np.bincount(every).tolist()
    assert corpus.unit(0).dtype == np.uint16 and not corpus.unit(0).flags.writeable
    assert ids(pickle.loads(pickle.dumps(corpus))) == EXPECTED


@pytest.mark.long_cases("paragraph-roberta")
@pytest.mark.parametrize("name", ["bert", "roberta", "t5"])
@pytest.mark.parametrize("units", ["paragraph", "sentence"])
def test_ids_are_those_of_transformers_behind_a_space(shared, name, units, tmp_path, request):
    tokenizer = request.getfixturevalue(name)
    before = tokenizer.backend_tokenizer.to_str()
    source = tmp_path / "x.jsonl"
    place = shared / "data/corpus_books_en/dev.jsonl.gz"
    odd = "He <mask> said  </s> this.\nAnd [MASK]\t<extra_id_0> that — 東京 ﬁn."
    texts = [*DocumentSource(str(place), TextSettings())][:6] + [odd]
    write(source, texts)
    corpus = index(source, tokenizer, tmp_path / "store", units=units)
    assert tokenizer.backend_tokenizer.to_str() == before
    cut = dict(units=units, paragraphs="line", language="en")
    expected = [[f" {unit}" for unit in split_units(text, **cut)] for text in texts]
    assert ids(corpus) == [encode_texts(tokenizer, units) for units in expected]


def test_a_tokenizer_without_a_rust_half(folder, tmp_path):
    from transformers import ByT5Tokenizer

    corpus = index(folder, ByT5Tokenizer(), tmp_path / "store")
    assert corpus.document(0)[1].tolist() == [byte + 3 for byte in b" three"]


def test_wide_vocabulary(folder, tmp_path):
    from transformers import BertTokenizer

    vocab = {word: i for i, word in enumerate(WORDS)}
    vocab |= {f"x{i}": i for i in range(len(WORDS), 70000)} | {"wide": 70000}
    (folder / "c.txt").write_text("wide one")
    corpus = index(folder, BertTokenizer(vocab=vocab), tmp_path / "store")
    assert corpus.tokens(3).tolist() == [70000, vocab["one"]]
    assert corpus.tokens(3).dtype == np.uint32


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.slow
def test_the_store_does_not_depend_on_the_processes(shared, bert, tmp_path):
    place = shared / "data/corpus_books_en/dev.jsonl.gz"
    stores = [index(place, bert, tmp_path / str(n), n, units="sentence") for n in (1, 2, 3)]
    assert len(stores[0]) == 111 and stores[0].num_units > 9000
    first = contents(stores[0].folder)
    assert set(first) == {"tokens.bin", "units.bin", "documents.bin", META}
    assert all(contents(store.folder) == first for store in stores[1:])


# -- made once ------------------------------------------------------------------------------------


def test_a_store_is_made_anew_when_something_changes_only(folder, tiny, tmp_path):
    from transformers import BertTokenizer

    said = []
    make = lambda tokenizer=tiny, **kw: index(
        folder, tokenizer, tmp_path / "s", 1, said.append, **kw
    )
    first = make()
    assert len(said) == 1 and said[0].startswith("indexed 3 documents, 6 units, 12 tokens in")
    assert make().folder == make(on_error="skip").folder == first.folder and len(said) == 1
    tiny("one two", padding="max_length", max_length=9, truncation=True)  # leaves its mark
    os.utime(folder / "a.jsonl", (1, 1))
    assert make().folder == first.folder and len(said) == 1
    moved = folder.rename(tmp_path / "moved")
    assert index(moved, tiny, tmp_path / "s").folder == first.folder
    moved.rename(folder)

    changes = [make(units="sentence"), make(language="zh"), make(max_document=10**6)]
    changes.append(make(BertTokenizer(vocab={word: i for i, word in enumerate(WORDS[:-1])})))
    changes.append(make(BertTokenizer(vocab=tiny.get_vocab(), do_lower_case=False)))
    write(folder / "a.jsonl", ["one two\nthree\n", "", "a [MASK] twos"])  # of the same size
    changes.append(make())
    assert len(said) == 7 and len({store.folder for store in [first, *changes]}) == 7
    assert ids(first) == EXPECTED and ids(changes[-1])[1] == words("a [UNK] [UNK] [UNK] two ##s")


def test_files_seen_before_are_not_read_again(folder, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "jaxprompt.corpus.read._CLOCK_SECONDS", -1
    )  # as if they were not just written
    index(folder, tiny, tmp_path / "store")
    monkeypatch.setattr(
        "jaxprompt.corpus.read.file_checksum", lambda path: pytest.fail(f"read {path}")
    )
    index(folder, tiny, tmp_path / "store")
    index(folder, tiny, tmp_path / "store", units="sentence")


@pytest.mark.parametrize("moment", ["later", "at once"])
def test_an_edit_of_equal_size_and_time_is_seen(folder, tiny, tmp_path, monkeypatch, moment):
    """The time is set back, as by rsync or tar; or the clock has not moved since the last look."""
    path = folder / "a.jsonl"
    if moment == "later":
        monkeypatch.setattr("jaxprompt.corpus.read._CLOCK_SECONDS", -1)
    else:
        monkeypatch.setattr("jaxprompt.corpus.read.stat_key", lambda path: f"{path}:as before")
    before, first = path.stat(), index(folder, tiny, tmp_path / "store")
    text = path.read_bytes()
    path.write_bytes(text.replace(b"a [MASK] ones", b"a [MASK] twos"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second = index(folder, tiny, tmp_path / "store")
    assert second.folder != first.folder
    assert ids(second)[1] == words("a [UNK] [UNK] [UNK] two ##s")


FINGERPRINT = {
    "files": {"a.txt": [1, 5], "b.txt": [2, 6]}, "settings": {"units": "paragraph"},
    "tokenizer": "f00",
}  # fmt: skip
SENTENCES = {"settings": {"units": "sentence"}}
FILES = {"files": {"a.txt": [3, 5], "c.txt": [2, 6]}}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"files": {"a.txt": [1, 4], "b.txt": [2, 6]}}, [r"a.txt was \[1, 5\], and is \[1, 4\]"]),
        (FILES, ["b.txt was .*, and is absent", "c.txt was absent"]),
        ({"tokenizer": "b0"}, ["the tokenizer was f00, and is b0"]),
        (SENTENCES, ["corpus.units was paragraph, and is sentence"]),
        (FILES | SENTENCES | {"tokenizer": "b0"}, ["5 changes"]),
    ],
)
def test_what_changed_is_named(changes, named):
    check_unchanged(FINGERPRINT, dict(FINGERPRINT))
    with pytest.raises(InputError) as error:
        check_unchanged(FINGERPRINT, FINGERPRINT | changes)
    assert all(re.search(part, str(error.value)) for part in named)


# -- bad input ------------------------------------------------------------------------------------


def test_empty_corpus(tiny, tmp_path):
    write(tmp_path / "x.jsonl", ["", " \n"])
    with pytest.raises(InputError, match="is empty: no document has text, 2 are blank, 0 skipped$"):
        index(tmp_path / "x.jsonl", tiny, tmp_path / "store")
    (tmp_path / "x.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(InputError, match="0 are blank, 1 skipped .*not UTF-8"):
        index(tmp_path / "x.jsonl", tiny, tmp_path / "store", on_error="skip")
    (tmp_path / "x.jsonl").write_bytes(b"")
    with pytest.raises(InputError, match="is empty"):
        index(tmp_path / "x.jsonl", tiny, tmp_path / "store")
    assert not [path for path in (tmp_path / "store").iterdir() if path.is_dir()]


def test_skipped_documents_are_counted_and_no_secret(folder, tiny, tmp_path):
    (folder / "c.txt").write_bytes(b"one \xff")
    with pytest.raises(InputError, match="c.txt: not UTF-8 .*; .* corpus.on_error=skip"):
        index(folder, tiny, tmp_path / "store")
    corpus = index(folder, tiny, tmp_path / "store", on_error="skip")
    assert ids(corpus) == EXPECTED and corpus.skipped == 1 and "c.txt" in corpus.first_skipped
    with pytest.raises(InputError, match="c.txt: not UTF-8 .*; .* corpus.on_error=skip"):
        index(folder, tiny, tmp_path / "store")  # the finished store has them left out


def test_documents_that_repeat_others_are_counted(folder, tiny, tmp_path):
    assert index(folder, tiny, tmp_path / "store").notes() == []
    shutil.copy(folder / "a.jsonl", folder / "c.jsonl")
    corpus = index(folder, tiny, tmp_path / "store")
    again = len(corpus) - len(EXPECTED)
    assert corpus.repeats == again > 0
    (line,) = corpus.notes()
    assert line.startswith(f"{again} of {len(corpus)} documents are exact copies of another; one ")
    # The same words divided otherwise are the same text, others are not.
    write(tmp_path / "d.jsonl", ["one two", "one\ntwo", "two one", "one"])
    assert index(tmp_path / "d.jsonl", tiny, tmp_path / "store").repeats == 1


def test_ids_beyond_the_embedding(tiny):
    check_vocabulary(tiny, len(WORDS))
    message = r"ids up to 18 \('##s'\), .* 18 rows; .* vocab_size of at least 19"
    with pytest.raises(InputError, match=message):
        check_vocabulary(tiny, len(WORDS) - 1)


def test_a_corpus_that_changes_while_it_is_indexed(folder, tiny, tmp_path, monkeypatch):
    batches = indexing._batches

    def meddle(documents):
        yield from batches(documents)
        (folder / "a.jsonl").write_text("")

    monkeypatch.setattr(indexing, "_batches", meddle)
    with pytest.raises(InputError, match="a.jsonl changed while it was indexed"):
        index(folder, tiny, tmp_path / "store")
    assert not [path for path in (tmp_path / "store").iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", ["tokens.bin", "units.bin", "documents.bin", META])
def test_damaged_stores(folder, tiny, tmp_path, name):
    """Each bit of each file counts, and the message says how to get the store back."""
    corpus = index(folder, tiny, tmp_path / "store")
    path = corpus.folder / name
    whole = path.read_bytes()
    for at in range(0, len(whole), 1 if name != META else 41):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(InputError, match=f"{path} is damaged, .*delete {corpus.folder},"):
            index(folder, tiny, tmp_path / "store")
    for cut in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(cut)
        with pytest.raises(InputError, match=f"{path} is damaged, .*delete {corpus.folder},"):
            index(folder, tiny, tmp_path / "store")
    shutil.rmtree(corpus.folder)
    assert ids(index(folder, tiny, tmp_path / "store")) == EXPECTED


def test_a_store_without_its_metadata(folder, tiny, tmp_path):
    corpus = index(folder, tiny, tmp_path / "store")
    (corpus.folder / META).unlink()
    with pytest.raises(InputError, match="there is no corpus store"):
        Corpus(corpus.folder)
    with pytest.raises(InputError, match=f"{META} is damaged, .*delete {corpus.folder},"):
        index(folder, tiny, tmp_path / "store")


def test_checksums_are_those_of_the_files_and_verified_once(folder, tiny, tmp_path, monkeypatch):
    corpus = index(folder, tiny, tmp_path / "store")
    paths = [path for path in corpus.folder.iterdir() if path.suffix == ".bin"]
    assert corpus.checksums == {path.name: zlib.crc32(path.read_bytes()) for path in paths}
    assert len(paths) == 3
    monkeypatch.setattr(
        "jaxprompt.corpus.store.file_checksum", lambda path: pytest.fail(f"read {path}")
    )
    assert ids(pickle.loads(pickle.dumps(corpus))) == EXPECTED  # in a worker of this process


def test_another_store_that_is_damaged_is_no_hindrance(folder, tiny, tmp_path):
    first = index(folder, tiny, tmp_path / "store")
    (first.folder / META).write_text("{")
    assert len(index(folder, tiny, tmp_path / "store", units="sentence")) == len(EXPECTED)


def test_a_folder_that_cannot_be_written(folder, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write .*; fix this, or use another folder"):
        index(folder, tiny, tmp_path / "file/store")


# -- processes ------------------------------------------------------------------------------------

SCRIPT = """
    import resource, sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from transformers import BertTokenizer
    from jaxprompt.corpus import index_corpus

    {guard}
        if {limit}:
            resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        tokenizer = BertTokenizer(vocab={{word: i for i, word in enumerate({words!r})}})
        index_corpus(sys.argv[1], tokenizer, sys.argv[2], processes=int(sys.argv[3]))
"""


def start(tmp_path, source, store, processes, limit=0, guard='if __name__ == "__main__":'):
    script = tmp_path / "script.py"
    values = dict(root=str(ROOT), words=WORDS, limit=limit, guard=guard)
    script.write_text(textwrap.dedent(SCRIPT).format(**values))
    command = [sys.executable, script, source, store, str(processes)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def parts(store):
    """Files of what is not finished, by size."""
    actual = Path(store).glob(".*.part/*") if Path(store).is_dir() else ()
    return {path.name: path.stat().st_size for path in actual}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("processes", [2])
def test_full_disk(tmp_path, processes):
    """The kernel refuses a file to grow, as it does on a full disk."""
    write(tmp_path / "x.jsonl", ["one two three " * 10000] * 50)
    process = start(tmp_path, tmp_path / "x.jsonl", tmp_path / "store", processes, limit=10**6)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    last = error.strip().splitlines()[-1]
    assert "InputError: cannot write" in last and "File too large; fix this" in last
    assert not [path for path in (tmp_path / "store").iterdir() if path.is_dir()]


@pytest.mark.long
def test_killed_indexing_leaves_nothing_that_looks_finished(tmp_path, tiny):
    source, store = tmp_path / "x.jsonl", tmp_path / "store"
    write(source, ["one two three " * 20000] * 40)
    process = start(tmp_path, source, store, 2)
    until = time.monotonic() + 120
    while not parts(store).get("tokens.bin"):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    while group_lives(process.pid):  # its workers follow it
        assert time.monotonic() < until
        time.sleep(0.05)
    assert parts(store) and not list(store.glob("*/" + META))
    write(source, ["one two"])  # another corpus, so that the rest is not just taken up
    assert ids(index(source, tiny, store)) == [words("one two")]
    write(source, ["one two three " * 20000] * 40)
    corpus = index(source, tiny, store)
    assert corpus.num_tokens == 3 * 20000 * 40 and not parts(store)


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
@pytest.mark.slow
def test_a_script_that_does_not_guard_its_start(tmp_path):
    write(tmp_path / "x.jsonl", ["one two three"])
    process = start(tmp_path, tmp_path / "x.jsonl", tmp_path / "store", 2, guard="if True:")
    _, error = process.communicate(timeout=120)
    last = error.strip().splitlines()[-1]
    assert process.returncode == 1 and "InputError: an indexing process ended without" in last


@pytest.mark.long
@pytest.mark.slow
def test_two_at_once_share_the_work(tmp_path):
    write(tmp_path / "x.jsonl", ["one two three " * 20000] * 20)
    both = [start(tmp_path, tmp_path / "x.jsonl", tmp_path / "store", 1) for _ in range(2)]
    for process in both:
        assert process.communicate(timeout=120)[1] == "" and process.returncode == 0
    assert len(list((tmp_path / "store").glob("*/" + META))) == 1 and not parts(tmp_path / "store")


@pytest.mark.long
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    script = textwrap.dedent("""
        import resource, sys
        sys.path.insert(0, sys.argv[3])
        from transformers import BertTokenizer
        from jaxprompt.corpus import index_corpus
        words = "[PAD] [UNK] [CLS] [SEP] [MASK] one two three".split()
        tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        index_corpus(sys.argv[1] + "/small.jsonl", tokenizer, sys.argv[2], processes=1)
        before = peak()
        index_corpus(sys.argv[1] + "/large.jsonl", tokenizer, sys.argv[2], processes=1)
        print(peak() - before)
    """)
    write(tmp_path / "small.jsonl", ["one two three\n" * 10000] * 20)
    write(tmp_path / "large.jsonl", ["one two three\n" * 10000] * 120)
    command = [sys.executable, "-c", script, tmp_path, tmp_path / "store", ROOT]
    grown = int(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout)
    assert grown < 6e6 < (tmp_path / "large.jsonl").stat().st_size / 2
