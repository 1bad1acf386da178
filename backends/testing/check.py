"""What a check is, how it ends, and the smallest tensors that show its fault: halves, while it fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

Cut = tuple[int, tuple[tuple[int, int], ...]]
"""A dimension to cut: pieces are multiples of so many elements, of these (tensor, axis) together."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """A fact or a measurement, which cannot fail: a line, and figures whose names end with their units."""

    detail: str
    figures: dict[str, float] = field(default_factory=dict)


class Skip(Exception):  # noqa: N818  no error
    """Raised by a check that cannot run here; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise of a back end, or a fact of the device where ``backend`` is empty.

    ``kind`` is what is promised, ``of`` the policy, format or size for which it is. ``run`` returns a line
    for a promise that is kept, or what it measured. It raises ``AssertionError`` for a broken promise and
    ``Skip`` for what cannot be tested here; any other exception counts as a failure.
    """

    backend: str = ""
    kind: str = ""
    of: str
    run: Callable[[], str | Told]

    @property
    def name(self) -> str:
        """Kind and subject."""
        return f"{self.kind}: {self.of}" if self.kind else self.of

    def outcome(self) -> tuple[dict[str, Any], Exception | None]:
        """Run; return result, detail and figures by name, and the error that it ended with."""
        try:
            found = self.run()
        except Skip as reason:
            return {"result": "skipped", "detail": str(reason)}, None
        except AssertionError as fault:
            return {"result": "failed", "detail": str(fault) or "assertion without a message"}, fault
        except Exception as fault:  # errors of drivers and compilers are what is looked for
            return {"result": "failed", "detail": in_short(fault)}, fault
        if isinstance(found, Told):
            return {"result": "told", "detail": found.detail, "figures": found.figures}, None
        return {"result": "passed", "detail": found}, None


def in_short(error: Exception) -> str:
    """Return an error's type and its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


class FaultError(AssertionError):
    """A broken promise with the tensors that show it.

    ``tensors`` by name, on the CPU. ``facts``: how they were used, as plain data.
    """

    def __init__(self, what: str, tensors: Mapping[str, Tensor], **facts: Any) -> None:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        super().__init__(f"{what} (shown by {shapes})")
        self.tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        self.facts = facts


def smallest(
    tensors: Sequence[Tensor], cuts: Sequence[Cut], faulty: Callable[..., bool]
) -> tuple[Tensor, ...]:
    """Cut tensors in halves along each dimension until neither half shows the fault.

    Tensors that do not show it are returned as they are. A piece on which ``faulty`` raises is not taken.
    """
    found = tuple(tensors)
    if not _shows(faulty, found):
        return found
    while True:
        for cut in cuts:
            half = next((piece for piece in _halves(found, cut) if _shows(faulty, piece)), None)
            if half is not None:
                found = half
                break
        else:
            return found


def _shows(faulty: Callable[..., bool], tensors: tuple[Tensor, ...]) -> bool:
    try:
        return faulty(*tensors)
    except Exception:  # a shape that the operation does not take, say
        return False


def _halves(tensors: tuple[Tensor, ...], cut: Cut) -> list[tuple[Tensor, ...]]:
    """Return the first and the second half of a dimension; none where it has a single piece."""
    grain, places = cut
    which, axis = places[0]
    size = tensors[which].shape[axis]
    middle = (size // grain + 1) // 2 * grain
    if middle >= size:
        return []
    axes = dict(places)
    return [
        tuple(
            tensor.narrow(axes[index], start, length) if index in axes else tensor
            for index, tensor in enumerate(tensors)
        )
        for start, length in ((0, middle), (middle, size - middle))
    ]
