"""Serve a GGUF file with llama.cpp's own HTTP server, from the package xllamacpp, until standard input ends.

pip install "pathmark[llama-cpp]"
python examples/serve_gguf.py marked-q4_0.gguf 8080
pathmark verify-api http://127.0.0.1:8080/v1 --model any --key owner.key
"""

from __future__ import annotations

import argparse
import os
import sys

import xllamacpp


def main() -> None:
    """Start, say where, and wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("port", type=int, help="on 127.0.0.1")
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_ctx, params.n_parallel = args.file, args.port, 2048, 1
    params.cpuparams.n_threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
