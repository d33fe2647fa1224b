"""Writes the prompts for benchmarks of the embedded pair: pieces of files that it was not trained on.

python examples/embedded_pair/held_out.py benchmarks/held_out.jsonl
"""

import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from corpus import is_held_out, source_files

PIECES, PIECES_PER_FILE = 64, 4
CHARACTERS, SEED = 1400, 7


def cut_pieces() -> Iterator[dict[str, str]]:
    """Pieces that begin at a line, do not overlap, and whose beginning is in no file of the training set."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = {
        path: (root / path).read_text(encoding="utf-8", errors="replace") for path in source_files()
    }
    trained = [text for path, text in texts.items() if not is_held_out(path)]
    pieces = [
        (path.as_posix(), piece)
        for path, text in texts.items()
        if is_held_out(path)
        for piece in split_at_lines(text)
        if not any(piece[: CHARACTERS // 10] in other for other in trained)
    ]
    taken: Counter[str] = Counter()
    for index in np.random.default_rng(SEED).permutation(len(pieces)):
        source, text = pieces[index]
        if taken[source] < PIECES_PER_FILE and taken.total() < PIECES:
            taken[source] += 1
            yield {"source": source, "text": text}


def split_at_lines(text: str) -> Iterator[str]:
    """Consecutive pieces of CHARACTERS that begin at a line; a shorter rest is left out."""
    begin = 0
    while begin + CHARACTERS <= len(text):
        yield text[begin : begin + CHARACTERS]
        begin = text.find("\n", begin + CHARACTERS) + 1 or len(text)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(piece) + "\n" for piece in cut_pieces()))
