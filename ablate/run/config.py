"""The configuration of one run: plain, frozen, validated data, written by the planner, read by the trainer.

The classes are pydantic dataclasses: a study file, a notebook and a ``config.json`` pass the same checks.
Nothing here imports torch, so that planning stays fast. Every number has its unit in its name or docstring;
token counts are counts of predicted tokens.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ablate.base.section import Section
from ablate.recipes import Recipe  # noqa: TC001  pydantic reads the annotation at run time
from ablate.run.backends import BUILT_IN, backend_names

_CLOSED = ConfigDict(extra="forbid")

Setting = Literal["data", "tokenizer", "evaluation", "code", "device", "world_size"]
"""Settings that compared runs must share, unless their study waives the setting by name."""

# Strict scalars: a quoted number, or a yes/no instead of a number, is an error.
# The upper bound keeps arithmetic exact and finite, and lies above every real count.
PositiveInt = Annotated[int, Field(gt=0, le=10**15, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**15, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Beta = Annotated[float, Field(ge=0, lt=1, strict=True)]


@dataclass(frozen=True, kw_only=True, eq=False, config=_CLOSED)
class ModelConfig(Section):
    """A built-in decoder, described by fields; or a foreign model given by ``hf`` or ``function`` alone.

    Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU; ``experts`` makes it a mixture.
    GPT: as GPT-2, LayerNorm, learned positions, biases, GELU; without dropout.
    """

    architecture: Annotated[
        Literal["llama", "gpt"], Field(description="the built-in model: Llama-style, or as GPT-2")
    ] = "llama"
    width: Annotated[PositiveInt, Field(description="residual width (hidden size)")] = 128
    layers: Annotated[PositiveInt, Field(description="number of blocks")] = 4
    heads: Annotated[PositiveInt, Field(description="query heads; must divide the width")] = 4
    kv_heads: Annotated[
        PositiveInt | None, Field(description="key and value heads; default: as many as query heads")
    ] = None
    ffn: Annotated[PositiveInt, Field(description="inner width of the feed-forward, of each expert")] = 352
    experts: Annotated[
        PositiveInt | None,
        Field(description="experts of each block's feed-forward; default: none, it is dense"),
    ] = None
    experts_per_token: Annotated[PositiveInt, Field(description="experts that each token goes through")] = 2
    balance_loss: Annotated[
        NonNegativeFloat, Field(description="weight in training of the loss that spreads tokens over experts")
    ] = 0.01
    tied_head: Annotated[
        bool, Field(strict=True, description="output head shares the embedding's weights")
    ] = True
    rope_base: Annotated[PositiveFloat, Field(description="base of the rotary frequencies")] = 10_000.0
    norm_eps: Annotated[PositiveFloat, Field(description="epsilon of the norms")] = 1e-5
    init_std: Annotated[
        PositiveFloat, Field(description="std of initial weights; residual outputs / sqrt(2 layers)")
    ] = 0.02
    hf: Annotated[
        str | None,
        Field(description="a Hugging Face causal model instead: a folder with config.json, or a hub name"),
    ] = None
    pretrained: Annotated[
        bool, Field(strict=True, description="hf: start from the checkpoint's weights, not from random ones")
    ] = False
    function: Annotated[
        str | None,
        Field(description="your own model instead: package.module:function or path/to/file.py:function"),
    ] = None
    options: Annotated[
        dict[str, Any],
        Field(description="keyword arguments of the function; fields to change of hf's config"),
    ] = Field(default_factory=dict)

    @property
    def is_built_in(self) -> bool:
        """Whether the fields describe the model; otherwise its own code does."""
        return self.hf is None and self.function is None


@dataclass(frozen=True, kw_only=True, eq=False, config=_CLOSED)
class DataConfig(Section):
    """Where text comes from and how it becomes tokens."""

    source: Annotated[
        Literal["stdlib", "text", "jsonl", "tokens", "hub"],
        Field(
            description="stdlib: the source text of Python's standard library (embedded default); text: "
            "files or folders; jsonl: C4-style .json/.jsonl(.gz) shards; tokens: uint16/uint32 files; "
            "hub: a Hugging Face data set, streamed"
        ),
    ] = "stdlib"
    paths: Annotated[
        list[str],
        Field(description="files, folders or globs, relative to the study file; hub: the data set's name"),
    ] = Field(default_factory=list)
    validation_paths: Annotated[
        list[str], Field(description="validation text of its own; default: documents held out by hash")
    ] = Field(default_factory=list)
    text_field: Annotated[str, Field(description="jsonl and hub: the field that holds the text")] = "text"
    tokenizer: Annotated[
        Literal["bytes", "bpe", "hf"],
        Field(description="bytes; bpe: trained on this corpus; hf: a Hugging Face tokenizer"),
    ] = "bytes"
    tokenizer_path: Annotated[str | None, Field(description="hf: a local path or a hub name")] = None
    vocab_size: Annotated[
        PositiveInt | None,
        Field(description="bpe: size to train; tokens: size of the vocabulary; hf: what its size must be"),
    ] = None
    token_dtype: Annotated[Literal["uint16", "uint32"], Field(description="tokens: element type")] = "uint16"  # noqa: S105  a data type, no password
    max_bytes: Annotated[
        PositiveInt | None, Field(description="read only about this much text (whole documents)")
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, config=_CLOSED)
class TrainingConfig(Section):
    """Budget, batch, optimizer (AdamW), schedule, evaluation and the bounds of divergence."""

    tokens: Annotated[PositiveInt, Field(description="token budget of a run")] = 1_000_000
    seq_len: Annotated[PositiveInt, Field(description="tokens per sequence")] = 128
    batch_size: Annotated[PositiveInt, Field(description="sequences per optimizer step")] = 32
    micro_batch_size: Annotated[
        PositiveInt | None,
        Field(description="sequences per forward pass on a device; default: all of its share of the batch"),
    ] = None
    learning_rate: Annotated[PositiveFloat, Field(description="peak rate")] = 4e-3
    schedule: Annotated[
        Literal["constant", "cosine", "wsd"],
        Field(description="after warm-up: constant, cosine to the end, or warm-up–stable–decay"),
    ] = "constant"
    warmup_tokens: Annotated[NonNegativeInt, Field(description="tokens of linear warm-up")] = 0
    decay_tokens: Annotated[NonNegativeInt, Field(description="wsd: tokens of linear decay at the end")] = 0
    final_lr_ratio: Annotated[
        float, Field(ge=0, le=1, strict=True, description="cosine, wsd: final rate over peak rate")
    ] = 0.1
    weight_decay: Annotated[NonNegativeFloat, Field(description="on matrices only")] = 0.1
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    adam_eps: PositiveFloat = 1e-8
    grad_clip: Annotated[PositiveFloat | None, Field(description="global gradient norm; null: off")] = 1.0
    eval_every_tokens: Annotated[PositiveInt, Field(description="interval between evaluations")] = 50_000
    eval_tokens: Annotated[PositiveInt, Field(description="size of the fixed validation set in tokens")] = (
        65_536
    )
    eval_windows: Annotated[
        Literal["spread", "first"],
        Field(
            description="which sequences of the validation text: spread evenly over it, or the first, as "
            "MLPerf takes them"
        ),
    ] = "spread"
    divergence_loss: Annotated[
        PositiveFloat | None,
        Field(
            description="diverged when the validation loss (nats/token) stays above this; default: 1.5 × "
            "the loss of a uniform guess, ln(vocabulary)"
        ),
    ] = None
    divergence_evals: Annotated[PositiveInt, Field(description="for so many evaluations in a row")] = 3
    master_weights: Annotated[
        Literal["fp32", "bf16"], Field(description="weights and AdamW's moments; computing is in bf16")
    ] = "fp32"
    reduction: Annotated[
        Literal["fp32", "bf16"], Field(description="of gradients between the devices of a run")
    ] = "fp32"
    compile: Annotated[bool, Field(strict=True, description="torch.compile the model's blocks")] = False


@dataclass(frozen=True, kw_only=True, eq=False, config=_CLOSED)
class ResourcesConfig(Section):
    """What Ray reserves for one run. Not part of a run's identity."""

    devices_per_run: Annotated[
        PositiveInt, Field(description="devices that train each run together (FSDP2), one process each")
    ] = 1
    cpus: Annotated[PositiveInt, Field(description="CPU cores (and threads) per device of a run")] = 1
    gpus: Annotated[NonNegativeInt, Field(description="whole GPUs per device of a run")] = 0
    custom: Annotated[
        dict[str, PositiveFloat],
        Field(
            description="resources that the cluster names itself, such as {mi355x: 1}, per device of a run"
        ),
    ] = Field(default_factory=dict)
    activation_checkpointing: Annotated[
        bool,
        Field(strict=True, description="compute the blocks' activations twice to keep less; same result"),
    ] = False
    checkpoint_every_sec: Annotated[
        NonNegativeFloat,
        Field(
            description="seconds between checkpoints, at least; longer where they would take over 2 % of the "
            "time; 0: after every step"
        ),
    ] = 60.0
    checkpoint_every_tokens: Annotated[
        PositiveInt | None,
        Field(description="checkpoints after so many training tokens instead, whatever they cost"),
    ] = None
    hang_after_sec: Annotated[
        PositiveFloat,
        Field(description="a run without progress for so long is given up and tried again"),
    ] = 1800.0
    require_native: Annotated[
        bool, Field(description="refuse to run what the device has no instruction for, instead of emulating")
    ] = False
    allow_failed_self_test: Annotated[
        bool, Field(description="train on although a back end failed its self-test; the record says so")
    ] = False


def _known_backend(name: str) -> str:
    # Looking up entry points reads the disk; built-in names do not need it.
    if name not in ("auto", *BUILT_IN) and name not in backend_names():
        raise PydanticCustomError("backend", "no such back end")
    return name


def _list_backends(schema: dict[str, Any]) -> None:
    schema["enum"] = list(backend_names())


BackendName = Annotated[
    str, AfterValidator(_known_backend), Field(json_schema_extra=_list_backends, strict=True)
]
"""A built-in back end or an entry point's."""


@dataclass(frozen=True, kw_only=True, eq=False, config=_CLOSED)
class ArmConfig(Section):
    """The configuration that the runs of an arm share: everything but the seed that can change a result."""

    model: ModelConfig
    data: DataConfig
    data_digest: Annotated[str, Field(description="hash of the corpus and of how it is split and tokenised")]
    vocab_size: PositiveInt
    training: TrainingConfig
    recipe: Recipe
    backend: BackendName
    trainer: str | None = None
    code_digest: Annotated[
        str | None, Field(description="hash of the model's and trainer's own code, of hf's configuration")
    ] = None

    def with_seed(self, seed: int) -> RunConfig:
        """Return the configuration of the run with this seed."""
        return RunConfig(**{field.name: getattr(self, field.name) for field in fields(self)}, seed=seed)


@dataclass(frozen=True, kw_only=True, eq=False, config=_CLOSED)
class RunConfig(ArmConfig):
    """Everything that can change a run's result, and nothing else; its hash is the run's id."""

    seed: NonNegativeInt


def config_to_json(config: RunConfig) -> dict[str, Any]:
    """Return a run's configuration as plain data for ``config.json``."""
    return asdict(config)


def config_from_json(content: dict[str, Any]) -> RunConfig:
    """Read the output of ``config_to_json``; raises pydantic's ``ValidationError``."""
    config: RunConfig = TypeAdapter(RunConfig).validate_python(content)
    return config
