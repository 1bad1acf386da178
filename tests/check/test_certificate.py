"""Certificates: published facts about gains, functions that are right or wrong in known ways, corners."""

from dataclasses import replace

import pytest
import torch

from ablate.base.errors import UserError
from ablate.check import certificate
from ablate.check.certificate import (
    ClaimedOperand,
    certify,
    of_function,
    of_recipe,
    operand_of,
)
from ablate.check.differences import defined
from ablate.diagnose.inputs import recipe_of
from ablate.recipes import OperandPolicy

MXFP4 = OperandPolicy(format="mxfp4")
SR = replace(MXFP4, rounding="stochastic", prescale=0.75)


def claim(recipe):
    return of_recipe(recipe, recipe_of(recipe), "auto", "cpu")


def operand(policy, axis=1):
    return ClaimedOperand(names=("wgrad.dy",), policy=policy, axis=axis)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(certificate, "SIDE", 128)


def quick(function, policy, **options):
    claim = of_function("it", function, operand(policy, **options))
    return certify(claim, claim.operands[0], draws=16, done=id)


def mxfp4(x):
    return defined(x, MXFP4, 1, None)


def drawn(x, seed, rounding="stochastic"):
    """SR with words of its own."""
    return defined(x, replace(SR, rounding=rounding), 1, operand(SR).key(seed, 0, 99))


def away_from_zero(x):
    """MXFP4 but for the corner case of ties, where halves go away from zero."""
    rounded = defined(x, replace(MXFP4, rounding="nearest_away"), 1, None)
    return torch.where((x[:, ::16] == 6).all(), rounded, mxfp4(x))


def test_a_function_that_is_its_definition_along_the_other_axis():
    certificate = quick(mxfp4, MXFP4, axis=0)
    assert certificate.holds
    assert certificate.differences == certificate.disagreements == ()


@pytest.mark.parametrize(
    ("wrong", "cause", "data"),
    [
        (lambda x: mxfp4(x) * 0.99, "other", "Gaussian"),
        # What alone is wrong in a corner case is named by it.
        (lambda x: mxfp4(x).nan_to_num(0.0), "special", "NaN"),
        (
            lambda x: torch.where(x.isinf().any(), torch.zeros(()), mxfp4(x)),
            "special",
            "Inf",
        ),
        (
            lambda x: torch.where((x == 0).all(), torch.full((), 2e-38), mxfp4(x)),
            "other",
            "zeros",
        ),
        (lambda x: mxfp4(x) * (x.abs().max() < 1e38), "other", "1e38"),
        (lambda x: mxfp4(x) * (x.abs().max() > 1e-37), "other", "subnormals"),
        (away_from_zero, "tie", "ties"),
    ],
)
def test_a_function_that_is_something_else(wrong, cause, data):
    certificate = quick(wrong, MXFP4)
    assert not certificate.holds
    found = {
        difference.cause: difference.data for difference in certificate.differences
    }
    assert found[cause] == data


def test_a_stochastic_function_draws_words_of_its_own_and_others_for_each_seed():
    own_words = quick(drawn, SR)
    assert own_words.differences == ()
    assert own_words.holds
    same_words = quick(lambda x: drawn(x, 1), SR)
    assert same_words.differences == ()  # each value is a neighbour
    assert not same_words.holds
    assert "bias share (Gaussian)" in same_words.disagreements
    shared = quick(lambda x, seed: drawn(x, seed, "stochastic_rocm"), SR)
    for figure in ("gain by position", "independence of the noise"):
        assert f"{figure} (Gaussian)" in shared.disagreements


def test_the_work_is_counted():
    subject = claim("{gemms: [wgrad], stabiliser: sr}")
    counts = []
    (both,) = subject.operands
    assert certify(subject, both, draws=8, done=counts.append).holds
    assert sum(counts) == 4 * 8
    assert both.names == ("wgrad.dy", "wgrad.x")


@pytest.mark.parametrize("recipe", ["alto", "quartet2"])
def test_what_a_call_draws_for_both_operands_is_shared_by_two_draws(recipe):
    subject = claim(recipe)
    for shared in subject.operands:
        gaussian = certify(subject, shared, draws=8, done=id).figures["Gaussian"]
        assert gaussian.gain.value == pytest.approx(1.0, abs=0.02)


def test_a_function_is_held_against_an_operand_without_its_rotation():
    claimed = operand_of("tseng:wgrad.dy")
    assert (claimed.axis, claimed.policy.hadamard) == (0, 0)
    assert claimed.policy.signs == "none"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("bf16", "--as: bf16 is not quantised (its recipe"),
        ("tseng:fprop.x", "--as: tseng:fprop.x is not quantised (its recipe"),
        ("nvidia-nvfp4", "--as: the operands of nvidia-nvfp4 differ ("),
        ("quartet2:wgrad.dy", "--as: no function can be held against"),
    ],
)
def test_what_no_function_can_claim_to_be_is_one_line(text, fault):
    with pytest.raises(UserError) as caught:
        operand_of(text)
    (problem,) = caught.value.problems
    assert str(problem).startswith(fault)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (lambda x: 1 / 0, "it raised ZeroDivisionError: division by zero"),  # noqa: ARG005
        (lambda x: x[:1], "it returned torch.bfloat16 [1, 128] for a bf16 matrix"),
    ],
)
def test_a_function_that_cannot_be_called_so(function, fault):
    with pytest.raises(UserError) as caught:
        quick(function, MXFP4)
    assert fault in str(caught.value.problems[0])
