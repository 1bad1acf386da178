"""Published recipes by name, each with its source, what the source states, and our assumptions.

``ablate recipes`` lists them, ``ablate recipes show NAME`` prints all six operands, and docs/recipes.md is
generated from them. Where published code differs from its paper, the preset follows the paper and a variant
whose name ends in ``-code`` follows the code. AdaHOP (2604.02525) is left out: it chooses a rotation for each
pair of operands from a calibration run, and a fixed policy cannot express that.
"""

from __future__ import annotations

from ablate.recipes.presets import amd, formats, mxfp4, nvfp4
from ablate.recipes.presets.preset import Preset

__all__ = ["PRESETS", "Preset"]

_LISTED = [
    *amd.ladder(),
    amd.rocm_te_sr(),
    *mxfp4.tseng(),
    *nvfp4.nvidia(),
    *amd.code_bases(),
    *mxfp4.quartet(),
    nvfp4.quartet2(),
    *nvfp4.all_the_way(),
    mxfp4.tetrajet(),
    nvfp4.four_over_six(),
    *formats.llm_fp4(),
    *formats.eight_bit(),
]
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _LISTED}
