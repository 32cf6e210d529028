"""Learn prompts for frozen pre-trained language models: `import jaxprompt as jp`.

Names are imported when they are first used, so `import jaxprompt` is fast. Methods and heads are
available by name: jp.prefix, jp.soft, jp.full, jp.linear, jp.verbalizer and so on.
"""

import importlib.util
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
PUBLIC = {
    "load_backbone": "api.backbones",
    "LoadedBackbone": "build.backbone",
    "Choice": "api.choices",
    "task": "api.choices",
    "PromptedModel": "api.models",
    "BankedModel": "api.banks",
    "attach": "api.models",
    "evaluate": "api.models",
    "generate": "api.generation",
    "stream": "api.generation",
    "predict": "api.models",
    "scores": "api.models",
    "Prompt": "api.prompts",
    "load_prompt": "api.prompts",
    "save_prompt": "api.saving",
    "TrainedPrompt": "api.training",
    "train": "api.training",
    "train_router": "api.banks",
    "InputError": "errors",
}

__all__ = [
    "BankedModel",
    "Choice",
    "InputError",
    "LoadedBackbone",
    "Prompt",
    "PromptedModel",
    "TrainedPrompt",
    "attach",
    "evaluate",
    "generate",
    "load_backbone",
    "load_prompt",
    "predict",
    "save_prompt",
    "scores",
    "stream",
    "task",
    "train",
    "train_router",
]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        value = getattr(importlib.import_module(f"{__name__}.{PUBLIC[name]}"), name)
    elif name.startswith("_"):  # from tools that look for special names
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elif importlib.util.find_spec(f"{__name__}.{name}"):  # from `from jaxprompt import signals`
        return importlib.import_module(f"{__name__}.{name}")
    else:
        value = _choice(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    choice_names = importlib.import_module(f"{__name__}.api.signatures").choice_names
    return sorted({*__all__, *choice_names("prompt"), *choice_names("head"), "__version__"})


def _choice(name: str) -> Any:
    choices = importlib.import_module(f"{__name__}.api.choices")
    choice = choices.find_choice(name)
    if choice is None:
        advice = importlib.import_module(f"{__name__}.errors").nearest(name, __dir__())
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {advice}")
    return choice
