"""Random lives of requests: the pool they live in, the model of them, and what may happen to them."""

import pytest

pytest.register_assert_rewrite("lives.pool", "lives.model", "lives.steps", "lives.refusals", "lives.accounts")
