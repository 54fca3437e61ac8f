"""In a pod and before one: the variables of pods, and jobs that kubectl is given."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml
from published_schema import mistakes

from accel_core import Job, LaunchConfig, LaunchError
from accel_kubernetes.config import KubernetesConfig
from accel_kubernetes.launcher import KubernetesLauncher
from accel_kubernetes.manifest import manifest
from accel_kubernetes.pod import Pod
from accel_testing.patience import patience

POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
    "PET_NPROC_PER_NODE": "auto",
}
"""What Kubeflow's trainer sets: pkg/runtime/framework/plugins/torch/torch.go."""
COMMAND = (sys.executable, "-m", "accel_core", "launch", "train.py")
JOB = Job(argv=(), command=COMMAND, nodes=2)
KUBECTL = """#!/bin/sh
printf '%s\\n' "$@" > {folder}/words
cat > {folder}/sent
{ends}
"""


@pytest.fixture
def pod(monkeypatch):
    """The variables of a pod around this process."""
    for name, text in POD.items():
        monkeypatch.setenv(name, text)


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """Put a stand-in for kubectl on PATH that notes what it is given, and ends so."""

    def put(ends: str) -> None:
        program = tmp_path / "kubectl"
        program.write_text(KUBECTL.format(folder=tmp_path, ends=ends))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


def allocation(**launch):
    return KubernetesLauncher(KubernetesConfig(), None).allocation(LaunchConfig(**launch))


@pytest.mark.usefixtures("pod")
def test_a_pod_of_a_trainjob_is_a_node():
    found = allocation()

    assert (found.nodes, found.node_rank, found.address) == (2, 1, "train-node-0-0.train")
    assert found.job_id == "kubernetes-train-node-0-0.train"


def test_a_pod_of_a_jobset_finds_what_its_manifest_says(monkeypatch):
    made = yaml.safe_load(manifest(JOB, KubernetesConfig(image="i")))
    container = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each.get("value", "1"))  # of a field, the pod's index

    found = allocation()

    assert (found.nodes, found.node_rank) == (2, 1)
    assert found.address.startswith(made["metadata"]["name"])


@pytest.mark.parametrize("absent", ["KUBERNETES_SERVICE_HOST", "PET_NNODES"])
@pytest.mark.usefixtures("pod")
def test_elsewhere_there_is_no_allocation(absent, monkeypatch):
    monkeypatch.delenv(absent)

    assert allocation() is None


@pytest.mark.usefixtures("pod")
def test_a_lonely_pod_is_launched_as_without_kubernetes(monkeypatch):
    monkeypatch.setenv("PET_NNODES", "1")

    assert allocation(processes_per_node=4) is None


@pytest.mark.usefixtures("pod")
def test_a_place_that_the_user_names_is_the_users_to_divide():
    assert allocation(nodes=2, node_rank=1, rendezvous="10.0.0.1:29500") is None


@pytest.mark.parametrize(
    ("name", "text"), [("PET_NODE_RANK", None), ("PET_NNODES", "1:4"), ("PET_MASTER_ADDR", "")]
)
def test_variables_that_tell_no_place_are_named(name, text):
    variables = {key: each for key, each in {**POD, name: text}.items() if each is not None}

    with pytest.raises(LaunchError, match=rf"{name} is .*\nset PET_NNODES and .* --launcher torchrun"):
        Pod.around(variables)


@pytest.mark.usefixtures("pod")
def test_another_number_of_pods_than_asked_for_is_refused():
    with pytest.raises(
        LaunchError, match=r"3 nodes were asked for \(launch.nodes\), and this job has 2 pods"
    ):
        allocation(nodes=3)
    assert allocation(nodes=3, min_nodes=2, max_restarts=1).nodes == 2


def test_two_pods_start_the_ranks_of_one_job(tmp_path, start_command):
    (tmp_path / "train.py").write_text("import os\nprint(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE')))")
    place = {"PET_MASTER_ADDR": "localhost", "PET_NPROC_PER_NODE": "8"}
    keep = {name: text for name, text in os.environ.items() if not name.startswith(("ACCEL_", "PET_"))}
    pods = [
        start_command(
            [*COMMAND[:4], "--device", "cpu", "-n", "2", "train.py"],
            env={**keep, **POD, **place, "PET_NODE_RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ended = [each.communicate(timeout=patience(120)) for each in pods]

    assert [each.returncode for each in pods] == [0, 0], ended
    assert sorted("".join(out for out, _ in ended).splitlines()) == ["0 4", "1 4", "2 4", "3 4"]
    assert "2 nodes x 2 = 4 processes" in ended[0][1]
    assert "PET_NPROC_PER_NODE is 8, and each pod starts 2" in ended[0][1]
    assert ended[1][1] == ""


def test_kubectl_is_given_the_manifest_and_its_own_commands_come_back(kubectl, tmp_path):
    kubectl("echo jobset.jobset.x-k8s.io/train-1a2b3c")
    config = KubernetesConfig(image="i", options="--context=prod --namespace=team")

    job = KubernetesLauncher(config, None).submit(JOB)

    words = (tmp_path / "words").read_text().split()
    assert words == ["create", "--filename=-", "--output=name", "--context=prod", "--namespace=team"]
    assert mistakes((tmp_path / "sent").read_text()) == []
    where = "--context=prod --namespace=team"
    assert job.id == "jobset.jobset.x-k8s.io/train-1a2b3c"
    assert job.watch == f"kubectl get {job.id} --watch {where}"
    assert job.cancel == f"kubectl delete {job.id} {where}"
    assert job.logs.startswith(
        "kubectl logs --follow --prefix --tail=-1 --selector=jobset.sigs.k8s.io/jobset-name="
    )
    assert job.logs.endswith(f"=train-1a2b3c --max-log-requests=2 {where}")


def test_what_kubectl_refuses_is_told(kubectl):
    kubectl("echo 'error: no matches for kind \"JobSet\"' >&2; exit 1")

    with pytest.raises(LaunchError, match='kubectl refused the job: error: no matches for kind "JobSet"\n'):
        KubernetesLauncher(KubernetesConfig(image="i"), None).submit(JOB)


def test_without_kubectl_the_manifest_is_shown_and_nothing_is_sent(tmp_path, run_command):
    (tmp_path / "train.py").write_text("")
    words = ["--launcher", "kubernetes", "--nodes", "2", "--kubernetes.image", "i", "train.py"]

    def submit(*more: str) -> subprocess.CompletedProcess[str]:
        return run_command(
            [sys.executable, "-m", "accel_core", "submit", *more, *words],
            env={"PATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    shown = submit("--dry-run")
    text = shown.stdout.partition("kubectl create --filename=- --output=name <<'END'\n")[2]
    assert shown.returncode == 0, shown.stderr
    assert mistakes(text.removesuffix("END\n")) == []
    sent = submit()
    assert sent.returncode == 1
    assert sent.stderr.startswith("accel: there is no kubectl on PATH\n")


def test_options_of_a_job_that_is_handed_over_start_nothing_here(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(LaunchError, match="options of section kubernetes are of jobs that are handed over"):
        KubernetesLauncher(KubernetesConfig(image="i"), None).launch(Job(argv=("true",)))
