"""Prepares what training needs: devices, the CPU quantiser and token files.

Everything that can be refused is refused here, with a ``UserError``, before the first run starts.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.run.command import Command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.data import TokenFiles
    from ablate.plan import PlannedArm
    from ablate.workflow import Listener, Where


def prepare(
    where: Where,
    arms: Sequence[PlannedArm],
    chosen: Sequence[PlannedArm],
    listener: Listener,
) -> dict[str, TokenFiles]:
    """Prepare what the arms need; return token files by the digest of their data.

    ``chosen``: the arms that will train. Where they train on this machine, its devices are checked; a
    cluster's workers check theirs. If the CPU quantiser must be compiled, that happens in the background; a
    worker that needs it waits for it.

    Raises:
        UserError: a device that cannot do what an arm asks for, or a corpus that cannot be used or is too
            short.
    """
    if where.address is None:
        _check_device(arms)
    if any(not arm.resources.num_gpus and arm.recipe != "bf16" for arm in arms):
        _load_cpu_quantiser(listener)
    return _prepare_tokens(where, chosen, listener)


def _check_device(arms: Sequence[PlannedArm]) -> None:
    from ablate.backends.select import UnfitDeviceError, fit_choices

    problems = []
    for arm in arms:
        try:
            fit_choices(
                arm.config, arm.resources, "cuda" if arm.resources.num_gpus else "cpu"
            )
        except UnfitDeviceError as error:
            problems.append(f"arm '{arm.name}': {error}")
    if problems:
        raise UserError(*problems)


def _load_cpu_quantiser(listener: Listener) -> None:
    from ablate.backends.cpu_build import folder, loaded, will_build

    def load() -> None:
        kernel, reason = loaded()
        if kernel is None:
            listener.say(f"Emulating in plain torch: {reason}.")

    path, why_not_usual = folder()
    if why_not_usual:
        listener.say(f"The CPU quantiser is compiled into {path}: {why_not_usual}.")
    if will_build():
        listener.say("Compiling the CPU quantiser, once for this machine: 10 to 90 s …")
        # Ctrl-C does not wait for it
        threading.Thread(target=load, daemon=True).start()
    else:
        load()


def _prepare_tokens(
    where: Where, arms: Sequence[PlannedArm], listener: Listener
) -> dict[str, TokenFiles]:
    from ablate.data.prepare import prepare as prepare_tokens
    from ablate.data.prepare import tokens_of_a_pass

    corpora: dict[str, TokenFiles] = {}
    repeats: dict[str, None] = {}  # sentences, each once
    with listener.preparing() as show:
        for arm in arms:
            config = arm.config
            if isinstance(config.trainer, Command):  # it reads its own
                continue
            if config.data_digest not in corpora:
                progress = partial(show, config.data_digest)
                files = prepare_tokens(
                    config.data,
                    where.storage / "tokens",
                    progress=progress,
                    notice=listener.say,
                )
                corpora[config.data_digest] = files
                listener.say(
                    f"Corpus {config.data.source}: {files.train_tokens:,} training and "
                    f"{files.validation_tokens:,} validation tokens ({files.tokenizer})."
                )
            files = corpora[config.data_digest]
            times = config.training.tokens / tokens_of_a_pass(files, config.training)
            if times >= 1.05:
                repeats[
                    f"A run of {config.training.tokens:,} tokens sees its {files.train_tokens:,} training "
                    f"tokens {times:,.1f} times."
                ] = None
    for sentence in repeats:
        listener.say(sentence)
    return corpora
