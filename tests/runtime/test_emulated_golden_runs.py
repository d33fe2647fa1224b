"""Reference runs through what the TPU compiler made of the programs, emulated on the CPU: the same tokens."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_aot.cache.bundle.manifest import DraftModel, TargetModel
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.compiler_options import DEVICE_OPTIONS
from dflash_aot.compile.pipeline.build_job import BuildJob, BuildOptions, run_build
from dflash_aot.compile.pipeline.build_target import attach_devices
from dflash_aot.compile.pipeline.observer import BuildObserver
from dflash_aot.runtime import Engine, SamplingParams
from tests.conftest import OPTIMIZED
from tests.optimized_programs import NEEDS_COMPILER, EmulatedPair, OptimizedPair, optimize
from tests.runtime.test_golden_runs import generate, needed

pytestmark = pytest.mark.skipif(bool(NEEDS_COMPILER), reason=NEEDS_COMPILER)

# The capacity leaves room for the largest k behind every prompt. `tied` has all programs.
GRIDS = {
    "tied": "batch=1,2 length=208 k=0,7 prefill=64 rounds=4",
    "untied": "batch=1 length=224 k=0,15 prefill=64",
    "swa": "batch=1 length=208 k=0,7 prefill=64",
    "llama": "batch=1 length=208 k=0,9 prefill=64",
    "pruned": "batch=1 length=208 k=0,7 prefill=64",
    "dflash2": "batch=1 length=208 k=0,7 prefill=64",
    "hybrid": "batch=1 length=288 k=0,7 prefill=64",
}


@pytest.fixture(scope="module")
def emulated(runs, tmp_path_factory):
    """The emulated bundle of each reference run."""
    folder = tmp_path_factory.mktemp("emulated")
    pairs = [
        OptimizedPair(key, str(runs[key].target), str(runs[key].draft), grid, sampling=key == "tied")
        for key, grid in GRIDS.items()
    ]
    optimize(pairs, folder)
    return {pair.name: build(pair, folder) for pair in pairs}


def build(pair: OptimizedPair, folder: Path) -> Path:
    deployment, bundle = pair.describe("cpu"), folder / f"{pair.name}.bundle"
    job = BuildJob(
        target=TargetModel(pair.target, deployment.target),
        draft=DraftModel(pair.draft, deployment.draft),
        deployment=deployment,
        source=EmulatedPair(pair, folder),
        build_target=attach_devices("cpu", None, 1),
        store=Store(bundle),
        options=BuildOptions(self_test=False),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICE_OPTIONS, "cpu", OPTIMIZED)
        run_build(job, BuildObserver())
    return bundle


@pytest.mark.parametrize("key", GRIDS)
def test_every_reference_run_is_reproduced_round_by_round(key, runs, emulated):
    """Tokens, drafts and accepted counts of the reference, at the largest K and at K = 0."""
    facts = runs[key].facts
    with ExitStack() as stack:
        pair = {"target": runs[key].target, "draft": runs[key].draft}
        drafting = stack.enter_context(Engine.open(emulated[key], k=facts["block_size"] - 1, **pair))
        plain = stack.enter_context(Engine.open(emulated[key], k=0, **pair))
        for prompt in facts["prompts"]:
            result, cycles = generate(drafting, prompt), needed(prompt)
            assert (prompt["name"], result.token_ids) == (prompt["name"], prompt["new_token_ids"])
            assert (prompt["name"], result.accepted) == (prompt["name"], [cycle["acceptance"] for cycle in cycles])
            assert (prompt["name"], result.drafted) == (prompt["name"], [cycle["block"][1:] for cycle in cycles])
            greedy = prompt["ar_output_ids"][len(prompt["prompt_ids"]) :]
            assert (prompt["name"], generate(plain, prompt).token_ids) == (prompt["name"], greedy)


def test_sampled_tokens_and_logprobs_equal_those_of_the_cpus_programs(runs, emulated, serve):
    """With seeds, penalties and several rows at a time: `sampled_verify`, `admit` and `move`."""
    prompts = [prompt["prompt_ids"] for prompt in runs["tied"].facts["prompts"]][:6]
    params = [
        SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=seed, repetition_penalty=1.1, logprobs=2)
        for seed in range(len(prompts))
    ]
    with Engine.open(emulated["tied"], k=7, target=runs["tied"].target, draft=runs["tied"].draft) as engine:
        found = engine.generate_all(prompts, params)
        assert engine.stats().compile_events == 0
    expected = serve("sampled_small", 7).generate_all(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-4
        )
