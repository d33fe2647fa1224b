"""Every prompt of the reference runs: the same tokens, the same blocks, the same acceptance."""

from dflash_aot.runtime import Engine, Result, SamplingParams
from tests.conftest import BUILT_AS
from tests.runtime.stepper import hold


def generate(engine, prompt: dict) -> Result:
    return engine.generate(prompt["prompt_ids"], make_params(prompt))


def make_params(prompt: dict) -> SamplingParams:
    return SamplingParams(
        max_tokens=prompt["max_new_tokens"], stop_token_ids=prompt["stop_token_ids"] or (), trace=True
    )


def needed(prompt: dict) -> list[dict]:
    """The reference looks for the end after a round only, so it may run one round more."""
    cycles, tokens = [], 1
    for cycle in prompt["cycles"]:
        if tokens < len(prompt["new_token_ids"]):
            cycles.append(cycle)
            tokens += cycle["acceptance"] + 1
    assert len(cycles) >= len(prompt["cycles"]) - 1
    return cycles


def check_rounds(engine: Engine, prompt: dict) -> Result:
    """Asserts that the engine gives the reference's tokens, blocks and acceptance."""
    result, cycles = generate(engine, prompt), needed(prompt)
    assert (prompt["name"], result.token_ids) == (prompt["name"], prompt["new_token_ids"])
    assert (prompt["name"], result.accepted) == (prompt["name"], [cycle["acceptance"] for cycle in cycles])
    assert (prompt["name"], result.drafted) == (prompt["name"], [cycle["block"][1:] for cycle in cycles])
    return result


def test_every_prompt_matches_the_reference_round_by_round(run, serve):
    """In every dialect, layout and sliding-window reading; fewer with the executables of another run."""
    engine = serve(run.key, run.facts.get("num_speculative_tokens", run.facts["block_size"] - 1))
    for prompt in run.facts["prompts"][:: 3 if run.key in BUILT_AS else 1]:
        result = check_rounds(engine, prompt)
        assert result.prompt_tokens == len(prompt["prompt_ids"])
        assert result.finish_reason == ("length" if len(result.token_ids) == prompt["max_new_tokens"] else "stop")


def test_prompts_that_share_calls_with_rounds_get_the_tokens_that_they_get_alone(untied, serve):
    """Two slots are taken together, so that the second prompt comes while the first request decodes."""
    engine, prompts = serve("untied", 15), untied.facts["prompts"]
    before = engine.stats()
    with hold(engine):
        streams = [engine.stream(prompt["prompt_ids"], make_params(prompt)) for prompt in prompts]
    assert [one.result().token_ids for one in streams] == [prompt["new_token_ids"] for prompt in prompts]
    after = engine.stats()
    assert after.mixed_chunks > before.mixed_chunks and after.packed_chunks > before.packed_chunks


def test_optimized_executables_give_the_reference_tokens(tied, serve):
    """Those that sample: without a temperature they choose the likeliest tokens too, in other rounds."""
    engine = serve("sampled_small", 7)
    for prompt in tied.facts["prompts"]:
        assert (prompt["name"], generate(engine, prompt).token_ids) == (prompt["name"], prompt["new_token_ids"])


def test_k_zero_equals_plain_greedy_decoding(tied, serve):
    engine = serve("tied", 0)
    for prompt in tied.facts["prompts"][::2]:
        result = generate(engine, prompt)
        plain = prompt["ar_output_ids"][len(prompt["prompt_ids"]) :]
        assert (prompt["name"], result.token_ids) == (prompt["name"], plain)
        assert result.accepted == [0] * (len(plain) - 1)
        assert result.drafted == [[]] * (len(plain) - 1)


def test_bfloat16_matches_the_reference_for_nearly_every_prompt(rounded_run, bundle):
    """bfloat16 has exact ties, and instruction sets round differently: a prompt or two may differ."""
    prompts = rounded_run.facts["prompts"]
    with Engine.open(bundle("bfloat16"), k=15) as engine:
        results = [generate(engine, prompt) for prompt in prompts]
        assert engine.stats().compile_events == 0
    same = [one.token_ids == prompt["new_token_ids"] for one, prompt in zip(results, prompts, strict=True)]
    assert sum(same) >= len(prompts) - 2
    accepted, rounds = sum(sum(one.accepted) for one in results), sum(len(one.accepted) for one in results)
    assert abs(accepted / rounds - 5.4) < 0.5
