"""``ablate diagnose``: which layers and GEMMs of a model can go to FP4, without training it."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ablate.backends.device import chosen_device
from ablate.base.errors import UserError
from ablate.cli.common import (
    AT_LEAST_1,
    FILE,
    deliver,
    device_option,
    find_run,
    json_option,
    names_text,
    out_option,
    storage_option,
    table_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.diagnose.budget import Cell
    from ablate.diagnose.ranking import Harm

_EXAMPLES = """\b
Examples:
  ablate diagnose llama-tiny --recipe mxfp4
  ablate diagnose Qwen/Qwen3-0.6B --data my-corpus/ --recipe "{gemms: [fprop, dgrad, wgrad], stabiliser: sr}"
  ablate diagnose my_model.py:build --options "{width: 512}"
  ablate diagnose 3f0c9d21 --layers "*.ffn.*" --json
  ablate diagnose 3f0c9d21 --recipe mxfp4 --budget 85% --write which-layers.yaml
"""
_SHARE = 0.8
# Short headers: with one longer, names of layers would wrap in 80 columns.
_RANKED = {
    "layer": "{of.layer}", "GEMM": "{gemm}", "harm": "{of.harm:.2%}", "random": "{of.random:.2%}",
    "loss": "{of.loss_change:+.4f}", "error": "{output[relative_error]:.2%}", "gain": "{output[gain]:.3f}",
    "bias": "{output[bias_share]:.3f}",
}  # fmt: skip

_POLICIES = {
    "policy": "{of[name]}",
    "FP4": "{of[share]:.1%}",
    "harm": "{of[harm]:.2%}",
    "of all": "{part:.0%}",
}


def _share(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if found is None or not 0 < float(found[1]) <= 100:
        raise UserError(f"--budget: expected a share such as 85%, got '{text}'")
    return float(found[1]) / 100


@click.command("diagnose", epilog=_EXAMPLES)
@click.argument("model")
@click.option("--data", metavar="PATH", help="Text. Default: a run's own, else Python's library.")
@click.option("--recipe", help="A recipe's name, or a mapping. Default: a run's own, else mxfp4.")
@click.option(
    "--options", metavar="MAPPING", help="What your function takes, or fields of hf's configuration."
)
@click.option("--layers", multiple=True, metavar="PATTERN", help="Layers so named alone; may be repeated.")
@click.option(
    "--draws", type=click.IntRange(2, 64), default=4, show_default=True, help="Draws of the randomness."
)
@click.option(
    "--seq-len", type=click.IntRange(min=32), help="Tokens a sequence. Default: as a run, or up to 512."
)
@click.option("--sequences", type=AT_LEAST_1, default=4, show_default=True, help="Sequences of the batch.")
@click.option(
    "--budget",
    callback=_share,
    metavar="SHARE",
    help="Propose what stays in BF16, with this share in FP4, such as 85%.",
)
@click.option("--write", "study", type=FILE, metavar="FILE", help="Write a study that confirms --budget.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@storage_option
@device_option
@json_option
@out_option
def command(
    model: str,
    storage: Path,
    layers: tuple[str, ...],
    draws: int,
    budget: float | None,
    study: Path | None,
    device: str | None,
    as_json: bool,
    out: Path | None,
    **asked: Any,
) -> None:
    """Rank the layers and GEMMs of MODEL by the harm that a recipe is predicted to do, without training.

    MODEL is a run (its id or folder) with a checkpoint or kept weights, a Hugging Face model (folder or hub
    name), a preset, or a function of yours (package.module:function, or path/to/file.py:function). Each GEMM
    of each layer is quantised alone, and the gradient of all weights is held against bf16's on the same text.
    Predicted harm: the share of the gradient's energy that errs the same way in every draw. It is a
    prediction from one batch, not a result of training.

    --budget asks which layers or single GEMMs to keep in BF16: those of most harm, so that the share of the
    linear layers' FLOPs stays in FP4. The table has vendors' rules beside them.
    """
    if budget is None and study is not None:
        raise UserError("--write: writes the study of a --budget (such as --budget 85%)")
    if budget is not None and layers:
        raise UserError("--layers: a --budget is of all layers (leave one of the two out)")
    from ablate.diagnose.inputs import find_subject, load_weights, tokens_of
    from ablate.recipes import describe
    from ablate.recipes.coverage import EVERYTHING, in_short

    if re.fullmatch(r"[0-9a-f]{4,16}", model) and not Path(model).exists():
        kept = find_run(storage, model, rather=lambda run: run.weights.is_dir() or run.checkpoints.is_dir())
        model = str(kept.path)
    subject = find_subject(model, **asked)
    where, found = chosen_device(device)
    window = tokens_of(subject)
    from ablate.diagnose.budget import check_budget, confirm_study, policies
    from ablate.diagnose.ranking import layer_gemms, predict_harm
    from ablate.layers.linear import quantised_layers
    from ablate.train.step import assemble

    try:
        # Matrices that no recipe reaches are named in the result; the others are still diagnosed.
        model_config = replace(subject.config.model, allow=[EVERYTHING])
        trainee = assemble(replace(subject.config, model=model_config), where)
        if subject.tensors:
            load_weights(trainee, subject.tensors)
        trainee.state.tokens = subject.trained_tokens
        every = quantised_layers(trainee.module)
        gemms = layer_gemms(trainee, _matching(list(every), layers), draws=draws)
        if not gemms:
            raise UserError(
                "nothing is quantised in these layers (choose another --recipe or other --layers)"
            )
        if budget is not None:
            check_budget(
                budget, subject.config.recipe, every, [(layer.name, gemm) for layer, gemm, _ in gemms]
            )
        passes = 1 + sum(count for *_, count in gemms)
        with click.progressbar(length=passes, label="forward and backward", hidden=as_json) as bar:
            ranked = predict_harm(trainee, window, gemms, done=bar.update)
    except ValueError as error:  # an operand that does not fit, rules that name no layer, another's weights
        raise UserError(f"{model}: {error} (another --recipe or --seq-len?)") from None
    content: dict[str, Any] = {
        "format": 1,
        "model": model,
        "weights": subject.weights,
        "recipe": describe(subject.config.recipe),
        "device": asdict(found),
        "tokens": int(window[:, 1:].size),
        "draws": draws,
        "gemms": [asdict(one) for one in ranked],
        "out_of_reach": list(coverage.out_of_reach) if (coverage := trainee.state.coverage) else [],
    }
    harm: dict[Cell, float] = {}
    if budget is not None:
        for one in ranked:
            if one.harm is None:
                hint = "keep it in high precision, by a rule of the recipe"
                raise UserError(f"--budget: {one.gemm} of {one.layer} has no finite gradient", hint=hint)
            harm[one.layer, one.gemm] = one.harm
        proposed = policies(budget, subject.config.recipe, every, harm)
        content["policies"] = [asdict(one) for one in proposed]
    deliver(content, _lines(content, ranked), as_json=as_json, out=out)
    if study is not None:
        text = confirm_study(study.stem, subject, proposed, in_short(content["out_of_reach"], "{}"))
        try:
            with study.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UserError(f"--write: cannot write {study}: {error.strerror}") from None


def _matching(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the layers that match a pattern; all without patterns."""
    matching = {pattern: fnmatch.filter(names, pattern) for pattern in patterns or "*"}
    for pattern, found in matching.items():
        if not found:
            raise UserError(f"--layers: '{pattern}' names no layer (layers: {names_text(names)})")
    return [name for name in names if any(name in found for found in matching.values())]


def _lines(content: dict[str, Any], ranked: list[Harm]) -> Iterator[str]:
    from ablate.recipes.coverage import in_short

    yield f"{content['model']}, {content['weights']}; {content['recipe']}; {content['tokens']:,} tokens\n"
    rows = ({"of": one, "gemm": one.gemm.capitalize(), "output": one.diagnosis["product"]} for one in ranked)
    yield table_of(_RANKED, rows)
    so_far = list(accumulate(max(one.harm, 0.0) for one in ranked if one.harm is not None))
    if so_far and (total := so_far[-1]):
        most = next(n for n, part in enumerate(so_far, 1) if part >= _SHARE * total)
        share = f"{so_far[most - 1] / total:.0%}"
        yield f"\nThe first {most} of {len(ranked)} GEMMs make {share} of the predicted harm."
    else:
        yield "\nNo GEMM does any harm that is the same in every draw."
    if found := content.get("policies"):
        yield "\nWhat may stay in BF16, with the least predicted harm, and what vendors keep there:\n"
        worst = found[0]["harm"] or 1.0
        yield table_of(_POLICIES, ({"of": one, "part": one["harm"] / worst} for one in found))
        for one in (policy for policy in found if "of most harm" in policy["name"]):
            kept = (f"{layer} ({', '.join(gemms)})" for layer, gemms in one["in_bf16"].items())
            yield f"{one['name']}: {', '.join(kept)}"
        yield "FP4: share of the linear layers' FLOPs. Harm: the sum of what each GEMM in FP4 does alone."
    if hidden := content["out_of_reach"]:
        yield f"Not diagnosed, as no recipe reaches them: {', '.join(in_short(hidden))}."
    yield (
        "Harm (predicted) and random: of the gradient's energy, with that GEMM alone quantised. Loss: its "
        "change in nats per token. Error, gain and the error's bias share: of the GEMM's output. A "
        "prediction from one batch: `ablate run` says what training makes of it."
    )
