"""Writes a GGUF file out as a folder of safetensors in bfloat16: vLLM reads no GGUF of this kind.

`PYTHON dequantise.py FILE FOLDER`, where PYTHON is an environment that has transformers.
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
