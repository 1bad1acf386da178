"""The input of ``ablate diagnose``: a model with its weights, text as tokens, and a recipe.

How it fails: ``UserError`` for missing or unsuitable input, with the option that would help.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from ablate.base.command_hints import command_line, set_words
from ablate.base.errors import UserError, first_line, likely
from ablate.base.files import parse_json
from ablate.base.user_functions import is_file
from ablate.data import hub, open_tokens, prepare
from ablate.data.batches import batch, sequence_starts
from ablate.data.documents import file_documents
from ablate.data.identity import BYTES_VOCABULARY
from ablate.data.sources import JSON_SUFFIXES, TOKEN_SUFFIXES, corpus_files
from ablate.data.tokenise import encode_bytes, open_json
from ablate.recipes import (
    SHORT_RECIPES,
    Recipe,
    RecipeSpec,
    SenselessRecipe,
    read_recipe,
    resolve,
)
from ablate.run.architecture import PRESETS
from ablate.run.config import (
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    config_from_json,
)
from ablate.run.schedule import plan_steps
from ablate.store import RunDir
from ablate.store.checkpoints import Snapshot, StoredTensor, load_newest
from ablate.study.faults import Faults
from ablate.study.source import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from ablate.train.step import Trainee

_SEQ_LEN = 512


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is diagnosed: a run's configuration (or one made for a model without a run), and the weights.

    ``weights`` says in words where they come from. ``tensors``: a run's weights, with ``model.`` before
    each name; empty if the model is built with its weights. ``prepared``: the token cache with the run's own
    text; None if text is read directly. ``run``: the run's configuration as it trained; ``reached``: its
    validation loss after four fifths of its evaluations, in nats per token.
    """

    config: RunConfig
    weights: str
    tensors: Mapping[str, Tensor | StoredTensor] = field(default_factory=dict)
    prepared: Path | None = None
    trained_tokens: int = 0
    run: RunConfig | None = None
    reached: float | None = None


def find_subject(
    model: str,
    *,
    options: str | None,
    data: str | None,
    recipe: str | None,
    seq_len: int | None,
    sequences: int,
    seed: int,
) -> Subject:
    """Find the subject that the command line describes."""
    folder = Path(model).expanduser()
    model_options = _mapping_of(options or "{}")
    if (folder / "config.json").is_file() and (folder / "attempts").is_dir():
        if model_options:
            raise UserError(
                f"--options: {model} is a run, whose configuration has them (leave them out)"
            )
        return _of_run(
            folder, data=data, recipe=recipe, seq_len=seq_len, sequences=sequences
        )
    chosen, weights = _model(model, folder, seed)
    if model_options and chosen.is_built_in:
        raise UserError(
            f"--options: the preset {model} takes none (a function or a Hugging Face model does)"
        )
    chosen = replace(chosen, options=model_options)
    corpus = _data(data, chosen.hf if chosen.pretrained else None)
    config = RunConfig(
        model=chosen,
        data=corpus,
        data_digest="",
        vocab_size=_vocabulary(corpus),
        recipe=recipe_of(recipe or "mxfp4"),
        backend="auto",
        seed=seed,
        training=TrainingConfig(
            seq_len=seq_len or min(_SEQ_LEN, _positions(chosen)),
            batch_size=sequences,
            tokens=10**9,
        ),
    )
    return Subject(config=config, weights=weights)


def _mapping_of(text: str) -> dict[str, Any]:
    if not text.strip().startswith("{"):
        raise UserError(
            f"--options: expected a mapping in braces, as {{width: 512}}, got '{text}'"
        )
    source = parse(text.encode(), "--options")
    if source.problems:
        raise UserError(*source.problems.values())
    options: dict[str, Any] = source.data
    return options


def recipe_of(text: str, *, option: str = "--recipe") -> Recipe:
    """Read the text of an option as a recipe; faults of a mapping are reported as those of a study file."""
    text = text.strip()
    if text in SHORT_RECIPES:
        return read_recipe(text)
    if not text.startswith("{"):
        otherwise = (
            "`ablate recipes` lists them; or a mapping in braces, as {gemms: [wgrad]}"
        )
        raise UserError(
            f"{option}: unknown recipe '{text}' ({likely(text, SHORT_RECIPES, otherwise)})"
        )
    source = parse(text.encode(), option)
    faults = Faults(source)
    try:
        recipe = resolve(TypeAdapter(RecipeSpec).validate_python(source.data))
    except ValidationError as error:
        faults.add_validation(error, RecipeSpec)
    except SenselessRecipe as error:
        faults.add(source.nearest(error.path), str(error), error.hint)
    if faults:
        raise UserError(
            *(replace(fault, line=None, column=None) for fault in faults.problems())
        )
    return recipe


def tokens_of(subject: Subject) -> NDArray[np.int64]:
    """Read the tokens [sequences, seq_len + 1] to diagnose.

    A run's own text gives those of its first step; other text is read from its beginning, as far as needed.
    """
    config = subject.config
    sequences = config.training.batch_size
    seq_len = config.training.seq_len
    if subject.prepared is not None:
        train, _ = open_tokens(prepare(config.data, subject.prepared))
        starts = sequence_starts(config.seed, 0, sequences, seq_len, len(train))
        return batch(train, starts, seq_len)
    data = config.data
    encode: Any = encode_bytes
    if data.tokenizer_path is not None:
        encode = open_json(hub.find_tokenizer(data.tokenizer_path)).encode
    text_field = data.text_field if data.source == "jsonl" else None
    tokens = np.zeros(0, dtype=np.int64)
    for file in corpus_files(data.source, data.paths):
        for document in file_documents(file, text_field):
            tokens = np.append(tokens, encode([document.encode()]).astype(np.int64))
            if len(tokens) > sequences * seq_len:
                return batch(tokens, np.arange(sequences) * seq_len, seq_len)
    message = f"{len(tokens):,} tokens, but {sequences} sequences of {seq_len} need one more than that"
    raise UserError(
        f"--data: {message} (lower --seq-len or --sequences, or name more text)"
    )


def load_weights(trainee: Trainee, found: Mapping[str, Tensor | StoredTensor]) -> None:
    """Put a run's weights into the model; past magnitudes of another recipe's scales are left out.

    Raises:
        ValueError: they belong to another model.
    """
    from ablate.train.snapshot import restore_model

    tensors: dict[str, Any] = {}
    for name, buffer in trainee.module.named_buffers():
        if "amax_" in name:
            tensors[f"model.{name}"] = buffer
    for name, tensor in found.items():
        if name in tensors or "amax_" not in name:
            tensors[name] = tensor
    restore_model(Snapshot(step=0, tensors=tensors, numbers={}), trainee.module)


def _of_run(
    folder: Path,
    *,
    data: str | None,
    recipe: str | None,
    seq_len: int | None,
    sequences: int,
) -> Subject:
    run = RunDir(folder)
    try:
        trained = config_from_json(run.config())
    except (OSError, ValueError, ValidationError) as error:
        raise UserError(
            f"{folder / 'config.json'}: is no run's: {first_line(error)}"
        ) from None
    subject = _with_weights(run, trained)
    config = subject.config
    prepared: Path | None = folder.absolute().parents[2] / "tokens"
    if data is not None:
        config = replace(config, data=_other_text(data, trained))
        prepared = None
    length = min(seq_len or config.training.seq_len, config.training.seq_len)
    training = replace(
        config.training, seq_len=length, batch_size=sequences, micro_batch_size=None
    )
    if recipe:
        config = replace(config, recipe=recipe_of(recipe))
    losses = [row["val_loss"] for row in run.metrics("eval")]
    return replace(
        subject,
        config=replace(config, training=training),
        prepared=prepared,
        reached=losses[len(losses) * 4 // 5] if losses else None,
    )


def _with_weights(run: RunDir, config: RunConfig) -> Subject:
    """Make the subject of a run's newest checkpoint, else of the weights at its end."""
    plan = plan_steps(config.training)
    checkpoint, passed_over = load_newest(run.checkpoints)
    if checkpoint is not None:
        return Subject(
            config=config,
            weights=f"the checkpoint after step {checkpoint.step:,}",
            tensors=checkpoint.tensors,
            trained_tokens=checkpoint.step * plan.tokens_per_step,
            run=config,
        )
    if not run.weights.is_dir():
        settings = set_words(["keep_weights=true", "name=ANOTHER"])
        storage = run.path.absolute().parents[2]
        again = command_line("run", "STUDY", *settings, storage=storage)
        why = [*passed_over, f"train it again with: {again}"][0]
        raise UserError(f"{run.path}: no weights were kept ({why})")
    at_end = Subject(
        config=config,
        weights="the weights at its end",
        trained_tokens=plan.tokens,
        run=config,
    )
    if config.model.hf is None:
        return replace(at_end, tensors=_weights_at_end(run, config))
    folder = str(run.weights.absolute())
    model = replace(config.model, hf=folder, pretrained=True, options={})
    return replace(at_end, config=replace(config, model=model))


def _weights_at_end(run: RunDir, config: RunConfig) -> dict[str, Any]:
    from ablate.train.snapshot import load_weights as load_kept

    try:
        weights = load_kept(config, run.weights)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{run.weights}: cannot be read: {first_line(error)}") from None
    return {f"model.{name}": tensor for name, tensor in weights.items()}


def _other_text(data: str, trained: RunConfig) -> DataConfig:
    """Read what ``--data`` names with the tokenizer of the run."""
    if trained.data.tokenizer == "bpe":
        raise UserError(
            "--data: the run's tokenizer was trained on its own text (leave --data out)"
        )
    corpus = _data(data, trained.data.tokenizer_path)
    size = _vocabulary(corpus)
    if size != trained.vocab_size:
        message = f"--data: {size:,} kinds of tokens, but the run's model knows {trained.vocab_size:,}"
        raise UserError(f"{message} (leave --data out to take the run's own text)")
    return corpus


def _model(model: str, folder: Path, seed: int) -> tuple[ModelConfig, str]:
    """Find a model without a run, and say in words where its weights come from."""
    random = f"random initial weights of seed {seed}"
    path = str(folder.absolute())
    if model in PRESETS:
        return ModelConfig(**PRESETS[model]), random
    if ":" in model:
        return ModelConfig(function=path if is_file(model) else model), random
    if not folder.is_dir():
        if hint := likely(model, PRESETS, "", cutoff=0.75):
            raise UserError(f"no model '{model}' ({hint})")
        return ModelConfig(hf=model, pretrained=True), "the published checkpoint"
    if not (folder / "config.json").is_file():
        hint = (
            "expected a run's folder (…/runs/<id>) or one as save_pretrained writes it"
        )
        raise UserError(f"{model}: no model there ({hint})")
    if not any(folder.glob("*.safetensors")):
        return ModelConfig(hf=path), random
    return ModelConfig(hf=path, pretrained=True), "the checkpoint in the folder"


def _positions(model: ModelConfig) -> int:
    """Read the number of positions of a Hugging Face model; ``_SEQ_LEN`` if unknown, and for other models."""
    if model.hf is None:
        return _SEQ_LEN
    path = hub.config_folder(model.hf, weights=model.pretrained) / "config.json"
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    for key in ("max_position_embeddings", "n_positions"):
        count = content.get(key)
        if isinstance(count, int) and count > 0:
            return count
    return _SEQ_LEN


def _data(data: str | None, tokenizer: str | None) -> DataConfig:
    """Choose the text to take tokens from; by default Python's standard library."""
    words: dict[str, Any] = {}
    if tokenizer is not None:
        words = {"tokenizer": "hf", "tokenizer_path": tokenizer}
    if data is None:
        return DataConfig(source="stdlib", **words)
    if data.endswith(TOKEN_SUFFIXES):
        hint = "name text: a file or folder of .txt, .py, .jsonl …"
        raise UserError(f"--data: {data} holds tokens of no known vocabulary ({hint})")
    path = Path(data).expanduser()
    if not path.exists():
        raise UserError(f"--data: no such file or folder {data}")
    words["source"] = "jsonl" if data.endswith(JSON_SUFFIXES) else "text"
    return DataConfig(paths=[str(path.absolute())], **words)


def _vocabulary(data: DataConfig) -> int:
    if data.tokenizer_path is None:
        return BYTES_VOCABULARY
    return hub.find_tokenizer(data.tokenizer_path).vocab_size
