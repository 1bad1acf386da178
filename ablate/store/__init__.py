# ruff: noqa: E501  the rows of the tables are lines
"""The run store: plain files that hold everything a study computed. They are the truth; MLflow mirrors them.

`<storage>` is `--storage`, else `$ABLATE_STORAGE`, else `./ablate-runs`. In `<storage>/<study>/`:

| file | holds |
|---|---|
| `plan.lock.json` | the plan, below (written by `ablate run`; the same plan gives the same bytes) |
| `source` | the path of the study's file, for `ablate run STUDY` elsewhere |
| `throughput.json` | what `ablate check steps STUDY` measured, below; written whole |
| `executor.lock`, `cancel` | a lock of who runs the study now; the request of `ablate cancel` to stop |
| `runs/<id>/` | the runs, below |
| `prefixes/<key>/` | the rows and the checkpoint of steps that runs have in common, until the last of them has its result |
| `report/` | the report |
| `mirror/`, `mirror.id` | cursors and logs of MLflow's mirror; the name of this copy |
| `search/`, `search.lock.json`, `optuna.log` | of a search: its pages, what it must not change, Optuna's journal |

In `runs/<id>/`:

| file | holds |
|---|---|
| `config.json` | the resolved configuration, with the id |
| `status.json` | the state, below |
| `environment.json` | versions, device, back ends, timing, below |
| `metrics.jsonl`, `diagnostics.jsonl` | rows, below |
| `routes.jsonl` | of a baseline that other arms replay: which experts each token took, a row for each step, call (of a micro-batch) and layer |
| `stop` | there while whoever executes the run is asked to stop it |
| `system.jsonl` | every 10 s what the run used of its machine, as MLflow's system metrics. No result |
| `attempts/<n>.json`, `<n>.log` | ledger and lease of an attempt: `{"attempt", "owner", "host", "machine", "pid", "process_started", "started_unix", "resumed_from_step", "fingerprint", "ended_unix", "outcome", "message"}`; what it printed |
| `weights/` | with `keep_weights` the final weights |
| `checkpoints/<step>.safetensors`, `.json` | the last two checkpoints of a run that has not ended |

`plan.lock.json`:

```json
{"format": 1, "study": "quickstart", "description": "…", "baseline": "bf16",
 "target": {"kind": "val_loss", "value": 2.1, "crossing": "confirmed", "within": null}, "paired_seeds": true,
 "intervals": "moderated", "waive": [],
 "stop": {"diverged": 2, "settled": {"looks": [2, 3, 4, 5], "narrower_than": null}},
 "training": {"schedule": "constant", "…": "the base's training section"},
 "arms": [{"name": "fprop", "description": null, "again": false, "recipe": "Fprop mxfp4; Dgrad+Wgrad bf16",
           "tokens": 520192,
           "factors": {"recipe.gemms": ["fprop"]}, "differs": {"recipe.gemms": [[], ["fprop"]]},
           "folded": [], "runs": [{"id": "3f0c…", "seed": 0}]}],
 "dropped": [{"name": "…", "reason": "…"}]}
```

A study that ran with `--set` also has `"settings": ["KEY=VALUE", …]`. An arm that forks also has `"fork": {"arm", "tokens"}`.
`stop` is null without a rule; its looks end with all seeds. A study of others' logs also has `"imported": true`, one
whose validation losses are not in nats per token `"loss_unit"`: `bits`, `bits-per-byte`, `nats-per-byte` or `log10`. `target`
is null where final losses are compared.

Of a study that tunes its arms also `tuning`: `{"study": "quickstart tune", "done", "fields", "sampler", "trials",
"at_once", "prune", "tokens", "seeds", "groups": [{"name", "fingerprint", "arms", "shared", "chosen", "trials":
[{"number", "values", "state", "loss", "diverged", "tokens", "runs"}]}], "tuned": {arm: the arm at the values found}}`.
The trials are a study of their own beside it, with Optuna's journal `optuna.log` in its folder.

`tokens` is the budget of a run in whole steps. `factors` are the values that the grid or the arm set; `differs` maps a field to `[baseline's, this arm's]`.

`runs/<id>/metrics.jsonl`, appended, one object a line, finite numbers only:

```json
{"kind": "train", "tokens": 4096, "step": 1, "time_unix": 1.7e9, "loss": 5.54, "lr": 0.004, "grad_norm": 1.3, "tokens_per_sec": 31000.0}
{"kind": "eval", "tokens": 4096, "step": 1, "time_unix": 1.7e9, "val_loss": 5.2, "val_loss_bf16": 5.1}
```

`val_loss_bf16` is there with `training.evaluate_in: both` alone; `weights_reset`, a number in the rows of training, where
weights are de-oscillated.

`runs/<id>/diagnostics.jsonl`, where the study has `diagnostics`: one object for each diagnosed step, layer and GEMM,
cut back to the checkpoint on resume like the metrics. Numbers have 6 digits; what is not defined is `null`. The words
are in docs/diagnostics.md; `tokens` were seen before the step, `step` were done.

```text
{"kind": "diagnosis", "tokens", "step", "layer", "gemm", "draws", …, "sketch": "<512 bytes in base64>",
 "operands": {"dy": {…}, "x": {…}}, "data_noise": {…}, "time_unix"}
{"kind": "load", "tokens", "step", "layer", "shares": [of each expert], "busiest", "time_unix"}
```

`status.json`: `state` is `pending`, `running`, `finished` (the budget is used), `diverged`, `failed`, `interrupted` or
`stopped`. `finished` and `diverged` are results: such a run is never run again. A run is `stopped`, with the reason as its
`message`, when nobody needs its result any more; it keeps its checkpoint, and goes on from there when somebody does.
Whether a finished run hit the target or is *censored* is for the analysis to say. Of a run with a result `files`
holds the hash of each of its other files. Every JSON file here ends with `hash`, the BLAKE2b hash (16 bytes) of its own text
with zeros in that place; `ablate.base.files` reads and writes them.

`environment.json`: `{"backend", "backend_mode": "native" | "upcast" | "emulated" | "reference", "backend_choices":
[{"gemm", "operands", "backend", "mode", "detail"}], "self_tests": [{"backend", "check", "passed", "detail", "figures"}],
"gpu_uuid", "git_commit", "code", "code_commit", "command", "world_size", "fingerprints", "arithmetic_settings", "step_eager_because", …}` with the
versions of packages and the hardware. `step_eager_because` says why the built-in trainer's steps were no CUDA graphs; null: they
were. `code` is a hash of the sources that can change a result, `code_commit` the commit of a command's folder,
`command` the line that started it, for a shell, `world_size` the number of devices, `fingerprints` those of the arithmetic that trained the run, the last attempt's
last .

`throughput.json`:

```json
{"format": 1, "study": "quickstart", "device": {"kind": "cuda", "arch": "sm_100", "name": "NVIDIA B200", "…": "…"},
 "code": "…", "clock_mhz": 1965.0, "other_work": null, "versions": {"ablate": "0.1.0", "torch": "…", "…": "…"},
 "settings": {"steps": 10, "warmup": 3, "repeats": 3}, "measured_unix": 1.7e9,
 "arms": [{"arm": "fprop", "run": "3f0c…", "tokens_per_sec": [31000.0], "backend_mode": "native",
           "timing_valid": true, "why_not": null, "…": "median, spread, over_baseline, memory, threads"}]}
```

`run` is the id of the run whose configuration was timed: a record whose ids the plan no longer has is stale.

Beside the studies, the storage holds `tokens/` (the token cache, keyed by content) and, by default, MLflow's
`mlflow.db` and `mlartifacts/`.
"""

from ablate.store.runs import END_STATES, STATES, RunDir, State, Status, StudyStore

__all__ = ["END_STATES", "STATES", "RunDir", "State", "Status", "StudyStore"]
