"""Backbones and prompts in EleutherAI's lm-evaluation-harness: `--model jaxprompt`.

The harness writes the texts; the template, the demonstrations and the head of an export are not
used. A prompt stands in front of each text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxprompt.api.backbones import load_backbone
from jaxprompt.api.choices import task
from jaxprompt.api.models import PromptedModel, attach
from jaxprompt.api.prompts import load_prompt
from jaxprompt.build.prompt_artifact import backbone_from_metadata
from jaxprompt.config.run import BackboneConfig
from jaxprompt.data.text.decoding import TextDecoder
from jaxprompt.data.text.specials import special_id
from jaxprompt.data.text.tokenizer import Tokenizer, load_tokenizer
from jaxprompt.errors import InputError, brief, check_extra
from jaxprompt.serving.language_model import make_language_model

_MAX_NEW_TOKENS = 256  # where a task names no limit
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("top_k", "top_p", "min_p")  # which greedy search does not read


class HarnessModel:
    """A model of the harness; `JaxpromptLM` adds the methods of its base class there.

    Args:
      backbone: a path as for `load_backbone`; by default the one that the prompt was trained on.
      prompt: a path as for `load_prompt`; "" = the backbone by itself.
      batch_size: sequences per batch.
      max_length: maximum tokens of an input without the prompt; 0 = as many as the model has.
      mesh: device mesh, DATAxMODEL; the batch size is rounded up to a multiple of DATA.
      force: accept a backbone with other weights than those that the prompt was trained on.
      max_batch_size: not supported; the harness passes it.
      device: not used, since JAX chooses its devices; the harness passes cuda:0 by default.
      **fields: fields of the config block `backbone`, e.g. dtype="bfloat16".
    """

    def __init__(
        self,
        backbone: str = "",
        prompt: str = "",
        *,
        batch_size: int | str = 1,
        max_length: int = 0,
        mesh: str = "1x1",
        force: bool = False,
        max_batch_size: int | None = None,
        device: str | None = None,
        **fields: Any,
    ):
        super().__init__()
        if max_batch_size is not None or not re.fullmatch(r"[1-9]\d{0,8}", str(batch_size)):
            raise InputError(
                f"batch_size={batch_size} must be a whole number above 0, without max_batch_size; "
                "there is no automatic size"
            )
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", str(mesh))
        if not match:
            raise InputError(f"mesh={brief(mesh)} must be DATAxMODEL, e.g. 2x4")
        shape = int(match[1]), int(match[2])
        batch = -(-int(batch_size) // max(shape[0], 1)) * max(shape[0], 1)
        attached = _open_model(str(backbone), str(prompt), batch, shape, bool(force), fields)
        scorer = attached.scorer
        folder = scorer.tokenizer.name_or_path
        self.batch_size = batch
        self.tokenizer = load_tokenizer(folder, released=True)
        self.backend = scorer.model.backbone.STYLE
        self.language_model = make_language_model(
            scorer,
            attached.params,
            attached.placement,
            max_length=int(max_length),
        )

    @property
    def max_length(self) -> int:
        """Maximum tokens of an input, without the prompt."""
        return self.language_model.max_length

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return special_id(self.tokenizer, "eos")

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer, for the harness's cache of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encodes a text as the released tokenizer does, with at most one <s> at its beginning."""
        if add_special_tokens is None:
            bos = _decode(self.tokenizer, [self.prefix_token_id])
            add_special_tokens = not string.startswith(bos)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens, verbose=False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Formats a conversation with the tokenizer's chat template."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores requests (texts, context ids, continuation ids)."""
        pairs = [(context, continuation) for _, context, continuation in requests]
        return [(scored.logp, scored.is_greedy) for scored in self.language_model.score(pairs)]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-likelihood of whole texts, in windows of the model's length."""
        windows, owners = [], []
        for i, request in enumerate(requests):
            (text,) = request.args
            parts = rolling_windows(self.tok_encode(text), self.prefix_token_id, self.max_length)
            windows += parts
            owners += [i] * len(parts)
        totals = [0.0] * len(requests)
        for i, scored in zip(owners, self.language_model.score(windows), strict=True):
            totals[i] += scored.logp
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues texts greedily, up to the first stop string.

        Raises:
          InputError: for options of sampling, and for unknown options.
        """
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(read_generation(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for (max_new_tokens, until), members in groups.items():
            stop = (*until, _decode(self.tokenizer, [self.eot_token_id]))
            contexts = [
                self.tok_encode(requests[i].args[0]) or [self.prefix_token_id] for i in members
            ]
            decoder = TextDecoder(
                self.tokenizer, self.language_model.layout.ends, tuple(filter(None, until))
            )
            written = self.language_model.generate(
                contexts,
                max_new_tokens=max_new_tokens,
                stop=_stop_ids(self.tokenizer, stop),
                is_stopped=decoder.is_stopped if decoder.stop else None,
            )
            for i, ids in zip(members, written, strict=True):
                text = _decode(self.tokenizer, ids, skip_special_tokens=True)
                for string in filter(None, stop):
                    text = text.split(string)[0]
                texts[i] = text
        return texts


def __getattr__(name: str) -> type:
    """Makes `JaxpromptLM` when it is first used, since its base class is the harness's."""
    if name != "JaxpromptLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_extra("lm_eval", "lm_eval", "JaxpromptLM")
    from lm_eval.api.model import TemplateLM

    members = {"__doc__": HarnessModel.__doc__, "__module__": __name__}
    globals()[name] = made = type(name, (HarnessModel, TemplateLM), members)
    return made


def _open_model(
    backbone: str,
    prompt: str,
    batch: int,
    mesh: tuple[int, int],
    force: bool,
    fields: Mapping[str, Any],
) -> PromptedModel:
    """Loads the backbone and the prompt."""
    loaded = load_prompt(prompt) if prompt else None
    config = BackboneConfig.from_dict({**fields, "path": backbone}, "backbone.")
    if loaded is not None and loaded.imported is None:
        config = backbone_from_metadata(loaded.metadata.backbone, config)
    if not config.path:
        raise InputError("backbone is missing; give model_args backbone=PATH or prompt=EXPORT")
    base = load_backbone(config.path, mesh=mesh, **_fields(config))
    if loaded is not None and loaded.imported is None:
        return attach(base, loaded, batch=batch, force=force)
    # The task is not used; its lengths are the smallest.
    any_text = task("text", target="target", template="{text}")
    num_soft = loaded.imported.prompt.get("slots", 0) if loaded and loaded.imported else 0
    return attach(
        base, loaded, task=any_text, head="text", batch=batch, max_len=num_soft + 8, max_target=2
    )


def _fields(config: BackboneConfig) -> dict[str, Any]:
    """Returns the fields of a backbone without its path."""
    return {name: value for name, value in config.to_dict().items() if name != "path"}


def _decode(tokenizer: Tokenizer, ids: list[int], **options: Any) -> str:
    return str(tokenizer.decode(ids, **options))


def rolling_windows(
    ids: Sequence[int], prefix_id: int, max_length: int
) -> list[tuple[list[int], list[int]]]:
    """Divides a text into windows, so that each of its tokens is predicted once.

    The first window begins after `prefix_id`; each later one has the context that the model has
    room for, at least one token.

    Args:
      ids: the text.
      prefix_id: the token before it.
      max_length: tokens of an input.

    Returns:
      The context and the tokens to predict of each window.
    """
    tokens = [prefix_id, *ids]
    windows = []
    for start in range(1, len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        first = max(end - 1 - max_length, 0)
        windows.append((tokens[first:start], tokens[start:end]))
    return windows


def read_generation(options: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Reads the generation options of a task: the maximum of new tokens, and the stop strings.

    Raises:
      InputError: for sampling, and for options that are not supported.
    """
    options = dict(options)
    until = options.pop("until", None) or ()
    limits = [options.pop(name, None) for name in _LIMITS]
    max_new_tokens = next((int(limit) for limit in limits if limit is not None), _MAX_NEW_TOKENS)
    samples, temperature = options.pop("do_sample", None), options.pop("temperature", None) or 0
    if samples or samples is None and float(temperature) > 0:
        raise InputError(
            f"do_sample={samples}, temperature={temperature} samples, but texts are generated "
            "greedily here; use --gen_kwargs do_sample=False"
        )
    if unknown := [name for name in options if name not in _SAMPLING]:
        raise InputError(
            f"generation option {unknown[0]}={brief(options[unknown[0]])} is not supported; leave "
            f"it out, or use one of until, {_LIMITS[0]}, do_sample"
        )
    if max_new_tokens < 1:
        raise InputError(f"{_LIMITS[0]}={max_new_tokens} must be at least 1")
    return max_new_tokens, (until,) if isinstance(until, str) else tuple(until)


def _stop_ids(tokenizer: Tokenizer, stop: Sequence[str]) -> list[int]:
    """Returns the tokens whose text contains a stop string, which end a text at once."""
    ids = sorted(tokenizer.get_vocab().values())
    pieces = tokenizer.batch_decode([[i] for i in ids])
    stop = [string for string in stop if string]
    return [
        i for i, piece in zip(ids, pieces, strict=True) if any(string in piece for string in stop)
    ]
