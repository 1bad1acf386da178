"""These run in a process of their own with TRITON_INTERPRET=1: test_interpreter.py starts it."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*.py"]
