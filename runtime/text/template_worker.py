"""Template worker: the subprocess that renders chat templates, under limits that it sets for itself.

    python -m dflash_aot.runtime.text.template_worker

Answers each TemplateRequest with a TemplateReply (see `template_process`). A rendering that takes too long is
interrupted by a signal handler; an operation in C is not, and the kernel ends the process a second later.
"""

import inspect
import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_aot.cache.json_process import JsonPipe
from dflash_aot.runtime.text.template_process import (
    LOAD_SECONDS,
    TemplateLimits,
    TemplateReply,
    TemplateRequest,
    describe_time_limit,
)

LOAD_LIMITS = TemplateLimits(seconds=LOAD_SECONDS, memory=1 << 32)
GRACE_SECONDS = 1.0  # for an operation in C to end, before the kernel ends the process
TRANSFORMERS_GLOBALS = ("dict", "namespace", "raise_exception", "strftime_now")


class TimeIsUp(BaseException):
    """A rendering took too long. Not an Exception, because filters of Jinja catch some."""


def main() -> None:
    signal.signal(signal.SIGVTALRM, _raise_time_is_up)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    pipe = JsonPipe()
    while request := pipe.receive(TemplateRequest):
        try:
            with hold_limits(LOAD_LIMITS):
                tokenizer = load_tokenizer(request.directory)
        except Exception as error:  # OSError, ValueError, MemoryError, or the bare Exception of tokenizers
            pipe.send(TemplateReply(unreadable=f"{error}" or type(error).__name__))
        else:
            pipe.send(render(tokenizer, request))


@lru_cache(maxsize=1)
def load_tokenizer(directory: str) -> Any:
    """Reads the tokenizer files with transformers. Raises what transformers raises."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  takes a second: not for an import of this module

    return PreTrainedTokenizerFast.from_pretrained(Path(directory), local_files_only=True, trust_remote_code=False)


def render(tokenizer: Any, request: TemplateRequest) -> TemplateReply:
    """Renders a chat within the limits of the request."""
    chat, limits = json.loads(request.chat), request.limits
    try:
        with hold_limits(limits):
            if unread := chat["given"] and sorted({*chat["given"]} - find_variables(tokenizer, request.template)):
                return TemplateReply(unread=unread[0])
            text = tokenizer.apply_chat_template(
                chat["messages"],
                tools=chat.get("tools"),
                chat_template=request.template,
                tokenize=False,
                add_generation_prompt=True,
                **chat["variables"],
            )
            if len(text) > limits.characters:
                return TemplateReply(failure=f"its text has {len(text)} characters: the limit is {limits.characters}")
            return TemplateReply(text=json.dumps(text))
    except TimeIsUp:
        return TemplateReply(failure=describe_time_limit(limits.seconds))
    except MemoryError:
        return TemplateReply(failure=f"it takes more than {limits.memory >> 20} MiB of memory")
    except jinja2.TemplateError as error:
        if type(error) is jinja2.TemplateError:  # by raise_exception; errors in the template itself are of subclasses
            return TemplateReply(refusal=str(error))
        return TemplateReply(failure=f"{type(error).__name__}: {error}")
    except Exception as error:  # a template can raise anything
        return TemplateReply(failure=f"{type(error).__name__}: {error}")


@lru_cache(maxsize=1)
def find_variables(tokenizer: Any, template: str) -> set[str]:
    """Returns the names that a template reads from its caller. Raises jinja2.TemplateError for an invalid template.

    Looking them up computes the constants of the template, so that it needs limits too.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols, GenerationTag])
    environment.globals |= dict.fromkeys(TRANSFORMERS_GLOBALS)
    own = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
    return jinja2.meta.find_undeclared_variables(environment.parse(template)) - own


class GenerationTag(jinja2.ext.Extension):
    """Reads transformers' tag `{% generation %}` as what is inside."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@contextmanager
def hold_limits(limits: TemplateLimits) -> Iterator[None]:
    """Limits processor time and memory of the process. Raises TimeIsUp in the middle of the block; MemoryError."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_limit_memory(limits.memory, most), most))
    signal.setitimer(signal.ITIMER_VIRTUAL, limits.seconds)
    signal.setitimer(signal.ITIMER_PROF, limits.seconds + GRACE_SECONDS)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        finally:  # the handler may raise in the line above
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_memory(more: int, most: int) -> int:
    """The address space of this process and `more` bytes, at most `most`."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return most
    wanted = pages * resource.getpagesize() + more
    return wanted if most == resource.RLIM_INFINITY else min(wanted, most)


def _raise_time_is_up(_: int, __: FrameType | None) -> None:
    raise TimeIsUp


if __name__ == "__main__":
    main()
