"""Published recipes by name, each with its source, what the source states, and our assumptions.

``ablate recipes`` lists them, ``ablate recipes show NAME`` prints all six operands. The table of
docs/numerics.md is generated from them; the page says what a name that ends in ``-code`` means, and what is
left out.
"""

from __future__ import annotations

from ablate.recipes.presets import amd, formats, mixed, mxfp4, nvfp4
from ablate.recipes.presets.preset import Preset

__all__ = ["PRESETS", "Preset"]

_LISTED = [
    *amd.ladder(),
    amd.rocm_te_sr(),
    *mxfp4.tseng(),
    *nvfp4.nvidia(),
    *mixed.transformer_engine(),
    *amd.primus(),
    *amd.alto(),
    amd.mfu(),
    *mxfp4.quartet(),
    *nvfp4.quartet2(),
    *nvfp4.all_the_way(),
    mxfp4.tetrajet(),
    nvfp4.tetrajet2(),
    *nvfp4.four_over_six(),
    *formats.llm_fp4(),
    *formats.eight_bit(),
]
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _LISTED}
