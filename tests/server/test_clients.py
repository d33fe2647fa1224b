"""Clients that others wrote, each in a subprocess of its own environment; clients.txt says how to make it."""

import csv
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.server.conftest import EMBEDDED_TARGET, PATIENCE

CLIENTS = Path(__file__).parents[2] / "build" / "clients" / "bin"
MESSAGES = [{"role": "user", "content": "import os"}]
ASK = f'model="embedded", messages={MESSAGES}, max_tokens=4'
SCRIPTS = {
    "openai": f'import openai; print(openai.OpenAI(base_url=URL, api_key="none").chat.completions.create({ASK}))',
    "litellm": f"""
import litellm
print(litellm.completion(model="openai/embedded", messages={MESSAGES}, max_tokens=4, api_base=URL))
""",
    "litellm overflow": """
import litellm
try:
    long = [{"role": "user", "content": "import os " * 300}]
    litellm.completion(model="openai/embedded", messages=long, api_base=URL)
except litellm.ContextWindowExceededError:
    print("recognised")
""",
    "langchain": """
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(model="embedded", base_url=URL, max_tokens=4)
assert "".join(part.content for part in chat.stream("import os"))
print(chat.invoke("import os").content)
""",
    "pydantic-ai": """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel("embedded", provider=OpenAIProvider(base_url=URL))
print(Agent(model, model_settings={"max_tokens": 4}).run_sync("import os").output)
""",
    "instructor": """
import instructor, openai
from pydantic import BaseModel, Field
class Visit(BaseModel, extra="forbid"):
    days: int = Field(ge=1, le=9)
client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=instructor.Mode.TOOLS)
messages = [{"role": "user", "content": "Where to?"}]
print(client.chat.completions.create(model="embedded", messages=messages, response_model=Visit, max_tokens=80))
""",
    "openai responses": """
import openai
print(openai.OpenAI(base_url=URL, api_key="none").responses.create(model="embedded", input="import os").output_text)
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
QUESTIONS = [("import", [" os", " zebra"], 0), ("def main(", [" apple", "):"], 1), ("for i in", [" range(", " qqq"], 0)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CLIENTS / "python").exists(), reason="tests/server/clients.txt is not installed"),
]


@pytest.fixture
def environment() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}
    return {**os.environ, **offline}


def call(environment: dict[str, str], *command: str) -> str:
    """The standard output. Warnings of a client do not matter, its exit code does."""
    done = subprocess.run(
        [CLIENTS / command[0], *command[1:]], env=environment, capture_output=True, text=True, timeout=3 * PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("client", SCRIPTS)
def test_client_gets_an_answer(served, environment, client):
    assert call(environment, "python", "-c", f'URL = "{served.url}/v1"\n{SCRIPTS[client]}').strip()


def test_llm_answers_and_follows_a_schema(served, environment, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- {{model_id: embedded, model_name: embedded, api_base: '{served.url}/v1', supports_schema: true}}\n"
    )
    environment |= {"LLM_USER_PATH": str(tmp_path)}
    assert call(environment, "llm", "-m", "embedded", "-o", "max_tokens", "8", "import os").strip()
    asked = ("--no-stream", "--schema", "city, days int", "-o", "max_tokens", "60", "Where to?")
    assert json.loads(call(environment, "llm", "-m", "embedded", *asked)).keys() >= {"city", "days"}


def test_lm_eval_scores_multiple_choice(served, environment, tmp_path):
    """By `echo` with `logprobs`. The embedded pair prefers Python to fruit."""
    lines = [json.dumps(dict(zip(("question", "choices", "answer"), one, strict=True))) for one in QUESTIONS]
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
        {**environment, "HF_HOME": str(tmp_path / "hf")},
        *("lm_eval", "run", "--model", "local-completions", "--tasks", "tiny", "--include_path", str(tmp_path)),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--output_path", str(tmp_path / "out")),
    )
    (report,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(report.read_text())["results"]["tiny"]["acc,none"] == 1


def test_guidellm_completes_every_request(served, environment, tmp_path):
    report = tmp_path / "report.csv"
    call(
        environment,
        *("guidellm", "run", "--disable-progress", "--profile", "kind=synchronous"),
        *("--backend", f"kind=openai_http,target={served.url},model=embedded,api_key=none"),
        *("--constraint", "kind=max_requests,count=3", "--output", f"kind=csv,path={report}"),
        *("--tokenizer", f"kind=huggingface_auto,model={EMBEDDED_TARGET}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
    )
    groups, names, *_, values = csv.reader(report.read_text().splitlines())
    counts = {
        name: value for group, name, value in zip(groups, names, values, strict=True) if group == "Request Counts"
    }
    assert (counts["Successful"], counts["Errored"], counts["Incomplete"]) == ("3", "0", "0")


def test_llm_comply_passes_what_a_text_model_can(served, environment):
    """Streams and their usage. Other cases need an answer that ends by itself, which the embedded pair rarely gives."""
    told = call(
        environment,
        *("llm-comply", "-u", f"{served.url}/v1", "-k", "none", "-m", "embedded", "--format", "openai-chat"),
        *("--filter", "chat-streaming-response,chat-streaming-usage"),
    )
    assert "All 2 tests passed" in told
