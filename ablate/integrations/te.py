"""A quantiser factory for TransformerEngine, which follows the recipe in ``$ABLATE_RECIPE``.

Megatron-LM takes it by ``--fp4-quantizer-factory ablate.integrations.te.quantizer_factory`` with
``--fp4-recipe custom``; other trainers by ``CustomRecipe(qfactory=quantizer_factory)``. Any subset of the
three GEMMs may be in NVFP4, MXFP8, FP8 or BF16. Not run on a device: the tests run it against a stand-in for
TransformerEngine's interface as of d0067d0da (August 2026).

How it fails: a missing variable or a recipe that TransformerEngine cannot express is a ``ValueError``.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from ablate.integrations import applied_line, recipe_of_environment
from ablate.recipes.stacks import Quantizer, Quantizers, te_quantizers


@functools.cache
def _quantizers() -> dict[str, Quantizers]:
    recipe = recipe_of_environment()
    quantizers = te_quantizers(recipe)
    # a layer asks: its trainer has turned the quantisation on
    print(applied_line(recipe), flush=True)
    return quantizers


def quantizer_factory(role: Any) -> Any:
    """Return the quantiser of one tensor; what is no linear layer's stays in high precision.

    ``role``: TransformerEngine's ``QuantizerRole``, or None.
    """
    is_linear = role is not None and role.module_type in ("linear", "grouped_linear")
    both = _quantizers().get(role.tensor_type) if is_linear else None
    if both is None:
        return _build(Quantizer())
    rows = both.rows
    columns = both.columns
    if not both.from_rows and replace(rows, rht=columns.rht) == columns:
        # RHT is of the columns alone in TransformerEngine's own quantiser, too
        return _build(columns)
    from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

    return HybridQuantizer(
        rowwise_quantizer=_build(rows),
        columnwise_quantizer=_build(columns),
        columnwise_source="rowwise_dequantized" if both.from_rows else "original",
    )


def _build(quantizer: Quantizer) -> Any:
    from transformer_engine.pytorch.constants import DType

    if quantizer.kind == "bf16":
        from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

        return IdentityQuantizer()
    if quantizer.kind == "mxfp8":
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

        return MXFP8Quantizer(fp8_dtype=DType.kFloat8E4M3)
    if quantizer.kind == "nvfp4":
        from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

        measure, largest = quantizer.four_six or ("MAE", 448)
        return NVFP4Quantizer(
            fp4_dtype=DType.kFloat4E2M1,
            with_rht=quantizer.rht,
            with_post_rht_amax=quantizer.rht,
            with_2d_quantization=quantizer.two_dimensional,
            stochastic_rounding=quantizer.stochastic,
            row_scaled_nvfp4=quantizer.row_scaled,
            nvfp4_use_4over6=quantizer.four_six is not None,
            nvfp4_e4m3_max=largest,
            nvfp4_4over6_err_mode=measure,
            with_random_sign_mask=True,
        )
    import torch
    from transformer_engine.pytorch.tensor.float8_tensor import (
        Float8CurrentScalingQuantizer,
    )

    dtype = DType.kFloat8E5M2 if quantizer.kind == "fp8_e5m2" else DType.kFloat8E4M3
    return Float8CurrentScalingQuantizer(
        fp8_dtype=dtype,
        device=torch.device("cuda"),
        force_pow_2_scales=False,
        amax_epsilon=0.0,
    )
