"""Reads the rows of a split: from local files, the Hugging Face hub, TFDS, or this package."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.files import SUFFIXES, file_errors, read_file
from jaxprompt.data.tasks.cells import missing_column, spelling
from jaxprompt.data.tasks.readers.candidates import expand_rows
from jaxprompt.data.tasks.readers.reading import row_labels
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError, brief, check_extra, first_line, nearest
from jaxprompt.files import open_regular, user_path

_CONVERTED = "refs/convert/parquet"  # where the hub keeps what a data set's script makes
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAMESPACE = re.compile(r"[\w-]+:[^\d*]")  # before the name of a TFDS data set, not its version
_TFDS = "tensorflow_datasets"
_SAVED = ("dataset_dict.json", "state.json")  # of several splits, and of one
_SHARDS = ("*-?????-of-?????.*", "*/*-?????-of-?????.*")
_DEFAULTS = ("", "hub", "package")  # sources of the task's own data set
_ALIASES = {"dev": {"dev", "validation", "val", "valid"}}
_PACKAGE = Path(__file__).parents[1]  # has a folder for each task whose examples are included


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
        "package", a folder that `datasets` saved or that was downloaded from the hub, or a folder
        with `<split>` + .jsonl .json .csv .tsv .txt .conll .conllx .props
        .gold_conll .v4_gold_conll .parquet, each also with .gz except Parquet.
      files: file of each split; takes precedence over `source`.
      cache_dir: where downloads are cached.
      in_memory: rows of each split; takes precedence over all other arguments.
      only: "column=value", which keeps only the rows with that value.

    Raises:
      InputError: if the split cannot be read.
    """
    if in_memory is not None:
        rows = in_memory[_choose_split(split, {split}, in_memory, "the call")]
    elif files:
        rows = read_file(files[_choose_split(split, {split}, files, "data.files")], task.columns)
    else:
        kind, name = _resolve_source(task, source)
        if kind == "hub":
            rows = read_hub(task, split, name, cache_dir)
        elif kind == "tfds":
            rows = _from_tfds(split, name, cache_dir)
        elif kind == "dataset":
            rows = _from_dataset_folder(split, name, cache_dir)
        else:
            rows = read_file(_find_file(name, split), task.columns)
    rows = with_class_names(task, rows)
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
    cells = []
    for number, row in enumerate(rows):
        if column not in row:
            where = rows.origin(number)
            raise InputError(missing_column(row, column, where, ", which data.only names"))
        cells.append(spelling(row[column]))
    if value not in cells:
        suggestion = nearest(value, set(cells))
        raise InputError(f"{rows.path}: no row matches data.only={only}; {suggestion}")
    return rows.select([number for number, cell in enumerate(cells) if cell == value])


def local_files(source: str, files: Mapping[str, str]) -> dict[str, Path]:
    """Finds the user's files that hold the splits, by their names in messages.

    Takes the arguments of `read_split`. Raises InputError if `source` is a folder that does not
    exist.
    """
    if files:
        return {f"data.files.{split}={path}": user_path(path) for split, path in files.items()}
    if _is_named(source):
        return {}
    paths = [_matching_files(source, split) for split in ("train", "dev", "test")]
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
        return split in files
    kind, name = _resolve_source(task, source)
    if kind == "folder":
        return bool(_matching_files(name, split))
    if kind == "tfds":
        return bool(_split_aliases(split) & set(_tfds_builder(name, cache_dir).info.splits))
    if kind == "dataset":
        return bool(_split_aliases(split) & set(_load_dataset_folder(name, cache_dir)))
    if not name:
        return split in task.splits
    return bool(_split_aliases(split) & set(_load_hub(task, name, cache_dir)))


def _resolve_source(task: Task, source: str) -> tuple[str, str]:
    """Returns the kind of a source and its name, "" = the task's default.

    Kinds are hub, tfds, folder, and dataset, which is a folder that `datasets` reads.
    """
    if source in ("", "hub") and task.hub:
        return "hub", ""
    if source in ("", "package") and is_shipped(task):
        return "folder", str(_PACKAGE / task.name)
    if source in _DEFAULTS:
        raise InputError(
            f"data.source={source!r}: task {task.name} has no data of its own there; set "
            "data.files.train=FILE, or data.source to a folder, hub:owner/name or tfds:name"
        )
    kind, _, name = source.partition(":")
    if _is_named(source):
        return kind, name
    return "dataset" if _is_dataset_folder(source) else "folder", source


def _is_named(source: str) -> bool:
    return source in _DEFAULTS or source.startswith(("hub:", "tfds:"))


def is_shipped(task: Task) -> bool:
    """Returns whether jaxprompt includes the examples of a task."""
    return (_PACKAGE / task.name).is_dir()


def _split_aliases(split: str) -> set[str]:
    return _ALIASES.get(split, {split})


def _choose_split(split: str, aliases: set[str], names: Iterable[str], source: str) -> str:
    """Returns the name of a split in its source."""
    # Sorted, because the order of a set of strings differs between processes.
    if matching := sorted(aliases & set(names)):
        return matching[0]
    raise InputError(
        f"{source} has no {split} split with public labels; it has: {', '.join(names) or 'none'}; "
        f"set data.files.{split}, or split dev off train by data.protocol"
    )


# -- files and folders --------------------------------------------------------------------------


def _matching_files(place: str, split: str) -> list[Path]:
    folder = user_path(place)
    with file_errors(folder):
        if not folder.is_dir():
            state = "is not a folder" if folder.exists() else "does not exist"
            raise InputError(
                f"data folder {folder} {state}; set data.source to a folder, hub, hub:owner/name, "
                "tfds:name or package, or set data.files.train=FILE"
            )
        file_names = {name + suffix for name in _split_aliases(split) for suffix in SUFFIXES}
        return sorted(p for p in folder.iterdir() if p.name in file_names)


def _find_file(place: str, split: str) -> Path:
    matches = _matching_files(place, split)
    if len(matches) != 1:
        file_names = ", ".join(sorted(p.name for p in user_path(place).iterdir())[:12])
        raise InputError(
            f"{place} must have one {split} file, e.g. {split}.jsonl, but has {len(matches)}; its "
            f"files: {file_names or 'none'}; choose one in data.files"
        )
    return matches[0]


def _is_dataset_folder(place: str) -> bool:
    """Returns whether a folder has no file of a split, but the layout of a data set.

    That of `save_to_disk`, or of a repository of the hub: a card, or shards, which may be in
    subfolders.
    """
    folder = user_path(place)
    if not os.path.isdir(folder) or any(
        _matching_files(place, x) for x in ("train", "dev", "test")
    ):
        return False
    if any(os.path.isfile(folder / name) for name in _SAVED) or _has_card(folder):
        return True
    return any(next(folder.glob(pattern), None) for pattern in _SHARDS)


def _has_card(folder: Path) -> bool:
    """Returns whether a folder has the card of a data set, a README.md with metadata."""
    try:
        with open_regular(folder / "README.md") as file:
            return file.readline(5).strip() == b"---"
    except OSError:
        return False


def _from_dataset_folder(split: str, place: str, cache_dir: str | None) -> Rows:
    parts = _load_dataset_folder(place, cache_dir)
    split_name = _choose_split(split, _split_aliases(split), parts, f"data folder {place}")
    data = parts[split_name]
    return Rows(data, f"{place}/{split_name}", features=data.features)


def _load_dataset_folder(place: str, cache_dir: str | None) -> Mapping[str, Any]:
    import datasets

    # Absolute, because `datasets` takes "text" for one of its readers.
    folder = Path(os.path.abspath(user_path(place)))
    try:
        if any(os.path.isfile(folder / name) for name in _SAVED):
            data = datasets.load_from_disk(folder)
        else:
            data = datasets.load_dataset(str(folder), cache_dir=cache_dir)
    except Exception as error:  # the library raises a dozen kinds of exceptions
        raise InputError(
            f"data folder {place} cannot be loaded ({type(error).__name__}: {first_line(error)}); "
            "save or download it again, give the subfolder of one of its configs, or set "
            "data.files.train=FILE"
        ) from error
    data = data.with_format(None)  # a saved format would return tensors
    return data if isinstance(data, dict) else {str(data.split or "train"): data}


# -- the hub ------------------------------------------------------------------------------------


def read_hub(task: Task, split: str, name: str, cache_dir: str | None) -> Rows:
    """Reads a split of the data set `name`, or of all subsets of the task's data set."""
    subsets = [""] if name else task.subset.split(",")
    tasks = [dataclasses.replace(task, subset=subset) for subset in subsets]
    parts = [_from_subset(part, split, name, cache_dir) for part in tasks]
    if len(parts) == 1:
        return parts[0]
    rows = [row for part in parts for row in part]
    return Rows(rows, parts[0].path, features=parts[0].features)


def _from_subset(task: Task, split: str, name: str, cache_dir: str | None) -> Rows:
    parts = _load_hub(task, name, cache_dir)
    aliases = _split_aliases(split) if name else {task.splits.get(split, "")}
    split_name = _choose_split(split, aliases, parts, f"hub data set {name or task.hub}")
    data = parts[split_name]
    features = data.features
    if not name:
        data = data.rename_columns(
            {old: new for old, new in task.renames.items() if old in data.column_names}
        )
    return Rows(data, f"{name or task.hub}/{split_name}", features=features)


def _load_hub(task: Task, name: str, cache_dir: str | None) -> Mapping[str, Any]:
    import datasets
    from huggingface_hub import snapshot_download

    hub, _, subset = name.partition(":") if name else (task.hub, "", task.subset)
    _check_remote(hub)

    def load(revision: str | None) -> Mapping[str, Any]:
        options = dict(name=subset or None, cache_dir=cache_dir)
        try:
            return datasets.load_dataset(hub, revision=revision, **options)
        except ConnectionError:
            # In the hub's cache `datasets` finds only what it converted.
            folder = snapshot_download(
                hub, repo_type="dataset", revision=revision, local_files_only=True
            )
            return datasets.load_dataset(folder, **options)

    # The pinned revision is of the task's own data set, not of one that the user names.
    revision = None if name else task.revision or None
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
            f"hub data set {name!r} cannot be loaded ({type(error).__name__}: "
            f"{first_line(error)}); check the id and the network (with HF_HUB_OFFLINE=1, download "
            "it first), or set data.source=FOLDER"
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


# -- TFDS ---------------------------------------------------------------------------------------


def _from_tfds(split: str, name: str, cache_dir: str | None) -> Rows:
    builder = _tfds_builder(name, cache_dir)
    info = builder.info
    split_name = _choose_split(split, _split_aliases(split), info.splits, f"tfds:{name}")
    with _tfds_errors(name):
        data = builder.as_data_source(split=split_name)
    convert = partial(as_python, decode=True)
    return Rows(data, f"tfds:{name}/{split_name}", convert=convert, features=info.features)


def _tfds_builder(name: str, cache_dir: str | None) -> Any:
    check_extra("tfds", "tensorflow_datasets", f"tfds:{name}")
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
        raise InputError(
            f"tfds:{name} cannot be loaded ({type(error).__name__}: {first_line(error)}); check "
            "the name and the network, install the module that it needs, or prepare it once as "
            "array_record"
        ) from error


# -- all ----------------------------------------------------------------------------------------


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
