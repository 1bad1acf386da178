"""Tensors that must be the same to the bit."""

from functools import partial

import torch

assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)
"""Hold one or more tensors, in lists or by name, to others: shapes, types and every value; NaN is unequal."""
