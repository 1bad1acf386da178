"""Who does which GEMM where: by name, or the fastest native one; and nothing in silence."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch

from ablate.backends import select
from ablate.backends.device import KNOWN, Device, device_of, device_of_arch
from ablate.backends.emulated import EmulatedBackend
from ablate.backends.packing import packing_fault
from ablate.backends.protocol import Support
from ablate.backends.select import Selection, gemms_of, load_backend, overall_mode
from ablate.backends.testing.suite import both, checks
from ablate.base.errors import UserError
from ablate.recipes import GemmPolicy, OperandPolicy, RecipeSpec, resolve
from ablate.run import backends
from ablate.run.backends import backend_names

BF16 = OperandPolicy()
MXFP4 = OperandPolicy(format="mxfp4")
SR = OperandPolicy(format="mxfp4", rounding="stochastic", prescale=0.75)
FP8 = OperandPolicy(format="fp8_e4m3")

AUTO = {
    "cpu": {
        "bf16": "emulated",
        "fp8": "emulated",
        "mxfp4": "emulated",
        "sr": "emulated",
        "nvfp4": "emulated",
    },
    **dict.fromkeys(("sm_80", "gfx942"), dict.fromkeys(("bf16", "fp8", "mxfp4", "sr", "nvfp4"), "emulated")),
    "sm_90": {"bf16": "emulated", "fp8": "torch", "mxfp4": "emulated", "sr": "emulated", "nvfp4": "emulated"},
    "sm_100": {"bf16": "emulated", "fp8": "torch", "mxfp4": "torch", "sr": "triton", "nvfp4": "torch"},
    "sm_103": {"bf16": "emulated", "fp8": "torch", "mxfp4": "torch", "sr": "triton", "nvfp4": "torch"},
    "sm_120": {"bf16": "emulated", "fp8": "torch", "mxfp4": "triton", "sr": "triton", "nvfp4": "torch"},
    "gfx950": {"bf16": "emulated", "fp8": "torch", "mxfp4": "torch", "sr": "triton", "nvfp4": "emulated"},
}
POLICIES = {"bf16": BF16, "fp8": FP8, "mxfp4": MXFP4, "sr": SR, "nvfp4": OperandPolicy(format="nvfp4")}


@pytest.mark.parametrize("arch", KNOWN)
def test_auto(arch):
    pytest.importorskip("triton", reason="Triton is not installed")
    selection = Selection("auto")
    found = {
        name: selection.choose(both(policy), device_of_arch(arch))[0].name
        for name, policy in POLICIES.items()
    }
    assert found == AUTO[arch]


@pytest.mark.parametrize(("arch", "mode"), [("sm_100", "native"), ("sm_120", "no")])
def test_fp8_with_a_scale_per_row(arch, mode):
    gemm = both(OperandPolicy(format="fp8_e4m3", scale="row"))
    assert load_backend("torch").support(gemm, device_of_arch(arch)).mode == mode
    assert Selection("auto").choose(gemm, device_of_arch(arch))[0].name == (
        "torch" if mode == "native" else "emulated"
    )


@pytest.mark.parametrize("arch", [arch for arch in KNOWN if arch != "cpu"])
def test_what_is_not_quantised_is_native_on_every_gpu(arch):
    _, support = Selection("auto").choose(both(BF16), device_of_arch(arch))
    assert support.mode == "native"


def test_an_unknown_architecture_is_emulated_and_says_why():
    device = Device(kind="cuda", arch="sm_89", name="L40S")
    backend, support = Selection("auto").choose(both(MXFP4), device)
    assert (backend.name, support.mode) == ("emulated", "emulated")
    with pytest.raises(ValueError, match=r"back end 'torch' cannot do mxfp4 on L40S: .*sm_89"):
        Selection("torch").choose(both(MXFP4), device)
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(ValueError, match=r"no mxfp4 tiles for sm_89 \(has gfx950, sm_100"):
        Selection("triton").choose(both(MXFP4), device)


def test_a_named_back_end_leaves_high_precision_to_the_device():
    backend, _ = Selection("torch").choose(both(BF16), device_of_arch("sm_100"))
    assert backend.name == "emulated"
    backend, _ = Selection("reference").choose(both(BF16), device_of_arch("sm_100"))
    assert backend.name == "reference"


@pytest.mark.parametrize(
    ("gemm", "why"),
    [
        (GemmPolicy(left=MXFP4, right=BF16), "no instruction takes bf16"),
        (GemmPolicy(left=MXFP4, right=OperandPolicy(format="mxfp8")), "both in one format"),
        (both(OperandPolicy(format="mxfp6_e2m3")), "no instruction takes mxfp6_e2m3"),
        (both(OperandPolicy(format="fp8_e5m2")), "E5M2 on both sides"),
        (both(OperandPolicy(format="fp8_e4m3", scale="1x128")), "with scale '1x128'"),
        (GemmPolicy(left=FP8, right=OperandPolicy(format="fp8_e4m3", scale="row")), "do not go together"),
        (both(OperandPolicy(format="mxfp4", rounding="stochastic", prescale=0.75, undo="operand")), "undo"),
        (both(MXFP4), None),
        (GemmPolicy(left=FP8, right=OperandPolicy(format="fp8_e5m2")), None),
    ],
)
def test_what_packed_codes_cannot_hold_is_refused_by_name(gemm, why):
    fault = packing_fault(gemm)
    assert (fault is None) if why is None else (why in fault)


def test_choices_of_a_whole_recipe():
    recipe = resolve(
        RecipeSpec(
            gemms=["fprop", "wgrad"],
            layers=[{"last": 1, "recipe": "bf16"}],
            phases=[{"from_fraction": 0.9, "recipe": "bf16"}],
        )
    )
    found = list(gemms_of(recipe))
    assert [(where, gemm) for where, gemm, _ in found] == [
        ("", "fprop"), ("", "dgrad"), ("", "wgrad"), (" by rule 1", "fprop"), (" by rule 1", "wgrad"),
    ]  # fmt: skip
    choices = Selection("auto").choices(recipe, device_of_arch("sm_100"))
    assert [choice.backend for choice in choices] == ["torch", "emulated", "torch", "emulated", "emulated"]
    assert overall_mode(choices) == "native"
    on_cpu = Selection("auto").choices(recipe, device_of("cpu"))
    assert overall_mode(on_cpu) == "emulated"


class OwnBackend(EmulatedBackend):
    """A user's own: native on an architecture that nobody else knows."""

    name = "own"

    def support(self, gemm, device):  # noqa: ARG002  the protocol's signature
        mode = "native" if device.arch in ("mine", "cpu") else "no"
        return Support(mode=mode, detail="my own silicon")


@pytest.fixture
def registered(monkeypatch):
    entry = EntryPoint(name="own", value=f"{__name__}:OwnBackend", group="ablate.backends")
    monkeypatch.setattr(
        backends, "entry_points", lambda group: EntryPoints([entry] if group == entry.group else [])
    )
    original = select.importlib.import_module
    here = type("here", (), {"OwnBackend": OwnBackend})
    monkeypatch.setattr(
        select.importlib, "import_module", lambda name: here if name == __name__ else original(name)
    )
    select.load_backend.cache_clear()
    yield
    select.load_backend.cache_clear()


def test_a_users_own_back_end_by_entry_point(registered):
    assert "own" in backend_names()
    mine = Device(kind="cuda", arch="mine", name="mine")
    assert Selection("auto").choose(both(MXFP4), mine)[0].name == "own"
    assert Selection("own").of(both(MXFP4), "cpu").name == "own"
    found = [check.run() for check in checks(load_backend("own"), "cpu", (MXFP4, SR))]
    assert len(found) >= 5


def test_a_back_end_that_does_not_import_is_named(monkeypatch):
    entry = EntryPoint(name="gone", value="no_such_module:Backend", group="ablate.backends")
    monkeypatch.setattr(backends, "entry_points", lambda *, group: EntryPoints([entry]).select(group=group))
    with pytest.raises(ValueError, match=r"back end 'gone' \(no_such_module:Backend\) does not import"):
        load_backend("gone")


def test_unknown_names():
    with pytest.raises(ValueError, match="no back end 'fast'"):
        Selection("fast")
    with pytest.raises(UserError, match="no architecture 'sm_1'"):
        device_of_arch("sm_1")


def test_triton_that_is_missing_or_too_old_is_one_line(monkeypatch):
    from ablate.backends import device

    device.triton_version.cache_clear()
    monkeypatch.setattr(device, "triton_version", lambda: None)
    assert device.triton_fault() == "Triton is not installed (pip install triton)"
    monkeypatch.setattr(device, "triton_version", lambda: (3, 4))
    assert device.triton_fault() == "Triton 3.4 is too old (needs 3.6; pip install -U triton)"
    support = load_backend("triton").support(both(MXFP4), device_of_arch("sm_100"))
    assert (support.mode, support.detail) == (
        "no",
        "Triton 3.4 is too old (needs 3.6; pip install -U triton)",
    )


def test_the_device_of_this_machine():
    assert device_of("cpu").arch == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            device_of("cuda")
