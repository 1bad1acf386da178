"""The quantised linear layer: three GEMMs, with both operands of each quantised along its contraction axis.

Fprop y = x wᵀ, Dgrad dx = dy w, Wgrad dw = dyᵀ x, in bf16 with fp32 accumulation. Custom operators do all
the work, so that ``torch.compile`` sees one node and never traces a random generator. They receive the number
of a layer's *site* and look up its recipe, back end and stream position when they run. The backward pass
saves x and the weight parameter itself, never a copy of the weight: under FSDP2 a copy would keep the
gathered weight in memory.

The gradient passes straight through the quantisers. If a policy masks, the gradient is zero for clipped
values. If a backward operand is quantised from the forward pass's operand (source ``forward``), the product
is in the forward's rotated in-features and is rotated back.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ablate.backends.protocol import Draw
from ablate.layers.state import EVAL_CALL, Position, RecipeState
from ablate.numerics.philox import Key
from ablate.numerics.quantiser import check_operand
from ablate.numerics.rotate import unrotate
from ablate.recipes import OPERANDS
from ablate.recipes.place import LayerPlace, places
from ablate.recipes.policy import contracted_axis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.backends.protocol import Backend, Operand
    from ablate.recipes import Gemm, LayerRecipe, OperandPolicy

AMAX_HISTORY = 1024
"""Steps of past largest magnitudes that a delayed scale uses (TransformerEngine's DelayedScaling)."""

_FORWARDS_WITHOUT_ADVANCE = 1000

_sites: WeakValueDictionary[int, QuantLinear] = WeakValueDictionary()
_numbers = itertools.count()


class QuantLinear(nn.Linear):
    """A linear layer whose three GEMMs follow a recipe.

    Takes [..., in_features] of any float dtype and computes in bf16. The result is bf16 for bf16 inputs and
    under autocast, else of the input's dtype. ``name`` keys the random streams and must be unique within a
    model. ``weight`` and ``bias`` are existing parameters to use; by default the weight is uninitialised and
    there is no bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        state: RecipeState,
        place: LayerPlace | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        # nn.Linear.__init__ would draw initial weights for nothing.
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        if not isinstance(weight, nn.Parameter):
            weight = nn.Parameter(torch.empty(out_features, in_features))
        self.weight = weight
        self.register_parameter("bias", bias if isinstance(bias, nn.Parameter) else None)
        self.name, self.state = name, state
        self.place = places([name])[name] if place is None else place
        self._phases = state.phases(self.place)
        delayed = dict.fromkeys(
            (gemm, operand)
            for _, recipe in self._phases
            for gemm, operand, policy in recipe.operands()
            if policy.scale == "delayed"
        )
        self._delayed = {which: index for index, which in enumerate(delayed)}
        if self._delayed:
            shape = (len(self._delayed), AMAX_HISTORY)
            self.register_buffer("amax_history", torch.empty(shape, dtype=torch.float32))
            self.register_buffer("amax_step", torch.empty(shape, dtype=torch.int64))
            self.forget_amax()
        self._calls, self._counted_step, self._evaluations = 0, -1, 0
        self.override: LayerRecipe | None = None  # set by diagnostics, replaces the recipe
        self._register()

    def _register(self) -> None:
        self._site = next(_numbers)
        _sites[self._site] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register()  # a copy is a site of its own

    def forget_amax(self) -> None:
        """Clear the history of largest magnitudes for delayed scales."""
        if self._delayed:
            self.get_buffer("amax_history").zero_()
            self.get_buffer("amax_step").fill_(-1)

    def extra_repr(self) -> str:
        """Return the text that ``print(model)`` shows."""
        return f"{super().extra_repr()}, name={self.name!r}"

    def forward(self, x: Tensor) -> Tensor:
        """Return x wᵀ + b for x [..., in_features]."""
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        y, _ = _fprop(rows, self.weight, self._site)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        keep = x.dtype == torch.bfloat16 or (not x.is_meta and torch.is_autocast_enabled(x.device.type))
        out: Tensor = y if keep else y.to(x.dtype)
        return out.view(*x.shape[:-1], self.out_features)

    def position(self) -> Position:
        """Return this layer's stream position; count its forward passes unless the trainer does."""
        state = self.state
        call = self._next_call() if state.call is None else state.call
        return Position(step=state.step, call=call, tokens=state.tokens)

    def _next_call(self) -> int:
        if not self.training:
            self._evaluations += 1
            return EVAL_CALL + self._evaluations - 1
        if self.state.step != self._counted_step:
            self._counted_step, self._calls = self.state.step, 0
        # A forward pass within a backward pass is activation checkpointing, which repeats the last forward.
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001  as torch's own checkpointing asks
            self._calls += 1
        if self._calls == _FORWARDS_WITHOUT_ADVANCE:
            self.state.warn_if_it_should_move(self._calls)
        return max(self._calls - 1, 0)

    def recipe_at(self, tokens: int) -> LayerRecipe:
        """Return the recipe of this layer after this many training tokens."""
        if self.override is not None:
            return self.override
        return next(recipe for start, recipe in self._phases if start <= tokens)

    def key(self, gemm: Gemm, operand: str, policy: OperandPolicy, at: Position) -> Key | None:
        """Return the key of one operand's random draw, or None if the policy draws nothing."""
        if policy.rounding == "nearest" and policy.signs == "none" and policy.scale != "ms_eden":
            return None
        return Key(
            seed=self.state.seed, layer=self.name, gemm=gemm, operand=operand,
            step=at.stream_step, call=at.call,
        )  # fmt: skip

    def backend(self, gemm: Gemm, at: Position, where: Tensor) -> Backend:
        """Return the back end that does one GEMM at this position."""
        return self.state.backend.of(self.recipe_at(at.tokens).gemm(gemm), str(where.device))

    def draw(self, tensor: Tensor, gemm: Gemm, operand: str, at: Position) -> Draw:
        """Return the policy, key and amax for one operand of one GEMM at this position."""
        policy = self.recipe_at(at.tokens).gemm(gemm)
        left, right = OPERANDS[gemm]
        assert operand in (left, right)
        chosen = policy.left if operand == left else policy.right
        amax = self._delayed_amax(tensor, (gemm, operand), at) if chosen.scale == "delayed" else None
        return Draw(policy=chosen, key=self.key(gemm, operand, chosen, at), amax=amax)

    def operand(self, tensor: Tensor, gemm: Gemm, operand: str, at: Position) -> Operand:
        """Quantise one operand of one GEMM by the recipe at this position."""
        axis = contracted_axis(gemm, operand)
        with self._named(gemm, operand):
            done = self.backend(gemm, at, tensor).quantize(
                tensor, self.draw(tensor, gemm, operand, at), axis=axis
            )
        self._show(gemm, operand, done)
        return done

    def both_of_dy(self, dy: Tensor, at: Position) -> tuple[Operand, Operand]:
        """Quantise dy for Dgrad and for Wgrad in one read, by the back end of both GEMMs."""
        gemms: tuple[Gemm, Gemm] = ("dgrad", "wgrad")
        rows, columns = (self.draw(dy, gemm, "dy", at) for gemm in gemms)
        for gemm, draw in zip(gemms, (rows, columns), strict=True):
            with self._named(gemm, "dy"):
                check_operand(dy, draw.policy, contracted_axis(gemm, "dy"), draw.key)
        done = self.backend("dgrad", at, dy).quantize_both(dy, rows, columns)
        for gemm, operand in zip(gemms, done, strict=True):
            self._show(gemm, "dy", operand)
        return done

    @contextmanager
    def _named(self, gemm: Gemm, operand: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{gemm.capitalize()}'s {operand} of layer {self.name}: {error}") from None

    def _show(self, gemm: Gemm, operand: str, done: Operand) -> None:
        if self.state.watch is not None:
            self.state.watch(self.name, gemm, operand, done)

    def _delayed_amax(self, tensor: Tensor, which: tuple[Gemm, str], at: Position) -> float:
        """Record this step's largest magnitude; return that of past steps, or this one at the start."""
        index = self._delayed[which]
        history, steps = self.get_buffer("amax_history")[index], self.get_buffer("amax_step")[index]
        now = float(tensor.abs().max().item()) if tensor.numel() else 0.0
        past = (steps >= 0) & (steps < at.step) & (steps > at.step - AMAX_HISTORY)
        known = float(history[past].max().item()) if bool(past.any()) else now
        if at.call < EVAL_CALL:
            slot = at.step % AMAX_HISTORY
            same_step = int(steps[slot]) == at.step  # another call, or this one recomputed
            history[slot] = max(now, float(history[slot])) if same_step else now
            steps[slot] = at.step
        return known


def quantised_layers(module: nn.Module) -> dict[str, QuantLinear]:
    """Return the quantised layers of a model by name, in the model's order."""
    return {layer.name: layer for layer in module.modules() if isinstance(layer, QuantLinear)}


@torch.library.custom_op("ablate::fprop", mutates_args=())
def _fprop(x: Tensor, weight: Tensor, site: int) -> tuple[Tensor, Tensor]:
    """X [M, K] bf16, weight [N, K] → y [M, N] bf16, and the stream position (int64 [3])."""
    layer = _sites[site]
    at = layer.position()
    y = _output(layer, at, x, weight)
    return y, torch.tensor((at.step, at.call, at.tokens), dtype=torch.int64)


@_fprop.register_fake
def _(x: Tensor, weight: Tensor, _site: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), torch.empty(3, dtype=torch.int64, device="cpu")


@torch.library.custom_op("ablate::gradients", mutates_args=())
def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, position: Tensor, site: int, wants_dx: bool, wants_dw: bool
) -> tuple[Tensor, Tensor]:
    """Dy [M, N] bf16 → dx [M, K] bf16 and dw [N, K] in the weight's dtype; empty what is not wanted."""
    layer = _sites[site]
    step, call, tokens = position.tolist()
    at = Position(step=step, call=call, tokens=tokens)
    if layer.state.tap is not None:
        layer.state.tap(layer.name, at, dy, x, weight)
    if wants_dx and wants_dw:
        backend = layer.backend("dgrad", at, dy)
        if backend.one_read and backend is layer.backend("wgrad", at, dy):
            along_n, along_m = layer.both_of_dy(dy, at)
            dx = _input_gradient(layer, at, along_n, x, weight)
            return dx, _weight_gradient(layer, at, along_m, x, weight)
    # One after the other, so that only one copy of dy exists at a time.
    dx = product(layer, "dgrad", at, dy=dy, x=x, weight=weight) if wants_dx else dy.new_empty(0)
    return dx, product(layer, "wgrad", at, dy=dy, x=x, weight=weight) if wants_dw else dy.new_empty(0)


@_gradients.register_fake
def _(
    dy: Tensor, _x: Tensor, weight: Tensor, _position: Tensor, _site: int, wants_dx: bool, wants_dw: bool
) -> tuple[Tensor, Tensor]:
    dx = dy.new_empty(dy.shape[0], weight.shape[1]) if wants_dx else dy.new_empty(0)
    contiguous = torch.contiguous_format
    return dx, torch.empty_like(weight, memory_format=contiguous) if wants_dw else dy.new_empty(0)


def product(layer: QuantLinear, gemm: Gemm, at: Position, *, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return one GEMM's output at a position as in training: y [M, N], dx [M, K] or dw [N, K].

    dy [M, N] and x [M, K] are bf16, the weight [N, K] of any float dtype. dw has its dtype, y and dx bf16.
    """
    if gemm == "fprop":
        return _output(layer, at, x, weight)
    if gemm == "dgrad":
        return _input_gradient(layer, at, layer.operand(dy, "dgrad", "dy", at), x, weight)
    return _weight_gradient(layer, at, layer.operand(dy, "wgrad", "dy", at), x, weight)


def _output(layer: QuantLinear, at: Position, x: Tensor, weight: Tensor) -> Tensor:
    return layer.backend("fprop", at, x).multiply(
        layer.operand(x, "fprop", "x", at), layer.operand(weight.to(torch.bfloat16), "fprop", "w", at)
    )


def _input_gradient(layer: QuantLinear, at: Position, dy: Operand, x: Tensor, weight: Tensor) -> Tensor:
    w = weight.to(torch.bfloat16)
    doubly = layer.recipe_at(at.tokens).dgrad.right.source == "forward"
    if doubly:
        w = dequantised(layer.operand(w, "fprop", "w", at))
    dx = layer.backend("dgrad", at, w).multiply(dy, layer.operand(w, "dgrad", "w", at))
    return _through_quantiser(layer, dx, x, "x", at, rotated=doubly)


def _weight_gradient(layer: QuantLinear, at: Position, dy: Operand, x: Tensor, weight: Tensor) -> Tensor:
    doubly = layer.recipe_at(at.tokens).wgrad.right.source == "forward"
    source = dequantised(layer.operand(x, "fprop", "x", at)) if doubly else x
    dw = layer.backend("wgrad", at, x).multiply(dy, layer.operand(source, "wgrad", "x", at))
    w = weight.to(torch.bfloat16)
    return _through_quantiser(layer, dw, w, "w", at, rotated=doubly).to(weight.dtype)


def dequantised(operand: Operand) -> Tensor:
    """Return the stored matrix after quantising, with every factor applied, in its rotated basis."""
    descale = operand.descale
    if isinstance(descale, float) and descale == 1.0:
        return operand.values
    if isinstance(descale, Tensor) and descale.numel() > 1:  # one per row of [n, k]
        descale = descale[:, None] if operand.axis == 1 else descale[None, :]
    return operand.values.to(torch.float32) * descale


def _through_quantiser(
    layer: QuantLinear, grad: Tensor, tensor: Tensor, name: str, at: Position, *, rotated: bool
) -> Tensor:
    """Take the gradient of a forward operand, x or w [rows, K], back through its mask and rotation."""
    forward = layer.recipe_at(at.tokens).fprop
    policy = forward.left if name == "x" else forward.right
    if policy.mask:
        mask = layer.operand(tensor, "fprop", name, at).mask
        assert mask is not None
        grad = grad * mask
    if rotated and policy.hadamard:
        key = layer.key("fprop", name, policy, at)
        grad = unrotate(grad.to(torch.float32), policy, key).to(torch.bfloat16)
    return grad


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    x, weight, site = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.site = site
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: Tensor, _position: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, position = ctx.saved_tensors
    wants_dx, wants_dw = ctx.needs_input_grad[:2]
    dx, dw = _gradients(dy.to(torch.bfloat16), x, weight, position, ctx.site, wants_dx, wants_dw)
    return dx if wants_dx else None, dw if wants_dw else None, None


_fprop.register_autograd(_backward, setup_context=_setup_context)
