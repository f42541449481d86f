"""Convert a GGUF file to a folder of bfloat16 safetensors; vLLM cannot read this kind of GGUF.

Run `PYTHON dequantise.py FILE FOLDER` with the interpreter of an environment with transformers.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    packed = {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        **packed,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, **packed).save_pretrained(target)


if __name__ == "__main__":
    main()
