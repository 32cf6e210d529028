"""Reads the rows of a split: from local files, the Hugging Face hub, TFDS, or this package."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.files import SUFFIXES, file_errors, read_file
from jaxprompt.data.tasks.cells import spelling
from jaxprompt.data.tasks.readers.candidates import expand_rows
from jaxprompt.data.tasks.readers.reading import row_labels
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError, brief, nearest, show_columns
from jaxprompt.files import user_path

_CONVERTED = "refs/convert/parquet"  # where the hub keeps what a data set's script makes
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAMESPACE = re.compile(r"[\w-]+:[^\d*]")  # before the name of a TFDS data set, not its version
_TFDS = "tensorflow_datasets"
_ALIASES = {"dev": ("dev", "validation", "val", "valid")}


def read_split(
    task: Task,
    split: str,
    *,
    source: str = "",
    files: Mapping[str, str] | None = None,
    cache_dir: str | None = None,
    in_memory: Mapping[str, Rows] | None = None,
    only: str = "",
) -> Rows:
    """Reads one split of a task.

    Args:
      task: the task.
      split: "train", "dev" or "test".
      source: "" (the task's default source), "hub", "hub:owner/name[:subset]", "tfds:name",
        "package", or a folder with `<split>` + .jsonl .json .csv .tsv .txt .conll .conllx .props
        .gold_conll .v4_gold_conll .parquet, each also with .gz except Parquet.
      files: file of each split; takes precedence over `source`.
      cache_dir: where downloads are cached.
      in_memory: rows of each split; takes precedence over all other arguments.
      only: "column=value", which keeps only the rows with that value.

    Raises:
      InputError: if the split cannot be read.
    """
    if in_memory is not None:
        if split not in in_memory:
            raise InputError(
                f"there are no {split!r} rows in memory; there are: {', '.join(in_memory)}"
            )
        rows = in_memory[split]
    elif files:
        if not files.get(split):
            advice = ", or name the classes by task.labels" if split == "train" else ""
            raise InputError(
                f"data.files has no {split!r} file; it has: {', '.join(files)}; add one{advice}"
            )
        rows = _from_file(task, files[split])
    else:
        kind, _, name = _resolve_source(task, source).partition(":")
        if kind == "hub":
            rows = _from_hub(task, split, name, cache_dir)
        elif kind == "tfds":
            rows = _from_tfds(task, split, name, cache_dir)
        elif kind == "package":
            with resources.as_file(_package_folder(task)) as folder:
                rows = read_file(_find_file(Path(folder), split))
        else:
            rows = _from_file(task, _find_file(user_path(source), split))
    rows = expand_rows(task, _select_rows(rows, only) if only else rows)
    if task.left_out or rows.classes:
        labelled = [i for i, row in enumerate(rows) if not _is_left_out(task, row, rows.classes)]
        # A test split may have no labels at all.
        if 0 < len(labelled) < len(rows):
            count = len(rows) - len(labelled)
            rows = rows.select(labelled)
            rows.left_out = count
    if not len(rows):
        raise InputError(f"{rows.path}: split {split!r} of task {task.name} has no rows")
    return rows


def _is_left_out(task: Task, row: Mapping[str, Any], classes: Sequence[str]) -> bool:
    """Returns whether an example has no label, by the task or as in data sets with `classes`.

    There a label is the index of a class, and -1 means no label.
    """
    if task.leaves_out(row):
        return True
    if not classes or task.hub or task.kind != "classes" or task.choices:
        return False
    return any(type(value) is int and value == -1 for value in row_labels(task, row))


def _select_rows(rows: Rows, only: str) -> Rows:
    """Keeps the rows with one value of a column. Raises InputError if there are none."""
    column, equals, value = only.partition("=")
    if not (column and equals):
        raise InputError(f"data.only={only!r} must be COLUMN=VALUE, e.g. predicate_id=P36")
    matches: list[int] = []
    values: dict[str, None] = {}
    for number, row in enumerate(rows):
        if column not in row:
            raise InputError(
                f"{rows.origin(number)}: there is no column {column!r}, which data.only names; "
                f"{show_columns(row)}"
            )
        cell = spelling(row[column])
        values[cell] = None
        if cell == value:
            matches.append(number)
    if not matches:
        raise InputError(f"{rows.path}: no row matches data.only={only}; {nearest(value, values)}")
    return rows.select(matches)


def local_files(source: str, files: Mapping[str, str]) -> dict[str, Path]:
    """Finds the user's files that hold the splits, by their names in messages.

    Takes the arguments of `read_split`. Raises InputError if `source` is a folder that does not
    exist.
    """
    if files:
        return {f"data.files.{split}={path}": user_path(path) for split, path in files.items()}
    if source == "" or _is_named(source):
        return {}
    paths = [_matching_files(user_path(source), split) for split in ("train", "dev", "test")]
    return {f"{path.name} of data.source={source}": path for of_split in paths for path in of_split}


def has_split(
    task: Task,
    split: str,
    *,
    source: str = "",
    files: Mapping[str, str] | None = None,
    cache_dir: str | None = None,
    in_memory: Mapping[str, Rows] | None = None,
) -> bool:
    """Returns whether `split` exists, without reading its rows. Arguments as in `read_split`."""
    if in_memory is not None:
        return split in in_memory
    if files:
        return bool(files.get(split))
    kind, _, name = _resolve_source(task, source).partition(":")
    if kind == "hub":
        if not name:
            return split in task.splits
        return bool(_split_aliases(split) & set(_load_hub(task, name, cache_dir)))
    if kind == "tfds":
        return bool(_split_aliases(split) & set(_tfds_builder(name, cache_dir).info.splits))
    if kind == "package":
        with resources.as_file(_package_folder(task)) as folder:
            return bool(_matching_files(Path(folder), split))
    return bool(_matching_files(user_path(source), split))


def _resolve_source(task: Task, source: str) -> str:
    """Returns the kind of source and, after a colon, its name; "folder" for a folder."""
    if source == "":
        if task.name == "custom":
            raise InputError(
                "task custom has no default data; set data.files.train=FILE, or data.source to a "
                "folder, hub:owner/name or tfds:name"
            )
        return "hub" if task.hub else "package"
    if _is_named(source):
        if source == "hub" and not task.hub:
            raise InputError(
                f"task {task.name} has no hub id; set data.source=FOLDER or hub:owner/name"
            )
        return source
    return "folder"


def _is_named(source: str) -> bool:
    return source in ("hub", "package") or source.startswith(("hub:", "tfds:"))


def _split_aliases(split: str) -> set[str]:
    return set(_ALIASES.get(split, (split,)))


# -- files and folders --------------------------------------------------------------------------


def _from_file(task: Task, path: str | Path) -> Rows:
    return with_class_names(task, read_file(path, task.columns))


def _matching_files(folder: Path, split: str) -> list[Path]:
    with file_errors(folder):
        if not folder.is_dir():
            state = "is not a folder" if folder.exists() else "does not exist"
            raise InputError(
                f"data folder {folder} {state}; set data.source to a folder, hub, hub:owner/name, "
                "tfds:name or package, or set data.files.train=FILE"
            )
        file_names = {name + suffix for name in _split_aliases(split) for suffix in SUFFIXES}
        return sorted(p for p in folder.iterdir() if p.name in file_names)


def _find_file(folder: Path, split: str) -> Path:
    matches = _matching_files(folder, split)
    if not matches:
        file_names = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
        raise InputError(
            f"there is no {split} file in {folder}, e.g. {split}.jsonl; it has: {file_names}"
        )
    if len(matches) > 1:
        raise InputError(
            f"{folder} has {len(matches)} files for {split}: {', '.join(p.name for p in matches)}; "
            "keep one, or choose one in data.files"
        )
    return matches[0]


def is_shipped(task: Task) -> bool:
    """Returns whether this package includes the examples of a task."""
    return (resources.files("jaxprompt.data") / task.name).is_dir()


def _package_folder(task: Task) -> Traversable:
    folder = resources.files("jaxprompt.data") / task.name
    if not is_shipped(task):
        raise InputError(
            f"task {task.name} is not included in the package (only topics is); set data.source to "
            "a folder, hub:owner/name or tfds:name"
        )
    return folder


# -- the hub ------------------------------------------------------------------------------------


def _from_hub(task: Task, split: str, name: str, cache_dir: str | None) -> Rows:
    """Reads a split of the data set `name`, or of all subsets of the task's data set."""
    if name:
        return _from_subset(task, split, name, cache_dir)
    subsets = [dataclasses.replace(task, subset=subset) for subset in task.subset.split(",")]
    parts = [_from_subset(subset, split, name, cache_dir) for subset in subsets]
    if len(parts) == 1:
        return parts[0]
    return Rows([row for part in parts for row in part], parts[0].path, classes=parts[0].classes)


def _from_subset(task: Task, split: str, name: str, cache_dir: str | None) -> Rows:
    parts = _load_hub(task, name, cache_dir)
    split_names = (
        _split_aliases(split)
        if name
        else {
            name_in_source for our_name, name_in_source in task.splits.items() if our_name == split
        }
    )
    matching = split_names & set(parts)
    if not matching:
        raise InputError(
            f"hub data set {name or task.hub} has no {split} split with public labels; it has: "
            f"{', '.join(parts)}; set data.files, or split one off train"
        )
    # Sorted, because the order of a set of strings differs between processes.
    (split_name,) = sorted(matching)[:1]
    data = parts[split_name]
    names = feature_names(data.features, task)
    if not name:
        data = data.rename_columns(
            {old: new for old, new in task.renames.items() if old in data.column_names}
        )
    convert = label_namer(task, names)
    return Rows(data, f"{name or task.hub}/{split_name}", convert=convert, classes=names)


def _load_hub(task: Task, name: str, cache_dir: str | None) -> Mapping[str, Any]:
    import datasets

    hub, _, subset = name.partition(":") if name else (task.hub, "", task.subset)
    _check_remote(hub)
    # The pinned revision is of the task's own data set, not of one that the user names.
    revision = None if name else task.revision or None

    def load(revision: str | None) -> Mapping[str, Any]:
        options = dict(name=subset or None, cache_dir=cache_dir)
        try:
            return datasets.load_dataset(hub, revision=revision, **options)
        except ConnectionError:
            folder = _downloaded(hub, revision)
            if folder is None:
                raise
            return datasets.load_dataset(folder, **options)

    try:
        try:
            return load(revision)
        except RuntimeError as error:
            if revision is not None or "scripts are no longer supported" not in str(error):
                raise
            return load(_CONVERTED)
    except Exception as error:  # the library raises a dozen kinds of exceptions
        name = f"{hub}:{subset}" if subset else hub
        raise InputError(
            f"hub data set {name!r} cannot be loaded ({type(error).__name__}: {_one_line(error)}); "
            "check the id and the network (with HF_HUB_OFFLINE=1, download it first), or set "
            "data.source=FOLDER"
        ) from error


def _check_remote(hub: str) -> None:
    """Raises InputError for an id that `datasets` would resolve to local files.

    A name without an owner may be one of its readers, such as "text", which reads the files of the
    current folder (and "pandas" unpickles them); a folder of the same name takes precedence over
    the hub.
    """
    if not _HUB_ID.fullmatch(hub):
        raise InputError(
            f"hub data set {brief(hub)} must be owner/name; use hub:owner/name[:subset], or a "
            "folder with your files"
        )
    if os.path.exists(hub):
        raise InputError(
            f"hub data set {hub!r} is also a local folder, {os.path.abspath(hub)}, which would be "
            f"read instead; run from another folder, or write {hub} without hub: to read the local "
            "one"
        )


def _downloaded(hub: str, revision: str | None) -> str | None:
    """Returns the data set's folder in the hub cache; `datasets` finds only what it converted."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(hub, repo_type="dataset", revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        return None


# -- TFDS ---------------------------------------------------------------------------------------


def _from_tfds(task: Task, split: str, name: str, cache_dir: str | None) -> Rows:
    builder = _tfds_builder(name, cache_dir)
    matching = sorted(_split_aliases(split) & set(builder.info.splits))
    if not matching:
        available = ", ".join(builder.info.splits) or "none"
        raise InputError(f"tfds:{name} has no {split} split; it has: {available}")
    with _tfds_errors(name):
        data = builder.as_data_source(split=matching[0])
    features = builder.info.features
    names = feature_names(features, task)
    label_name = label_namer(task, names)

    def convert(row: Mapping[str, Any]) -> dict[str, Any]:
        plain = as_python(row, decode=True)
        return label_name(plain) if label_name else plain

    return Rows(data, f"tfds:{name}/{matching[0]}", convert=convert, classes=names)


def _tfds_builder(name: str, cache_dir: str | None) -> Any:
    import tensorflow_datasets as tfds

    if _NAMESPACE.match(name):
        raise InputError(
            f"tfds:{name} belongs to another namespace, whose code would be executed; use a data "
            "set of TFDS itself (tfds:name) or hub:owner/name"
        )
    with _tfds_errors(name), _only_features_of_tfds(name):
        # This format has random access, unlike TFDS's default, TFRecord.
        builder = tfds.builder(name, data_dir=cache_dir, file_format="array_record")
        if not builder.is_prepared():
            builder.download_and_prepare()
        return builder


@contextmanager
def _only_features_of_tfds(name: str) -> Iterator[None]:
    """Makes TFDS restore only features of its own classes.

    The files of a prepared data set name the class of each feature, and TFDS imports its module:
    any importable module, including those in the current folder.
    """
    from tensorflow_datasets.core.features import FeatureConnector

    lookup = FeatureConnector.cls_from_name

    def restricted(class_name: str) -> type:
        if class_name.partition(".")[0] != _TFDS:
            raise InputError(
                f"tfds:{name} has a feature of class {brief(class_name)}, which is not part of "
                "TFDS and is not imported; prepare the data set with TFDS's features, or use a "
                "folder"
            )
        return lookup(class_name)

    FeatureConnector.cls_from_name = staticmethod(restricted)
    try:
        yield
    finally:
        FeatureConnector.cls_from_name = lookup


@contextmanager
def _tfds_errors(name: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the code of a builder may raise anything
        module = getattr(error, "name", None) if isinstance(error, ImportError) else None
        if not module and "tensorflow" in str(error).lower().replace(_TFDS, ""):
            module = "tensorflow"
        advice = "check the name and the network, prepare it as array_record, or use a folder"
        raise InputError(
            f"tfds:{name} cannot be loaded ({type(error).__name__}: {_one_line(error)}); "
            + (f"pip install {module}, or prepare it once as array_record" if module else advice)
        ) from error


# -- both ---------------------------------------------------------------------------------------


def as_python(value: Any, *, decode: bool = False) -> Any:
    """Converts a row or cell of TFDS or pandas (numpy scalars and arrays) to plain Python.

    With `decode`, bytes become strings, as TFDS stores text as bytes.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes) and decode:
        return value.decode("utf-8")
    if isinstance(value, Mapping):
        return {name: as_python(part, decode=decode) for name, part in value.items()}
    if isinstance(value, list):
        return [as_python(item, decode=decode) for item in value]
    return value


def feature_names(features: Mapping[str, Any] | None, task: Task) -> tuple[str, ...]:
    """Returns the data set's names for the indices of the task's classes or tags, () if none."""
    column = task.tags or task.label
    feature = features[column] if features and column in features else None
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())


def with_class_names(task: Task, rows: Rows) -> Rows:
    """Replaces class or tag indices by the data set's names, if it has some."""
    names = feature_names(rows.features, task)
    convert = label_namer(task, names)
    return rows if convert is None else rows.named(convert, names)


def label_namer(task: Task, names: Sequence[str]) -> Callable[[dict], dict] | None:
    """Returns a function that replaces the data set's class or tag indices by names, or None.

    For a built-in task it is None unless the data set has the classes in another order, or other
    tags.
    """
    column, names = task.tags or task.label, tuple(names)
    differs = set(names) <= set(task.labels) and names != task.labels
    if task.tags:
        differs = names != task.values
    if not names or (task.hub and not differs):
        return None

    def name_of(value: Any) -> Any:
        if isinstance(value, list):  # the tags of words, or several relations
            return [name_of(part) for part in value]
        # Values out of range are hidden labels, -1, and stay.
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else value

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, column: name_of(row[column])} if column in row else row

    return convert


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:200] or "no message"
