"""The launchers: their dry runs, and their behaviour with fake tools of a cluster."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.rglob("*.sh"))
ODD = "--config.task.template={text} it's [mask]"
COMMAND = ["train", "--config=configs/base.py", ODD, "--workdir=/shared/run"]


def test_shellcheck():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [shellcheck, "-x", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert len(SCRIPTS) >= 6 and done.returncode == 0, done.stdout


def test_hadolint():
    hadolint = Path(sys.executable).with_name("hadolint")
    files = sorted(LAUNCH.glob("Dockerfile.*"))
    done = subprocess.run([hadolint, *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and len(files) == 2, done.stdout


TOOLS = "bash basename cat cksum dirname grep head mkdir mktemp rm sed seq sleep touch tr".split()


@pytest.fixture(autouse=True)
def plain(tmp_path, monkeypatch):
    """Hides tools of a real cluster that may be installed."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(folder))


def call(script: str | Path, *words: str, timeout: float = 60, **env: str) -> tuple[int, str, str]:
    """Runs a launcher. -> (exit code, stdout, stderr)"""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "XLA_", "JAX"))}
    base |= {"PYTHON": "/py/python", "PYTHONPATH": ""}
    done = subprocess.run(
        ["bash", LAUNCH / script, *words], capture_output=True, text=True, timeout=timeout,
        env=base | env,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def dry(script: str, *words: str, **env: str) -> list[list[str]]:
    """Reads what --dry-run prints, one command a line, as words."""
    code, out, err = call(script, "--dry-run", *words, **env)
    assert code == 0 and err == "", err
    return [shlex.split(line) for line in out.splitlines()]


TPU = ("--name=pod", "--zone=z")
HIDING = "XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true"


def test_gpu_host_prints_its_commands():
    lines = dry("gpu_host.sh", "--gpus=0,2", "--memory=.8", *COMMAND, XLA_FLAGS="--xla_x=1")
    assert lines[:4] == [
        ["export", f"PYTHONPATH={ROOT}"],
        ["export", "CUDA_VISIBLE_DEVICES=0,2"],
        ["export", "XLA_PYTHON_CLIENT_MEM_FRACTION=.8"],
        ["export", f"{HIDING} --xla_x=1"],
    ]
    assert lines[4][:2] == ["/py/python", "-c"] and 'jax.devices("gpu")' in lines[4][2]
    assert lines[5:] == [["/py/python", "-m", "jaxprompt", *COMMAND]]


def test_device_session_prints_its_commands():
    options = ["--install=cuda12", "--limit=300", "--set=data.batch=4", "bert-large"]
    bench = ["/py/python", f"{LAUNCH.parent}/launch/bench", "device", "--output=device.jsonl"]
    assert dry("bench/device_session.sh", *options, XLA_FLAGS="--xla_x=1") == [
        ["export", f"PYTHONPATH={ROOT}"],
        ["/py/python", "-m", "pip", "install", "--quiet", "jax[cuda12]"],
        ["export", f"{HIDING} --xla_x=1"],
        [*bench, "--limit=300", "--set=data.batch=4", "bert-large"],
    ]
    assert dry("bench/device_session.sh", "--tiny", "--output=x.jsonl")[1:] == [
        [*bench[:-1], "--output=x.jsonl", "--limit=600", "--tiny"]
    ]
    code, _, err = call("bench/device_session.sh", "--limit=0")
    assert (code, err) == (
        2, "device_session.sh: --limit=0 must be a whole number of at least 1\n",
    )  # fmt: skip


def test_slurm_prints_its_commands():
    options = [
        "--nodes=2",
        "--gpus-per-node=4",
        "--sbatch=--partition=gpu",
        "--sbatch=--time=1:00:00",
    ]
    sizes = ["--nodes=2", "--ntasks-per-node=1"]
    lines = dry("slurm.sh", *options, *COMMAND)
    assert lines == [
        ["export", f"JAXPROMPT_ROOT={ROOT}"],
        ["sbatch", *sizes, "--gpus-per-node=4", "--partition=gpu", "--time=1:00:00",
         f"{LAUNCH}/slurm.sh", *options, *COMMAND],
        ["export", f"PYTHONPATH={ROOT}"],
        ["export", "JAX_LOCAL_DEVICE_IDS=0,1,2,3"],
        ["export", HIDING],
        ["srun", *sizes, "--kill-on-bad-exit=1", "/py/python", "-m", "jaxprompt", *COMMAND,
         "--cluster"],
    ]  # fmt: skip
    lines = dry("slurm.sh", *options, "--per-gpu", *COMMAND)
    assert lines[-1][:3] == ["srun", "--nodes=2", "--ntasks-per-node=4"]
    assert not any("JAX_LOCAL_DEVICE_IDS" in word for line in lines for word in line)
    assert dry("slurm.sh", *options, *COMMAND, SLURM_JOB_ID="7")[-1][0] == "srun"


def test_tpu_pod_prints_its_commands():
    extra = ("--project=p", "--type=v5p-32", "--version=v2-alpha-tpuv5", "--spot", "--delete")
    flags = "--xla_x=1 --xla_y=2"  # of the user; those of the project are set by its commands
    words = (*extra, "--before=sudo mount nfs:/x /shared", *COMMAND)
    lines = dry("tpu_pod.sh", *TPU, *words, LIBTPU_INIT_ARGS=flags)
    tpu, where = ["gcloud", "compute", "tpus", "tpu-vm"], ["--zone=z", "--project=p"]
    kind = ["--accelerator-type=v5p-32", "--version=v2-alpha-tpuv5", "--spot"]
    assert lines[0] == [*tpu, "create", "pod", *where, *kind]
    assert lines[1][:2] == ["tar", "-czf"] and lines[1][-3:] == ["-C", str(ROOT), "."]
    assert lines[2] == [*tpu, "scp", lines[1][2], "pod:jaxprompt.tgz", *where, "--worker=all"]
    ssh = [*tpu, "ssh", "pod", *where]
    assert lines[3][:-1] == [*ssh, "--worker=all"] and "'jax[tpu]'" in lines[3][-1]
    assert lines[4] == [*ssh, "--worker=all", "--command=sudo mount nfs:/x /shared"]
    # The command on the workers reads back as the words that were given.
    inner = shlex.split(lines[5][-1].partition("bash -c ")[2])[0]
    command = shlex.split(inner.partition(" >>run.log")[0])
    started = [".venv/bin/python", "-m", "jaxprompt", *COMMAND, "--cluster"]
    assert command == ["env", f"LIBTPU_INIT_ARGS={flags}", *started]
    assert lines[6] == [*tpu, "describe", "pod", *where, "--format=value(state)"]
    assert lines[7][:-1] == [*ssh, "--worker=0"]
    logs = "logs/pod/worker-0.log"
    assert lines[8] == [*tpu, "scp", "pod:jaxprompt/run.log", logs, *where, "--worker=0"]
    assert lines[9:] == [[*tpu, "delete", "pod", *where, "--quiet"]]
    lines = dry("tpu_pod.sh", *TPU, "--queued", "--spot", *COMMAND)
    request = ["gcloud", "compute", "tpus", "queued-resources"]
    kind = ["--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite", "--spot"]
    assert lines[0] == [*request, "create", "pod", "--node-id=pod", "--zone=z", *kind]
    assert dry("tpu_pod.sh", *TPU, "--queued", "--delete") == [
        [*request, "delete", "pod", "--zone=z", "--force", "--quiet"]
    ]


REFUSED = {
    "gpu_host.sh": [
        ([], "no command given; see --help"),
        (["--gpu=1", "train"], "unknown option --gpu=1; see --help"),
        (["--gpus=a", "train"], "--gpus=a must list numbers, as in 0,1"),
        (["--memory=2", "train"], "--memory=2 must be a share, as in 0.9"),
        (["--retries=x", "train"], "--retries=x must be a whole number of at least 0"),
    ],
    "slurm.sh": [
        ([], "no command given; see --help"),
        (["--nodes=0", "train"], "--nodes=0 must be a whole number of at least 1"),
        (["--gpus-per-node=x", "train"], "--gpus-per-node=x must be a whole number of at least 1"),
        (["-x", "train"], "unknown option -x; see --help"),
        (["train"], "no sbatch here; call it where Slurm is"),
    ],
    "tpu_pod.sh": [
        (["train"], "--name is missing; see --help"),
        (["--name=pod", "train"], "--zone is missing; see --help"),
        ([*TPU], "no command given; see --help"),
        ([*TPU, "--poll=x", "train"], "--poll=x must be a whole number of at least 0"),
        ([*TPU, "train"], "no gcloud here; install the Google Cloud CLI"),
    ],
}


@pytest.mark.parametrize("script", REFUSED)
def test_bad_options_get_one_line(script):
    for words, line in REFUSED[script]:
        assert call(script, *words) == (2, "", f"{script}: {line}\n")
    code, out, err = call(script, "--help")
    assert (code, err) == (0, "") and out.startswith(f"usage: bash launch/{script} ")


# -- with fake tools ------------------------------------------------------------------------------


@pytest.fixture
def tool(tmp_path):
    """Writes an executable; all calls are written to tmp_path/calls. -> PATH with it in front"""
    (tmp_path / "bin").mkdir()

    def write(name: str, body: str) -> str:
        path = tmp_path / "bin" / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>{tmp_path}/calls\n{body}\n')
        path.chmod(0o755)
        return str(path)

    write.path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    write.calls = lambda: (tmp_path / "calls").read_text().splitlines()
    return write


@pytest.mark.parametrize("constraints", ["", "oldest.txt"])
def test_an_environment_installs_each_version_of_a_file_once(tool, tmp_path, constraints):
    tool("python", "exit 0")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/bin").symlink_to(tmp_path / "bin")
    script = tmp_path / "install.sh"
    script.write_text(f'cd "{tmp_path}"\n. "{LAUNCH}/environment.sh"\nenvironment needed.txt\n')
    for needed, oldest in [("a", "a==1"), ("a", "a==1"), ("b", "a==1"), ("b", "a==2")]:
        (tmp_path / "needed.txt").write_text(needed)
        (tmp_path / "oldest.txt").write_text(oldest)
        assert call(script, PATH=tool.path, CONSTRAINTS=constraints)[::2] == (0, "")
    installs = [line for line in tool.calls() if " pip install " in line]
    flags = " --constraint oldest.txt" if constraints else ""
    command = "python -m pip install --quiet --disable-pip-version-check --no-compile"
    assert installs == [f"{command}{flags} -r needed.txt"] * (3 if constraints else 2)


@pytest.mark.parametrize("constraints, venv", [("", ".venv"), ("a.txt", ".venv-constrained")])
@pytest.mark.parametrize(
    "words, selected",
    [
        ("", " -m not long"),
        ("-k one", " -m not long -k one"),
        ("--fast", " -m not slow and not long"),
        ("--fast -k one", " -m not slow and not long -k one"),
        ("--all", ""),
    ],
)
def test_the_commands_of_the_test_script(tool, tmp_path, words, selected, constraints, venv):
    (tmp_path / "launch").mkdir()
    shutil.copy(LAUNCH / "test.sh", tmp_path / "launch")
    (tmp_path / "launch/environment.sh").write_text("VENV=.venv\nenvironment() { :; }\n")
    tool("python", "exit 0")
    tool("ruff", "exit 0")
    tool("mypy", "exit 0")
    (tmp_path / venv).mkdir()
    (tmp_path / venv / "bin").symlink_to(tmp_path / "bin")
    env = dict(PATH=tool.path, WORKERS="3", CONSTRAINTS=constraints)
    code, _, err = call(tmp_path / "launch/test.sh", *words.split(), **env)
    assert code == 0 and err == ""
    files = "--dist loadfile --no-loadscope-reorder"
    *style, tests = tool.calls()
    assert tests == f"python -m pytest -n 3 {files}{selected}"
    assert style == ([] if constraints else ["ruff check .", "ruff format --check .", "mypy "])


def test_the_workflows(tmp_path):
    """A schedule runs every test; both begin with the same pinned steps and a new environment.

    A push runs the tests on the oldest versions of packages and on the newest of three Pythons.
    """
    begins, commands = [], []
    for name in ("tests", "weekly"):
        workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
        assert workflow["permissions"] == {"contents": "read"}
        job = workflow["jobs"]["tests"]
        *steps, last = job["steps"]
        pythons = [steps[1]["with"].pop("python-version")]
        if name == "tests":
            runs = job["strategy"]["matrix"]["include"]
            pythons = [run["python"] for run in runs]
            constraints = [run["constraints"] for run in runs]
            assert constraints == ["tests/constraints-oldest.txt", "", "", ""]
            assert pythons == ["3.11", "3.11", "3.12", "3.13"]
        assert pythons[0] == "3.11"
        begins.append(steps)
        commands.append(last["run"])
        started = {"weekly": ["schedule", "workflow_dispatch"], "tests": ["push", "pull_request"]}
        assert list(workflow[True]) == started[name]  # YAML 1.1 reads `on` as a truth value
    assert begins[0] == begins[1] and commands == [".ci/run", ".ci/run --all"]
    for folder in (".ci", "launch", ".venv", ".venv-constrained"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    (tmp_path / "launch/test.sh").write_text('echo "$*"\n')
    assert call(tmp_path / ".ci/run", "--all", "-k", "one") == (0, "--all -k one\n", "")
    assert not list(tmp_path.glob(".venv*"))


def test_slow_files_exist(request):
    """The folders and files that tests/conftest.py names."""
    (slow,) = [x.SLOW for x in request.config.pluginmanager.get_plugins() if hasattr(x, "SLOW")]
    assert all((ROOT / "tests" / name).exists() for name in slow)


# Ends with the codes in the file `codes`, one a call.
CODES = """[ "$1" = -m ] || exit 0
code="$(head -n 1 {0}/codes)"; sed -i 1d {0}/codes; exit "$code" """


@pytest.mark.parametrize(
    "codes, retries, code", [("134 1 0", 3, 0), ("1 2", 3, 2), ("7 8", 1, 8), ("9", 0, 9)]
)
def test_gpu_host_starts_again_after_a_crash(tool, tmp_path, codes, retries, code):
    (tmp_path / "codes").write_text(codes.replace(" ", "\n") + "\n")
    python = tool("python", CODES.format(tmp_path))
    tool("sleep", "exit 0")
    words = (f"--retries={retries}", "train", "--workdir=x")
    exit_code, out, err = call("gpu_host.sh", *words, PYTHON=python, PATH=tool.path)
    runs = [line for line in tool.calls() if line.startswith("python -m")]
    assert exit_code == code and out == ""
    assert runs == ["python -m jaxprompt train --workdir=x"] * len(codes.split())
    assert err.count("starting again") == len(runs) - 1


def test_gpu_host_needs_a_gpu(tool):
    code, out, err = call("gpu_host.sh", "train", PYTHON=tool("python", "exit 1"))
    assert code == 2 and out == "" and err.startswith("gpu_host.sh: JAX sees no GPU; pip install ")
    assert len(tool.calls()) == 1


def test_gpu_host_forwards_sigterm(tool, tmp_path):
    body = f"""[ "$1" = -m ] || exit 0
trap 'echo saved; exit 0' TERM; touch {tmp_path}/up; while true; do sleep 0.05; done"""
    process = subprocess.Popen(
        ["bash", LAUNCH / "gpu_host.sh", "train"], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHON": tool("python", body)},
    )  # fmt: skip
    try:
        end = time.monotonic() + 20
        while not (tmp_path / "up").exists() and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0 and process.stdout.read() == "saved\n"
    finally:
        process.kill()
        process.stdout.close()


def test_gpu_host_runs_on_the_cpu():
    code, out, err = call("gpu_host.sh", "--device=cpu", "export", "--help", PYTHON=sys.executable)
    assert code == 0 and out.startswith("usage: jaxprompt") and err == ""
    words = ("--device=cpu", "train", "--config=absent.json", "--workdir=/nowhere")
    code, out, err = call("gpu_host.sh", *words, PYTHON=sys.executable)
    assert code == 2 and out == "" and err.startswith("jaxprompt train: absent.json")


def test_slurm_submits_itself(tool):
    tool("sbatch", 'echo "root $JAXPROMPT_ROOT" >&2')
    code, out, err = call("slurm.sh", "--nodes=2", "train", ODD, PATH=tool.path)
    assert (code, out, err) == (0, "", f"root {ROOT}\n")
    sizes = "--nodes=2 --ntasks-per-node=1 --gpus-per-node=8"
    assert tool.calls() == [f"sbatch {sizes} {LAUNCH}/slurm.sh --nodes=2 train {ODD}"]
    head = (LAUNCH / "slurm.sh").read_text()
    for option in ("--requeue", "--open-mode=append", "--signal=B:USR1@120"):
        assert f"\n#SBATCH {option}\n" in head


@pytest.mark.parametrize(
    "sent, ends, requeued, code",
    [("USR1", 0, True, 0), ("USR1", 2, False, 2), ("TERM", 0, False, 0), ("", 3, False, 3)],
)
def test_slurm_queues_again_when_time_is_over(tool, tmp_path, sent, ends, requeued, code):
    # Slurm copies the script to another folder; srun gets the signal from scancel.
    copy = shutil.copy(LAUNCH / "slurm.sh", tmp_path / "slurm_script")
    kill = f"kill -{sent} $PPID; " if sent else ""
    wait = f"for i in {{1..100}}; do [ -e {tmp_path}/signaled ] && break; sleep 0.05; done; "
    tool("srun", f"{kill}{wait if sent == 'USR1' else 'sleep 0.2;'} exit {ends}")
    tool("scancel", f"touch {tmp_path}/signaled")
    tool("scontrol", "exit 0")
    env = {"SLURM_JOB_ID": "42", "JAXPROMPT_ROOT": str(ROOT), "PATH": tool.path, "PYTHON": "/py"}
    done = subprocess.run(
        ["bash", copy, "train", "--workdir=x"], env=os.environ | env, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    expected = ["srun --nodes=1 --ntasks-per-node=1 --kill-on-bad-exit=1 "
                "/py -m jaxprompt train --workdir=x --cluster"]  # fmt: skip
    expected += ["scancel --signal=TERM 42"] * (sent == "USR1")
    assert tool.calls() == expected + ["scontrol requeue 42"] * requeued


# A slice with the states in the file `states` and the results of checks of its run in `looks`.
GCLOUD = """next() {{ head -n 1 {0}/$1; sed -i 1d {0}/$1; }}
case "$*" in
  *"value(state)"*) s="$(next states)"; [ "$s" != ABSENT ] || {{ echo NOT_FOUND >&2; exit 1; }}
    echo "WARNING: Python 3.8 is deprecated" >&2; echo "$s" ;;
  *networkEndpoints*) echo "10.0.0.1;10.0.0.2" ;;
  *run.exit\\ 2*) next looks ;;
esac"""


def pod(tool, tmp_path, states: str, looks: str, *words: str):
    """Runs tpu_pod.sh against a slice. -> (exit code, stdout, stderr, what was done)"""
    (tmp_path / "states").write_text("\n".join(states.split()) + "\n")
    (tmp_path / "looks").write_text("\n".join(looks.replace("-", "").split(",")) + "\n")
    tool("gcloud", GCLOUD.format(tmp_path))
    tool("tar", "exit 0")
    logs = tmp_path / "logs"
    options = (*TPU, "--poll=0", f"--logs={logs}", *words, *COMMAND)
    code, out, err = call("tpu_pod.sh", *options, PATH=tool.path)
    names = {
        "tpu-vm create": "create", "tpu-vm delete": "delete",
        f"scp {tempfile.gettempdir()}": "copy",
        "pip install": "install", "setsid": "start", "queued-resources create": "request",
        "queued-resources delete": "forget", "worker-0.log": "log0", "worker-1.log": "log1",
    }  # fmt: skip
    done = [name for line in tool.calls() for key, name in names.items() if key in line]
    return code, out, err, done


SET_UP = ["copy", "install", "start"]


AGAIN = ["request", *SET_UP, "log0"]


@pytest.mark.parametrize(
    "states, looks, words, code, actions, message",
    [
        ("ABSENT CREATING READY READY READY READY", ",running,running,0", ["--delete"], 0,
         ["create", *SET_UP, "log0", "log0", "log0", "log1", "delete"], ""),
        ("ABSENT READY READY PREEMPTED ABSENT READY READY", ",running,,0", ["--spot"], 0,
         ["create", *SET_UP, "log0", "delete", "create", *SET_UP, "log0", "log1"],
         "pod was preempted, making it again"),
        ("ABSENT ABSENT ABSENT READY READY SUSPENDED ABSENT READY READY", ",running,,0",
         ["--queued"], 0, [*AGAIN, "forget", *AGAIN, "log1"], ""),
        # A crash is tried again, bad input is not.
        ("READY " * 6, ",134,running,-,2", ["--retries=3"], 2,
         [*SET_UP, "start", "log0", "start", "log0", "log1"],
         "exit code 134, starting again (3 left)"),
        # A run that is under way.
        ("READY READY", "running,5", ["--retries=0"], 5, ["log0", "log0", "log1"], ""),
    ],
)  # fmt: skip
def test_tpu_pod(tool, tmp_path, states, looks, words, code, actions, message):
    exit_code, out, err, done = pod(tool, tmp_path, states, looks, *words)
    assert (exit_code, done) == (code, actions) and message in err
    assert out == f"tpu_pod.sh: exit code {code}, logs in {tmp_path}/logs\n"
