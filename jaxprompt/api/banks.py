"""Several prompts on one backbone from Python."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprompt.api.choices import change_generation
from jaxprompt.api.prompts import Prompt
from jaxprompt.api.rows import AnyRows, read_records, to_rows
from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.build.prompt_artifact import Export
from jaxprompt.data.sources.records import Record, from_rows
from jaxprompt.errors import InputError, brief, check_type
from jaxprompt.scoring.metrics import check_package
from jaxprompt.serving.bank import (
    PromptBank,
    answer_requests,
    check_names,
    make_bank,
    name_of,
    read_requests,
)
from jaxprompt.serving.router import train_router as fit_router
from jaxprompt.serving.stream import in_order

_NAMING = "a dict, e.g. {'first': prompt}"


@dataclass(frozen=True, eq=False)
class BankedModel:
    """A backbone and several prompts with their heads; `attach` returns it."""

    bank: PromptBank
    by: str  # the column with the name of each row's prompt

    def __repr__(self) -> str:
        """Returns a one-line description."""
        return f"BankedModel({', '.join(self.names)}; by {self.by!r})"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the prompts."""
        return self.bank.names

    def read(self, rows: AnyRows | Sequence[str]) -> list[Record]:
        """Reads rows as records, each with the number of its prompt.

        A router chooses the prompts of rows that name none. Then texts are rows, too.

        Raises:
          InputError: for the first row that is not an example of its prompt's task; but a row
            whose prompt a router chose, or did not choose, is a record with an error.
        """
        router = self.bank.router
        if router is None:
            # Rows without column names have no prompt names.
            records = from_rows(to_rows(rows, "rows"))
        else:
            records = router.route(read_records(rows, router.metadata.columns), self.by)
        requests = list(read_requests(self.bank, records, self.by))
        for record in requests:
            if record.error and record.confidence is None:
                raise InputError(record.error)
        return requests

    def predict(
        self, rows: AnyRows | Sequence[str], options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Answers rows, see `jaxprompt.predict`."""
        return self._answer(self.writing(options), rows)

    def generate(
        self, rows: AnyRows | Sequence[str], options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Generates texts with all prompts, see `jaxprompt.generate`."""
        generations = [change_generation(x, options) for x in self.bank.generations]
        return self._answer(self.bank.writing(generations, every=True), rows)

    def writing(self, options: Mapping[str, Any]) -> PromptBank:
        """Returns the bank with some fields of its generation configs changed.

        Raises InputError for options if no prompt generates texts.
        """
        if not options:
            return self.bank
        if not self.bank.writes:
            name, value = next(iter(options.items()))
            raise InputError(
                f"{name}={brief(value)} is an option of generated texts, which none of the prompts "
                "predicts; remove it, or call jp.generate"
            )
        return self.bank.writing([change_generation(x, options) for x in self.bank.generations])

    def _answer(self, bank: PromptBank, rows: AnyRows | Sequence[str]) -> list[dict[str, Any]]:
        """Answers rows; a text comes with the name of its prompt."""
        requests = self.read(rows)
        answers = in_order(requests, answer_requests(bank, requests))
        return [
            {"error": record.error} if record.error else self._named(bank, record, next(answers))
            for record in requests
        ]

    def _named(
        self, bank: PromptBank, record: Record, answer: dict[str, object]
    ) -> dict[str, object]:
        """Adds the name of the prompt to a text, unless a router has added it."""
        if record.confidence is not None or not bank.scorers[record.prompt].head.WRITES:
            return answer
        return {self.by: self.names[record.prompt], **answer}

    def evaluate(self, rows: AnyRows, options: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Measures the answers to rows with labels, see `jaxprompt.evaluate`."""
        bank = self.writing(options)
        for scorer in self.bank.scorers:
            check_package(scorer.task.metric, scorer.task.kind)
        requests = self.read(rows)
        answers = answer_requests(bank, requests)
        metrics: dict[str, dict[str, float]] = {name: {"examples": 0} for name in self.names}
        for index, answered in answers.items():
            measured, count = bank.scorers[index].measure_labelled([answered.labelled])
            metrics[self.names[index]] = measured | {"examples": count}
        undecided = [record.error for record in requests if record.error]
        if undecided:
            warnings.warn(
                f"{len(undecided)} of {len(requests)} rows are left out, the first: {undecided[0]}",
                stacklevel=3,
            )
        num_known = sum(int(values["examples"]) for values in metrics.values())
        if not num_known:
            raise InputError(
                "no row has a known label of its prompt's task; give rows with such labels"
            )
        warn_unlabelled(num_known, len(requests) - len(undecided), stacklevel=4)
        return metrics


def warn_unlabelled(num_labelled: int, count: int, stacklevel: int = 3) -> None:
    """Warns that the metrics leave out rows without a known label of the task.

    `stacklevel` is that of `warnings.warn`, to point to the caller's line.
    """
    if num_labelled < count:
        message = f"{count - num_labelled} of {count} rows are left out: they have no known label"
        warnings.warn(message, stacklevel=stacklevel)


def attach_several(
    backbone: LoadedBackbone,
    prompts: Sequence[Prompt] | Mapping[str, Prompt],
    by: str,
    batch: int,
    force: bool,
    router: Prompt | None,
) -> BankedModel:
    """Attaches several prompts to a backbone, see `attach`."""
    exports, chooser = _to_exports(prompts), None
    if router is not None:
        check_type("router", router, Prompt, "the result of jp.train_router or jp.load_prompt")
        chooser = Export(router.path, router.tensors, router.metadata)
    bank = make_bank(backbone, exports, batch=batch, force=force, router=chooser)
    return BankedModel(bank, by)


def train_router(
    backbone: LoadedBackbone,
    prompts: Sequence[Prompt] | Mapping[str, Prompt],
    rows: Mapping[str, AnyRows],
    *,
    kind: str = "centroid",
    accuracy: float = 0.95,
    max_len: int = 128,
    batch: int = 64,
    force: bool = False,
) -> Prompt:
    """Trains a router, which chooses the prompt of a row by its text.

    It reads the states of the frozen backbone in the middle layer, without a prompt. Five-fold
    cross-validation chooses its threshold: the lowest probability from 0.5 on above which the
    share `accuracy` of the held-out rows is routed correctly. Below it, no prompt is chosen.

    Args:
      backbone: result of `load_backbone`.
      prompts: the prompts, as for `attach`.
      rows: training examples of each prompt, by its name; 500 at most are used. Labels are not
        read.
      kind: "centroid" = the nearest mean state, "linear" = logistic regression on the states.
      accuracy: share of the held-out rows that is to be routed correctly, in (0, 1].
      max_len: number of tokens that are read of a text.
      batch: texts per batch.
      force: accept prompts that were trained on other weights.

    Returns:
      The router, for `attach(backbone, prompts, router=...)` and `save_prompt`. Its scores on
      held-out rows are in `card["metrics"]`, and for each prompt in `card["router"]`.

    Raises:
      InputError: for prompts or rows that do not fit, and an accuracy that is not reached.
    """
    check_type("backbone", backbone, LoadedBackbone, "jp.load_backbone(path)")
    check_type("rows", rows, Mapping, "a dict of rows by the name of their prompt")
    exports = _to_exports(prompts)
    examples = {
        name: to_rows(rows[name], f"rows of {name}", export.metadata.task.columns)
        for name, export in exports.items()
        if name in rows
    }
    router = fit_router(
        backbone,
        exports,
        examples,
        kind=kind,
        accuracy=accuracy,
        max_len=max_len,
        batch=batch,
        force=force,
    )
    return Prompt(router.tensors, router.metadata.to_json(), router.path)


def _to_exports(prompts: Sequence[Prompt] | Mapping[str, Prompt]) -> dict[str, Export]:
    """Returns prompts by name. Raises InputError for one that is no export or has no name."""
    if not prompts:
        raise InputError("prompts must be at least one prompt; give one")
    for prompt in prompts.values() if isinstance(prompts, Mapping) else prompts:
        check_type("prompt", prompt, Prompt, "the result of jp.load_prompt(path)")
    if not isinstance(prompts, Mapping):
        names, paths = [name_of(p.path) for p in prompts], [p.path for p in prompts]
        check_names(names, paths, _NAMING)
        prompts = dict(zip(names, prompts, strict=True))
    for name in prompts:
        if not isinstance(name, str):
            raise InputError(
                f"the prompt name {name!r} is not a string; use {str(name)!r}, which rows with "
                f"{name!r} in their column match, too"
            )
    exports = {}
    for name, prompt in prompts.items():
        if not prompt.card:
            raise InputError(
                f"{prompt.path} has no metadata of its task; attach it separately, with task="
            )
        exports[name] = Export(prompt.path, prompt.tensors, prompt.metadata)
    return exports
