"""Experiments of the paper and beyond: models in, documented results out."""
