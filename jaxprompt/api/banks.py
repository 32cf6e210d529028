"""Several prompts on one backbone from Python."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprompt.api.choices import change_generation
from jaxprompt.api.prompts import Prompt
from jaxprompt.api.rows import AnyRows, to_rows
from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.data.sources.records import Record, from_rows
from jaxprompt.errors import InputError, brief, check_type
from jaxprompt.scoring.metrics import check_package
from jaxprompt.serving.bank import (
    Export,
    PromptBank,
    answer_requests,
    check_names,
    make_bank,
    name_of,
    read_requests,
)
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

    def read(self, rows: AnyRows) -> list[Record]:
        """Reads rows as records, each with the number of its prompt.

        Raises:
          InputError: for the first row that is not an example of its prompt's task.
        """
        # Rows without column names have no prompt names.
        requests = list(read_requests(self.bank, from_rows(to_rows(rows, "rows")), self.by))
        for record in requests:
            if record.error:
                raise InputError(record.error)
        return requests

    def predict(self, rows: AnyRows, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Answers rows, see `jaxprompt.predict`."""
        return self._answer(self.writing(options), rows)

    def generate(self, rows: AnyRows, options: Mapping[str, Any]) -> list[dict[str, Any]]:
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

    def _answer(self, bank: PromptBank, rows: AnyRows) -> list[dict[str, Any]]:
        """Answers rows; a text comes with the name of its prompt."""
        requests = self.read(rows)
        answered = (record.prompt for record in requests if record.example)
        answers = in_order(requests, answer_requests(bank, requests))
        return [
            {self.by: self.names[prompt], **answer} if bank.scorers[prompt].head.WRITES else answer
            for prompt, answer in zip(answered, answers, strict=True)
        ]

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
        num_known = sum(int(values["examples"]) for values in metrics.values())
        if not num_known:
            raise InputError(
                "no row has a known label of its prompt's task; give rows with such labels"
            )
        warn_unlabelled(num_known, len(requests), stacklevel=4)
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
) -> BankedModel:
    """Attaches several prompts to a backbone, see `attach`."""
    if not prompts:
        raise InputError("attach needs at least one prompt; give one")
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
    return BankedModel(make_bank(backbone, exports, batch=batch, force=force), by)
