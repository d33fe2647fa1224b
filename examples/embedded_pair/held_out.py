"""Writes the prompts that the embedded pair is measured with: pieces of files that it was not trained on.

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

PIECES, MOST_OF_A_FILE = 64, 4
CHARACTERS, SEED = 1400, 7


def cut_pieces() -> Iterator[dict[str, str]]:
    """Each from the begin of a line; no two share one, and the begin of none is in a file trained on."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = {path: (root / path).read_text(encoding="utf-8", errors="replace") for path in source_files()}
    trained = [text for path, text in texts.items() if not is_held_out(path)]
    pieces = [
        (path.as_posix(), piece)
        for path, text in texts.items()
        if is_held_out(path)
        for piece in split_at_lines(text)
        if not any(piece[: CHARACTERS // 10] in other for other in trained)
    ]
    taken: Counter[str] = Counter()
    for place in np.random.default_rng(SEED).permutation(len(pieces)):
        source, text = pieces[place]
        if taken[source] < MOST_OF_A_FILE and taken.total() < PIECES:
            taken[source] += 1
            yield {"source": source, "text": text}


def split_at_lines(text: str) -> Iterator[str]:
    """Pieces of CHARACTERS, each from the begin of the first line behind the one before; no rest."""
    begin = 0
    while begin + CHARACTERS <= len(text):
        yield text[begin : begin + CHARACTERS]
        begin = text.find("\n", begin + CHARACTERS) + 1 or len(text)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(piece) + "\n" for piece in cut_pieces()))
