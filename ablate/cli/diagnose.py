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
from ablate.base.errors import UserError, as_user_error
from ablate.cli.common import (
    FILE,
    count_option,
    deliver,
    device_option,
    find_run,
    json_option,
    names_text,
    out_option,
    seed_option,
    storage_option,
    table_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from ablate.diagnose.budget import Cell
    from ablate.diagnose.inputs import Subject
    from ablate.diagnose.ranking import Harm
    from ablate.train.step import Trainee

_EXAMPLES = """\b
Examples:
  ablate diagnose llama-tiny --recipe mxfp4
  ablate diagnose Qwen/Qwen3-0.6B --data my-corpus/ --recipe "{gemms: [fprop, dgrad, wgrad], stabiliser: sr}"
  ablate diagnose my_model.py:build --options "{width: 512}"
  ablate diagnose 3f0c9d21 --layers "*.ffn.*" --json
  ablate diagnose 3f0c9d21 --recipe mxfp4 --budget 85% --write which-layers.yaml
"""
_NAMED_SHARE = 0.8
"""The first GEMMs that make this share of the predicted harm are counted."""
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


def _share(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if match is None or not 0 < float(match[1]) <= 100:
        raise UserError(f"--budget: expected a share such as 85%, got '{text}'")
    return float(match[1]) / 100


@click.command("diagnose", epilog=_EXAMPLES)
@click.argument("model")
@click.option(
    "--data",
    metavar="PATH",
    help="Text. Default: a run's own text, else Python's library.",
)
@click.option(
    "--recipe",
    help="A recipe's name, or a mapping. Default: a run's own recipe, else mxfp4.",
)
@click.option(
    "--options",
    metavar="MAPPING",
    help="Arguments of your function, or fields of a Hugging Face configuration.",
)
@click.option(
    "--layers",
    multiple=True,
    metavar="PATTERN",
    help="Diagnose only layers that match (may be repeated).",
)
@click.option(
    "--draws",
    type=click.IntRange(2, 64),
    default=4,
    help="Number of draws of the recipe's randomness.",
)
@click.option(
    "--seq-len",
    type=click.IntRange(min=32),
    help="Tokens of a sequence. Default: as in the run, else up to 512.",
)
@count_option(
    "--sequences",
    default=4,
    help="Number of sequences in the batch.",
)
@click.option(
    "--budget",
    type=_share,
    metavar="SHARE",
    help="Propose what stays in BF16 when this share is in FP4, such as 85%.",
)
@click.option(
    "--write",
    "study",
    type=FILE,
    metavar="FILE",
    help="Write a study that confirms --budget.",
)
@seed_option
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
    **described: Any,
) -> None:
    """Rank the layers and GEMMs of MODEL by the harm that a recipe is predicted to do, without training.

    MODEL is a run (its id or folder) with a checkpoint or kept weights, a Hugging Face model (folder or hub
    name), a preset, or a function of yours (package.module:function, or path/to/file.py:function). Each GEMM
    of each layer is quantised alone, and the gradient of all weights is compared with bf16's on the same
    text. Predicted harm is the share of the gradient's energy that errs the same way in every draw. It is a
    prediction from one batch, not a result of training.

    --budget asks which layers or single GEMMs to keep in BF16: those of most harm, so that this share of the
    linear layers' FLOPs stays in FP4. The table shows vendors' rules beside them.
    """
    if budget is None and study is not None:
        raise UserError(
            "--write: writes the study of a --budget (such as --budget 85%)"
        )
    if budget is not None and layers:
        raise UserError(
            "--layers: a --budget is of all layers (leave one of the two out)"
        )
    from ablate.diagnose.budget import confirm_study, policies
    from ablate.diagnose.inputs import find_subject, tokens_of
    from ablate.layers.linear import quantised_layers
    from ablate.recipes import describe
    from ablate.recipes.coverage import in_short

    if re.fullmatch(r"[0-9a-f]{4,16}", model) and not Path(model).exists():
        run = find_run(
            storage,
            model,
            rather=lambda run: run.weights.is_dir() or run.checkpoints.is_dir(),
        )
        model = str(run.path)
    subject = find_subject(model, **described)
    torch_device, about_device = chosen_device(device)
    window = tokens_of(subject)
    try:
        trainee = _trainee_of(subject, torch_device)
        ranked = _rank(
            trainee,
            subject,
            window,
            patterns=layers,
            draws=draws,
            budget=budget,
            hide_bar=as_json,
        )
    except ValueError as error:  # an operand that does not fit, rules that name no layer, another's weights
        raise UserError(f"{model}: {error} (another --recipe or --seq-len?)") from None
    coverage = trainee.state.coverage
    out_of_reach = [] if coverage is None else list(coverage.out_of_reach)
    content: dict[str, Any] = {
        "format": 1,
        "model": model,
        "weights": subject.weights,
        "recipe": describe(subject.config.recipe),
        "device": asdict(about_device),
        "tokens": int(window[:, 1:].size),
        "draws": draws,
        "gemms": [asdict(harm) for harm in ranked],
        "out_of_reach": out_of_reach,
    }
    if budget is not None:
        proposed = policies(
            budget,
            subject.config.recipe,
            quantised_layers(trainee.module),
            _harm_by_gemm(ranked),
        )
        content["policies"] = [asdict(policy) for policy in proposed]
    deliver(content, _lines(content, ranked), as_json=as_json, out=out)
    if study is not None:
        text = confirm_study(
            study.stem, subject, proposed, in_short(out_of_reach, "{}")
        )
        with (
            as_user_error(f"--write: cannot write {study}"),
            study.open("x", encoding="utf-8") as file,
        ):
            file.write(text)


def _trainee_of(subject: Subject, torch_device: str) -> Trainee:
    """Build the model with its weights; the result names matrices that no recipe reaches."""
    from ablate.diagnose.inputs import load_weights
    from ablate.recipes.coverage import EVERYTHING
    from ablate.train.step import assemble

    model = replace(subject.config.model, allow=[EVERYTHING])
    trainee = assemble(replace(subject.config, model=model), torch_device)
    if subject.tensors:
        load_weights(trainee, subject.tensors)
    trainee.state.tokens = subject.trained_tokens
    return trainee


def _rank(
    trainee: Trainee,
    subject: Subject,
    window: np.ndarray[Any, Any],
    *,
    patterns: tuple[str, ...],
    draws: int,
    budget: float | None,
    hide_bar: bool,
) -> list[Harm]:
    """Measure the harm of each GEMM of the layers that match; the largest comes first."""
    from ablate.diagnose.budget import check_budget
    from ablate.diagnose.ranking import layer_gemms, predict_harm
    from ablate.layers.linear import quantised_layers

    layers = quantised_layers(trainee.module)
    gemms = layer_gemms(trainee, _matching(list(layers), patterns), draws=draws)
    if not gemms:
        raise UserError(
            "nothing is quantised in these layers (choose another --recipe or other --layers)"
        )
    if budget is not None:
        cells = [(layer.name, gemm) for layer, gemm, _ in gemms]
        check_budget(budget, subject.config.recipe, layers, cells)
    num_passes = 1 + sum(passes for _, _, passes in gemms)
    with click.progressbar(
        length=num_passes, label="forward and backward", hidden=hide_bar
    ) as bar:
        return predict_harm(trainee, window, gemms, done=bar.update)


def _matching(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the layers that match a pattern; all without patterns."""
    matching: set[str] = set()
    for pattern in patterns or ("*",):
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise UserError(
                f"--layers: '{pattern}' names no layer (layers: {names_text(names)})"
            )
        matching.update(matches)
    return [name for name in names if name in matching]


def _harm_by_gemm(ranked: list[Harm]) -> dict[Cell, float]:
    by_gemm: dict[Cell, float] = {}
    for harm in ranked:
        if harm.harm is None:
            hint = "keep it in high precision, by a rule of the recipe"
            raise UserError(
                f"--budget: {harm.gemm} of {harm.layer} has no finite gradient",
                hint=hint,
            )
        by_gemm[harm.layer, harm.gemm] = harm.harm
    return by_gemm


def _lines(content: dict[str, Any], ranked: list[Harm]) -> Iterator[str]:
    from ablate.recipes.coverage import in_short

    yield f"{content['model']}, {content['weights']}; {content['recipe']}; {content['tokens']:,} tokens\n"
    rows = [
        {
            "of": harm,
            "gemm": harm.gemm.capitalize(),
            "output": harm.diagnosis["product"],
        }
        for harm in ranked
    ]
    yield table_of(_RANKED, rows)
    sums = list(
        accumulate(max(harm.harm, 0.0) for harm in ranked if harm.harm is not None)
    )
    if sums and sums[-1]:
        count = next(
            count
            for count, harm in enumerate(sums, 1)
            if harm >= _NAMED_SHARE * sums[-1]
        )
        share = f"{sums[count - 1] / sums[-1]:.0%}"
        yield f"\nThe first {count} of {len(ranked)} GEMMs make {share} of the predicted harm."
    else:
        yield "\nNo GEMM does any harm that is the same in every draw."
    if content.get("policies"):
        yield from _policy_lines(content["policies"])
    if content["out_of_reach"]:
        hidden = ", ".join(in_short(content["out_of_reach"]))
        yield f"Not diagnosed, as no recipe reaches them: {hidden}."
    yield (
        "Harm (predicted) and random: of the gradient's energy, with that GEMM alone quantised. Loss: its "
        "change in nats per token. Error, gain and the error's bias share: of the GEMM's output. A "
        "prediction from one batch: `ablate run` says what training makes of it."
    )


def _policy_lines(policies: list[dict[str, Any]]) -> Iterator[str]:
    yield "\nWhat may stay in BF16, with the least predicted harm, and what vendors keep there:\n"
    largest = policies[0]["harm"] or 1.0
    yield table_of(
        _POLICIES,
        [{"of": policy, "part": policy["harm"] / largest} for policy in policies],
    )
    for policy in policies:
        if policy["is_proposal"]:
            layers = [
                f"{layer} ({', '.join(gemms)})"
                for layer, gemms in policy["in_bf16"].items()
            ]
            yield f"{policy['name']}: {', '.join(layers)}"
    yield "FP4: share of the linear layers' FLOPs. Harm: the sum of what each GEMM in FP4 does alone."
