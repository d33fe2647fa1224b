"""All model code, and the manager that compiles it. Never imports the runtime."""
