#!/usr/bin/env python3
"""Run every GPU test; on a machine without a CUDA device say that none ran (exit status 3)."""

import sys

import pytest
import torch


def main() -> int:
    """Exit status of the GPU suite."""
    if not torch.cuda.is_available():
        print("no CUDA device: 0 GPU tests ran")
        return 3
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    return int(pytest.main(["-m", "gpu", "-p", "no:cacheprovider", *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
