"""Worker with llama.cpp on a GGUF file, by the package xllamacpp: its server, asked over HTTP."""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import xllamacpp

from dflash_aot.benchmarks import messages
from dflash_aot.benchmarks.messages import Handlers, run_worker


@contextmanager
def open_llama(spec: messages.LlamaSpec) -> Iterator[Handlers]:
    """Loads the model for one caller."""
    settings = xllamacpp.CommonParams()
    settings.model.path = spec.gguf
    settings.n_ctx = spec.longest
    settings.n_parallel = 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = spec.threads
    server = xllamacpp.Server(settings)
    yield {messages.Serve: partial(serve, urlsplit(server.listening_address).netloc)}


def serve(address: str, question: messages.Serve) -> messages.Served:
    """One caller; each token is sent as soon as it is chosen."""
    began = time.perf_counter()
    answers = [listen(address, prompt, question.max_tokens) for prompt in question.prompts]
    work = messages.ServingWork(rounds=sum(len(one.token_ids) - 1 for one in answers))
    return messages.Served(answers, time.perf_counter() - began, work)


def listen(address: str, prompt: messages.PromptIds, max_tokens: int) -> messages.TimedAnswer:
    """One greedy answer that no end token ends early."""
    body = {
        "prompt": prompt,
        "n_predict": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "return_tokens": True,
    }
    token_ids: list[int] = []
    arrivals: list[float] = []
    with closing(HTTPConnection(address)) as connection:
        sent = time.perf_counter()
        connection.request("POST", "/completion", json.dumps(body))
        for event in read_events(connection):
            token_ids += event["tokens"]
            arrivals += [time.perf_counter() - sent] * len(event["tokens"])
    return messages.TimedAnswer(token_ids, arrivals)


def read_events(connection: HTTPConnection) -> Iterator[dict[str, Any]]:
    """The events of the answer, up to its last."""
    for line in connection.getresponse():
        if line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            yield event
            if event["stop"]:
                return


if __name__ == "__main__":
    run_worker({messages.LlamaSpec: open_llama})
