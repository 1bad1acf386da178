"""The exact lines for what can be wrong in a study file. ``study.yaml`` is left out of each line."""

from __future__ import annotations

import pytest

HEAD = """\
name: s
baseline: a
target: {val_loss: 3.3}
"""

# what is wrong -> (the file, the lines)
CASES: dict[str, tuple[str, list[str]]] = {
    "a block that does not divide, beside an unknown key of another section": (
        HEAD
        + """\
base:
  model: {ffn: 350}
  training: {learnin_rate: 0.1}
arms: {a: {recipe: {gemms: [fprop]}}}
""",
        [
            (
                "5:16: base.model.ffn: ffn 350 is not a multiple of 32, as Fprop of down needs it "
                "(its block of 32 lies along this dimension; in arm 'a')"
            ),
            "6:14: base.training.learnin_rate: unknown key (did you mean 'learning_rate'?)",
        ],
    ),
    "unknown top-level key": (
        HEAD
        + """\
arms: {a: }
sead: 3
""",
        [
            "5:1: sead: unknown key (did you mean 'seeds'?)",
        ],
    ),
    "unknown key with a likely word": (
        HEAD
        + """\
base:
  model: {widht: 64}
arms: {a: }
""",
        [
            "5:11: base.model.widht: unknown key (did you mean 'width'?)",
        ],
    ),
    "unknown key of another section": (
        HEAD
        + """\
base: {learning_rate: 0.1}
arms: {a: }
""",
        [
            "4:8: base.learning_rate: unknown key (it belongs in 'training')",
        ],
    ),
    "unknown key in an arm": (
        HEAD
        + """\
arms:
  a: {modle: {}}
""",
        [
            "5:7: arms.a.modle: unknown key (did you mean 'model'?)",
        ],
    ),
    "unknown key in resources": (
        HEAD
        + """\
base:
  resources: {cores: 2}
arms: {a: }
""",
        [
            (
                "5:15: base.resources.cores: unknown key (expected devices_per_run, cpus, gpus, custom, "
                "activation_checkpointing, checkpoint_every_sec, checkpoint_every_tokens, hang_after_sec, "
                "require_native or allow_failed_self_test)"
            ),
        ],
    ),
    "devices that cannot share the batch": (
        HEAD
        + """\
base:
  training: {batch_size: 12, micro_batch_size: 3}
  resources: {devices_per_run: 8}
arms:
  a:
  b: {training: {micro_batch_size: null, batch_size: 20}}
""",
        [
            (
                "6:32: base.resources.devices_per_run: batch_size 12 is not a multiple of devices_per_run 8 "
                "× micro_batch_size 3 (in arm 'a')"
            ),
            "9:36: arms.b.training.micro_batch_size: batch_size 20 is not a multiple of devices_per_run 8",
        ],
    ),
    "a device's share of the batch that the blocks do not divide": (
        HEAD
        + """\
base:
  training: {batch_size: 4, seq_len: 24}
  resources: {devices_per_run: 4}
arms:
  a: {recipe: mxfp4}
""",
        [
            (
                "5:38: base.training.seq_len: batch_size 4 / devices_per_run 4 = 1 × seq_len 24 = 24 tokens "
                "is not a multiple of 32, as Wgrad of every layer needs it (its block of 32 lies along this "
                "dimension; in arm 'a')"
            ),
        ],
    ),
    "wrong types": (
        HEAD
        + """\
base:
  model:
    width: wide
    layers: 1e6
    heads: '4'
    tied_head: yes
    ffn: [3]
    rope_base: {}
    norm_eps:
seeds: true
arms: {a: }
""",
        [
            "6:12: base.model.width: expected a whole number, got 'wide'",
            "7:13: base.model.layers: expected a whole number, got 1e6 (write 1000000)",
            "8:12: base.model.heads: expected a whole number, got '4' (leave out the quotes)",
            "9:16: base.model.tied_head: expected true or false, got 'yes' (write true)",
            "10:10: base.model.ffn: expected a whole number, got a list",
            "11:16: base.model.rope_base: expected a number, got a mapping",
            "12:5: base.model.norm_eps: expected a number, got nothing",
            "13:8: seeds: expected a count from 1 to 10000, or a list of seeds, got true",
        ],
    ),
    "out of range": (
        HEAD
        + """\
base:
  training:
    tokens: 0
    learning_rate: -1
    beta1: 1
    final_lr_ratio: 2
    weight_decay: .nan
    adam_eps: .inf
    warmup_tokens: -1
    batch_size: 99999999999999999
arms: {a: }
""",
        [
            "6:13: base.training.tokens: expected a number above 0, got 0",
            "7:20: base.training.learning_rate: expected a number above 0, got -1",
            "8:12: base.training.beta1: expected a number below 1, got 1",
            "9:21: base.training.final_lr_ratio: expected a number up to 1, got 2",
            "10:19: base.training.weight_decay: expected a finite number, got .nan",
            "11:15: base.training.adam_eps: expected a finite number, got .inf",
            "12:20: base.training.warmup_tokens: expected a number from 0 up, got -1",
            (
                "13:17: base.training.batch_size: expected a number up to 1000000000000000, got "
                "99999999999999999"
            ),
        ],
    ),
    "a section that is no mapping": (
        HEAD
        + """\
base:
  model: 3
  data:
  training: [1]
arms: {a: }
""",
        [
            "5:10: base.model: expected a mapping, got 3",
            "6:3: base.data: expected a mapping, got nothing",
            "7:13: base.training: expected a mapping, got a list",
        ],
    ),
    "arms that are no mapping": (
        HEAD
        + """\
arms: [a]
""",
        [
            "4:7: arms: expected a mapping, got a list",
        ],
    ),
    "an arm that is no mapping": (
        HEAD
        + """\
arms: {a: bf16}
""",
        [
            "4:11: arms.a: expected a mapping, got 'bf16'",
        ],
    ),
    "base that is nothing": (
        HEAD
        + """\
base:
arms: {a: }
""",
        [
            "4:1: base: expected a mapping, got nothing",
        ],
    ),
    "missing keys": (
        """\
arms: {a: }
""",
        [
            "1:1: missing key 'baseline' (name the arm that costs are stated against)",
            "1:1: missing key 'name' (it names the study's folder)",
            "1:1: missing key 'target' (write target: {val_loss: …} or target: {perplexity: …})",
        ],
    ),
    "no arms": (
        HEAD,
        [
            "1:1: a study needs at least one arm (under 'arms', or through a 'grid')",
        ],
    ),
    "empty arms": (
        HEAD
        + """\
arms: {}
""",
        [
            "4:7: arms: a study needs at least one arm (under 'arms', or through a 'grid')",
        ],
    ),
    "a word that is no choice": (
        HEAD
        + """\
base:
  data: {source: txt}
  training: {schedule: cosin}
  backend: fast
arms: {a: }
""",
        [
            (
                "5:18: base.data.source: expected stdlib, text, jsonl, tokens or hub, got 'txt' (did you "
                "mean 'text'?)"
            ),
            (
                "6:24: base.training.schedule: expected constant, cosine or wsd, got 'cosin' (did you mean "
                "'cosine'?)"
            ),
            (
                "7:12: base.backend: expected auto, emulated, reference, torch, triton, qutlass, "
                "primus_turbo or aiter, got 'fast'"
            ),
        ],
    ),
    "a bare target": (
        """\
name: s
baseline: a
target: 3.3
arms: {a: }
""",
        [
            (
                "3:9: target: a target needs its unit (write {val_loss: 3.3} for nats per token, or "
                "{perplexity: 3.3})"
            ),
        ],
    ),
    "a target of no unit": (
        """\
name: s
baseline: a
target: {crossing: confirmed}
arms: {a: }
""",
        [
            "3:9: target: a target needs its unit (give val_loss, in nats per token, or perplexity)",
        ],
    ),
    "a target of two units": (
        """\
name: s
baseline: a
target: {val_loss: 3.3, perplexity: 27.1}
arms: {a: }
""",
        [
            "3:25: target.perplexity: a second unit for the target (give val_loss or perplexity)",
        ],
    ),
    "an impossible perplexity": (
        """\
name: s
baseline: a
target: {perplexity: 0.5}
arms: {a: }
""",
        [
            "3:22: target.perplexity: a perplexity is above 1, got 0.5",
        ],
    ),
    "a target of the wrong type": (
        """\
name: s
baseline: a
target: {val_loss: low, crossing: second}
arms: {a: }
""",
        [
            "3:20: target.val_loss: expected a number, got 'low'",
            "3:35: target.crossing: expected confirmed or first_eval, got 'second'",
        ],
    ),
    "target as a word": (
        """\
name: s
baseline: a
target: low
arms: {a: }
""",
        [
            (
                "3:9: target: a target needs its unit (write {val_loss: 3.3} for nats per token, or "
                "{perplexity: 3.3})"
            ),
        ],
    ),
    "unknown baseline": (
        """\
name: s
baseline: b
target: {val_loss: 3}
arms: {bf16: , fp8: {recipe: fp8}}
""",
        [
            "2:11: baseline: no arm 'b' (arms: bf16, fp8)",
        ],
    ),
    "the baseline again under a name that is taken": (
        """\
name: s
baseline: bf16
baseline_again: true
target: {val_loss: 3}
arms: {bf16: , bf16 again: {recipe: fp8}}
""",
        [
            (
                "3:17: baseline_again: an arm of the name 'bf16 again' is there already (the baseline's "
                "second arm takes that name)"
            ),
        ],
    ),
    "a setting to waive that is none": (
        """\
name: s
baseline: bf16
waive: [codes]
target: {val_loss: 3}
arms: {bf16: , fp8: {recipe: fp8}}
""",
        [
            (
                "3:9: waive[0]: expected data, tokenizer, evaluation, code, device or world_size, got "
                "'codes' (did you mean 'code'?)"
            ),
        ],
    ),
    "likely baseline": (
        """\
name: s
baseline: bf61
target: {val_loss: 3}
arms: {bf16: , fp8: {recipe: fp8}}
""",
        [
            "2:11: baseline: no arm 'bf61' (did you mean 'bf16'?)",
        ],
    ),
    "seeds": (
        HEAD
        + """\
seeds: 0
arms: {a: }
""",
        [
            "4:8: seeds: expected a count from 1 to 10000, or a list of seeds, got 0",
        ],
    ),
    "seeds twice": (
        HEAD
        + """\
seeds: [3, 1, 3]
arms: {a: }
""",
        [
            "4:15: seeds[2]: seed 3 given twice",
        ],
    ),
    "seeds of no number": (
        HEAD
        + """\
seeds: [1, -2, x]
arms: {a: }
""",
        [
            "4:12: seeds[1]: expected a number from 0 up, got -2",
            "4:16: seeds[2]: expected a whole number, got 'x'",
        ],
    ),
    "no seeds": (
        HEAD
        + """\
seeds: []
arms: {a: }
""",
        [
            "4:8: seeds: expected a count from 1 to 10000, or a list of seeds, got a list",
        ],
    ),
    "a name that is no folder": (
        """\
name: ../s
baseline: a
target: {val_loss: 3.3}
arms: {a: }
""",
        [
            (
                "1:7: name: '../s' cannot name a folder (no / \\ : * ? \" < > |, no '..', no '.' or '-' in "
                "front, no '.' at the end)"
            ),
        ],
    ),
    "a name with dots": (
        """\
name: a..b
baseline: a
target: {val_loss: 3.3}
arms: {a: }
""",
        [
            (
                "1:7: name: 'a..b' cannot name a folder (no / \\ : * ? \" < > |, no '..', no '.' or '-' in "
                "front, no '.' at the end)"
            ),
        ],
    ),
    "a name the storage uses": (
        """\
name: Tokens
baseline: a
target: {val_loss: 3.3}
arms: {a: }
""",
        [
            "1:7: name: 'Tokens' cannot name a folder (the storage uses this name itself)",
        ],
    ),
    "an empty name": (
        """\
name: ''
baseline: a
target: {val_loss: 3.3}
arms: {a: }
""",
        [
            "1:7: name: '' cannot name a folder (1 to 80 printable characters, no space around)",
        ],
    ),
    "a name that is no text": (
        """\
name: 3
baseline: a
target: {val_loss: 3.3}
arms: {a: }
""",
        [
            "1:7: name: expected text, got 3",
        ],
    ),
    "an arm's name": (
        HEAD
        + """\
arms: {a: , ' b': {recipe: fp8}, '': {recipe: mxfp4}}
""",
        [
            "4:13: arms.' b': cannot name an arm (1 to 80 printable characters, no space around)",
            "4:34: arms.'': cannot name an arm (1 to 80 printable characters, no space around)",
        ],
    ),
    "keys that are not text": (
        HEAD
        + """\
arms: {a: , 1: {recipe: fp8}, null: {recipe: mxfp4}, [x]: }
""",
        [
            "4:13: arms.1: the key 1 is not text (quote it)",
            "4:31: arms.null: the key null is not text (quote it)",
            "4:54: arms.?: a key must be text",
        ],
    ),
    "a key given twice": (
        HEAD
        + """\
arms:
  a:
  a: {recipe: fp8}
""",
        [
            "6:3: arms.a: key given twice (first on line 5)",
        ],
    ),
    "unknown recipes": (
        HEAD
        + """\
arms:
  a: {recipe: fp9}
  b: {recipe: {gemms: [fprop, wgrda]}}
  c: {recipe: {wgrad: fp61, dgrad: {stabiliser: dth}}}
  d: {recipe: [fprop]}
  e: {recipe: {gemms: fprop}}
  f: {recipe: {hadamard_size: 48}}
""",
        [
            "5:15: arms.a.recipe: unknown recipe 'fp9' (did you mean 'fp8'?)",
            (
                "6:31: arms.b.recipe.gemms[1]: expected fprop, dgrad or wgrad, got 'wgrda' (did you mean "
                "'wgrad'?)"
            ),
            (
                "7:23: arms.c.recipe.wgrad: expected bf16, fp16, fp8, fp8-delayed, fp8-rowwise, "
                "fp8-blockwise, mxfp8, mxfp6_e3m2, mxfp6_e2m3, mxfp4, mxfp4_e3m0, nvfp4, fp4_e2m1 or "
                "fp4_e3m0, got 'fp61' (did you mean 'fp16'?)"
            ),
            (
                "7:49: arms.c.recipe.dgrad.stabiliser: expected none, sr, rht, dht, sr+rht or sr+dht, got "
                "'dth' (did you mean 'dht'?)"
            ),
            "8:15: arms.d.recipe: expected a mapping, got a list",
            "9:23: arms.e.recipe.gemms: expected a list, got 'fprop' (write [fprop])",
            "10:31: arms.f.recipe.hadamard_size: expected 16, 32, 64, 128 or 256, got 48",
        ],
    ),
    "a stabiliser without FP4": (
        HEAD
        + """\
arms:
  a: {recipe: {stabiliser: sr}}
""",
        [
            "5:28: arms.a.recipe.stabiliser: stabiliser 'sr' with no FP4 GEMM to act on",
        ],
    ),
    "a stabiliser on one GEMM without FP4": (
        HEAD
        + """\
arms:
  a: {recipe: {gemms: [fprop], wgrad: {stabiliser: dht}}}
""",
        [
            "5:39: arms.a.recipe.wgrad: stabiliser 'dht' on wgrad, which is not in FP4",
        ],
    ),
    "a GEMM twice": (
        HEAD
        + """\
arms:
  a: {recipe: {gemms: [fprop, fprop]}}
""",
        [
            "5:23: arms.a.recipe.gemms: a GEMM is named twice in ['fprop', 'fprop']",
        ],
    ),
    "an inherited stabiliser without FP4": (
        HEAD
        + """\
base:
  recipe: {stabiliser: sr}
arms:
  a:
  b: {recipe: {rest: fp8}}
  c: {recipe: mxfp4}
""",
        [
            (
                "5:24: base.recipe.stabiliser: stabiliser 'sr' with no FP4 GEMM to act on (in 2 arms, "
                "first 'a')"
            ),
        ],
    ),
    "an arm equal to another": (
        HEAD
        + """\
arms:
  a:
  b: {description: other, resources: {cpus: 2}}
  c: {recipe: {gemms: []}}
  d: {recipe: mxfp4}
  e: {recipe: {gemms: [fprop, dgrad, wgrad]}}
""",
        [
            "6:3: arms.b: the same arm as 'a' (names, descriptions and resources do not count)",
            "7:3: arms.c: the same arm as 'a' (names, descriptions and resources do not count)",
            "9:3: arms.e: the same arm as 'd' (names, descriptions and resources do not count)",
        ],
    ),
    "unknown parent": (
        HEAD
        + """\
arms:
  base: {recipe: fp8}
  a: {from: bse}
""",
        [
            "6:13: arms.a.from: no arm 'bse' to inherit from (did you mean 'base'?)",
        ],
    ),
    "a circle": (
        HEAD
        + """\
arms:
  a: {from: c}
  b: {from: a}
  c: {from: b}
  d: {from: d}
""",
        [
            "5:13: arms.a.from: arms inherit in a circle: a → c → b → a",
            "8:13: arms.d.from: arms inherit in a circle: d → d",
        ],
    ),
    "heads": (
        HEAD
        + """\
base:
  model: {width: 96, heads: 5}
arms:
  a:
  b: {recipe: fp8}
""",
        [
            "5:29: base.model.heads: width 96 is not a multiple of heads 5 (in 2 arms, first 'a')",
        ],
    ),
    "the arm's value is at fault": (
        HEAD
        + """\
base:
  model: {width: 128, heads: 4}
arms:
  a:
  b: {model: {heads: 3}}
  c: {model: {width: 130}}
  d: {from: c, recipe: fp8}
""",
        [
            "8:22: arms.b.model.heads: width 128 is not a multiple of heads 3",
            "9:22: arms.c.model.width: width 130 is not a multiple of heads 4",
        ],
    ),
    "kv_heads": (
        HEAD
        + """\
arms:
  a: {model: {kv_heads: 3}}
""",
        [
            "5:25: arms.a.model.kv_heads: heads 4 is not a multiple of kv_heads 3",
        ],
    ),
    "odd head dimension": (
        HEAD
        + """\
arms:
  a: {model: {width: 12, heads: 4}}
""",
        [
            (
                "5:33: arms.a.model.heads: head dimension 3 (width / heads) is odd (rotary positions need "
                "it even)"
            ),
        ],
    ),
    "a width that blocks do not divide": (
        HEAD
        + """\
base:
  model: {width: 120, heads: 4, ffn: 320}
arms:
  a:
  b: {recipe: {gemms: [fprop]}}
  c: {recipe: mxfp4}
""",
        [
            (
                "5:18: base.model.width: width 120 is not a multiple of 32, as Dgrad of q, k, v, o and "
                "down needs it (its block of 32 lies along this dimension; in arm 'c')"
            ),
            (
                "5:18: base.model.width: width 120 is not a multiple of 32, as Fprop of q, k, v, o, gate "
                "and up needs it (its block of 32 lies along this dimension; in 2 arms, first 'b')"
            ),
        ],
    ),
    "an ffn that blocks do not divide": (
        HEAD
        + """\
arms:
  a:
  b:
    model: {ffn: 100}
    recipe: {gemms: [dgrad]}
""",
        [
            (
                "7:18: arms.b.model.ffn: ffn 100 is not a multiple of 32, as Dgrad of gate and up needs it "
                "(its block of 32 lies along this dimension)"
            ),
        ],
    ),
    "kv width that blocks do not divide": (
        HEAD
        + """\
arms:
  a: {model: {width: 128, heads: 8, kv_heads: 1}, recipe: {gemms: [dgrad]}}
""",
        [
            (
                "5:47: arms.a.model.kv_heads: kv_heads 1 × head dimension 16 = 16 is not a multiple of 32, "
                "as Dgrad of k and v needs it (its block of 32 lies along this dimension)"
            ),
        ],
    ),
    "tokens that blocks do not divide": (
        HEAD
        + """\
arms:
  a:
    training: {seq_len: 100, batch_size: 12, micro_batch_size: 1}
    recipe: {gemms: [wgrad]}
""",
        [
            (
                "6:25: arms.a.training.seq_len: micro_batch_size 1 × seq_len 100 = 100 tokens is not a "
                "multiple of 32, as Wgrad of every layer needs it (its block of 32 lies along this "
                "dimension)"
            ),
        ],
    ),
    "batch": (
        HEAD
        + """\
base:
  training: {batch_size: 32, micro_batch_size: 5}
arms: {a: }
""",
        [
            (
                "5:48: base.training.micro_batch_size: batch_size 32 is not a multiple of micro_batch_size "
                "5 (in arm 'a')"
            ),
        ],
    ),
    "wsd without decay": (
        HEAD
        + """\
base:
  training: {schedule: wsd}
arms: {a: }
""",
        [
            (
                "5:24: base.training.schedule: schedule wsd needs decay_tokens (the tokens of its decay; "
                "in arm 'a')"
            ),
        ],
    ),
    "decay without wsd": (
        HEAD
        + """\
base:
  training: {decay_tokens: 100}
arms: {a: }
""",
        [
            (
                "5:28: base.training.decay_tokens: decay_tokens 100 with schedule constant (only wsd "
                "decays at the end; set decay_tokens: 0; in arm 'a')"
            ),
        ],
    ),
    "a schedule longer than the budget": (
        HEAD
        + """\
base:
  training: {tokens: 1000000, schedule: wsd, warmup_tokens: 600000, decay_tokens: 500000}
arms:
  a:
  b: {training: {schedule: constant, decay_tokens: 0, warmup_tokens: 2000000}}
""",
        [
            (
                "5:61: base.training.warmup_tokens: warmup_tokens 600000 + decay_tokens 500000 exceeds "
                "tokens 1000000 (in arm 'a')"
            ),
            "8:70: arms.b.training.warmup_tokens: warmup_tokens 2000000 exceeds tokens 1000000",
        ],
    ),
    "evaluation beyond the budget": (
        HEAD
        + """\
base:
  training: {tokens: 10000}
arms: {a: }
""",
        [
            "5:22: base.training.tokens: eval_every_tokens 50000 exceeds tokens 10000 (in arm 'a')",
        ],
    ),
    "evaluation of nothing": (
        HEAD
        + """\
base:
  training: {eval_tokens: 100}
arms: {a: }
""",
        [
            (
                "5:27: base.training.eval_tokens: eval_tokens 100 holds no sequence of seq_len 128 (in arm "
                "'a')"
            ),
        ],
    ),
    "data without paths": (
        HEAD
        + """\
arms:
  a: {data: {source: text}}
  b: {data: {source: tokens}}
  c: {data: {paths: [x]}}
""",
        [
            "5:22: arms.a.data.source: source text needs paths",
            "6:22: arms.b.data.source: source tokens needs paths",
            "6:22: arms.b.data.source: source tokens needs vocab_size (one above the largest token)",
            "7:21: arms.c.data.paths: source stdlib takes no paths",
        ],
    ),
    "data keys without sense": (
        HEAD
        + """\
arms:
  a:
    data:
      source: text
      paths: [x]
      text_field: body
      token_dtype: uint32
      vocab_size: 300
      tokenizer_path: t
  b: {data: {source: tokens, paths: [x], tokenizer: bpe, vocab_size: 70000}}
  c: {data: {tokenizer: bpe}}
  d: {data: {tokenizer: hf}}
  e: {data: {tokenizer: bpe, vocab_size: 10}}
""",
        [
            "9:19: arms.a.data.text_field: source text has no text_field",
            "10:20: arms.a.data.token_dtype: source text has no token_dtype",
            (
                "11:19: arms.a.data.vocab_size: tokenizer bytes has a vocabulary of its own (vocab_size is "
                "for bpe, hf, and source tokens)"
            ),
            "12:23: arms.a.data.tokenizer_path: tokenizer bytes takes no tokenizer_path",
            "13:53: arms.b.data.tokenizer: source tokens takes no tokenizer bpe",
            "13:70: arms.b.data.vocab_size: vocab_size 70000 does not fit uint16 (token_dtype: uint32?)",
            "14:25: arms.c.data.tokenizer: tokenizer bpe needs vocab_size (the size to train)",
            "15:25: arms.d.data.tokenizer: tokenizer hf needs tokenizer_path (a local path or a hub name)",
            (
                "16:42: arms.e.data.vocab_size: vocab_size 10 is too small for bpe (from 257 up: the bytes "
                "and an end of text)"
            ),
        ],
    ),
    "unknown factors": (
        HEAD
        + """\
arms: {a: }
grid:
  factors:
    model.widht: [64]
    width: [64]
    model.width.x: [1]
    grid: [1]
""",
        [
            "7:5: grid.factors.model.widht: unknown factor (did you mean 'model.width'?)",
            "8:5: grid.factors.width: unknown factor (did you mean 'model.width'?)",
            "9:5: grid.factors.model.width.x: unknown factor (did you mean 'model.width'?)",
            "10:5: grid.factors.grid: unknown factor (a field of base, such as training.learning_rate)",
        ],
    ),
    "factors without values": (
        HEAD
        + """\
arms: {a: }
grid:
  factors:
    model.width: 64
    model.ffn: []
    model.heads:
""",
        [
            "7:18: grid.factors.model.width: expected a list of values, or {label: value}",
            "8:16: grid.factors.model.ffn: expected a list of values, or {label: value}",
            "9:5: grid.factors.model.heads: expected a list of values, or {label: value}",
        ],
    ),
    "values of the wrong type": (
        HEAD
        + """\
arms: {a: }
grid:
  factors:
    model.width: [64, wide]
    recipe.gemms: [fprop, [wgrda]]
    recipe: {plain: bf61, other: {stabilser: sr}}
    model: [{widht: 3}]
""",
        [
            "7:23: grid.factors.model.width[1]: expected a whole number, got 'wide'",
            "8:20: grid.factors.recipe.gemms[0]: expected a list, got 'fprop' (write [fprop])",
            (
                "8:28: grid.factors.recipe.gemms[1][0]: expected fprop, dgrad or wgrad, got 'wgrda' (did "
                "you mean 'wgrad'?)"
            ),
            "9:21: grid.factors.recipe.plain: unknown recipe 'bf61' (did you mean 'bf16'?)",
            "9:35: grid.factors.recipe.other.stabilser: unknown key (did you mean 'stabiliser'?)",
            "10:14: grid.factors.model[0].widht: unknown key (did you mean 'width'?)",
        ],
    ),
    "a grid without factors": (
        HEAD
        + """\
arms: {a: }
grid: {senseless: ignore}
""",
        [
            "5:7: grid: missing key 'factors' (path of a field: its values)",
            "5:19: grid.senseless: expected error or drop, got 'ignore'",
        ],
    ),
    "an empty grid": (
        HEAD
        + """\
arms: {a: }
grid: {factors: {}}
""",
        [
            "5:17: grid.factors: expected at least one entry",
        ],
    ),
    "zip": (
        HEAD
        + """\
arms: {a: }
grid:
  factors:
    model.width: [64, 128]
    model.ffn: [64, 96, 128]
    model.layers: [1, 2]
  zip:
    - [model.width, model.ffn]
    - [model.layers, model.heads]
    - [model.layers]
""",
        [
            (
                "11:7: grid.zip[0]: zipped factors need equally many values (model.width has 2, model.ffn "
                "has 3)"
            ),
            "12:22: grid.zip[1][1]: 'model.heads' is no factor of this grid (did you mean 'model.layers'?)",
            "13:7: grid.zip[2]: a group to zip needs at least two factors",
        ],
    ),
    "zipped twice": (
        HEAD
        + """\
arms: {a: }
grid:
  factors:
    model.width: [64, 128]
    model.ffn: [64, 96]
    model.layers: [1, 2]
  zip: [[model.width, model.ffn], [model.ffn, model.layers]]
""",
        [
            "10:36: grid.zip[1][0]: 'model.ffn' is zipped twice",
        ],
    ),
    "exclude": (
        HEAD
        + """\
arms: {a: }
grid:
  factors:
    model.layers: [1, 2]
    recipe.gemms: {F: [fprop], W: [wgrad]}
  exclude:
    - {model.layers: 3}
    - {model.layer: 1}
    - {recipe.gemms: D}
    - {}
    - 3
""",
        [
            "10:22: grid.exclude[0].model.layers: no value of the factor 'model.layers'",
            (
                "11:8: grid.exclude[1].model.layer: 'model.layer' is no factor of this grid (did you mean "
                "'model.layers'?)"
            ),
            "12:22: grid.exclude[2].recipe.gemms: no value of the factor 'recipe.gemms'",
            "13:7: grid.exclude[3]: an empty rule would exclude every cell",
            "14:7: grid.exclude[4]: expected a mapping, got 3",
        ],
    ),
    "an exclude rule that matches no cell": (
        HEAD
        + """\
arms: {a: }
grid:
  factors:
    model.layers: [1, 2]
    model.ffn: [64, 96]
  zip: [[model.layers, model.ffn]]
  exclude:
    - {model.layers: 1, model.ffn: 96}
""",
        [
            "11:7: grid.exclude[0]: the rule matches no cell",
        ],
    ),
    "senseless cells": (
        HEAD
        + """\
arms: {a: }
grid:
  factors:
    recipe.gemms: [[], [fprop]]
    recipe.stabiliser: [none, sr, dht]
    model.layers: [1, 2]
""",
        [
            (
                "8:31: grid.factors.recipe.stabiliser[1]: stabiliser 'sr' with no FP4 GEMM to act on "
                "(exclude the cell, or set grid.senseless: drop; in 2 arms, first 'no gemms sr layers=1')"
            ),
            (
                "8:35: grid.factors.recipe.stabiliser[2]: stabiliser 'dht' with no FP4 GEMM to act on "
                "(exclude the cell, or set grid.senseless: drop; in 2 arms, first 'no gemms dht layers=1')"
            ),
        ],
    ),
    "cells of one name": (
        HEAD
        + """\
arms: {a: , 'x y': {recipe: fp8}}
grid:
  factors:
    model.width: {x: 64}
    model.ffn: {x: 64, z: 96}
    model.layers: {y: 1, w: 2}
""",
        [
            (
                "6:3: grid.factors: two different arms would be called 'x y' (give the values labels: "
                "{label: value})"
            ),
        ],
    ),
    "a grid from no arm": (
        HEAD
        + """\
arms: {abc: }
grid:
  from: abd
  factors: {model.layers: [1, 2]}
""",
        [
            "6:9: grid.from: no arm 'abd' to inherit from (did you mean 'abc'?)",
        ],
    ),
    "a baseline that was dropped": (
        """\
name: s
baseline: no gemms sr
target: {val_loss: 3}
grid:
  factors:
    recipe.gemms: [[], [fprop]]
    recipe.stabiliser: [none, sr]
  senseless: drop
""",
        [
            (
                "2:11: baseline: the baseline 'no gemms sr' was dropped (stabiliser 'sr' with no FP4 GEMM "
                "to act on)"
            ),
        ],
    ),
    "faults of a cell": (
        HEAD
        + """\
arms: {a: }
grid:
  factors:
    model.width: [100, 128]
    recipe.gemms: [[fprop], [dgrad]]
""",
        [
            (
                "7:19: grid.factors.model.width[0]: head dimension 25 (width / heads) is odd (rotary "
                "positions need it even; in 2 arms, first 'width=100 fprop')"
            ),
            (
                "7:19: grid.factors.model.width[0]: width 100 is not a multiple of 32, as Dgrad of q, k, "
                "v, o and down needs it (its block of 32 lies along this dimension; in arm 'width=100 "
                "dgrad')"
            ),
            (
                "7:19: grid.factors.model.width[0]: width 100 is not a multiple of 32, as Fprop of q, k, "
                "v, o, gate and up needs it (its block of 32 lies along this dimension; in arm 'width=100 "
                "fprop')"
            ),
        ],
    ),
    "a tag": (
        HEAD
        + """\
arms: {a: !!python/object:os.system {}}
description: !secret x
""",
        [
            "4:11: arms.a: the tag !!python/object:os.system has no meaning here (leave it out)",
            "5:14: description: the tag !secret has no meaning here (leave it out)",
        ],
    ),
    "a date": (
        """\
name: 2026-01-01
baseline: a
target: {val_loss: 3.3}
seeds: 2026-01-01
arms: {a: }
""",
        [
            "4:8: seeds: expected a count from 1 to 10000, or a list of seeds, got '2026-01-01'",
        ],
    ),
    "half a character": (
        HEAD
        + """\
description: "\\ud800"
arms: {a: }
""",
        [
            "4:14: description: an escape that is no character: '\\ud800'",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fault_has_its_line(case, problems):
    text, expected = CASES[case]
    assert problems(text) == expected


def test_long_names_of_cells(problems):
    text = HEAD + f"arms: {{a: }}\ngrid:\n  factors:\n    data.text_field: [{'x' * 90}, y]\n"
    (line,) = problems(text + "    data.source: [hub]\n    data.paths: [[z]]\n")
    assert line == (
        "6:3: grid.factors: the values make names that cannot name an arm (1 to 80 printable characters, no "
        "space around; give the values labels: {label: value})"
    )


def test_a_grid_of_too_many_cells_is_not_expanded(problems):
    values = ", ".join(str(32 * i) for i in range(1, 101))
    factors = "".join(
        f"    {path}: [{values}]\n" for path in ("model.width", "model.ffn", "training.seq_len")
    )
    assert problems(f"{HEAD}arms: {{a: }}\ngrid:\n  factors:\n{factors}") == [
        "6:3: grid.factors: the grid has 1000000 cells (at most 100000)"
    ]


def test_too_many_runs(problems):
    layers = ", ".join(map(str, range(1, 102)))
    text = HEAD.replace("baseline: a", "baseline: layers=1") + "seeds: 10000\n"
    assert problems(f"{text}grid:\n  factors:\n    model.layers: [{layers}]\n") == [
        "4:8: seeds: 101 arms × 10000 seeds are too many runs (at most 1000000)"
    ]


def test_a_number_with_hundreds_of_digits(problems):
    text = f"{HEAD}base:\n  model: {{rope_base: {'1' * 400}, width: {'1' * 5000}}}\narms: {{a: }}\n"
    assert problems(text) == [
        f"5:22: base.model.rope_base: expected a number, got {'1' * 39}…",
        f"5:431: base.model.width: {'1' * 40!r} is not a number that can be read",
    ]


def test_all_faults_of_a_file_come_at_once_and_in_its_order(problems):
    text = """\
name: a/b
target: 3.3
baseline: bf17
base:
  model: {widht: 128}
arms:
  bf16:
  fp8: {recipe: fp9}
  x: {from: fp88}
"""
    lines = problems(text)
    assert [line.split(" ")[1] for line in lines] == [
        "name:",
        "target:",
        "baseline:",
        "base.model.widht:",
        "arms.fp8.recipe:",
        "arms.x.from:",
    ]


def test_what_many_arms_inherit_is_reported_once(problems):
    arms = "".join(f"  a{i}: {{training: {{learning_rate: 0.{i + 1}}}}}\n" for i in range(9))
    text = HEAD.replace("baseline: a", "baseline: a0") + "base:\n  model: {width: 130}\narms:\n" + arms
    assert problems(text) == [
        "5:18: base.model.width: width 130 is not a multiple of heads 4 (in 9 arms, first 'a0')"
    ]


def test_what_an_alias_repeats_is_reported_once_where_it_was_written(problems):
    text = HEAD + "base:\n  model: &small {width: 64, layers: two}\n  resources: &r {cpus: !x 1}\n"
    text += "arms:\n  a:\n    model: {<<: *small, heads: 2}\n    resources: *r\n"
    assert problems(text) == [
        "5:37: base.model.layers: expected a whole number, got 'two'",
        "6:24: base.resources.cpus: the tag !x has no meaning here (leave it out)",
    ]
