"""Worker with PyTorch transformers' model on the same weights: `generate`, and single forward passes."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from dflash_aot.benchmarks import messages
from dflash_aot.benchmarks.messages import Handlers, run_worker
from dflash_aot.benchmarks.record import READ_BYTES, SQUARE, count_cores, measure_peaks


@contextmanager
def open_torch(spec: messages.TorchSpec) -> Iterator[Handlers]:
    """Loads the model with scaled dot product attention, one thread per core."""
    torch.set_num_threads(count_cores())
    dtype = getattr(torch, spec.dtype)
    model = AutoModelForCausalLM.from_pretrained(spec.target, dtype=dtype, local_files_only=True)
    if spec.text is not None:
        with torch.inference_mode():
            passes = TorchPasses(model, spec.text)
            yield {
                messages.RunForward: passes.run,
                messages.MeasurePeaks: partial(measure_torch_peaks, dtype),
            }
        return
    model.generation_config.eos_token_id = None  # no stop token ends an answer early
    model.generation_config.pad_token_id = 0
    options = {
        "prompt_lookup_num_tokens": spec.lookup_tokens,
        "assistant_early_exit": spec.exit_layer,
    }
    yield {messages.Serve: partial(serve, model, options)}


class ArrivalStreamer(BaseStreamer):
    """Records when tokens arrive. The first tokens that `generate` streams are those of the prompt."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._prompt_seen = False
        self.seconds: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Tokens in the host's memory."""
        if self._prompt_seen:
            self.seconds += [time.perf_counter() - self._began] * value.numel()
        self._prompt_seen = True

    def end(self) -> None:
        """No-op: required by BaseStreamer."""


def serve(
    model: PreTrainedModel, options: dict[str, int | None], question: messages.Serve
) -> messages.Served:
    """One caller. Rounds: forward passes after the first token."""
    began = time.perf_counter()
    answers = []
    passes = 0
    for prompt in question.prompts:
        ids = torch.tensor([prompt])
        streamer = ArrivalStreamer()
        found = model.generate(
            ids,
            streamer=streamer,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=question.max_tokens,
            **options,
        )
        answers.append(messages.TimedAnswer(found[0, len(prompt) :].tolist(), streamer.seconds))
        passes += len(set(streamer.seconds)) - 1
    return messages.Served(
        answers, time.perf_counter() - began, messages.ServingWork(rounds=passes)
    )


class TorchPasses:
    """A model and the kv of a text, in the kind of cache that `generate` uses."""

    def __init__(self, model: PreTrainedModel, text: messages.PromptIds):
        self._model = model
        self._text = torch.tensor([text])
        self._whole = DynamicCache()
        model(self._text, past_key_values=self._whole, logits_to_keep=1)

    def run(self, question: messages.RunForward) -> messages.ForwardSeconds:
        """Computes logits of every row for a verification, of the last row for a prefill, and chooses tokens."""
        start = question.length - question.rows
        seconds = []
        rows = self._text[:, start : question.length]
        kv = copy.deepcopy(self._whole)
        kv.crop(start - self._text.shape[1])
        logit_rows = 1 if question.program == "prefill" else question.rows
        for _ in range(question.calls):
            began = time.perf_counter()
            logits = self._model(rows, past_key_values=kv, logits_to_keep=logit_rows).logits
            chosen = logits.argmax(-1)
            seconds.append(time.perf_counter() - began)
            kv.crop(-question.rows)
        return messages.ForwardSeconds(seconds, chosen[0].tolist())


def measure_torch_peaks(dtype: torch.dtype, question: messages.MeasurePeaks) -> messages.PeakRates:
    """Peak rates of PyTorch."""
    words = torch.ones(READ_BYTES // 4)
    square = torch.full((SQUARE, SQUARE), 1e-3, dtype=dtype)
    return measure_peaks(words.sum, lambda: square @ square, question.calls)


if __name__ == "__main__":
    run_worker({messages.TorchSpec: open_torch})
