"""Verification: measured routing in, measures and p-values out. Never imports `embed`."""

from pathmark.verify.decode import DecodedId, decode_id
from pathmark.verify.measures import LayerScore, PathScore, measure_layers, score_path, target_mass
from pathmark.verify.routes import Routes, encode_probes, record_routes
from pathmark.verify.whitebox import Verdict, verify_model

__all__ = [
    "DecodedId",
    "LayerScore",
    "PathScore",
    "Routes",
    "Verdict",
    "decode_id",
    "encode_probes",
    "measure_layers",
    "record_routes",
    "score_path",
    "target_mass",
    "verify_model",
]
