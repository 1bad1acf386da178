"""What a user is told of the mirror to MLflow once it has stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ablate.track.cursor import MirrorReport
    from ablate.workflow.listener import Listener


def say_mirror(left: MirrorReport, uri: str, name: str, listener: Listener) -> None:
    """Say how to open MLflow's pages of a study, and what they lack. ``name``: as a shell takes it."""
    from ablate.track.uri import redact

    if not left.complete:
        why = left.problem or f"{len(left.unsent)} runs not sent"
        listener.say(f"MLflow:  not up to date at {redact(uri)}: {why}")
    listener.say(f"MLflow:  ablate dashboard {name}")
