"""The smallest tensors that show a fault."""

import pytest
import torch

from ablate.backends.protocol import Draw
from ablate.backends.testing.check import FaultError, smallest
from ablate.backends.testing.suite import KEY, _off, checks
from ablate.recipes import OperandPolicy
from tests.backends.test_conformance import Shifted


def bad_at(row, column):
    x = torch.zeros(24, 96)
    x[row, column] = 1
    return x


CUTS = ((1, ((0, 0),)), (32, ((0, 1),)))


@pytest.mark.parametrize(("row", "column"), [(0, 0), (23, 95), (11, 40), (17, 63)])
def test_one_bad_value_leaves_its_block(row, column):
    x = bad_at(row, column)
    (found,) = smallest((x,), CUTS, lambda part: bool(part.any()))
    assert found.shape == (1, 32)
    assert float(found[0, column % 32]) == 1


def test_two_that_are_bad_together_stay_together():
    x = bad_at(0, 0) + bad_at(23, 95)
    (found,) = smallest((x,), CUTS, lambda part: float(part.sum()) == 2)
    assert found.shape == x.shape


def test_tensors_are_cut_together_along_what_they_share():
    a, b = torch.zeros(8, 96), torch.zeros(4, 96)
    a[5, 70] = b[2, 70] = 1
    cuts = ((1, ((0, 0),)), (1, ((1, 0),)), (32, ((0, 1), (1, 1))))
    left, right = smallest((a, b), cuts, lambda a, b: bool((a @ b.t()).any()))
    assert (left.shape, right.shape) == ((1, 32), (1, 32))


def test_what_cannot_be_shown_again_stays_whole_and_what_raises_is_not_taken():
    x = bad_at(3, 3)
    assert smallest((x,), CUTS, lambda _: False)[0] is x

    def only_whole(part):
        if part.shape != x.shape:
            raise ValueError("no such shape")
        return True

    assert smallest((x,), CUTS, only_whole)[0] is x


def test_a_product_of_zeros_is_no_fault():
    draw = Draw(policy=OperandPolicy(format="mxfp4"), key=KEY)
    assert _off(Shifted(), "cpu", draw, torch.zeros(2, 32), torch.ones(3, 32)) == 0


@pytest.mark.parametrize(
    ("fault", "check", "shapes"),
    [
        ("sign of zero", "quantised bits: mxfp4", {"x": (32, 1)}),
        ("output", "product: mxfp4", {"a": (1, 32), "b": (1, 32)}),
        ("narrow", "exact probe: mxfp4", {"a": (1, 4096), "b": (1, 4096)}),
    ],
)
def test_a_wrong_back_end_is_shown_by_little(fault, check, shapes):
    wrong = Shifted()
    wrong.fault = fault
    by_name = {one.name: one for one in checks(wrong, "cpu", (OperandPolicy(format="mxfp4"),))}
    with pytest.raises(FaultError) as caught:
        by_name[check].run()
    found = caught.value.tensors
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
    assert f"shown by {next(iter(shapes))} {list(next(iter(shapes.values())))}" in str(caught.value)
