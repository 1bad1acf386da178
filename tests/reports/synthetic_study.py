"""Synthetic studies, written through the run store as `ablate run` would write them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ablate.backends.device import Device
from ablate.base.files import append_line, hash_of, read_record, write_record
from ablate.execute.environment import code_digest
from ablate.execute.throughput import record
from ablate.recipes import PRESETS, Recipe, RecipeSpec, resolve
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.run.outcome import Outcome
from ablate.store import END_STATES, RunDir, Status, StudyStore
from ablate.store.checkpoints import save_manifest
from ablate.store.records import Speed, SpeedSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Points = Sequence[tuple[float, ...]]
"""Tokens and loss of each evaluation, and the loss of a second one in bf16 where there is one."""

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
    "timing_valid": True,
    "git_commit": "0123456789ab",
}


def resolved_recipe(*gemms: str, hadamard: int = 0, rest: str = "bf16") -> dict[str, Any]:
    fp4 = {side: {"format": "mxfp4", "hadamard": hadamard} for side in ("left", "right")}
    other = {side: {"format": rest, "hadamard": 0} for side in ("left", "right")}
    return {gemm: fp4 if gemm in gemms else other for gemm in ("fprop", "dgrad", "wgrad")}


def smooth_curve(
    rng: np.random.Generator,
    *,
    cost: float = 0.0,
    seed_noise: float = 0.01,
    budget: int = 1_000_000,
    every: int = 50_000,
    diverge_at: int | None = None,
) -> list[tuple[int, float]]:
    """Return a falling loss in which a token cost stretches the token axis."""
    tokens = np.arange(every, budget + 1, every)
    pace = np.exp(rng.normal(0, seed_noise)) / (1 + cost)
    loss = 1.3 + 4.0 * (1 + tokens * pace / 20_000) ** -0.45 + rng.normal(0, 0.0015, len(tokens))
    if diverge_at is not None:
        keep = tokens <= diverge_at + 3 * every
        tokens, loss = tokens[keep], loss[keep]
        loss[tokens > diverge_at] = 7.5
    return [(int(t), float(v)) for t, v in zip(tokens, loss, strict=True)]


def write_run(
    run: RunDir,
    points: Points,
    *,
    state: str,
    config: dict[str, Any],
    environment: dict[str, Any] | None,
    message: str | None = None,
) -> None:
    if state == "pending":
        return
    run.create(config)
    if environment is not None:
        write_record(run.environment_path, environment)
    for step, (tokens, loss, *second) in enumerate(points, 1):
        append_line(
            run.metrics_path,
            {
                "kind": "train",
                "tokens": tokens,
                "step": step,
                "time_unix": 1.7e9 + step,
                "loss": loss + 0.02,
                "lr": 0.004,
                "grad_norm": 1.0,
                "tokens_per_sec": 31000.0,
            },
        )
        append_line(
            run.metrics_path,
            {"kind": "eval", "tokens": tokens, "step": step, "time_unix": 1.7e9 + step, "val_loss": loss}
            | dict(zip(("val_loss_bf16",), second, strict=False)),
        )
    last = points[-1][0] if points else 0
    status = Status(
        state=state,
        attempt=1,
        tokens=last,
        step=len(points),
        message=message,
        started_unix=1.7e9,
        ended_unix=1.7e9 + 60 if state in ("finished", "diverged", "failed") else None,
    )
    # write_status stamps the present; the report must not depend on it.
    run.write_status(status)
    if points and state not in END_STATES:
        content = run.metrics_path.read_bytes()
        rows = {run.metrics_path.name: (len(content), hash_of(content))}
        save_manifest(run.checkpoints, len(points), (), numbers={}, rows=rows)


def reseal(run: RunDir) -> None:
    """Make the run's files, as they are now, those it ended with."""
    run.write_status(run.status())


def rewrite(run: RunDir, path: Path, **changes: Any) -> None:
    """Change values of one of the run's files, as if it had ended with them."""
    write_record(path, (read_record(path) if path.exists() else {}) | changes)
    reseal(run)


def build_study(
    folder: Path,
    curves: Mapping[str, Sequence[Points]],
    *,
    states: Mapping[tuple[str, int], str] | None = None,
    messages: Mapping[tuple[str, int], str] | None = None,
    recipes: Mapping[str, str] | None = None,
    resolved: Mapping[str, dict[str, Any]] | None = None,
    target: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    own_training: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, Any] | None = ENVIRONMENT,
    factors: Mapping[str, Mapping[str, Any]] | None = None,
    forks: Mapping[str, tuple[str, int]] | None = None,
    model: Mapping[str, Any] | None = None,
    own_model: Mapping[str, Mapping[str, Any]] | None = None,
    study: str = "synthetic",
    **plan: Any,
) -> StudyStore:
    """``curves`` maps an arm to the evaluations of its seeds 0, 1, …; the first is the baseline.

    With a ``model`` the configurations are whole, as a run writes them; ``own_model`` changes it for an arm.
    """
    store = StudyStore(folder / study)
    arms = []
    for name, seeds in curves.items():
        own = TRAINING | dict(training or {}) | dict((own_training or {}).get(name, {}))
        whole = {}
        if model is not None:
            fields = dict(model) | dict((own_model or {}).get(name, {}))
            config = dataclasses.replace(whole_config(Recipe()), model=ModelConfig(**fields))
            whole = dataclasses.asdict(config)
            own = whole["training"] | own
        runs = []
        for seed, points in enumerate(seeds):
            run_id = hashlib.sha256(f"{study}/{name}/{seed}{model or ''}".encode()).hexdigest()[:12]
            runs.append({"id": run_id, "seed": seed})
            write_run(
                store.run(run_id),
                points,
                state=(states or {}).get((name, seed), "finished"),
                message=(messages or {}).get((name, seed)),
                config=whole
                | {
                    "training": own,
                    "recipe": (resolved or {}).get(name, whole.get("recipe") or resolved_recipe()),
                    "seed": seed,
                },
                environment=dict(environment) if environment is not None else None,
            )
        arms.append(
            {
                "name": name,
                "description": None,
                "recipe": (recipes or {}).get(name, "bf16"),
                "factors": dict((factors or {}).get(name, {})),
                "differs": {},
                "folded": [],
                "runs": runs,
            }
        )
        if name in (forks or {}):
            arms[-1]["fork"] = dict(zip(("arm", "tokens"), forks[name], strict=True))
    write_record(
        store.plan_path,
        {
            "format": 1,
            "study": study,
            "description": None,
            "baseline": next(iter(curves)),
            "target": {"kind": "val_loss", "value": 2.2, "crossing": "confirmed"} | dict(target or {}),
            "paired_seeds": False,
            "training": TRAINING | dict(training or {}),
            "arms": arms,
            "dropped": [],
        }
        | plan,
    )
    return store


@pytest.fixture
def make_study(tmp_path: Path) -> Callable[..., StudyStore]:
    """Build a study in a folder of its own."""
    number = itertools.count()

    def make(curves: Mapping[str, Sequence[Points]], **more: Any) -> StudyStore:
        return build_study(tmp_path / f"storage{next(number)}", curves, **more)

    return make


def hits(*tokens: float) -> list[Outcome]:
    """Runs of the seeds 0, 1, … that hit after so many tokens."""
    return [Outcome(seed=seed, end="hit", low=float(t), high=float(t)) for seed, t in enumerate(tokens)]


def missing(count: int, first: int = 0) -> list[Outcome]:
    """Runs without a result."""
    return [Outcome(seed=first + i, end="missing") for i in range(count)]


def line(*losses: float, every: int = 100) -> list[tuple[int, float]]:
    """Return evaluations every so many tokens, from the first interval on."""
    return [(every * i, loss) for i, loss in enumerate(losses, 1)]


def ladder_study(folder: Path, seeds: int = 2, seed: int = 1) -> StudyStore:
    """Six arms as in the quickstart."""
    rng = np.random.default_rng(seed)
    three = ("fprop", "dgrad", "wgrad")
    arms: dict[str, tuple[float, str, dict[str, Any]]] = {
        "bf16": (0.0, "bf16", resolved_recipe()),
        "fp8": (0.004, "fp8", resolved_recipe(rest="fp8_e4m3")),
        "fprop": (0.06, "Fprop mxfp4; Dgrad+Wgrad bf16", resolved_recipe("fprop")),
        "fprop+dgrad": (0.09, "Fprop+Dgrad mxfp4; Wgrad bf16", resolved_recipe("fprop", "dgrad")),
        "all three": (0.24, "mxfp4", resolved_recipe(*three)),
        "all three, H16": (0.085, "mxfp4 DHT16", resolved_recipe(*three, hadamard=16)),
    }
    return build_study(
        folder,
        {name: [smooth_curve(rng, cost=cost) for _ in range(seeds)] for name, (cost, _, _) in arms.items()},
        recipes={name: recipe for name, (_, recipe, _) in arms.items()},
        resolved={name: recipe for name, (_, _, recipe) in arms.items()},
        study="quickstart",
        target={"value": 2.14},
        description="What FP4 in each GEMM costs on the text of the standard library.",
    )


def wide_study(folder: Path, seeds: int = 5, seed: int = 2) -> StudyStore:
    """Twelve arms, with runs that end before the target and runs that diverge."""
    rng = np.random.default_rng(seed)
    stabilisers = ("plain", "SR", "RHT16", "H16")
    widths = {"F": 0.05, "F+D": 0.09, "F+D+W": 0.22}
    curves: dict[str, list[list[tuple[int, float]]]] = {"fp8": [smooth_curve(rng) for _ in range(seeds)]}
    recipes = {"fp8": dataclasses.asdict(resolve(RecipeSpec(rest="fp8")))}
    in_files = {"plain": "none", "SR": "sr", "RHT16": "rht", "H16": "dht"}
    states: dict[tuple[str, int], str] = {}
    messages: dict[tuple[str, int], str] = {}
    for (gemms, cost), stabiliser in itertools.product(widths.items(), stabilisers):
        name = f"{gemms} {stabiliser}"
        if name == "F+D H16":
            continue
        low = list(("fprop", "dgrad", "wgrad")[: len(gemms.split("+"))])
        spec = RecipeSpec(gemms=low, stabiliser=in_files[stabiliser], rest="fp8")
        recipes[name] = dataclasses.asdict(resolve(spec))
        factor = {"plain": 1.0, "SR": 1.1, "RHT16": 1.35, "H16": 0.4}[stabiliser]
        diverging = {"F+D+W SR": seeds, "F+D+W RHT16": 1}.get(name, 0)
        curves[name] = [
            smooth_curve(
                rng,
                cost=cost * factor + (0.12 if name == "F+D+W RHT16" else 0),
                seed_noise=0.025,
                diverge_at=150_000 + 50_000 * i if i < diverging else None,
            )
            for i in range(seeds)
        ]
        for i in range(diverging):
            states[name, i] = "diverged"
            messages[name, i] = "validation loss above 7.1 for 3 evaluations"
    states["F H16", seeds - 1] = "failed"
    messages["F H16", seeds - 1] = "RuntimeError: out of memory"
    return build_study(
        folder,
        curves,
        states=states,
        messages=messages,
        study="amd-ladder",
        target={"value": 2.09},
        recipes={name: name for name in curves},
        resolved=recipes,
    )


GPU = Device(kind="hip", arch="gfx950", name="AMD Instinct MI355X")
NATIVE = ENVIRONMENT | {
    "backend_mode": "native", "timing_valid": True, "timing_why_not": None, "gpu": GPU.name,
    "gpu_uuid": "GPU-1", "code": code_digest(),
}  # fmt: skip
RATES = {"fp8": (100.0, 100.4, 99.8, 100.9, 99.9, 100.1), "fp4": (150.2, 149.5, 150.9, 149.8, 151.0, 150.3)}
SETTINGS = SpeedSettings(steps=10, warmup=3, repeats=3)


def whole_config(recipe: Recipe, seed: int = 0) -> RunConfig:
    return RunConfig(
        model=ModelConfig(), data=DataConfig(), data_digest="d", vocab_size=256, training=TrainingConfig(),
        recipe=recipe, backend="auto", seed=seed,
    )  # fmt: skip


def native_study(folder: Path, **plan: Any) -> StudyStore:
    """Two arms of two seeds with all that a native run writes; the hardware is a stand-in."""
    curves = {"fp8": [line(3, 2.5, 1.8), line(3, 2.4, 1.8)], "fp4": [line(3, 2.6, 1.9), line(3, 2.5, 1.8)]}
    store = build_study(folder, curves, environment=NATIVE, **plan)
    recipes = {"fp8": PRESETS["te-hybrid-fp8"].recipe, "fp4": PRESETS["amd-fdw"].recipe}
    for arm in store.plan().arms:
        for i, entry in enumerate(arm.runs):
            run = store.run(entry.id)
            config = dataclasses.asdict(whole_config(recipes[arm.name], i))
            write_record(run.config_path, config)
            speed = (100 if arm.name == "fp8" else 125) + i
            rows = run.metrics_path.read_text().replace("31000.0", str(float(speed)))
            run.metrics_path.write_text(rows)
            reseal(run)
    return store


def speed_of(store: StudyStore, arm: str, **change: Any) -> Speed:
    """Return what ``ablate check STUDY --steps`` would have measured of an arm, if it had such a device."""
    entry = store.plan().arm(arm)
    speed = Speed(
        arm=arm, run=entry.runs[0].id, tokens_per_sec=RATES[arm], median=1.0, spread=0.0,
        over_baseline=None, peak_memory_bytes=None, threads=1, backend_mode="native", timing_valid=True,
        why_not=None,
    )  # fmt: skip
    return dataclasses.replace(speed, **change)


def write_throughput(store: StudyStore, *speeds: Speed, device: Device = GPU, **change: Any) -> None:
    """Write a record as ``ablate check STUDY --steps`` writes it."""
    content = dataclasses.asdict(record(store.path.name, device, speeds, None, SETTINGS))
    write_record(store.throughput_path, content | {"measured_unix": 1.7e9} | change)
