"""The configuration of one run: plain, frozen, validated data, written by the planner, read by the trainer.

The classes are pydantic dataclasses: a study file, a notebook and a ``config.json`` pass the same checks.
Nothing here imports torch, so that planning stays fast. Every number has its unit in its name or docstring;
token counts are counts of predicted tokens.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, TypeAdapter
from pydantic_core import PydanticCustomError

from ablate.base.config_base import Section, key, said, section
from ablate.recipes import Recipe  # noqa: TC001  pydantic reads the annotation at run time
from ablate.run import BUILT_IN, backend_names
from ablate.run.command import Command  # noqa: TC001  pydantic reads the annotation at run time

if TYPE_CHECKING:
    from collections.abc import Mapping

Setting = Literal[
    "data", "tokenizer", "evaluation", "code", "device", "arithmetic", "world_size"
]
"""Settings that compared runs must share, unless their study waives the setting by name."""


def configured(config: Mapping[str, Any]) -> dict[Setting, str | None]:
    """Read the settings that a run's configuration, as plain data, contains; None for a missing one."""
    data = config.get("data") or {}
    training = config.get("training") or {}
    tokenizer = [
        data.get("tokenizer"),
        data.get("tokenizer_path"),
        config.get("vocab_size"),
    ]
    # The evaluation set (size, source and windows of its text), and whether Fprop is in bf16.
    evaluation = [training.get("eval_tokens"), data.get("validation_paths")]
    if training.get("eval_windows") != "spread":
        evaluation.append(training.get("eval_windows"))
    if training.get("evaluate_in") == "bf16":
        evaluation.append("in bf16")
    return {
        "data": config.get("data_digest"),
        "tokenizer": _joined(tokenizer),
        "evaluation": _joined(evaluation),
    }


def _joined(values: list[Any]) -> str | None:
    return " ".join(str(value) for value in values if value not in (None, [])) or None


# Strict scalars: a quoted number, or a yes/no instead of a number, is an error.
# The upper bound keeps arithmetic exact and finite, and is above every real count.
PositiveInt = Annotated[int, Field(gt=0, le=10**15, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**15, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Beta = Annotated[float, Field(ge=0, lt=1, strict=True)]

AUTO = "auto"


def _checked_gpus(value: Any) -> Any:
    if value == AUTO:
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value == 0 or 0.01 <= value <= 10**15):
        raise said(
            f"expected whole GPUs, a share of one from 0.01 on, or auto, got {value!r}"
        )
    if value == int(value):
        return int(value)
    if value > 1:
        raise said(f"{value:g} GPUs: a run has a share of one GPU, or whole ones")
    return value


Gpus = Annotated[
    Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] | Literal["auto"],
    BeforeValidator(_checked_gpus),
]


@section
class ModelConfig(Section):
    """A built-in decoder, described by fields; or a foreign model given by ``hf`` or ``function`` alone.

    Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU; ``experts`` makes it a mixture.
    GPT: as GPT-2, LayerNorm, learned positions, biases, GELU; without dropout.
    """

    architecture: Literal["llama", "gpt"] = key(
        "llama", "the built-in model: Llama-style, or as GPT-2"
    )
    width: PositiveInt = key(128, "residual width (hidden size)")
    layers: PositiveInt = key(4, "number of blocks")
    heads: PositiveInt = key(4, "query heads; must divide the width")
    kv_heads: PositiveInt | None = key(
        None, "key and value heads; default: as many as query heads"
    )
    ffn: PositiveInt = key(352, "inner width of the feed-forward, of each expert")
    experts: PositiveInt | None = key(
        None, "experts of each block's feed-forward; default: none, it is dense"
    )
    experts_per_token: PositiveInt = key(2, "experts that each token goes through")
    routing: Literal["learned", "fixed", "replay"] = key(
        "learned",
        "who chooses a token's experts: the router; fixed: a hash of the token's id, in each layer and seed "
        "another; replay: the baseline's run of the same seed, step by step",
    )
    balance_loss: NonNegativeFloat = key(
        0.01, "weight in training of the loss that spreads tokens over experts"
    )
    tied_head: StrictBool = key(True, "output head shares the embedding's weights")
    rope_base: PositiveFloat = key(10_000.0, "base of the rotary frequencies")
    norm_eps: PositiveFloat = key(1e-5, "epsilon of the norms")
    init_std: PositiveFloat = key(
        0.02, "std of initial weights; residual outputs / sqrt(2 layers)"
    )
    hf: str | None = key(
        None,
        "a Hugging Face causal model instead: a folder with config.json, or a hub name",
    )
    pretrained: StrictBool = key(
        False, "hf: start from the checkpoint's weights, not from random ones"
    )
    function: str | None = key(
        None,
        "your own model instead: package.module:function or path/to/file.py:function",
    )
    options: dict[str, Any] = key(
        dict, "keyword arguments of the function; fields to change of hf's config"
    )
    allow: list[str] = key(
        list,
        "hf and function: patterns of matrices that no recipe reaches and that may stay as they are",
    )
    reach: list[str] = key(
        list,
        "hf and function: names of subclasses of torch.nn.Linear that follow the recipe if they compute as it does",
    )

    FOREIGN: ClassVar[tuple[str, ...]] = (
        "hf",
        "pretrained",
        "function",
        "options",
        "allow",
        "reach",
    )
    """The fields that mean something where the model is not built in."""

    @property
    def is_built_in(self) -> bool:
        """Whether the fields describe the model; otherwise its own code does."""
        return self.hf is None and self.function is None

    @property
    def summary(self) -> str:
        """The model in a few words: ``llama, width 128, layers 2, heads 4, ffn 352``."""
        if self.function:
            return self.function
        if self.hf:
            return f"{self.hf}, {'pretrained' if self.pretrained else 'random'} weights"
        text = f"{self.architecture}, width {self.width}, layers {self.layers}, heads {self.heads}"
        text += f", ffn {self.ffn}"
        if self.experts is not None:
            text += f" of {self.experts} experts"
        return text

    def describes(self, trainer: str | Command | None) -> bool:
        """Whether the fields describe what is trained; a trainer may build any model if no field is set."""
        return self.is_built_in and (trainer is None or self != ModelConfig())

    @classmethod
    def meaningful_fields(cls, model: Mapping[str, Any]) -> dict[str, Any]:
        """Select a recorded model's fields that have a meaning for it; all, if the model is built in."""
        if not model.get("hf") and not model.get("function"):
            return dict(model)
        return {key: value for key, value in model.items() if key in cls.FOREIGN}


@section
class DataConfig(Section):
    """Where text comes from and how it becomes tokens."""

    source: Literal["stdlib", "text", "jsonl", "tokens", "hub"] = key(
        "stdlib",
        "stdlib: the source text of Python's standard library (embedded default); text: "
        "files or folders; jsonl: C4-style .json/.jsonl(.gz) shards; tokens: uint16/uint32 files; "
        "hub: a Hugging Face data set, streamed",
    )
    paths: list[str] = key(
        list,
        "files, folders or globs, relative to the study file; hub: the data set's name",
    )
    validation_paths: list[str] = key(
        list, "validation text of its own; default: documents held out by hash"
    )
    text_field: str = key("text", "jsonl and hub: the field that holds the text")
    tokenizer: Literal["bytes", "bpe", "hf"] = key(
        "bytes", "bytes; bpe: trained on this corpus; hf: a Hugging Face tokenizer"
    )
    tokenizer_path: str | None = key(None, "hf: a local path or a hub name")
    vocab_size: PositiveInt | None = key(
        None,
        "bpe: size to train; tokens: size of the vocabulary; hf: what its size must be",
    )
    token_dtype: Literal["uint16", "uint32"] = key("uint16", "tokens: element type")
    max_bytes: PositiveInt | None = key(
        None, "read only about this much text (whole documents)"
    )


@section
class TrainingConfig(Section):
    """Budget, batch, optimizer (AdamW), schedule, evaluation and the bounds of divergence."""

    tokens: PositiveInt = key(1_000_000, "token budget of a run")
    seq_len: PositiveInt = key(128, "tokens per sequence")
    batch_size: PositiveInt = key(32, "sequences per optimizer step")
    micro_batch_size: PositiveInt | None = key(
        None,
        "sequences per forward pass on a device; default: all of its share of the batch",
    )
    learning_rate: PositiveFloat = key(4e-3, "peak rate")
    schedule: Literal["constant", "cosine", "wsd"] = key(
        "constant",
        "after warm-up: constant, cosine to the end, or warm-up–stable–decay",
    )
    warmup_tokens: NonNegativeInt = key(0, "tokens of linear warm-up")
    decay_tokens: NonNegativeInt = key(0, "wsd: tokens of linear decay at the end")
    final_lr_ratio: float = key(
        0.1, "cosine, wsd: final rate over peak rate", ge=0, le=1, strict=True
    )
    weight_decay: NonNegativeFloat = key(0.1, "on matrices only")
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    adam_eps: PositiveFloat = 1e-8
    grad_clip: PositiveFloat | None = key(1.0, "global gradient norm; null: off")
    eval_every_tokens: PositiveInt = key(
        50_000,
        "interval between evaluations; default of a smaller budget: a tenth of it",
    )
    eval_tokens: PositiveInt = key(65_536, "size of the fixed validation set in tokens")
    eval_windows: Literal["spread", "first"] = key(
        "spread",
        "which sequences of the validation text: spread evenly over it, or the first, as MLPerf takes them",
    )
    evaluate_in: Literal["recipe", "bf16", "both"] = key(
        "recipe",
        "what linear layers run in while evaluating: the recipe's own Fprop; bf16, with the unrounded "
        "weights; both: val_loss by the recipe, and val_loss_bf16 on the same batches beside it",
    )
    divergence_loss: PositiveFloat | None = key(
        None,
        "diverged when the validation loss (nats/token) stays above this; default: 1.5 × "
        "the loss of a uniform guess, ln(vocabulary)",
    )
    divergence_evals: PositiveInt = key(3, "for so many evaluations in a row")
    master_weights: Literal["fp32", "bf16"] = key(
        "fp32", "weights and AdamW's moments; computing is in bf16"
    )
    reduction: Literal["fp32", "bf16"] = key(
        "fp32", "of gradients between the devices of a run"
    )
    compile: StrictBool = key(
        False, "torch.compile the model's blocks, but for a mixture's experts"
    )


@section
class ResourcesConfig(Section):
    """What Ray reserves for one run. Not part of a run's identity."""

    devices_per_run: PositiveInt = key(
        1, "devices that train each run together (FSDP2), one process each"
    )
    cpus: PositiveInt = key(1, "CPU cores (and threads) per device of a run")
    gpus: Gpus = key(
        0,
        "GPUs per device of a run: whole ones; a share of one, such as 0.125; or auto: as many runs on a GPU "
        "as memory and cores allow, and the CPU where there is no GPU",
    )
    custom: dict[str, PositiveFloat] = key(
        dict,
        "resources that the cluster names itself, such as {mi355x: 1}, per device of a run",
    )
    nodes: PositiveInt = key(
        1, "machines on which a command trains each run, each with these cpus and gpus"
    )
    activation_checkpointing: StrictBool = key(
        False, "compute the blocks' activations twice to keep less; same result"
    )
    checkpoint_every_sec: NonNegativeFloat = key(
        60.0,
        "seconds between checkpoints, at least; longer where they would take over 2 % of the "
        "time; 0: after every step",
    )
    hang_after_sec: PositiveFloat = key(
        1800.0, "a run without a new row or step for so long is ended and tried again"
    )
    require_native: StrictBool = key(
        False,
        "refuse to run what the device has no instruction for, instead of emulating",
    )
    allow_failed_self_test: StrictBool = key(
        False, "train on although a back end failed its self-test; the record says so"
    )

    @property
    def num_gpus(self) -> float:
        """GPUs per device of a run, below 1 a share of one. A plan has no ``auto`` left."""
        assert not isinstance(self.gpus, str)
        return self.gpus


def _known_backend(name: str) -> str:
    # Looking up entry points reads the disk; built-in names do not need it.
    if name not in ("auto", *BUILT_IN) and name not in backend_names():
        raise PydanticCustomError(
            "literal_error", "no such back end", {"words": list(backend_names())}
        )
    return name


BackendName = Annotated[
    str,
    AfterValidator(_known_backend),
    Field(
        json_schema_extra=lambda schema: schema.update(enum=list(backend_names())),
        strict=True,
    ),
]
"""A built-in back end or an entry point's."""


@section
class Fork(Section):
    """How a run trains before its fork: as its parent, for ``tokens`` tokens, in whole steps.

    ``recipe``, ``training``: the parent's; all else is equal.
    """

    tokens: PositiveInt
    recipe: Recipe
    training: TrainingConfig


@section
class ArmConfig(Section):
    """The configuration that the runs of an arm share: everything but the seed that can change a result."""

    model: ModelConfig
    data: DataConfig
    data_digest: str = key(
        ..., "hash of the corpus and of how it is split and tokenised"
    )
    vocab_size: PositiveInt
    training: TrainingConfig
    recipe: Recipe
    backend: BackendName
    trainer: str | Command | None = None
    code_digest: str | None = key(
        None, "hash of the model's and trainer's own code, of hf's configuration"
    )
    fork: Fork | None = None
    replayed: Recipe | None = key(
        None, "the recipe of the run whose routes it replays; all else is equal"
    )

    def with_seed(self, seed: int) -> RunConfig:
        """Return the configuration of the run with this seed."""
        return RunConfig(
            **{field.name: getattr(self, field.name) for field in fields(self)},
            seed=seed,
        )


@section
class RunConfig(ArmConfig):
    """Everything that can change a run's result, and nothing else; its hash is the run's id."""

    seed: NonNegativeInt

    @property
    def parent(self) -> RunConfig | None:
        """The run that this one forks from, None if it does not."""
        if self.fork is None:
            return None
        return replace(
            self, recipe=self.fork.recipe, training=self.fork.training, fork=None
        )

    @property
    def original(self) -> RunConfig | None:
        """The run whose routes this one replays, None if it replays none."""
        if self.replayed is None:
            return None
        learned = replace(self.model, routing="learned")
        return replace(self, recipe=self.replayed, model=learned, replayed=None)


def config_from_json(content: dict[str, Any]) -> RunConfig:
    """Read what ``asdict`` made of a run's configuration; raises pydantic's ``ValidationError``."""
    config: RunConfig = TypeAdapter(RunConfig).validate_python(content)
    return config
