"""TransformerEngine's quantiser factory, against a stand-in for the interface as published (d0067d0da)."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from ablate.integrations import applied_line, te
from ablate.recipes import read_recipe

KNOBS = (
    "with_rht", "with_post_rht_amax", "with_2d_quantization", "stochastic_rounding", "row_scaled_nvfp4",
    "nvfp4_use_4over6",
)  # fmt: skip
OF_FOUR_SIX = ("nvfp4_4over6_err_mode", "nvfp4_e4m3_max")
EXPECTED = yaml.safe_load(Path(__file__).with_name("te_quantizers.yaml").read_text())


def stand_in(name, *takes):
    """Make a quantiser that keeps its keyword arguments, and takes those of the published one alone."""

    def keep(self, **given):
        assert given.keys() <= set(takes), given
        self.given = given

    return type(f"{name}Quantizer", (), {"__init__": keep})


@pytest.fixture
def factory(monkeypatch):
    tensors = {
        "identity": stand_in("Identity"),
        "mxfp8": stand_in("MXFP8", "fp8_dtype"),
        "nvfp4": stand_in(
            "NVFP4", "fp4_dtype", *KNOBS, *OF_FOUR_SIX, "with_random_sign_mask"
        ),
        "float8": stand_in(
            "Float8CurrentScaling",
            "fp8_dtype",
            "device",
            "force_pow_2_scales",
            "amax_epsilon",
        ),
        "hybrid": stand_in(
            "Hybrid", "rowwise_quantizer", "columnwise_quantizer", "columnwise_source"
        ),
    }
    types = SimpleNamespace(kFloat8E4M3="e4m3", kFloat8E5M2="e5m2", kFloat4E2M1="e2m1")
    modules = {
        "": {},
        ".pytorch": {},
        ".pytorch.tensor": {},
        ".pytorch.constants": {"DType": types},
    }
    for name, kind in tensors.items():
        modules[f".pytorch.tensor.{name}_tensor"] = {kind.__name__: kind}
    for name, content in modules.items():
        module = ModuleType(f"transformer_engine{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def of(recipe, tensor_type, module_type="linear"):
        monkeypatch.setenv("ABLATE_RECIPE", json.dumps(asdict(read_recipe(recipe))))
        te._quantizers.cache_clear()
        return seen(
            te.quantizer_factory(
                SimpleNamespace(module_type=module_type, tensor_type=tensor_type)
            )
        )

    yield of
    te._quantizers.cache_clear()


def seen(quantizer):
    """A quantiser in words: its kind and the knobs that are on."""
    kind = type(quantizer).__name__.removesuffix("Quantizer")
    given = quantizer.given
    if kind == "Hybrid":
        rows, columns = (
            seen(given[f"{side}wise_quantizer"]) for side in ("row", "column")
        )
        return f"{rows} | {columns}, {given['columnwise_source']}"
    on = sorted(name for name in KNOBS if given.get(name))
    on += [str(given[name]) for name in OF_FOUR_SIX] if "nvfp4_use_4over6" in on else []
    return " ".join([kind, *on, *filter(None, [given.get("fp8_dtype")])])


@pytest.mark.parametrize("recipe", EXPECTED)
def test_quantisers_of_a_linear_layer(factory, recipe):
    for tensor, expected in EXPECTED[recipe].items():
        assert (
            factory(recipe, tensor)
            == factory(recipe, tensor, "grouped_linear")
            == expected
        )


def test_the_first_linear_layer_that_asks_is_said_in_the_log(factory, capsys):
    for asked in ("dpa", "linear"):
        factory("nvidia-nvfp4", "input", asked)
        out = capsys.readouterr().out
        assert out == (
            f"{applied_line(read_recipe('nvidia-nvfp4'))}\n"
            if asked == "linear"
            else ""
        )


def test_what_is_no_linear_layers_stays_high(factory):
    assert factory("nvidia-nvfp4", "qkv", "dpa") == "Identity"
    assert seen(te.quantizer_factory(None)) == "Identity"
