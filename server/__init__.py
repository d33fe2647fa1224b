"""An OpenAI-compatible HTTP server over the engine: who may ask, what is asked, how it is answered."""
