"""A backbone and a prompt as a language model of token ids, without a task and a template."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxprompt import tree
from jaxprompt.build.prompt_artifact import encode_any
from jaxprompt.data.batches.batching import EvalBatches, Layout
from jaxprompt.data.text.encoded import Encoded, Row, make_row
from jaxprompt.errors import InputError
from jaxprompt.layers.reading import GreedyScores
from jaxprompt.models.generation import Search, check_new_tokens
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training.evaluation import (
    continuing_programs,
    dispatch_ahead,
    predict_scores,
    scoring_step,
    whole_program,
)
from jaxprompt.training.refilling import can_refill
from jaxprompt.types import NO_LIMIT, Batch, Role, SharedPrefix

Ids = Sequence[int]
_FEW_LENGTHS = 0  # see Layout.multiple
_RELATIVE = 512  # tokens of an input if positions are relative, as T5 was pre-trained


class LogLikelihood(NamedTuple):
    """The score of a continuation."""

    logp: float  # sum over its tokens
    is_greedy: bool  # whether greedy search would write it


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """Scores and generates continuations of token ids.

    Soft tokens stand in front of each input, prefixes in front of each layer, as in training.
    """

    model: Model
    params: tree.Params
    placement: Placement
    layout: Layout
    front: Row  # soft tokens before the text; -1 in its slots is the first token of the text
    stem: Row | None  # inputs of a decoder before the continuation; None = there is no decoder
    max_length: int  # tokens of an input, without the prompt

    def score(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[LogLikelihood]:
        """Scores continuations. Equal inputs, e.g. of answers of one token, are read once.

        Args:
          pairs: the context and the continuation, at least one token each. A context that does not
            fit is cut on the left. With an encoder-decoder, the encoder reads the context.

        Returns:
          The log-likelihood of each continuation, in order.

        Raises:
          InputError: for a continuation that is empty or longer than `max_length`.
        """
        inputs: dict[_Input, _Reads] = {}
        spans = []
        for context, continuation in pairs:
            self._check_continuation(continuation)
            source, first = self._arrange(context, continuation)
            reads = inputs.setdefault(source, _Reads([], []))
            start = len(reads.targets)
            reads.positions.extend(range(first, first + len(continuation)))
            reads.targets.extend(continuation)
            spans.append((source, slice(start, start + len(continuation))))
        if not spans:
            return []
        # Few widths, since each is a program.
        width = 1 << (max(len(reads.targets) for reads in inputs.values()) - 1).bit_length()
        rows = [self._encode(source, reads) for source, reads in inputs.items()]
        rows[0] = _widen(rows[0], width)
        batches, step = self._batches(rows), scoring_step(self.placement, self.model)
        scores = predict_scores(step, {}, dict(self.params), batches, len(rows))  # [rows, M, 2]
        by_input = dict(zip(inputs, scores, strict=True))
        return [
            LogLikelihood(float(part[:, 0].sum(dtype=np.float64)), bool(part[:, 1].all()))
            for part in (by_input[source][span] for source, span in spans)
        ]

    def generate(
        self,
        contexts: Sequence[Ids],
        *,
        max_new_tokens: int,
        stop: Ids = (),
        is_stopped: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> list[list[int]]:
        """Continues contexts greedily.

        Args:
          contexts: token ids, at least one each; one that does not fit is cut on the left.
          max_new_tokens: the maximum number of new tokens.
          stop: ids that end a text, beside those of the model.
          is_stopped: returns whether texts may end, by their ids so far, int [n, max_new_tokens] ->
            bool [n]. On one device it is called every few tokens, on a mesh it is not.

        Returns:
          The new ids of each context, the end id included.

        Raises:
          InputError: if the model has no room for the new tokens.
        """
        room = self.max_length - (max_new_tokens if self.stem is None else 0)
        if room < 1:
            raise InputError(
                f"max_gen_toks={max_new_tokens} leaves no room for a context in {self.max_length} "
                f"tokens; use at most {self.max_length - 1}"
            )
        if not contexts:
            return []
        rows = [self._encode(_Input(tuple(ids[-room:])), _Reads([0], [0])) for ids in contexts]
        ends = tuple(sorted({*self.layout.ends, *stop}))
        search = Search(max_new_tokens, ends, self.layout.pad_id)
        params, batches = dict(self.params), self._checked(rows, max_new_tokens)
        results: Iterable[Any]
        if can_refill(self.placement):
            step, programs = continuing_programs(self.placement, self.model, search)
            start: Any = step({}, params)
            results = programs({}, params, (start(batch) for batch in batches), is_stopped)
        else:
            run = whole_program(self.placement, self.model, search)({}, params)
            results = dispatch_ahead((run(batch) for batch in batches), 1)
        written: list[list[int]] = [[] for _ in rows]
        for index, texts in results:
            parts = (np.asarray(x) for x in (index, texts.ids, texts.lengths))
            for i, ids, length in zip(*parts, strict=True):
                if i >= 0:
                    written[i] = ids[:length].tolist()
        return written

    def _check_continuation(self, continuation: Ids) -> None:
        limit = self.max_length
        if self.stem is not None:
            room = self.model.backbone.dims.max_len - self.model.prompt.decoder_shift()
            limit = min(limit, room - len(self.stem.ids) + 1)
        if not 1 <= len(continuation) <= limit:
            raise InputError(
                f"a continuation has {len(continuation)} tokens, and must have 1 to {limit}, the "
                "positions of the model without the prompt; shorten it"
            )

    def _arrange(self, context: Ids, continuation: Ids) -> tuple["_Input", int]:
        """Returns the input, and the position that predicts the first token of a continuation."""
        if self.stem is not None:
            source = _Input(tuple(context[-self.max_length :]), tuple(continuation[:-1]))
            return source, len(self.stem.ids) - 1
        # The last token is only predicted.
        tokens = tuple([*context, *continuation][-(self.max_length + 1) :][:-1])
        num_soft = int((self.front.slot >= 0).sum())
        return _Input(tokens), num_soft + len(tokens) - len(continuation)

    def _encode(self, source: "_Input", reads: "_Reads") -> Encoded:
        """Puts the soft tokens in front of an input."""
        row, decoder = _append(self.front, source.tokens), None
        if self.stem is not None:
            fed = source.fed
            ids = [*self.stem.ids, *fed]
            slot = [*self.stem.slot, *[-1] * len(fed)]
            roles = [*self.stem.roles, *[Role.TEXT] * len(fed)]
            decoder = make_row(ids, slot, [0] * len(ids), roles, range(len(ids)))
        return Encoded(
            **row._asdict(),
            label_pos=np.array(reads.positions, np.int32),
            decoder=decoder,
            targets=np.array(reads.targets, np.int32),
        )

    def _batches(self, rows: Sequence[Encoded]) -> EvalBatches:
        return EvalBatches([[row] for row in rows], np.full(len(rows), -1), self.layout)

    def _checked(self, rows: Sequence[Encoded], max_new_tokens: int) -> Iterable[Batch]:
        """Yields batches that leave room for new tokens."""
        for batch in self._batches(rows):
            check_new_tokens(self.model, batch, max_new_tokens)
            yield batch


class _Input(NamedTuple):
    """What the model reads, without the prompt."""

    tokens: tuple[int, ...]
    fed: tuple[int, ...] = ()  # inputs of a decoder after its stem


class _Reads(NamedTuple):
    """The positions that are read in one input, and the token that each predicts."""

    positions: list[int]
    targets: list[int]


def _append(front: Row, tokens: tuple[int, ...]) -> Row:
    """Appends tokens to a row; the first of them take its places without a slot."""
    slot = np.append(front.slot, np.full(len(tokens) - int((front.slot < 0).sum()), -1))
    ids = np.append(front.ids, np.zeros(len(slot) - len(front.ids), int))
    ids[slot < 0] = tokens
    roles = np.where(slot < 0, Role.TEXT, Role.SOFT)
    return make_row(ids, slot, np.zeros(len(ids)), roles, range(len(ids)))


def _widen(row: Encoded, width: int) -> Encoded:
    """Repeats the last read position, without a target, up to `width` positions."""
    padding = (0, width - len(row.label_pos))
    return row._replace(
        label_pos=np.pad(row.label_pos, padding, mode="edge"),
        targets=np.pad(row.targets, padding, constant_values=-1),  # type: ignore[arg-type]
    )


def make_language_model(
    scorer: Scorer,
    params: tree.Params,
    placement: Placement,
    *,
    max_length: int = 0,
) -> LanguageModel:
    """Separates the backbone and the prompt of a scorer from its task, template and head.

    Args:
      scorer: the scorer of a prompt on a generative backbone.
      params: its parameters.
      placement: the mesh.
      max_length: maximum tokens of an input; 0 = as many as the backbone has, 512 if its positions
        are relative.

    Raises:
      InputError: for a backbone that does not predict the next token, a prompt that is computed
        from the input, or whose soft tokens do not stand at its beginning, and a `max_length` out
        of range.
    """
    model, layout = scorer.model, scorer.layout
    style = model.backbone.STYLE
    if style not in ("causal", "seq2seq"):
        kind = "a GLM" if style == "infilling" else "an encoder"
        raise InputError(
            f"the backbone is {kind}, which does not score a continuation token by token; use a "
            "GPT-2, a Llama, a T5 or a BART"
        )
    prompt = model.prompt
    if prompt.reads:
        raise InputError(
            "the prompt is computed from each input, which here would contain the answer; use a "
            "prompt of another method, e.g. soft or prefix"
        )
    row = encode_any(scorer.writing(1))[0][0]
    front = _front(row, scorer.template)
    num_soft, stem = int((front.slot >= 0).sum()), row.decoder
    positions = model.backbone.dims.max_len
    limit = positions - num_soft - prompt.position_shift()
    if not 0 <= max_length <= limit:
        raise InputError(
            f"max_length={max_length} must be at most {limit}, the model's positions without the "
            "prompt; lower it"
        )
    max_length = max_length or (_RELATIVE if positions == NO_LIMIT else limit)
    layout = dataclasses.replace(
        layout,
        max_len=max_length + num_soft,
        num_rows=1,
        side="right",
        multiple=_FEW_LENGTHS,
        branches=False,
    )
    model = dataclasses.replace(model, heads={"main": GreedyScores()}, shared_prefix=None)
    if stem is None and num_soft and num_soft == len(front.slot):
        # All inputs begin with the soft tokens, which are run once.
        arrays = (front.ids, front.slot, front.types, front.roles)
        shared = SharedPrefix(*(tuple(x.tolist()) for x in arrays))
        if getattr(model.backbone, "supports_shared_prefix", False):
            layout = dataclasses.replace(layout, shared_prefix=shared)
            model = dataclasses.replace(model, shared_prefix=shared)
    return LanguageModel(model, params, placement, layout, front, stem, max_length)


def _front(row: Encoded, template: str) -> Row:
    """Returns the soft tokens at the beginning of an encoded example, and a token before them.

    Raises InputError if they stand elsewhere.
    """
    (soft,) = np.nonzero(row.slot >= 0)
    count = int(soft[-1]) + 1 if len(soft) else 0
    if any(role not in (Role.SOFT, Role.SPECIAL) for role in row.roles[:count]):
        raise InputError(
            f"template {template!r} has soft tokens after its text, but here the text and its "
            "continuation are one sequence; train a prompt whose soft tokens stand first"
        )
    parts = (row.ids, row.slot, row.types, row.roles, row.positions)
    return make_row(*(part[:count] for part in parts))
