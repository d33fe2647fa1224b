"""dflash-bench kflat: both sides choose the reference's tokens; tables, with numbers checked by hand."""

import pytest

from dflash_aot.benchmarks import jit_loop, torch_worker
from dflash_aot.benchmarks.messages import BundleForwardSpec, RunForward, TorchSpec

# Of a text of 179 tokens; all after the first 131 are the reference's greedy choice.
PASSES = [("verify", 8, 178), ("verify", 1, 140), ("prefill", 64, 178), ("prefill", 16, 132)]


@pytest.fixture(scope="module")
def text(tied) -> list[int]:
    return next(one["ar_output_ids"] for one in tied.facts["prompts"] if one["name"] == "len131")


@pytest.fixture(scope="module")
def sides(bundle, tied, text):
    """The bundle and PyTorch."""
    ours = BundleForwardSpec(str(bundle("tied")), str(tied.target), str(tied.draft), text)
    theirs = TorchSpec(str(tied.target), "float32", text=text)
    with jit_loop.open_passes(ours) as one, torch_worker.open_torch(theirs) as other:
        yield one[RunForward], other[RunForward]


def test_passes_choose_the_reference_tokens(sides, text):
    for program, rows, length in (*PASSES, *reversed(PASSES)):
        expected = text[length - rows + 1 : length + 1] if program == "verify" else [text[length]]
        for forward in sides:
            found = forward(RunForward(program, rows, length, 2))
            assert found.token_ids == expected, (program, rows, length)
            assert len(found.seconds) == 2 and min(found.seconds) > 0
