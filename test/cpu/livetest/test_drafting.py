"""The model package whose draft is right where its window is: its weights, and what its server loses by a word."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from cpu_model import small_models
from plain_world import naive_pages, run_until, small_world
from server_fixture import World

from sglang_dsv4.engine import relay
from sglang_dsv4.livetest.drafting import ARMS, BOTH, NO_RETRACT, ROWS, STEPS, WITHOUT, WORD, ZEROED, switch
from sglang_dsv4.livetest.drafting.weights import as_of_the_target, fill_draft, fill_target
from sglang_dsv4.miniature.forward import WrongRows
from sglang_dsv4.pools.copy_service import CopyService

SIZES = {
    "hidden_size": 256, "num_attention_heads": 4, "q_lora_rank": 128, "o_lora_rank": 128, "o_groups": 2,
    "index_n_heads": 4, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128], "vocab_size": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def tensors() -> Any:
    """(the target's, the draft's) of the engine's own models."""
    with pytest.MonkeyPatch.context() as patch, small_models(SIZES, patch) as (target, draft):
        fill_target(target)
        fill_draft(draft)
        yield target.state_dict(), draft.state_dict()


def value(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A weight as a forward sees it."""
    scale = state.get(f"{name}_scale_inv")
    weight = state[name].float()
    return weight if scale is None else weight * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


def test_the_draft_has_the_weights_of_the_targets_first_layer(tensors: Any) -> None:
    target, draft = tensors
    attention = [name for name in draft if ".self_attn." in name or "layernorm" in name]
    assert len(attention) > 10
    for name in attention:
        assert torch.equal(draft[name].float(), target[as_of_the_target(name)].float()), name


def test_only_the_first_layers_window_adds_to_the_last_token(tensors: Any) -> None:
    target, draft = tensors
    for state, layers in ((target, ("layers.0", "layers.1", "layers.2")), (draft, ("decoder",))):
        for layer in layers:
            window = value(state, f"model.{layer}.self_attn.wo_b.weight")
            assert bool(window.any()) == (layer in ("layers.0", "decoder"))
            for name in ("experts.w2_weight", "shared_experts.down_proj.weight"):
                assert not state[f"model.{layer}.mlp.{name}"].float().any(), f"{layer} {name}"
            for name in ("hc_attn_fn", "hc_ffn_fn", "hc_attn_base", "hc_ffn_base"):
                assert not state[f"model.{layer}.{name}"].any(), f"{layer} {name}: streams would differ"
        assert not state["model.hc_head_fn"].any()


def test_the_draft_gets_the_embedding_as_it_is_and_no_hidden_state(tensors: Any) -> None:
    target, draft = tensors
    embedding = target["model.embed_tokens.weight"].float()
    assert torch.equal(embedding.abs(), torch.ones_like(embedding)), "exact in fp8, and normed already"
    assert torch.equal(value(draft, "model.e_proj.weight"), torch.eye(SIZES["hidden_size"]))
    assert not value(draft, "model.h_proj.weight").any()


def test_the_package_offers_its_models_by_the_engines_names() -> None:
    from sglang_dsv4.livetest.drafting.deepseek_v4 import EntryClass

    assert [entry.__name__.removeprefix("DeepseekV4ForCausalLM") for entry in EntryClass] == ["", "NextN", "DSpark"]


@pytest.mark.parametrize(("block", "filled"), ((None, "weights"), (7, "recall")))
def test_the_target_goes_with_the_draft_that_its_config_has(
    monkeypatch: pytest.MonkeyPatch, block: int | None, filled: str
) -> None:
    from sglang_dsv4.livetest.drafting import deepseek_v4

    for module in (deepseek_v4.weights, deepseek_v4.recall):
        monkeypatch.setattr(module, "fill_target", lambda _, name=module.__name__: name.rsplit(".", 1)[-1])
    config = SimpleNamespace() if block is None else SimpleNamespace(dspark_block_size=block)
    assert deepseek_v4.DeepseekV4ForCausalLM.seed(SimpleNamespace(config=config)) == filled


@pytest.mark.parametrize("name", ("DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark"))
def test_a_drafts_dummy_weights_are_drawn_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from sglang_dsv4.livetest.drafting import deepseek_v4

    done: list[str] = []
    cls = getattr(deepseek_v4, name)
    draft = cls.__new__(cls)
    torch.nn.Module.__init__(draft)
    monkeypatch.setattr(deepseek_v4, "get_server_args", lambda: SimpleNamespace(load_format="dummy"))
    monkeypatch.setattr(cls, "fill", lambda _: done.append("filled") or 1)
    stock = cls.__mro__[2]
    monkeypatch.setattr(stock, "post_load_weights", lambda *_, **__: done.append("fixed up"), raising=False)
    draft.post_load_weights()
    draft.post_load_weights()
    assert done == ["filled", "fixed up", "fixed up"]


# ------------------------------------------------------------------------------------------ the switch


class Tested:
    """A decode server in miniature under the switch, without the engine's results of steps."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.file, self.out = folder / "word", io.StringIO()
        self.file.write_text(BOTH)
        self.experiment = switch.Experiment(self.file, self.out)
        patch.setattr(CopyService, "save", switch.keeping(CopyService.save, self.experiment))
        patch.setattr(CopyService, "load", switch.losing(CopyService.load, self.experiment))
        self.world = World(draft="EAGLE")

    def there_and_back(self, word: str, n: int = 300) -> tuple[dict[Any, bytes], dict[Any, bytes]]:
        """A request's rows before and after, beside one that was saved before it."""
        self.file.write_text(word)
        world, reqs = self.world, []
        for seed in (1, 2):
            req = world.admit(n, f"r{seed}-{word}")
            oracle.fill(world.pool, seed)
            before = world.read(req)
            self.experiment.retracted(req)
            world.park(req)
            reqs.append(req)
        oracle.fill(world.pool, 3)
        assert world.resume() == reqs
        return before, world.read(reqs[1])


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tested:
    return Tested(monkeypatch, tmp_path)


@pytest.mark.parametrize("word", [word for word in ARMS if word != NO_RETRACT])
def test_only_the_drafts_rows_are_lost_where_the_word_says_so(tested: Tested, word: str) -> None:
    before, after = tested.there_and_back(word)
    lost = {key[0] for key in before if before[key] != after[key]}
    assert lost == ({"draft_swa_kv"} if word in (WITHOUT, ZEROED) else set())
    rows = [after[key] for key in after if key[0] == "draft_swa_kv"]
    assert any(any(row) for row in rows) == (word != ZEROED), "rows of another request, or none"


@pytest.mark.parametrize("word", ARMS)
def test_the_state_goes_back_where_the_word_says_so(tested: Tested, word: str) -> None:
    tested.file.write_text(word)
    done: list[int] = []
    switch.unless_told(lambda _, idx: done.append(idx), tested.experiment)(None, 7)
    assert done == ([7] if word in (BOTH, ZEROED) else [])


def test_a_step_is_written_down_by_what_came_since(tested: Tested) -> None:
    req = SimpleNamespace(rid="r", output_ids=[0] * 40, req_pool_idx=3, kv=SimpleNamespace(req_pool_idx=3))
    tested.experiment.stepped(req, 2)  # never retracted
    tested.file.write_text(ROWS)
    tested.experiment.retracted(req)
    tested.experiment._loaded[3] = 0.0
    for accepted in (1, 4):
        tested.experiment.stepped(req, accepted)
        req.output_ids += [0] * accepted
    lines = [json.loads(line) for line in tested.out.getvalue().splitlines()]
    assert [line[:6] for line in lines] == [[ROWS, "r", 1, 40, 0, 1], [ROWS, "r", 1, 40, 1, 4]]
    assert lines[0][6] > 0, "seconds since the load"


def test_under_no_retract_the_next_in_turn_is_only_remembered(tested: Tested) -> None:
    tested.file.write_text(NO_RETRACT)
    reqs = [SimpleNamespace(rid=str(n), output_ids=[0] * n, sampling_params=SimpleNamespace(max_new_tokens=9))
            for n in (5, 9, 7)]  # fmt: skip
    order = switch.in_turn(lambda reqs: list(range(len(reqs))))
    room = {"enough": True}
    batch = SimpleNamespace(reqs=reqs, check_decode_mem=lambda: room["enough"], _get_decode_retraction_order=order)
    retract = switch.unless_only_remembered(lambda batch: "retracted", tested.experiment)
    for _ in range(2):
        assert retract(batch)[0] == []
    assert [hasattr(req, switch.MARK) for req in reqs] == [False, True, True], "the longest first"
    room["enough"] = False
    assert retract(batch) == "retracted", "without memory somebody has to leave"


@pytest.mark.parametrize("word", [word for word in ARMS if word != ROWS])
def test_in_a_plain_servers_own_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: str) -> None:
    """The engine's scheduler in miniature, where everything is installed: it reads wrong rows under two words."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    for owner, names in (
        (ScheduleBatch, ("_get_decode_retraction_order", "retract_decode", "release_req")),
        (SchedulerBatchResultProcessor, ("_resolve_spec_v2_tokens",)), (CopyService, ("save", "load")),
        (relay, ("put_back",)),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(owner, name, vars(owner)[name])  # as it was, afterwards
    file, out = tmp_path / "word", tmp_path / "steps.jsonl"
    file.write_text(word)
    monkeypatch.setenv(WORD, str(file))
    monkeypatch.setenv(STEPS, str(out))
    switch.install()
    with naive_pages():
        world = small_world(drafts=4, overlap=True, radix=False)
        reqs = [world.submit(range(1000 * n, 1000 * n + 400), max_new=60) for n in range(3)]
        run_until(world, lambda: all(req.seqlen > 415 for req in reqs))
        batch = world._merged()
        retracted = batch.retract_decode()[0]
        if word == NO_RETRACT:
            assert not retracted
            world.run()
        else:
            (req,) = retracted
            world.scheduler._add_request_to_queue(req, is_retracted=True)
            with pytest.raises(WrongRows, match="draft") if word in (WITHOUT, ZEROED) else contextlib.nullcontext():
                world.run()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert bool(lines) == (word in (NO_RETRACT, BOTH))
    assert {line[0] for line in lines} <= {word} and len({line[1] for line in lines}) <= 1
    assert [line[4] for line in lines] == sorted(line[4] for line in lines)
