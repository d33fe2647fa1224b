"""Renders chat templates in a subprocess, under limits of time, memory and output.

A template is a program of the checkpoint's authors. Jinja's sandbox keeps it from files and from the interpreter, but
not from looping for ever or from filling the memory. The subprocess limits itself, see `template_worker`, so that it
ends without its parent too.
"""

import signal
import threading

import msgspec

from dflash_aot.cache.json_process import JsonProcess, ProcessEnded

WORKER = "dflash_aot.runtime.text.template_worker"
LOAD_SECONDS = 60.0  # processor time for transformers and the tokenizer files
# For an answer: the process may be stopped, or wait for a disk. Longer than all processor time that it may use.
ANSWER_SECONDS = 120.0


class TemplateLimits(msgspec.Struct, frozen=True):
    """What one rendering may use.

    seconds: processor time, so that a busy machine does not end a rendering.
    memory: bytes of address space beyond what the process has before.
    characters: length of the rendered text.
    """

    seconds: float = 5.0
    memory: int = 1 << 29
    characters: int = 1 << 24


class TemplateRequest(msgspec.Struct, frozen=True):
    """Asks for a rendered chat. The process keeps the last template.

    directory: the checkpoint, whose tokenizer files transformers reads for the special tokens.
    template: the text of the template.
    chat: JSON of an object with `messages`, `tools`, `variables`, and `given`: the names of variables that the template
        must read. The standard library's JSON can hold lone surrogates, NaN and long integers; msgspec's cannot.
    limits: of the rendering.
    """

    directory: str
    template: str
    chat: str
    limits: TemplateLimits = TemplateLimits()


class TemplateReply(msgspec.Struct, frozen=True):
    """The answer. One field is set.

    text: JSON of the rendered text.
    unread: a given variable that the template does not read, or that transformers sets.
    refusal: what the template says to its caller with `raise_exception`.
    failure: why the template failed.
    unreadable: why the tokenizer files cannot be read.
    """

    text: str | None = None
    unread: str | None = None
    refusal: str | None = None
    failure: str | None = None
    unreadable: str | None = None


class TemplateProcess:
    """The subprocess, started at its first use. Threads may share it; they take turns.

    Why a subprocess, measured with a conversation of 5 messages, which takes 0.12 ms to render: a trace function in the
    caller's thread makes it 0.39 ms, and no trace, asynchronous exception or hook of the sandbox interrupts a single
    operation in C, such as `10 ** 10 ** 9` or `'%1000000000d' % 1`. The subprocess adds about 0.15 ms, the kernel
    ends it whatever it does, and rendering holds the GIL of another process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: JsonProcess | None = None

    def ask(self, request: TemplateRequest) -> TemplateReply:
        """Returns the answer; a process that ended or does not answer in ANSWER_SECONDS is a failure of the template.

        The next call then starts another process, which takes a second or two.
        """
        with self._lock:
            if self._process is None:
                self._process = JsonProcess(WORKER)
            try:
                return self._process.ask(request, TemplateReply, ANSWER_SECONDS)
            except ProcessEnded as end:
                self._close()
                return TemplateReply(failure=_describe_end(end, request.limits.seconds))

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._process:
            self._process.close(kill=True)
        self._process = None


def _describe_end(end: ProcessEnded, seconds: float) -> str:
    if end.timed_out:
        return f"no answer within {ANSWER_SECONDS:g} s"
    if end.returncode == -signal.SIGPROF:
        return describe_time_limit(seconds)
    return ": ".join([str(end), *end.last_lines()])[:300]


def describe_time_limit(seconds: float) -> str:
    """The reason of a rendering that took too long."""
    return f"it takes more than {seconds:g} s of processor time"
