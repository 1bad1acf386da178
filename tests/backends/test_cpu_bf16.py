"""Products of bf16 matrices on a CPU without bf16 arithmetic."""

import os
import subprocess
import sys
import textwrap

import pytest

from ablate.backends.cpu_bf16 import multiplies_bf16

CODE = """
    import torch
    from torch import nn
    from ablate.backends.cpu_bf16 import multiplies_bf16, multiply_in_fp32
    from ablate.backends.cpu_build import loaded

    assert not multiplies_bf16()
    kernel, _ = loaded()
    assert kernel is None or not kernel.multiplies
    multiply_in_fp32()
    whole = lambda *shape: torch.randint(-90, 91, shape, generator=torch.Generator().manual_seed(sum(shape)))
    a, b, c = whole(3, 33, 127), whole(3, 127, 40), whole(33, 40)
    half = lambda x: x.to(torch.bfloat16)

    def once(x):  # fp32 holds these sums exactly, whatever their order
        return x.to(torch.float64).to(torch.bfloat16)

    assert torch.equal(half(a) @ half(b), once(a @ b))
    assert torch.equal(half(a[0]) @ half(b[0]), once(a[0] @ b[0]))
    left_right = half(a[0]), half(b[0])
    assert torch.equal(torch.addmm(half(c), *left_right, alpha=0.5, beta=2), once(2 * c + a[0] @ b[0] / 2))
    assert torch.equal(torch.baddbmm(half(c), half(a), half(b)), once(c + a @ b))
    left, right = (half(x).requires_grad_() for x in (a[0], b[0]))
    (left @ right).backward(half(c))
    assert torch.equal(left.grad, once(c @ b[0].T)) and torch.equal(right.grad, once(a[0].T @ c))
    layer, x = nn.Linear(127, 40), a[0].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # a foreign model's layer
        y = layer(x)
    wide = nn.functional.linear(half(x).float(), half(layer.weight).float(), half(layer.bias).float())
    assert torch.equal(y, half(wide))
    assert torch.equal(a[0].float() @ b[0].float(), (a[0] @ b[0]).float())
    assert torch.equal(a[0].double() @ b[0].double(), (a[0] @ b[0]).double())
    assert (half(a[0])[:0] @ half(b[0])).shape == (0, 40) and not (half(a[0])[:, :0] @ half(b[0])[:0]).any()
"""


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE", "avx512_core_vnni"])
def test_products_are_rounded_once_forward_and_backward(instructions):
    # In a process of its own: the operators of a process are changed for good.
    run = [sys.executable, "-W", "error", "-c", textwrap.dedent(CODE)]
    limited = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions}
    result = subprocess.run(
        run, env=limited, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(not multiplies_bf16(), reason="a CPU without bf16 arithmetic")
def test_a_cpu_that_multiplies_bf16_is_left_as_it_is():
    code = """
        import torch
        from ablate.backends import cpu_bf16

        cpu_bf16.multiply_in_fp32()
        assert cpu_bf16.multiplies_bf16() and not cpu_bf16._overrides
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
