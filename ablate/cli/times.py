"""``ablate check STUDY``: ``--time`` times the GEMMs of its arms, ``--steps`` their whole training steps."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from ablate.backends.device import chosen_device
from ablate.base.errors import UserError
from ablate.cli.common import deliver, table_of
from ablate.run import backend_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from ablate.check.speed import Shape
    from ablate.plan import Plan, PlannedArm
    from ablate.recipes import LayerRecipe
    from ablate.store.records import SpeedRecord

FORMATS = ("bf16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e3m0")
_FEATURES = _TOKENS = 1024
"""Size of the layer that is timed for each format if no study is given."""
_WARMUP_STEPS = 3
_GEMMS = {
    "arm": "{arm}", "layer": "{layer}", "GEMM": "{gemm}", "M×N×K": "{m}×{n}×{k}", "by": "{backend} {mode}",
    "quantise ms": "{quantise_ms:.3f}", "GEMM ms": "{multiply_ms:.3f}", "TFLOP/s": "{tflops:.2f}",
    "of peak": "{share_of_peak:.0%}", "× bf16": "{speed_over_bf16:.2f}", "× FP8": "{speed_over_fp8:.2f}",
}  # fmt: skip
_ARMS = {
    "arm": "{arm}", "ms": "{total_ms:.2f}", "× bf16": "{speed_over_bf16:.2f}",
    "× FP8": "{speed_over_fp8:.2f}", "how": "{modes}",
}  # fmt: skip
_STEPS = {
    "arm": "{arm}", "tokens/s": "{median:,.0f}", "spread": "{spread:.1%}",
    "× baseline": "{over_baseline:.2f}", "peak GB": "{peak:.2f}", "timing": "{timing}",
}  # fmt: skip


def known_backend(name: str) -> str:
    """Return ``name``; raises ``UserError`` if no back end has it."""
    if name not in backend_names():
        raise UserError(f"--backend: no back end '{name}' (expected {', '.join(backend_names())})")
    return name


def _chosen(plan: Plan, names: Collection[str]) -> list[PlannedArm]:
    """Return the arms with these names; all arms without names."""
    known = [arm.name for arm in plan.arms]
    for name in names:
        if name not in known:
            raise UserError(f"--arm: no arm '{name}' in study '{plan.study}' (arms: {', '.join(known)})")
    return [arm for arm in plan.arms if not names or arm.name in names]


def _layers(
    study: str, names: tuple[str, ...], tokens: int | None
) -> Iterator[tuple[str, str, int, Shape, LayerRecipe, str]]:
    """Yield (arm or format, part, number of layers, shape, recipe, back end), once for all equal layers.

    The recipe is that at the start of training.
    """
    from ablate.backends.testing.suite import both
    from ablate.check.speed import Shape
    from ablate.plan import build_plan
    from ablate.recipes import GEMMS, LayerRecipe, OperandPolicy
    from ablate.recipes.place import phases_of
    from ablate.run.architecture import layer_places
    from ablate.study import load_study

    if not study:
        for fmt in FORMATS:
            gemm = both(OperandPolicy(format=fmt))  # type: ignore[arg-type]
            shape = Shape(tokens=tokens or _TOKENS, inputs=_FEATURES, outputs=_FEATURES)
            yield fmt, "layer", 1, shape, LayerRecipe(**dict.fromkeys(GEMMS, gemm)), "auto"
        return
    for arm in _chosen(build_plan(load_study(study)), names):
        training = arm.config.training
        sequences = training.micro_batch_size or training.batch_size // arm.resources.devices_per_run
        where = layer_places(arm.layers)
        counted: Counter[tuple[str, Shape, LayerRecipe]] = Counter()
        for layer in arm.layers:
            part = re.sub(r"(^blocks)?\.\d+\.", ".", layer.name).lstrip(".")
            rows = tokens or sequences * training.seq_len
            shape = Shape(tokens=rows, inputs=layer.inputs, outputs=layer.outputs)
            counted[part, shape, phases_of(arm.config.recipe, where[layer.name])[0].recipe] += 1
        for (part, shape, recipe), count in counted.items():
            yield arm.name, part, count, shape, recipe, arm.config.backend


def time_gemms(
    study: str, out: Path | None, *, as_json: bool, names: tuple[str, ...], tokens: int | None,
    repeats: int | None, device: str | None, backend: str | None,
) -> int:  # fmt: skip
    """Time every GEMM of a study's arms, or without a study one of each format; return the exit code."""
    from ablate.backends.select import Selection
    from ablate.check.speed import time_gemm
    from ablate.recipes import GEMMS, describe_gemm

    if names and not study:
        raise UserError("--arm: without a study there are no arms")
    if backend is not None:
        known_backend(backend)
    where, found = chosen_device(device)
    repeats = repeats or 20
    time_once, selection = cache(time_gemm), cache(Selection)
    rows: list[dict[str, Any]] = []
    for arm, part, count, shape, recipe, own in _layers(study, names, tokens):
        for gemm in GEMMS:
            policy = recipe.gemm(gemm)
            try:
                timed = time_once(gemm, policy, shape, selection(backend or own), where, repeats=repeats)
            except ValueError as error:
                raise UserError(f"arm '{arm}', {part}, {gemm.capitalize()}: {error}") from None
            about = {"arm": arm, "layer": part, "layers": count, "operands": describe_gemm(policy)}
            rows.append(about | timed)
    arms = []
    for name, group in groupby(rows, key=itemgetter("arm")):
        whole = list(group)
        keys = ("total_ms", "bf16_ms", "fp8_ms")
        total, bf16, fp8 = (sum(row[key] * row["layers"] for row in whole) for key in keys)
        speeds = {"speed_over_bf16": bf16 / total, "speed_over_fp8": fp8 / total}
        modes = sorted({row["mode"] for row in whole})
        arms.append({"arm": name, "total_ms": total, **speeds, "modes": modes})
    content = {"device": asdict(found), "repeats": repeats, "gemms": rows, "arms": arms}

    def lines() -> Iterator[str]:
        yield f"{found.name} ({found.arch}), medians of {repeats} repeats\n"
        yield table_of(_GEMMS, rows)
        yield "\nAll linear layers of a pass, forward and backward:"
        yield table_of(_ARMS, (arm | {"modes": ", ".join(arm["modes"])} for arm in arms))
        yield "\nTimes of emulated GEMMs say nothing of FP4 hardware."

    deliver(content, lines(), as_json=as_json, out=out)
    return 0


def time_steps(
    study: str, out: Path | None, *, as_json: bool, storage: Path, names: tuple[str, ...], steps: int,
    repeats: int | None, device: str | None,
) -> int:  # fmt: skip
    """Time whole training steps of a study's arms; keep the record for its report; return the exit code."""
    from ablate.base.files import write_record
    from ablate.plan import build_plan, known_plan
    from ablate.store import StudyStore
    from ablate.store.records import SpeedSettings
    from ablate.study import load_study

    plan = build_plan(load_study(study))
    store = StudyStore(storage / plan.study)
    plan = known_plan(plan, store)
    arms = _chosen(plan, names)
    where, _ = chosen_device(device)
    from ablate.execute.throughput import measure

    settings = SpeedSettings(steps=steps, warmup=_WARMUP_STEPS, repeats=repeats or 3)
    with click.progressbar(length=2 * len(arms), label="arms, two turns", hidden=as_json) as bar:
        measured = measure(
            plan.study, arms, plan.baseline, where, settings=settings, done=lambda _: bar.update(1)
        )
    deliver(asdict(measured), _step_lines(measured), as_json=as_json, out=out)
    # Arms of an earlier record are dropped: turns cancel drift only within one measurement.
    said = f"Kept for the report in {store.throughput_path}, in place of what was measured before"
    if plan.baseline not in [one.arm for one in measured.arms]:
        said = f"Not kept for the report, which needs the baseline timed, too: --arm '{plan.baseline}'"
    else:
        try:
            write_record(store.throughput_path, asdict(measured))
        except OSError as error:
            raise UserError(f"cannot write {store.throughput_path}: {error.strerror or error}") from None
    click.echo(f"\n{said}", err=as_json)
    return 0


def _step_lines(measured: SpeedRecord) -> Iterator[str]:
    device, settings = measured.device, measured.settings
    yield f"{device.name} ({device.arch}), medians of {2 * settings.repeats} × {settings.steps} steps\n"
    rows = [
        vars(one)
        | {"timing": one.why_not or "native", "peak": one.peak_memory_bytes and one.peak_memory_bytes / 1e9}
        for one in measured.arms
    ]
    yield table_of(_STEPS, rows)
    if measured.other_work:
        yield f"\nPerhaps not alone on the device: {measured.other_work}. Compare with care."
