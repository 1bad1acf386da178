"""Models and trainers of the user's own: what a plan knows of them."""

from tests.plan.conftest import MODEL

STUDY = """\
name: s
baseline: a
target: {val_loss: 3.3}
base:
  model: {function: my_model.py:build}
  training: {tokens: 10_000, eval_every_tokens: 5_000}
arms:
  a: {recipe: bf16}
  b: {recipe: mxfp4}
"""


def test_a_users_model_changes_the_id_by_its_code(plan, tmp_path):
    arm = plan(STUDY).arm("b")
    assert arm.config.model.function == f"{tmp_path}/my_model.py:build"
    (tmp_path / "my_model.py").write_text(MODEL + "\n# changed\n")
    assert plan(STUDY).arm("b").runs != arm.runs


def test_a_trainer_changes_the_id_by_its_code(plan, tmp_path):
    planned = plan(
        STUDY.replace("  b: {recipe: mxfp4}", "  b: {recipe: bf16, trainer: t.py:run}")
    )
    assert planned.arm("b").differs == {"trainer": (None, f"{tmp_path}/t.py:run")}
    assert planned.arm("a").runs[0].id != planned.arm("b").runs[0].id


def test_what_is_allowed_changes_no_id(plan):
    runs = []
    for allow in ("['*.in_proj_weight', '*.out_proj']", "['*']"):
        allowing = STUDY.replace(
            "my_model.py:build}", f"hidden.py:build, allow: {allow}}}"
        )
        runs.append(plan(allowing).arm("b").runs)
    assert runs[0] == runs[1]
