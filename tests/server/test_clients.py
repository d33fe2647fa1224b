"""Clients that others wrote, each in a subprocess of its own environment; clients.txt says how to make it."""

import csv
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
}

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
