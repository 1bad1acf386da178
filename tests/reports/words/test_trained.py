from __future__ import annotations

from dataclasses import replace

from synthetic_study import ENVIRONMENT, NATIVE, analysed, lines

from ablate.reports.words.trained import trained
from ablate.run.command import Command
from ablate.run.config import DataConfig, ModelConfig


def said(make_study, environment, training=None, **changes):
    """What is said of a study in this environment; ``changes``: of its baseline's configuration."""
    store = make_study(
        lines("a: 3 1.9"),
        model=None if environment["backend_mode"] == "imported" else {},
        environment=environment,
        training=training or {},
    )
    analysis = analysed(store)
    if changes:
        arm = analysis.baseline_arm
        config = replace(arm.config, **changes)
        analysis = replace(analysis, arms=(replace(arm, config=config),))
    return trained(analysis).replace("\u00a0", " ")


def test_what_was_trained_in_one_line(make_study):
    assert said(make_study, ENVIRONMENT) == (
        "llama, width 128, layers 4, heads 4, ffn 352 (837 k parameters), on stdlib of Python 3.11.9; "
        "1 M tokens a run; on 1 × a CPU; FP4 emulated exactly, without FP4 units"
    )
    model = ModelConfig(hf="org/model")
    data = DataConfig(source="jsonl", paths=["/data/a.json", "/data/b.json"])
    assert said(make_study, NATIVE | {"world_size": 8}, model=model, data=data) == (
        "org/model, random weights, on jsonl a.json b.json; 1 M tokens a run; on 8 × AMD Instinct MI355X; "
        "FP4 on the device's own units"
    )
    command = Command(command=["python", "{seed}"], cwd="/my code")
    assert said(
        make_study,
        NATIVE | {"backend_mode": "command"},
        trainer=command,
        model=ModelConfig(width=64),
    ) == (
        "llama, width 64, layers 4, heads 4, ffn 352; 1 M tokens a run; on 1 × AMD Instinct MI355X; FP4 by "
        "the command, as configured: `cd '/my code' && python '{seed}'`"
    )
    assert said(make_study, {"backend_mode": "imported"}, {"hardware": "8 × B200"}) == (
        "1 M tokens a run; on 8 × B200; read from logs of others, who vouch for their FP4"
    )
