"""Checks between the values of one arm. Each fault is reported at the value that caused it.

Single values are checked earlier, where they stand; the rules here rely on every value being in range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.study.stages import built_in_rule_faults, phase_faults
from ablate.study.tree import entries

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ablate.recipes import Recipe, SenselessRecipe
    from ablate.run.config import DataConfig, ModelConfig, ResourcesConfig, TrainingConfig
    from ablate.study.faults import Faults
    from ablate.study.merge import Draft
    from ablate.study.shapes import Shapes
    from ablate.study.stages import StageFault
    from ablate.study.tree import Node

BPE_MINIMUM = 257

FieldPath = tuple[str | int, ...]
_WIDTH: FieldPath = ("model", "width")
_HEADS: FieldPath = ("model", "heads")
_KV_HEADS: FieldPath = ("model", "kv_heads")
_SEQ_LEN: FieldPath = ("training", "seq_len")
_BATCH: FieldPath = ("training", "batch_size")
_MICRO: FieldPath = ("training", "micro_batch_size")
_TOKENS: FieldPath = ("training", "tokens")


class ArmChecks:
    """The checks of one arm; adds the faults found to ``faults``."""

    def __init__(self, draft: Draft, faults: Faults, shapes: Shapes) -> None:
        self._draft = draft
        self._faults = faults
        self._shapes = shapes

    def _add(self, what: str, *paths: FieldPath, hint: str | None = None) -> None:
        self._add_at(self._draft.blame(*paths), what, hint)

    def _add_at(self, node: Node, what: str, hint: str | None = None) -> None:
        arm = None if self._draft.owns(node) else self._draft.name
        self._faults.add(node, what, hint, arm=arm)

    def lines(self) -> dict[str, tuple[int, int]]:
        """Return line and column of the parts that only planning can check: code, model, rules."""
        paths: dict[str, tuple[FieldPath, ...]] = {
            "model": (("model", "hf"), ("model", "function")),
            "trainer": (("trainer",),),
            "recipe": (("recipe", "layers"), ("recipe",)),
        }
        nodes = {name: self._draft.blame(*places) for name, places in paths.items()}
        return {name: (node.line, node.column) for name, node in nodes.items()}

    def senseless(self, error: SenselessRecipe) -> None:
        """Report a recipe that contradicts itself."""
        is_cell = self._draft.node.path[0] == "grid"
        hint = "exclude the cell, or set grid.senseless: drop" if is_cell else None
        path: FieldPath = ("recipe", *error.path)
        while (node := self._draft.blame(path)) is self._draft.node and path:
            path = path[:-1]
        self._add_at(node, str(error), hint)

    def model(self, model: ModelConfig) -> bool:
        """Check the model and its attention shapes; return whether the layers' shapes are known."""
        given = entries(self._draft.sections.get("model"))
        if model.hf is not None and model.function is not None:
            self._add("a second model: hf beside function", ("model", "function"), hint="give one of them")
            return False
        if not model.is_built_in:
            own = "hf" if model.hf is not None else "function"
            kept = {own, "options"} | ({"pretrained"} if own == "hf" else set())
            for key in given:
                if key not in kept and given[key] is not None:
                    what = f"{key} belongs to the built-in model, not to {own}"
                    hint = (
                        "options: {…} changes its configuration" if own == "hf" else "options: {…} reach it"
                    )
                    self._add(what, ("model", key), hint=hint)
                    break
            return False
        for key in ("pretrained", "options"):
            if key in given and getattr(model, key):
                self._add(f"{key} needs hf{' or function' if key == 'options' else ''}", ("model", key))
        if model.architecture == "gpt":
            for key in ("kv_heads", "experts"):
                if getattr(model, key) is not None:
                    self._add(f"architecture gpt takes no {key}", ("model", key), ("model", "architecture"))
        if model.experts is not None and model.experts_per_token > model.experts:
            what = f"experts_per_token {model.experts_per_token} exceeds experts {model.experts}"
            self._add(what, ("model", "experts_per_token"), ("model", "experts"))
        if model.width % model.heads:
            self._add(f"width {model.width} is not a multiple of heads {model.heads}", _HEADS, _WIDTH)
            return False
        head_dim = model.width // model.heads
        if head_dim % 2 and model.architecture == "llama":
            what = f"head dimension {head_dim} (width / heads) is odd"
            self._add(what, _HEADS, _WIDTH, hint="rotary positions need it even")
        if model.kv_heads is not None and model.heads % model.kv_heads:
            what = f"heads {model.heads} is not a multiple of kv_heads {model.kv_heads}"
            self._add(what, _KV_HEADS, _HEADS)
        return True

    def training(self, training: TrainingConfig) -> None:
        """Check batch, schedule and evaluation against the budget."""
        if training.micro_batch_size and training.batch_size % training.micro_batch_size:
            what = f"batch_size {training.batch_size} is not a multiple of micro_batch_size"
            self._add(f"{what} {training.micro_batch_size}", _MICRO, _BATCH)
        decay: FieldPath = ("training", "decay_tokens")
        schedule: FieldPath = ("training", "schedule")
        if training.schedule == "wsd" and not training.decay_tokens:
            self._add("schedule wsd needs decay_tokens", decay, schedule, hint="the tokens of its decay")
        if training.schedule != "wsd" and training.decay_tokens:
            what = f"decay_tokens {training.decay_tokens} with schedule {training.schedule}"
            self._add(what, decay, schedule, hint="only wsd decays at the end; set decay_tokens: 0")
        elif training.warmup_tokens + training.decay_tokens > training.tokens:
            parts = f"warmup_tokens {training.warmup_tokens}"
            if training.decay_tokens:
                parts += f" + decay_tokens {training.decay_tokens}"
            self._add(
                f"{parts} exceeds tokens {training.tokens}", ("training", "warmup_tokens"), decay, _TOKENS
            )
        if training.eval_every_tokens > training.tokens:
            what = f"eval_every_tokens {training.eval_every_tokens} exceeds tokens {training.tokens}"
            self._add(what, ("training", "eval_every_tokens"), _TOKENS)
        if training.eval_tokens < training.seq_len:
            what = f"eval_tokens {training.eval_tokens} holds no sequence of seq_len {training.seq_len}"
            self._add(what, ("training", "eval_tokens"), _SEQ_LEN)

    def devices(self, training: TrainingConfig, resources: ResourcesConfig) -> None:
        """Check that a run's devices share its batch evenly."""
        devices = resources.devices_per_run
        per_pass = training.micro_batch_size or 1
        if (training.batch_size // per_pass) % devices and training.batch_size % per_pass == 0:
            what = f"batch_size {training.batch_size} is not a multiple of devices_per_run {devices}"
            if training.micro_batch_size:
                what += f" × micro_batch_size {per_pass}"
            self._add(what, ("resources", "devices_per_run"), _MICRO, _BATCH)

    def data(self, data: DataConfig) -> None:
        """Check that each key of the data section applies to this source and tokenizer."""
        source: FieldPath = ("data", "source")
        tokenizer: FieldPath = ("data", "tokenizer")
        paths: FieldPath = ("data", "paths")
        if data.source == "stdlib":
            for key, given in (("paths", data.paths), ("validation_paths", data.validation_paths)):
                if given:
                    self._add(f"source stdlib takes no {key}", ("data", key), source)
        elif not data.paths:
            self._add(f"source {data.source} needs paths", paths, source)
        if data.text_field != "text" and data.source not in ("jsonl", "hub"):
            self._add(f"source {data.source} has no text_field", ("data", "text_field"), source)
        if data.source == "tokens":
            self._tokens(data, source, tokenizer)
            return
        if data.token_dtype != "uint16":  # noqa: S105  a data type, no password
            self._add(f"source {data.source} has no token_dtype", ("data", "token_dtype"), source)
        vocab: FieldPath = ("data", "vocab_size")
        if data.tokenizer == "bpe" and data.vocab_size is None:
            self._add("tokenizer bpe needs vocab_size", vocab, tokenizer, hint="the size to train")
        if data.tokenizer == "bpe" and data.vocab_size is not None and data.vocab_size < BPE_MINIMUM:
            what = f"vocab_size {data.vocab_size} is too small for bpe"
            self._add(what, vocab, tokenizer, hint=f"from {BPE_MINIMUM} up: the bytes and an end of text")
        if data.tokenizer == "bytes" and data.vocab_size is not None:
            what = f"tokenizer {data.tokenizer} has a vocabulary of its own"
            self._add(what, vocab, tokenizer, hint="vocab_size is for bpe, hf, and source tokens")
        self._tokenizer_path(data, tokenizer)

    def _tokenizer_path(self, data: DataConfig, tokenizer: FieldPath) -> None:
        path: FieldPath = ("data", "tokenizer_path")
        if data.tokenizer == "hf" and data.tokenizer_path is None:
            self._add("tokenizer hf needs tokenizer_path", path, tokenizer, hint="a local path or a hub name")
        if data.tokenizer != "hf" and data.tokenizer_path is not None:
            self._add(f"tokenizer {data.tokenizer} takes no tokenizer_path", path, tokenizer)

    def _tokens(self, data: DataConfig, source: FieldPath, tokenizer: FieldPath) -> None:
        vocab: FieldPath = ("data", "vocab_size")
        if data.tokenizer != "bytes":
            self._add(f"source tokens takes no tokenizer {data.tokenizer}", tokenizer, source)
        elif data.tokenizer_path is not None:
            self._add("source tokens takes no tokenizer_path", ("data", "tokenizer_path"), source)
        if data.vocab_size is None:
            self._add("source tokens needs vocab_size", vocab, source, hint="one above the largest token")
        elif data.token_dtype == "uint16" and data.vocab_size > 2**16:  # noqa: S105
            what = f"vocab_size {data.vocab_size} does not fit uint16"
            self._add(what, vocab, ("data", "token_dtype"), hint="token_dtype: uint32?")

    def shapes(
        self,
        model: ModelConfig,
        training: TrainingConfig | None,
        recipe: Recipe,
        resources: ResourcesConfig | None,
    ) -> None:
        """Check that blocks, tiles and Hadamard groups divide the dimensions that they lie along."""
        devices = 1 if resources is None else resources.devices_per_run
        for misfit in self._shapes.misfits(model, training, recipe, devices):
            node = self._draft.blame(*misfit.paths)
            if node is self._draft.node:  # the sizes are defaults: blame the recipe
                node = self._draft.blame(("recipe",))
            self._add_at(node, misfit.what, misfit.hint)

    def rules(self, model: ModelConfig, recipe: Recipe) -> None:
        """Check that every rule applies to some layer."""
        self._stages("layers", built_in_rule_faults(model, recipe))

    def phases(self, training: TrainingConfig, recipe: Recipe) -> None:
        """Check that every phase begins within the budget."""
        self._stages("phases", phase_faults(recipe.phases, training.tokens))

    def _stages(self, key: str, found: Iterable[StageFault]) -> None:
        for fault in found:
            entry: FieldPath = ("recipe", key) if fault.index is None else ("recipe", key, fault.index)
            self._add(fault.what, entry, ("recipe", "preset"), ("recipe",), hint=fault.hint)
