"""Models by name: published shapes of the Llama and GPT families, for ``model: {preset: …}``.

The vocabulary comes from the tokenizer and is no part of a preset. Llama 3.1's rescaling of the rotary
frequencies beyond 8,192 positions is left out, because no study trains on sequences that long.

Sources: Touvron et al. 2302.13971 and 2307.09288 (Llama, Llama 2), Dubey et al. 2407.21783 (Llama 3), Jiang
et al. 2401.04088 (Mixtral), and the configurations published with the weights. For GPT: layers and widths
of Tseng et al. 2502.20586, heads of GPT-2 medium (64 wide) and of Brown et al. 2005.14165 (128 wide).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal


def _llama(width: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    shape = {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return _WHOLE | shape | {"tied_head": False, "rope_base": 500_000.0} | more


def _gpt(width: int, layers: int, heads: int) -> dict[str, Any]:
    shape = {"width": width, "layers": layers, "heads": heads, "kv_heads": None, "ffn": 4 * width}
    return _WHOLE | shape | {"architecture": "gpt", "tied_head": True, "rope_base": 10_000.0}


# A preset replaces all inherited fields, so every preset sets each field in which presets differ.
_WHOLE: dict[str, Any] = {"architecture": "llama", "experts": None, "norm_eps": 1e-5}


PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": _llama(256, 4, 4, 4, 704, tied_head=True, rope_base=10_000.0),
    "llama2-7b": _llama(4096, 32, 32, 32, 11_008, rope_base=10_000.0),
    "llama3.1-8b": _llama(4096, 32, 32, 8, 14_336),
    "llama3.1-70b": _llama(8192, 80, 64, 8, 28_672),
    "llama3.2-1b": _llama(2048, 16, 32, 8, 8192, tied_head=True),
    "llama3.2-3b": _llama(3072, 28, 24, 8, 8192, tied_head=True),
    "moe-tiny": _llama(256, 4, 4, 4, 352, tied_head=True, rope_base=10_000.0, experts=4),
    "mixtral-8x7b": _llama(4096, 32, 32, 8, 14_336, rope_base=1_000_000.0, experts=8),
    "gpt-tiny": _gpt(256, 4, 4),
    "gpt-345m": _gpt(1024, 24, 16),
    "gpt-1.3b": _gpt(2048, 24, 16),
    "gpt-6.7b": _gpt(4096, 32, 32),
}
"""Fields of ``ModelConfig`` by preset name."""
if TYPE_CHECKING:
    Preset = str
else:  # from the dict itself, so that the schema and the hints always agree
    Preset = Literal[tuple(PRESETS)]
