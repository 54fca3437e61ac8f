"""Manifests against the published schemas, and what is refused before one is made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from published_schema import mistakes

from accel_core import Job, LaunchError
from accel_kubernetes.config import KubernetesConfig
from accel_kubernetes.manifest import manifest

COMMAND = ("/here/bin/python", "-m", "accel_core", "launch", "--nodes=2", "my_Train.py", "--lr", "1")
JOB = Job(argv=(), command=COMMAND, nodes=2, processes_per_node=8)
WHOLE = {
    "image": "registry/train:1",
    "resources": "nvidia.com/gpu=8,memory=64Gi",
    "volumes": "checkpoints:/checkpoints,data:/data",
}


@pytest.fixture
def pod_file(tmp_path) -> str:
    file = tmp_path / "pod.yaml"
    file.write_text("nodeSelector: {gpu: h100}\ntolerations: [{key: gpu, operator: Exists}]\n")
    return str(file)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("ACCEL_CONFIG", "ACCEL_LAUNCH_CONFIG", "ACCEL_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("job", [JOB, Job(argv=(), command=COMMAND, nodes=4, min_nodes=2)])
def test_a_manifest_is_what_the_published_schema_takes(kind, job, pod_file, monkeypatch):
    monkeypatch.setenv("ACCEL_DEBUG", "1")
    restarts = 3 if kind == "jobset" else 0

    text = manifest(job, KubernetesConfig(kind=kind, pod=pod_file, max_restarts=restarts, **WHOLE))

    assert mistakes(text) == []


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "said"),
    [
        ("jobset", "parallelism", "paralelism", "'paralelism' was unexpected"),
        ("jobset", "BlockingRecreate", "Recreated", "'Recreated' is not one of"),
        ("jobset", "parallelism: 2", "parallelism: two", "'two' is not of type 'integer'"),
        ("jobset", "mountPath", "path", "'mountPath' is a required property"),
        ("trainjob", "numNodes", "nodes", "'nodes' was unexpected"),
        ("trainjob", "claimName", "claim", "'claimName' is a required property"),
    ],
)
def test_the_schema_refuses_a_manifest_with_a_mistake(kind, right, wrong, said):
    text = manifest(JOB, KubernetesConfig(kind=kind, **WHOLE)).replace(right, wrong)

    assert any(said in mistake for mistake in mistakes(text))


def test_a_jobset_is_one_indexed_job_whose_pods_know_pod_0_by_the_headless_service():
    made = yaml.safe_load(manifest(JOB, KubernetesConfig(**WHOLE)))

    name, (group,) = made["metadata"]["name"], made["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {each["name"]: each for each in container["env"]}
    assert re.fullmatch("my-train-[0-9a-f]{6}", name)
    assert (job["completionMode"], job["parallelism"], job["completions"]) == ("Indexed", 2, 2)
    assert variables["PET_NNODES"]["value"] == "2"
    # JobSet names a pod's host <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>.
    assert variables["PET_MASTER_ADDR"]["value"] == f"{name}-{group['name']}-0-0.{name}"
    assert "job-completion-index" in variables["PET_NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert container["command"] == ["python3", *COMMAND[1:]]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8", "memory": "64Gi"}}
    assert {"name": "claim-0", "mountPath": "/checkpoints"} in container["volumeMounts"]


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("claims", ["data.v1", "shm"])  # volumes: no dots, and one is shm
def test_a_claim_may_have_a_name_that_no_volume_may_have(kind, claims):
    config = KubernetesConfig(kind=kind, **{**WHOLE, "volumes": f"{claims}:/first,other:/second"})
    made = yaml.safe_load(manifest(JOB, config))

    (pod,) = [found for found in dicts_in(made) if "containers" in found and "volumes" in found]
    claimed = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    mounts = [mount for container in pod["containers"] for mount in container["volumeMounts"]]
    assert {claimed[mount["name"]]: mount["mountPath"] for mount in mounts if mount["name"] in claimed} == {
        claims: "/first",
        "other": "/second",
    }
    assert len({volume["name"] for volume in pod["volumes"]}) == len(pod["volumes"])
    assert all(re.fullmatch("[a-z0-9-]+", volume["name"]) for volume in pod["volumes"])


def dicts_in(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    yield from ([value] if isinstance(value, dict) else [])
    for each in inner:
        yield from dicts_in(each)


def test_a_name_leaves_room_for_what_pods_add():
    job = Job(argv=(), command=(*COMMAND[:4], f"{'Long_name' * 9}.py"), nodes=1000)

    name = yaml.safe_load(manifest(job, KubernetesConfig(image="i")))["metadata"]["name"]

    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-node-0-999-abcde") <= 63


def test_all_pods_start_again_after_a_failure():
    made = yaml.safe_load(manifest(JOB, KubernetesConfig(max_restarts=2, **WHOLE)))

    assert made["spec"]["failurePolicy"] == {"maxRestarts": 2, "restartStrategy": "BlockingRecreate"}
    assert made["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0


def test_a_pod_of_an_elastic_job_starts_again_alone_and_the_job_ends_with_pod_0():
    job = Job(argv=(), command=COMMAND, nodes=4, min_nodes=2)

    made = yaml.safe_load(manifest(job, KubernetesConfig(max_restarts=5, **WHOLE)))

    pods = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert pods["backoffLimit"] == 5
    assert pods["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_an_elastic_job_whose_first_lost_pod_ends_it_is_refused():
    job = Job(argv=(), command=COMMAND, nodes=4, min_nodes=2)

    with pytest.raises(
        LaunchError, match=r"launch.min_nodes 2 .*\.max_restarts 0 .*\nset --kubernetes.max-res"
    ):
        manifest(job, KubernetesConfig(**WHOLE))


def test_a_trainjob_leaves_the_place_of_its_pods_to_kubeflow():
    made = yaml.safe_load(manifest(JOB, KubernetesConfig(kind="trainjob", runtime="ours", **WHOLE)))

    trainer = made["spec"]["trainer"]
    assert made["spec"]["runtimeRef"] == {"name": "ours"}
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert not any(
        each["name"].startswith("PET_") for each in trainer.get("env", [])
    )  # its webhook refuses them
    patch = made["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    mounts = patch["template"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "claim-1", "mountPath": "/data"} in mounts


def test_accels_variables_travel_and_paths_of_this_machine_do_not(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCEL_CONFIG", "/here/accel.yaml")
    monkeypatch.setenv("ACCEL_LAUNCH_VARIABLES", '{"TOY_MODE": "slow"}')
    monkeypatch.setenv("ACCEL__SEED", "7")
    monkeypatch.chdir(tmp_path)
    config = f"--config={Path.cwd()}/conf/accel.yaml"
    job = Job(argv=(), command=(*COMMAND[:4], config, "train.py", config), nodes=1)

    text = manifest(job, KubernetesConfig(image="i"))

    (container,) = _pods(text)["containers"]
    assert {"name": "ACCEL__SEED", "value": "7"} in container["env"]
    assert "ACCEL_CONFIG" not in text
    assert "ACCEL_LAUNCH_VARIABLES" not in text
    mine = ["--config=conf/accel.yaml", "train.py", config]
    assert container["command"][4:] == mine  # the last is the script's


def test_a_flag_of_the_script_stays_as_it_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["train.py", f"--config={tmp_path}/model.yaml"]
    job = Job(argv=(), command=(*COMMAND[:4], *words), nodes=1)

    (container,) = _pods(manifest(job, KubernetesConfig(image="i")))["containers"]

    assert container["command"][4:] == words


@pytest.mark.parametrize(
    "word", ["$(PET_NNODES)", "pa$$word", "$$(PET_NNODES)", "$HOME", "$", "a$$$(b", "$("]
)
def test_words_that_kubernetes_would_replace_arrive_as_they_are(word, monkeypatch):
    monkeypatch.setenv("ACCEL_PROJECT__PROJECT_DIR", word)
    job = Job(argv=(), command=(*COMMAND[:4], "train.py", word), nodes=1)

    (container,) = _pods(manifest(job, KubernetesConfig(image="i")))["containers"]

    assert _expanded(container["command"][-1]) == word
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert _expanded(values["ACCEL_PROJECT__PROJECT_DIR"]) == word


def _expanded(text):
    """Replace as Kubernetes' `third_party/forked/golang/expansion` does: any `$$` is one `$`."""
    return re.sub(
        r"\$(\$|\([^)]*\))?", lambda found: {"$": "$", None: "$"}.get(found.group(1), "replaced"), text
    )


def test_the_users_file_adds_to_the_pods(pod_file):
    pods = _pods(manifest(JOB, KubernetesConfig(image="i", pod=pod_file)))

    assert pods["nodeSelector"] == {"gpu": "h100"}
    assert pods["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("restartPolicy: Always", "has restartPolicy, which options set\nuse kubernetes.max_restarts"),
        ("- a", "holds no keys and values"),
        ("a: [", "cannot be read: "),
    ],
)
def test_a_file_that_is_no_addition_to_pods_is_refused(text, said, pod_file):
    Path(pod_file).write_text(text)

    with pytest.raises(LaunchError, match=said):
        manifest(JOB, KubernetesConfig(image="i", pod=pod_file))


def test_a_place_that_would_make_each_pod_node_0_is_refused():
    job = Job(argv=(), command=COMMAND, nodes=2, rendezvous="pod-0:29500")

    with pytest.raises(LaunchError, match=r"every pod would be node 0 there\nleave it out"):
        manifest(job, KubernetesConfig(image="i"))


def test_a_jobset_without_an_image_is_refused():
    with pytest.raises(LaunchError, match=r"kubernetes.image is not set\nname an image"):
        manifest(JOB, KubernetesConfig())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"volumes": "checkpoints"}, "volumes 'checkpoints' are not pairs with ':'"),
        ({"volumes": "checkpoints:here"}, "have a path that is not absolute"),
        ({"volumes": "a:/x,b:/x/"}, "mount two at /x; name another path"),
        ({"volumes": "a:/dev/shm"}, "mount two at /dev/shm; name another path"),
        ({"resources": "gpu=1,gpu=2"}, "each once"),
        ({"options": "prod"}, "are not options of kubectl"),
        ({"options": "--dry-run=server"}, "which accel submit sets; leave it out"),
        ({"kind": "trainjob", "max_restarts": 1}, "max_restarts is of jobset"),
        ({"runtime": "torch"}, "runtime is of trainjob"),
    ],
)
def test_options_that_contradict_are_refused(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        KubernetesConfig(**options)


def _pods(text: str) -> dict:
    return yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


GO: Final = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|0[obx][0-9a-fA-F]+|[yYnN]")
"""Plain words that kubectl's YAML reads as a number or a truth value, and PyYAML as text."""


class KubectlLoader(yaml.SafeLoader):
    """Reads a manifest's plain words as kubectl does."""


KubectlLoader.yaml_implicit_resolvers = {
    key: [*value] for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
KubectlLoader.add_implicit_resolver("tag:kubectl,2002:no-text", re.compile(rf"^({GO.pattern})$"), None)
KubectlLoader.add_constructor("tag:kubectl,2002:no-text", lambda *_: None)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize(
    "word", ["1e-4", "1E5", "-1e3", ".5e3", "+1", "0o17", "0b1", "y", "N", "no", "~", "1:30"]
)
def test_words_stay_text_for_kubectl(kind, word, monkeypatch):
    monkeypatch.setenv("ACCEL_WORD", word)
    job = Job(argv=(), command=(*COMMAND, word), nodes=2)

    text = manifest(job, KubernetesConfig(kind=kind, image="train:1", resources=f"memory={word}"))
    made = yaml.load(text, KubectlLoader)

    assert _values(made, "command")[0][-1] == word
    assert {"name": "ACCEL_WORD", "value": word} in _values(made, "env")[0]
    assert _values(made, "limits")[0]["memory"] == word


def _values(node: object, key: str) -> list[Any]:
    """Return the values of a key, wherever it is."""
    nodes = [*node.values()] if isinstance(node, dict) else node if isinstance(node, list) else []
    found = [node[key]] if isinstance(node, dict) and key in node else []
    return found + [value for each in nodes for value in _values(each, key)]
