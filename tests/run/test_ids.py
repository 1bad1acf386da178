"""A run's id depends on everything that can change its result, and on nothing else."""

import hashlib
import json
from copy import copy
from dataclasses import asdict, fields, is_dataclass, replace

import pytest

from ablate.recipes import LayerRule, Phase, RecipeSpec, resolve
from ablate.run.config import (
    DataConfig,
    Fork,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    config_from_json,
)
from ablate.run.ids import RESULT_VERSION, run_id, run_ids

CONFIG = RunConfig(
    model=ModelConfig(),
    data=DataConfig(source="text", paths=["/a/b"]),
    data_digest="d1",
    vocab_size=256,
    training=TrainingConfig(),
    recipe=resolve(RecipeSpec(gemms=["fprop"], stabiliser="sr+rht", rest="fp8")),
    backend="auto",
    trainer="package.module:run",
    code_digest="c1",
    fork=Fork(tokens=9, recipe=resolve(RecipeSpec()), training=TrainingConfig()),
    seed=0,
)
NEUTRAL = {"data.paths", "data.validation_paths", "model.allow"}

# For fields whose other value cannot be guessed from the one they have.
OTHERS = {
    "model.architecture": "gpt",
    "model.hf": "name/on-the-hub",
    "model.function": "package.module:function",
    "data.source": "jsonl",
    "data.tokenizer": "bpe",
    "data.token_dtype": "uint32",
    "training.schedule": "cosine",
    "training.eval_windows": "first",
    "training.evaluate_in": "both",
    "backend": "reference",
    "replayed": resolve(RecipeSpec()),
    "recipe.rules": (LayerRule(last=1),),
    "recipe.phases": (Phase(from_tokens=9, recipe=resolve(RecipeSpec())),),
}


def leaves(value, path=""):
    """Yield the path of every field that is no section itself."""
    for field in fields(value):
        below = getattr(value, field.name)
        name = f"{path}{field.name}"
        if is_dataclass(below):
            yield from leaves(below, f"{name}.")
        else:
            yield name


def changed(value, path, whole_path):
    """Return a copy with another value of the field at the path; whether it makes sense does not matter."""
    head, _, rest = path.partition(".")
    old = getattr(value, head)
    other = copy(value)
    vars(other).pop("text", None)  # of the old value
    if rest:
        new = changed(old, rest, whole_path)
    elif (known := whole_path.removeprefix("fork.")) in OTHERS:
        new = OTHERS[known]
    elif isinstance(old, bool):
        new = not old
    elif isinstance(old, int):
        new = old + 1
    elif isinstance(old, float):
        new = old / 2 if old else 0.5
    elif isinstance(old, list | tuple):
        new = [*old, "more"]
    elif isinstance(old, dict):
        new = {"key": 1}
    elif isinstance(old, str):
        new = f"{old}x"
    else:
        new = "x" if "path" in head else 7
    object.__setattr__(other, head, new)
    return other


ALL_LEAVES = list(leaves(CONFIG))
assert {"seed", "recipe.wgrad.right.signs", "model.width"} < set(ALL_LEAVES)


@pytest.mark.parametrize("path", ALL_LEAVES)
def test_every_field_but_locations_and_permissions_changes_the_id(path):
    other = changed(CONFIG, path, path)
    assert other != CONFIG
    assert (run_id(other) == run_id(CONFIG)) is (path in NEUTRAL)


def test_files_are_known_by_the_digest_and_other_code_and_tokenizers_by_their_names():
    def run(model="a.b:build", tokenizer="gpt2", trainer="a.b:run", hf=None, **more):
        model = ModelConfig(hf=hf) if hf else ModelConfig(function=model)
        data = replace(CONFIG.data, tokenizer="hf", tokenizer_path=tokenizer)
        return run_id(replace(CONFIG, model=model, data=data, trainer=trainer, **more))

    for key, here, there, other in (
        ("model", "/here/m.py:build", "/there/n.py:build", "/here/m.py:other"),
        ("trainer", "/here/t.py:run", "/there/t.py:run", "/here/t.py:other"),
        ("tokenizer", "/here/tok.json", "/there/tok.json", "other/gpt2"),
        ("model", "a.b:build", "a.b:build", "a.c:build"),
    ):
        assert run(**{key: here}) == run(**{key: there}) != run(**{key: other})
    assert run(hf="/here/m") == run(hf="/there/n")
    assert run(hf="/here/m") != run(hf="/here/m", code_digest="c2")


@pytest.mark.parametrize(
    ("rest", "version"), [("fp8", RESULT_VERSION), ("fp8-delayed", RESULT_VERSION + 1)]
)
def test_the_id_is_what_the_documentation_says(rest, version):
    model = ModelConfig(width=256, layers=4)
    recipe = resolve(RecipeSpec(rest=rest))
    config = replace(CONFIG, model=model, recipe=recipe, trainer=None, fork=None)
    content = asdict(config)
    seed = content.pop("seed")
    # None stands for nothing
    del (content["trainer"], content["fork"], content["replayed"])
    content["model"] = {"width": 256}  # layers: 4 is the default
    content["data"] = {"source": "text"}  # the paths are left out
    content["training"] = {}
    text = json.dumps(
        [content | {"result_version": version}, seed],
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    expected = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert run_ids(config, [10**15, seed]) == [
        run_id(replace(config, seed=10**15)),
        expected,
    ]


def test_what_recipes_got_later_is_no_part_of_an_older_id():
    plain = replace(CONFIG.recipe, rules=(LayerRule(last=1),))
    (rule,) = json.loads(plain.text)["rules"]
    assert rule.keys() == {"match", "first", "last", "head", "recipe"}
    rules = [
        LayerRule(last=1, role=role)
        for role in ((), "head", ["ffn", "attention"], ["attention", "ffn"])
    ]
    ids = [
        run_id(replace(CONFIG, recipe=replace(plain, rules=(rule,)))) for rule in rules
    ]
    assert len(set(ids)) == 3
    assert ids[2] == ids[3]


def test_before_its_fork_a_run_is_its_parent():
    whole = replace(CONFIG, trainer=None, fork=None)
    fork = Fork(
        tokens=4096,
        recipe=whole.recipe,
        training=replace(whole.training, learning_rate=1e-4),
    )
    forked = replace(whole, fork=fork)
    assert run_id(forked) != run_id(whole)
    assert forked.parent == replace(whole, training=fork.training)
    assert config_from_json(json.loads(json.dumps(asdict(forked)))) == forked
