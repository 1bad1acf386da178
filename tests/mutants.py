"""Break the numerics on purpose, one way at a time, and see that the tests notice.

    python tests/mutants.py [WORDS OF A NAME]

Each mutant is put into a copy of the tree, never into the tree itself. There runs the test that should notice
and, if it passes, all tests of the numerics, the back ends and the trainer until one fails. Ends with exit
code 1 if a mutant survives.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/numerics/test_formats.py", "tests/numerics/test_philox.py", "tests/numerics/test_rotate.py",
    "tests/numerics/test_mx.py", "tests/numerics/test_tensor_scales.py", "tests/numerics/test_scales.py",
    "tests/numerics/test_scale_rules.py", "tests/layers/test_linear.py", "tests/backends/test_conformance.py",
    "tests/backends/test_blackwell.py", "tests/backends/test_block_scaled.py", "tests/numerics/test_gains.py",
    "tests/train/test_loop.py",
    "tests/layers/test_apply.py",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mistake: what it is, and (file, text, text in its place) for each edit."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    first: str
    """The test that should notice, which runs before the others."""
    interpreted: bool = False
    """A kernel's mistake, for the tests of that name that run in Triton's interpreter."""


def one(name: str, file: str, old: str, new: str, *, first: str) -> Mutant:
    return Mutant(name=name, edits=((file, old, new),), first=first)


NUMERICS = "ablate/numerics/"
MUTANTS: tuple[Mutant, ...] = (
    one(
        "ties away from zero",
        NUMERICS + "formats.py",
        "+ ((bits >> drop) & 1)",
        "+ 1",
        first="tests/numerics/test_formats.py::test_all_ties_go_to_the_even_code",
    ),
    one(
        "exponent from a float logarithm",
        NUMERICS + "formats.py",
        "byte = (((amax_bits + add) >> 23) - max_exponent).clamp(min=0)",
        "byte = (torch.log2((amax_bits + add).view(torch.float32)).floor().nan_to_num(-200).to(torch.int32)"
        " + 127 - max_exponent).clamp(min=0)",
        first="tests/numerics/test_formats.py::test_scale_byte_reads_the_exponent_field",
    ),
    Mutant(
        name="prescale before the block's maximum",
        edits=(
            (
                NUMERICS + "quantiser.py",
                "blocks = to_blocks(self.v, self.shape)\n            found",
                "blocks = to_blocks(self.v * self.prescale, self.shape)\n            found",
            ),
            (
                NUMERICS + "quantiser.py",
                "scaled if self.prescale == 1.0 else scaled * self.prescale",
                "scaled",
            ),
        ),
        first="tests/numerics/test_mx.py::test_the_prescale_comes_after_the_exponent",
    ),
    Mutant(
        name="4/3 missing on one operand",
        edits=(
            ("backends/gemms/emulated.py", "alpha = a.descale * b.descale", "alpha = a.descale"),
            ("backends/gemms/reference.py", "(a.descale * b.descale)", "(a.descale)"),
        ),
        first="tests/layers/test_linear.py::test_three_gemms_by_the_book",
    ),
    Mutant(
        name="signs after the Hadamard",
        edits=(
            (
                NUMERICS + "rotate.py",
                "    v = hadamard_last(v, policy.hadamard, signs)\n",
                """    v = hadamard_last(v, policy.hadamard)
    if signs is not None:
        v = v * signs.repeat(v.shape[-1] // policy.hadamard)
""",
            ),
        ),
        first="tests/numerics/test_rotate.py::test_signs_stand_before_the_matrix",
    ),
    one(
        "Dgrad's w along the wrong axis",
        "ablate/layers/linear.py",
        "axis = contracted_axis(gemm, operand)",
        'axis = contracted_axis(gemm, operand) ^ ((gemm, operand) == ("dgrad", "w"))',
        first="tests/layers/test_linear.py::test_three_gemms_by_the_book",
    ),
    one(
        "Wgrad's x along the wrong axis",
        "ablate/layers/linear.py",
        "axis = contracted_axis(gemm, operand)",
        'axis = contracted_axis(gemm, operand) ^ ((gemm, operand) == ("wgrad", "x"))',
        first="tests/layers/test_linear.py::test_three_gemms_by_the_book",
    ),
    one(
        "Hadamard on one operand only",
        "ablate/layers/linear.py",
        "        assert operand in (left, right)\n",
        "        import dataclasses\n"
        "        if operand == right and chosen.scale != 'ms_eden':\n"
        "            off = {'permute': False, 'rotated_bf16': False}\n"
        "            chosen = dataclasses.replace(chosen, hadamard=0, signs='none', **off)\n",
        first="tests/layers/test_linear.py::test_the_rotation_cancels_in_the_product",
    ),
    one(
        "scales of other blocks",
        NUMERICS + "quantiser.py",
        "self.values * factor,",
        "self.values * factor.flip(0),",
        first="tests/numerics/test_mx.py::test_codes_and_scales_are_the_dequantised_values",
    ),
    one(
        "a tile's scale from one row",
        "ablate/recipes/sizes.py",
        "return int(rows), int(columns)",
        "return 1, int(columns)",
        first="tests/numerics/test_mx.py::test_a_square_tile_gives_the_same_numbers_along_either_axis",
    ),
    one(
        "one seed for both operands",
        NUMERICS + "philox.py",
        "(self.seed, self.layer, self.gemm, self.operand)",
        '(self.seed, self.layer, self.gemm, "")',
        first="tests/numerics/test_philox.py::test_every_field_of_the_key_gives_an_unrelated_stream",
    ),
    one(
        "one seed for all layers",
        NUMERICS + "philox.py",
        "(self.seed, self.layer, self.gemm, self.operand)",
        '(self.seed, "", self.gemm, self.operand)',
        first="tests/numerics/test_philox.py::test_every_field_of_the_key_gives_an_unrelated_stream",
    ),
    one(
        "step left out of the noise",
        NUMERICS + "philox.py",
        "step = torch.tensor(key.step & _MASK",
        "step = torch.tensor(0 & _MASK",
        first="tests/numerics/test_philox.py::test_every_field_of_the_key_gives_an_unrelated_stream",
    ),
    one(
        "call left out of the key",
        "ablate/layers/linear.py",
        "step=at.stream_step, call=at.call",
        "step=at.stream_step, call=0",
        first="tests/layers/test_apply.py::test_every_pass_and_step_draws_anew_and_evaluation_apart",
    ),
    one(
        "signs not renewed",
        NUMERICS + "rotate.py",
        'step = 0 if policy.signs == "layer" else key.step',
        "step = 0",
        first="tests/numerics/test_rotate.py::test_signs_are_renewed_as_their_policy_says",
    ),
    one(
        "a sign of NVIDIA's vector flipped",
        NUMERICS + "rotate.py",
        "_FIXED_16 = (1, 1, 1, -1,",
        "_FIXED_16 = (1, 1, 1, 1,",
        first="tests/numerics/test_rotate.py::test_nvidias_fixed_signs",
    ),
    one(
        "rounding up when p equals u",
        NUMERICS + "formats.py",
        "torch.where(p > u, low + 1, low)",
        "torch.where(p >= u, low + 1, low)",
        first="tests/numerics/test_formats.py::test_stochastic_rounding_agrees_with_gfloat_given_the_same_bits",
    ),
    one(
        "block scale one too high",
        NUMERICS + "formats.py",
        "- max_exponent).clamp(min=0)",
        "- max_exponent + 1).clamp(min=0)",
        first="tests/numerics/test_formats.py::test_scale_rules_turn_where_they_should",
    ),
    one(
        "even turns too late",
        NUMERICS + "formats.py",
        "1 << (22 - element.mantissa_bits)",
        "1 << (21 - element.mantissa_bits)",
        first="tests/numerics/test_formats.py::test_scale_rules_turn_where_they_should",
    ),
    one(
        "NVFP4's tensor scale left out",
        NUMERICS + "quantiser.py",
        "descale = self.decode / self.prescale",
        "descale = 1.0 / self.prescale",
        first="tests/numerics/test_tensor_scales.py::test_nvfp4_in_transformer_engines_order",
    ),
    one(
        "NVFP4's block scale rounded before the tensor scale",
        NUMERICS + "scales.py",
        "return amax * fp32(encode * fp32(1 / 6))",
        "return amax / 6 * encode",
        first="tests/numerics/test_tensor_scales.py::test_nvfp4_in_transformer_engines_order",
    ),
    one(
        "four-or-six takes what errs more",
        NUMERICS + "scales.py",
        "(errors[1] < errors[0])",
        "(errors[1] > errors[0])",
        first="tests/numerics/test_tensor_scales.py::test_four_or_six_takes_what_errs_less_in_each_block",
    ),
    one(
        "MS-EDEN without its correction",
        NUMERICS + "scales.py",
        "round_stochastic(scale * stretch, E4M3",
        "round_stochastic(scale, E4M3",
        first="tests/numerics/test_tensor_scales.py::test_ms_eden_is_unbiased_and_errs_less_than_stochastic_rounding",
    ),
    one(
        "ties toward zero go away from it",
        NUMERICS + "formats.py",
        "torch.where(p > 0.5, low + 1, low)",
        "torch.where(p >= 0.5, low + 1, low)",
        first="tests/numerics/test_formats.py::test_ties_away_from_zero_and_toward_it",
    ),
    one(
        "a zero block scale of TetraJet-v2 stays zero",
        NUMERICS + "scales.py",
        "torch.where(base == 0, 2.0**-9, base)",
        "base",
        first="tests/numerics/test_scale_rules.py::test_nvfp4_with_a_scale_for_128_as_tetrajet_v2s_kernel",
    ),
    one(
        "a row's scale taken from the tensor",
        NUMERICS + "scales.py",
        "encode = divided(E4M3.max * 6, amax)",
        "encode = divided(E4M3.max * 6, amax.amax().expand_as(amax))",
        first="tests/numerics/test_scale_rules.py::test_nvfp4_with_a_scale_a_row_as_transformer_engines_reference",
    ),
    one(
        "UE5M3 without its smallest scale",
        NUMERICS + "scales.py",
        "base.clamp(min=UE5M3_STEP, max=UE5M3.max)",
        "base.clamp(max=UE5M3.max)",
        first="tests/numerics/test_scale_rules.py::test_amd_fp4_divides_by_a_scale_that_is_never_zero",
    ),
    one(
        "IF4 takes what errs more",
        NUMERICS + "scales.py",
        "whole = (seven < six)",
        "whole = (seven > six)",
        first="tests/numerics/test_scale_rules.py::test_if4_takes_for_each_block_the_grid_that_errs_less",
    ),
    one(
        "powers of two rounded up",
        NUMERICS + "scales.py",
        "powers = (scale.view(torch.int32) & 0x7F800000)",
        "powers = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000)",
        first="tests/numerics/test_scale_rules.py::test_fp8_in_powers_of_two_as_transformer_engines_reference",
    ),
    one(
        "four-or-six by squares whatever was asked",
        NUMERICS + "scales.py",
        "FOUR_SIX_ERRORS[measure](difference)",
        'FOUR_SIX_ERRORS["mse"](difference)',
        first="tests/numerics/test_scale_rules.py::test_four_or_six_by_three_errors_and_two_bounds",
    ),
    one(
        "signs of a backward pass not shared",
        NUMERICS + "rotate.py",
        'gemm = "backward" if policy.signs == "backward" else key.gemm',
        "gemm = key.gemm",
        first="tests/layers/test_linear.py::test_signs_of_a_backward_pass_are_those_of_both_gemms",
    ),
    one(
        "the forward's operand not rounded to bf16",
        "backends/protocol.py",
        'if draw.policy.source == "forward_bf16":',
        "if False:",
        first="tests/layers/test_linear.py::test_every_preset_by_the_book[te-nvfp4-1d-reference]",
    ),
    one(
        "NaN hidden in a block",
        NUMERICS + "formats.py",
        "return torch.where(amax_bits >= 0x7F800000, 255, byte)",
        "return byte.clamp(max=254)",
        first="tests/numerics/test_mx.py::test_a_bad_value_makes_its_block_nan_and_no_other",
    ),
    one(
        "double quantisation left out",
        "ablate/layers/linear.py",
        'self.tensor(name) if source == "high_precision" else self.operand(name)',
        "self.tensor(name)",
        first="tests/layers/test_linear.py::test_every_preset_by_the_book",
    ),
    one(
        "gradient not masked",
        "ablate/layers/linear.py",
        "mask = forward.operand(name).mask if policy.mask else None",
        "mask = None",
        first="tests/layers/test_linear.py::test_every_preset_by_the_book",
    ),
    one(
        "gradient not rotated back",
        "ablate/layers/linear.py",
        "    if not rotated:\n",
        "    if True:\n",
        first="tests/layers/test_linear.py::test_every_preset_by_the_book",
    ),
    one(
        "delayed scale without its past",
        "ablate/layers/linear.py",
        "if bool(past.any()) else now",
        "if False else now",
        first="tests/layers/test_apply.py::test_delayed_scales_look_back_and_are_saved_with_the_model",
    ),
    one(
        "rocm words not shifted",
        NUMERICS + "quantiser.py",
        "first[..., 2:] >> 16",
        "first[..., 2:]",
        first="tests/numerics/test_mx.py::test_the_rocm_variant_shares_a_word_among_four_neighbours",
    ),
    one(
        "prescale undone in fp32",
        NUMERICS + "quantiser.py",
        "values, descale = (values.to(torch.float32) * undo).to(torch.bfloat16), 1.0",
        "descale = undo",
        first="tests/numerics/test_mx.py::test_undoing_the_prescale_on_the_operand_leaves_the_grid",
    ),
    one(
        "a phase never begins",
        "ablate/layers/linear.py",
        "if start <= tokens)",
        "if start <= 0)",
        first="tests/layers/test_apply.py::test_phases_move_on_with_the_tokens",
    ),
    one(
        "the first blocks not exempt",
        "ablate/recipes/place.py",
        "place.block < rule.first or ",
        "",
        first="tests/recipes/test_place.py::test_first_and_last_blocks",
    ),
    one(
        "kernel: one Philox round fewer",
        "backends/kernel/job.h",
        "constexpr int ROUNDS = 7;",
        "constexpr int ROUNDS = 6;",
        first="tests/backends/test_conformance.py::test_with_a_compiler_the_kernel_is_used",
    ),
    one(
        "kernel: signs forgotten along the rows",
        "backends/kernel/rotate.h",
        "  if (job.signs)\n    for (int i = 0; i < rows; ++i)",
        "  if (false)\n    for (int i = 0; i < rows; ++i)",
        first="tests/backends/test_conformance.py::test_with_a_compiler_the_kernel_is_used",
    ),
    one(
        "kernel: a tile's scale from half of it",
        "backends/kernel/rows.h",
        "if (job.block == 32) m = max_u(m, swap_eights(m));",
        "",
        first="tests/backends/test_conformance.py::test_with_a_compiler_the_kernel_is_used",
    ),
    one(
        "kernel: prescale forgotten",
        "backends/kernel/scales.h",
        "return job_.prescale == 1.0f ? v : v * job_.prescale;",
        "return v;",
        first="tests/backends/test_conformance.py::test_with_a_compiler_the_kernel_is_used",
    ),
    one(
        "kernel: permutation forgotten along the rows",
        "backends/kernel/rotate.h",
        "return job.order ? i",
        "return false ? i",
        first="tests/backends/test_conformance.py::test_with_a_compiler_the_kernel_is_used",
    ),
    one(
        "kernel: four-or-six never by the definition's own sums",
        "backends/kernel/scales.h",
        "return all(sure | (amax == 0));",
        "return true;",
        first="tests/backends/test_conformance.py::test_four_or_six_where_only_roundings_tell_the_errors_apart",
    ),
    one(
        "kernel: a product's later blocks with the first one's scales",
        "backends/kernel/product.h",
        "block = job_.scales > 1 ? step / STEPS : 0;",
        "block = 0;",
        first="tests/backends/test_block_scaled.py::test_products_that_fp32_holds_are_exact",
    ),
    one(
        "kernel: the sums of a product's blocks added at the end",
        "backends/kernel/product.h",
        "constexpr int64_t STEPS = TILE / 2;",
        "constexpr int64_t STEPS = TILE;",
        first="tests/backends/test_block_scaled.py::test_products_that_fp32_holds_are_exact",
    ),
    one(
        "back end: products of scales that leave fp32",
        "backends/quantisers/block_scaled.py",
        "least >= _SMALLEST and most <= _LARGEST",
        "least <= most",
        first="tests/backends/test_block_scaled.py::test_scales_whose_product_leaves_fp32_go_another_way",
    ),
    one(
        "kernel: double quantisation without the tensor's scale",
        "backends/quantisers/cpu_kernel.py",
        "job.factor, job.signs, job.order = factor,",
        "job.factor, job.signs, job.order = 1.0,",
        first="tests/backends/test_block_scaled.py::test_quantising_again_has_the_bits_of_quantising_the_dequantised",
    ),
    one(
        "trainer: the step never moves",
        "ablate/train/loop.py",
        "state.step, state.tokens = step, step * plan.tokens_per_step",
        "state.tokens = step * plan.tokens_per_step",
        first="tests/train/test_loop.py::test_no_random_draw_is_used_twice_in_a_run",
    ),
    one(
        "trainer: evaluation draws as training",
        "ablate/train/loop.py",
        "EVAL_CALL + taken",
        "taken",
        first="tests/train/test_loop.py::test_no_random_draw_is_used_twice_in_a_run",
    ),
    one(
        "trainer: processes draw alike",
        "ablate/train/loop.py",
        "        state.call = call\n",
        "        state.call = call // group.size\n",
        first="tests/train/test_group.py::test_two_processes_have_the_curve_of_one_to_the_bit",
    ),
)


OF_SCALES, OF_FOUR_SIX = "tests/numerics/test_scales.py", "::test_four_or_six_is_that_of_both_references"
OF_QUEST, OF_SUMS = "::test_quest_shows_an_overflow_of_its_sums", "tests/backends/test_blackwell.py"
MUTANTS += tuple(
    one(name, file, old, new, first=first)
    for name, file, old, new, first in (
        ("a group's scale rounded twice", NUMERICS + "quantiser.py",
         "scales.divided(ELEMENTS[policy.format].max, amax)",
         "(ELEMENTS[policy.format].max / amax)", OF_SCALES + "::test_fp8_scales_of_a_group_are_divided_once"),
        ("four-or-six folds 1/6 into the tensor's scale", NUMERICS + "scales.py",
         "divided(amax_bits(blocks).view(torch.float32), 6.0) * encode", "nvfp4_base(blocks, encode)",
         OF_SCALES + OF_FOUR_SIX),
        ("four-or-six compares under the prescale", NUMERICS + "scales.py",
         "largest_scale(policy.scale) * policy.prescale)",
         "largest_scale(policy.scale))", OF_SCALES + OF_FOUR_SIX),
        ("MS-EDEN's stretch of the scaled values", NUMERICS + "scales.py",
         'policy.scale == "ms_eden_unscaled"', "False", OF_SCALES),
        ("an overflow hidden in a block of quest", NUMERICS + "scales.py",
         "torch.where(variance.isfinite(), scale.view(torch.int32) >> 23, 255)",
         "(scale.view(torch.int32) >> 23)", OF_SCALES + OF_QUEST),
        ("kernel: an overflow hidden in a block of quest", "backends/kernel/scales.h",
         "max_u(amax, (vu)magnitude(variance))", "amax", OF_SCALES + OF_QUEST),
        ("Blackwell's groups added to nearest", "backends/gemms/blackwell.py",
         "total.view(torch.int64) & -_PLACE", "total.float().double().view(torch.int64)", OF_SUMS),
        ("Blackwell's groups of 32", "backends/gemms/blackwell.py", "GROUP = 64", "GROUP = 32", OF_SUMS),
    )
)  # fmt: skip

INTERPRETED = "tests/backends/triton/interpreted/test_kernels.py"
TRITON = "backends/triton/"


def kernel(name: str, file: str, old: str, new: str, first: str = "test_both_copies") -> Mutant:
    edits = ((TRITON + file, old, new),)
    return Mutant(name=f"triton: {name}", edits=edits, interpreted=True, first=first)


MUTANTS += (
    kernel("ties away from zero", "rounding.py", "+ ((bits >> DROP) & 1)", "+ 1"),
    kernel("one Philox round fewer", "rounding.py", "tl.static_range(7)", "tl.static_range(6)"),
    kernel(
        "butterfly in another order",
        "rounding.py",
        "static_range(log2(GROUP))",
        "static_range(log2(GROUP) - 1, -1, -1)",
        "test_dequantised and H16",
    ),
    kernel(
        "prescale before the block's maximum",
        "quantise.py",
        "    if SIDE.hadamard:\n        v = rotate(",
        "    if SIDE.hadamard:\n        v = SIDE.prescale * rotate(",
    ),
    kernel("random words not transposed with the tile", "quantise.py", "words = tl.trans(", "words = ("),
    kernel("the high nibble first", "quantise.py", "(low | (high << 4))", "(high | (low << 4))"),
    kernel(
        "the codes of a NaN block kept",
        "quantise.py",
        "code = tl.where(bad, 0, code)",
        "code = code",
        "test_codes_and_scale_bytes",
    ),
    kernel(
        "scales of the wrong operand",
        "gemm.py",
        "b_codes, b_scale, ELEMENT",
        "b_codes, a_scale, ELEMENT",
        "test_gemm",
    ),
    kernel(
        "the scales of K's last tile not masked",
        "gemm.py",
        "scales_left = row_scales - done // BLOCK",
        "scales_left = row_scales",
        "test_a_nan_block",
    ),
    kernel(
        "the descales left out",
        "gemm.py",
        "alpha = tl.load(a_descale) * tl.load(b_descale)",
        "alpha = tl.load(a_descale)",
        "test_nvfp4_products",
    ),
    kernel(
        "the output truncated",
        "gemm.py",
        "exact_bf16(round_to_bf16(accumulator))",
        "exact_bf16(accumulator)",
        "test_nvfp4_products",
    ),
)


OF_RULES = "test_dequantised_values and "
MUTANTS += tuple(
    kernel(*one)
    for one in (
        ("a tile's scale from one of its rows", "scales.py", "if ROWS > 1:", "if False:", OF_RULES + "32x32"),
        ("ties to the lower neighbour", "rounding.py", "up = p >= 0.5", "up = p > 0.5", OF_RULES + "away"),
        ("four-or-six adds by halves", "scales.py", "add_in_order(tl.zeros_like(up), off)", "tree_sum(off)",
         "only_roundings"),
        ("an overflow hidden in a block of quest", "scales.py", "finite & (amax_bits", "(amax_bits",
         "test_what_fp32"),
        ("values that clip not masked", "quantise.py", "tl.abs(scaled) < 6.0", "tl.abs(scaled) <= 6.0",
         OF_RULES + "mask"),
        ("the inverse permutation", "launch.py", "order.int()", "order.argsort().int()",
         OF_RULES + "permute"),
        ("MS-EDEN's stretch of the scaled values", "scales.py", "if SIDE.rule == EDEN_UNSCALED:", "if False:",
         OF_RULES + "unscaled"),
        ("rocm words not shifted", "rounding.py", "first, first >> 16)", "first, first)", OF_RULES + "rocm"),
    )
)  # fmt: skip


def survives(mutant: Mutant, folder: Path) -> tuple[bool, str]:
    """Run the tests on a copy with this mistake; return whether all pass, and the first that failed."""
    for part in ("ablate", "backends", "reports", "studies", "tests"):
        shutil.copytree(ROOT / part, folder / part, symlinks=True)
    for name in ("pyproject.toml", "README.md", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for file, old, new in mutant.edits:
        path = folder / file
        text = path.read_text(encoding="utf-8")
        if old not in text:
            sys.exit(f"mutant '{mutant.name}': {file} no longer contains {old!r}")
        path.write_text(text.replace(old, new), encoding="utf-8")
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    rounds: tuple[tuple[str, ...], ...] = ((mutant.first,), TESTS)
    if mutant.interpreted:
        rounds = ((INTERPRETED, "-k", mutant.first),)
        environment |= {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = str(folder)
    for tests in rounds:
        with redirect_stdout(io.StringIO()) as printed:
            code = pytest.main(["-x", "-q", "-m", "", "-p", "no:cacheprovider", *tests])
        output = printed.getvalue()
        if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            sys.exit(f"mutant '{mutant.name}': no test ran ({' '.join(tests)})\n{output[-2000:]}")
        if code:
            failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return False, failed[0].removeprefix("FAILED ") if failed else output[-300:]
    return True, ""


def judge(mutant: Mutant) -> tuple[bool, str, float]:
    """Return what ``survives`` does, and the seconds that it took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lives, by = survives(mutant, Path(folder))
    return lives, by, time.monotonic() - started


def main() -> None:
    wanted = " ".join(sys.argv[1:])
    mutants = [mutant for mutant in MUTANTS if wanted in mutant.name]
    alive = []
    os.environ["OMP_NUM_THREADS"] = "1"
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "pytest", "hypothesis"])  # once, not once a mutant
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, max_tasks_per_child=1) as pool:
        for number, (mutant, (lives, by, sec)) in enumerate(
            zip(mutants, pool.map(judge, mutants), strict=True), 1
        ):
            alive += [mutant.name] if lives else []
            verdict = "SURVIVED" if lives else f"killed by {by.split(' - ')[0].split('[')[0]}"
            print(f"{number:3}/{len(mutants)} {mutant.name}: {verdict} ({sec:.0f} s)", flush=True)
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants killed")
    sys.exit(f"survivors: {', '.join(alive)}" if alive else 0)


if __name__ == "__main__":
    main()
