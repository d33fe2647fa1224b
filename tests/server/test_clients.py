"""Clients that others wrote, in processes of an environment of their own.

bin/test.sh makes build/clients of clients.txt, bin/test_slow_clients.sh build/slow_clients of slow_clients.txt.
"""

import csv
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import ml_dtypes
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from dflash_aot.cache.files.checkpoint_files import SINGLE_FILE
from tests.server.conftest import EMBEDDED_TARGET, PATIENCE, Server

BUILD = Path(__file__).parents[2] / "build"
CLIENTS, SLOW_CLIENTS = BUILD / "clients" / "bin", BUILD / "slow_clients" / "bin"
MESSAGES = [{"role": "user", "content": "import os"}]
ASK = f'model="embedded", messages={MESSAGES}, max_tokens=4, temperature=0'
VISIT = """
from pydantic import BaseModel, Field
class Visit(BaseModel, extra="forbid"):
    days: int = Field(ge=1, le=9)
"""
SCRIPTS = {
    "openai": f'import openai; print(openai.OpenAI(base_url=URL, api_key="none").chat.completions.create({ASK}))',
    "litellm": f"""
import litellm
print(litellm.completion(model="openai/embedded", messages={MESSAGES}, max_tokens=4, temperature=0, api_base=URL))
""",
    "litellm overflow": """
import litellm
try:
    long = [{"role": "user", "content": "import os " * 300}]
    litellm.completion(model="openai/embedded", messages=long, api_base=URL)
except litellm.ContextWindowExceededError:
    print("recognised")
""",
    "langchain": f"""{VISIT}
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(model="embedded", base_url=URL, max_tokens=4, temperature=0)
assert "".join(part.content for part in chat.stream("import os"))
assert chat.invoke("import os").content
chat = ChatOpenAI(model="embedded", base_url=URL, max_tokens=80)
for method in ("json_schema", "function_calling"):
    print(repr(chat.with_structured_output(Visit, method=method).invoke("Where to?")))
""",
    "pydantic-ai": f"""{VISIT}
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel("embedded", provider=OpenAIProvider(base_url=URL))
assert Agent(model, model_settings={{"max_tokens": 4, "temperature": 0}}).run_sync("import os").output
for form in (NativeOutput(Visit), ToolOutput(Visit)):
    agent = Agent(model, output_type=form, model_settings={{"max_tokens": 80}})
    print(repr(agent.run_sync("Where to?").output))
""",
    "instructor": f"""{VISIT}
import instructor, openai
messages = [{{"role": "user", "content": "Where to?"}}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=mode)
    asked = dict(model="embedded", messages=messages, response_model=Visit, max_tokens=80, max_retries=0)
    print(repr(client.chat.completions.create(**asked)))
""",
}
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""
COMPLIANCE = {  # cases of llm-comply, by interface
    "openai-chat": ("chat-basic-response", "chat-system-prompt", "chat-multi-turn", "chat-tool-calling"),
    "open-responses": (
        *("basic-response", "system-prompt", "multi-turn", "streaming-response", "streaming-usage"),
        *("assistant-phase", "response-output-phase-schema"),
    ),
}
QUESTIONS = [("import", [" os", " zebra"], 0), ("def main(", [" apple", "):"], 1), ("for i in", [" range(", " qqq"], 0)]


def mark_needed(directory: Path) -> pytest.MarkDecorator:
    complete = (directory.parent / ".installed").exists()
    return pytest.mark.skipif(not complete, reason=f"{directory.parent} is not installed")


needs_clients = mark_needed(CLIENTS)


def call(program: Path, *arguments: str, **variables: str) -> str:
    """The standard output. Warnings of a client do not matter, its exit code does."""
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [program, *arguments],
        env={**os.environ, **offline, **variables},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_clients
@pytest.mark.parametrize("client", SCRIPTS)
def test_client_gets_an_answer(served, client):
    assert call(CLIENTS / "python", "-c", f'URL = "{served.url}/v1"\n{SCRIPTS[client]}').strip()


@needs_clients
def test_llm_answers_and_follows_a_schema(served, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- {{model_id: embedded, model_name: embedded, api_base: '{served.url}/v1', supports_schema: true}}\n"
    )
    ask = partial(call, CLIENTS / "llm", "-m", "embedded", LLM_USER_PATH=str(tmp_path))
    assert ask("-o", "max_tokens", "8", "-o", "temperature", "0", "import os").strip()
    answer = ask("--no-stream", "--schema", "city, days int", "-o", "max_tokens", "60", "Where to?")
    assert json.loads(answer).keys() >= {"city", "days"}


class TestSlowClients:
    pytestmark = [pytest.mark.slow, mark_needed(SLOW_CLIENTS)]

    def test_lm_eval_scores_multiple_choice(self, served, tmp_path):
        """By `echo` with `logprobs`. The embedded pair prefers Python to fruit."""
        lines = [json.dumps(dict(zip(("question", "choices", "answer"), row, strict=True))) for row in QUESTIONS]
        (tmp_path / "data.jsonl").write_text("\n".join(lines))
        (tmp_path / "tiny.yaml").write_text(TASK.replace("FILE", str(tmp_path / "data.jsonl")))
        model = {
            "model": "embedded",
            "base_url": f"{served.url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": EMBEDDED_TARGET,
            "max_length": 256,
        }
        call(
            SLOW_CLIENTS / "lm_eval",
            *("run", "--model", "local-completions", "--tasks", "tiny", "--include_path", str(tmp_path)),
            *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
            *("--output_path", str(tmp_path / "out")),
            HF_HOME=str(tmp_path / "hf"),
        )
        (report,) = (tmp_path / "out").rglob("results*.json")
        assert json.loads(report.read_text())["results"]["tiny"]["acc,none"] == 1

    def test_guidellm_completes_every_request(self, served, tmp_path):
        report = tmp_path / "report.csv"
        call(
            SLOW_CLIENTS / "guidellm",
            *("run", "--disable-progress", "--profile", "kind=synchronous"),
            *("--backend", f"kind=openai_http,target={served.url},model=embedded,api_key=none"),
            *("--constraint", "kind=max_requests,count=3", "--output", f"kind=csv,path={report}"),
            *("--tokenizer", f"kind=huggingface_auto,model={EMBEDDED_TARGET}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        )
        groups, names, *_, values = csv.reader(report.read_text().splitlines())
        columns = zip(groups, names, values, strict=True)
        counts = {name: value for group, name, value in columns if group == "Request Counts"}
        assert (counts["Successful"], counts["Errored"], counts["Incomplete"]) == ("3", "0", "0")

    def test_llm_comply_passes_streams(self, served):
        cases = ("chat-streaming-response", "chat-streaming-usage")
        assert "All 2 tests passed" in check_compliance(served, "openai-chat", cases)

    def test_llm_comply_passes_answers_that_end(self, start_server, concluding_target):
        """Left out: images, tools of /v1/responses, and a request without `model`, which is accepted here."""
        flags = (f"--target={concluding_target}", "--served_model_name=embedded", "--temperature=0")
        server = start_server(*flags).wait_until_ready()
        for interface, cases in COMPLIANCE.items():
            assert f"All {len(cases)} tests passed" in check_compliance(server, interface, cases)


@pytest.fixture
def concluding_target(tmp_path) -> Path:
    """The embedded target, but it ends an answer where it would break the line: the embedding of <|im_end|> is that of
    the line break, a tenth longer."""
    target = Path(shutil.copytree(EMBEDDED_TARGET, tmp_path / "target"))
    tensors, tokenizer = load_file(target / SINGLE_FILE), Tokenizer.from_file(str(target / "tokenizer.json"))
    (line_break,) = tokenizer.encode("\n", add_special_tokens=False).ids
    rows = tensors["model.embed_tokens.weight"].copy()
    rows[tokenizer.token_to_id("<|im_end|>")] = rows[line_break] * ml_dtypes.bfloat16(1.1)
    save_file(tensors | {"model.embed_tokens.weight": rows}, target / SINGLE_FILE, {"format": "pt"})
    return target


def check_compliance(server: Server, interface: str, cases: Sequence[str]) -> str:
    return call(
        SLOW_CLIENTS / "llm-comply",
        *("-u", f"{server.url}/v1", "-k", "none", "-m", "embedded", "--format", interface, "--filter", ",".join(cases)),
    )
