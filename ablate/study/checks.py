"""Checks between the values of one arm. Each fault is reported at the value that caused it.

Single values are checked earlier, where they stand; the rules here rely on every value being in range.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ablate.data.identity import field_faults
from ablate.study.shape_checks import deoscillation_misfits, nearest, phase_misfits
from ablate.study.tree import entries

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ablate.recipes import Recipe, SenselessRecipe
    from ablate.run.config import DataConfig, ModelConfig, ResourcesConfig, TrainingConfig
    from ablate.study.merge import Draft
    from ablate.study.messages import Faults
    from ablate.study.shape_checks import Fit, Misfit
    from ablate.study.tree import Node


class ArmChecks:
    """The checks of one arm; adds the faults found to ``faults``."""

    def __init__(self, draft: Draft, faults: Faults, fit: Fit) -> None:
        self._draft = draft
        self._faults = faults
        self._fit = fit

    def _add(self, section: str, what: str, *fields: str, hint: str | None = None) -> None:
        paths = (field if "." in field else f"{section}.{field}" for field in fields)
        self._add_at(self._draft.node_to_report(*paths), what, hint)

    def _add_at(self, node: Node, what: str, hint: str | None = None) -> None:
        arm = None if node.path[:2] == ("arms", self._draft.name) else self._draft.name
        self._faults.add(node, what, hint, arm=arm)

    def lines(self) -> dict[str, tuple[int, int]]:
        """Return line and column of what only planning can check: code, model, rules, shared settings."""
        paths = {
            "model": ("model.hf", "model.function"),
            "allow": ("model.allow", "model.hf", "model.function"),
            "trainer": ("trainer",),
            "recipe": ("recipe.layers", "recipe"),
            "data": ("data.paths", "data.source", "data"),
            "tokenizer": ("data.tokenizer", "data.tokenizer_path", "data.vocab_size", "data"),
            "evaluation": (
                *(f"training.{key}" for key in ("eval_tokens", "eval_windows", "evaluate_in")),
                "data.validation_paths",
            ),
            "device": ("resources.gpus",),
            "world_size": ("resources.devices_per_run",),
        }
        nodes = {name: self._draft.node_to_report(*places) for name, places in paths.items()}
        return {name: (node.line, node.column) for name, node in nodes.items()}

    def arm(self, built: dict[str, Any], recipe: Recipe | None) -> None:
        """Check the sections that could be built, and the recipe, against each other."""
        model, data, training, resources = (built[s] for s in ("model", "data", "training", "resources"))
        has_shapes = model is not None and self.model(model)
        if training is not None:
            self.training(training)
            if resources is not None:
                self.devices(training, resources)
        if data is not None:
            self.data(data)
        if has_shapes and recipe is not None and model.describes(built["trainer"]):
            self._report(self._fit.shapes(model, recipe))
            self._report(self._fit.rules(model, recipe))
        if training is not None and recipe is not None:
            self.phases(training, recipe)

    def senseless(self, error: SenselessRecipe) -> None:
        """Report a recipe that contradicts itself."""
        is_cell = self._draft.node.path[0] == "grid"
        hint = "exclude the cell, or set grid.senseless: drop" if is_cell else error.hint
        path = ".".join(("recipe", *map(str, error.path)))
        while (node := self._draft.node_to_report(path)) is self._draft.node and path:
            path = path.rpartition(".")[0]
        self._add_at(node, str(error), hint)

    def model(self, model: ModelConfig) -> bool:
        """Check the model and its attention shapes; return whether the layers' shapes are known."""
        add = partial(self._add, "model")
        given = entries(self._draft.sections.get("model"))
        if model.hf is not None and model.function is not None:
            add("a second model: hf beside function", "function", hint="give one of them")
            return False
        if not model.is_built_in:
            own = "hf" if model.hf is not None else "function"
            kept = {own, "options", "allow"} | ({"pretrained"} if own == "hf" else set())
            for key in given:
                if key not in kept and given[key] is not None:
                    what = f"{key} belongs to the built-in model, not to {own}"
                    verb = "changes its configuration" if own == "hf" else "reach it"
                    add(what, key, hint=f"options: {{…}} {verb}")
                    break
            return False
        for key in ("pretrained", "options", "allow"):
            if key in given and getattr(model, key):
                add(f"{key} needs hf{'' if key == 'pretrained' else ' or function'}", key)
        if model.architecture == "gpt":
            for key in ("kv_heads", "experts"):
                if getattr(model, key) is not None:
                    add(f"architecture gpt takes no {key}", key, "architecture")
        if model.experts is not None and model.experts_per_token > model.experts:
            what = f"experts_per_token {model.experts_per_token} exceeds experts {model.experts}"
            add(what, "experts_per_token", "experts")
        if model.width % model.heads:
            fits = nearest(model.width, model.heads * (2 if model.architecture == "llama" else 1))
            what = f"width {model.width} is not a multiple of heads {model.heads}"
            add(what, "heads", "width", hint=f"the nearest width is {fits}")
            return False
        head_dim = model.width // model.heads
        if head_dim % 2 and model.architecture == "llama":
            what = f"head dimension {head_dim} (width / heads) is odd"
            add(what, "heads", "width", hint="rotary positions need it even")
        if model.kv_heads is not None and model.heads % model.kv_heads:
            what = f"heads {model.heads} is not a multiple of kv_heads {model.kv_heads}"
            add(what, "kv_heads", "heads")
        return True

    def training(self, training: TrainingConfig) -> None:
        """Check batch, schedule and evaluation against the budget."""
        add = partial(self._add, "training")
        if training.micro_batch_size and training.batch_size % training.micro_batch_size:
            what = f"is not a multiple of micro_batch_size {training.micro_batch_size}"
            add(f"batch_size {training.batch_size} {what}", "micro_batch_size", "batch_size")
        if training.schedule == "wsd" and not training.decay_tokens:
            add("schedule wsd needs decay_tokens", "decay_tokens", "schedule", hint="the tokens of its decay")
        if training.schedule != "wsd" and training.decay_tokens:
            what = f"decay_tokens {training.decay_tokens} with schedule {training.schedule}"
            add(what, "decay_tokens", "schedule", hint="only wsd decays at the end; set decay_tokens: 0")
        elif training.warmup_tokens + training.decay_tokens > training.tokens:
            parts = f"warmup_tokens {training.warmup_tokens}"
            if training.decay_tokens:
                parts += f" + decay_tokens {training.decay_tokens}"
            what = f"{parts} exceeds the budget of {training.tokens} tokens"
            add(what, "warmup_tokens", "decay_tokens", "tokens")
        if training.eval_every_tokens > training.tokens:
            every, budget = training.eval_every_tokens, training.tokens
            what = f"eval_every_tokens {every} exceeds the budget of {budget} tokens"
            add(what, "eval_every_tokens", "tokens", hint=f"training.eval_every_tokens: {budget} at most")
        if training.eval_tokens < training.seq_len:
            what = f"eval_tokens {training.eval_tokens} holds no sequence of seq_len {training.seq_len}"
            add(what, "eval_tokens", "seq_len")

    def devices(self, training: TrainingConfig, resources: ResourcesConfig) -> None:
        """Check that a run's devices share its batch evenly."""
        devices = resources.devices_per_run
        per_pass = training.micro_batch_size or 1
        if (training.batch_size // per_pass) % devices and training.batch_size % per_pass == 0:
            what = f"batch_size {training.batch_size} is not a multiple of devices_per_run {devices}"
            if training.micro_batch_size:
                what += f" × micro_batch_size {per_pass}"
            self._add("training", what, "resources.devices_per_run", "micro_batch_size", "batch_size")

    def data(self, data: DataConfig) -> None:
        """Check that each key of the data section applies to this source and tokenizer."""
        for what, fields, hint in field_faults(data):
            self._add("data", what, *fields, hint=hint)

    def phases(self, training: TrainingConfig, recipe: Recipe) -> None:
        """Check that every phase, and a window of de-oscillation, fits into the budget."""
        self._report(phase_misfits(recipe, training.tokens))
        self._report(deoscillation_misfits(recipe, training))

    def _report(self, misfits: Iterable[Misfit]) -> None:
        for misfit in misfits:
            node = self._draft.node_to_report(*misfit.paths)
            if node is self._draft.node:  # the values are defaults: blame the recipe
                node = self._draft.node_to_report("recipe")
            self._add_at(node, misfit.what, misfit.hint)
