"""Weight loading: from safetensors checkpoints to device arrays, by the bundle's weight recipes."""
