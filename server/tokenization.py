"""Tokenization routes: /tokenize and /detokenize, as vLLM has them, and /version."""

import importlib.metadata
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from dflash_aot.server.api_errors import ApiError
from dflash_aot.server.limits import KeyLimits
from dflash_aot.server.request_parsing import check_model_name, encode_text, render_messages
from dflash_aot.server.request_schema import DetokenizeRequest, TokenizeRequest
from dflash_aot.server.response_schema import ERROR_RESPONSES, TokenizedText, TokenText, Version
from dflash_aot.server.served_model import ServedModel
from dflash_aot.server.server_state import ServerState


def add_tokenization_routes(app: FastAPI, state: ServerState, key_limits: KeyLimits) -> None:
    """Adds the routes. Texts of one key are tokenized one at a time, as those of prompts."""

    @app.post("/tokenize", responses={**ERROR_RESPONSES, 200: {"model": TokenizedText}}, response_model=None)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        model = state.model
        tokens = await key_limits.parse(request.state.key, partial(tokenize_text, model, body))
        texts = [model.token_formatter.to_text(token) for token in tokens] if body.return_token_strs else None
        fields = {"count": len(tokens), "max_model_len": model.capacity, "tokens": tokens, "token_strs": texts}
        return JSONResponse(fields)

    @app.post("/detokenize", responses={**ERROR_RESPONSES, 200: {"model": TokenText}}, response_model=None)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        text = await key_limits.parse(request.state.key, partial(detokenize_tokens, state.model, body))
        return JSONResponse({"prompt": text})

    @app.get("/version", responses={200: {"model": Version}}, response_model=None)
    async def report_version() -> Response:
        return JSONResponse({"version": importlib.metadata.version("dflash-aot")})


def tokenize_text(model: ServedModel, body: TokenizeRequest) -> list[int]:
    """The tokens of a text, or of a chat as the model reads it. Raises ApiError, BadInput."""
    check_model_name(model, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "one of prompt and messages is needed", "invalid_value", "prompt")
    if body.messages is not None:
        return list(render_messages(model, body.messages, body.chat_template_kwargs or {}))
    assert body.prompt is not None
    return encode_text(model, body.prompt, body.add_special_tokens is not False)


def detokenize_tokens(model: ServedModel, body: DetokenizeRequest) -> str:
    """The text of tokens, special tokens written out. Raises ApiError."""
    check_model_name(model, body.model)
    vocab = model.engine.manifest.target.facts.decoder.vocab
    if unknown := next((token for token in body.tokens if token >= vocab), None):
        raise ApiError(400, f"token {unknown}: the target's tokens are 0 to {vocab - 1}", "invalid_value", "tokens")
    return model.require_tokenizer("tokens").decode_with_special(body.tokens)
