"""A command that trains a run: followed, ended, resumed, never doubled and never left behind."""

import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.base.files import write_record
from ablate.execute.command import run_values
from ablate.execute.command_follower import Follower
from ablate.execute.command_process import MARK, Launch
from ablate.execute.environment import read_otherwise
from ablate.execute.orphans import marked
from ablate.execute.pending_runs import find_todo
from ablate.execute.worker import execute_run
from ablate.run.command import Command, secrets_of
from ablate.run.config import TrainingConfig
from ablate.run.log_rows import LogSource
from ablate.run.log_text import is_cut
from ablate.store import StudyStore
from ablate.store.leases import Leases
from tests.execute.four_runs import config_of
from tests.execute.kill import (
    execute_and_die_at,
    in_child,
    outcome_of,
    request_of,
    timeless,
    wait_for,
)
from tests.golden import cases, check
from tests.waiting import run_python, wait_until

SCRIPT = str(Path(__file__).with_name("train_script.py"))
STEPS = 60
MEGATRON = LogSource(preset="megatron")
TRAINING = TrainingConfig(tokens=STEPS * 32, seq_len=8, batch_size=4)


def config_of_words(*words, training=TRAINING, metrics=MEGATRON, **settings):
    """The configuration of a run whose command are these words."""
    return config_of(
        training, trainer=Command(command=[*words], metrics=metrics, **settings)
    )


def config_of_code(code, *words, **settings):
    """The configuration of a run whose command is this code, with its folder and words of its own."""
    return config_of_words(
        sys.executable, "-c", code, "{run_dir}", *words, "{seed}", **settings
    )


def config(args="", **settings):
    """The configuration of a run of ``train_script.py``."""
    words = ["--seed={seed}", "--steps={steps}", "--save={run_dir}/ckpt", "{args}"]
    return config_of_words(
        sys.executable, SCRIPT, *words, args=args.split(), **settings
    )


def processes_of(folder):
    return marked(MARK, f"{folder} 0")


def attempt(folder, config, number=1, rows=None, stop_after=math.inf):
    """One attempt, asked to stop after so many rows; ``rows``: those that stand, which it extends."""
    rows = [] if rows is None else rows
    logs = [[folder / f"{earlier}.log"] for earlier in range(1, number + 1)]
    values = run_values(config, run_dir=folder, num_devices=1, attempt=number)
    launch = Launch(config=config, values=values, secrets={}, group="study")
    follower = Follower(launch, logs, list(rows), rows.append, lambda: None)
    follower.follow(lambda: len(rows) >= stop_after)
    assert not processes_of(folder)
    return follower, rows


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    end, rows = attempt(tmp_path_factory.mktemp("undisturbed"), config())
    assert (end.state, end.step, end.tokens) == ("finished", STEPS, STEPS * 32)
    return rows


def test_rows_have_tokens_and_speed(undisturbed):
    assert [row["step"] for row in undisturbed if row["kind"] == "eval"] == list(
        range(10, 61, 10)
    )
    row = next(row for row in undisturbed if row["kind"] == "train")
    assert row == {
        "kind": "train", "tokens": 5 * 32, "step": 5, "lr": 1e-3, "grad_norm": 1.234,
        "tokens_per_sec": 32 / 0.01, "loss": row["loss"],
    }  # fmt: skip


PRINTS = """
import os, sys, time
for line in sys.argv[2:-1]:
    if line == "!60": time.sleep(60)
    if line[:2] == "!-": os.kill(os.getpid(), int(line[2:]))
    if line[0] == "!": sys.exit(int(line[1:]))
    print(line, flush=True)
"""


@pytest.mark.parametrize("case", cases(Path(__file__).with_suffix(".txt")))
def test_how_attempts_end(tmp_path, undisturbed, case):
    """What is printed may be given: ``!CODE`` ends it with this code, or signal; 60 is a minute to wait for."""
    settings, *lines = case[1].splitlines()[1:-1]
    settings = json.loads(settings)
    attempts = settings.pop("attempts", 1)
    run_config = config(**settings)
    if lines:
        run_config = config_of_code(PRINTS, *lines, diverged=["blew up"])
    rows = []
    said = []
    for number in range(1, attempts + 1):
        before = rows.copy()
        end, _ = attempt(tmp_path, run_config, number, rows)
        assert rows[: len(before)] == before
        assert end.transient == (end.state == "interrupted")
        said.append(f"{end.state} at step {end.step}: {end.message}")
        said += [f"it held: {marker}" for marker in end.seen.values()]
        said += [f"trained otherwise: step {step}" for step in end.rows.different]
    if rows == undisturbed:
        said.append("its rows are those of an undisturbed run")
    check(case, said)


def test_a_request_to_stop_lets_it_save(tmp_path, undisturbed):
    end, rows = attempt(tmp_path, config("--sleep 0.02"), stop_after=4)
    assert end.state == "interrupted"
    assert 10 < int((tmp_path / "ckpt/state.txt").read_text().split()[0]) < STEPS
    end, rows = attempt(tmp_path, config(), 2, rows)
    assert end.state == "finished"
    assert rows == undisturbed


def test_a_run_that_is_asked_to_stop_before_its_command_starts_starts_none(tmp_path):
    end, _ = attempt(tmp_path, config(), stop_after=0)
    assert (end.state, end.step) == ("interrupted", 0)
    assert not (tmp_path / "1.log").exists()


def test_a_command_that_hears_nothing_is_killed_with_all_that_it_started(tmp_path):
    deaf = config("--deaf --child --sleep 0.05", grace_sec=0.5)
    end, _ = attempt(tmp_path, deaf, stop_after=1)
    assert end.state == "interrupted"  # and ``attempt`` found no process of it


DAEMON = """
import os, sys
if not os.fork():
    os.setsid()
    if not os.fork():
        os.closerange(0, 1000)
        os.execve("/bin/sh", ["sh", "-c", "echo $$ > $0; exec sleep 600", sys.argv[1] + "/pid"], dict())
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1] + "/pid"): pass
print(' iteration 60/60 | elapsed time per iteration (ms): 1 | learning rate: 1 | lm loss: 3 |', flush=True)
print(' validation loss at iteration 60 | lm loss value: 3 | ', flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("end", ["finished", "interrupted"])
def test_a_daemon_that_has_cleared_and_closed_all_ends_with_its_command(tmp_path, end):
    code = DAEMON + "import time; time.sleep(600)" * (end == "interrupted")
    stop_after = 1 if end == "interrupted" else math.inf
    follower, _ = attempt(tmp_path, config_of_code(code), stop_after=stop_after)
    assert follower.state == end, follower.message
    # no zombie of ours, either
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_inherited_variables_that_change_the_arithmetic_are_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    with pytest.raises(UserError, match="NVTE_NVFP4_DISABLE_RHT"):
        attempt(tmp_path, config())
    end, _ = attempt(tmp_path, config(env={"NVTE_NVFP4_DISABLE_RHT": "1"}))
    assert end.state == "finished"


def test_what_tells_weights_and_biases_and_torchrun(tmp_path):
    code = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + '/env', 'w'))"
    attempt(tmp_path, config_of_code(code))
    variables = {
        "WANDB_RUN_ID": tmp_path.name, "WANDB_RUN_GROUP": "study", "WANDB_RESUME": "allow",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ABLATE_RUN_DIR": str(tmp_path), "ABLATE_SEED": "1",
    }  # fmt: skip
    assert json.loads((tmp_path / "env").read_text()).items() >= variables.items()


class StoredRows(list):
    """Rows that stand in a file, for attempts in processes of their own."""

    def __init__(self, path):
        self.path = path
        super().__init__(
            map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        )

    def append(self, row):
        super().append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def kill(*pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("who", ["worker", "command", "both"])
def test_kill_9_loses_nothing_and_doubles_nothing(tmp_path, undisturbed, who):
    slow = config("--sleep 0.01 --child")
    for number, moment in enumerate((0.05, 0.35, 0.6), 1):
        rows = StoredRows(tmp_path / "rows")
        worker = in_child(
            lambda number=number, rows=rows: attempt(tmp_path, slow, number, rows)
        )
        time.sleep(moment)
        victims = [worker] if who != "command" else []
        if who != "worker":
            victims += processes_of(tmp_path)[:1]
        kill(*victims)
        wait_for(worker)
    # Without a worker the command lives on; the next attempt ends it before it begins.
    end, rows = attempt(tmp_path, slow, 4, StoredRows(tmp_path / "rows"))
    assert end.state == "finished"
    assert rows == undisturbed


SBATCH = """#!/bin/bash
for word; do case "$word" in
  --job-name=*) job=$JOBS/${word#*=} ;; --output=*) log=${word#*=} ;; --*) ;; *) break ;;
esac; shift; done
lives() { [ -s "$job" ] && kill -0 "$(cat "$job")"; }
while lives; do sleep 0.01; done  # --dependency=singleton
rm -f "$job"
{ export -p; echo unset ABLATE_COMMAND ABLATE_WORKER; printf '%q ' exec "$@"; } > "$job.sh"
echo "$job $log" > "$JOBS/queue"
until [ -s "$job" ]; do sleep 0.01; done
while lives; do sleep 0.01; done
"""
SLURMD = """#!/bin/bash
while read -r job log; do
  setsid bash "$job.sh" >> "$log" 2>&1 &  # elsewhere: nothing finds it
  echo $! > "$job"
done <> "$JOBS/queue"
"""
SCANCEL = """#!/bin/bash
sleep 0.2  # longer than the next look at what is left
job=$JOBS/${1#*=}
if [ -e "$job" ]; then kill "$(cat "$job")"; fi
"""


def test_a_slurm_job_ends_with_its_attempt_or_before_the_next_one(
    tmp_path, undisturbed, monkeypatch, request
):
    for name, text in {"sbatch": SBATCH, "scancel": SCANCEL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("JOBS", str(tmp_path))
    os.mkfifo(tmp_path / "queue")
    slurmd = subprocess.Popen(["bash", "-c", SLURMD])
    request.addfinalizer(slurmd.kill)
    script = Path(__file__).parents[2] / "examples/slurm.sh"

    def job(sleep, **settings):
        metrics = LogSource(preset="megatron", file="{run_dir}/slurm.log")
        direct = config(f"--sleep {sleep}", metrics=metrics, **settings)
        command = ["bash", str(script), *direct.trainer.command]
        return replace(direct, trainer=replace(direct.trainer, command=command))

    def lives():
        job = next(path for path in tmp_path.glob("ablate-*") if path.suffix != ".sh")
        return Path(f"/proc/{job.read_text().strip()}").exists()

    end, rows = attempt(tmp_path, job(0.02), stop_after=4)
    assert end.state == "interrupted"
    wait_until(lambda: not lives())
    assert 10 < int((tmp_path / "ckpt/state.txt").read_text().split()[0]) < STEPS
    log = tmp_path / "slurm.log"
    before = log.stat().st_size
    # it must live longer than the worker
    worker = in_child(lambda: attempt(tmp_path, job(1), 2, rows))
    wait_until(lambda: log.stat().st_size > before)
    kill(worker, *processes_of(tmp_path))
    os.waitpid(worker, 0)
    assert lives()
    last = job(0.02, expect=["arithmetic: bf16"], refuse=["FP4"])
    end, rows = attempt(tmp_path, last, 3, rows)
    assert (end.state, [*end.seen.values()]) == ("finished", ["arithmetic: bf16"])
    assert rows == undisturbed


def evaluations_of(folder, code, **metrics):
    """What a run whose command is this code has evaluated."""
    end, rows = attempt(folder, config_of_code(code, metrics=LogSource(**metrics)))
    assert end.state == "finished"
    return [(row["step"], row["val_loss"]) for row in rows]


IN_FILES = {
    "lines of JSON": (
        "out.write_text('\\n'.join(json.dumps({'it': i, 'eval': {'loss': 3 - i / 128}}) for i in steps))",
        {"jsonl": {"step": "it", "val_loss": "eval.loss"}, "file": "{run_dir}/*.log"},
    ),
    "the state of Hugging Face's Trainer": (
        "out.write_text(json.dumps({'log_history': [{'step': i, 'eval_loss': 3 - i / 128} for i in steps]}))",
        {"preset": "hf", "file": "{run_dir}/**/*.log"},
    ),
    "event files": (
        (
            "from torch.utils.tensorboard import SummaryWriter; w = SummaryWriter(sys.argv[1] + '/tb')\n"
            "for i in steps: w.add_scalar('eval/loss', 3 - i / 128, i)\nw.add_scalar('b', 1, 9); w.close()"
        ),
        {"tensorboard": {"val_loss": "eval/loss"}, "file": "{run_dir}/tb"},
    ),
}


@pytest.mark.parametrize(("line", "metrics"), IN_FILES.values(), ids=list(IN_FILES))
def test_rows_from_files(tmp_path, line, metrics):
    if "tensorboard" in metrics:
        pytest.importorskip("tensorboard")
    code = "import json, sys, pathlib; steps = range(10, 61, 10); out = pathlib.Path(sys.argv[1], 'a.log')\n"
    assert evaluations_of(tmp_path, code + line, **metrics) == [
        (step, 3 - step / 128) for step in range(10, 61, 10)
    ]


def test_braces_bytes_and_endless_lines_do_no_harm(tmp_path):
    code = (
        "import sys\n"
        "sys.stdout.buffer.write(b'\\xff\\xfe garbled {\\n' + b'x' * 3_000_000"
        " + b'\\r{\"step\": 1e999}\\n')\n"
        'sys.stdout.buffer.write(b\'{"step": 60, "val_loss": 2.5}\')'  # no line end
    )
    assert evaluations_of(
        tmp_path, code, jsonl={"step": "step", "val_loss": "val_loss"}
    ) == [(60, 2.5)]


FLOOD = """
import sys
noise = b"a line that says nothing which anybody would want to read\\n" * 20_000
for step in range(10, 61, 10):
    for _ in range(int(sys.argv[2])):
        sys.stdout.buffer.write(noise)
    print(f" validation loss at iteration {step} | lm loss value: {3 - step / 100} |", flush=True)
"""


def test_of_a_command_that_floods_its_log_the_first_and_last_parts_are_kept(tmp_path):
    flooding = config_of_code(FLOOD, "8", log_limit_mb=8)
    end, rows = attempt(tmp_path, flooding)
    assert (end.state, [row["step"] for row in rows]) == (
        "finished",
        [*range(10, 61, 10)],
    )
    log = tmp_path / "1.log"
    if log.stat().st_blocks * 512 == log.stat().st_size:
        pytest.skip("the file system makes no holes")
    assert log.stat().st_size > 50 << 20
    assert log.stat().st_blocks * 512 < 16 << 20
    (note,) = end.notes()
    assert re.fullmatch(
        r"\d\d MiB of its output left out of 1.log \(trainer.log_limit_mb\)", note
    )
    again, rows = attempt(tmp_path, flooding, 2, rows)  # and is not read again
    assert again.state == "finished"
    assert (
        json.loads((tmp_path / "2.read").read_text())["1.log"]["offset"]
        == log.stat().st_size
    )


def run_of(folder, config, name="0123456789abcdef"):
    run = StudyStore(folder / "study").run(name)
    run.create(asdict(config))
    return run


def executed(run, config, **resources):
    """The end of an attempt in a process of its own, as a worker has it."""
    return wait_for(in_child(lambda: execute_run(request_of(run, config, **resources))))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"command": ["/no/such/program", "{seed}"]}, "the command does not start"),
        ({"args": ["--steps=200"]}, "a row of step 65; the plan ends after 60"),
        ({"secrets": ["NO_SUCH_KEY"]}, "NO_SUCH_KEY is not set"),
    ],
)
def test_faults_of_the_setup_are_a_line_in_the_log(tmp_path, fault, said):
    faulty = config_of(TRAINING, trainer=replace(config().trainer, **fault))
    run = run_of(tmp_path, faulty)
    assert executed(run, faulty) == 0
    status = run.status()
    log = run.attempt_log(1).read_text()
    assert status.state == "failed"
    assert said in status.message in log
    assert "Traceback" not in log
    assert not processes_of(run.path)


def test_a_worker_writes_what_every_run_has_and_touches_no_device(
    tmp_path, undisturbed, monkeypatch
):
    monkeypatch.setenv("MY_KEY", "hush, a secret")
    run_config = config(expect=["bf16"], secrets=["MY_KEY"], version="nemo:25.11")
    run = run_of(tmp_path, run_config)
    task = replace(
        request_of(run, run_config), secrets=secrets_of(run_config.trainer, os.environ)
    )
    assert "hush" not in repr(task)
    probe = (
        "import torch.cuda; torch.cuda.is_initialized = lambda: 1 / 0"  # nobody may ask
    )
    assert wait_for(in_child(lambda: (exec(probe), execute_run(task)))) == 0
    whole = "finished", STEPS * 32, STEPS, None, timeless(undisturbed)
    assert outcome_of(run) == whole
    environment = run.environment()
    expected = {
        "backend_mode": "command", "markers": ["bf16"], "software": "nemo:25.11", "world_size": 1,
        "gpu": None, "resumed_differently": [],
        "command": f"cd {run_config.trainer.cwd} && {sys.executable} {SCRIPT} --seed=1 "
        f"--steps={STEPS} --save={run.path}/ckpt",
    }  # fmt: skip
    assert environment.items() >= expected.items()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"hush" in path.read_bytes() for path in files)


def executed_by_a_driver(run, run_config):
    """The state after a driver has found the run to be executed."""
    request = request_of(run, run_config)
    store = StudyStore(run.path.parent.parent)
    assert find_todo(store, [request]).runs == (request,)
    run.create(asdict(run_config))
    assert executed(run, run_config) == 0
    assert find_todo(store, [request]).num_ended == 1
    return run.state()


def reading(evaluations, words=""):
    """The run of ``train_script.py`` with this pattern of evaluations."""
    training = r"iteration +(?P<step>\d+)/.*lm loss: (?P<loss>\S+)"
    return config(words, metrics=LogSource(patterns=[training, evaluations]))


def test_a_mended_pattern_reads_the_stored_log_and_starts_nothing(tmp_path):
    wrong = reading(r"at iteration (?P<step>[1-5]0) .* value: (?P<val_loss>\S+)")
    mended = reading(r"at iteration (?P<step>\d+) .* value: (?P<val_loss>\S+)")
    run = run_of(tmp_path, wrong)
    for run_config, state in ((wrong, "failed"), (mended, "finished")) * 2:
        assert executed_by_a_driver(run, run_config) == state
        assert (run.status().message is None) == (state == "finished")
        assert len(run.metrics("eval")) == (6 if state == "finished" else 5)
    assert [run.attempt_log(number).stat().st_size for number in (2, 3, 4)] == [0, 0, 0]
    with run.attempt_log(1).open("ab") as log:
        log.truncate(1 << 20)
    if is_cut(run.attempt_log(1)):  # else the file system makes no holes
        with pytest.raises(UserError, match="cannot be read in another way"):
            read_otherwise(run, wrong.trainer)


def test_a_command_that_was_ended_because_of_a_pattern_goes_on(tmp_path, undisturbed):
    wrong = reading("(?P<val_loss>x)", "--sleep 0.05")
    run = run_of(tmp_path, wrong)
    assert executed_by_a_driver(run, wrong) == "failed"
    assert "its evaluations cannot be read" in run.status().message
    run.create(asdict(config()))
    assert executed(run, config()) == 0
    assert (run.state(), run.metrics("eval")[0]["step"]) == ("interrupted", 10)
    assert executed_by_a_driver(run, config()) == "finished"
    assert outcome_of(run)[4] == timeless(undisturbed)


def test_a_hang_ends_with_the_command_and_the_next_attempt_goes_on(
    tmp_path, undisturbed
):
    run_config = config("--hang-at 42 --child --deaf", grace_sec=2.0)
    run = run_of(tmp_path, run_config)
    assert executed(run, run_config, hang_after_sec=2.0) in (1, -signal.SIGUSR2)
    assert "train_by_command" in run.attempt_log(1).read_text()  # the stack says where
    wait_until(lambda: not processes_of(run.path))
    assert executed(run, run_config) == 0
    assert outcome_of(run)[-1] == timeless(undisturbed)


def test_a_worker_that_is_lost_elsewhere_has_time_to_end_its_command(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("ablate.execute.command.STALE_SEC", 0)
    run_config = config(grace_sec=2.0)
    run = run_of(tmp_path, run_config)
    Leases(run.attempts).claim().note(host="node-a", machine="another")
    write_record(run.environment_path, {"resumed_differently": [35]})
    task = replace(request_of(run, run_config), given_up=1)
    begin = time.monotonic()
    assert wait_for(in_child(lambda: execute_run(task))) == 0
    assert time.monotonic() - begin > run_config.trainer.grace_sec
    assert outcome_of(run)[0] == "finished"
    log = run.attempt_log(2).read_text()
    assert log.startswith("attempt 1 on node-a was lost: waiting 2 s")
    # what an earlier attempt trained otherwise stays named
    assert run.environment()["resumed_differently"] == [35]


@pytest.mark.exhaustive
def test_a_worker_may_die_at_any_operation_on_a_file(tmp_path):
    run_config = config(training=replace(TRAINING, tokens=20 * 32))
    whole = run_of(tmp_path, run_config)
    assert executed(whole, run_config) == 0
    for operation in itertools.count(1):
        run = run_of(tmp_path, run_config, f"{operation:016x}")
        end = wait_for(
            in_child(execute_and_die_at(request_of(run, run_config), operation))
        )
        if end == 0:
            break
        assert end == -signal.SIGKILL
        wait_until(lambda run=run: not processes_of(run.path))
        assert executed(run, run_config) == 0
        assert outcome_of(run) == outcome_of(whole)
    assert operation > 25


NODES = """
    from dataclasses import replace
    from pathlib import Path

    from ray.cluster_utils import Cluster

    from ablate.execute.driver import execute_study
    from ablate.run.config import ResourcesConfig
    from tests.execute.test_command import config, request_of, run_of

    nodes = "--node {{node_rank}} --nodes {{num_nodes}} --meet {{attempt}}"
    run_config = config(nodes + " --sleep 0.02 --crash-at 37")
    run = run_of(Path({folder!r}), run_config)
    request = request_of(run, run_config, nodes=2)
    cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1, "include_dashboard": False}})
    cluster.add_node(num_cpus=1)
    from ablate.store import StudyStore
    outcome = execute_study(StudyStore(Path({folder!r}) / "study"), [request], address=cluster.address)
    print(*outcome.states.values())
    cluster.shutdown()
"""


@pytest.mark.exhaustive
def test_two_nodes_through_a_crash(tmp_path, undisturbed):
    code = textwrap.dedent(NODES).format(folder=str(tmp_path))
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    process = run_python(
        code, cwd=Path(__file__).parents[2], env=os.environ | variables, check=False
    )
    assert process.stdout.split()[-1:] == ["finished"], process.stderr[-3000:]
    run = StudyStore(tmp_path / "study").run("0123456789abcdef")
    # The nodes' rows come in as their logs are read.
    trained, expected = (
        sorted(map(str, rows)) for rows in (outcome_of(run)[-1], timeless(undisturbed))
    )
    assert trained == expected
    assert run.environment()["world_size"] == 2
    assert "validation" in (run.attempts / "1.node1.log").read_text()
    for rank in (0, 1):
        assert not marked(MARK, f"{run.path} {rank}")
