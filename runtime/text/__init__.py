"""Text above token ids: tokenizer, incremental detokenizer, chat template."""
