"""Checks between the values of one arm, as pure functions of its sections.

Each yields ``Misfit``s, which name the fields at fault; who knows the file gives them their places. Single
values are checked earlier, where they stand; the rules here rely on every value being in range.

A rule must match a layer, and a phase must begin within the budget: otherwise an arm would run under a name
that is wrong.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ablate.recipes import features_fault
from ablate.recipes.place import names_layer, phases_of
from ablate.run.architecture import layer_places, linear_layers
from ablate.run.schedule import plan_steps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ablate.recipes import Recipe
    from ablate.recipes.place import LayerPlace
    from ablate.run.config import ModelConfig, ResourcesConfig, TrainingConfig


class Misfit(NamedTuple):
    """What does not fit, in words, and the fields that set it, as dotted paths; the first is likeliest."""

    what: str
    hint: str | None
    fields: tuple[str, ...]


def model_misfits(model: ModelConfig, given: Collection[str]) -> Iterator[Misfit]:
    """Check a model; ``given``: the fields that are written."""
    if model.hf is not None and model.function is not None:
        yield Misfit("a second model: hf beside function", "give one of them", ("model.function",))
    elif not model.is_built_in:
        own = "hf" if model.hf is not None else "function"
        kept = {own, "options", "allow", *(["pretrained"] if own == "hf" else [])}
        for key in [key for key in given if key not in kept and getattr(model, key, None) is not None][:1]:
            hint = "options: {…} changes its configuration or its arguments"
            yield Misfit(f"{key} belongs to the built-in model, not to {own}", hint, (f"model.{key}",))
    else:
        yield from _built_in_misfits(model)


def _built_in_misfits(model: ModelConfig) -> Iterator[Misfit]:
    for key in ("pretrained", "options", "allow"):
        if getattr(model, key):
            yield Misfit(
                f"{key} needs hf{'' if key == 'pretrained' else ' or function'}", None, (f"model.{key}",)
            )
    width, heads, is_llama = model.width, model.heads, model.architecture == "llama"
    for key in ("kv_heads", "experts"):
        if not is_llama and getattr(model, key) is not None:
            yield Misfit(f"architecture gpt takes no {key}", None, (f"model.{key}", "model.architecture"))
    if model.experts is not None and model.experts_per_token > model.experts:
        what = f"experts_per_token {model.experts_per_token} exceeds experts {model.experts}"
        yield Misfit(what, None, ("model.experts_per_token", "model.experts"))
    if width % heads:
        hint = f"the nearest width is {_nearest(width, heads * (2 if is_llama else 1))}"
        yield Misfit(
            f"width {width} is not a multiple of heads {heads}", hint, ("model.heads", "model.width")
        )
    elif is_llama and width // heads % 2:
        what = f"head dimension {width // heads} (width / heads) is odd"
        yield Misfit(what, "rotary positions need it even", ("model.heads", "model.width"))
    if model.kv_heads is not None and heads % model.kv_heads:
        what = f"heads {heads} is not a multiple of kv_heads {model.kv_heads}"
        yield Misfit(what, None, ("model.kv_heads", "model.heads"))


def training_misfits(training: TrainingConfig) -> Iterator[Misfit]:
    """Check batch, schedule and evaluation against the budget."""
    budget, every, decay = training.tokens, training.eval_every_tokens, training.decay_tokens
    schedule, micro_batch = training.schedule, training.micro_batch_size
    rules: tuple[tuple[object, str, str | None, tuple[str, ...]], ...] = (
        (
            micro_batch and training.batch_size % micro_batch,
            f"batch_size {training.batch_size} is not a multiple of micro_batch_size {micro_batch}",
            None,
            ("micro_batch_size", "batch_size"),
        ),
        (
            schedule == "wsd" and not decay,
            "schedule wsd needs decay_tokens",
            "the tokens of its decay",
            ("decay_tokens", "schedule"),
        ),
        (
            schedule != "wsd" and decay,
            f"decay_tokens {decay} with schedule {schedule}",
            "only wsd decays at the end; set decay_tokens: 0",
            ("decay_tokens", "schedule"),
        ),
        (
            training.warmup_tokens + decay > budget,
            f"warmup_tokens {training.warmup_tokens} + decay_tokens {decay} exceeds the budget of {budget}",
            None,
            ("warmup_tokens", "decay_tokens", "tokens"),
        ),
        (
            every > budget,
            f"eval_every_tokens {every} exceeds the budget of {budget} tokens",
            f"training.eval_every_tokens: {budget} at most",
            ("eval_every_tokens", "tokens"),
        ),
        (
            training.eval_tokens < training.seq_len,
            f"eval_tokens {training.eval_tokens} holds no sequence of seq_len {training.seq_len}",
            None,
            ("eval_tokens", "seq_len"),
        ),
    )
    for is_wrong, what, hint, keys in rules:
        if is_wrong:
            yield Misfit(what, hint, tuple(f"training.{key}" for key in keys))


def budget_misfits(training: TrainingConfig, recipe: Recipe | None) -> Iterator[Misfit]:
    """Check batch, schedule, evaluation and what a recipe does later against the budget."""
    yield from training_misfits(training)
    if recipe is not None:
        yield from phase_misfits(recipe, training.tokens)
        yield from deoscillation_misfits(recipe, training)


def device_misfits(training: TrainingConfig, resources: ResourcesConfig) -> Iterator[Misfit]:
    """Check that a run's devices share its batch evenly."""
    devices, per_pass = resources.devices_per_run, training.micro_batch_size or 1
    if training.batch_size % per_pass == 0 and training.batch_size % (devices * per_pass):
        what = f"batch_size {training.batch_size} is not a multiple of devices_per_run {devices}"
        what += f" × micro_batch_size {per_pass}" if training.micro_batch_size else ""
        fields = ("resources.devices_per_run", "training.micro_batch_size", "training.batch_size")
        yield Misfit(what, None, fields)


def _nearest(size: int, divisor: int) -> str:
    below = size // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


@cache
def shape_misfits(model: ModelConfig, recipe: Recipe) -> tuple[Misfit, ...]:
    """Check a built-in model's dimensions and layers against a recipe.

    Projections that share a layer are held against it one by one. Tokens are filled up with zeros. The
    vocabulary, over which a head's Dgrad contracts, is not known here.
    """
    layers = linear_layers(model, vocab_size=0)
    where = layer_places(layers)
    head_dim = model.width // model.heads
    fused = {"qkv": (model.width, (model.kv_heads or model.heads) * head_dim), "gate_up": (model.ffn,)}
    fields = {model.ffn: ("model.ffn",), model.width: ("model.width",)}
    found: dict[tuple[str, ...], Misfit] = {}
    for layer in layers:
        for outputs in fused.get(layer.name.rpartition(".")[2], (layer.outputs,)):
            for phase in phases_of(recipe, where[layer.name]):
                for sizes in ((layer.inputs, 0), (0, outputs)):
                    fault = features_fault(phase.recipe, layer.name, inputs=sizes[0], outputs=sizes[1])
                    if fault is None:
                        continue
                    what, size, divisor = fault
                    at = fields.get(size, ("model.kv_heads", "model.heads", "model.width"))
                    found.setdefault(at, Misfit(what, f"{_nearest(size, divisor)} would fit", at))
    return (*found.values(), *rule_misfits(where, recipe))


def rule_misfits(where: Mapping[str, LayerPlace], recipe: Recipe) -> list[Misfit]:
    """Return the rules that decide nothing in a model, and rules that leave the recipe itself no layer."""
    if not recipe.rules:
        return []
    naming = {
        name: [index for index, rule in enumerate(recipe.rules) if names_layer(rule, place)]
        for name, place in where.items()
    }
    names = list(where)
    found = []
    for index, rule in enumerate(recipe.rules):
        if not any(index in rules for rules in naming.values()):
            what = f"no layer of this model is called '{rule.match}'"
            if rule.match is None:
                what = f"the model has no {'head' if rule.head else 'blocks of layers'}"
            found.append(
                _misfit(what, f"its layers are {names[0]} … {names[-2]} and {names[-1]}", f"layers.{index}")
            )
        elif not any(rules[:1] == [index] for rules in naming.values()):
            what = "an entry that decides nothing: an earlier one names every layer that it names"
            found.append(_misfit(what, "put it first", f"layers.{index}"))
    if (
        all(naming[name] for name, place in where.items() if not place.is_head)
        and not recipe.is_high_precision
    ):
        blocks = next(iter(where.values())).num_blocks
        what = f"rules name all {blocks} blocks of this model, so that the recipe's own GEMMs never run"
        hint = "set recipe.layers for a model of this depth, e.g. layers: [{last: 1, recipe: bf16}]"
        found.append(_misfit(what, hint, "layers"))
    return found


def phase_misfits(recipe: Recipe, tokens: int) -> list[Misfit]:
    """Return the phases that begin after a budget of ``tokens``, or not after the phase before."""
    found, before = [], 0
    for index, phase in enumerate(recipe.phases):
        start = phase.start(tokens)
        if start >= tokens:
            what = f"a phase from token {start} on, but the budget is {tokens} tokens"
            found.append(_misfit(what, "it would never begin", f"phases.{index}"))
        elif start <= before:
            what = f"a phase from token {start} on, not after the one before it ({before})"
            found.append(_misfit(what, "phases stand in the order of their starts", f"phases.{index}"))
        before = max(before, start)
    return found


def deoscillation_misfits(recipe: Recipe, training: TrainingConfig) -> Iterator[Misfit]:
    """Check that a window of de-oscillation ends within the budget."""
    if (spec := recipe.deoscillate) is None:
        return
    plan = plan_steps(training)
    # The first window begins with the weights of the first step at or after its start.
    first = max(1, -(-spec.start(plan.tokens) // plan.tokens_per_step))
    if first + spec.window > plan.steps:
        what = f"a window of {spec.window} steps from step {first} on, but the run has {plan.steps} steps"
        yield _misfit(what, "no window would ever end", "deoscillate")


def _misfit(what: str, hint: str, key: str) -> Misfit:
    return Misfit(what, hint, (f"recipe.{key}", "recipe.preset", "recipe"))
