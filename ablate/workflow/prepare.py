"""Prepares what training needs: devices, the CPU quantiser and token files.

Everything that can be refused is refused here, with a ``UserError``, before the first run starts.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ablate.data import TokenFiles
    from ablate.plan import PlannedArm
    from ablate.workflow import Listener


def prepare(
    storage: Path, arms: Sequence[PlannedArm], chosen: Sequence[PlannedArm], listener: Listener, *, here: bool
) -> dict[str, TokenFiles]:
    """Make ready what the arms need, ``chosen`` being those that will train.

    ``here``: they train on this machine, whose devices are checked; a cluster's workers check theirs.
    Returns token files by the digest of their data. Where the CPU quantiser has to be compiled, that goes on
    beside what follows; a worker that needs it waits for it.

    Raises:
        UserError: a device that cannot do what an arm asks for, or a corpus that cannot be used or is too
            short.
    """
    if here:
        _check_devices(arms)
    if any(not arm.resources.gpus and arm.recipe != "bf16" for arm in arms):
        _prepare_quantiser(listener)
    corpora = _prepare_tokens(storage, chosen, listener)
    _check_tokens(corpora, chosen, listener)
    return corpora


def _prepare_quantiser(listener: Listener) -> None:
    from ablate.backends.cpu_build import folder, loaded, will_build

    def load() -> None:
        kernel, reason = loaded()
        if kernel is None:
            listener.say(f"Emulating with plain torch, several times slower: {reason}.")

    where, why_there = folder()
    if why_there:
        listener.say(f"The CPU quantiser is compiled into {where}: {why_there}.")
    if will_build():
        listener.say("Compiling the CPU quantiser, once for this machine: 10 to 40 s …")
        threading.Thread(target=load, daemon=True).start()  # who stops the command does not wait for it
    else:
        load()


def _check_devices(arms: Sequence[PlannedArm]) -> None:
    from ablate.backends.select import UnfitDeviceError, fit_choices

    problems = []
    for arm in arms:
        try:
            fit_choices(arm.config, arm.resources, "cuda" if arm.resources.gpus else "cpu")
        except UnfitDeviceError as error:
            problems.append(f"arm '{arm.name}': {error}")
    if problems:
        raise UserError(*problems)


def _prepare_tokens(storage: Path, arms: Sequence[PlannedArm], listener: Listener) -> dict[str, TokenFiles]:
    """Make the token files of each corpus, once for all studies of the storage."""
    from ablate.data import prepare

    corpora: dict[str, TokenFiles] = {}
    with listener.preparing() as show:
        for arm in arms:
            digest = arm.config.data_digest
            if digest in corpora:
                continue
            progress = partial(show, digest)
            files = prepare(arm.config.data, storage / "tokens", progress=progress, notice=listener.say)
            corpora[digest] = files
            listener.say(
                f"Corpus {arm.config.data.source}: {files.train_tokens:,} training and "
                f"{files.validation_tokens:,} validation tokens ({files.tokenizer})."
            )
    return corpora


def _check_tokens(corpora: Mapping[str, TokenFiles], arms: Sequence[PlannedArm], listener: Listener) -> None:
    """Refuse a corpus with too little text, and say how often a run repeats one."""
    from ablate.data.prepare import tokens_of_a_pass

    repeated: dict[str, None] = {}
    for arm in arms:
        files, training = corpora[arm.config.data_digest], arm.config.training
        epoch = tokens_of_a_pass(files, training)
        times = f"{training.tokens / epoch:,.1f}"
        if training.tokens > epoch and times != "1.0":
            there = f"its {files.train_tokens:,} training tokens"
            repeated[f"A run of {training.tokens:,} tokens sees {there} {times} times."] = None
    for sentence in repeated:
        listener.say(sentence)
