"""Record the routes of probes from an SGLang server. Needs nothing but Python and the server's address.

    python -m sglang.launch_server --model-path MODEL --enable-return-routed-experts
    python record_routes_sglang.py http://localhost:30000 probes.jsonl routes.jsonl

Leave expert load balancing off (no --enable-eplb, no redundant experts). The answers are written as they come;
`pathmark verify-routes` reads them so.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any


def request(probe: dict[str, Any], *, as_text: bool = False) -> dict[str, Any]:
    """Body for /generate: one new token, the routes of all tokens, and the prompt's tokens as the server saw them."""
    prompt = {"text": probe["text"]} if as_text else {"input_ids": probe["token_ids"]}
    return prompt | {
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_routed_experts": True,
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def line(probe: dict[str, Any], response: dict[str, Any], *, as_text: bool = False) -> dict[str, Any]:
    """What is kept of an answer; the tokens as sent, so that they can be compared with those that were seen."""
    sent = {} if as_text else {"tokens": probe["token_ids"]}
    return {"probe": probe["probe"]} | sent | {"response": response}


def main() -> None:
    """Ask for one probe after the other and write the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("probes", type=Path, help="written by `pathmark probes`")
    parser.add_argument("output", type=Path, help="answers to write, .jsonl")
    parser.add_argument("--as-text", action="store_true", help="send texts, let the server cut them into tokens")
    options = parser.parse_args()
    asked = [json.loads(row) for row in options.probes.read_text(encoding="utf-8").splitlines()]
    with options.output.open("w", encoding="utf-8") as file:
        for probe in asked:
            body = json.dumps(request(probe, as_text=options.as_text)).encode()
            call = urllib.request.Request(  # noqa: S310  the operator's own server
                f"{options.server}/generate", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(call, timeout=600) as answer:  # noqa: S310
                file.write(json.dumps(line(probe, json.load(answer), as_text=options.as_text)) + "\n")
    print(f"{len(asked)} prompts recorded: {options.output}")


if __name__ == "__main__":
    main()
