"""The report's section of the diagnostics: figures against made-up rows with known ones."""

import json

import numpy as np
import pytest
import torch
from synthetic_study import line, reseal

from ablate.diagnose.measure import sketch_of
from ablate.reports import write_report
from ablate.reports.figures.diagnoses import draw_diagnoses
from ablate.reports.findings.diagnoses import read_rows, summarise, summarise_all
from ablate.reports.words.diagnoses import diagnosis_sentences, diagnosis_table

EVERY = 100_000


FINDINGS = """
all three: Fprop's output errs by 20.0 % with gain 0.950; nothing in it is drawn, so that on a step all
of the error is bias. Largest in blocks.0.ffn.down: 20.0 %.

all three: of Fprop's x 1.0 % of the elements clip and 10.0 % become zero; the rotation takes the crest
factor of a block from 3.00 to 2.50.

all three: of Fprop's w 1.0 % of the elements clip and 10.0 % become zero; the rotation takes the crest
factor of a block from 3.00 to 2.50.

all three: Wgrad's output errs by 20.0 % with gain 0.950; 50.0 % of the error's energy is the same in
every draw of the randomness; 100.0 % is still the same 100 k tokens later. Largest in blocks.0.ffn.down:
20.0 %.

all three: of Wgrad's dy 1.0 % of the elements clip and 10.0 % become zero; the rotation takes the crest
factor of a block from 3.00 to 2.50.

all three: of Wgrad's x 1.0 % of the elements clip and 10.0 % become zero; the rotation takes the crest
factor of a block from 3.00 to 2.50.

all three: the energy of Wgrad's error is 0.5 times that of the data's noise in as many tokens, and the
gradient's norm is under √3 times the error in 0 of 2 measurements.
"""


def row(tokens, *, layer="blocks.0.ffn.down", gemm="wgrad", error=0.2, sketch=None, draws=4, **more):
    shape = {
        "crest_median": 3.0,
        "crest_p99": 4.0,
        "mean_share": 0.1,
        "outlier_share": 0.0,
        "outlier_max": 2.0,
    }
    operand = {"clipped": 0.01, "underflowed": 0.2, "zeroed": 0.1, "before": shape,
               "after": shape | {"crest_median": 2.5}}  # fmt: skip
    names = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}.get(gemm, ())
    return {
        "kind": "diagnosis", "tokens": tokens, "step": tokens // 1000, "time_unix": 1.7e9, "layer": layer,
        "gemm": gemm, "draws": draws, "relative_error": error, "gain": 0.95, "cosine": 0.98,
        "bias_share": 0.5, "error_energy": 4.0, "exact_energy": 100.0, "sketch": sketch,
        "operands": dict.fromkeys(names, operand),
        "data_noise": {"sequences": 4, "gradient_energy": 100.0, "noise_energy": 8.0, "signal_energy": 92.0},
    } | more  # fmt: skip


def noise(seed):
    return torch.randn(512, generator=torch.Generator().manual_seed(seed))


def test_means_over_layers_and_steps_then_over_runs():
    runs = [
        [row(0, error=0.1), row(EVERY, error=0.2), row(0, error=0.6, layer="blocks.1.ffn.down")],
        [row(0, error=0.5), row(EVERY, error=0.7, bias_share=None)],
    ]
    (wgrad,) = summarise("a", runs).gemms
    assert wgrad.relative_error.estimate == pytest.approx((0.3 + 0.6) / 2)
    assert wgrad.relative_error.low < 0.3  # Student's t of two runs is wide
    assert wgrad.relative_error.high > 0.6
    assert (wgrad.largest.layer, wgrad.largest.relative_error) == ("blocks.1.ffn.down", 0.6)
    assert wgrad.error_over_data_noise.estimate == 0.5
    assert wgrad.under_sqrt3 == 2  # 1 / √3 is 0.577
    assert wgrad.measurements == 5
    one = summarise("a", runs[:1]).gemms[0]
    assert (one.relative_error.low, one.relative_error.high) == (None, None)


def test_what_two_steps_errors_have_in_common():
    fixed = noise(1)
    share = 0.36  # of the energy
    rows = [
        row(n * EVERY, layer=f"blocks.{layer}", sketch=sketch_of(
            share**0.5 * fixed + (1 - share) ** 0.5 * noise(100 * layer + n + 2)))
        for layer in range(8)
        for n in range(12)
    ]  # fmt: skip
    (wgrad,) = summarise("a", [rows]).gemms
    assert [one.diagnoses_later for one in wgrad.alike] == [1, 2, 4, 8]
    assert [one.tokens_later for one in wgrad.alike] == [EVERY, 2 * EVERY, 4 * EVERY, 8 * EVERY]
    for one in wgrad.alike:
        assert one.estimate == pytest.approx(share, abs=0.04)


def test_a_sentence_for_each_finding_with_its_figures():
    rows = [row(0, sketch=sketch_of(noise(1))), row(EVERY, sketch=sketch_of(noise(1)))]
    rows += [row(0, gemm="fprop", draws=1, data_noise=None)]
    texts = [" ".join(text.split()) for text in diagnosis_sentences(summarise("all three", [rows]))]
    assert texts == [" ".join(text.split()) for text in FINDINGS.strip().split("\n\n")]


def test_what_other_recipes_would_make_of_an_arms_tensors_stands_beside_the_arm_and_is_marked():
    others = [row(0, error=0.3, what_if="mxfp4"), row(EVERY, error=0.5, what_if="mxfp4")]
    lines = [row(0, error=0.1), row(EVERY, error=0.1), *others, row(0, what_if=3)]
    rows, damaged = read_rows("".join(json.dumps(one) + "\n" for one in lines).encode())
    assert damaged == 1
    own, other = summarise_all("bf16", [rows])
    assert (own.arm, own.what_if, other.arm, other.what_if) == ("bf16", None, "bf16", "mxfp4")
    assert (own.gemms[0].relative_error.estimate, own.gemms[0].measurements) == (0.1, 2)
    assert (other.gemms[0].relative_error.estimate, other.gemms[0].measurements) == (0.4, 2)
    table = diagnosis_table([own, other])
    assert [line[0] for line in table.rows] == ["bf16: Wgrad", "what if mxfp4, on tensors of bf16: Wgrad"]
    assert "trained nothing" in table.caption
    assert diagnosis_sentences(other)[0].startswith("what if mxfp4, on tensors of bf16: Wgrad's output errs")
    assert [one.title for one in draw_diagnoses([own, other])] == ["Diagnostics: bf16"]


def test_an_error_is_never_below_zero_and_what_shows_as_nought_needs_no_word():
    clean = row(0)["operands"]["x"] | {"clipped": 0.0004, "zeroed": 0.0}
    runs = [
        [row(0, error=error, operands={"dy": clean, "x": clean | {"zeroed": 0.0005}})] for error in (0.1, 0.3)
    ]
    arm = summarise("a", runs)
    assert arm.gemms[0].relative_error.low < 0
    first, operand = (" ".join(text.split()) for text in diagnosis_sentences(arm)[:2])
    assert "errs by 20.0 % [0.0 %, 147.1 %]" in first
    assert operand.startswith("a: of Wgrad's x 0.0 % of the elements clip and 0.1 % become zero")
    assert len(diagnosis_sentences(arm)) == 3
    assert diagnosis_table([arm]).rows[0][1].replace("\xa0", " ") == "20.0 % [0.0 %, 147.1 %]"


def test_the_table_has_a_row_for_each_arm_and_gemm():
    fixed = sketch_of(noise(1))
    rows = [row(0, sketch=fixed), row(EVERY, sketch=fixed), row(0, gemm="fprop", draws=1, data_noise=None)]
    bare = row(0, gemm="dgrad", operands={}, gain=None, bias_share=-0.01, data_noise=None)
    table = diagnosis_table([summarise("all three", [rows]), summarise("b", [[bare]])])
    assert [tuple(cell.replace("\xa0", " ") for cell in line) for line in table.rows] == [
        ("all three: Fprop", "20.0 %", "0.950", "100.0 %", "–", "x 1.0 %, w 1.0 %", "x 10.0 %, w 10.0 %",
         "–"),
        ("all three: Wgrad", "20.0 %", "0.950", "50.0 %", "100.0 %", "dy 1.0 %, x 1.0 %",
         "dy 10.0 %, x 10.0 %", "0.5"),
        ("b: Dgrad", "20.0 %", "–", "0.0 %", "–", "–", "–", "–"),
    ]  # fmt: skip
    assert len(table.columns) == len(table.rows[0])
    assert not diagnosis_table([]).rows


@pytest.mark.parametrize(
    "bad",
    [
        "nonsense", "[]", "{}", '{"kind": "diagnosis"}',
        json.dumps(row(0, gemm="other")), json.dumps(row(-1)), json.dumps(row(0, draws=0)),
        json.dumps(row(0, layer=3)), json.dumps(row(0, gain="1")), json.dumps(row(True)),
        json.dumps(row(0, gain=10**400)),
    ],
)  # fmt: skip
def test_a_damaged_row_is_counted_and_the_others_are_read(bad):
    content = f"{json.dumps(row(0))}\n{bad}\n{json.dumps(row(1))}\n{{cut".encode()
    rows, damaged = read_rows(content)
    assert ([one["tokens"] for one in rows], damaged) == ([0, 1], 1)


def test_odd_parts_of_a_row_say_nothing_and_stop_nothing():
    odd = row(0, operands=[1], data_noise="x", sketch=7, relative_error=None, gain=None, bias_share=None)
    odder = row(0, operands={"dy": 3, "x": {"before": 1}}, data_noise={"noise_energy": "1"}, sketch="!")
    (wgrad,) = summarise("a", [[odd, odder, odd]]).gemms
    assert wgrad.alike == ()
    assert wgrad.relative_error.estimate == 0.2
    assert diagnosis_sentences(summarise("a", [[odd]])) == ()
    assert draw_diagnoses([summarise("a", [[odd]])])[0].svg


def write_rows(study, arm, rows, damaged=0):
    for planned in study.plan().arm(arm).runs:
        path = study.run(planned.id).diagnostics_path
        path.write_text("".join(json.dumps(one) + "\n" for one in rows) + "damaged\n" * damaged)
        reseal(study.run(planned.id))
    return path


def test_the_section_is_in_every_form_of_the_report(written, make_study, tmp_path):
    without = written("ladder")
    assert "diagnostics" not in without.html.read_text()
    assert json.loads(without.json.read_text())["diagnostics"] == []
    study = make_study({"bf16": [line(3, 1)] * 2, "fp4": [line(3, 1)] * 2})
    arm = "fp4"
    layers = [f"blocks.{n}.ffn.down" for n in range(20)]
    rng = np.random.default_rng(0)
    rows = [
        row(n * EVERY, layer=layer, gemm=gemm, error=0.1 + 0.1 * rng.random())
        for n in range(6) for layer in layers for gemm in ("fprop", "wgrad", "dgrad")
    ]  # fmt: skip
    write_rows(study, arm, rows, damaged=1)
    done = write_report(study, tmp_path / "with")
    html, markdown = done.html.read_text(), done.markdown.read_text()
    for text in (html, markdown):
        assert "What the diagnostics found" in text
        assert "Shown are 48 of 60 rows, those with the largest error" in text
    assert "1 damaged row left out" in html
    assert "<summary>The same in sentences</summary>" in html
    assert html.count(f"{arm}: Wgrad") >= 2
    assert "| GEMM | Relative error |" in markdown
    assert "figures/diagnostics-1.svg" in markdown
    assert (tmp_path / "with" / "figures" / "diagnostics-1.png").exists()
    (document,) = json.loads(done.json.read_text())["diagnostics"]
    assert document["arm"] == arm
    assert [one["gemm"] for one in document["gemms"]] == ["fprop", "dgrad", "wgrad"]
    assert document["gemms"][0]["relative_error"]["estimate"] == pytest.approx(0.15, abs=0.01)
