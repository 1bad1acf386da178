"""``ablate.train_run``: the words of a study file, without a file or a storage."""

import pytest
import yaml

import ablate
from ablate.base.errors import UserError
from ablate.plan import build_plan
from ablate.run.ids import run_id
from ablate.study import load_study
from tests.cli.command import ablate as command
from tests.workflow.fakes import TEXT

STUDY = """\
name: same
baseline: run
target: null
seeds: [3]
base:
  model: {width: 32, layers: 1, heads: 2, ffn: 32}
  recipe: {gemms: [wgrad], stabiliser: sr}
  data: {source: text, paths: [text 😀.txt]}
  training: {tokens: 4096, seq_len: 64, batch_size: 16, eval_tokens: 4096, eval_every_tokens: 1024}
arms: {run: }
"""


def test_a_run_is_that_of_a_study_with_the_same_words(tmp_path, monkeypatch, capfd):
    (tmp_path / "text 😀.txt").write_text(TEXT)
    (tmp_path / "same.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    words = yaml.safe_load(STUDY)["base"]
    words |= {"data": "text 😀.txt", **words.pop("training")}
    run = ablate.train_run(**words, seed=3, device="cpu", progress=False)
    assert run_id(run.config) == build_plan(load_study("same.yaml")).arms[0].runs[0].id
    assert (run.state, run.tokens, run.message) == ("finished", 4096, None)
    assert run.evaluations["tokens"].tolist() == [1024, 2048, 3072, 4096]
    assert run.evaluations["val_loss"].is_monotonic_decreasing
    shown = ["loss_nats_per_token", "learning_rate", "gradient_norm", "tokens_per_sec"]
    assert (list(run.training.columns)[2:], len(run.training)) == (shown, 4)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            {"lerning_rate": 1},
            "base.training.lerning_rate: unknown key (did you mean 'learning_rate'?)",
        ),
        ({"model": "llam-tiny"}, "no model 'llam-tiny' (did you mean 'llama-tiny'?)"),
        (
            {"model": {"width": 31}},
            "base.model.width: width 31 is not a multiple of heads 4 ",
        ),
        (
            {"recipe": object()},
            "train_run: 'object' object is not iterable (expected the plain values of a study",
        ),
    ],
)
def test_a_mistake_is_one_line_with_the_key(words, line):
    with pytest.raises(UserError) as error:
        ablate.train_run(**words)
    assert str(error.value).startswith(line)


NET = """\
from torch import nn

class Net(nn.Sequential):
    def forward(self, tokens):
        breakpoint()
        return super().forward(tokens)

def build(*, vocab_size, seq_len):
    return Net(nn.Embedding(vocab_size, 32), nn.Linear(32, 32), nn.Linear(32, vocab_size))
"""


def test_breakpoints_of_a_run_in_this_process_are_met_and_nothing_is_stored(
    tmp_path, monkeypatch
):
    (tmp_path / "text 😀.txt").write_text(TEXT)
    (tmp_path / "net.py").write_text(NET)
    text = STUDY.replace("[3]", "[3, 4]").replace(
        "{width: 32, layers: 1, heads: 2, ffn: 32}", "{function: net.py:build}"
    )
    (tmp_path / "same.yaml").write_text(text)
    stops = []
    monkeypatch.setattr("sys.breakpointhook", lambda: stops.append(True))
    ended = command("run same.yaml --in-process --seeds 3", cwd=tmp_path)
    assert ended.code == 0, ended
    assert len(stops) > 4
    assert ended.out.count(": val_loss ") == 4
    assert ended.out.endswith(
        "The run finished, after 4,096 tokens. No result is stored.\n"
    )
    assert not (tmp_path / "runs/same").exists()
