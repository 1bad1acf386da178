"""Certificates: published facts about gains, functions that are right or wrong in known ways, corners."""

from dataclasses import replace

import pytest
import torch

from ablate.backends.testing.inputs import KINDS
from ablate.base.errors import UserError
from ablate.check import certificate
from ablate.check.certificate import certify, work
from ablate.check.claims import Claim, ClaimedOperand, claim_of
from ablate.numerics.quantiser import round_operand
from ablate.recipes import OperandPolicy

MXFP4 = OperandPolicy(format="mxfp4")
SR = replace(MXFP4, rounding="stochastic", prescale=0.75)


def claim(subject, **more):
    return claim_of(
        subject, **({"arm": None, "held_against": None, "backend": "auto", "device": "cpu"} | more)
    )


def of_policy(policy, function=None, axis=1):
    operand = ClaimedOperand(names=("wgrad.dy",), policy=policy, axis=axis)
    return Claim(name="it", operands=(operand,), function=function)


def gaussian(policy, monkeypatch, draws=24):
    """Certify one policy on Gaussian data alone."""
    monkeypatch.setattr(certificate, "KINDS", {"Gaussian": KINDS["Gaussian"]})
    found = certify(of_policy(policy), draws=draws)
    assert found.holds
    return found.operands[0].figures["Gaussian"]


# Others' facts, as tests/numerics/test_gains.py has them for fp32 data; bf16 data move them by 3e-4.
@pytest.mark.parametrize(
    ("policy", "gain"),
    [
        (SR, 1.0),
        (replace(SR, prescale=1.0), 0.98947),
        (replace(SR, scale="even", prescale=1.0), 0.99784),
        (OperandPolicy(format="nvfp4", rounding="stochastic"), 0.9968),
        (OperandPolicy(format="nvfp4", scale="ms_eden", hadamard=32, signs="step"), 1 - 0.00026),
    ],
    ids=["SR 3/4", "SR", "SR even", "NVFP4 SR", "MS-EDEN"],
)
def test_gains_that_are_known(policy, gain, monkeypatch):
    found = gaussian(policy, monkeypatch)
    assert found.gain.error < 1e-4
    assert found.gain.value == pytest.approx(gain, abs=3.5e-4)
    assert found.unbiased == (policy == SR)
    assert len(found.pattern) == 1


def test_the_public_rocm_kernels_reading_has_a_pattern_of_four_and_noise_that_neighbours_share(monkeypatch):
    found = gaussian(replace(MXFP4, scale="even", rounding="stochastic_rocm"), monkeypatch)
    assert found.pattern == pytest.approx((0.998, 0.998, 0.836, 0.836), abs=1e-3)
    assert found.largest_alike[0] == "1 apart"


def mxfp4(x):
    return round_operand(x, MXFP4, axis=1).values


def in_fp32_and_late(x, seed):
    """SR 3/4 with torch's own generator, which certify seeds."""
    assert isinstance(seed, int)
    blocks = x.float().view(-1, 32)
    scale = 2.0 ** (blocks.abs().amax(1, keepdim=True).log2().floor() - 2)
    scaled = blocks / scale * 0.75
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    place = (torch.searchsorted(grid, scaled.abs(), right=True) - 1).clamp(0, 6)
    low, high = grid[place], grid[place + 1]
    chosen = torch.where((scaled.abs() - low) / (high - low) > torch.rand_like(low), high, low)
    return (chosen.copysign(blocks) * scale / 0.75).view(x.shape)


def quick(function, policy, monkeypatch, **options):
    monkeypatch.setattr(certificate, "SIDE", 128)
    return certify(of_policy(policy, function, **options), draws=16)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_function_that_is_its_definition(axis, monkeypatch):
    found = quick(mxfp4, MXFP4, monkeypatch, axis=axis)
    assert found.holds
    (one,) = found.operands
    assert one.differences == one.disagreements == ()
    assert all(corner.found == corner.expected for corner in one.corners)
    assert {corner.name: corner.found for corner in one.corners} | {"clipping": "", "subnormals": ""} == {
        "ties": "to even code", "clipping": "", "subnormals": "", "1e38": "finite, 8.51e+37",
        "NaN": "32 read NaN", "Inf": "32 read NaN", "−0": "kept",
        "zeros": "zeros",
    }  # fmt: skip


def test_a_stochastic_function_draws_words_of_its_own(monkeypatch):
    def mends(x, seed):
        odd = ~x.float().view(-1, 32).isfinite().all(1, keepdim=True).expand(-1, 32).reshape(x.shape)
        zero = (x.float().view(-1, 32) == 0).all(1, keepdim=True).expand(-1, 32).reshape(x.shape)
        tiny = x.float().abs().view(-1, 32).amax(1, keepdim=True).expand(-1, 32).reshape(x.shape) < 2.0**-120
        own = in_fp32_and_late(torch.where(odd | zero | tiny, 1, x), seed)
        theirs = round_operand(x, SR, axis=1, key=replace_key(seed))
        return torch.where(odd | zero | tiny, theirs.values.float() * theirs.descale, own)

    found = quick(mends, SR, monkeypatch)
    assert found.operands[0].differences == ()
    assert found.holds


def replace_key(seed):
    return of_policy(SR).operands[0].key(seed, 0, 99)


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (lambda x: mxfp4(x) * 0.99, "other"),
        (lambda x: mxfp4(x).nan_to_num(0.0), "special"),
        (lambda x: round_operand(x, replace(MXFP4, scale="even"), axis=1).values, "scale"),
        (lambda x: mxfp4(x).roll(1, 0), "other"),
    ],
)
def test_a_function_that_is_something_else(wrong, cause, monkeypatch):
    found = quick(wrong, MXFP4, monkeypatch)
    assert not found.holds
    assert cause in {one.cause for one in found.operands[0].differences}


def test_noise_that_ignores_its_seed_is_no_stochastic_rounding(monkeypatch):
    def fixed(x):
        done = round_operand(x, SR, axis=1, key=replace_key(1))
        return done.values.float() * done.descale

    (one,) = quick(fixed, SR, monkeypatch).operands
    assert one.differences == ()  # each value is a neighbour
    assert not one.holds
    assert any(what.startswith("bias share (Gaussian") for what in one.disagreements)


def test_of_a_recipe_the_products_are_measured_and_the_work_is_counted(monkeypatch):
    monkeypatch.setattr(certificate, "SIDE", 256)
    subject = claim("{gemms: [wgrad], stabiliser: sr}")
    told = []
    found = certify(subject, draws=16, done=told.append)
    assert found.holds
    assert sum(told) == work(subject, 16)
    assert [one.names for one in subject.operands] == [("wgrad.dy", "wgrad.x")]
    assert {(one.gemm, one.kind) for one in found.products} == {("wgrad", kind) for kind in KINDS}
    first = found.products[0]
    assert first.unbiased
    assert first.relative_error.value == pytest.approx(0.239, abs=0.01)
    nearest = certify(claim("{gemms: [wgrad]}"), draws=8).products[0]
    assert not nearest.unbiased
    assert nearest.bias_share.value == 1.0


@pytest.mark.parametrize("recipe", ["alto", "quartet2"])
def test_what_a_call_draws_for_both_operands_is_shared_by_two_draws(recipe, monkeypatch):
    monkeypatch.setattr(certificate, "SIDE", 128)
    for one in certify(claim(recipe), draws=8).operands:
        assert one.figures["Gaussian"].gain.value == pytest.approx(1.0, abs=0.02)


def test_operands_that_nothing_tells_apart_are_one_and_others_are_not():
    names = [one.names for one in claim("nvidia-nvfp4").operands]
    assert ("wgrad.dy",) in names
    assert sorted(name for group in names for name in group) == [
        "dgrad.dy", "dgrad.w", "fprop.w", "fprop.x", "wgrad.dy", "wgrad.x",
    ]  # fmt: skip


FILE = """
import torch
def right(x): return x
def raises(x): raise RuntimeError("no kernel")
def shorter(x): return x[:1]
"""


def test_what_is_left_out_is_said(tmp_path):
    for recipe in ("quartet2", "alto", "nvidia-nvfp4"):
        assert "the second time alone" in claim(recipe).notes[0]
    assert claim("mxfp4").notes == ()
    (tmp_path / "quant.py").write_text(FILE)
    found = claim(f"{tmp_path}/quant.py:right", held_against="tseng:wgrad.dy")
    assert found.notes == ("Held against the policy without its rotation.",)
    (operand,) = found.operands
    assert (operand.axis, operand.policy.hadamard, operand.policy.signs) == (0, 0, "none")


@pytest.mark.parametrize(
    ("subject", "options", "fault"),
    [
        ("mxfp5", {}, "check: unknown recipe 'mxfp5' (did you mean 'mxfp8'?)"),
        ("bf16", {}, "bf16: it quantises nothing in the layers without a rule, before its first phase"),
        ("mxfp4", {"held_against": "mxfp4"}, "--as: 'mxfp4' is no function (expected file.py:function"),
        ("my.yaml", {}, "my.yaml: which arm? Name it with --arm"),
        ("quickstart", {"arm": "fpro"}, "--arm: no arm 'fpro' in quickstart (did you mean 'fprop'?)"),
        ("FILE:right", {}, "--as: what does FILE:right claim to be? (such as --as mxfp4, or --as"),
        ("FILE:gone", {"held_against": "mxfp4"}, "FILE:gone: no function 'gone' there"),
        ("FILE:right", {"held_against": "bf16"}, "--as: bf16 quantises nothing"),
        ("FILE:right", {"held_against": "tseng:fprop.x"}, "--as: fprop.x is not quantised in tseng"),
        (
            "FILE:right",
            {"held_against": "tseng:wgrad.z"},
            "--as: wgrad.z is not quantised in tseng (expected dgrad.dy, dgrad.w, wgrad.dy or wgrad.x)",
        ),
        ("FILE:right", {"held_against": "nvidia-nvfp4"}, "--as: the operands of nvidia-nvfp4 differ ("),
        ("FILE:right", {"held_against": "quartet2:wgrad.dy"}, "--as: no function can be held against"),
    ],
)  # fmt: skip
def test_each_fault_is_one_line(subject, options, fault, tmp_path):
    path = tmp_path / "quant.py"
    path.write_text(FILE)
    with pytest.raises(UserError) as caught:
        claim(subject.replace("FILE", str(path)), **options)
    (problem,) = caught.value.problems
    assert str(problem).startswith(fault.replace("FILE", str(path)))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("raises", "raised RuntimeError: no kernel"),
        ("shorter", "returned torch.bfloat16 [1, 512] for a bf16 matrix [512, 512]"),
    ],
)
def test_a_function_that_cannot_be_called_so(name, fault, tmp_path):
    path = tmp_path / "quant.py"
    path.write_text(FILE)
    with pytest.raises(UserError) as caught:
        certify(claim(f"{path}:{name}", held_against="mxfp4"), draws=8)
    assert fault in str(caught.value.problems[0])
