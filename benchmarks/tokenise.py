"""How fast text becomes tokens: one process against several, and the stages one by one on a core.

    python benchmarks/tokenise.py [--text FILE.json.gz …] [--shards 8] [--workers 2] [--threads 1]

Shards of JSON lines (by default of the standard library's source; the docs name theirs) are written with
their documents in another order each, a twentieth of them held back as validation text, and a BPE of 16,384
is learnt once. Then the whole preparation is timed, from shards to token files: in this process with
``--threads`` of the tokeniser, and in ``--workers`` processes with one each, in turns; the least time counts.
Both must write the same bytes. MB are of text, UTF-8.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.data import TokenFiles

REPEATS = 5


def read_texts(paths: list[Path]) -> list[str]:
    from ablate.data.sources import stdlib_files

    if not paths:
        return [Path(file.path).read_text(errors="replace") for file in stdlib_files()]
    lines = [line for path in paths for line in gzip.decompress(path.read_bytes()).splitlines()]
    return [json.loads(line)["text"] for line in lines]


def write_shards(texts: list[str], folder: Path, shards: int) -> None:
    held_back = len(texts) // 20
    order = list(range(held_back, len(texts)))
    for number in range(shards):
        random.Random(number).shuffle(order)
        lines = "".join(json.dumps({"text": f"{number}. {texts[at]}"}) + "\n" for at in order)
        (folder / f"train.{number:05}-of-{shards:05}.json.gz").write_bytes(gzip.compress(lines.encode(), 6))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[:held_back])
    (folder / "validation.json.gz").write_bytes(gzip.compress(lines.encode()))


def stages(folder: Path, tokenizer: Path) -> None:
    """Print what one process does of each stage, alone."""
    from ablate.data.documents import json_documents
    from ablate.data.sources import find_files
    from ablate.data.split import encoded, hash_all, line_hashes, near_copies
    from ablate.data.tokenizer import END_OF_TEXT, open_json

    def read(name: str) -> list[bytes]:
        (file,) = find_files([str(folder / name)], ())
        return list(encoded(json_documents(file, "text", lambda _done: None), None))

    texts, seen = read("train.00000*"), line_hashes(read("validation*"))
    opened = open_json(tokenizer, END_OF_TEXT)
    work: dict[str, Callable[[], object]] = {
        "decompress and parse": lambda: read("train.00000*"),
        "hash documents": lambda: hash_all(texts),
        "find near copies": lambda: near_copies(texts, seen),
        f"tokenise, threads: {os.environ['RAYON_NUM_THREADS']}": lambda: opened.encode(texts),
    }
    for what, call in work.items():
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        print(f"{what:30} {sum(map(len, texts)) / 1e6 / min(seconds):7.1f} MB/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)  # before the first use

    from ablate.data import parts, prepare
    from ablate.data.tokenizer import train_bpe
    from ablate.run.config import DataConfig

    parts.PART_BYTES = 1  # a shard is a part, however small
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        texts = read_texts(options.text)
        write_shards(texts, folder, options.shards)
        train_bpe((text.encode("utf-8", "replace") for text in texts), 16_384).save(folder)
        stages(folder, folder / "tokenizer.json")
        data = DataConfig(
            source="jsonl",
            paths=[str(folder / f"train.{{00000..{options.shards - 1:05}}}-of-{options.shards:05}.json.gz")],
            validation_paths=[str(folder / "validation.json.gz")],
            tokenizer="hf",
            tokenizer_path=str(folder / "tokenizer.json"),
        )

        def timed(name: str, workers: int) -> tuple[float, TokenFiles]:
            began = time.perf_counter()
            files = prepare(data, folder / name, num_workers=workers)
            return time.perf_counter() - began, files

        seconds: dict[int, list[float]] = {1: [], options.workers: []}
        contents = set()
        for repeat in range(REPEATS):
            for workers, found in seconds.items():
                os.environ["RAYON_NUM_THREADS"] = "1"  # of workers; this process has its threads already
                taken, files = timed(f"{repeat}-{workers}", workers)
                found.append(taken)
                contents.add(files.train.read_bytes())
        assert len(contents) == 1, "the workers' bytes differ"
        meta = json.loads((files.folder / "meta.json").read_text())
        size = (meta["train_bytes"] + meta["validation_bytes"]) / 1e6
        one, many = (min(found) for found in seconds.values())
        print(f"\nthe whole of {size:.1f} MB of text to {meta['train_tokens']:,} training tokens:")
        print(f"{f'1 process, threads: {options.threads}':30} {size / one:7.1f} MB/s")
        print(
            f"{f'{options.workers} processes, 1 thread each':30} {size / many:7.1f} MB/s, {one / many:.2f} x"
        )


if __name__ == "__main__":
    main()
