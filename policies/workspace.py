"""Where things lie inside the sandbox (the paper's directories)."""

WORKING_DIR = "/testbed"
INPUT_DIR = "/testbed/documents"
OUTPUT_DIR = "/testbed/output"
SHARED_DIR = "/testbed/shared"
ANSWER_FILES = ("/testbed/output/answer.txt", "/testbed/answer.txt")
"""Where a submitted answer may be written, first found first."""
MAX_ANSWER_BYTES = 1 << 20
