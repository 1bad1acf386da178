"""A first study as commented text: what ``ablate init`` writes, from a few answers.

Pure: the answers are words of the command line, the result is the text of a study file. How many tokens fit
a budget, and what fits the corpus, is for others to say (``ablate.workflow.init``).

How it fails: an unknown answer is a ``UserError`` with the likely one.
"""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError, likely, one_of
from ablate.run.presets import PRESETS

if TYPE_CHECKING:
    from collections.abc import Mapping

_WORD = re.compile(r"[A-Za-z](?:[\w +-]*\w)?", re.ASCII)
_NOT_TEXT = ("null", "true", "false", "yes", "no", "on", "off")
BUILT_IN = "built-in"
BASELINE = "bf16"
SEEDS = 3

_SMALL = {"width": 128, "layers": 2, "heads": 4, "ffn": 384}
"""A Llama that a CPU trains; every published recipe's blocks divide its widths."""

_ALL = ["fprop", "dgrad", "wgrad"]


def _stabilised(stabiliser: str) -> dict[str, Any]:
    return {"from": "all three", "recipe": {"stabiliser": stabiliser}}


_LADDER: dict[str, tuple[Any, str]] = {
    "fp8": ({"recipe": "fp8"}, "all three GEMMs in FP8"),
    "fprop": ({"recipe": {"gemms": ["fprop"]}}, "MXFP4 in the forward GEMM alone"),
    "fprop+dgrad": ({"recipe": {"gemms": ["fprop", "dgrad"]}}, "and in the gradient of the activations"),
    "all three": ({"recipe": {"gemms": _ALL}}, "and in the gradient of the weights"),
    "all three + sr": (_stabilised("sr"), "stochastic rounding"),
    "all three + rht": (_stabilised("rht"), "a random Hadamard rotation"),
    "all three + dht": (_stabilised("dht"), "a deterministic Hadamard rotation"),
}
_LAST = [{"last": 1, "recipe": "bf16"}]
_PUBLISHED: dict[str, tuple[Any, str]] = {
    "FP8 hybrid": ({"recipe": "te-hybrid-fp8"}, "FP8 as Transformer Engine does it"),
    "AMD DHT16": ({"recipe": "amd-fdw-dht16"}, "MXFP4, arXiv 2605.09825"),
    "Tseng": ({"recipe": "tseng"}, "MXFP4 in the backward pass, arXiv 2502.20586"),
    "Quartet": ({"recipe": "quartet"}, "MXFP4, arXiv 2505.14669"),
    "TetraJet": ({"recipe": "tetrajet"}, "MXFP4, arXiv 2502.20853"),
    "Primus-Turbo": ({"recipe": "primus-turbo"}, "MXFP4, AMD's library"),
    "NVIDIA NVFP4": (
        {"recipe": {"preset": "nvidia-nvfp4", "layers": _LAST}},
        "arXiv 2509.25149",
    ),
    "Four over Six": (
        {"recipe": {"preset": "fouroversix", "layers": _LAST}},
        "arXiv 2512.02010",
    ),
}
_GRID: dict[str, Any] = {
    "recipe.gemms": {"F": ["fprop"], "F+D": ["fprop", "dgrad"], "F+D+W": _ALL},
    "recipe.stabiliser": ["none", "sr", "rht", "dht"],
}
_NAMED = {"ladder": _LADDER, "published": _PUBLISHED}
ARMS = {
    "ladder": "MXFP4 in one, two and all three GEMMs, then three stabilisers",
    "published": "published FP4 recipes side by side",
    "grid": "every combination of three sets of GEMMs and four stabilisers",
}


@dataclass(frozen=True, kw_only=True)
class Starter:
    """What a first study is made of. ``model`` and ``data``: the sections of the file.

    ``arms``: a word of ``ARMS``, None for the baseline alone. ``left_out``: names of its arms that the model
    cannot take, with the reasons. ``gpus``: of each run. ``about``: what comments say of the model, the data
    and numbers of ``training``.
    """

    name: str
    file: str
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    arms: str | None
    training: Mapping[str, Any]
    about: Mapping[str, str]
    gpus: int = 0
    left_out: Mapping[str, str] | None = None


def model_section(word: str) -> dict[str, Any]:
    """Return the section ``model`` for a word: ``built-in``, a preset, ``hf:NAME`` or ``function:PLACE``.

    Raises:
        UserError: the word is none of these.
    """
    kind, colon, place = word.partition(":")
    if colon and place and kind in ("hf", "function"):
        return {kind: place}
    if word == BUILT_IN:
        return dict(_SMALL)
    if word in PRESETS:
        return {"preset": word}
    forms = f"expected {BUILT_IN}, hf:FOLDER, function:FILE.py:NAME, or a preset: {', '.join(PRESETS)}"
    if kind == "function" or word.endswith(".py"):
        raise UserError(f"'{word}' names no function", hint="expected function:path/to/file.py:NAME")
    raise UserError(f"no model '{word}'", hint=likely(word, (*PRESETS, BUILT_IN), forms))


def known_arms(word: str) -> str:
    """Return the word; raises ``UserError`` with the likely one where it is none of ``ARMS``."""
    if word not in ARMS:
        raise UserError(f"no arms '{word}'", hint=likely(word, ARMS, f"expected {one_of(list(ARMS))}"))
    return word


def named_arms(word: str | None) -> tuple[str, ...]:
    """Return the names of the arms but the baseline; none for a grid."""
    return tuple(_NAMED.get(word or "", {}))


def starter_text(starter: Starter) -> str:
    """Return the text of the study file, with a comment for each line that asks for a decision."""
    file, about = starter.file, starter.about
    what = ARMS.get(starter.arms or "", "")
    lines = [
        f"# Written by `ablate init`. `ablate plan {file}` shows what this would run, and starts nothing.",
        "# docs/spec.md explains every key.",
        f"name: {_flow(starter.name)}  # the name of the folder of its results",
        f"description: {_flow(f'What FP4 costs: {what}.')}  # free text",
        f"baseline: {BASELINE}  # the arm that every other arm is compared with",
        "",
        f"# The validation loss that the arms are to reach: `ablate pilot {file}` says which to take.",
        "# null: none yet, and the report compares final losses.",
        "target: null",
        "",
        "# Runs of each arm, with seeds 0, 1, …: the pilot says how many find a cost of which size.",
        f"seeds: {SEEDS}",
        "",
        "base:  # what all arms share",
        *_comment(about["model"], "  "),
        f"  model: {_flow(starter.model)}",
        *_comment(about["data"], "  "),
        f"  data: {_flow(starter.data)}",
        "  training:",
        *(f"    {line}" for line in _training(starter)),
    ]
    if starter.gpus:
        lines.append(f"  resources: {{gpus: {starter.gpus}}}  # GPUs of each run")
    lines += ["", "arms:", f"  {BASELINE}: {{recipe: bf16}}  # all GEMMs in BF16"]
    return "\n".join([*lines, *_arms(starter), ""])


def _training(starter: Starter) -> list[str]:
    training, about = starter.training, starter.about
    said = {
        "tokens": "training tokens of each run",
        "seq_len": "tokens of a sequence",
        "batch_size": "sequences of an optimizer step",
        "learning_rate": "AdamW's highest rate; `tune:` finds each arm's own (docs/tuning.md)",
        "schedule": "after the warm-up, so that a crossing of the target does not depend on the budget",
        "warmup_tokens": "tokens over which the rate rises from zero",
        "eval_every_tokens": "tokens between two evaluations; 20 of them draw a curve",
        "eval_tokens": about["eval_tokens"],
    }
    return [
        *_comment(about["tokens"]),
        *(f"{key}: {_flow(training[key])}  # {text}" for key, text in said.items()),
    ]


def _arms(starter: Starter) -> list[str]:
    left_out = starter.left_out or {}
    if starter.arms == "grid":
        factors = [f"    {path}: {_flow(values)}" for path, values in _GRID.items()]
        return ["", "grid:  # and every combination of these, in MXFP4", "  factors:", *factors]
    arms = _NAMED.get(starter.arms or "", {})
    lines = []
    for name, (arm, what) in arms.items():
        if name in left_out:
            lines += _comment(f"{name} is left out: {left_out[name]}", "  ")
        else:
            lines += [f"  {_flow(name)}: {_flow(arm)}  # {what}"]
    return lines


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _flow(value: Any) -> str:
    """Return a value in YAML's flow style, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        is_word = _WORD.fullmatch(value) and value.lower() not in _NOT_TEXT
        return value if is_word else json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
