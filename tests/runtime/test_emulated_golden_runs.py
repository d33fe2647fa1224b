"""Reference runs through what the TPU compiler made of the programs, emulated on the CPU: the same tokens."""

from pathlib import Path

import pytest

from dflash_aot.cache.bundle.store import Store
from dflash_aot.compile.pipeline.build_job import BuildJob, BuildOptions, run_build
from dflash_aot.compile.pipeline.build_target import attach_devices
from dflash_aot.compile.pipeline.compilation_manager import BuildObserver
from dflash_aot.runtime import Engine, SamplingParams
from tests.optimized_programs import NEEDS_COMPILER, EmulatedPair, OptimizedPair, optimize
from tests.runtime.test_golden_runs import check_rounds

pytestmark = pytest.mark.skipif(bool(NEEDS_COMPILER), reason=NEEDS_COMPILER)

# The capacity leaves room for the largest k behind every prompt.
GRIDS = {"hybrid": "batch=1 length=288 k=7 prefill=64 saved_states=2"}


@pytest.fixture(scope="module")
def emulated(runs, tmp_path_factory):
    """The emulated bundle of each reference run."""
    folder = tmp_path_factory.mktemp("emulated")
    pairs = [OptimizedPair(key, str(runs[key].target), str(runs[key].draft), grid) for key, grid in GRIDS.items()]
    optimize(pairs, folder)
    return {pair.name: build(pair, folder) for pair in pairs}


def build(pair: OptimizedPair, folder: Path) -> Path:
    deployment, bundle = pair.describe("cpu"), folder / f"{pair.name}.bundle"
    job = BuildJob(
        deployment=deployment,
        source=EmulatedPair(pair, folder),
        build_target=attach_devices("cpu", None, 1),
        store=Store(bundle),
        options=BuildOptions(self_test=False),
    )
    run_build(job, BuildObserver())
    return bundle


@pytest.mark.parametrize("key", GRIDS)
def test_every_reference_run_is_reproduced_round_by_round(key, runs, emulated):
    facts = runs[key].facts
    with Engine.open(emulated[key], k=7, target=runs[key].target, draft=runs[key].draft) as engine:
        for prompt in facts["prompts"][::3]:
            check_rounds(engine, prompt)
        if engine.manifest.grid.saved_states:
            text = facts["prompts"][-1]["output_ids"]
            engine.generate(text[:210], SamplingParams(max_tokens=1))
            behind = engine.generate(text[:220], SamplingParams(max_tokens=15, stop_token_ids=()))
            assert (behind.cached_tokens, behind.token_ids) == (210, text[220:235])
