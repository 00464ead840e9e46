"""Few-shot gsm8k against a running server: questions, the requests that ask them, scores and the report."""
