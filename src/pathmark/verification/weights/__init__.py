"""Evidence from weights: open a suspect, run the probes through it, behind the original where it was damaged."""
