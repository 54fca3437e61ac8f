"""Cut a custom resource definition to what manifests here use: python cut.py SOURCE COMMIT < CRD > JSON.

A field that is cut is refused by the test, and not let through.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import yaml

WORDS = ("description", "default")
UNUSED = {
    *("affinity", "dnsConfig", "ephemeralContainers", "initContainers", "lifecycle", "livenessProbe"),
    *("readinessProbe", "startupProbe", "securityContext", "topologySpreadConstraints", "podFailurePolicy"),
    *("hostAliases", "readinessGates", "resourceClaims", "schedulingGates", "overhead", "status", "os"),
    *("dependsOn", "startupPolicy", "coordinator", "volumeClaimPolicies", "initializer", "envFrom", "ports"),
    *("volumeDevices", "resizePolicy", "restartPolicyRules", "workloadRef"),
}
ONE_OF = {  # of many kinds the used ones
    "persistentVolumeClaim": {"name", "emptyDir", "persistentVolumeClaim"},
    "secretKeyRef": {"fieldRef"},
}


def cut(schema: Any) -> Any:
    """Return the schema without words, CEL rules and fields that are not used."""
    if isinstance(schema, list):
        return [cut(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: part for key, part in schema.items() if key not in WORDS and not key.startswith("x-")}
    fields = kept.pop("properties", None)
    found = {key: cut(part) for key, part in kept.items()}
    if fields is not None:
        names = next((ONE_OF[each] for each in ONE_OF if each in fields), fields.keys() - UNUSED)
        found["properties"] = {name: cut(part) for name, part in fields.items() if name in names}
    return found


if __name__ == "__main__":
    source, commit = sys.argv[1:]
    (version,) = yaml.safe_load(sys.stdin)["spec"]["versions"]
    told = {"source": source, "commit": commit, "license": "Apache-2.0", "version": version["name"]}
    whole = {"$comment": told, **cut(version["schema"]["openAPIV3Schema"])}
    sys.stdout.write(json.dumps(whole, indent=1, sort_keys=True) + "\n")
