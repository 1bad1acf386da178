"""Processes that train one run together, through gloo: the curve of one, to the bit where it can be."""

import contextlib
import json
import multiprocessing
import pickle
import queue
import traceback
import uuid
from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter
from torch import distributed

from ablate.diagnose.recorder import Recorder
from ablate.execute.beside import Keeper
from ablate.recipes import RecipeSpec
from ablate.run.config import ModelConfig, TrainingConfig
from ablate.run.diagnostics import Diagnostics
from ablate.store.checkpoints import load_newest
from ablate.store.metrics import MetricsWriter
from ablate.train import train
from ablate.train.group import ALONE, Layout, join_group

ALL = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht"}
NVFP4 = {"preset": "nvidia-nvfp4", "layers": [{"last": 1, "recipe": "bf16"}]}
RESET = {"gemms": ["fprop"], "weight_block": "32x32", "deoscillate": {"window": 2, "threshold": 1.1}}
MODELS = {
    "llama": {},
    "untied": {"tied_head": False, "kv_heads": 1},
    "gpt": {"architecture": "gpt"},
    "experts": {"experts": 3},
}

TWICE = Layout(checkpoint_activations=True)


@pytest.fixture(autouse=True)
def one_thread():
    """As each process of a group has here: sums over threads have an order of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def changed(config, **settings):
    return replace(config, training=TypeAdapter(TrainingConfig).validate_python(
        {**config.training.__dict__, **settings}))  # fmt: skip


def member(rank, size, folder, stop_after):
    """One process of a group; the first writes its rows and how it ended."""
    config, tokens, meet, options = pickle.loads((folder / "task").read_bytes())
    distributed.init_process_group("gloo", init_method=f"file://{folder / meet}", rank=rank, world_size=size)
    group = join_group("cpu")
    rows, steps = [], [0]

    def should_stop():
        steps[0] += 1
        return rank == size - 1 and steps[0] == stop_after  # one process alone is told to stop

    start, _ = load_newest(folder / "c")
    metrics = MetricsWriter(folder / "metrics", start.rows["metrics"] if start else 0) if rank == 0 else None

    def on_metrics(row):
        rows.append(row)
        if metrics is not None:
            metrics.append(row)

    diagnosed = []
    if (settings := options.pop("diagnostics", None)) and rank == 0:  # as the worker has it
        options["observe"] = lambda trainee: Recorder(trainee, settings, diagnosed.append)
    options["layout"] = Layout(group=group, **options.pop("layout", {}))
    keeper = Keeper(folder / "c", [metrics] if metrics else [], start, every_sec=1e9, group=group)
    result = train(config, on_metrics, tokens=tokens, checkpoints=keeper, should_stop=should_stop, **options)
    if rank == 0:
        (folder / "out").write_text(json.dumps([result.state, result.step, rows]))
        (folder / "diagnosed").write_text(json.dumps(diagnosed))
    distributed.destroy_process_group()


class Gang:
    """Processes that wait for tasks: a start of each costs more than what most tests have them do."""

    def __init__(self, size):
        context = multiprocessing.get_context("spawn")
        self.members = []
        for _ in range(size):
            inbox, outbox = context.Queue(), context.Queue()
            process = context.Process(target=serve, args=(inbox, outbox), daemon=True)
            process.start()
            self.members.append((process, inbox, outbox))

    def run(self, *task):
        """Give each its rank, the size and the task; return the first fault."""
        for rank, (_, inbox, _) in enumerate(self.members):
            inbox.put((rank, len(self.members), *task))
        waiting = list(self.members)
        while waiting:
            for member in list(waiting):
                process, _, outbox = member
                with contextlib.suppress(queue.Empty):
                    if fault := outbox.get(timeout=0.2):
                        return fault
                    waiting.remove(member)
                    continue
                if not process.is_alive():
                    return "a process has ended"
        return None

    def end(self):
        for process, _, _ in self.members:
            process.kill()


def serve(inbox, outbox):
    torch.set_num_threads(1)
    while True:
        task = inbox.get()
        fault = None
        try:
            member(*task)
        except BaseException:
            fault = traceback.format_exc()
        outbox.put(fault)


@pytest.fixture(scope="module")
def gangs():
    """The gangs by their size: what torch keeps of one size is no good for another."""
    found = {}
    yield found
    for gang in found.values():
        gang.end()


@pytest.fixture
def together(gangs):
    """Train in a group of processes (``size`` 1: in this one); give the state, the steps and the rows."""

    def run(folder, config, tokens, size=2, stop_after=-1, **options):
        folder.mkdir(exist_ok=True)
        if size == 1:
            start, _ = load_newest(folder / "c")
            rows = []
            with MetricsWriter(folder / "metrics", start.rows["metrics"] if start else 0) as metrics:
                keeper = Keeper(folder / "c", [metrics], start, every_sec=1e9, group=ALONE)
                result = train(config, rows.append, tokens=tokens, checkpoints=keeper, **options)
            return result.state, result.step, clean(rows)
        # A file of its own for each group: an old group writes into its file once more when it is collected.
        meet = f"meet-{uuid.uuid4().hex}"
        (folder / "task").write_bytes(pickle.dumps((config, tokens, meet, options)))
        gang = gangs[size] = gangs.get(size) or Gang(size)
        if fault := gang.run(folder, stop_after):
            gangs.pop(size).end()
            pytest.fail(fault)
        state, step, rows = json.loads((folder / "out").read_text())
        return state, step, clean(rows)

    return run


def clean(rows):
    return [{key: value for key, value in row.items() if key != "tokens_per_sec"} for row in rows]


@pytest.mark.exhaustive
def test_the_first_process_measures_what_one_alone_would(tmp_path, make_config, tokens, together):
    """Its micro-batch is the first, and the gathered weight is whole when it is copied."""
    config = make_config(
        TypeAdapter(RecipeSpec).validate_python(ALL), tokens=2048, eval_every_tokens=1024, micro_batch_size=8,
        grad_clip=None,
    )  # fmt: skip
    settings = Diagnostics(every_tokens=1024, layers=["*"], draws=2)
    found = []
    train(config, [].append, tokens=tokens, observe=lambda trainee: Recorder(trainee, settings, found.append))
    state, step, rows = together(tmp_path / "two", config, tokens, diagnostics=settings)
    _, _, plain = together(tmp_path / "plain", config, tokens)
    assert (state, step, rows) == ("finished", 4, plain)
    assert json.loads((tmp_path / "two" / "diagnosed").read_text()) == json.loads(json.dumps(found))
    assert len({(row["layer"], row["gemm"]) for row in found}) == 24


def losses(rows):
    return [row.get("val_loss", row.get("loss")) for row in rows]


@pytest.mark.parametrize(("model", "recipe"), [
    ("gpt", {"gemms": ["wgrad"]}),
    *(pytest.param(*one, marks=pytest.mark.exhaustive)
      for one in (("llama", ALL), ("untied", NVFP4), ("llama", RESET), ("experts", ALL))),
])  # fmt: skip
def test_two_processes_have_the_curve_of_one_to_the_bit(
    tmp_path, make_config, tokens, together, model, recipe
):
    """Two micro-batches, one each: their sum has one order. Clipping is off, whose norm is another sum."""
    asked, recipe = recipe, TypeAdapter(RecipeSpec).validate_python(recipe)
    shape = {"layers": 3, **MODELS[model]}
    config = make_config(
        recipe, model=shape, tokens=4096, eval_every_tokens=1024, micro_batch_size=8, grad_clip=None
    )
    alone = []
    assert train(config, alone.append, tokens=tokens).state == "finished"
    state, _, rows = together(tmp_path / "two", config, tokens)
    assert state == "finished"
    alone = clean(alone)
    assert losses(rows) == losses(alone)
    resets, own = ([row.get("weights_reset") for row in some if "loss" in row] for some in (rows, alone))
    assert resets == own
    assert any(resets) == ("deoscillate" in asked)
    norms, own_norms = ([row["grad_norm"] for row in some if "loss" in row] for some in (rows, alone))
    assert norms == pytest.approx(own_norms, rel=1e-5)  # a sum over other rows


def test_clipping_and_shares_of_the_batch_differ_by_the_order_of_sums_alone(
    tmp_path, make_config, tokens, together
):
    """Without a micro-batch size each process takes its half of the batch."""
    config = make_config(TypeAdapter(RecipeSpec).validate_python(ALL), tokens=4096, eval_every_tokens=1024)
    alone = []
    train(changed(config, micro_batch_size=8), alone.append, tokens=tokens)
    _, _, rows = together(tmp_path / "two", config, tokens)
    assert losses(rows) == pytest.approx(losses(alone), abs=0.01)
    assert losses(rows)[0] == losses(alone)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(1, 2), (2, 3)])
def test_a_run_goes_on_with_another_number_of_devices(tmp_path, make_config, tokens, together, sizes):
    asked = {**ALL, "stabiliser": "none", "deoscillate": {"window": 4, "threshold": 1.1}}
    recipe = TypeAdapter(RecipeSpec).validate_python(asked)
    config = make_config(recipe, tokens=6144, eval_every_tokens=1536, batch_size=12, micro_batch_size=2)
    whole = []
    train(config, whole.append, tokens=tokens)
    first, second = sizes
    stops = {"stop_after": 7} if first > 1 else {"should_stop": Stop(7)}
    state, step, begun = together(tmp_path / "run", config, tokens, first, **stops)
    assert (state, step) == ("interrupted", 7)
    files = sorted(path.name for path in (tmp_path / "run" / "c").glob("*.safetensors"))
    assert len(files) == first
    state, step, rest = together(tmp_path / "run", config, tokens, second)
    assert (state, step) == ("finished", 16)
    assert losses(begun + rest) == pytest.approx(losses(clean(whole)), abs=0.01)


class Stop:
    """True from the n-th question on."""

    def __init__(self, after):
        self.left = after

    def __call__(self):
        self.left -= 1
        return self.left <= 0


def test_a_resumed_group_goes_on_to_the_same_bits(tmp_path, make_config, tokens, together):
    recipe = TypeAdapter(RecipeSpec).validate_python(ALL)
    config = make_config(recipe, tokens=4096, eval_every_tokens=1024, evaluate_in="both")
    _, _, whole = together(tmp_path / "whole", config, tokens)
    _, step, begun = together(tmp_path / "parts", config, tokens, stop_after=3)
    assert step == 3
    _, _, rest = together(tmp_path / "parts", config, tokens)
    assert begun + rest == whole


def test_lower_precision_of_weights_and_sums_trains(tmp_path, make_config, tokens, together):
    config = make_config(tokens=4096, eval_every_tokens=1024, master_weights="bf16", reduction="bf16")
    _, _, rows = together(tmp_path / "two", config, tokens)
    assert losses(rows)[-1] < losses(rows)[0]


def test_a_divergence_is_found_in_all_and_names_the_operand(tmp_path, make_config, tokens, together):
    config = make_config(TypeAdapter(RecipeSpec).validate_python(ALL), learning_rate=1e4, grad_clip=None)
    state, _, _ = together(tmp_path / "two", config, tokens)
    assert state == "diverged"


@pytest.mark.parametrize("model", [{}, {"experts": 3}, {"architecture": "gpt"}])
def test_computing_activations_twice_changes_no_bit(make_config, tokens, model):
    recipe = TypeAdapter(RecipeSpec).validate_python(ALL)
    config = make_config(recipe, model=model, tokens=2048, eval_every_tokens=1024)
    once, twice = [], []
    train(config, once.append, tokens=tokens)
    train(config, twice.append, tokens=tokens, layout=TWICE)
    assert clean(once) == clean(twice)


def test_a_model_without_blocks_cannot_be_laid_out_by_blocks(make_config, tokens, tmp_path):
    (tmp_path / "m.py").write_text(
        "from torch import nn\ndef build(*, vocab_size, seq_len):\n"
        "    return nn.Sequential(nn.Embedding(vocab_size, 32), nn.Linear(32, vocab_size))\n"
    )
    config = replace(make_config(), model=ModelConfig(function=f"{tmp_path}/m.py:build"))
    with pytest.raises(ValueError, match="activation_checkpointing needs blocks"):
        train(config, print, tokens=tokens, layout=TWICE)


@pytest.mark.exhaustive
def test_a_hugging_face_model_has_the_curve_of_one_process_with_dropout(
    tmp_path, make_config, tokens, together
):
    pytest.importorskip("transformers")
    content = {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64,
    }  # fmt: skip
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(content))
    recipe = TypeAdapter(RecipeSpec).validate_python(ALL)
    config = make_config(recipe, tokens=2048, eval_every_tokens=1024, micro_batch_size=8, grad_clip=None)
    config = replace(config, model=ModelConfig(hf=str(tmp_path / "hf")))
    alone = []
    train(config, alone.append, tokens=tokens)
    _, _, rows = together(tmp_path / "two", config, tokens, layout={"checkpoint_activations": True})
    assert losses(rows) == losses(clean(alone))
