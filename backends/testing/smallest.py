"""The smallest tensors that still show a fault: halves of rows and columns, while the check fails on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

Cut = tuple[int, tuple[tuple[int, int], ...]]
"""A dimension to cut: pieces are multiples of so many elements, of these (tensor, axis) together."""


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
