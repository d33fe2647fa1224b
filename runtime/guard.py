"""The guard: the process for texts of clients and of checkpoints that may take any time, memory and stack.

    python -m dflash_aot.runtime.guard

Its functions are called through `CHAT_GUARD` and `GRAMMAR_GUARD`. Chat templates are rendered with transformers: a
template is a program of the checkpoint's authors, and Jinja's sandbox keeps it from files and from the interpreter, but
not from looping for ever or from filling the memory. Grammars are compiled and followed for some rounds, each in a
fork, before the server compiles those that kept to the limits.
"""

import inspect
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.bounded_worker import serve_functions

if TYPE_CHECKING:
    from dflash_aot.runtime.structured_output.grammar import GrammarCompiler

TRANSFORMERS_GLOBALS = ("dict", "namespace", "raise_exception", "strftime_now")


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not be in a fork
    serve_functions(
        {
            "read_tokenizer": read_tokenizer,
            "render": render,
            "open_grammars": open_grammars,
            "check_grammar": check_grammar,
        }
    )


# -- grammars

_compilers: dict[str, "GrammarCompiler"] = {}  # of the latest tokenizer


def open_grammars(name: str, tokenizer: str, vocab: int, ends: Sequence[int]) -> None:
    """Reads a tokenizer.json for `check_grammar`, under a name. Raises BadInput as `GrammarCompiler`."""
    from dflash_aot.runtime.structured_output.grammar import GrammarCompiler  # noqa: PLC0415  takes 0.1 s, and chats need none
    from dflash_aot.runtime.text.tokenizer import Tokenizer  # noqa: PLC0415

    _compilers.clear()
    read = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer))
    _compilers[name] = GrammarCompiler(read, vocab, ends)
    _compilers[name].check({"regex": "[a-z]{1,9}"})  # forks share what a first grammar loads


def check_grammar(name: str, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """A grammar that keeps to the limits, or its "refusal"; None where this process has no tokenizer of this name."""
    if name not in _compilers:
        return None
    try:
        checked = _compilers[name].check(asked)
    except BadInput as error:
        return {"refusal": str(error)}
    return {"grammar": checked.grammar, "shortest": checked.shortest, "size": checked.size}


# -- chat templates


_tokenizers: dict[str, Any] = {}  # the latest


def read_tokenizer(name: str, files: Mapping[str, str]) -> None:
    """Reads tokenizer files with transformers, and keeps them for `render`. Raises what transformers raises.

    files: contents by file name, a letter for each byte.
    """
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  takes a second: not for an import of this module

    with tempfile.TemporaryDirectory() as directory:
        for file, content in files.items():
            (Path(directory) / file).write_bytes(content.encode("latin-1"))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            Path(directory), local_files_only=True, trust_remote_code=False
        )
    if len(_tokenizers) > 1:
        _tokenizers.pop(next(iter(_tokenizers)))
    _tokenizers[name] = tokenizer


def render(
    name: str,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    given: Sequence[str],
) -> dict[str, str] | None:
    """Renders a chat; the tokenizer that was read under `name` has the special tokens.

    Returns None where none was read; otherwise the "text", the "refusal" that the template raises with
    `raise_exception`, or the first of the `given` variables that is "unread": the template does not read it, or
    transformers sets it. Raises what a template raises.
    """
    tokenizer = _tokenizers.get(name)
    if tokenizer is None:
        return None
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
