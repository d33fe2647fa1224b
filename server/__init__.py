"""HTTP server with an OpenAI-compatible API over one engine."""
