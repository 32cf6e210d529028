"""SmolLM2-135M in the real lm-evaluation-harness: as its `hf` model has it, then with a prompt."""

import gzip
import json

import numpy as np
import pytest
import transformers

import jaxprompt as jp
from jaxprompt.__main__ import main
from jaxprompt.api import lm_eval as adapter

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]

ROWS, BATCH = 40, 8
TASKS = {
    # Answers of several tokens, and of one: questions share their inputs.
    "sentiment": ("sst2/dev", {
        "output_type": "multiple_choice", "doc_to_text": "Review: {{sentence}}\nSentiment:",
        "doc_to_choice": ["negative", "positive"], "doc_to_target": "label",
    }),
    "causes": ("copa/test", {
        "output_type": "multiple_choice", "doc_to_text": "{{premise}}",
        "doc_to_choice": "{{[choice1, choice2]}}", "doc_to_target": "label",
    }),
    "texts": ("corpus_wikitext2/test", {
        "output_type": "loglikelihood_rolling", "doc_to_text": "",
        "doc_to_target": "{{text[:400]}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    }),
    "questions": ("squad/dev", {
        "output_type": "generate_until",
        "doc_to_text": "{{context[:300]}}\nQuestion: {{question}}\nAnswer:",
        "doc_to_target": "{{answers}}",
        "generation_kwargs": {"until": ["\n", ". "], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def tasks(shared, tmp_path_factory):
    """A folder with a task of the harness for each of TASKS, over local rows."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    for name, (source, fields) in TASKS.items():
        with gzip.open(shared / f"data/{source}.jsonl.gz", "rt") as file:
            rows = [json.loads(next(file)) for _ in range(ROWS)]
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {"validation": str(data)}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        task |= {"validation_split": "validation", **fields}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def run(tasks):
    """Runs tasks with a model. -> {task: metrics}, {task: the model's answers}"""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)

    def run(model, names=tuple(TASKS)):
        results = lm_eval.simple_evaluate(
            model=model, tasks=[*names], task_manager=manager, log_samples=True, bootstrap_iters=0
        )
        answers = {
            name: [sample["resps"] for sample in sorted(samples, key=lambda x: x["doc_id"])]
            for name, samples in results["samples"].items()
        }
        return results["results"], answers

    return run


@pytest.fixture(scope="module")
def folder(smollm, tmp_path_factory):
    """SmolLM2 in transformers' format."""
    path = tmp_path_factory.mktemp("smollm") / "smollm"
    assert main(["convert", f"--backbone={smollm}", f"--output={path}"]) == 0
    return path


def log_likelihoods(answers):
    """The log-likelihoods of a task, and whether each is greedy. float [n], list"""
    flat = [answer for sample in answers for (answer,) in sample]
    if not isinstance(flat[0], tuple | list):
        return np.array(flat, float), []
    return np.array([float(logp) for logp, _ in flat]), [str(greedy) for _, greedy in flat]


def test_it_equals_the_hf_model(run, smollm, folder):
    torch = pytest.importorskip("torch")
    from lm_eval.models.huggingface import HFLM

    ours = adapter.JaxpromptLM(backbone=str(smollm), batch_size=BATCH)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=BATCH)
    assert isinstance(theirs.model, torch.nn.Module)
    assert (ours.max_length, ours.prefix_token_id) == (theirs.max_length, theirs.prefix_token_id)
    chat = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    (results, answers), (expected_results, expected) = run(ours), run(theirs)
    for name in ("sentiment", "causes", "texts"):
        logps, greedy = log_likelihoods(answers[name])
        expected_logps, expected_greedy = log_likelihoods(expected[name])
        np.testing.assert_allclose(logps, expected_logps, rtol=2e-5, atol=2e-4)
        assert greedy == expected_greedy
    assert answers["questions"] == expected["questions"]
    assert len({str(answer) for answer in answers["questions"]}) > ROWS // 4
    for name, metrics in expected_results.items():
        numbers = {k: v for k, v in metrics.items() if isinstance(v, float)}
        assert numbers
        for metric, value in numbers.items():
            assert results[name][metric] == pytest.approx(value, rel=1e-4), (name, metric)


def test_a_prompt_changes_the_scores_to_those_of_a_direct_computation(
    run, smollm, shared, tmp_path
):
    """A soft prompt in torch: its vectors before the embeddings of the text."""
    with gzip.open(shared / "data/sst2/train.jsonl.gz", "rt") as file:
        rows = [json.loads(next(file)) for _ in range(16)]
    backbone = jp.load_backbone(smollm)
    trained = jp.train(
        backbone, rows, rows, task="sst2", method=jp.soft(8, lr=0.3), steps=2, batch=8, max_len=64
    )
    jp.save_prompt(trained.prompt, tmp_path / "export")
    model = adapter.JaxpromptLM(prompt=str(tmp_path / "export"), batch_size=BATCH)
    plain = adapter.JaxpromptLM(backbone=str(smollm), batch_size=BATCH)
    assert model.max_length == plain.max_length - 8
    logps, without = (
        log_likelihoods(run(x, ["sentiment"])[1]["sentiment"])[0] for x in (model, plain)
    )
    assert np.median(np.abs(logps - without)) > 0.01

    torch = pytest.importorskip("torch")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm.parent, gguf_file=smollm.name, dtype=torch.float32
    ).eval()
    soft = torch.tensor(np.array(trained.prompt.tensors["prompt/slots"]))
    with gzip.open(shared / "data/sst2/dev.jsonl.gz", "rt") as file:
        text = json.loads(next(file))["sentence"]
    for answer, actual in zip(("negative", "positive"), logps, strict=False):
        ids = torch.tensor(model.tok_encode(f"Review: {text}\nSentiment: {answer}"))
        with torch.no_grad():
            inputs = torch.cat([soft, reference.get_input_embeddings()(ids)])
            logits = reference(inputs_embeds=inputs[None]).logits[0].log_softmax(-1)
        count = len(ids) - len(model.tok_encode(f"Review: {text}\nSentiment:"))
        expected = sum(float(logits[-back - 1, ids[-back]]) for back in range(1, count + 1))
        assert actual == pytest.approx(expected, abs=2e-4)


def test_the_command(tasks, folder, capsys):
    argv = ["lm_eval", "--model", "jaxprompt", "--model_args", f"backbone={folder}"]
    argv += ["--tasks", "causes", "--include_path", str(tasks), "--limit", "4"]
    assert main(argv) == 0
    assert "|causes" in capsys.readouterr().out
