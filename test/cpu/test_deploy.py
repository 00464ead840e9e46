"""The manifests and the Dockerfile of docs/deploy start servers that are covered, in containers that hold them."""

import importlib.util
import os
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import yaml
from fresh_process import ROOT, run_fresh

from sglang_dsv4 import __version__
from sglang_dsv4.cli import doctor_server
from sglang_dsv4.cli import main as cli
from sglang_dsv4.cli.doctor_server import MEASURED
from sglang_dsv4.cli.launch_command import read_command
from sglang_dsv4.cli.serve import MODELS, MODELS_VARIABLE
from sglang_dsv4.engine.early_send import switch as early_send
from sglang_dsv4.engine.releases import TESTED
from sglang_dsv4.settings import PREFIX, TABLE, read_settings
from sglang_dsv4.testing.standalone import boot

FOLDER = ROOT / "docs" / "deploy"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
PAGE = FOLDER.with_suffix(".md").read_text()
ENGINE_IMAGE, OUR_IMAGE = f"lmsysorg/sglang:v{TESTED[-1]}", f"sglang-dsv4:{__version__}"
SETTINGS = {setting.variable for setting in TABLE.values()}
LEAST_SHM = 10 << 30  # the engine's own manifests
LEAST_ENGINE = 64 << 30  # eight ranks
SECONDS_A_GIB = 0.58  # of pinning with one thread, as the doctor says


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


class Server(NamedTuple):
    """The pod and its only container, whose arguments start the engine."""

    pod: dict[str, Any]
    container: dict[str, Any]
    labels: dict[str, str]

    @property
    def environ(self) -> dict[str, str]:
        return {one["name"]: one["value"] for one in self.container["env"]}

    @property
    def command(self) -> list[str]:
        return [*self.container["command"], *self.container["args"]]

    @property
    def is_ours(self) -> bool:
        return self.container["image"] == OUR_IMAGE

    def judged(self) -> doctor_server.Server:
        boot()
        with mock.patch.dict(os.environ, self.environ):
            return doctor_server.read(read_command(self.command).arguments, None, read_settings(), MEASURED)


def pods(name: str) -> dict[str, Server]:
    found = {}
    for item in manifests(name):
        if item["kind"] == "Deployment":
            template = item["spec"]["template"]
            (container,) = template["spec"]["containers"]
            found[item["metadata"]["name"]] = Server(template["spec"], container, template["metadata"]["labels"])
            assert item["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    return found


FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
PODS = {pod: server for name in FILES for pod, server in pods(name).items()}
SERVERS = {pod: server for pod, server in PODS.items() if server.container["name"] == "server"}
EACH = pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)


def nbytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", text).groups()
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def shm(server: Server) -> int:
    (volume,) = (mount["name"] for mount in server.container["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    (made,) = (one["emptyDir"] for one in server.pod["volumes"] if one["name"] == volume)
    assert made["medium"] == "Memory"
    return nbytes(made["sizeLimit"])


def test_there_are_a_plain_server_and_a_pair():
    assert FILES == ["pair.yaml", "plain.yaml"]
    assert sorted(SERVERS) == ["dsv4-decode", "dsv4-plain", "dsv4-prefill"]
    assert [pod for pod, server in SERVERS.items() if not server.is_ours] == ["dsv4-prefill"]


def test_every_variable_of_this_package_is_a_setting_that_is_read():
    for name in (*FILES, "Dockerfile"):
        assert set(re.findall(r"\bDSV4_[A-Z_]*[A-Z]", (FOLDER / name).read_text())) <= SETTINGS, name
    for server in SERVERS.values():
        read_settings({name: text for name, text in server.environ.items() if name.startswith(PREFIX)})


@EACH
def test_its_engine_takes_the_arguments_and_it_is_covered(server):
    found = server.judged()
    assert found.refuses == ""
    assert found.stock == ("" if server.is_ours else "a prefill server retracts nothing")
    assert int(server.container["resources"]["limits"]["nvidia.com/gpu"]) == found.ranks
    assert "--enable-metrics" in server.command


@EACH
def test_its_memory_limit_holds_the_engine_the_arenas_and_dev_shm(server):
    resources = server.container["resources"]
    limit = nbytes(resources["limits"]["memory"])
    assert resources["requests"]["memory"] == resources["limits"]["memory"], "else the node evicts it"
    assert server.is_ours == ("DSV4_HOST_GB" in server.environ)
    copies = float(server.environ.get("DSV4_HOST_GB", 0)) * server.judged().arenas * 2**30
    assert shm(server) >= LEAST_SHM
    assert limit >= copies + shm(server) + LEAST_ENGINE


@EACH
def test_its_container_may_lock_memory_and_has_time(server):
    assert "IPC_LOCK" in server.container["securityContext"]["capabilities"]["add"]
    startup = server.container["startupProbe"]
    pinning = float(server.environ.get("DSV4_HOST_GB", 0)) * SECONDS_A_GIB
    assert startup["periodSeconds"] * startup["failureThreshold"] > 1800 + pinning
    (engine,) = importlib.util.find_spec("sglang").submodule_search_locations
    routes = Path(engine, "srt", "entrypoints", "http_server.py").read_text()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = server.container[probe]["httpGet"]
        assert f'@app.get("{asked["path"]}")' in routes
        assert asked["port"] in [port["name"] for port in server.container["ports"]]


@EACH
def test_its_ports_are_those_of_its_arguments(server):
    said = dict(word.removeprefix("--").split("=") for word in server.container["args"] if "=" in word)
    ports = {port["name"]: str(port["containerPort"]) for port in server.container["ports"]}
    assert ports["http"] == said["port"]
    assert ports.get("bootstrap") == said.get("disaggregation-bootstrap-port")


def test_the_page_has_the_sum_of_the_plain_server():
    server = SERVERS["dsv4-plain"]
    copies, mounted = int(server.environ["DSV4_HOST_GB"]), shm(server) >> 30
    own = (nbytes(server.container["resources"]["limits"]["memory"]) >> 30) - copies - mounted
    assert f"In plain.yaml these are {own}, {copies} and {mounted} GiB." in PAGE


def test_a_prefill_server_over_nixl_does_not_send_early():
    for server in SERVERS.values():
        if server.judged().sends_by_nixl:
            assert server.environ[early_send().name] == "0"
            return
    pytest.fail("no prefill server over NIXL")


@pytest.mark.parametrize("name", FILES)
def test_services_monitors_and_the_router_find_pods_and_ports(name):
    found, services = pods(name), {}
    for item in manifests(name):
        if item["kind"] == "Service":
            pod = item["spec"]["selector"]["app"]
            ports = {port["name"]: port["containerPort"] for port in found[pod].container["ports"]}
            assert all(ports[port["targetPort"]] == port["port"] for port in item["spec"]["ports"])
            services[item["metadata"]["name"]] = ports
        elif item["kind"] == "PodMonitor":
            chosen = item["spec"]["selector"]
            apps = chosen.get("matchLabels", {}).get("app")
            apps = [apps] if apps else [app for one in chosen["matchExpressions"] for app in one["values"]]
            (endpoint,) = item["spec"]["podMetricsEndpoints"]
            for server in found.values():
                has_metrics = "--enable-metrics" in server.command
                assert has_metrics == (server.labels["app"] in apps)
                assert not has_metrics or endpoint["port"] in [port["name"] for port in server.container["ports"]]
    for host, port in re.findall(r"http://([\w-]+):(\d+)", (FOLDER / name).read_text()):
        assert services[host]["http"] == int(port)


def test_images_are_a_tested_release_and_this_version():
    assert {server.container["image"] for server in PODS.values()} == {ENGINE_IMAGE, OUR_IMAGE}
    assert f"ARG SGLANG=v{TESTED[-1]}\nFROM lmsysorg/sglang:${{SGLANG}}\n" in DOCKERFILE
    build = f"docker build -f docs/deploy/Dockerfile -t {OUR_IMAGE} .\n"
    assert build in DOCKERFILE and build in PAGE
    (other,) = re.findall(r"--build-arg SGLANG=v([\d.]+)`", PAGE)
    assert other in TESTED
    assert f"\nENV {MODELS_VARIABLE}={MODELS}\n" in DOCKERFILE


def test_the_dockerfile_runs_commands_that_succeed_without_a_gpu():
    lines = [line.removeprefix("RUN ") for line in DOCKERFILE.splitlines() if line.startswith("RUN ")]
    lines = [line for line in lines if line.startswith("sglang-dsv4 ")]
    ours = [shlex.split(line)[1:] for line in lines]
    assert ours and all(words[0] in cli.COMMANDS for words in ours)
    assert all(f"\n{line}\n" in PAGE for line in lines)
    environ = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    for words in ours:
        done = run_fresh(["-m", "sglang_dsv4.cli.main", *words], environ | {MODELS_VARIABLE: MODELS})
        assert done.returncode == 0, done.stdout + done.stderr
        assert "will keep retracted requests" in done.stdout
