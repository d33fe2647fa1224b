"""Sampled rounds of whole programs: what tokens must not depend on, and the sampling state after a round."""

import numpy as np
import pytest

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4]]
VOCAB, STEPS = 48, 10
PER_SLOT = ("lengths", "anchors", "sampling", "seeds", "bias", "prompted", "counts", "tops")
ASKED = {
    "limited": {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
}


def admit(rig, arrays, slot, text, seed=7, tops=0, anchor=None, bias=0.0, answered=0, **asked):
    """Starts a sampled request as the engine does: at the last token of its text, whose end may be of the answer."""
    prompt, answer = text[: len(text) - answered], text[len(text) - answered :]
    given = {"slot_seeds": [[0, seed]], "slot_bias": np.broadcast_to(np.float32(bias), (1, VOCAB)), "slot_tops": [tops]}
    given |= {"slot_prompted": np.isin(np.arange(VOCAB), prompt)[None]}
    given |= {"slot_counts": np.bincount(np.array(answer, int), minlength=VOCAB)[None]}
    return rig.admit(arrays, slot, text, anchor=[text[-1] if anchor is None else anchor], **given, **asked)


@pytest.fixture(scope="module")
def prefilled(rig):
    """Three slots that hold their prompts without the last token."""
    arrays = rig.empty()
    for slot, prompt in enumerate(PROMPTS):
        arrays = rig.prefill(arrays, slot, prompt[:-1], width=16)
    return arrays


@pytest.fixture(scope="module")
def decode(rig, prefilled):
    """Decodes a request beside others: its tokens, their log-probabilities and the final arrays."""

    def decode(asked, slot=0, prompt=None, k=3, batch=1, length=32, steps=STEPS):
        prompt = prompt or PROMPTS[0]
        arrays = rig.prefill(prefilled, slot, prompt[:-1], width=16)
        arrays = admit(rig, arrays, slot, prompt, **asked)
        for other in set(range(3)) - {slot}:
            arrays = admit(rig, arrays, other, PROMPTS[other], seed=other, temperature=1.5, top_k=7)
        tokens, likelihoods = [], []
        while len(tokens) < steps:
            if k:
                arrays = rig.run(f"draft batch={batch} length={length} k={k}", arrays, sampled=[True], penalised=[True])
            arrays = rig.run(f"sampled_verify batch={batch} length={length} k={k}", arrays, active=[True] * batch)
            arrays = rig.run(f"kv_write rows={batch} width={k + 1}", arrays, slots=[*range(batch)])
            accepted, *verdict = np.asarray(arrays["verdict"])[slot]
            tokens += verdict[k : k + accepted + 1]
            bits = np.int32(verdict[2 * k + 1 : 2 * k + accepted + 2])
            likelihoods += bits.view(np.float32).tolist()
        return [*map(int, tokens[:steps])], likelihoods[:steps], arrays

    return decode


def test_continued_request_counts_the_tokens_of_its_answer(decode):
    asked, prompt = {"temperature": 1.2, "frequency_penalty": 1.5, "repetition_penalty": 1.3}, PROMPTS[0]
    tokens, _, _ = decode(asked)
    found, _, _ = decode({**asked, "answered": 4}, prompt=[*prompt, *tokens[:4]], steps=STEPS - 4)
    assert found == tokens[4:]
    assert decode(asked, prompt=[*prompt, *tokens[:4]], steps=STEPS - 4)[0] != tokens[4:]


def test_tokens_of_a_seed_depend_on_no_k_or_bucket(decode):
    for asked in ASKED.values():
        tokens, likelihoods, _ = decode(asked, k=0)
        assert len(set(tokens)) > 3
        for k, batch, length, slot in ((3, 1, 32, 0), (0, 3, 32, 1), (3, 3, 32, 2)):
            found, as_likely, _ = decode(asked, slot, k=k, batch=batch, length=length)
            assert found == tokens, (k, batch, length, slot)
            np.testing.assert_allclose(as_likely, likelihoods, atol=1e-4)
        assert decode(asked, k=3, length=16, steps=4)[0] == tokens[:4]
        assert decode({**asked, "seed": 8}, k=0)[0] != tokens


def choose_slowly(logits, prompt, output, asked):
    found = np.float64(logits)
    for token in {*prompt, *output}:
        found[token] *= 1 / asked["repetition_penalty"] if found[token] > 0 else asked["repetition_penalty"]
    for token in set(output):
        found[token] -= asked["frequency_penalty"] * output.count(token) + asked["presence_penalty"]
    return int(found.argmax())


def test_penalties_equal_those_of_decoding_token_by_token(small, decode):
    asked = {**ASKED["penalised"], "temperature": 0}
    prompt, output = PROMPTS[1], []
    for _ in range(STEPS):
        logits, _ = small.read([*prompt, *output], small.draft.target_layer_ids)
        output.append(choose_slowly(logits[-1], prompt, output, asked))
    logits, _ = small.read([*prompt, *output], small.draft.target_layer_ids)
    rows = np.float64(logits[len(prompt) - 1 : -1])
    expected = rows[np.arange(STEPS), output] - np.log(np.exp(rows).sum(axis=1))
    for k in (0, 3):
        tokens, likelihoods, arrays = decode(asked, prompt=prompt, k=k)
        assert tokens == output
        np.testing.assert_allclose(likelihoods, expected, atol=1e-3)
        assert arrays["counts"][0].sum() == arrays["lengths"][0] - len(prompt) + 1 >= STEPS


def test_sampled_verify_with_neutral_parameters_equals_verify(rig, prefilled):
    arrays = prefilled
    for slot, prompt in enumerate(PROMPTS):
        arrays = admit(rig, arrays, slot, prompt)
    arrays = rig.run("draft batch=3 length=32 k=3", arrays)
    greedy, sampled = (
        rig.run(f"{program} batch=3 length=32 k=3", arrays, active=[True, False, True])
        for program in ("verify", "sampled_verify")
    )
    assert greedy["verdict"].tolist() == sampled["verdict"][:, :8].tolist()
    for name in ("lengths", "anchors", "starts", "features", "target_k", "target_v"):
        np.testing.assert_array_equal(greedy[name], sampled[name], err_msg=name)


def test_sampled_verify_counts_committed_tokens_of_active_rows(rig, prefilled):
    arrays = prefilled
    for slot, prompt in enumerate(PROMPTS):
        arrays = admit(rig, arrays, slot, prompt, temperature=1.0, seed=slot)
    single, block = arrays, [arrays["anchors"]]
    for _ in range(3):  # drafts that are all accepted
        single = rig.run("sampled_verify batch=3 length=32 k=0", single, active=[True] * 3)
        block.append(single["verdict"][:, 1])
    before = {**arrays, "counts": arrays["counts"] + np.arange(3, dtype=np.int32)[:, None]}
    active = [True, False, False]
    after = rig.run("sampled_verify batch=3 length=32 k=3", before, block=np.stack(block, axis=1), active=active)
    accepted, chosen = after["verdict"][0, 0], after["verdict"][0, 4:8]
    assert accepted == 3
    np.testing.assert_array_equal(after["counts"][0], np.bincount(chosen, minlength=VOCAB))
    np.testing.assert_array_equal(after["counts"][1:], before["counts"][1:])
    assert (after["lengths"] - before["lengths"]).tolist() == [4, 0, 0]


def test_top_logprobs_are_computed_if_an_active_row_asks(small, rig, prefilled):
    prompt = PROMPTS[0]
    bucket = "sampled_verify batch=3 length=32 k=0"
    quiet = admit(rig, admit(rig, prefilled, 0, prompt), 1, PROMPTS[1])
    after = rig.run(bucket, quiet, active=[True, True, False])
    assert after["top_tokens"].shape == (3, 1, 20) and not after["top_tokens"].any()
    asked = admit(rig, quiet, 0, prompt, tops=1, temperature=1.0, bias=3.0, repetition_penalty=2.0)
    after = rig.run(bucket, asked, active=[True, True, False])
    logits = np.float64(small.read(prompt, small.draft.target_layer_ids)[0][-1])
    expected = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-expected, kind="stable")[:20]
    np.testing.assert_array_equal(after["top_tokens"][0, 0], order)
    np.testing.assert_allclose(after["top_logprobs"][0, 0], expected[order], atol=1e-4)
    not_running = rig.run(bucket, asked, active=[False, True, False])
    assert not not_running["top_logprobs"].any()


def make_distinct_state(rig):
    rng = np.random.default_rng(0)
    arrays = rig.empty()
    return {
        name: (rng.integers(0, 2, array.shape) if array.dtype == bool else rng.integers(0, 40, array.shape)).astype(
            array.dtype
        )
        for name, array in arrays.items()
    }


def test_admit_sets_its_slot_and_changes_no_other(rig):
    for anchor in [5, 0, -1]:
        before = make_distinct_state(rig)
        after = admit(rig, before, 1, PROMPTS[1], seed=3, tops=1, anchor=anchor, bias=np.arange(VOCAB), temperature=0.5)
        for name in rig.empty():
            kept = np.delete(np.asarray(after[name]), 1, axis=0) if name in PER_SLOT else after[name]
            expected = np.delete(before[name], 1, axis=0) if name in PER_SLOT else before[name]
            np.testing.assert_array_equal(kept, expected, err_msg=name)
        started = (len(PROMPTS[1]) - 1, anchor) if anchor >= 0 else (before["lengths"][1], before["anchors"][1])
        assert (after["lengths"][1], after["anchors"][1]) == started
        assert after["sampling"][1].tolist() == [0.5, 0, 1, 0, 1, 0, 0] and after["seeds"][1].tolist() == [0, 3]
        assert after["bias"][1].tolist() == [*range(VOCAB)] and after["tops"][1] == 1
        assert np.flatnonzero(after["prompted"][1]).tolist() == sorted(set(PROMPTS[1])) and not after["counts"][1].any()


def test_move_copies_the_sampling_state(rig):
    before = make_distinct_state(rig)
    after = rig.run("move", before, source=[2], destination=[0])
    for name in rig.empty():
        expected = np.take(before[name], [2, 1, 2], axis=0) if name in PER_SLOT else before[name]  # pages stay
        np.testing.assert_array_equal(after[name], expected, err_msg=name)
