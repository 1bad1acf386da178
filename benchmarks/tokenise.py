"""How fast text becomes tokens: the whole preparation, and its stages one by one on a core.

    python benchmarks/tokenise.py [--text FILE.json.gz …] [--shards 8] [--threads 1]

Shards of JSON lines (by default of the standard library's source; the docs name theirs) are written with
their documents in another order each, a twentieth of them held back as validation text, and a BPE of 16,384
is learnt once. Then the whole preparation is timed, from shards to token files; the least wall time and the
least processor time count. MB are of text, UTF-8.
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

REPEATS = 5


def read_texts(paths: list[Path]) -> list[str]:
    from ablate.data.sources import stdlib_files

    if not paths:
        return [Path(file.path).read_text(errors="replace") for file in stdlib_files()]
    lines = [
        line
        for path in paths
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]
    return [json.loads(line)["text"] for line in lines]


def write_shards(texts: list[str], folder: Path, shards: int) -> None:
    held_back = len(texts) // 20
    order = list(range(held_back, len(texts)))
    for number in range(shards):
        random.Random(number).shuffle(order)
        lines = "".join(
            json.dumps({"text": f"{number}. {texts[index]}"}) + "\n" for index in order
        )
        (folder / f"train.{number:05}-of-{shards:05}.json.gz").write_bytes(
            gzip.compress(lines.encode(), 6)
        )
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[:held_back])
    (folder / "validation.json.gz").write_bytes(gzip.compress(lines.encode()))


def stages(folder: Path, tokenizer: Path) -> None:
    """Print what one process does of each stage, alone."""
    from ablate.data.documents import Documents, ValidationSide, encoded, file_documents
    from ablate.data.hub import find_tokenizer
    from ablate.data.sources import find_files
    from ablate.data.tokenise import open_json

    def read(name: str) -> list[bytes]:
        (file,) = find_files([str(folder / name)], ())
        return list(encoded(file_documents(file, "text"), None))

    texts = read("train.00000*")
    side = ValidationSide(Documents(read("validation*"), folder / "validation.txt"))
    opened = open_json(find_tokenizer(str(tokenizer)))
    work: dict[str, Callable[[], object]] = {
        "decompress and parse": lambda: read("train.00000*"),
        "hash documents": lambda: Documents(texts),
        "find copies and near copies": lambda: side.leave_out(texts),
        f"tokenise, threads: {os.environ['RAYON_NUM_THREADS']}": lambda: opened.encode(
            texts
        ),
    }
    for name, call in work.items():
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        print(f"{name:30} {sum(map(len, texts)) / 1e6 / min(seconds):7.1f} MB/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)  # before the first use

    from ablate.data import prepare
    from ablate.data.tokenise import train_bpe
    from ablate.run.config import DataConfig

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        texts = read_texts(options.text)
        write_shards(texts, folder, options.shards)
        train_bpe((text.encode("utf-8", "replace") for text in texts), 16_384).save(
            folder
        )
        stages(folder, folder / "tokenizer.json")
        data = DataConfig(
            source="jsonl",
            paths=[
                str(
                    folder
                    / f"train.{{00000..{options.shards - 1:05}}}-of-{options.shards:05}.json.gz"
                )
            ],
            validation_paths=[str(folder / "validation.json.gz")],
            tokenizer="hf",
            tokenizer_path=str(folder / "tokenizer.json"),
        )

        wall, cpu = [], []
        for repeat in range(REPEATS):
            began, used = time.perf_counter(), time.process_time()
            files = prepare(data, folder / str(repeat))
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
        meta = json.loads((files.folder / "meta.json").read_text())
        size = (meta["train_bytes"] + meta["validation_bytes"]) / 1e6
        print(f"{f'threads: {options.threads}':30} {size / min(wall):7.1f} MB/s")
        print(f"{'for each second of a core':30} {size / min(cpu):7.1f} MB")


if __name__ == "__main__":
    main()
