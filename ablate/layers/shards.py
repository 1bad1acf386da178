"""Tensors of which each process holds some rows, as FSDP2 shares them out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether other processes hold the rest of a tensor."""
    return hasattr(tensor, "to_local")  # a DTensor; importing its module takes half a second


def local_rows(tensor: Tensor) -> tuple[Tensor, slice]:
    """Return this process's part of a tensor, and the rows of the whole tensor that it covers.

    FSDP2 splits the first dimension like ``torch.chunk``.
    """
    if not is_sharded(tensor):
        return tensor, slice(None)
    whole: Any = tensor
    (placement,) = whole.placements
    assert placement.is_shard(0)
    rows, size = whole.shape[0], whole.device_mesh.size()
    chunk = -(-rows // size)
    start = min(chunk * whole.device_mesh.get_local_rank(), rows)
    local: Tensor = whole.to_local()
    assert local.shape[0] == min(start + chunk, rows) - start
    return local, slice(start, start + local.shape[0])
