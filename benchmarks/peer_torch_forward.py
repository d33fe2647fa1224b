"""PyTorch transformers' model, one pass at a time, as a peer: python -m dflash_aot.benchmarks.peer_torch_forward"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from dflash_aot.benchmarks.forward import Forward, Forwarded, Peaked, Peaks, TorchForward
from dflash_aot.benchmarks.peaks import READ_BYTES, SQUARE, measure_peaks
from dflash_aot.benchmarks.peer import Handlers, run_peer
from dflash_aot.benchmarks.record import count_cores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Passes:
    """A model and the kv of a text, in the kind of cache that `generate` uses."""

    def __init__(self, model: PreTrainedModel, text: list[int]):
        self._model, self._text = model, torch.tensor([text])
        self._whole = DynamicCache()
        model(self._text, past_key_values=self._whole, logits_to_keep=1)

    def forward(self, question: Forward) -> Forwarded:
        """Logits of every row for a verification, of the last one for a prefill, and the tokens that they choose."""
        start, seconds = question.length - question.rows, []
        rows, kv = self._text[:, start : question.length], self._copy(start)
        judged = 1 if question.program == "prefill" else question.rows
        for _ in range(question.calls):
            began = time.perf_counter()
            logits = self._model(rows, past_key_values=kv, logits_to_keep=judged).logits
            chosen = logits.argmax(-1)
            seconds.append(time.perf_counter() - began)
            kv.crop(-question.rows)
        return Forwarded(seconds, chosen[0].tolist())

    def _copy(self, length: int) -> DynamicCache:
        """The first positions."""
        kv = DynamicCache()
        for number, layer in enumerate(self._whole.layers):
            kv.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), number)
        return kv


def find_peaks(dtype: torch.dtype, question: Peaks) -> Peaked:
    """By PyTorch."""
    words, square = torch.ones(READ_BYTES // 4), torch.full((SQUARE, SQUARE), 1e-3, dtype=dtype)
    return measure_peaks(words.sum, lambda: square @ square, question)


@contextmanager
def open_way(order: TorchForward) -> Iterator[Handlers]:
    """Scaled dot product attention, as transformers chooses it; a thread for each core."""
    torch.set_num_threads(count_cores())
    dtype = DTYPES[order.dtype]
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(order.target, dtype=dtype, local_files_only=True).eval()
        yield {Forward: Passes(model, order.text).forward, Peaks: partial(find_peaks, dtype)}


if __name__ == "__main__":
    run_peer(TorchForward, open_way)
