"""Renders chat templates with transformers: the functions of a `BoundedWorker`.

    python -m dflash_aot.runtime.text.template_worker

A template is a program of the checkpoint's authors. Jinja's sandbox keeps it from files and from the interpreter, but
not from looping for ever or from filling the memory.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_aot.runtime.bounded_worker import serve_functions

TRANSFORMERS_GLOBALS = ("dict", "namespace", "raise_exception", "strftime_now")


def main() -> None:
    serve_functions(
        {"read_tokenizer": lambda directory: bool(load_tokenizer(directory)), "render": render}
    )


@lru_cache(maxsize=2)
def load_tokenizer(directory: str) -> Any:
    """Reads the tokenizer files with transformers, and keeps them for `render`. Raises what transformers raises."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  takes a second: not for an import of this module

    return PreTrainedTokenizerFast.from_pretrained(
        Path(directory), local_files_only=True, trust_remote_code=False
    )


def render(
    directory: str,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    given: Sequence[str],
) -> dict[str, str]:
    """Renders a chat; the tokenizer files of the checkpoint in `directory` have the special tokens.

    Returns the "text", the "refusal" that the template raises with `raise_exception`, or the first of the `given`
    variables that is "unread": the template does not read it, or transformers sets it. Raises what a template raises.
    """
    tokenizer = load_tokenizer(directory)
    if given and (unread := {*given} - find_variables(tokenizer, template)):
        return {"unread": min(unread)}
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )
    except jinja2.TemplateError as error:
        # By raise_exception; errors in the template itself are of subclasses.
        if type(error) is jinja2.TemplateError:
            return {"refusal": str(error)}
        raise
    return {"text": text}


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


if __name__ == "__main__":
    main()
