"""Counter-based random words: Philox4x32-7 (Salmon et al., SC 2011), the same bits on every device.

The words of a tensor depend on a key (seed, layer, GEMM, operand), on the step and call, and on the
element's row and column, never on thread count, memory layout or the order of evaluation. For a stored
tensor seen as [rows, columns], the element (r, c) reads word ``c // 32 % 2 * 2 + c % 2`` of

    philox(counter=(c // 64 * 16 + c % 32 // 2, r, step, call), key)

so that 64 neighbours in a row take 16 calls: whole vector registers on a CPU that splits two bf16 in a word
into even and odd columns. Seven rounds are the minimum that passes BigCrush (table 2 of the paper).
torch has no unsigned 32-bit multiply that keeps the high word, hence int64 arithmetic with masks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_M0 = 0xD2511F53
_M1 = 0xCD9E8D57
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class Key:
    """The purpose of a random draw. Two draws share bits only if every field agrees."""

    seed: int
    layer: str
    gemm: str
    operand: str
    step: int
    call: int = 0

    def words(self) -> tuple[int, int]:
        """Hash seed, layer, GEMM and operand to the 64-bit Philox key: two 32-bit words."""
        return _key_words(self.seed, self.layer, self.gemm, self.operand)


@lru_cache(maxsize=65_536)
def _key_words(*parts: object) -> tuple[int, int]:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox4x32(
    counter: tuple[Tensor, ...], key: tuple[int, int], rounds: int = ROUNDS
) -> tuple[Tensor, ...]:
    """Return four int64 tensors of 32-bit words for a counter of four int64 tensors (broadcastable)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The int64 product may wrap to negative; masks and the masked shift recover both halves exactly.
        p0 = c0 * _M0
        p1 = c2 * _M1
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c1 = p1 & _MASK
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c3 = p0 & _MASK
        k0 = (k0 + _W0) & _MASK
        k1 = (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def random_words(
    rows: int, columns: int, key: Key, device: torch.device | str = "cpu"
) -> Tensor:
    """Draw a word for each element of a stored tensor: int64 in [0, 2^32), [rows, columns]."""
    strips = -(-columns // 64)
    calls = torch.arange(strips * 16, dtype=torch.int64, device=device)
    row = torch.arange(rows, dtype=torch.int64, device=device)[:, None]
    step = torch.tensor(key.step & _MASK, dtype=torch.int64, device=device)
    call = torch.tensor(key.call & _MASK, dtype=torch.int64, device=device)
    counter = (calls.expand(rows, -1), row.expand(-1, strips * 16), step, call)
    words = torch.stack(philox4x32(counter, key.words()))  # [4, rows, strips * 16]
    words = (
        words.view(2, 2, rows, strips, 16)
        .permute(2, 3, 0, 4, 1)
        .reshape(rows, strips * 64)
    )
    return words[:, :columns]
