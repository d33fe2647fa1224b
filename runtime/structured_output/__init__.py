"""Structured output: requests whose answer follows a JSON schema, a regular expression or a grammar."""
