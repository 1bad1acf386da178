"""TransformerEngine's quantiser factory, against a stand-in for the interface as published (d0067d0da)."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace

import pytest

from ablate.integrations import te
from ablate.recipes import read_recipe

KNOBS = (
    "with_rht", "with_post_rht_amax", "with_2d_quantization", "stochastic_rounding", "row_scaled_nvfp4",
    "nvfp4_use_4over6",
)  # fmt: skip
OF_FOUR_SIX = ("nvfp4_4over6_err_mode", "nvfp4_e4m3_max")
NVFP4 = dict.fromkeys(KNOBS, False)


class Recorded:
    """A quantiser that keeps its keyword arguments, and takes those of the published one alone."""

    takes: tuple[str, ...] = ()

    def __init__(self, **given):
        assert given.keys() <= set(self.takes), given
        self.given = given


def stand_in(name, *takes):
    return type(name, (Recorded,), {"takes": takes})


@pytest.fixture
def factory(monkeypatch):
    tensors = {
        "identity_tensor": stand_in("IdentityQuantizer"),
        "mxfp8_tensor": stand_in("MXFP8Quantizer", "fp8_dtype"),
        "nvfp4_tensor": stand_in(
            "NVFP4Quantizer", "fp4_dtype", *KNOBS, *OF_FOUR_SIX, "with_random_sign_mask"
        ),
        "float8_tensor": stand_in(
            "Float8CurrentScalingQuantizer", "fp8_dtype", "device", "force_pow_2_scales", "amax_epsilon"
        ),
        "hybrid_tensor": stand_in(
            "HybridQuantizer", "rowwise_quantizer", "columnwise_quantizer", "columnwise_source"
        ),
    }
    root = "transformer_engine"
    for name in (root, f"{root}.pytorch", f"{root}.pytorch.tensor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    constants = ModuleType(f"{root}.pytorch.constants")
    constants.DType = SimpleNamespace(kFloat8E4M3="e4m3", kFloat8E5M2="e5m2", kFloat4E2M1="e2m1")
    monkeypatch.setitem(sys.modules, constants.__name__, constants)
    for name, kind in tensors.items():
        module = ModuleType(f"{root}.pytorch.tensor.{name}")
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    te._quantizers.cache_clear()

    def of(recipe, tensor_type, module_type="linear"):
        monkeypatch.setenv("ABLATE_RECIPE", json.dumps(asdict(read_recipe(recipe))))
        te._quantizers.cache_clear()
        return seen(te.quantizer_factory(SimpleNamespace(module_type=module_type, tensor_type=tensor_type)))

    yield of
    te._quantizers.cache_clear()


def seen(quantizer):
    """A quantiser as plain data: its kind and the knobs that are on."""
    kind = type(quantizer).__name__.removesuffix("Quantizer")
    given = quantizer.given
    if kind == "Hybrid":
        return (
            seen(given["rowwise_quantizer"]),
            seen(given["columnwise_quantizer"]),
            given["columnwise_source"],
        )
    on = sorted(name for name in KNOBS if given.get(name))
    if "nvfp4_use_4over6" in on:
        on += [given[name] for name in OF_FOUR_SIX]
    return (kind, *on, *([given["fp8_dtype"]] if "fp8_dtype" in given else []))


FOUR_SIX = {
    "gemms": ["fprop"], "format": "nvfp4", "scale": "four_six_mae", "rest": "bf16-dequantised",
    "fprop": {"x": {"scale": "four_six_mae_row"}},
}  # fmt: skip
RHT = ("with_post_rht_amax", "with_rht")
TABLE = [
    # NVIDIA's own recipe: as TransformerEngine's nvfp4_factory.
    ("nvidia-nvfp4", "weight", ("NVFP4", "with_2d_quantization")),
    ("nvidia-nvfp4", "input", ("NVFP4", *RHT)),
    ("nvidia-nvfp4", "grad_output", ("NVFP4", "stochastic_rounding", *RHT)),
    # As the zoo's mxfp8_fwd_nvfp4_bwd, high_precision_fwd_mxfp8_bwd and mxfp8_fwd_high_precision_bwd.
    ("te-mxfp8-nvfp4", "input", (("MXFP8", "e4m3"), ("NVFP4", *RHT), "original")),
    ("te-mxfp8-nvfp4", "weight", (("MXFP8", "e4m3"), ("NVFP4",), "rowwise_dequantized")),
    ("te-nvfp4-1d", "weight", (("NVFP4",), ("NVFP4",), "rowwise_dequantized")),
    ("te-bf16-mxfp8", "input", (("Identity",), ("MXFP8", "e4m3"), "original")),
    ("te-bf16-mxfp8", "grad_output", ("MXFP8", "e4m3")),
    ("te-mxfp8-bf16", "weight", (("MXFP8", "e4m3"), ("Identity",), "rowwise_dequantized")),
    ("te-mxfp8-bf16", "grad_output", ("Identity",)),
    (
        "te-nvfp4-row-mxfp8", "input",
        (("NVFP4", "row_scaled_nvfp4"), ("MXFP8", "e4m3"), "rowwise_dequantized"),
    ),
    ("te-nvfp4-row", "input", ("NVFP4", "row_scaled_nvfp4")),
    (
        FOUR_SIX, "input",
        (("NVFP4", "nvfp4_use_4over6", "row_scaled_nvfp4", "MAE", 256), ("Identity",), "rowwise_dequantized"),
    ),
    (FOUR_SIX, "weight", (("NVFP4", "nvfp4_use_4over6", "MAE", 256), ("Identity",), "rowwise_dequantized")),
    ({"gemms": ["wgrad"], "format": "nvfp4", "scale": "four_six_448"}, "grad_output",
     (("Identity",), ("NVFP4", "nvfp4_use_4over6", "MSE", 448), "original")),
    # One GEMM alone: rows of x and w for Fprop, columns of x and dy for Wgrad.
    ({"gemms": ["fprop"], "format": "nvfp4"}, "input", (("NVFP4",), ("Identity",), "original")),
    ({"gemms": ["fprop"], "format": "nvfp4"}, "grad_output", ("Identity",)),
    ({"gemms": ["wgrad"], "format": "nvfp4"}, "input", (("Identity",), ("NVFP4",), "original")),
    ({"gemms": ["wgrad"], "format": "nvfp4"}, "weight", ("Identity",)),
    ({"gemms": ["dgrad"], "format": "nvfp4"}, "weight", (("Identity",), ("NVFP4",), "original")),
    (
        {"gemms": ["wgrad"], "format": "nvfp4", "rest": "fp8"}, "grad_output",
        (("Float8CurrentScaling", "e5m2"), ("NVFP4",), "original"),
    ),
    ({"gemms": ["wgrad"], "format": "nvfp4", "rest": "fp8"}, "weight", ("Float8CurrentScaling", "e4m3")),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "tensor_type", "expected"), TABLE, ids=range(len(TABLE)))
def test_quantisers_of_a_linear_layer(factory, recipe, tensor_type, expected):
    assert factory(recipe, tensor_type) == expected
    assert factory(recipe, tensor_type, "grouped_linear") == expected


def test_what_is_no_linear_layers_stays_high(factory):
    assert factory("nvidia-nvfp4", "qkv", "dpa") == ("Identity",)
    assert seen(te.quantizer_factory(None)) == ("Identity",)


def test_without_a_study_there_is_no_recipe(factory, monkeypatch):
    monkeypatch.delenv("ABLATE_RECIPE", raising=False)
    with pytest.raises(ValueError, match="ABLATE_RECIPE is not set"):
        te.quantizer_factory(SimpleNamespace(module_type="linear", tensor_type="input"))
