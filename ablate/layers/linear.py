"""The quantised linear layer: three GEMMs, with both operands of each quantised along its contraction axis.

Fprop y = x wᵀ, Dgrad dx = dy w, Wgrad dw = dyᵀ x, in bf16 with fp32 accumulation. On a GPU a layer in which
nothing is quantised is plain torch, around which a compiler fuses. Else custom operators do all the work, so
that ``torch.compile`` sees one node and never traces a random generator. They receive the number of a layer's
*site* and look up its plan and stream position when they run. The backward pass saves x and the weight
parameter itself, never a copy of the weight: under FSDP2 a copy would keep the gathered weight in memory.

If blocks, tiles or Hadamard groups do not divide the number of tokens, the operators add rows of zeros.
In-features and out-features must fit.

The gradient passes straight through the quantisers. If a policy masks, the gradient is zero for clipped
values. If a backward operand is that of the forward pass (source ``forward``), the product is in the
forward's rotated in-features and is rotated back.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from ablate.backends.protocol import Draw, dequantised
from ablate.layers.delayed import (
    BUFFERS_OF_SCALES,
    clear_history,
    delayed_amax,
    keep_history,
    newest_step,
)
from ablate.layers.plan import plan_layer
from ablate.layers.state import EVAL_CALL, Position
from ablate.numerics.formats import ELEMENTS
from ablate.recipes import LayerRecipe, features_fault
from ablate.recipes.coverage import in_short

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ablate.backends.protocol import Operand
    from ablate.layers.plan import PlannedLayer, PlannedOperand
    from ablate.layers.state import RecipeState
    from ablate.recipes import Gemm, OperandPolicy
    from ablate.recipes.place import LayerPlace

_CALL_IT = "call the layer, or give it a rule of the recipe: layers: [{match: …, recipe: bf16}]"

_PLAIN_ON = ("cuda",)
"""Device types where a layer without quantised operands is plain torch; a CPU may multiply in its own way."""

_sites: WeakValueDictionary[int, QuantLinear] = WeakValueDictionary()
"""The layers by site: a custom operator takes tensors and numbers, and no objects."""
_numbers = itertools.count()


@cache
def _quantised_class(kind: type[nn.Linear]) -> type[QuantLinear]:
    """Make a class that computes as ``QuantLinear`` and keeps the other methods of a subclass."""
    return type(f"Quant{kind.__name__}", (QuantLinear, kind), {})


class QuantLinear(nn.Linear):
    """A linear layer whose three GEMMs follow a recipe.

    Takes [..., in_features] of any float dtype and computes in bf16. The result is bf16 for bf16 inputs and
    under autocast (also to fp16, which could not hold it); otherwise it has the input's dtype. Autocast
    changes nothing inside the three GEMMs. ``name`` keys the random streams and must be unique within a
    model. ``take_over`` makes one of a linear layer.
    """

    OWN_ATTRIBUTES = frozenset(
        ("name", "state", "place", "site", "override", "has_run", *BUFFERS_OF_SCALES)
    )
    """Attributes and buffers, besides this class's, that a layer must not have before ``take_over``."""

    @staticmethod
    def take_over(
        linear: nn.Linear, *, name: str, state: RecipeState, place: LayerPlace
    ) -> QuantLinear:
        """Make a linear layer follow a recipe.

        It stays the same object, so the change reaches modules and lists that hold it, hooks and wrappers.
        """
        kind = type(linear)
        linear.__class__ = QuantLinear if kind is nn.Linear else _quantised_class(kind)  # type: ignore[arg-type]  # mypy takes no class for hashable
        assert isinstance(linear, QuantLinear)
        linear._follow(name, state, place)  # noqa: SLF001  its own class, by now
        return linear

    def _follow(self, name: str, state: RecipeState, place: LayerPlace) -> None:
        self.name = name
        self.state = state
        self.place = place
        self.phases = phases_that_fit(self, name, state, place)
        self._delayed: dict[tuple[Gemm, str], int] = {}  # rows of the history
        for _, recipe in self.phases:
            for gemm, operand, policy in recipe.operands():
                if policy.scale == "delayed":
                    self._delayed.setdefault((gemm, operand), len(self._delayed))
        if self._delayed:
            keep_history(self, len(self._delayed))
        # set by diagnostics and bf16 evaluations
        self.override: LayerRecipe | None = None
        self.has_run = False
        self._register()

    def _register(self) -> None:
        self._plans: dict[tuple[Hashable, torch.device, int], PlannedLayer] = {}
        self.site = next(_numbers)
        _sites[self.site] = self
        # A graph cannot ask for tokens. Said here and not at import: it loads the compiler, which takes seconds.
        torch.compiler.assume_constant_result(_is_always_plain)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register()  # a copy is a site of its own

    def forget_amax(self) -> None:
        """Clear the history of largest magnitudes for delayed scales."""
        if self._delayed:
            clear_history(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x wᵀ + b for x [..., in_features].

        Raises:
            ValueError: x has whole numbers or another width.
            RuntimeError: a transform of ``torch.func`` is active, or as ``RecipeState.position``.
        """
        if not x.is_floating_point() or x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"layer {self.name}: expected x […, {self.in_features}] of floating point, got "
                f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
            )
        if torch._C._are_functorch_transforms_active():  # noqa: SLF001  as torch.autograd.Function asks it
            raise RuntimeError(
                f"layer {self.name} follows a recipe, which no transform of torch.func (grad, vmap, jvp) can "
                "pass: use torch.autograd.grad or .backward(), and a loop for gradients of each sample"
            )
        return compute(self, x, self.weight)

    def position(self) -> Position:
        """Return this layer's stream position; count the forward pass unless the trainer does."""
        self.has_run = True
        return self.state.position(self.name, training=self.training)

    def is_plain_now(self, device: torch.device) -> bool:
        """Whether plain torch computes this pass: nothing is quantised, and nobody observes the operands."""
        state = self.state
        is_observed = state.watch is not None or state.tap is not None
        if is_observed or device.type not in _PLAIN_ON:
            return False
        if torch.compiler.is_compiling():
            return self.override is None and _is_always_plain(self.site, str(device))
        if not self.plan(state.tokens, device).is_plain:
            return False
        self.has_run = True
        state.note_start(training=self.training)
        return True

    @property
    def is_low_now(self) -> bool:
        """Whether a GEMM is in low precision at the state's position."""
        return not self.recipe_at(self.state.tokens).is_high_precision

    def recipe_at(self, tokens: int) -> LayerRecipe:
        """Find this layer's recipe after this many training tokens; ``override`` replaces it."""
        return self._phase_at(tokens)[1]

    def _phase_at(self, tokens: int) -> tuple[Hashable, LayerRecipe]:
        if self.override is not None:
            return self.override, self.override
        return next(phase for phase in self.phases if phase[0] <= tokens)

    def plan(self, tokens: int, device: torch.device) -> PlannedLayer:
        """Return this layer's work by its recipe after this many training tokens; planned on first use."""
        phase, recipe = self._phase_at(tokens)
        key = (phase, device, self.state.replica_number)
        planned = self._plans.get(key)
        if planned is None:
            planned = plan_layer(recipe, self.name, self.state, device, self._delayed)
            self._plans[key] = planned
        return planned

    def draw(
        self, tensor: Tensor | Operand, operand: PlannedOperand, at: Position
    ) -> Draw:
        """Collect what quantises an operand at a position; a delayed scale records its magnitude."""
        policy = operand.policy
        row = operand.history
        position = self.state.placed(at, operand.device)
        amax = None
        if row is not None:
            if not at.step and at.call < EVAL_CALL:
                self._check_history(row)
            values = tensor if isinstance(tensor, Tensor) else dequantised(tensor)
            largest = ELEMENTS[policy.format].max
            amax = delayed_amax(self, row, values, at, position, largest=largest)
        return Draw(policy=policy, key=operand.key(at), amax=amax, position=position)

    def _check_history(self, row: int) -> None:
        """Warn once if a history is of a training that the state, at step 0, knows nothing of."""
        step = newest_step(self, row)
        if step > 0:
            self.state.warn_once(
                f"delayed scales of step {step} came with the weights, but the state is at step 0 and draws "
                "its noise anew (to go on, load what state.state_dict() gave into state.load_state_dict; for "
                "a new training, load the weights without amax_… buffers)"
            )

    def operand(
        self, tensor: Tensor | Operand, operand: PlannedOperand, at: Position
    ) -> Operand:
        """Quantise an operand as planned; ``tensor`` may be the forward pass's, to be quantised once more."""
        draw = self.draw(tensor, operand, at)
        if isinstance(tensor, Tensor):
            quantised = operand.backend.quantize(tensor, draw, axis=operand.axis)
        else:
            quantised = operand.backend.quantize_again(tensor, draw, axis=operand.axis)
        return self.watched(operand, quantised)

    def watched(self, operand: PlannedOperand, quantised: Operand) -> Operand:
        """Pass a quantised operand to ``state.watch``, and return it."""
        if self.state.watch is not None:
            self.state.watch(self.name, operand.gemm, operand.name, quantised)
        return quantised


def _is_always_plain(site: int, device: str) -> bool:
    layer = _sites[site]
    return all(
        layer.plan(start, torch.device(device)).is_plain for start, _ in layer.phases
    )


def compute(layer: QuantLinear, x: Tensor, weight: Tensor) -> Tensor:
    """Compute x wᵀ + b by a layer's recipe; ``weight``: the layer's, or what its module has made of it."""
    rows = x.reshape(-1, layer.in_features).to(torch.bfloat16)
    if layer.is_plain_now(x.device):
        y = _Plain.apply(rows, weight)
    else:
        y, _ = _fprop(rows, weight, layer.site)
    if layer.bias is not None:
        y = y + layer.bias.to(y.dtype)
    stays_bf16 = x.dtype == torch.bfloat16 or (
        not x.is_meta and torch.is_autocast_enabled(x.device.type)
    )
    out: Tensor = y if stays_bf16 else y.to(x.dtype)
    return out.view(*x.shape[:-1], layer.out_features)


class _Plain(torch.autograd.Function):
    """The three GEMMs in plain torch. Saves the weight itself, where autograd would save its bf16 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, weight.to(torch.bfloat16))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dy = grads[0].to(torch.bfloat16)
        wants_dx, wants_dw = ctx.needs_input_grad
        with torch.autocast(dy.device.type, enabled=False):
            dx = dy @ weight.to(torch.bfloat16) if wants_dx else None
            dw = (dy.t() @ x).to(weight.dtype) if wants_dw else None
        return dx, dw


def filled(tensor: Tensor, group: int) -> Tensor:
    """Fill the rows of x or dy up to whole groups of tokens with zeros, which add nothing to a product."""
    missing = -len(tensor) % group
    return functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor


def phases_that_fit(
    layer: nn.Linear, name: str, state: RecipeState, place: LayerPlace
) -> tuple[tuple[int, LayerRecipe], ...]:
    """List the (first token, recipe) pairs of a layer, newest first.

    Raises:
        ValueError: a block or group of a recipe does not divide the layer's features, or a phase starts at a
            fraction of an unknown budget.
    """
    phases = state.phases(place)
    for _, recipe in phases:
        if fault := features_fault(
            recipe, name, inputs=layer.in_features, outputs=layer.out_features
        ):
            raise ValueError(
                f"{fault[0]} (give it a rule of its own: layers: [{{match: …, recipe: bf16}}])"
            )
    return phases


def weights_used_beside(state: RecipeState) -> str | None:
    """Say where the weights of layers in low precision are multiplied beside them; None if nowhere.

    If no place is known, name the layers that never ran though their weights have gradients. Call it before
    the gradients are cleared. With several processes an expert may run only in another one, so it is not asked.
    """
    places = dict(state.beside)
    if not places and not distributed.is_initialized():
        places = {"code that never calls the layer": _used_alone(state)}
    faults = []
    for place, names in places.items():
        if names:
            layers = ", ".join(in_short(sorted(names)))
            faults.append(f"{place} multiplies by the weight of {layers} itself")
    return f"{'; '.join(faults)}, in high precision ({_CALL_IT})" if faults else None


def _used_alone(state: RecipeState) -> set[str]:
    layers = [layer for layer in _sites.values() if layer.state is state]
    # layers may share a weight
    used_weights = {id(layer.weight) for layer in layers if layer.has_run}
    unused = set()
    for layer in layers:
        weight = layer.weight
        # on the meta device no layer notes that it ran
        is_known = isinstance(weight, nn.Parameter) and not weight.is_meta
        is_used = id(weight) in used_weights
        if is_known and not is_used and weight.grad is not None and layer.is_low_now:
            unused.add(layer.name)
    return unused


def quantised_layers(module: nn.Module) -> dict[str, QuantLinear]:
    """Find the quantised layers of a model, by name in the model's order."""
    return {
        layer.name: layer
        for layer in module.modules()
        if isinstance(layer, QuantLinear)
    }


def is_sharded(tensor: Tensor) -> bool:
    """Whether other processes hold the rest of a tensor, as under FSDP2."""
    # a DTensor; importing its module takes half a second
    return hasattr(tensor, "to_local")


def local_rows(tensor: Tensor) -> tuple[Tensor, slice]:
    """Return this process's part of a tensor, and the rows of the whole tensor that it covers.

    FSDP2 splits the first dimension like ``torch.chunk``.
    """
    if not is_sharded(tensor):
        return tensor, slice(None)
    whole: Any = tensor
    mesh = whole.device_mesh
    (placement,) = whole.placements
    assert placement.is_shard(0)
    chunk = -(-len(whole) // mesh.size())
    start = min(chunk * mesh.get_local_rank(), len(whole))
    local: Tensor = whole.to_local()
    return local, slice(start, start + len(local))


@torch.library.custom_op("ablate::fprop", mutates_args=())
def _fprop(x: Tensor, weight: Tensor, site: int) -> tuple[Tensor, Tensor]:
    """X [M, K] bf16, weight [N, K] → y [M, N] bf16, and the stream position (int64 [3])."""
    layer = _sites[site]
    position = layer.position()
    # it would round the products in fp32
    with torch.autocast(x.device.type, enabled=False):
        y = Pass(layer, position, x, weight).product("fprop")
    return y, torch.tensor((position.step, position.call, position.tokens))


@_fprop.register_fake
def _(x: Tensor, weight: Tensor, _site: int) -> tuple[Tensor, Tensor]:
    y = x.new_empty(len(x), len(weight))
    return y, torch.empty(3, dtype=torch.int64, device="cpu")


@torch.library.custom_op("ablate::gradients", mutates_args=())
def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    position: Tensor,
    site: int,
    wants_dx: bool,
    wants_dw: bool,
) -> tuple[Tensor, Tensor]:
    """Dy [M, N] bf16 → dx [M, K] bf16 and dw [N, K] in the weight's dtype; empty if it is not wanted."""
    layer = _sites[site]
    step, call, tokens = position.tolist()
    at = Position(step=step, call=call, tokens=tokens)
    layer.state.backward_done(layer.name, at)
    if layer.state.tap is not None:
        layer.state.tap(layer.name, at, dy, x, weight)
    with torch.autocast(dy.device.type, enabled=False):
        back = Pass(layer, at, x, weight, dy)
        if wants_dx and wants_dw:
            back.quantise_dy_in_one_read()
        # One after the other, so that else only one copy of dy exists at a time.
        dx = back.product("dgrad") if wants_dx else dy.new_empty(0)
        dw = back.product("wgrad") if wants_dw else dy.new_empty(0)
    return dx, dw


@_gradients.register_fake
def _(
    dy: Tensor,
    _x: Tensor,
    weight: Tensor,
    _position: Tensor,
    _site: int,
    wants_dx: bool,
    wants_dw: bool,
) -> tuple[Tensor, Tensor]:
    dx = dy.new_empty(len(dy), weight.shape[1]) if wants_dx else dy.new_empty(0)
    dw = dy.new_empty(0)
    if wants_dw:
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    return dx, dw


class Pass:
    """A forward or backward pass at a position. The operands of Fprop are quantised again at most once each.

    x [M, K] and dy [M, N] are bf16, the weight [N, K] has any float dtype. Dgrad may need w for its product and
    x's mask, Wgrad the other way round. What both need is kept from its first use to its second.
    """

    def __init__(
        self,
        layer: QuantLinear,
        at: Position,
        x: Tensor,
        weight: Tensor,
        dy: Tensor | None = None,
    ) -> None:
        self._layer = layer
        self._at = at
        self._rows = len(x)
        self._plan = layer.plan(at.tokens, x.device)
        self._x = filled(x, self._plan.token_group)
        self._weight = weight
        self._dy = None if dy is None else filled(dy, self._plan.token_group)
        self._kept: dict[str, Operand] = {}
        self._kept_dy: dict[Gemm, Operand] = {}

    def product(self, gemm: Gemm) -> Tensor:
        """Compute y [M, N] or dx [M, K] in bf16, or dw [N, K] in the weight's dtype."""
        planned = self._plan.gemms[gemm]
        if gemm == "fprop":
            out = planned.backend.multiply(self._forward("x"), self._forward("w"))
        else:
            right = planned.right
            source: Tensor | Operand
            if right.policy.source == "high_precision":
                source = self._tensor(right.name)
            else:
                source = self._forward(right.name)
            dy = self._kept_dy.pop(gemm, None)
            if dy is None:
                dy = self._layer.operand(self._tensor("dy"), planned.left, self._at)
            other = self._layer.operand(source, right, self._at)
            out = planned.backend.multiply(dy, other)
            if planned.way_back is not None:
                of = "x" if gemm == "dgrad" else "w"
                out = self._way_back(out, planned.way_back, of)
        if gemm == "wgrad":
            return out.to(self._weight.dtype)
        # the rows that filled it up
        return out if len(out) == self._rows else out[: self._rows].clone()

    def quantise_dy_in_one_read(self) -> None:
        """Quantise dy for both gradients together, where the back end reads it only once."""
        if not self._plan.dy_in_one_read:
            return
        dy = self._tensor("dy")
        dgrad = self._plan.gemms["dgrad"].left
        wgrad = self._plan.gemms["wgrad"].left
        rows = self._layer.draw(dy, dgrad, self._at)
        columns = self._layer.draw(dy, wgrad, self._at)
        for_dgrad, for_wgrad = dgrad.backend.quantize_both(dy, rows, columns)
        self._kept_dy["dgrad"] = self._layer.watched(dgrad, for_dgrad)
        self._kept_dy["wgrad"] = self._layer.watched(wgrad, for_wgrad)

    def _way_back(self, grad: Tensor, policy: OperandPolicy, name: str) -> Tensor:
        """Take the gradient of x or w back through the mask and the rotation of its forward operand."""
        forward = self._plan.operand("fprop", name)
        mask = self._forward(name).mask if policy.mask else None
        return forward.backend.gradient_through(
            grad, policy, key=forward.key(self._at), mask=mask
        )

    def _tensor(self, name: str) -> Tensor:
        """Return x, dy or w in bf16."""
        if name == "w":
            return self._weight.to(torch.bfloat16)
        tensor = self._x if name == "x" else self._dy
        assert tensor is not None
        return tensor

    def _forward(self, name: str) -> Operand:
        """Quantise x or w as for Fprop's product."""
        if name in self._kept:
            return self._kept.pop(name)
        quantised = self._layer.operand(
            self._tensor(name), self._plan.operand("fprop", name), self._at
        )
        backward = self._plan.operand("wgrad" if name == "x" else "dgrad", name)
        if quantised.mask is not None and backward.policy.source != "high_precision":
            self._kept[name] = quantised
        return quantised


def _setup_context(
    ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]
) -> None:
    x, weight, site = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.site = site
    ctx.mark_non_differentiable(output[1])


def _backward(
    ctx: Any, dy: Tensor, _position: Tensor
) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, position = ctx.saved_tensors
    wants_dx, wants_dw = ctx.needs_input_grad[:2]
    dx, dw = _gradients(
        dy.to(torch.bfloat16), x, weight, position, ctx.site, wants_dx, wants_dw
    )
    return dx if wants_dx else None, dw if wants_dw else None, None


_fprop.register_autograd(_backward, setup_context=_setup_context)
