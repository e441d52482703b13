"""The paper's tables and figures, measured on any MoE: a bench of marked copies, and cells that use it."""
