"""Measurements that anyone can repeat: what is measured, how samples become figures, and the pages that show them."""
