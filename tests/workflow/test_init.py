"""``ablate init``: every study that it writes goes through ``ablate plan`` as it is; speeds are made up."""

import itertools
import json
import os
from functools import partial
from types import SimpleNamespace

import pytest

from ablate.base.errors import UserError
from ablate.plan import StudyProgress, build_plan, estimate
from ablate.study import load_study
from ablate.workflow import Listener, Where
from ablate.workflow.init import USED, Answers, write_study
from ablate.workflow.init_command import write_command_study
from ablate.workflow.prepare import prepare
from tests.cli.command import ablate

MODEL = """\
from torch import nn


class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, 64)
        self.mix = nn.MultiheadAttention(64, 4, batch_first=True)
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, vocab_size)


def build(*, vocab_size, seq_len):
    return Model(vocab_size)
"""
LLAMA = """\
{
  "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 3,
  "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
  "max_position_embeddings": 256
}
"""
TEXT = "\n\n".join(
    f"Paragraph {n} has its words, and number {n * n} too. " * 8 for n in range(300)
)
SPEED = 40_000.0
ARMS = {"ladder": 8, "published": 9, "grid": 13}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: text, JSON lines, a function and a Hugging Face model."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "texts").mkdir()
    for n in range(4):
        (folder / "texts" / f"{n}.txt").write_text(
            TEXT.replace("words", f"words of {n}")
        )
    lines = (json.dumps({"text": part}) for part in TEXT.split("\n\n"))
    (folder / "lines.jsonl").write_text("\n".join(lines))
    (folder / "my_model.py").write_text(MODEL)
    (folder / "llama").mkdir()
    (folder / "llama/config.json").write_text(LLAMA)
    return folder


@pytest.fixture
def speeds(monkeypatch):
    """Every arm at the same speed, without a measurement."""

    def arm_speeds(plan, _listener, **_options):
        arms = [SimpleNamespace(arm=one.name, median=SPEED) for one in plan.arms]
        return SimpleNamespace(arms=arms, other_work=None)

    monkeypatch.setattr("ablate.workflow.pilot.arm_speeds", arm_speeds)


def hours_of(plan, cores):
    speeds = {arm.name: SPEED for arm in plan.arms}
    progress = StudyProgress(states={}, tokens_per_sec=speeds)
    return estimate(plan, progress, cores=cores).wall_seconds / 3600


MODELS = ("built-in", "llama-tiny", "function:my_model.py:build", "hf:llama")


@pytest.mark.usefixtures("speeds")
@pytest.mark.parametrize(
    ("model", "data", "arms"),
    list(itertools.product(MODELS, ("texts", "lines.jsonl"), ARMS)),
)
def test_what_is_written_goes_through_the_plan_and_fits_corpus_and_budget(
    folder, tmp_path, monkeypatch, model, data, arms
):
    monkeypatch.chdir(folder)
    path = tmp_path / "first.yaml"  # elsewhere: its paths are relative to itself
    answers = Answers(model=model, data=data, arms=arms, budget="2h")
    write_study(path, folder / "runs", answers, Listener())
    done = ablate("plan", path, cwd=tmp_path)
    said = "runs code of its own" if model.startswith("function") else ""
    assert (done.code, said in done.err, done.err.count("\n")) == (0, True, bool(said))
    assert "no target: final losses are compared" in done.out
    plan = build_plan(load_study(path))
    left_out = path.read_text().count("is left out:")
    assert len(plan.arms) + left_out == ARMS[arms]
    # it has no blocks of layers
    assert left_out == 0 or (arms, model[:8]) == ("published", "function")
    assert 0.9 < hours_of(plan, os.cpu_count() or 1) / (2 * USED) <= 1
    # It refuses a corpus with too little text for an evaluation.
    prepare(
        Where(storage=folder / "runs", address="a cluster"),
        plan.arms,
        plan.arms[:1],
        Listener(),
    )


@pytest.mark.usefixtures("speeds", "h200")
@pytest.mark.parametrize("arms", ARMS)
def test_on_a_gpu_runs_share_it_and_a_larger_model_and_batch_fill_the_time(
    tmp_path, arms
):
    done = ablate("init --budget 1h --arms", arms, cwd=tmp_path)
    assert done.code == 0, done
    study = load_study(tmp_path / "study.yaml")
    plan = build_plan(study)
    assert len(plan.arms) == ARMS[arms]
    assert {arm.resources.gpus for arm in study.arms} == {"auto"}
    assert {arm.resources.gpus for arm in plan.arms} == {0.125}
    assert 6e6 < plan.arms[0].size.parameters < 8e6
    assert plan.arms[0].batches.tokens_per_step == 16_384
    assert 0.85 < hours_of(plan, 16) / USED <= 1


@pytest.mark.usefixtures("speeds")
def test_without_a_flag_or_a_terminal_the_usual_study_is_written(tmp_path):
    done = ablate("init", cwd=tmp_path)
    assert done.code == 0, done
    assert "24 runs of" in done.out
    assert "ablate pilot study.yaml" in done.out
    text = (tmp_path / "study.yaml").read_text()
    assert text.count("# ") > 20
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.usefixtures("speeds")
def test_too_little_text_or_time_or_no_folder_is_one_line_and_nothing_is_written(
    folder, tmp_path
):
    (tmp_path / "one.txt").write_text("Too little.")
    texts = ("--data", folder / "texts")
    for words, line in (
        (("--data", "one.txt"), "--data: "),
        ((*texts, "--budget", "1s"), "--budget: 24 runs of 100 steps take about"),
        (
            (*texts, "--budget", "1s", "--seeds", "99"),
            "h or more, a smaller --model, or fewer --seeds)",
        ),
        (("no/first.yaml", *texts), "cannot be written: No such file"),
    ):
        assert line in ablate("init", *words, cwd=tmp_path).line
    assert not list(tmp_path.glob("*.yaml"))


def test_a_pattern_is_kept_beside_an_adapter_and_the_target_is_by_tokens(tmp_path):
    (tmp_path / "train.py").write_text("from ablate.integrations import Stepper")
    (tmp_path / "log").write_text("1: 9.0\n2: 8.0\n4: 7.0\n10: 4.0\n")
    losses = r": (?P<val_loss>\S+)"
    write = partial(
        write_command_study, command="python train.py {seed}", log=tmp_path / "log"
    )
    with pytest.raises(UserError, match=r"--pattern: no group \(\?P<step>"):
        write(tmp_path / "s.yaml", patterns=[losses])
    write(tmp_path / "s.yaml", patterns=[rf"(?P<step>\d+){losses}"])
    study = load_study(tmp_path / "s.yaml")
    assert study.target.val_loss == 5.5  # at 7 of 10 steps
    trainer = study.arms[1].trainer
    assert trainer.metrics.patterns
    assert trainer.reads_recipe
    assert trainer.has_proof


def test_a_pattern_is_asked_for_until_it_reads_a_loss(tmp_path):
    (tmp_path / "train.log").write_text("at 10: held-out 3.5\nat 20: held-out 3.25\n")
    answers = [
        "(",
        r"at (?P<step>\d+) (?P<val_loss>x)",
        r"at (?P<step>\d+): held-out (?P<val_loss>\S+)",
    ]
    told = []

    def ask(error):
        told.append(str(error))
        return answers[len(told) - 1]

    log = tmp_path / "train.log"
    said = write_command_study(tmp_path / "s.yaml", "run {seed}", log=log, ask=ask)
    rows = "2 evaluations and 0 other rows, in nats per token: from 3.5 at step 10 to 3.25 at step 20"
    assert rows in said
    parts = ("no log of megatron", "no regular", "find none")
    for fault, part in zip(told, parts, strict=True):
        assert part in fault
