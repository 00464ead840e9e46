"""The doctor's verdict on one server: by its launch arguments, its environment, its model and its GPU."""

import logging
import os
import shlex

import huggingface_hub
import pytest
import torch
from sglang.srt.arg_groups import serving_hook
from sglang.srt.runtime_context import get_context, get_platform
from sglang.srt.utils import common

from sglang_dsv4.cli import doctor_server
from sglang_dsv4.cli.launch_command import LaunchError, read_command
from sglang_dsv4.cli.launch_gpu import GPUS
from sglang_dsv4.cli.main import main
from sglang_dsv4.cli.plan_config import EXAMPLES
from sglang_dsv4.settings import OFF, Sessions, Settings, Store, read_settings
from sglang_dsv4.testing.standalone import boot

FLASH, V41 = "flash", "v41-flash"
UNIFIED = {"SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton"}
ONLINE = {"SGLANG_OPT_USE_ONLINE_COMPRESS": "1"}
PREFILL = "--disaggregation-mode prefill"
DECODE = "--disaggregation-mode decode --disaggregation-transfer-backend nixl"
EAGLE = "--speculative-algorithm EAGLE --speculative-eagle-topk 1 --speculative-num-steps"
ON = "Metadata kernels of this package: on, in decode graphs"
STOCK = "will behave as stock and reserve no host memory: "


@pytest.fixture
def judged(tmp_path):
    """Reads the launch arguments of a server with an example's config; returns the verdict."""

    def read(example, text, tp=8, **settings):
        boot()
        folder = tmp_path / example
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text((EXAMPLES / f"{example}.json").read_text())
        words = ["--model-path", str(folder), *text.split()]
        return doctor_server.paragraph(doctor_server.read(words, tp, Settings(**settings)), 64, 0)

    return read


@pytest.mark.parametrize(("example", "text", "verdict"), [
    (FLASH, DECODE, "will keep retracted requests"),
    (FLASH, f"{DECODE} {EAGLE} 3", f"{STOCK}online c128 compression with drafts"),
    (FLASH, f"{DECODE} --enable-hisparse", f"{STOCK}online c128 compression with HiSparse"),
    (V41, DECODE, "will keep retracted requests"),
    (FLASH, "", f"{STOCK}no paged SWA pool (unified_kv"),
])  # fmt: skip
def test_switches_of_the_environment_are_judged_by_what_is_beside_them(judged, monkeypatch, example, text, verdict):
    monkeypatch.setenv(*next(iter((UNIFIED if "unified" in verdict else ONLINE).items())))
    assert verdict in judged(example, text)


@pytest.mark.parametrize(("states", "part"), [
    ({}, "refuse to start: 0.015 GiB"), (ONLINE, "will keep"),
    ({"SGLANG_DSV4_COMPRESS_STATE_DTYPE": "bfloat16"}, "will keep"),
])  # fmt: skip
def test_smaller_states_than_the_config_tells_may_fit(judged, monkeypatch, states, part):
    for name, value in states.items():
        monkeypatch.setenv(name, value)
    assert part in judged(FLASH, DECODE, host_gb=0.015)


@pytest.mark.parametrize(("example", "text", "settings", "parts"), [
    (FLASH, DECODE, {}, ["(decode, 8 ranks", "will keep retracted requests", "64 GiB, reserved once and shared", ON]),
    (FLASH, "", {}, ["(plain, 8 ranks", "will keep retracted requests", "Plain serving: yes", ON, "HiSparse: no"]),
    (FLASH, "--enable-hierarchical-cache", {}, ["(plain", "will keep retracted requests", "Plain serving: yes", ON]),
    (FLASH, "--enable-hierarchical-cache --hicache-storage-backend file", {}, [f"{STOCK}a hierarchical cache with a"]),
    (FLASH, "--enable-hierarchical-cache", {"layout": "page-major"}, ["refuse to start", "a hierarchical cache"]),
    (FLASH, "--enable-pdmux", {}, [f"{STOCK}PD multiplexing"]),
    (FLASH, "", {"plain": "off", "prep": "off"}, [f"{STOCK}DSV4_PLAIN=off", "off: DSV4_PREP=off"]),
    (FLASH, "", {"enabled": False}, [f"{STOCK}DSV4_ENABLED=0"]),
    (FLASH, "--disaggregation-mode prefill", {}, ["(prefill", f"{STOCK}a prefill server retracts nothing"]),
    (FLASH, f"{DECODE} --disaggregation-decode-retraction-backup none", {}, [f"{STOCK}retraction backup is none"]),
    (FLASH, f"{DECODE} --kv-canary log", {}, [f"{STOCK}--kv-canary keeps checksums"]),
    (FLASH, f"{DECODE} {EAGLE} 3", {}, ["will keep retracted requests"]),
    (FLASH, f"{DECODE} {EAGLE} 9", {}, [f"{STOCK}10 draft tokens: more than 8"]),
    (FLASH, f"{DECODE} --enable-hisparse", {}, ["rows are kept on the host", "off: HiSparse reads its own mapping"]),
    (FLASH, f"{DECODE} --enable-hisparse {EAGLE} 3", {}, [f"{STOCK}HiSparse keeps the history"]),
    (FLASH, "--enable-dp-attention --dp-size 8", {}, ["64 GiB for each of 8 arenas, 512.0 GiB together"]),
    (FLASH, DECODE, {"share": "off"}, ["64 GiB for each of 8 arenas, 512.0 GiB together"]),
    (FLASH, "--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:5", {}, ["4 ranks on this machine"]),
    (V41, "", {}, ["will keep retracted requests", "Plain serving: yes", "off: compression ratios [1, 2]"]),
    (V41, "--enable-encoder-swa-bounded-replay --max-running-requests 8", {}, [f"{STOCK}encoder SWA bounded replay"]),
    (V41, DECODE, {"layout": "page-major"}, ["refuse to start: DSV4_LAYOUT=page-major", "compression ratios"]),
    (FLASH, DECODE, {"host_gb": 0.001}, ["refuse to start: 0.001 GiB of host memory", "raise DSV4_HOST_GB"]),
    (FLASH, DECODE, {"host_gb": 0.016}, ["will keep retracted requests"]),  # a page, and the longest tail
], ids=str)  # fmt: skip
def test_one_server_is_judged_by_its_launch_arguments(judged, example, text, settings, parts):
    """By the functions that refuse in the server, on what the engine resolves; the machine has no GPU."""
    verdict = judged(example, text, **settings)
    assert not [part for part in parts if part not in verdict], verdict


FILES = Store("file", "/nvme/dsv4")


@pytest.mark.parametrize(("text", "settings", "part"), [
    ("", {"store": FILES}, "Store: sessions are written to it, and read from it."),
    ("", {"store": FILES, "sessions": OFF}, "Store: no: DSV4_SESSIONS=off."),
    ("--enable-hierarchical-cache", {"store": FILES}, "Store: no: beside a hierarchical cache"),
    (DECODE, {"store": FILES}, "Store: answers are written to it, for the prefill server's next turns."),
    (f"{DECODE} {EAGLE} 3", {"store": FILES, "sessions": OFF}, "Store: answers are written"),
    (DECODE, {"store": FILES, "plain": "off"}, "Store: no: DSV4_PLAIN=off."),
    (f"{DECODE} --enable-hisparse", {"store": FILES}, "Store: no: HiSparse, whose c4 rows lie in a host pool"),
    (f"{DECODE} --disaggregation-transfer-backend fake", {"store": FILES}, "Store: no: transfers by fake"),
    (f"{DECODE} --disaggregation-decode-enable-radix-cache", {"store": FILES},
     "Store: no: --disaggregation-decode-enable-radix-cache."),
    (f"{DECODE} --disaggregation-decode-retraction-backup none", {"store": FILES}, STOCK),
    (f"{DECODE} --pp-size 2", {"store": FILES}, "Store: no: pipeline parallelism"),
    (f"{DECODE}", {"store": FILES, "share": "off"}, "Store: no: tensor-parallel ranks that do not share"),
])  # fmt: skip
def test_a_store_is_told_with_the_reason_against_it(judged, text, settings, part):
    verdict = judged(FLASH, text, **settings)
    assert part in verdict, verdict
    assert "Store" not in judged(FLASH, text, **settings | {"store": Store()})


ASKED = Sessions()
KEPT, NOT_KEPT = "Sessions: yes, in all host memory that no", "Sessions: no, and no memory for them: "


@pytest.mark.parametrize(("text", "settings", "part"), [
    ("", {"sessions": OFF}, f"{NOT_KEPT}DSV4_SESSIONS=off."),
    ("", {}, f"{KEPT} retracted request holds (DSV4_SESSIONS=plain, the default)."),
    ("", {"sessions": ASKED}, KEPT),
    ("", {"sessions": Sessions(most_gib=8.0)}, "Sessions: yes, in at most 8 GiB of the host memory (DSV4_SESSIONS=8)."),
    (f"{EAGLE} 3", {"sessions": ASKED}, KEPT),
    ("--enable-dp-attention --dp-size 8", {"sessions": ASKED, "share": "off"}, KEPT),
    (DECODE, {"sessions": ASKED}, f"{NOT_KEPT}prompts come to a decode server computed"),
    (PREFILL, {"sessions": ASKED}, KEPT),
    (PREFILL, {"sessions": ASKED}, "will keep finished prompts in host memory: 64 GiB, reserved once"),
    (PREFILL, {}, f"{STOCK}a prefill server retracts nothing"),
    (f"{PREFILL} --enable-hierarchical-cache", {"sessions": ASKED}, f"{STOCK}beside a hierarchical cache"),
    (f"{PREFILL} --pp-size 2", {"sessions": ASKED}, f"{STOCK}pipeline parallelism"),
    ("--disable-radix-cache", {"sessions": ASKED}, f"{NOT_KEPT}there is no prefix cache"),
    ("--enable-hisparse --disable-radix-cache", {"sessions": ASKED}, f"{NOT_KEPT}there is no prefix cache"),
    ("--enable-hierarchical-cache", {"sessions": ASKED}, f"{NOT_KEPT}beside a hierarchical cache"),
    ("--pp-size 2", {"sessions": ASKED}, f"{NOT_KEPT}this server is as stock"),
    ("", {"sessions": ASKED, "share": "off"}, f"{NOT_KEPT}tensor-parallel ranks that do not share"),
    ("--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:5", {"sessions": ASKED}, f"{NOT_KEPT}tensor-parallel ranks"),
    ("", {"sessions": ASKED, "plain": "off"}, f"{NOT_KEPT}this server is as stock"),
], ids=str)  # fmt: skip
def test_it_says_whether_sessions_are_kept_and_why_not(judged, text, settings, part):
    verdict = judged(FLASH, text, **settings)
    assert part in verdict, verdict


def test_reading_the_arguments_leaves_the_process_as_it_was(judged):
    judged(FLASH, "")
    environ, handlers, args = dict(os.environ), logging.getLogger().handlers[:], get_context().server_args
    assert "decode" in judged(V41, DECODE)
    assert dict(os.environ) == environ and logging.getLogger().handlers == handlers
    assert get_context().server_args is not args, "boot made anew"
    assert get_context().server_args.model_path == "dummy"


@pytest.mark.parametrize("argv", [
    ["flash"], ["pro", "--ranks", "8"], ["v41-flash"], ["flash", "--hisparse"], ["v41-flash", "--sessions", "4"],
], ids=" ".join)  # fmt: skip
def test_the_engine_takes_the_command_that_plan_prints(capsys, argv):
    assert main(["plan", *argv, "--tokens", "4096"]) == 0
    command = read_command(shlex.split(capsys.readouterr().out.splitlines()[-1].replace("MODEL", f"V4-{argv[0]}")))
    boot()
    settings = read_settings(command.variables)
    server = doctor_server.read(command.arguments, None, settings)
    assert not server.refuses and not server.stock


def test_plan_refuses_what_the_engine_refuses(capsys, judged):
    assert main(["plan", "v41-flash", "--hisparse"]) == 2
    assert "does not serve DeepSeek-V4.1 with HiSparse" in capsys.readouterr().err
    with pytest.raises(LaunchError, match="HiSparse"):
        judged(V41, "--enable-hisparse")


# ------------------------------------------------------------------------------------------- a GPU that is not here

FP4_INDEXER, MEGAMOE = "--enable-deepseek-v4-fp4-indexer", "--moe-a2a-backend megamoe"
REFUSED = "the engine refuses these arguments: "


@pytest.fixture
def read(monkeypatch):
    """Reads the arguments of a server whose model is not here; returns the verdict, or why the engine refuses."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(words, gpu=None, model="deepseek-ai/DeepSeek-V4-Flash", **settings):
        boot()
        try:
            server = doctor_server.read(["--model-path", model, *words.split()], 8, Settings(**settings), gpu)
        except LaunchError as error:
            return str(error)
        return doctor_server.paragraph(server, 64, 0)

    return run


@pytest.mark.parametrize(("words", "gpu", "part"), [
    ("", None, "Judged for sm90, as no GPU is here (--gpu names another)."),
    (MEGAMOE, None, "Judged for sm90"),
    (FP4_INDEXER, None, "Judged for sm100: the engine refuses this on sm90."),
    (FP4_INDEXER, "sm90", f"{REFUSED}{FP4_INDEXER} requires SM100"),
    (FP4_INDEXER, "sm100", "will keep retracted requests"),
    (FP4_INDEXER, "sm120", "Judged for sm120."),
    (FP4_INDEXER, "gfx950", "Judged for gfx950."),
    (MEGAMOE, "sm120", f"{REFUSED}--moe-a2a-backend megamoe needs"),
    ("--dsv4-attn-backend trtllm", "sm100", f"{STOCK}uniform fp8 rows (--dsv4-attn-backend trtllm)"),
    ("--dsv4-attn-backend trtllm", "sm90", f"{REFUSED}--dsv4-attn-backend trtllm requires"),
    (f"{DECODE} --disaggregation-ib-device mlx5_0", None, "--disaggregation-ib-device is not checked."),
])  # fmt: skip
def test_a_recipe_is_judged_for_the_gpu_that_it_is_for(read, words, gpu, part):
    verdict = read(words, gpu)
    assert part in verdict, verdict


def test_other_gpus_change_nothing_behind_the_verdict(read):
    for gpu in GPUS:
        read("", gpu)
    assert not common.is_sm100_supported() and not get_platform().is_sm100
    assert not serving_hook.is_gfx95_supported() and not get_platform().is_hip


def test_page_major_is_refused_for_the_gpu_named(read):
    assert "refuse to start" not in read(DECODE, "sm90", layout="page-major")
    assert "a GPU of compute capability (10, 0)" in read(DECODE, "sm100", layout="page-major")


@pytest.mark.parametrize(("words", "gpu", "reason"), [
    ("", "gfx950", "the attention backend of ROCm"),
    ("--dsv4-attn-backend trtllm", "sm100", "uniform fp8 rows"),
])  # fmt: skip
def test_no_metadata_is_promised_beside_another_attention_backend(read, words, gpu, reason):
    assert f"Metadata kernels of this package: off: {reason}" in read(words, gpu)


def test_no_metadata_is_promised_of_unified_kv(read, monkeypatch):
    monkeypatch.setenv(*next(iter(UNIFIED.items())))
    assert "Metadata kernels of this package: off: no paged SWA pool (unified_kv" in read("")


# ----------------------------------------------------------------------------------------- a model that is not here

DSPARK = "--speculative-algorithm DSPARK"


@pytest.mark.parametrize(("model", "words", "parts"), [
    ("deepseek-ai/DeepSeek-V4.1-Flash", DSPARK, ["judged as DeepSeek-V4.1-Flash, as its name says", "will keep"]),
    ("x/deepseek-v4_1-flash", "", ["judged as DeepSeek-V4.1-Flash,", "off: compression ratios [1, 2]"]),
    ("deepseek-ai/DeepSeek-V4-Flash-0731", DSPARK, ["judged as DeepSeek-V4-Flash, as its name says", "will keep"]),
    ("deepseek-ai/DeepSeek-V4-Pro-0813", DSPARK, ["judged as DeepSeek-V4-Pro, as its name says", "will keep"]),
    ("deepseek-ai/DeepSeek-V4-Pro-DSpark", DSPARK, ["judged as DeepSeek-V4-Pro, as its name says", "will keep"]),
    ("deepseek-ai/DeepSeek-V4-Pro", "", ["judged as DeepSeek-V4-Pro, without drafts of its own"]),
    ("deepseek-ai/DeepSeek-V4-Flash", DSPARK, [REFUSED, "--speculative-draft-model-path", "without drafts"]),
    ("deepseek-ai/DeepSeek-V4-Flash", f"{DSPARK} --speculative-draft-model-path a/b",
     ["will keep", "a/b (drafts) is not on this machine"]),
    ("meta-llama/Llama-3.1-8B", "", ["Llama-3.1-8B is not on this machine: judged as DeepSeek-V4-Flash, though its"]),
])  # fmt: skip
def test_a_model_that_is_not_here_is_judged_by_its_name(read, model, words, parts):
    verdict = read(words, model=model)
    assert not [part for part in parts if part not in verdict], verdict
    assert verdict.startswith((f"{model} is not on this machine", REFUSED))


def test_a_model_in_the_cache_of_hugging_face_is_here(read, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda model, file: str(tmp_path / file))
    (tmp_path / "config.json").write_text((EXAMPLES / "v41-flash.json").read_text())
    verdict = read("", model="someone/something")
    assert verdict.startswith("This server") and "compression ratios [1, 2]" in verdict


# --------------------------------------------------------------------------------------- requests that return choices


@pytest.mark.parametrize(("words", "said"), [
    ("--enable-return-routed-experts",
     "1,032 bytes a token of DSV4_HOST_GB (43 layers of 24 for --enable-return-routed-experts)."),
    (f"{DECODE} --enable-return-routed-experts --enable-return-indexer-topk", "44,040 bytes a token of DSV4_HOST_GB ("),
    (f"{DECODE} --pp-size 2 --enable-return-routed-experts", "is left to the engine (ChoicesBySlot)."),
    ("--pp-size 2 --enable-return-routed-experts", None), ("", None),
])  # fmt: skip
def test_it_says_what_becomes_of_the_choices_that_requests_return(read, words, said):
    """said: None: there is no sentence."""
    verdict = read(words)
    assert (said or "") in verdict
    assert ("bytes a token of" in verdict or "ChoicesBySlot" in verdict) is (said is not None)


@pytest.mark.parametrize("sessions", [Sessions(asked=False), ASKED])
def test_sessions_beside_choices_are_kept_where_they_were_asked_for(judged, sessions):
    verdict = judged(FLASH, "--enable-return-routed-experts", sessions=sessions)
    assert ("Sessions: yes" in verdict) is sessions.asked
    assert ("DSV4_SESSIONS=auto keeps sessions all the same" in verdict) is not sessions.asked
