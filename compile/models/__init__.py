"""The models: target (dense or mixture of experts) and DFlash draft, their layers and parameters."""
