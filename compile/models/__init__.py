"""The models: the target (dense or mixture of experts), the DFlash draft, their layers and parameters."""
