import pytest

from ablate.recipes import GemmPolicy, LayerRecipe, OperandPolicy, block_shape, group_size

MXFP4 = OperandPolicy(format="mxfp4")


def test_a_format_brings_its_usual_scale_and_block():
    assert (MXFP4.scale, MXFP4.block) == ("floor", "1x32")
    nvfp4 = OperandPolicy(format="nvfp4")
    assert (nvfp4.scale, nvfp4.block) == ("two_level", "1x16")
    assert OperandPolicy(format="fp8_e4m3").scale == "tensor"


@pytest.mark.parametrize(
    ("fields", "shape", "group"),
    [
        ({"format": "bf16"}, (1, 1), 0),
        ({"format": "mxfp4"}, (1, 32), 32),
        ({"format": "mxfp4", "hadamard": 128}, (1, 32), 128),
        ({"format": "mxfp4", "block": "32x32"}, (32, 32), 32),
        ({"format": "nvfp4", "block": "16x16"}, (16, 16), 16),
        ({"format": "fp8_e4m3", "scale": "1x128"}, (1, 128), 128),
        ({"format": "fp8_e4m3", "scale": "128x128"}, (128, 128), 128),
        ({"format": "fp8_e4m3", "scale": "row"}, (1, 1), 1),
    ],
)
def test_what_must_divide_the_dimensions(fields, shape, group):
    policy = OperandPolicy(**fields)
    assert block_shape(policy) == shape
    assert group_size(policy) == max(group, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "mxfp4", "scale": "two_level"}, "'two_level' on mxfp4"),
        ({"format": "nvfp4", "scale": "floor"}, "'floor' on nvfp4"),
        ({"format": "mxfp8", "scale": "uos"}, "'uos' on mxfp8"),
        ({"format": "mxfp4", "block": "16x16"}, "'16x16' on mxfp4"),
        ({"format": "fp8_e4m3", "block": "1x32"}, "'1x32' on fp8_e4m3"),
        ({"format": "bf16", "rounding": "stochastic"}, "on bf16, which is high precision"),
        ({"format": "mxfp4", "prescale": 0.75}, "prescale 0.75 with nearest"),
        ({"format": "mxfp4", "rounding": "stochastic", "prescale": 1.5}, "prescale 1.5"),
        (
            {"format": "fp8_e4m3", "rounding": "stochastic", "prescale": 0.5},
            "prescale 0.5 with scale 'tensor'",
        ),
        ({"format": "mxfp4", "rounding": "stochastic", "undo": "operand"}, "without a prescale"),
        ({"format": "nvfp4", "rounding": "stochastic_rocm"}, "'stochastic_rocm' on nvfp4"),
        ({"format": "nvfp4", "scale": "ms_eden"}, "needs a Hadamard"),
        ({"format": "mxfp4", "signs": "step"}, "signs without a Hadamard"),
        ({"format": "mxfp4", "permute": True}, "permute without a Hadamard"),
        ({"format": "nvfp4", "scale": "two_level_row", "block": "16x16"}, "'two_level_row' on block 16x16"),
        ({"source": "forward_bf16"}, "'forward' says it"),
        ({"format": "mxfp8", "mask": True}, "mask on mxfp8"),
        ({"format": "fp8_e4m3", "scale": "delayed", "hadamard": 16}, "'delayed' under a Hadamard"),
        ({"format": "mxfp4", "scale": "quest", "block": "32x32"}, "'quest' on block 32x32"),
        ({"format": "mxfp5"}, "mxfp4"),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        OperandPolicy(**fields)


def test_a_mask_under_a_hadamard_needs_the_forward_operand_again():
    forward = OperandPolicy(format="mxfp4", scale="quest", hadamard=32, mask=True)
    with pytest.raises(ValueError, match=r"mask on fprop.x under a Hadamard"):
        LayerRecipe(fprop=GemmPolicy(left=forward, right=forward))


def test_a_rotation_in_high_precision_may_stand_beside_one_in_fp4():
    high = OperandPolicy(hadamard=16)
    GemmPolicy(left=OperandPolicy(format="mxfp4", hadamard=16), right=high)
