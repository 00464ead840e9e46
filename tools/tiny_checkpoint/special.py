"""Names DeepSeek-V4's special tokens."""

from __future__ import annotations

BAR = "\uff5c"  # the full-width bar of DeepSeek's special tokens


def special(name: str) -> str:
    return f"<{BAR}{name}{BAR}>"


BOS, EOS, PAD = special("begin▁of▁sentence"), special("end▁of▁sentence"), special("▁pad▁")
