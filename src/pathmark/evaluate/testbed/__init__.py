"""A real language model as a test bed: SmolLM2-135M-Instruct, carved into a Mixture-of-Experts."""
