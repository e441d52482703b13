"""Routing evidence and what follows from it, whoever recorded it: measures, matched experts, verdict, id, tracing."""
