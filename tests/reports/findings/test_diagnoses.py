"""The report's section of the diagnostics: figures against made-up rows with known ones."""

import json

import numpy as np
import pytest
import torch
from synthetic_study import line, reseal
from texts import check_words

from ablate.diagnose.measure import sketch_of
from ablate.reports import write_report
from ablate.reports.figures.diagnoses import draw_diagnoses
from ablate.reports.findings.diagnoses import diagnose_arm, read_rows
from ablate.reports.words.diagnoses import diagnosis_sentences, diagnosis_table

EVERY = 100_000


def row(
    tokens,
    *,
    layer="blocks.0.ffn.down",
    gemm="wgrad",
    error=0.2,
    sketch=None,
    draws=4,
    **more,
):
    operand = {"clipped": 0.01, "zeroed": 0.1, "crest_before": 3.0, "crest_after": 2.5}
    names = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}.get(
        gemm, ()
    )
    return {
        "kind": "diagnosis", "tokens": tokens, "layer": layer, "gemm": gemm, "draws": draws,
        "zeros": None, "zeros_bf16": None,
        "relative_error": error, "gain": 0.95, "bias_share": 0.5, "error_energy": 4.0, "sketch": sketch,
        "operands": dict.fromkeys(names, operand), "data_noise": {"noise_energy": 8.0},
    } | more  # fmt: skip


FPROP = row(0, gemm="fprop", draws=1, data_noise=None)


def noise(seed):
    return torch.randn(512, generator=torch.Generator().manual_seed(seed))


def only(*runs, arm="a"):
    return diagnose_arm(arm, runs)


def test_means_over_layers_and_steps_then_over_runs():
    first, last = "blocks.0.ffn.down", "blocks.1.ffn.down"
    whole = [row(0, error=0.1), row(EVERY, error=0.2), row(0, error=0.6, layer=last)]
    arm = only(whole, [row(0, error=0.5), row(EVERY, error=0.7, bias_share=None)], [])
    (wgrad,) = arm.gemms
    assert wgrad.relative_error.estimate == pytest.approx((0.3 + 0.6) / 2)
    # Student's t of two runs is wide
    assert wgrad.relative_error.low < 0.3
    assert wgrad.relative_error.high > 0.6
    assert (wgrad.largest.layer, wgrad.largest.relative_error) == (last, 0.6)
    assert wgrad.error_over_data_noise.estimate == 0.5
    # 1 / √3 is 0.577
    assert (wgrad.under_sqrt3, wgrad.measurements, arm.runs) == (2, 5, 2)
    assert only(whole).gemms[0].relative_error.low is None
    assert arm.maps[0].rows == ((first, "wgrad"), (last, "wgrad"))
    known, lacking = arm.maps[0].values
    assert known == pytest.approx((0.3, 0.45))
    assert lacking == (0.6, None)


def test_what_two_steps_errors_have_in_common():
    fixed, share = noise(1), 0.36  # of the energy
    rows = [
        row(n * EVERY, layer=f"blocks.{layer}", sketch=sketch_of(
            share**0.5 * fixed + (1 - share) ** 0.5 * noise(100 * layer + n + 2)))
        for layer in range(8)
        for n in range(12)
    ]  # fmt: skip
    alike = only(rows).gemms[0].alike
    assert alike.tokens_later == EVERY
    assert alike.estimate == pytest.approx(share, abs=0.04)


def test_sentences_and_a_table_with_a_row_for_each_arm_and_gemm():
    fixed = sketch_of(noise(1))
    zeros = [{"zeros": 0.04, "zeros_bf16": 0.01}, {"zeros": 0.02, "zeros_bf16": 0.01}]
    own = [row(at * EVERY, sketch=fixed, **zeros[at]) for at in (0, 1)]
    arm = only([*own, FPROP | {"zeros": 0.0104, "zeros_bf16": 0.01}], arm="all three")
    bare = row(
        0, gemm="dgrad", operands={}, gain=None, bias_share=-0.01, data_noise=None
    )
    table = diagnosis_table([arm, only([bare], arm="b")])
    check_words(
        "diagnostics", [*diagnosis_sentences(arm), *map(" | ".join, table.rows)]
    )
    assert not diagnosis_table([]).rows


def test_an_error_is_never_below_zero_and_what_shows_as_nought_needs_no_word():
    clean = row(0)["operands"]["x"] | {"clipped": 0.0004, "zeroed": 0.0}
    operands = {"dy": clean, "x": clean | {"zeroed": 0.0005}}
    arm = only(*([row(0, error=error, operands=operands)] for error in (0.1, 0.3)))
    assert arm.gemms[0].relative_error.low < 0
    first, operand, _ = (" ".join(text.split()) for text in diagnosis_sentences(arm))
    assert "errs by 20.0 % [0.0 %, 147.1 %]" in first
    said = "a: of Wgrad's x 0.0 % of the elements clip and 0.1 % become zero"
    assert operand.startswith(said)


def test_the_load_of_experts_is_said_of_an_arm_in_bf16_too():
    load = {"kind": "load", "tokens": 0, "layer": "blocks.0.ffn", "busiest": 1.5}
    loads = [load, load | {"tokens": 1, "busiest": 2.5}]
    content = "".join(json.dumps(load) + "\n" for load in loads)
    arm = only(read_rows(content.encode()), arm="bf16")
    said = (
        "bf16: the busiest expert of a layer has 2.00 times the mean expert's tokens."
    )
    assert diagnosis_sentences(arm) == (said,)
    assert draw_diagnoses([arm]) == ()
    assert only([row(0), *loads]).gemms == only([row(0)]).gemms


@pytest.mark.parametrize(
    ("odd", "place"),
    [
        (row(0, gemm="other"), "0.gemm: "),
        (row(0, draws=0), "0.draws: "),
        (row(0, gain="1"), "0.gain: "),
        (row(0, operands={"x": {"clipped": 0.1}}), "0.operands.x.zeroed: "),
        (row(0, data_noise={"noise_energy": "1"}), "0.data_noise.noise_energy: "),
    ],
)
def test_a_row_with_odd_values_is_named(odd, place):
    with pytest.raises(ValueError, match=place):
        read_rows(f"{json.dumps(odd)}\n{json.dumps(row(1))}\n{{cut".encode())


def test_figures_that_are_not_defined_say_nothing_and_stop_nothing():
    content = json.dumps(
        row(0, sketch="!", operands={}, relative_error=None, gain=None, bias_share=None)
    )
    rows = read_rows(f"{content}\n{content}\n{{cut".encode())
    assert len(rows) == 2
    arm = only(rows)
    assert (arm.gemms[0].alike, diagnosis_sentences(arm)) == (None, ())
    assert draw_diagnoses([arm])[0].svg


def test_the_section_is_in_every_form_of_the_report(written, make_study, tmp_path):
    without = written("ladder")
    assert "diagnostics" not in without.html.read_text()
    assert json.loads(without.json.read_text())["diagnostics"] == []
    study = make_study({"bf16": [line(3, 1)] * 2, "fp4": [line(3, 1)] * 2})
    rng = np.random.default_rng(0)
    rows = [
        row(n * EVERY, layer=f"blocks.{layer}.ffn.down", gemm=gemm, error=0.1 + 0.1 * rng.random())
        for n in range(6) for layer in range(20) for gemm in ("fprop", "wgrad", "dgrad")
    ]  # fmt: skip
    lines = [json.dumps(one) + "\n" for one in (*rows, row(0, draws="4"))]
    for planned in study.plan().arm("fp4").runs:
        run = study.run(planned.id)
        # Of the second run one more, which is damaged.
        run.diagnostics_path.write_text("".join(lines[: 360 + planned.seed]))
        reseal(run)
    done = write_report(study, tmp_path / "with")
    html = done.html.read_text()
    for said in (
        "What the diagnostics found",
        "Shown are 48 of 60 rows",
        "diagnostics.jsonl: 360.draws: ",
    ):
        assert said in html
    assert "figures/diagnostics-1.svg" in done.markdown.read_text()
    (document,) = json.loads(done.json.read_text())["diagnostics"]
    assert (document["arm"], len(document["gemms"])) == ("fp4", 3)
    error = document["gemms"][0]["relative_error"]["estimate"]
    assert error == pytest.approx(0.15, abs=0.01)
