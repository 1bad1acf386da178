"""Checks between the values of one arm, as pure functions of its sections.

Each yields ``Misfit``s, which name the fields at fault; ``Arms.add_fault`` finds their places in the file.
Single values are checked earlier; the rules here rely on every value being in range.

A rule must match a layer, and a phase must begin within the budget: otherwise an arm would run under a name
that is wrong.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ablate.recipes import features_fault
from ablate.recipes.place import phases_of, rule_faults
from ablate.recipes.stacks import flags_for
from ablate.run.architecture import layer_places, linear_layers
from ablate.run.command import REACHES, READS_RECIPE, Command
from ablate.run.config import AUTO
from ablate.run.schedule import plan_steps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ablate.recipes import Recipe
    from ablate.run.architecture import LinearLayer
    from ablate.run.config import ModelConfig, ResourcesConfig, TrainingConfig
    from ablate.study.parts import Built


MAX_LAYERS = 100_000
"""Linear layers of a built-in model: more would take minutes, and none has been trained."""


class Misfit(NamedTuple):
    """What does not fit, and the fields that set it, as dotted paths, the likeliest first."""

    message: str
    hint: str | None
    fields: tuple[str, ...]


def _broken(section: str, *rules: tuple[Any, str, str | None, str]) -> Iterator[Misfit]:
    """Yield the broken rules. A rule: whether it is broken, what is wrong, hint, keys split by spaces."""
    for is_broken, message, hint, keys in rules:
        if is_broken:
            yield Misfit(
                message, hint, tuple(f"{section}.{key}" for key in keys.split())
            )


def can_be_listed(model: ModelConfig) -> bool:
    """Whether a built-in model's linear layers are few enough to be checked one by one."""
    return model.layers * (2 + 2 * (model.experts or 1)) <= MAX_LAYERS


def model_misfits(model: ModelConfig, written: Collection[str]) -> Iterator[Misfit]:
    """Check a model; ``written``: the fields that the file writes."""
    if model.hf is not None and model.function is not None:
        yield Misfit(
            "a second model: hf beside function",
            "give one of them",
            ("model.function",),
        )
    elif model.hf is not None:
        yield from _unused_fields(
            model, written, "hf", ("hf", "options", "allow", "reach", "pretrained")
        )
    elif model.function is not None:
        yield from _unused_fields(
            model, written, "function", ("function", "options", "allow", "reach")
        )
    else:
        yield from _built_in_misfits(model)


def _unused_fields(
    model: ModelConfig, written: Collection[str], kind: str, used: tuple[str, ...]
) -> Iterator[Misfit]:
    """Yield the first field that the file writes and that means nothing for this kind of model."""
    for key in written:
        if key not in used and getattr(model, key, None) is not None:
            hint = "options: {…} changes its configuration or its arguments"
            yield Misfit(
                f"{key} belongs to the built-in model, not to {kind}",
                hint,
                (f"model.{key}",),
            )
            return


def _built_in_misfits(model: ModelConfig) -> Iterator[Misfit]:
    width = model.width
    heads = model.heads
    kv_heads = model.kv_heads
    experts = model.experts
    is_gpt = model.architecture == "gpt"
    is_odd = not is_gpt and width % heads == 0 and width // heads % 2
    nearest = _nearest(width, heads if is_gpt else 2 * heads)
    yield from _broken(
        "model",
        (
            not can_be_listed(model),
            f"more than {MAX_LAYERS} linear layers",
            None,
            "layers experts",
        ),
        (model.pretrained, "pretrained needs hf", None, "pretrained"),
        (model.options, "options needs hf or function", None, "options"),
        (model.allow, "allow needs hf or function", None, "allow"),
        (model.reach, "reach needs hf or function", None, "reach"),
        (
            is_gpt and kv_heads,
            "architecture gpt takes no kv_heads",
            None,
            "kv_heads architecture",
        ),
        (
            is_gpt and experts,
            "architecture gpt takes no experts",
            None,
            "experts architecture",
        ),
        (
            model.routing != "learned" and not experts,
            "routing needs experts",
            None,
            "routing experts",
        ),
        (
            experts is not None and model.experts_per_token > experts,
            f"experts_per_token {model.experts_per_token} exceeds experts {experts}",
            None,
            "experts_per_token experts",
        ),
        (
            width % heads,
            f"width {width} is not a multiple of heads {heads}",
            f"the nearest width is {nearest}",
            "heads width",
        ),
        (
            is_odd,
            f"head dimension {width // heads} (width / heads) is odd",
            "rotary positions need it even",
            "heads width",
        ),
        (
            kv_heads and heads % kv_heads,
            f"heads {heads} is not a multiple of kv_heads {kv_heads}",
            None,
            "kv_heads heads",
        ),
    )


def budget_misfits(training: TrainingConfig, recipe: Recipe | None) -> Iterator[Misfit]:
    """Check the batch, and against the budget the schedule, the evaluation and the recipe's later parts."""
    budget = training.tokens
    every = training.eval_every_tokens
    decay = training.decay_tokens
    warmup = training.warmup_tokens
    micro_batch = training.micro_batch_size
    is_wsd = training.schedule == "wsd"
    yield from _broken(
        "training",
        (
            micro_batch and training.batch_size % micro_batch,
            f"batch_size {training.batch_size} is not a multiple of micro_batch_size {micro_batch}",
            None,
            "micro_batch_size batch_size",
        ),
        (
            is_wsd and not decay,
            "schedule wsd needs decay_tokens",
            "the tokens of its decay",
            "decay_tokens schedule",
        ),
        (
            decay and not is_wsd,
            f"decay_tokens {decay} with schedule {training.schedule}",
            "only wsd decays at the end; set decay_tokens: 0",
            "decay_tokens schedule",
        ),
        (
            warmup + decay > budget,
            f"warmup_tokens {warmup} + decay_tokens {decay} exceeds the budget of {budget}",
            None,
            "warmup_tokens decay_tokens tokens",
        ),
        (
            every > budget,
            f"eval_every_tokens {every} exceeds the budget of {budget} tokens",
            f"training.eval_every_tokens: {budget} at most",
            "eval_every_tokens tokens",
        ),
        (
            training.eval_tokens < training.seq_len,
            f"eval_tokens {training.eval_tokens} holds no sequence of seq_len {training.seq_len}",
            None,
            "eval_tokens seq_len",
        ),
    )
    if recipe is None:
        return
    yield from phase_misfits(recipe, budget)
    deoscillate = recipe.deoscillate
    if deoscillate is not None:
        plan = plan_steps(training)
        # The first window begins with the weights of the first step at or after the start.
        first = max(1, -(-deoscillate.start(plan.tokens) // plan.tokens_per_step))
        if first + deoscillate.window > plan.steps:
            message = (
                f"a window of {deoscillate.window} steps from step {first} on, but the run has "
                f"{plan.steps} steps"
            )
            yield _of_recipe(message, "no window would ever end", "deoscillate")


def device_misfits(
    training: TrainingConfig, resources: ResourcesConfig
) -> Iterator[Misfit]:
    """Check that a run's devices share its batch evenly."""
    devices = resources.devices_per_run
    micro_batch = training.micro_batch_size or 1
    if training.batch_size % micro_batch == 0 and training.batch_size % (
        devices * micro_batch
    ):
        message = f"batch_size {training.batch_size} is not a multiple of devices_per_run {devices}"
        if training.micro_batch_size:
            message += f" × micro_batch_size {micro_batch}"
        fields = (
            "resources.devices_per_run",
            "training.micro_batch_size",
            "training.batch_size",
        )
        yield Misfit(message, None, fields)


def share_misfits(
    resources: ResourcesConfig, trainer: str | Command | None
) -> Iterator[Misfit]:
    """Check that a share of a GPU is asked for by a run of one process of ours."""
    if resources.gpus == AUTO or isinstance(resources.gpus, int):
        return
    if isinstance(trainer, Command):
        reason = "nothing holds a command to a share of the memory"
    elif resources.devices_per_run > 1:
        reason = "a run on several devices needs each for itself"
    else:
        return
    message = f"{resources.gpus:g} of a GPU: {reason}"
    yield Misfit(
        message,
        "write resources.gpus: 1 or more",
        ("resources.gpus", "resources.devices_per_run"),
    )


def _nearest(size: int, divisor: int) -> str:
    below = size // divisor * divisor
    if below:
        return f"{below} or {below + divisor}"
    return str(divisor)


@cache
def shape_misfits(model: ModelConfig, recipe: Recipe) -> tuple[Misfit, ...]:
    """Check a built-in model against a recipe. The vocabulary, a head's out-features, is not known here."""
    return layer_misfits(recipe, linear_layers(model, vocab_size=0), model)


def layer_misfits(
    recipe: Recipe, layers: tuple[LinearLayer, ...], model: ModelConfig | None = None
) -> tuple[Misfit, ...]:
    """Check a model's dimensions and layers against a recipe; ``model``: None unless it is built in.

    Projections that share a layer (``qkv``, ``gate_up``) are checked one by one. Tokens are not checked: they
    are filled up with zeros. Without a model, the first layer that does not fit stands for all.
    """
    places = layer_places(layers)
    misfits: dict[tuple[str, ...], Misfit] = {}
    for layer in layers:
        for inputs, outputs in _sides(layer, model):
            for phase in phases_of(recipe, places[layer.name]):
                fault = features_fault(
                    phase.recipe, layer.name, inputs=inputs, outputs=outputs
                )
                if fault is not None:
                    message, size, divisor = fault
                    hint = "give the layer a rule of its own: layers: [{match: …, recipe: bf16}]"
                    fields: tuple[str, ...] = ()
                    if model is not None:
                        hint = f"{_nearest(size, divisor)} would fit"
                        fields = _fields_of_size(size, model)
                    misfits.setdefault(fields, Misfit(message, hint, fields))
    rules = [
        _of_recipe(message, hint, "layers" if index is None else f"layers.{index}")
        for index, message, hint in rule_faults(recipe, places)
    ]
    return (*misfits.values(), *rules)


def _sides(layer: LinearLayer, model: ModelConfig | None) -> Iterator[tuple[int, int]]:
    """Yield a layer's in-features, and the out-features of each of its projections; the other side is 0."""
    yield layer.inputs, 0
    kind = layer.name.rpartition(".")[2]
    if model is not None and kind == "qkv":
        head_dim = model.width // model.heads
        yield 0, model.width
        yield 0, (model.kv_heads or model.heads) * head_dim
    elif model is not None and kind == "gate_up":
        yield 0, model.ffn
    else:
        yield 0, layer.outputs


def _fields_of_size(size: int, model: ModelConfig) -> tuple[str, ...]:
    """Return the fields of a built-in model that make a layer's side this large."""
    if size == model.width:
        return ("model.width",)
    if size == model.ffn:
        return ("model.ffn",)
    return ("model.kv_heads", "model.heads", "model.width")


def phase_misfits(recipe: Recipe, tokens: int) -> Iterator[Misfit]:
    """Yield phases that a budget of ``tokens`` does not reach, or that start no later than an earlier one."""
    earlier = 0
    for index, phase in enumerate(recipe.phases):
        start = phase.start(tokens)
        if start >= tokens:
            message = (
                f"a phase from token {start} on, but the budget is {tokens} tokens"
            )
            yield _of_recipe(message, "it would never begin", f"phases.{index}")
        elif start <= earlier:
            message = f"a phase from token {start} on, not after the one before it ({earlier})"
            yield _of_recipe(
                message, "phases stand in the order of their starts", f"phases.{index}"
            )
        earlier = max(earlier, start)


def _of_recipe(message: str, hint: str, key: str) -> Misfit:
    return Misfit(message, hint, (f"recipe.{key}", "recipe.preset", "recipe"))


def ready_command(
    command: Command, recipe: Recipe, built: Mapping[str, Built]
) -> tuple[Command, list[Misfit]]:
    """Put an arm's recipe into its command; also return what does not fit, or would have no effect.

    ``built``: the arm's sections, each with its keys as written; None for one that has a fault.
    """
    training = built["training"].value
    resources = built["resources"].value
    if training is None or resources is None:
        return command, []
    misfits = []
    for message, hint, key in command.faults():
        fields: tuple[str, ...] = (f"trainer.{key}", "trainer")
        if key == "cwd":
            fields = ("code", *fields)
        misfits.append(Misfit(message, hint, fields))
    misfits += _without_effect(built)
    misfits += _device_faults(command, resources)
    if not command.reads_recipe:
        if built["recipe"].written:
            hint = "trainer.recipes names the table for it; or leave it out and name the arm by "
            hint += "trainer.precision"
            misfits.append(
                Misfit("the recipe does not reach the command", hint, ("recipe",))
            )
        return command, misfits
    if misfits or command.recipes in (None, READS_RECIPE):
        return command, misfits
    try:
        flags = flags_for(recipe, command.recipes, steps=plan_steps(training).steps)
    except ValueError as error:
        return command, [Misfit(str(error), None, ("recipe", "trainer.recipes"))]
    if fault := flags.too_old(command.version or ""):
        hint = "if the command has another version, trainer.version names it: PACKAGE==VERSION"
        return command, [Misfit(fault, hint, ("trainer.version", "recipe"))]
    if flags.args and "{recipe_args}" not in command.command:
        message = "the recipe's arguments have no place in the command"
        return command, [
            Misfit(message, "add the word '{recipe_args}'", ("trainer.command",))
        ]
    return command.with_recipe(flags), []


def _without_effect(built: Mapping[str, Built]) -> Iterator[Misfit]:
    """Yield the keys that mean nothing where a command trains."""
    for section, reason in (
        ("model", "builds its own model"),
        ("data", "reads its own data"),
    ):
        for key in built[section].written:
            hint = "say it in the command's own words: trainer.args, trainer.files or trainer.version"
            yield Misfit(
                f"{key} has no effect: the command {reason}",
                hint,
                (f"{section}.{key}",),
            )
    for key in built["training"].written:
        if key not in REACHES:
            hint = f"write it in trainer.args; of training only {', '.join(REACHES)} are read"
            yield Misfit(
                f"{key} does not reach the command", hint, (f"training.{key}",)
            )


def _device_faults(command: Command, resources: ResourcesConfig) -> Iterator[Misfit]:
    if resources.devices_per_run > 1:
        gpus = resources.gpus if isinstance(resources.gpus, int) else 1
        hint = f"resources.gpus: {gpus * resources.devices_per_run} reserves them for one command"
        yield Misfit(
            "a command starts its own processes", hint, ("resources.devices_per_run",)
        )
    if resources.nodes > 1 and "{node_rank}" not in " ".join(
        (*command.words, *command.env.values())
    ):
        hint = "pass on {node_rank}, {num_nodes}, {master_addr} and {port}, as torchrun takes them"
        yield Misfit("nothing tells the nodes apart", hint, ("trainer.command",))
