"""PyTorch transformers' `generate` on the same weights, as a peer: python -m dflash_aot.benchmarks.peer_torch"""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from dflash_aot.benchmarks.orders import TorchOrder
from dflash_aot.benchmarks.peer import Handlers, run_peer
from dflash_aot.benchmarks.record import count_cores
from dflash_aot.benchmarks.traffic import Answer, Prompt, Serve, Served, Work


class Arrivals(BaseStreamer):
    """When tokens come. The first ones that `generate` shows are the prompt's."""

    def __init__(self) -> None:
        self._began, self._prompt_seen = time.perf_counter(), False
        self.seconds: list[float] = []
        self.passes = 0

    def put(self, value: torch.Tensor) -> None:
        """They lie in the host's memory."""
        if self._prompt_seen:
            self.seconds += [time.perf_counter() - self._began] * value.numel()
            self.passes += 1
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is left to be told."""


@contextmanager
def open_way(order: TorchOrder) -> Iterator[Handlers]:
    """Scaled dot product attention, as transformers chooses it; a thread for each core."""
    torch.set_num_threads(count_cores())
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[order.dtype]
    model = AutoModelForCausalLM.from_pretrained(order.target, dtype=dtype, local_files_only=True).eval()
    model.generation_config.eos_token_id = None  # no text ends the run of one way earlier
    model.generation_config.pad_token_id = 0
    guesses = {"prompt_lookup_num_tokens": order.lookup_tokens, "assistant_early_exit": order.exit_layer}
    chosen = {name: value for name, value in guesses.items() if value is not None}
    yield {Serve: functools.partial(serve, model, chosen)}


def serve(model: PreTrainedModel, guesses: dict[str, int], question: Serve) -> Served:
    """One caller: what came behind the first token took so many passes."""
    (prompts,) = question.lists
    began = time.perf_counter()
    ends = [generate(model, guesses, prompt, question.max_tokens) for prompt in prompts]
    passes = sum(arrivals.passes - 1 for _, arrivals in ends)
    answers = [Answer(token_ids, arrivals.seconds) for token_ids, arrivals in ends]
    return Served([answers], time.perf_counter() - began, Work(rounds=passes))


def generate(
    model: PreTrainedModel, guesses: dict[str, int], prompt: Prompt, tokens: int
) -> tuple[list[int], Arrivals]:
    """Greedy."""
    ids, arrivals = torch.tensor([prompt]), Arrivals()
    greedy = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": tokens}
    found = model.generate(ids, streamer=arrivals, **greedy, **guesses)
    return found[0, len(prompt) :].tolist(), arrivals


if __name__ == "__main__":
    run_peer(TorchOrder, open_way)
