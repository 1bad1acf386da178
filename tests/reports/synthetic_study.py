"""Synthetic studies, written through the run store as `ablate run` would write them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from types import MappingProxyType

import numpy as np
import pytest

from ablate.backends.device import Device
from ablate.base.files import append_line, hash_of, read_record, write_record
from ablate.execute.environment import code_digest
from ablate.recipes import PRESETS, Recipe, RecipeSpec, resolve
from ablate.reports.findings.analyse import analyse
from ablate.results.cost import token_costs
from ablate.results.frames import load_frames
from ablate.results.intervals import Method
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.run.outcome import Outcome
from ablate.store import END_STATES, Status, StudyStore
from ablate.store.checkpoints import save_manifest
from ablate.store.records import Speed, SpeedRecord, SpeedSettings

NONE = MappingProxyType({})
TRAINING = {
    "tokens": 1_000_000,
    "seq_len": 128,
    "batch_size": 32,
    "learning_rate": 0.004,
    "schedule": "constant",
    "warmup_tokens": 20_000,
    "eval_every_tokens": 50_000,
}
ENVIRONMENT = {
    "python": "3.11.9",
    "torch": "2.13.0",
    "ablate": "0.1.0",
    "platform": "Linux-x86_64",
    "cpu": "a CPU",
    "gpu": None,
    "threads": 1,
    "backend": "emulated",
    "backend_mode": "emulated",
    "git_commit": "0123456789ab",
}


def resolved_recipe(*gemms, hadamard=0, rest="bf16"):
    fp4 = {"format": "mxfp4", "hadamard": hadamard}
    other = {"format": rest, "hadamard": 0}
    recipe = {}
    for gemm in ("fprop", "dgrad", "wgrad"):
        recipe[gemm] = dict.fromkeys(("left", "right"), fp4 if gemm in gemms else other)
    return recipe


def smooth_curve(rng, *, cost=0.0, seed_noise=0.01, every=50_000, diverge_at=None):
    """Return a falling loss in which a token cost stretches the token axis."""
    tokens = np.arange(every, 1_000_001, every)
    pace = np.exp(rng.normal(0, seed_noise)) / (1 + cost)
    loss = (
        1.3
        + 4.0 * (1 + tokens * pace / 20_000) ** -0.45
        + rng.normal(0, 0.0015, len(tokens))
    )
    if diverge_at is not None:
        loss[tokens > diverge_at] = 7.5
        tokens = tokens[tokens <= diverge_at + 3 * every]
        loss = loss[: len(tokens)]
    return [*zip(tokens.tolist(), loss.tolist(), strict=True)]


def write_run(run, points, *, state, config, environment, message):
    """``points``: tokens, loss, and the loss in bf16 where there is a second evaluation."""
    if state == "pending":
        return
    run.create(config)
    if environment is not None:
        write_record(run.environment_path, environment)
    for step, (tokens, loss, *second) in enumerate(points, 1):
        place = {"tokens": tokens, "step": step, "time_unix": 1.7e9 + step}
        train = {
            "loss": loss + 0.02,
            "lr": 0.004,
            "grad_norm": 1.0,
            "tokens_per_sec": 31000.0,
        }
        append_line(run.metrics_path, {"kind": "train", **place, **train})
        row = {"kind": "eval", **place, "val_loss": loss}
        if second:
            row["val_loss_bf16"] = second[0]
        append_line(run.metrics_path, row)
    ended = 1.7e9 + 60 if state in ("finished", "diverged", "failed") else None
    last = points[-1][0] if points else 0
    # write_status stamps the present; the report must not depend on it.
    run.write_status(
        Status(state=state, attempt=1, tokens=last, step=len(points), message=message, started_unix=1.7e9,
               ended_unix=ended)
    )  # fmt: skip
    if points and state not in END_STATES:
        content = run.metrics_path.read_bytes()
        rows = {run.metrics_path.name: (len(content), hash_of(content))}
        save_manifest(run.checkpoints, len(points), (), numbers={}, rows=rows)


def reseal(run):
    """Make the run's files, as they are now, those it ended with."""
    run.write_status(run.status())


def rewrite(run, path, **changes):
    """Change values of one of the run's files, as if it had ended with them."""
    write_record(path, (read_record(path) if path.exists() else {}) | changes)
    reseal(run)


def build_study(
    folder, curves, *, states=NONE, messages=NONE, recipes=NONE, resolved=NONE, target=NONE, training=NONE,
    own_training=NONE, environment=ENVIRONMENT, factors=NONE, differs=NONE, forks=NONE, model=None,
    own_model=NONE, study="synthetic", **plan,
):  # fmt: skip
    """``curves`` maps an arm to the evaluations of its seeds 0, 1, …; the first is the baseline.

    With a ``model`` the configurations are whole, as a run writes them; ``own_model`` changes it for an arm.
    """
    store = StudyStore(folder / study)
    base = TRAINING | training
    arms = []
    for name, seeds in curves.items():
        config = {"training": base | own_training.get(name, {})}
        if model is not None:
            shape = ModelConfig(**model | own_model.get(name, {}))
            whole = dataclasses.asdict(whole_config(Recipe(), model=shape))
            config = whole | {"training": whole["training"] | config["training"]}
        if name in resolved or model is None:
            config["recipe"] = resolved.get(name, resolved_recipe())
        runs = []
        for seed, points in enumerate(seeds):
            words = f"{study}/{name}/{seed}{model or ''}"
            run_id = hashlib.sha256(words.encode()).hexdigest()[:12]
            runs.append({"id": run_id, "seed": seed})
            write_run(
                store.run(run_id), points, state=states.get((name, seed), "finished"),
                message=messages.get((name, seed)), config=config | {"seed": seed}, environment=environment,
            )  # fmt: skip
        arm = {"name": name, "recipe": recipes.get(name, "bf16"), "runs": runs}
        arm["factors"] = factors.get(name, {})
        arm["differs"] = differs.get(name, {})
        if name in forks:
            arm["fork"] = dict(zip(("arm", "tokens"), forks[name], strict=True))
        arms.append(arm)
    content = {
        "format": 1,
        "study": study,
        "baseline": next(iter(curves)),
        "paired_seeds": False,
    }
    content |= {"training": base, "arms": arms}
    content["target"] = {
        "kind": "val_loss",
        "value": 2.2,
        "crossing": "confirmed",
    } | target
    write_record(store.plan_path, content | plan)
    return store


@pytest.fixture
def make_study(tmp_path):
    """Build a study in a folder of its own."""
    number = itertools.count()

    def make(curves, **more):
        return build_study(tmp_path / f"storage{next(number)}", curves, **more)

    return make


def crossing(points, target, column=1):
    """Return the crossing of a curve that falls all the way, in one line of numpy."""
    tokens, loss = np.array(points)[:, [0, column]].T
    return float(np.exp(np.interp(-target, -loss, np.log(tokens))))


def parts(interval):
    return interval.estimate, interval.low, interval.high


def analysed(store):
    return analyse(load_frames(store))


def arms_of(store):
    return {arm.name: arm for arm in analysed(store).arms}


def hits(*tokens):
    """Runs of the seeds 0, 1, … that hit after so many tokens."""
    return [
        Outcome(seed=seed, end="hit", low=float(t), high=float(t))
        for seed, t in enumerate(tokens)
    ]


def token_cost(arm, baseline, **more):
    """Return the token cost of one arm over the baseline, by their own variance."""
    return token_costs({"": (arm, baseline)}, Method(moderated=False, **more))[""]


def line(*losses, every=100):
    """Return evaluations every so many tokens, from the first interval on."""
    return [(every * i, loss) for i, loss in enumerate(losses, 1)]


def lines(text):
    """Return the evaluations of ``ARM: LOSS LOSS, LOSS LOSS; ARM: …``, a comma between runs."""
    arms = (arm.split(":") for arm in text.split("; "))
    return {
        name: [line(*map(float, run.split())) for run in runs.split(",")]
        for name, runs in arms
    }


def ladder_study(folder, seed=1):
    """Six arms as in the quickstart."""
    rng = np.random.default_rng(seed)
    three = ("fprop", "dgrad", "wgrad")
    arms = [
        ("bf16", 0.0, "bf16", resolved_recipe()),
        ("fp8", 0.004, "fp8", resolved_recipe(rest="fp8_e4m3")),
        ("fprop", 0.06, "Fprop mxfp4; Dgrad+Wgrad bf16", resolved_recipe("fprop")),
        (
            "fprop+dgrad",
            0.09,
            "Fprop+Dgrad mxfp4; Wgrad bf16",
            resolved_recipe("fprop", "dgrad"),
        ),
        ("all three", 0.24, "mxfp4", resolved_recipe(*three)),
        ("all three, H16", 0.085, "mxfp4 DHT16", resolved_recipe(*three, hadamard=16)),
    ]
    curves = {}
    for name, cost, *_ in arms:
        curves[name] = [smooth_curve(rng, cost=cost) for _ in range(2)]
    return build_study(
        folder,
        curves,
        recipes={name: words for name, _, words, _ in arms},
        resolved={name: recipe for name, *_, recipe in arms},
        study="quickstart",
        target={"value": 2.14},
        description="What FP4 in each GEMM costs on the text of the standard library.",
    )


def wide_study(folder):
    """Twelve arms, with runs that end before the target and runs that diverge."""
    rng = np.random.default_rng(2)
    curves = {"fp8": [smooth_curve(rng) for _ in range(5)]}
    resolved = {"fp8": dataclasses.asdict(resolve(RecipeSpec(rest="fp8")))}
    messages = {("F H16", 4): "RuntimeError: out of memory"}
    states = {("F H16", 4): "failed"}
    stabilisers = [
        ("plain", "none", 1.0), ("SR", "sr", 1.1), ("RHT16", "rht", 1.35), ("H16", "dht", 0.4),
    ]  # fmt: skip
    diverging = {"F+D+W SR": 5, "F+D+W RHT16": 1}
    gemms = []
    for gemm, cost in (("fprop", 0.05), ("dgrad", 0.09), ("wgrad", 0.22)):
        gemms.append(gemm)
        low = "+".join(name[0].upper() for name in gemms)
        for word, stabiliser, factor in stabilisers:
            name = f"{low} {word}"
            if name == "F+D H16":
                continue
            spec = RecipeSpec(gemms=[*gemms], stabiliser=stabiliser, rest="fp8")
            resolved[name] = dataclasses.asdict(resolve(spec))
            curves[name] = []
            for seed in range(5):
                is_diverging = seed < diverging.get(name, 0)
                curves[name].append(
                    smooth_curve(
                        rng,
                        cost=cost * factor + 0.12 * (name == "F+D+W RHT16"),
                        seed_noise=0.025,
                        diverge_at=150_000 + 50_000 * seed if is_diverging else None,
                    )
                )
                if is_diverging:
                    states[name, seed] = "diverged"
                    messages[name, seed] = "validation loss above 7.1 for 3 evaluations"
    return build_study(
        folder,
        curves,
        states=states,
        messages=messages,
        study="amd-ladder",
        target={"value": 2.09},
        recipes={name: name for name in curves},
        resolved=resolved,
    )


GPU = Device(kind="hip", arch="gfx950", name="AMD Instinct MI355X")
NATIVE = ENVIRONMENT | {
    "backend_mode": "native", "gpu": GPU.name,
    "gpu_uuid": "GPU-1", "code": code_digest(),
}  # fmt: skip
RATES = {
    "fp8": (100.0, 100.4, 99.8, 100.9, 99.9, 100.1),
    "fp4": (150.2, 149.5, 150.9, 149.8, 151.0, 150.3),
}
SETTINGS = SpeedSettings(steps=10, warmup=3, repeats=3)


def whole_config(recipe, seed=0, model=None):
    return RunConfig(
        model=model or ModelConfig(), data=DataConfig(), data_digest="d", vocab_size=256,
        training=TrainingConfig(), recipe=recipe, backend="auto", seed=seed,
    )  # fmt: skip


def native_study(folder, **plan):
    """Two arms of two seeds with all that a native run writes; the hardware is a stand-in."""
    curves = lines("fp8: 3 2.5 1.8, 3 2.4 1.8; fp4: 3 2.6 1.9, 3 2.5 1.8")
    recipes = {"fp8": PRESETS["te-hybrid-fp8"].recipe, "fp4": PRESETS["amd-fdw"].recipe}
    resolved = {name: dataclasses.asdict(recipe) for name, recipe in recipes.items()}
    return build_study(
        folder, curves, environment=NATIVE, model={}, resolved=resolved, **plan
    )


def speed_of(store, arm, **change):
    """Return what ``ablate check steps STUDY`` would have measured of an arm, if it had such a device."""
    entry = store.plan().arm(arm)
    speed = Speed(
        arm=arm, run=entry.runs[0].id, tokens_per_sec=RATES[arm], median=1.0, spread=0.0,
        over_baseline=None, peak_memory_bytes=None, threads=1, backend_mode="native", timing_valid=True,
        why_not=None,
    )  # fmt: skip
    return dataclasses.replace(speed, **change)


def write_throughput(store, *speeds, device=GPU, **change):
    """Write a record as ``ablate check steps STUDY`` writes it."""
    record = SpeedRecord(
        study=store.path.name, device=device, code=code_digest(), settings=SETTINGS, measured_unix=1.7e9,
        versions={"ablate": "0.1.0"}, arms=speeds,
    )  # fmt: skip
    write_record(store.throughput_path, dataclasses.asdict(record) | change)
