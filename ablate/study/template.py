"""Studies as text: the first one, commented, that ``ablate init`` writes from a few answers, and others' own.

Pure: the answers are words of the command line, the result is the text of a study file.
``ablate.workflow.init`` decides how many tokens fit a budget, and what fits the corpus.

How it fails: an unknown answer is a ``UserError`` with the likely one.
"""

from __future__ import annotations

import io
import json
import re
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ablate.base.config_base import written_short
from ablate.base.errors import UserError, likely, one_of
from ablate.run.architecture import PRESETS

if TYPE_CHECKING:
    from collections.abc import Mapping

BUILT_IN = "built-in"

_SMALL = {"width": 128, "layers": 2, "heads": 4, "ffn": 384}
"""A Llama that a CPU trains; every published recipe's blocks divide its widths."""
_ON_GPU = {"width": 256, "layers": 8, "heads": 4, "ffn": 768}
"""One of 7 M parameters, of which eight at a time kept an H200 busy."""

_STUDY = """\
# Written by `ablate init`. `ablate plan {file}` shows what this would run, and starts nothing.
# docs/spec.md explains every key.
name: {name}  # the name of the folder of its results
description: "What FP4 costs: {what}."  # free text
baseline: bf16  # the arm that every other arm is compared with

# The validation loss that the arms are to reach: `ablate pilot {file}` says which to take.
# null: none yet, and the report compares final losses.
target: null

# Runs of each arm, with seeds 0, 1, …: the pilot says how many find a cost of which size.
seeds: {seeds}

base:  # what all arms share
{about_model}
  model: {model}
{about_data}
  data: {data}
  training:
{about_tokens}
    tokens: {tokens}  # training tokens of each run
    seq_len: {seq_len}  # tokens of a sequence
    batch_size: {batch_size}  # sequences of an optimizer step
    learning_rate: {learning_rate}  # AdamW's highest rate; `tune:` finds each arm's own (docs/tuning.md)
    schedule: {schedule}  # after the warm-up, so that a crossing of the target does not depend on the budget
    warmup_tokens: {warmup_tokens}  # tokens over which the rate rises from zero
    eval_every_tokens: {eval_every_tokens}  # tokens between two evaluations; 20 of them draw a curve
    eval_tokens: {eval_tokens}  # validation tokens of an evaluation, the same for all runs
{resources}
arms:
  bf16: {{recipe: bf16}}  # all GEMMs in BF16
{arms}"""
_LADDER = """\
  fp8: {recipe: fp8}  # all three GEMMs in FP8
  fprop: {recipe: {gemms: [fprop]}}  # MXFP4 in the forward GEMM alone
  fprop+dgrad: {recipe: {gemms: [fprop, dgrad]}}  # and in the gradient of the activations
  all three: {recipe: {gemms: [fprop, dgrad, wgrad]}}  # and in the gradient of the weights
  all three + sr: {from: all three, recipe: {stabiliser: sr}}  # stochastic rounding
  all three + rht: {from: all three, recipe: {stabiliser: rht}}  # a random Hadamard rotation
  all three + dht: {from: all three, recipe: {stabiliser: dht}}  # a deterministic Hadamard rotation
"""
_PUBLISHED = """\
  FP8 hybrid: {recipe: te-hybrid-fp8}  # FP8 as Transformer Engine does it
  AMD DHT16: {recipe: amd-fdw-dht16}  # MXFP4, arXiv 2605.09825
  Tseng: {recipe: tseng}  # MXFP4 in the backward pass, arXiv 2502.20586
  Quartet: {recipe: quartet}  # MXFP4, arXiv 2505.14669
  TetraJet: {recipe: tetrajet}  # MXFP4, arXiv 2502.20853
  Primus-Turbo: {recipe: primus-turbo}  # MXFP4, AMD's library
  NVIDIA NVFP4: {recipe: {preset: nvidia-nvfp4, layers: [{last: 1, recipe: bf16}]}}  # arXiv 2509.25149
  Four over Six: {recipe: {preset: fouroversix, layers: [{last: 1, recipe: bf16}]}}  # arXiv 2512.02010
"""
_GRID = """
grid:  # and every combination of these, in MXFP4
  factors:
    recipe.gemms: {F: [fprop], F+D: [fprop, dgrad], F+D+W: [fprop, dgrad, wgrad]}
    recipe.stabiliser: [none, sr, rht, dht]
"""
ARMS = {
    "ladder": "MXFP4 in one, two and all three GEMMs, then three stabilisers",
    "published": "published FP4 recipes side by side",
    "grid": "every combination of three sets of GEMMs and four stabilisers",
}


@dataclass(kw_only=True)
class Starter:
    """What a first study is made of; ``ablate init`` fills it in.

    ``model``, ``data``, ``training``: sections of the file. ``arms``: a word of ``ARMS``, None for the
    baseline alone. ``left_out``: names of its arms that the model cannot take, with the reasons.
    ``on_gpu``: whether this machine has one. ``about_…``: what comments say of the model, the data and the
    number of tokens.
    """

    name: str
    file: str
    data: Mapping[str, Any]
    arms: str | None
    seeds: int
    about_data: str
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    about_model: str = ""
    about_tokens: str = ""
    on_gpu: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)


def model_section(word: str, *, on_gpu: bool = False) -> dict[str, Any]:
    """Return the section ``model`` for a word: ``built-in``, a preset, ``hf:NAME`` or ``function:PLACE``.

    ``on_gpu``: the built-in model is one that keeps a GPU busy.

    Raises:
        UserError: the word is none of these.
    """
    kind, colon, place = word.partition(":")
    if colon and place and kind in ("hf", "function"):
        return {kind: place}
    if word == BUILT_IN:
        return dict(_ON_GPU if on_gpu else _SMALL)
    if word in PRESETS:
        return {"preset": word}
    if kind == "function" or word.endswith(".py"):
        hint = "expected function:path/to/file.py:NAME"
        raise UserError(f"'{word}' names no function", hint=hint)
    forms = f"expected {BUILT_IN}, hf:FOLDER, function:FILE.py:NAME, or a preset: {', '.join(PRESETS)}"
    hint = likely(word, (*PRESETS, BUILT_IN), forms)
    raise UserError(f"no model '{word}'", hint=hint)


def arms_of(word: str | None) -> dict[str, str]:
    """Map the arms' names to their lines, without the baseline; empty for a grid, or without a word.

    Raises:
        UserError: the word is none of ``ARMS``.
    """
    if word not in (None, *ARMS):
        hint = likely(word, ARMS, f"expected {one_of(list(ARMS))}")
        raise UserError(f"no arms '{word}'", hint=hint)
    text = {"ladder": _LADDER, "published": _PUBLISHED}.get(word or "", "")
    return {line.partition(":")[0].strip(): line for line in text.splitlines()}


def starter_text(starter: Starter) -> str:
    """Return the text of the study file, with a comment for each line that asks for a decision."""
    text = ""
    for name, line in arms_of(starter.arms).items():
        if name in starter.left_out:
            reason = starter.left_out[name]
            text += _comment(f"{name} is left out: {reason}", "  ")
        else:
            text += line
        text += "\n"
    if starter.arms == "grid":
        text += _GRID
    resources = ""
    if starter.on_gpu:
        resources = (
            "  resources: {gpus: auto}  # the share of a GPU that each run takes\n"
        )
    return _STUDY.format(
        file=starter.file,
        name=_flow(starter.name),
        what=ARMS.get(starter.arms or "", ""),
        seeds=starter.seeds,
        model=_flow(starter.model),
        data=_flow(starter.data),
        about_model=_comment(starter.about_model, "  "),
        about_data=_comment(starter.about_data, "  "),
        about_tokens=_comment(starter.about_tokens, "    "),
        resources=resources,
        arms=text,
        **{key: _flow(value) for key, value in starter.training.items()},
    )


def study_text(
    comment: str,
    head: Mapping[str, Any],
    base: Mapping[str, Any],
    arms: Mapping[str, Any],
) -> str:
    """Return the text of a study: a comment, the keys before ``base``, its sections, and the arms."""
    sections = {}
    for name, section in base.items():
        written = written_short(section)
        if written not in (None, "auto", {}):
            sections[name] = written
    content = {**head, "base": sections, "arms": arms}
    return f"# {comment}\n{yaml_text(content, width=100)}"


def yaml_text(value: Any, *, width: int) -> str:
    """Return plain data as YAML; mappings without mappings in them take one line."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    text = io.StringIO()
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = width
    yaml.dump(value, text)
    return text.getvalue()


def _comment(text: str, indent: str) -> str:
    lines = textwrap.wrap(text, 98 - len(indent))
    return textwrap.indent("\n".join(lines), f"{indent}# ")


def _flow(value: Any) -> str:
    """Return a value in YAML's flow style, on one line: JSON with words unquoted and digits in groups."""
    if type(value) is int:
        return f"{value:_}"
    text = json.dumps(value, ensure_ascii=False)
    word = r'(?<!\\)"(?!(?:null|true|false|yes|no|on|off)")([a-zA-Z][\w-]*)"'
    return re.sub(word, r"\1", text, flags=re.IGNORECASE)
