"""The draft program of a DFlash2 draft for Qwen3-8B, as it is given to the compilers: what it sorts and gathers."""

import math
import re

import pytest
from jax import export

from dflash_aot.cache.grid import parse_grid
from dflash_aot.compile.programs.program_source import TracedPrograms
from dflash_aot.compile.programs.programs import STACKED, Programs
from tests.compile.conftest import read_published

VOCAB, RANK, K, CANDIDATES = 151_936, 256, 15, 16
SORTING = ("stablehlo.sort", "chlo.top_k", "@TopK", "@ApproxTopK", "mhlo.topk")


@pytest.fixture(scope="module", params=["cpu", "tpu"])
def program(request) -> str:
    target, draft = read_published("Qwen3-8B", "Qwen3-8B-DFlash2-b16")
    source = TracedPrograms(
        Programs(target, draft, "bfloat16", STACKED, sampling=("sample",)),
        parse_grid(f"batch=1 length=1024 k={K} prefill=256", draft.block),
        request.param,
    )
    (signature,) = (one for one in source.signatures if one.label.startswith("draft"))
    return export.deserialize(bytearray(source.export(signature))).mlir_module()


def read_shape(text: str) -> tuple[int, ...]:
    """ "15x16xf32" → (15, 16)."""
    return tuple(int(size) for size in re.findall(r"(\d+)x", text))


def test_nothing_as_long_as_the_vocabulary_is_sorted(program):
    sorts = [line for line in program.splitlines() if any(name in line for name in SORTING)]
    sorted_shapes = [read_shape(found) for line in sorts for found in re.findall(r"tensor<([^>]*)>", line)]
    assert sum(len(shape) > 0 for shape in sorted_shapes) >= 2
    assert max(math.prod(shape[-1:]) for shape in sorted_shapes) <= CANDIDATES * 128, sorted_shapes


def test_each_place_reads_one_row_of_a_codebook(program):
    """The predecessor codebook: the anchor and the candidates of all positions but the last; the other: of all."""
    gathers = re.findall(rf"stablehlo.gather.*?\(tensor<{VOCAB}x{RANK}xbf16>.*?-> tensor<([^>]*)>", program)
    read = sorted(math.prod(read_shape(shape)) // RANK for shape in gathers)
    assert read == [(K - 1) * CANDIDATES + 1, K * CANDIDATES]
    assert len(re.findall(rf"(?m)^ *%\S+ = .*tensor<{VOCAB}x{RANK}xbf16>", program)) == len(gathers)  # no other reader
